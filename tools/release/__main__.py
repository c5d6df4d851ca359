"""`make release`: builds what is published, proves it, and tries it.

    python -m tools.release            # everything, on all Pythons of this machine, into dist/
    python -m tools.release --quick    # make wheel-test: wheels alone, built once, on one Python, without PyTorch

Into dist/ go sdists and wheels, an SBOM of each distribution (CycloneDX), SHA256SUMS, and index.html, from which
`pip install --find-links` installs by hash. CONTRIBUTING.md says how they are published.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import kvproto
from tools.release import building, checking, trying

PARTS = ("kvproto-conformance", "kvproto-engines", "kvproto-vllm", "kvproto-sglang", "kvproto-reference")
"""The distributions beside the core."""


def main(argv: list[str] | None = None) -> int:
    """Do all steps, and say how long each took; the exit status."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="wheels alone, built once, on one Python, without PyTorch")
    args = parser.parse_args(argv)
    out = building.ROOT / ("build/wheels" if args.quick else "dist")
    epoch = int(os.environ.setdefault("SOURCE_DATE_EPOCH", _committed()))
    rmtree(out, ignore_errors=True)
    try:
        files = _quick(out) if args.quick else _whole(out, epoch)
    except trying.Failed as failed:
        print(f"failed: {failed}", file=sys.stderr)
        return 1
    size = next(path for path in files if path.match("kvproto-*.whl")).stat().st_size
    print(f"{len(files)} files of {kvproto.__version__} in {out}; the wheel kvproto has {size:,} bytes")
    return 0


def _whole(out: Path, epoch: int) -> list[Path]:
    from tools.release import records  # late: CycloneDX takes a second

    with _timed("built"):
        files = building.build(out)
        records.write(out, files, epoch)
    _empty("as they should be", list(checking.problems(files)))
    with _timed("built again"):
        differing = building.differing(files)
    _empty("the same bytes when a copy builds them elsewhere", differing)
    core = next(path for path in files if path.match("kvproto-*.whl"))
    _empty("refused if a byte of a wheel is changed", list(checking.accepted(core)))
    _try(out, kvproto.__version__)
    return files


def _quick(out: Path) -> list[Path]:
    """The core in an empty environment, and then the others beside it."""
    with _timed("built"):
        files = building.wheels(out, without="kvproto-reference")
        (out / checking.INDEX).write_text(checking.index(files))
    _empty("as they should be", list(checking.problems(files)))
    parts = [name for name in PARTS if name != "kvproto-reference"]
    with trying.environment(sys.executable) as venv:
        with _timed("kvproto in an empty environment"):
            trying.install(venv, out, f"kvproto=={kvproto.__version__}")
            trying.smoke(venv, "kvproto")
        with _timed("type-checked by mypy --strict"):
            trying.type_check(venv)
        with _timed("installed " + ", ".join(parts)):
            trying.install(venv, out, "--no-deps", "--no-index", *(f"{name}=={kvproto.__version__}" for name in parts))
        for name in parts:
            with _timed(name):
                trying.smoke(venv, name, "--quick")
    return files


def _try(out: Path, version: str) -> None:
    """Each distribution in an empty environment of each Python, with all that it needs."""
    for python in trying.pythons():
        label = subprocess.run([python, "-V"], capture_output=True, text=True).stdout.strip()
        here = python == sys.executable
        for name in ("kvproto", *PARTS):
            if name == "kvproto-reference" and not here:
                print(f"          {label}: {name} is left out, as each PyTorch takes gigabytes")
                continue
            with _timed(f"{label}: {name}"), trying.environment(python) as venv:
                trying.install(venv, out, "-c", str(building.ROOT / "constraints.txt"), f"{name}=={version}")
                trying.smoke(venv, name)
                if name == "kvproto" and here:
                    trying.type_check(venv)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Says, after what a `with` did, how much time of the processor it took."""
    begun = sum(os.times()[:4])
    yield
    print(f"{sum(os.times()[:4]) - begun:6.1f} s  {what}", flush=True)


def _empty(what: str, wrong: list[str]) -> None:
    """Raise Failed with all that is wrong, or say what is right."""
    if wrong:
        raise trying.Failed(f"not {what}:\n  " + "\n  ".join(wrong))
    print(what)


def _committed() -> str:
    """The time of the last commit, in seconds; that of a fixed day outside of a repository."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=building.ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "1580601600"


if __name__ == "__main__":
    sys.exit(main())
