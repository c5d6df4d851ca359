"""Pickles without loading them: opcodes are walked, plain values are kept, everything else is refused.

No class is looked up and nothing is called. An object is the name of its class and the map of its attributes, and only
classes that a table names are taken.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any

import attrs

from kvproto.foreign.tables import engines
from kvproto.foreign.values import DEPTH, refuse
from kvproto.wire.enums import ErrorCode

__all__ = ["records"]

_MOST_VALUES = 1 << 20
_MARK = object()


@attrs.define
class _Class:
    name: str


@attrs.define(eq=False)
class _Record:
    kind: str
    state: dict[str, Any]


def records(data: bytes, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(class, attributes) of each object in a pickle, which is one or a list or map of them; raises WireError."""
    made = _Walk(path).run(data)
    items = list(made.values()) if isinstance(made, dict) else made if isinstance(made, list | tuple) else [made]
    for i, item in enumerate(items):
        if not isinstance(item, _Record):
            raise refuse(ErrorCode.BAD_TYPE, f"{path}[{i}]", "an object of a known class", type(item).__name__)
        yield item.kind, _plain(item.state, path, [0], 0)


class _Walk:
    """A pickle's stack and memo."""

    def __init__(self, path: str) -> None:
        self.path, self.stack, self.memo = path, list[Any](), list[Any]()
        self.known = {name for e in engines().values() for m in e.messages for name in m.classes}

    def run(self, data: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name == "STOP":
                    break
                self.step(opcode.name, argument)
            (result,) = self.stack
        except (ValueError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise refuse(ErrorCode.TRUNCATED, self.path, "a whole pickle", error or "less") from None
        return result

    def step(self, name: str, argument: Any) -> None:
        """One opcode."""
        if name in _SKIPPED:
            return
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _ARGUMENTS:
            self.stack.append(argument)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.tuple(_TUPLES[name])
        elif name == "MARK":
            self.stack.append(_MARK)
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            self.many(name)
        elif name == "APPEND":
            value = self.stack.pop()
            self.list_().append(value)
        elif name == "SETITEM":
            value, key = self.stack.pop(), self.stack.pop()
            self.set(self.stack[-1], [key, value])
        elif name == "MEMOIZE":
            self.memo.append(self.stack[-1])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.put(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.named(argument)
        elif name in ("NEWOBJ", "BUILD"):
            self.object(name)
        else:
            raise refuse(ErrorCode.UNKNOWN_FIELD, self.path, "plain values and known classes", f"pickle opcode {name}")

    def list_(self) -> list[Any]:
        if not isinstance(self.stack[-1], list):
            raise ValueError("elements without a list")
        return self.stack[-1]

    def tuple(self, count: int) -> None:
        items = tuple(self.stack[len(self.stack) - count :])
        if len(items) < count:
            raise ValueError("a tuple of less")
        del self.stack[len(self.stack) - count :]
        self.stack.append(items)

    def many(self, name: str) -> None:
        start = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[start + 1 :]
        del self.stack[start:]
        if name == "TUPLE":
            self.stack.append(tuple(items))
        elif name == "APPENDS":
            self.list_().extend(items)
        else:
            self.set(self.stack[-1], items)

    def set(self, target: Any, items: list[Any]) -> None:
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("keys without a map")
        for key, value in zip(items[::2], items[1::2], strict=True):
            flat = key if isinstance(key, tuple) else (key,)
            if not all(isinstance(k, str | int) for k in flat) or key in target:
                raise refuse(ErrorCode.REPEATED, self.path, "each key once, of text or numbers", type(key).__name__)
            target[key] = value

    def put(self, index: int) -> None:
        if index != len(self.memo):
            raise ValueError("a memo out of order")
        self.memo.append(self.stack[-1])

    def named(self, argument: Any) -> None:
        if argument is None:
            name, module = self.stack.pop(), self.stack.pop()
            argument = f"{module} {name}"
        dotted = str(argument).replace(" ", ".")
        if dotted not in self.known:
            raise refuse(ErrorCode.UNKNOWN_FIELD, self.path, "a class that a table names", dotted)
        self.stack.append(_Class(dotted))

    def object(self, name: str) -> None:
        value = self.stack.pop()
        target = self.stack[-1]
        if name == "NEWOBJ" and isinstance(target, _Class) and value == ():
            self.stack[-1] = _Record(target.name, {})
        elif name == "BUILD" and isinstance(target, _Record) and isinstance(value, dict) and not target.state:
            target.state = value
        else:
            raise refuse(ErrorCode.BAD_TYPE, self.path, "an object and its attributes", type(value).__name__)


def _plain(value: Any, path: str, seen: list[int], depth: int) -> Any:
    """Values without objects; what a pickle shares is counted each time, so that little cannot become much."""
    seen[0] += 1
    if depth > DEPTH or seen[0] > _MOST_VALUES:
        code = ErrorCode.TOO_DEEP if depth > DEPTH else ErrorCode.TOO_LARGE
        raise refuse(code, path, f"{DEPTH} levels, {_MOST_VALUES} values", "more")
    if isinstance(value, dict):
        return {str(k): _plain(v, path, seen, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, path, seen, depth + 1) for v in value]
    if not isinstance(value, str | bytes | int | None):
        raise refuse(ErrorCode.BAD_TYPE, path, "plain values", type(value).__name__)
    return value


_SKIPPED = {"PROTO", "FRAME"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES",
    "BINBYTES", "BINBYTES8",
}  # fmt: skip
_EMPTY = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
