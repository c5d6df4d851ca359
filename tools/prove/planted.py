"""`python -m tools.prove.planted FILE ROLE`: the reference's adapter of a live engine, with what `FILE` changes.

FILE is JSON: `changes`, module names with their texts; `wanted`, lines of files; and `passed`, the file to which each
wanted line is added when it is passed first.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

from tools.prove.changing import change
from tools.prove.lines import Lines
from tools.specgen.registry import ROOT

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Change modules, and serve."""
    file, role = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a mutant that hangs ends too
    planted = json.loads(Path(file).read_text())
    change(planted["changes"])
    if planted["wanted"]:
        for name in ("kvproto.source", "kvproto.sink", "kvproto.finder"):  # to follow imports would take seconds
            importlib.import_module(name)
        passed = os.open(planted["passed"], os.O_WRONLY | os.O_APPEND)
        lines = Lines(map(tuple, planted["wanted"]), lambda line: os.write(passed, json.dumps(line).encode() + b"\n"))
        threading.settrace(lines.enter)
        sys.settrace(lines.enter)
    sys.path.insert(0, str(ROOT / "conformance/testees"))
    runpy.run_path(str(ROOT / f"conformance/testees/live_{role}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
