"""Lines that are passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from tools.specgen.registry import ROOT

Line = tuple[str, int]
"""A file of the repository, and a line of it."""


class Lines:
    """Notes which of some lines are passed: `enter` is for `sys.settrace`, and follows functions that have one."""

    def __init__(self, wanted: Iterable[Line], first: Callable[[Line], object] = lambda line: None) -> None:
        """`first` is called when a line is passed that is not in `passed`."""
        self._wanted = {(str(ROOT / file), line): (file, line) for file, line in wanted}
        self._ours: dict[CodeType, bool] = {}
        self._first = first
        self.passed: set[Line] = set()

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Follow a function, or not."""
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = any((code.co_filename, line) in self._wanted for _, _, line in code.co_lines())
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        line = self._wanted.get((frame.f_code.co_filename, frame.f_lineno))
        if line is not None and line not in self.passed:
            self.passed.add(line)
            self._first(line)
        return self._line
