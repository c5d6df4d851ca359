"""The smallest question that still shows a difference, found by leaving out and making smaller, one step at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
_TRIES = 3000


def shrunk(question: Json, differs: Callable[[Json], bool]) -> Json:
    """A question that differs too; `differs` is asked at most some thousand times."""
    tries = 0
    again = True
    while again:
        again = False
        for smaller in _smaller(question):
            tries += 1
            if tries > _TRIES:
                return question
            if differs(smaller):
                question, again = smaller, True
                break
    return question


def _smaller(question: Json) -> Iterator[Json]:
    if question["op"] == "decode":
        yield from ({**question, "frame": frame.hex()} for frame in _shorter(bytes.fromhex(question["frame"])))
        return
    for path in sorted(_paths(question), key=len):
        yield from _without(question, path)


def _shorter(frame: bytes) -> Iterator[bytes]:
    """With fewer bytes, and a length that fits; then with lower ones."""
    for size in (64, 16, 4, 2, 1):
        for at in range(0, len(frame) - size + 1, max(size // 2, 1)):
            left = frame[:at] + frame[at + size :]
            if at >= 16:
                yield left[:12] + (len(left) - 16).to_bytes(4, "little") + left[16:]
    for at in range(16, len(frame)):
        if frame[at]:
            yield frame[:at] + b"\0" + frame[at + 1 :]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, (dict, list)):
            yield from _paths(inner, (*path, key))


def _without(question: Json, path: tuple[Any, ...]) -> Iterator[Json]:
    """The question without what is at a path, and with less of it."""
    if (
        path[0] == "op"
        or (len(path) == 1 and path[0] in ("source", "sink", "features"))
        or path[1:2] in (("columns",), ("windows",))
    ):
        return
    value = _at(question, path)
    found = copy.deepcopy(question)
    del _at(found, path[:-1])[path[-1]]
    yield found
    lower = []
    if isinstance(value, str) and value.isdigit() and len(value) < 30:
        lower = [str(n) for n in (0, 1, int(value) // 2, int(value) - 1) if 0 <= n < int(value)]
    elif isinstance(value, str) and len(value) > 1 and path[-1] in ("name", "value"):
        lower = [value[:1]]
    for less in lower:
        found = copy.deepcopy(question)
        _at(found, path[:-1])[path[-1]] = less
        yield found


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
