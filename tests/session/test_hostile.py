"""Peers that say well-formed nonsense: any field of any message may be anything, and only that peer suffers."""

import contextlib
import hashlib
import random
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import LocalError, WireError
from kvproto.wire import decode, decode_struct, encode, encode_struct, tables
from kvproto.wire.messages import Geometry
from tests.cases import sampled
from tests.session.driver import World, geometry, ticket
from tests.session.test_pull import PullWorld

CONTENT = b"c" * 32
BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}


def nonsense(value: Any, row: tables.Field, rng: random.Random) -> Any:
    """Another value of the field's type."""
    _, _, type_, _, low, high, length = row
    if type_ in BITS:
        top = high if high is not None else 2 ** BITS[type_] - 1
        return min(max(rng.choice([0, 1, value + 1, top, top - 1, 2**31, 2**63, rng.randint(0, top)]), low or 0), top)
    if type_.startswith("array<"):
        top = 2 ** BITS[type_[6:-1]] - 1
        values = [int(v) for v in value]
        change = rng.choice(["drop", "add", "alter"]) if values else "add"
        if change == "add":
            values.append(rng.choice([0, 1, top, rng.randint(0, top)]))
        elif change == "drop":
            values.pop()
        else:
            values[rng.randrange(len(values))] = rng.choice([0, 1, 2, top, 2**31, rng.randint(0, top)])
        return np.array(values, np.uint64)
    if type_.startswith("list<"):
        inner: tables.Field = (0, "", type_[5:-1], True, None, None, None)
        change = rng.choice(["drop", "twice", "alter", "empty"]) if value else "empty"
        if change == "empty":
            return ()
        i = rng.randrange(len(value))
        middle = {"drop": (), "twice": (value[i], value[i]), "alter": (nonsense(value[i], inner, rng),)}[change]
        return (*value[:i], *middle, *value[i + 1 :])
    if type_.startswith("struct:"):
        return twisted(value, rng)
    if type_ == "bytes":
        return rng.randbytes(length if length is not None else rng.randrange(40))
    if type_ == "str":
        return rng.choice(["x", "k", "target", "é" * 20])
    return value


def twisted(value: Any, rng: random.Random) -> Any:
    """A message or struct with one field, at any depth, changed."""
    rows = [r for r in tables.FIELDS[type(value).__name__] if getattr(value, r[1]) is not None]
    row = rng.choice(rows)
    if row[1] == "geometry":
        made = encode_struct(twisted(decode_struct(Geometry, value.geometry), rng))
        return attrs.evolve(value, geometry=made, digest=hashlib.sha256(made).digest())
    return attrs.evolve(value, **{row[1]: nonsense(getattr(value, row[1]), row, rng)})


def twister(rng: random.Random, rate: float, *kinds: type) -> Callable[[bytes], bytes]:
    """Twists a share of the frames that pass; of these messages alone, where any are named."""

    def twist(frame: bytes) -> bytes:
        if (kinds and not isinstance(decode(frame), kinds)) or rng.random() > rate:
            return frame
        with contextlib.suppress(WireError):  # nonsense that our writer refuses
            return encode(twisted(decode(frame), rng))
        return frame

    return twist


@pytest.mark.parametrize(("seed", "pull"), sampled(range(250), [False, True], every=5))
def test_well_formed_nonsense_costs_nobody_else_anything(seed: int, pull: bool) -> None:
    rng = random.Random(seed)
    world = PullWorld(geometry(2)) if pull else World(geometry(2))
    bad = world.sink("bad", geometry(1))
    original_sink, original_sources = bad.to_send, {a: s.to_send for a, s in world.sources.items()}
    twist = twister(rng, rng.choice([0.05, 0.3]))

    bad.to_send = lambda now: [(a, twist(f)) for a, f in original_sink(now)]  # type: ignore[method-assign]
    for address, source in world.sources.items():
        source.to_send = (  # type: ignore[method-assign]
            lambda now, send=original_sources[address]: [(c, twist(f) if c == "bad" else f) for c, f in send(now)]
        )
    made = ticket()
    for step in range(12):
        world.run()
        world.prefill(made, CONTENT)
        if bad.ready and step < 8:
            with contextlib.suppress(LocalError):  # limits of the peer may be anything, too
                world.transfer("bad", made if step < 4 else ticket(), CONTENT)
        for address in world.sources:
            world.serve(address)
        if isinstance(world, PullWorld):
            world.read("bad")
        world.pass_time(3.0)
    world.sink("good", geometry(1), engine="good")  # who may claim an engine id is for the allow-list to say
    world.run()
    assert world.sinks["good"].ready
    fresh = ticket()
    world.prefill(fresh, CONTENT)
    world.fetch("good", fresh, CONTENT)
    for address in world.sources:
        world.serve(address)
    if isinstance(world, PullWorld):
        world.read("good")
    assert len(world.events("good", "Arrived")) == 1
