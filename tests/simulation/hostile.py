"""Frames that are not as they were sent: changed by the tables of the registry, cut, sent twice, or made by a liar."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import attrs
import numpy as np

from kvproto.wire import enums, messages, tables
from kvproto.wire.codec import decode, encode
from kvproto.wire.fields import BITS
from tests.simulation.network import Frames, kind_of
from tests.simulation.simulated import Simulation
from tests.simulation.story import Fault

_ONCE = {"Chunk", "Credit", "Data", "Kept"}
"""Messages that are never sent again, so that no connection delivers one twice."""


def change(fault: Fault, simulation: Simulation) -> Callable[[bytes], Frames]:
    """A function that changes a frame as a fault and the seed say."""
    chance = random.Random(simulation.seed << 8 | fault.number)

    def repeated(frame: bytes) -> Frames:
        if kind_of(frame) in _ONCE:
            return [(frame, 0.0)]
        simulation.reached["frame repeated"] += 1
        return [(frame, 0.0), (frame, chance.choice((0.0, min(fault.seconds, 10.0))))]

    def changed(frame: bytes) -> Frames:
        simulation.reached["frame changed"] += 1
        kind = chance.choice(("field", "field", "field", "cut", "byte"))
        if kind == "cut":
            return [(frame[: chance.randrange(len(frame))], 0.0)]
        if kind == "field":
            with suppress(Exception):
                return [(encode(_other(decode(frame), chance)), 0.0)]
        return [(_flipped(frame, chance), 0.0)]

    return changed if fault.kind == "change frame" else repeated


def _other(message: Any, chance: random.Random) -> Any:
    """The message with one field changed, perhaps deep within."""
    rows = [row for row in tables.FIELDS[type(message).__name__] if getattr(message, row[1]) is not None]
    row = chance.choice(rows)
    return attrs.evolve(message, **{row[1]: _near(row, getattr(message, row[1]), chance)})


def _near(row: tables.Field, value: Any, chance: random.Random) -> Any:
    """Another value of a field: one that lies near, or any."""
    if chance.random() < 0.3:
        return made(row, chance)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, 0, value ^ 1 << chance.randrange(16)))
    if isinstance(value, bytes) and value:
        return bytes([value[0] ^ 1]) + value[1:]
    if isinstance(value, str):
        return value + "x"
    if attrs.has(type(value)):
        return _other(value, chance)
    if isinstance(value, tuple) and value:
        at = chance.randrange(len(value))
        if attrs.has(type(value[at])) and chance.random() < 0.6:
            return (*value[:at], _other(value[at], chance), *value[at + 1 :])
        return chance.choice((value[:-1], value[::-1], (*value, value[-1])))
    if isinstance(value, np.ndarray) and value.size:
        other = value.copy()
        other[chance.randrange(value.size)] ^= 1 << chance.randrange(6)
        return other
    return made(row, chance)


def made(row: tables.Field, chance: random.Random) -> Any:
    """Any value that the registry allows in a field."""
    _, _, type_, _, low, high, length = row
    if type_.startswith("list<"):
        inner = (0, "", type_[5:-1], True, None, None, None)
        return tuple(made(inner, chance) for _ in range((low or 0) + chance.randrange(3)))
    if type_.startswith("array<"):
        return np.array([chance.choice(_NUMBERS[:6]) for _ in range((low or 0) + chance.randrange(4))], np.uint64)
    if type_.startswith("struct:"):
        return message(type_[7:], chance)
    if type_.startswith("enum:"):
        name = type_[5:]
        unknown = [0xF000 + chance.randrange(0xFFF)] if name in tables.OPEN_ENUMS else []
        return chance.choice([*getattr(enums, name), *unknown])
    if type_ == "bytes":
        return chance.randbytes(length or chance.randrange(low or 0, max((low or 0) + 1, 40)))
    if type_ == "str":
        return chance.choice(("p", "decode-d", "x", "y" * 40))
    if type_ == "bool":
        return chance.random() < 0.5
    most = high if high is not None else (1 << BITS[type_]) - 1
    return min(max(chance.choice((*_NUMBERS, most)), low or 0), most)


_NUMBERS = 0, 1, 2, 3, 7, 23, 1000, 1 << 16, (1 << 32) - 1, 1 << 63


def message(name: str, chance: random.Random, **known: Any) -> Any:
    """Any message or struct; it may break rules of the registry that hold across fields."""
    fields = {row[1]: made(row, chance) for row in tables.FIELDS[name] if row[3] or chance.random() < 0.5}
    return getattr(messages, name)(**fields | {field: known[field] for field in known if field in fields})


class Liar:
    """What becomes of the frames of a hostile peer: it speaks right for a while, and then lies now and then."""

    def __init__(self, simulation: Simulation, sender: str, handles: Mapping[bytes, object]) -> None:
        """`handles` name all memory that there is, of which it may name any."""
        self._simulation, self._handles = simulation, handles
        self._chance = random.Random(f"{simulation.seed} {sender}")
        self._right = self._chance.choice((0, 2, 2, 3, 6, 12, 20))
        self._session = 0

    def __call__(self, frame: bytes) -> Frames:
        chance, lie = self._chance, self._chance.random()
        try:
            right: Any = decode(frame)
        except Exception:
            return [(frame, 0.0)]
        self._session = getattr(right, "session", self._session)
        if self._right > 0:
            self._right -= 1
            return [(frame, 0.0)]
        if lie < 0.6 and not (isinstance(right, messages.Register) and chance.random() < 0.4):
            return [(frame, 0.0)]
        self._simulation.reached[f"lie in {type(right).__name__}"] += 1
        if isinstance(right, messages.Register) and chance.random() < 0.5:
            stolen = self._lied(lambda: attrs.evolve(right, regions=tuple(map(self._stolen, right.regions))))
            return [(stolen or frame, 0.0)]
        if lie < 0.85:
            return [(self._lied(lambda: _other(right, chance)) or _flipped(frame, chance), 0.0)]
        if lie < 0.95:
            name = chance.choice(_KINDS)
            known = {"session": self._session, "request": (getattr(right, "request", 0) or 0) + chance.randrange(3)}
            invented = self._lied(lambda: message(name, chance, **known))
            return [(frame, 0.0), *([(invented, 0.0)] if invented else [])]
        return [] if lie < 0.98 else [(frame, 0.0), (frame, 0.0)]

    def _stolen(self, region: Any) -> Any:
        """The region with the handle of somebody's memory."""
        data = self._chance.choice([*self._handles])
        return attrs.evolve(region, handles=tuple(attrs.evolve(handle, data=data) for handle in region.handles))

    def _lied(self, lie: Callable[[], Any]) -> bytes | None:
        """A lie that the codec writes, if one is found soon."""
        for _ in range(6):
            with suppress(Exception):
                return encode(lie())
        return None


_KINDS = [name for name in tables.FIELDS if hasattr(getattr(messages, name), "TYPE")]


def _flipped(frame: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(tables.HEADER_BYTES, len(frame)) if len(frame) > tables.HEADER_BYTES else 0
    return frame[:at] + bytes([frame[at] ^ 1 << chance.randrange(8)]) + frame[at + 1 :]
