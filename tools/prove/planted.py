"""`python -m tools.prove.planted ROLE BUG`: the reference's adapter of a live engine, with a bug of `bugs.toml`."""

from __future__ import annotations

import runpy
import sys

from tools.prove import bugs
from tools.prove.judging import change
from tools.specgen.registry import ROOT


def main() -> None:
    """Plant the bug, and serve."""
    role, name = sys.argv[1:]
    (bug,) = (bug for bug in bugs.load() if bug.name == name)
    change(bug.changes)
    sys.path.insert(0, str(ROOT / "conformance/testees"))
    runpy.run_path(str(ROOT / f"conformance/testees/live_{role}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
