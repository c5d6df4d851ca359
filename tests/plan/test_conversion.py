"""Conversion between BF16 and FP8, against an oracle that knows no strides and takes its rounding from torch."""

import itertools
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from kvproto import Cache, DType, Parallel, lay_out
from kvproto.copying.converting import convert
from kvproto.copying.execute import checksums, execute
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram
from kvproto.errors import KvprotoError, LocalError
from kvproto.planning.conversion import Made
from kvproto.planning.geometry import Geometry, decode_geometry, encode_geometry, validate
from kvproto.planning.plan import differences, plan
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import ErrorCode, Feature
from tests.conversions import (
    DIM,
    HEADS,
    LAYERS,
    WORLDS,
    Array,
    Engine,
    Rank,
    as_bf16,
    made_scale,
    narrow,
    told,
    values,
    whole,
    wide,
    widened,
)
from tests.pools import column, contents

CONVERT = (Feature.CONVERT,)


def bits_of(scale: float) -> int:
    return int(np.float32(scale).view(np.uint32))


EVERY = np.arange(1 << 16, dtype=np.uint16)
"""Every BF16."""
STATED = (1.0, 0.0123, 2.0**-126, 3e38, 448.0)


@pytest.mark.parametrize("scale", STATED)
def test_every_bf16_becomes_the_nearest_e4m3(scale: float) -> None:
    """All 65,536 values, KVP-CNV-EXACT."""
    found = convert(Made.NARROW, EVERY.view(np.uint8), bits_of(scale), 0)
    assert np.array_equal(found, narrow(as_bf16(EVERY), torch.tensor(np.float32(scale))).numpy())


@pytest.mark.parametrize("scale", STATED)
def test_every_e4m3_becomes_the_nearest_bf16(scale: float) -> None:
    codes = np.arange(256, dtype=np.uint8)
    found = convert(Made.WIDE, codes, bits_of(scale), 0).view(np.uint16)
    assert np.array_equal(found, wide(torch.from_numpy(codes), torch.tensor(np.float32(scale))))


@pytest.mark.parametrize("blocks", [1, 4])
def test_blocks_are_scaled_by_their_greatest_finite_element(blocks: int) -> None:
    """Random bits: subnormal numbers, infinities and NaN among them; and a block of zeros."""
    bits = np.random.default_rng(3).integers(0, 1 << 16, (4096, 2, DIM), np.uint16)
    bits[0] = 0
    x = as_bf16(bits).reshape(4096, 2, blocks, -1)
    scale = made_scale(x)
    scales = convert(Made.SCALES, bits.view(np.uint8), 0, blocks)
    codes = convert(Made.NARROW, bits.view(np.uint8), 0, blocks)
    assert np.array_equal(scales.view(np.float32), scale[..., 0].numpy())
    assert np.array_equal(codes, narrow(x, scale).reshape(codes.shape).numpy())
    back = convert(Made.WIDE, codes, scales, blocks).view(np.uint16)
    assert np.array_equal(back, wide(narrow(x, scale), scale).reshape(back.shape))


@attrs.frozen(eq=False)
class World:
    sources: list[Rank]
    sinks: list[Rank]
    programs: list[tuple[Rank, Rank, CopyProgram]]
    wanted: dict[str, Array]

    @classmethod
    def of(cls, source: Engine, sink: Engine) -> "World":
        here, there = told(source, sink)
        made = plan(here, there, CONVERT)
        sources = [Rank.of(source, here, rank) for rank in range(source.tp)]
        sinks = [Rank.of(sink, there, rank) for rank in range(sink.tp)]
        held = whole(source, values())
        for rank in sources:
            rank.fill(held)
        programs = []
        for a, b in itertools.product(sources, sinks):
            pair = Pair(made.between(a.rank, b.rank), a.pool.layout, b.pool.layout)
            if pair.routes:
                programs.append((a, b, pair.lower({0: a.window}, {0: b.window})))
        return cls(sources, sinks, programs, whole(sink, values()) if source.form == "bf16" else widened(source, held))


def regions(rank: Rank) -> dict[int, memoryview]:
    return {id: m.buffer for id, m in rank.pool.memories.items()}


@pytest.mark.parametrize(("source", "sink"), WORLDS)
def test_every_byte_is_what_the_formula_makes(source: Engine, sink: Engine) -> None:
    """Over poisoned memory, between unequal ranks and pages: KVP-CNV-PLAN, KVP-CNV-EXACT."""
    world = World.of(source, sink)
    for a, b, program in world.programs:
        execute(program, regions(a), regions(b))
    for rank in world.sinks:
        assert not rank.wrong(world.wanted)


@pytest.mark.parametrize(("source", "sink"), WORLDS)
def test_checksums_are_of_the_converted_bytes(source: Engine, sink: Engine) -> None:
    """A source sums what the formula makes of its memory, a sink its own: KVP-CNV-VERIFY."""
    for a, b, program in World.of(source, sink).programs:
        execute(program, regions(a), regions(b))
        sums = checksums(program, regions(a), sink=False)
        assert sums
        assert sums == checksums(program, regions(b), sink=True)
        place = next(iter(b.places()))[3]
        place[:, 0] ^= 1
        assert sums != checksums(program, regions(b), sink=True)


@pytest.mark.parametrize(("source", "sink"), WORLDS)
def test_a_packed_stream_has_converted_bytes(source: Engine, sink: Engine) -> None:
    """Cut anywhere, within a lane too."""
    world = World.of(source, sink)
    for a, b, program in world.programs:
        ours, theirs = PackedStream(program, "source", regions(a)), PackedStream(program, "sink", regions(b))
        assert ours.length == theirs.length == program.bytes
        for at in range(0, ours.length, 777):
            data = bytearray(min(777, ours.length - at))
            ours.pack(at, data)
            theirs.unpack(at, data)
    for rank in world.sinks:
        assert not rank.wrong(world.wanted)


def test_mistakes_are_seen() -> None:
    """The comparison notices the scale of another head, another rounding, and a byte beside the rows."""
    world = World.of(*WORLDS[0])
    for a, b, program in world.programs:
        execute(program, regions(a), regions(b))
    rank = world.sinks[1]
    other = dict(world.wanted, k_scale=np.roll(world.wanted["k_scale"], 1, axis=2))
    assert {part for part, _, _ in rank.wrong(other)} == {"k_scale"}
    x = as_bf16(values()[0])
    y = x.float() / made_scale(x)
    cut = narrow(x, made_scale(x))
    toward_zero = torch.where(cut.view(torch.float8_e4m3fn).float().abs() > y.abs(), cut - 1, cut).numpy()
    assert {part for part, _, _ in rank.wrong(dict(world.wanted, k=toward_zero))} == {"k"}
    contents(rank.pool)[int(column(rank.pool, 0, 0, "k").size) - 1] ^= 1
    assert rank.wrong(world.wanted)


# what the two Descriptions say


def refusal(source: Geometry, sink: Geometry, *features: Feature) -> tuple[ErrorCode, str]:
    with pytest.raises(KvprotoError) as caught:
        plan(source, sink, features)
    return caught.value.code, caught.value.path


DTYPE = ErrorCode.DTYPE_MISMATCH, "groups[kv].parts[k].dtype"
BF16, BLOCK = Engine("bf16", 2, 4), Engine("e4m3_block", 2, 4)


def test_both_sides_state_the_conversion_and_choose_it() -> None:
    """KVP-CNV-BOTH."""
    here, there = told(BF16, BLOCK)
    unsaid = attrs.evolve(there, groups=tuple(_unsaid(group) for group in there.groups))
    assert refusal(here, there) == DTYPE
    assert refusal(BF16.geometry(), there, *CONVERT) == DTYPE
    assert refusal(here, unsaid, *CONVERT) == DTYPE
    assert refusal(unsaid, here, *CONVERT) == DTYPE
    assert refusal(BF16.geometry("e4m3_tensor"), there, *CONVERT) == DTYPE
    assert plan(here, there, CONVERT).routes
    assert plan(there, here, CONVERT).routes


def _unsaid(group: Any) -> Any:
    parts = tuple(attrs.evolve(part, x_conversions=None, x_scales=None) for part in group.parts)
    return attrs.evolve(group, parts=parts)


def test_equal_dtypes_are_planned_as_without() -> None:
    """What is stated changes no plan that needs no conversion."""
    for engine in (BF16, BLOCK):
        stated, plain = engine.geometry("e4m3_block"), lay_out([engine.cache()], Parallel(tp=4))
        other = attrs.evolve(plain, groups=tuple(_unsaid(group) for group in plain.groups))
        assert plan(stated, other, CONVERT).digest == plan(stated, other).digest


def test_a_source_of_two_decode_engines_states_both() -> None:
    here = BF16.geometry("e4m3_tensor", "e4m3_block")
    for engine in (BLOCK, Engine("e4m3_tensor", 4, 4)):
        assert plan(here, engine.geometry(), CONVERT).routes


@pytest.mark.parametrize("bits", [[0.011, 0.25, 3.5], [0.011]])
def test_fp8_by_other_scales_is_refused_whatever_is_chosen(bits: list[float]) -> None:
    """Both dtypes are equal, and what the bytes mean is not; KVP-CNV-SCALES."""
    one = Engine("e4m3_tensor", 1, 4).geometry("e4m3_tensor")
    (group,) = one.groups
    parts = (attrs.evolve(group.parts[0], x_scales=np.array(bits, np.float32).view(np.uint32)), *group.parts[1:])
    other = attrs.evolve(one, groups=(attrs.evolve(group, parts=parts),))
    for features in ((), CONVERT):
        assert refusal(one, other, *features) == (ErrorCode.DTYPE_MISMATCH, "groups[kv].parts[k].x_scales")
        assert plan(one, one, features).routes


def test_a_head_of_other_elements_is_refused() -> None:
    cache = Cache.gqa("kv", LAYERS, kv_heads=HEADS, head_dim=2 * DIM, page=4).converts("e4m3_block")
    code, path = refusal(lay_out([cache], Parallel(tp=2)), BLOCK.geometry(), *CONVERT)
    assert (code, path) == (ErrorCode.LANE_MISMATCH, "groups[kv].parts[k].lanes")


def test_layers_of_two_kinds_are_two_groups_of_the_source() -> None:
    """A decode engine that keeps layer 0 in BF16; a source with one group is refused, with two it is not."""
    shape: dict[str, Any] = {"kv_heads": HEADS, "head_dim": DIM, "page": 4}

    def bf16(name: str, layers: Any) -> Cache:
        return Cache.gqa(name, layers, **shape).converts("e4m3_block")

    fp8 = Cache.gqa("fp8", (1, 2), dtype=DType.F8E4M3, scale_block=DIM, **shape).converts("e4m3_block")
    sink = lay_out([bf16("first", (0,)), fp8])
    assert refusal(lay_out([bf16("kv", LAYERS)]), sink, *CONVERT)[0] == ErrorCode.DTYPE_MISMATCH
    assert plan(lay_out([bf16("first", (0,)), bf16("rest", (1, 2))]), sink, CONVERT).routes


def test_a_latent_is_one_lane_like_any_other() -> None:
    """MLA has no rule of its own."""
    shape: dict[str, Any] = {"latent": 24, "rope": 8, "page": 4}
    source = lay_out([Cache.mla("kv", LAYERS, **shape).converts("e4m3_block")], Parallel(tp=4))
    fp8 = Cache.mla("kv", LAYERS, dtype=DType.F8E4M3, scale_block=8, **shape).converts("e4m3_block")
    routes = plan(source, lay_out([fp8], Parallel(tp=2)), CONVERT).routes
    assert {(box.part, box.lo, box.hi) for route in routes for box in route.boxes} == {(0, 0, 32), (1, 0, 16)}


def _with(geometry: Geometry, index: int = 0, **changes: Any) -> Geometry:
    (group,) = geometry.groups
    parts = tuple(attrs.evolve(p, **changes) if i == index else p for i, p in enumerate(group.parts))
    return attrs.evolve(geometry, groups=(attrs.evolve(group, parts=parts),))


TENSOR = Engine("e4m3_tensor", 2, 4)
ONE = np.array([1065353216], np.uint32)
BAD = {
    "neither form": (_with(BF16.geometry("e4m3_block"), dtype=DType.F16), "x_conversions"),
    "encoded": (_with(BLOCK.geometry(), encoding="tiles"), "x_conversions"),
    "half an element": (_with(BF16.geometry("e4m3_block"), lane_bytes=63), "x_conversions"),
    "two narrow forms": (_with(BLOCK.geometry(), x_conversions=("e4m3_block", "e4m3_tensor")), "x_conversions"),
    "no scales": (_with(TENSOR.geometry(), x_conversions=("e4m3_block",), x_scales=None), "x_conversions"),
    "blocks that do not divide": (_with(BLOCK.geometry(), 2, lane_bytes=12), "x_conversions"),
    "scales of another dtype": (_with(BLOCK.geometry(), 2, dtype=DType.U32), "x_conversions"),
    "a wide part with scales": (_with(BLOCK.geometry(), dtype=DType.BF16), "x_conversions"),
    "nothing stated": (_with(TENSOR.geometry(), x_scales=None), "x_scales"),
    "stated twice": (_with(BLOCK.geometry(), x_scales=ONE), "x_scales"),
    "stated of a wide part": (_with(BF16.geometry("e4m3_tensor"), x_scales=ONE), "x_scales"),
    "zero": (_with(TENSOR.geometry(), x_scales=ONE * 0), "x_scales"),
    "infinite": (_with(TENSOR.geometry(), x_scales=np.array([0x7F800000], np.uint32)), "x_scales"),
    "negative": (_with(TENSOR.geometry(), x_scales=ONE | np.uint32(1 << 31)), "x_scales"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_part_that_cannot_have_the_conversion_is_refused(case: str) -> None:
    """KVP-CNV-STATED."""
    geometry, field = BAD[case]
    with pytest.raises(KvprotoError) as caught:
        decode_geometry(encode_geometry(geometry))
    assert (caught.value.code, caught.value.path) == (ErrorCode.BAD_GEOMETRY, f"groups[0].parts[0].{field}")


def test_shares_have_scales_of_what_they_have() -> None:
    """KVP-CNV-LANES."""
    geometry = BLOCK.geometry()
    share = geometry.ranks[0].owns[0]
    lanes = (*share.lanes[:2], attrs.evolve(share.lanes[2], lo=1, hi=3), share.lanes[3])
    moved = attrs.evolve(geometry.ranks[0], owns=(attrs.evolve(share, lanes=lanes),))
    few = _with(TENSOR.geometry(), x_scales=np.repeat(ONE, LAYERS - 1))
    for wrong, path in ((attrs.evolve(geometry, ranks=(moved, geometry.ranks[1])), "lanes"), (few, "layers")):
        with pytest.raises(KvprotoError) as caught:
            validate(wrong)
        assert (caught.value.code, caught.value.path) == (ErrorCode.BAD_GEOMETRY, f"ranks[0].owns[0].{path}")


def _scaled(tp: int, layers: Any, scales: Any) -> Geometry:
    cache = Cache.gqa("kv", layers, kv_heads=HEADS, head_dim=DIM, page=4, dtype=DType.F8E4M3)
    return lay_out([cache.converts("e4m3_tensor", scales={"k": scales, "v": 0.5})], Parallel(tp=tp))


@pytest.mark.parametrize("features", [(), CONVERT])
def test_codes_of_other_scales_are_other_numbers(features: tuple[Feature, ...]) -> None:
    """KVP-CNV-SCALES: of a layer that both have; raw bytes would arrive, and mean something else."""
    for one, other in ((0.03, 0.05), ([0.03, 0.05, 0.04], [0.03, 0.05, 0.06]), (0.03, [0.03, 0.03, 0.04])):
        for pair in ((one, other), (other, one)):
            here, there = _scaled(2, LAYERS, pair[0]), _scaled(4, LAYERS, pair[1])
            assert refusal(here, there, *features) == (ErrorCode.DTYPE_MISMATCH, "groups[kv].parts[k].x_scales")


def test_scales_are_compared_of_the_layers_that_both_have() -> None:
    """KVP-CNV-SCALES: one for all layers is the same as that one for each."""
    assert plan(_scaled(2, LAYERS, 0.03), _scaled(1, LAYERS, [0.03] * LAYERS)).routes
    first = _scaled(2, (0, 1), [0.03, 0.05])
    assert plan(_scaled(1, LAYERS, [0.03, 0.05, 0.04]), first).routes


def test_scales_that_one_side_alone_states_are_a_warning() -> None:
    """The fields may be ignored; KVP-CNV-SCALES has nothing to compare."""
    stated = _scaled(1, LAYERS, 0.03)
    unsaid = attrs.evolve(stated, groups=tuple(_unsaid(group) for group in stated.groups))
    paths = ["groups[kv].parts[k].x_scales", "groups[kv].parts[v].x_scales"]
    assert [path for path, _, _ in differences(stated, unsaid)] == paths
    assert [path for path, _, _ in differences(unsaid, stated)] == paths
    assert differences(stated, stated) == []


def _advised(source: Cache, sink: Cache) -> str:
    with pytest.raises(KvprotoError) as caught:
        plan(lay_out([source]), lay_out([sink]), CONVERT)
    assert caught.value.code == ErrorCode.DTYPE_MISMATCH
    return str(caught.value.advice)


@pytest.mark.parametrize(
    ("source", "sink", "stated"),
    [
        ((), (), ("none", "none")),
        (("e4m3_block",), (), ("e4m3_block", "none")),
        (("e4m3_tensor",), ("e4m3_block",), ("e4m3_tensor", "e4m3_block")),
    ],
)
def test_the_advice_names_the_conversion_that_there_is_and_who_lacks_it(
    source: tuple[str, ...], sink: tuple[str, ...], stated: tuple[str, str]
) -> None:
    fp8 = Cache.gqa("kv", LAYERS, kv_heads=HEADS, head_dim=DIM, page=4, dtype=DType.F8E4M3, scale_block=DIM)
    said = _advised(BF16.cache(*source), fp8.converts(*sink))
    assert "or state e4m3_block on both" in said
    assert said.endswith(f"the source states {stated[0]}, the sink states {stated[1]}")
    plain = attrs.evolve(TENSOR.cache(), group=_unsaid(TENSOR.cache().group))
    assert "or state e4m3_tensor on both" in _advised(BF16.cache(), plain)


def test_rows_of_other_elements_are_not_said_to_convert() -> None:
    """BF16 of a latent with its rotary key, and an FP8 row in which the key is a part of its own."""
    row = {"latent": (DType.F8E4M3, 1, 512), "latent_scale": (DType.F32, 1, 16), "rope": (DType.BF16, 1, 128)}
    said = _advised(Cache.mla("kv", 1, latent=512, rope=64, page=4), Cache.paged("kv", 1, parts=row, page=4))
    assert said == "make the two sides equal: rows of 512 and of 576 elements do not convert"


@pytest.mark.parametrize("scale", ["x", float("nan"), 0, -1.0, [[0.5]], [0.5, float("inf")]])
def test_scales_are_numbers(scale: Any) -> None:
    cache = Cache.gqa("kv", LAYERS, kv_heads=HEADS, head_dim=DIM, page=4, dtype=DType.F8E4M3)
    with pytest.raises(LocalError) as caught:
        cache.converts("e4m3_tensor", scales={"k": scale, "v": 0.5})
    assert (caught.value.code, caught.value.path) == (ErrorCode.OUT_OF_RANGE, "scales")


def test_unknown_names_are_skipped() -> None:
    """A later version's conversion does no harm."""
    validate(_with(BF16.geometry(), x_conversions=("of_next_year",)))
