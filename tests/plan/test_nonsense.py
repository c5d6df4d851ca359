"""What no engine has, refused by the name of its argument, where the caller says it."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvproto import Cache, DType, LocalError, lay_out, plan
from kvproto.errors import PlanError
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

SIZES: Any = {"kv_heads": 2, "head_dim": 8, "page": 4}
CACHE: Any = Cache
BF16 = DType.BF16


def paged(part: Any) -> Any:
    return CACHE.paged("kv", 1, parts={"k": part}, page=4)


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a layer below 0": (lambda: CACHE.gqa("kv", [-1, 0, 1], **SIZES), "Cache.layers", "got -1"),
    "fewer layers than none": (lambda: CACHE.gqa("kv", -1, **SIZES), "Cache.layers", "got -1"),
    "layers of floats": (lambda: CACHE.gqa("kv", [0.0, 1.0], **SIZES), "Cache.layers", "a whole number"),
    "half a number of layers": (lambda: CACHE.gqa("kv", 2.5, **SIZES), "Cache.layers", "a whole number"),
    "a size that is a float": (lambda: CACHE.gqa("kv", 1, **SIZES | {"head_dim": 8.0}), "Cache.head_dim", "a whole number"),
    "half an element": (lambda: paged((BF16, 2, 7)), 'Cache.parts["k"]', "2 bytes, an element of BF16, got 7"),
    "sections of half elements": (lambda: paged((BF16, 2, (7, 9))), 'Cache.parts["k"]', "got 7"),
    "no sections": (lambda: paged((BF16, 2, ())), 'Cache.parts["k"]', "a section"),
    "a part without bytes": (lambda: paged((BF16, 1)), 'Cache.parts["k"]', "element type, lanes, and bytes"),
    "bytes that are text": (lambda: paged((BF16, 1, "48")), 'Cache.parts["k"]', "a whole number"),
    "a section that is text": (lambda: paged((BF16, 1, (4, "8"))), 'Cache.parts["k"]', "a whole number"),
    "an element type that is none": (lambda: paged((2, 1, 48)), 'Cache.parts["k"]', "kvproto.DType"),
    "lanes that are text": (lambda: paged((BF16, "1", 48)), 'Cache.parts["k"]', "a whole number"),
    "parts in a list": (lambda: CACHE.paged("kv", 1, parts=[1], page=4), "Cache.parts", "a mapping"),
    "a part of no name": (lambda: CACHE.paged("kv", 1, parts={3: (BF16, 1, 4)}, page=4), "Cache.parts", "each a str"),
    "hand-off of no element type": (lambda: CACHE.handoff("h", {"token": 4}), 'Cache.parts["token"]', "element type"),
    "hand-off of no name": (lambda: CACHE.handoff({"token": 4}), "Cache.handoff", "'parts'"),
    "a size that nobody knows": (lambda: CACHE.gqa("kv", 1, **SIZES).over(tpp=3), "Cache.over", "'tpp'"),
    "blocks that do not divide a head": (lambda: CACHE.gqa("kv", 1, **SIZES, scale_block=3), "Cache.scale_block", "divisor of 8"),
    "scales of no blocks": (lambda: CACHE.gqa("kv", 1, **SIZES, scale_dtype=BF16), "Cache.scale_dtype", "scale_block"),
    "a cache that is no list": (lambda: lay_out(CACHE.gqa("kv", 1, **SIZES)), "specs", "a list of kvproto.Cache"),
}  # fmt: skip


@pytest.mark.parametrize("side", [0, 1])
def test_a_section_that_is_left_out_is_named_by_the_plan(side: int) -> None:
    whole, cut = (lay_out([Cache.mla("kv", 1, latent=8, rope=4, page=4, split=True)]) for _ in range(2))
    group = cut.groups[0]
    cut = attrs.evolve(cut, groups=(attrs.evolve(group, parts=group.parts[:1]),))
    with raises(PlanError, code=ErrorCode.BAD_GEOMETRY, path="groups[0].parts[0].whole"):
        plan(*((cut, whole) if side else (whole, cut)))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    make, path, words = REFUSED[name]
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=path) as caught:
        make()
    assert words in str(caught.value)
