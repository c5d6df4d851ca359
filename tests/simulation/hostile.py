"""Frames that are not as they were sent: changed by the tables of the registry, cut, or sent twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs

from kvproto.wire import tables
from kvproto.wire.codec import decode, encode
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
            try:
                return [(encode(_other(decode(frame), chance)), 0.0)]
            except Exception:
                kind = "byte"
        at = chance.randrange(tables.HEADER_BYTES, len(frame)) if len(frame) > tables.HEADER_BYTES else 0
        return [(frame[:at] + bytes([frame[at] ^ 1 << chance.randrange(8)]) + frame[at + 1 :], 0.0)]

    return changed if fault.kind == "change frame" else repeated


def _other(message: Any, chance: random.Random) -> Any:
    """The message with one field changed."""
    fields = [field.name for field in attrs.fields(type(message)) if getattr(message, field.name) is not None]
    name = chance.choice(fields)
    value = getattr(message, name)
    if isinstance(value, bool):
        new: Any = not value
    elif isinstance(value, int):
        new = chance.choice((value + 1, value - 1, 0, value ^ 1 << chance.randrange(16)))
    elif isinstance(value, bytes) and value:
        new = bytes([value[0] ^ 1]) + value[1:]
    elif isinstance(value, str):
        new = value + "x"
    elif isinstance(value, tuple) and value:
        new = value[:-1]
    else:
        new = value
    return attrs.evolve(message, **{name: new})
