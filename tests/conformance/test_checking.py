"""The suite's own checks of a Description and kvproto's refuse the same, at the same path."""

import json
import random
from typing import Any

import pytest

from kvproto.errors import RemoteError
from kvproto.planning.geometry import decode_geometry, encode_geometry
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.wire import from_json, to_json
from kvproto.wire.enums import DType
from kvproto.wire.messages import Geometry
from kvproto_conformance.checking import check
from kvproto_conformance.codec import Refusal, write_struct
from tests.plan.test_geometry import BROKEN

Json = dict[str, Any]


def ours(side: Json) -> tuple[str, str] | None:
    try:
        decode_geometry(encode_geometry(from_json(Geometry, side)))
    except RemoteError as error:
        return error.code.name, error.path
    return None


def theirs(side: Json) -> tuple[str, str] | None:
    try:
        write_struct("Geometry", side)
        check(side)
    except Refusal as refusal:
        return refusal.code, refusal.path
    return None


@pytest.mark.parametrize("case", BROKEN)
def test_what_contradicts_itself(case: str) -> None:
    clause, make, path = BROKEN[case]
    assert (clause, theirs(to_json(make()))) == (clause, ("BAD_GEOMETRY", path))


WORLDS = [
    to_json(lay_out(caches, parallel))
    for caches, parallel in (
        ([Cache.mla("kv", 3, latent=24, rope=8, page=16, split=True), Cache.handoff("first", {"token": (DType.U32, 4)})], Parallel(tp=2)),
        ([Cache.gqa("kv", 2, kv_heads=4, head_dim=8, page=4), Cache.page_scales("s", 2, kv_heads=4, page=4)], Parallel(tp=2)),
        ([Cache.mla("kv", 2, latent=24, rope=8, page=16), Cache.gqa("draft", 1, kv_heads=2, head_dim=8, page=4, model=1)],
         Parallel(cp=2, interleave=4, deal="zigzag")),
    )
]  # fmt: skip


def test_the_worlds_are_right_as_they_are() -> None:
    assert [(ours(world), theirs(world)) for world in WORLDS] == [(None, None)] * len(WORLDS)


def test_faults_by_chance() -> None:
    """KVP-GEO-SECTIONS, KVP-GEO-DEAL and the others, several at once: of many faults both name the first."""
    rng, seen, texts = random.Random(7), set(), [json.dumps(world) for world in WORLDS]
    for _ in range(400):
        side = json.loads(rng.choice(texts))
        for _ in range(rng.randint(1, 3)):
            spoil(rng, side)
        found = ours(side)
        assert found == theirs(side)
        seen.add(found and "".join(c for c in found[1] if not c.isdigit()))
    assert len(seen) > 20


def spoil(rng: random.Random, side: Json) -> None:
    """Change one number or word, or take away, repeat or swap elements of one list."""
    at, key = rng.choice(list(walk(side[rng.choice(["groups", "ranks"])])))
    value = at[key]
    if isinstance(value, list) and value:
        i = rng.randrange(len(value))
        at[key] = rng.choice([value[:i] + value[i + 1 :], value[: i + 1] + value[i:], value[::-1]])
    elif isinstance(value, bool):
        at[key] = not value
    elif isinstance(value, str) and value.isdigit():
        at[key] = rng.choice(["0", "1", "2", str(int(value) + 1), str(2 * int(value)), str(1 << 20)])
    elif isinstance(value, str) and value.isupper():
        at[key] = rng.choice(["PAGE", "SLOT", "RING", "HANDOFF"] if key == "kind" else [value, "BF16"])
    elif isinstance(at, dict):
        at["partial" if "kind" in at else key] = True if "kind" in at else rng.choice(["k", "key", "latent", "ckv"])


def walk(value: Any) -> Any:
    """Every (container, key) below."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from walk(inner)
