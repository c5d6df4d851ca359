"""What work costs in steps of the interpreter: the same on every machine, however busy it is."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any


def least_steps(work: Callable[[], object], times: int) -> int:
    """Operations of the interpreter that the cheapest of several calls takes in this thread."""
    return min(_steps(work) for _ in range(times))


def _steps(work: Callable[[], object]) -> int:
    steps = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


@contextlib.contextmanager
def calls_of(*functions: FunctionType) -> Iterator[list[FrameType]]:
    """Calls of functions in this thread meanwhile."""
    found: list[FrameType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and any(frame.f_code is each.__code__ for each in functions):
            found.append(frame)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)
