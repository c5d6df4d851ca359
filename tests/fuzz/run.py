"""Coverage-guided fuzzing of the codec: `python -m tests.fuzz.run [SECONDS]` (needs atheris; the corpus is kept).

New inputs that reach new code go into tests/fuzz/corpus; `make test` replays it. A crash leaves its input in the working
directory and ends the run with another status than 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import atheris  # type: ignore[import-not-found, unused-ignore]

with atheris.instrument_imports(include=["kvproto.wire"]):
    from tests.fuzz.target import NAMES, one_input

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
VECTORS = HERE.parents[1] / "spec/v1/vectors"


def seeds() -> Iterator[bytes]:
    """Vectors, as bodies and as frames."""
    for path in VECTORS.glob("codec/*.json"):
        for case in json.loads(path.read_text())["cases"]:
            data = bytes.fromhex(case["bytes"])
            if len(data) > 2000:
                continue
            if "struct" in case:
                yield bytes([NAMES.index(case["struct"])]) + data
            else:
                yield b"\xff" + data
                if "message" in case:
                    yield bytes([NAMES.index(case["message"])]) + data[16:]
                    yield b"\xfe" + data + data


def main() -> None:
    """Run libFuzzer over the corpus and the seeds."""
    seconds = sys.argv[1] if len(sys.argv) > 1 else "60"
    CORPUS.mkdir(exist_ok=True)
    start = Path("/tmp/kvproto-fuzz-seeds")
    start.mkdir(exist_ok=True)
    for number, data in enumerate(seeds()):
        (start / f"{number:05}").write_bytes(data)
    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=10",
        "-rss_limit_mb=2048",
        str(CORPUS),
        str(start),
    ]
    atheris.Setup(arguments, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
