"""Coverage-guided fuzzing of the codec: `python -m tests.fuzz.run [SECONDS]`, or `make fuzz` (needs atheris).

Inputs that reach new code are kept in tests/fuzz/corpus.txt, one a line, in hex; `make test` replays them. A crash leaves
its input in the working directory and ends the run with another status than 0.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus.txt"
VECTORS = HERE.parents[1] / "spec/v1/vectors"


def seeds(names: tuple[str, ...]) -> Iterator[bytes]:
    """Vectors, as bodies and as frames."""
    for path in VECTORS.glob("codec/*.json"):
        for case in json.loads(path.read_text())["cases"]:
            data = bytes.fromhex(case["bytes"])
            if len(data) > 2000:
                continue
            if "struct" in case:
                yield bytes([names.index(case["struct"])]) + data
            else:
                yield b"\xff" + data
                if "message" in case:
                    yield bytes([names.index(case["message"])]) + data[16:]
                    yield b"\xfe" + data + data


def fuzz(folder: str, seconds: str) -> None:
    """Run libFuzzer over the corpus and the seeds; does not return."""
    import atheris  # type: ignore[import-not-found, unused-ignore]

    with atheris.instrument_imports(include=["kvproto.wire"]):
        from tests.fuzz.target import NAMES, one_input

    start = Path(folder) / "seeds"
    start.mkdir()
    for number, data in enumerate(seeds(NAMES)):
        (start / f"{number:05}").write_bytes(data)
    flags = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], *flags, f"{folder}/corpus", str(start)], one_input)
    atheris.Fuzz()


def main() -> int:
    """Unpack the corpus, fuzz in another process, pack it again."""
    if sys.argv[1:2] == ["--in"]:
        fuzz(sys.argv[2], sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "corpus"
        held.mkdir()
        for number, line in enumerate(CORPUS.read_text().split() if CORPUS.exists() else ()):
            (held / f"{number:05}").write_bytes(bytes.fromhex(line))
        status = subprocess.call([sys.executable, "-m", "tests.fuzz.run", "--in", folder, *(sys.argv[1:2] or ["60"])])
        kept = sorted({path.read_bytes() for path in held.iterdir()}, key=lambda d: (len(d), d))
        CORPUS.write_text("".join(f"{data.hex()}\n" for data in kept if data))
    return status


if __name__ == "__main__":
    sys.exit(main())
