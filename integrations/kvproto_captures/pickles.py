"""Reads pickles without loading them: opcodes are walked, plain values are kept, and everything else is refused.

No class is looked up and nothing is called. An object becomes the name of its class and the map of its attributes, and
only classes that a table names are accepted.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import DEPTH, refuse
from kvproto_captures.tables import engines

__all__ = ["objects"]

_MOST_VALUES = 1 << 20
_MOST_KEY = 1 << 16
"""Bound of numbers that are keys, which are ranks; larger ones could be chosen to collide."""


@attrs.define
class _NamedClass:
    name: str


@attrs.define(eq=False)
class _Object:
    kind: str
    state: dict[str, Any]


def objects(data: bytes, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(class, attributes) of each object in a pickle, which is one or a list or map of them; raises WireError."""
    root = _Walk(path).run(data)
    items = list(root.values()) if isinstance(root, dict) else root if isinstance(root, list | tuple) else [root]
    counted = [0]
    for i, item in enumerate(items):
        if not isinstance(item, _Object):
            raise refuse(ErrorCode.BAD_TYPE, f"{path}[{i}]", "an object of a known class", type(item).__name__)
        yield item.kind, _plain(item.state, path, counted, 0)


class _Walk:
    """A pickle's stack, memo and marks, and what an opcode does with them."""

    def __init__(self, path: str) -> None:
        self.path, self.stack, self.memo, self.marks = path, list[Any](), list[Any](), list[int]()
        self.known = {name for table in engines().values() for message in table.messages for name in message.classes}

    def run(self, data: bytes) -> Any:
        """The one value that is left on the stack at the end; raises WireError."""
        try:
            for steps, (opcode, argument, _) in enumerate(pickletools.genops(data)):
                if opcode.name == "STOP":
                    break
                if steps > _MOST_VALUES:
                    raise refuse(ErrorCode.TOO_LARGE, self.path, f"{_MOST_VALUES} opcodes", "more")
                if opcode.name not in _STEPS:
                    wanted = "plain values and known classes"
                    raise refuse(ErrorCode.UNKNOWN_FIELD, self.path, wanted, f"pickle opcode {opcode.name}")
                _STEPS[opcode.name](self, argument)
            (result,) = self.stack
        except (ValueError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise refuse(ErrorCode.TRUNCATED, self.path, "a whole pickle", error or "less") from None
        return result

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def taken(self, start: int) -> list[Any]:
        """Pop everything on the stack from `start` on."""
        if not 0 <= start <= len(self.stack):
            raise IndexError("less on the stack")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def marked(self) -> list[Any]:
        return self.taken(self.marks.pop())

    def last(self, count: int) -> list[Any]:
        return self.taken(len(self.stack) - count)

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("elements without a list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("keys without a map")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is int and 0 <= key < _MOST_KEY:
                key = str(key)
            if not isinstance(key, str):
                wanted = f"a key of text, or a number below {_MOST_KEY}"
                raise refuse(ErrorCode.BAD_TYPE, self.path, wanted, type(key).__name__)
            if key in target:
                raise refuse(ErrorCode.REPEATED, self.path, "each key once", key)
            target[key] = value

    def put(self, index: int) -> None:
        if index != len(self.memo):
            raise ValueError("a memo out of order")
        self.memo.append(self.stack[-1])

    def named(self, names: list[Any]) -> None:
        for part in names:
            if not isinstance(part, str):
                raise refuse(ErrorCode.BAD_TYPE, self.path, "a class by the text of its names", type(part).__name__)
        name = ".".join(names)
        if name not in self.known:
            raise refuse(ErrorCode.UNKNOWN_FIELD, self.path, "a class that a table names", name)
        self.push(_NamedClass(name))

    def instance(self, kind: Any, arguments: Any) -> None:
        if not isinstance(kind, _NamedClass) or arguments != ():
            raise refuse(ErrorCode.BAD_TYPE, self.path, "an object without arguments", type(kind).__name__)
        self.push(_Object(kind.name, {}))

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if not isinstance(target, _Object) or not isinstance(state, dict) or target.state:
            raise refuse(ErrorCode.BAD_TYPE, self.path, "an object and its attributes", type(state).__name__)
        target.state = state


_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_STEPS: dict[str, Callable[[_Walk, Any], None]] = {
    "PROTO": lambda walk, _: None,
    "FRAME": lambda walk, _: None,
    "NONE": lambda walk, _: walk.push(None),
    "NEWTRUE": lambda walk, _: walk.push(True),
    "NEWFALSE": lambda walk, _: walk.push(False),
    **dict.fromkeys(_NUMBERS + _TEXTS, lambda walk, value: walk.push(value)),
    "MARK": lambda walk, _: walk.marks.append(len(walk.stack)),
    "EMPTY_LIST": lambda walk, _: walk.push([]),
    "APPEND": lambda walk, _: walk.extend(walk.last(1)),
    "APPENDS": lambda walk, _: walk.extend(walk.marked()),
    "EMPTY_DICT": lambda walk, _: walk.push({}),
    "SETITEM": lambda walk, _: walk.update(walk.last(2)),
    "SETITEMS": lambda walk, _: walk.update(walk.marked()),
    "EMPTY_TUPLE": lambda walk, _: walk.push(()),
    "TUPLE1": lambda walk, _: walk.push(tuple(walk.last(1))),
    "TUPLE2": lambda walk, _: walk.push(tuple(walk.last(2))),
    "TUPLE3": lambda walk, _: walk.push(tuple(walk.last(3))),
    "TUPLE": lambda walk, _: walk.push(tuple(walk.marked())),
    "MEMOIZE": lambda walk, _: walk.put(len(walk.memo)),
    "BINPUT": lambda walk, value: walk.put(value),
    "LONG_BINPUT": lambda walk, value: walk.put(value),
    "BINGET": lambda walk, value: walk.push(walk.memo[value]),
    "LONG_BINGET": lambda walk, value: walk.push(walk.memo[value]),
    "GLOBAL": lambda walk, value: walk.named(value.split(" ")),
    "STACK_GLOBAL": lambda walk, _: walk.named(walk.last(2)),
    "NEWOBJ": lambda walk, _: walk.instance(*walk.last(2)),
    "BUILD": lambda walk, _: walk.build(walk.last(1)[0]),
}
"""Opcodes that are accepted; none of them looks anything up or calls it."""


def _plain(value: Any, path: str, counted: list[int], depth: int) -> Any:
    """The value, without objects in it; raises WireError.

    Values that a pickle shares count each time, so that they cannot grow much; eight bytes of text count as a value.
    """
    counted[0] += 1 + (len(value) // 8 if isinstance(value, str | bytes) else 0)
    if depth > DEPTH or counted[0] > _MOST_VALUES:
        code = ErrorCode.TOO_DEEP if depth > DEPTH else ErrorCode.TOO_LARGE
        raise refuse(code, path, f"{DEPTH} levels, {_MOST_VALUES} values", "more")
    if isinstance(value, dict):
        return {k: _plain(v, path, counted, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, path, counted, depth + 1) for v in value]
    if not isinstance(value, str | bytes | int | None):
        raise refuse(ErrorCode.BAD_TYPE, path, "plain values", type(value).__name__)
    return value
