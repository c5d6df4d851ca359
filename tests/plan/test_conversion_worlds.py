"""Converting while copying is converting first and copying then, whatever the ranks, deals, pages and strides are."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto import Cache, DType, Parallel, lay_out
from kvproto.copying.converting import convert
from kvproto.copying.execute import checksums, execute
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.planning.conversion import Made
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import Feature

HEADS, DIM, LAYERS = 4, 16, 4
Array = npt.NDArray[Any]
sides = st.builds(
    dict,
    sizes=st.sampled_from(
        [
            Parallel(tp=1), Parallel(tp=2, pp=2), Parallel(tp=3), Parallel(tp=4, dcp=2), Parallel(tp=8, dcp=2, interleave=3),
            Parallel(cp=2, interleave=2), Parallel(tp=2, cp=3, interleave=4, deal="zigzag"), Parallel(pp=3),
        ]
    ),
    page=st.sampled_from([1, 3, 8]),
    heads_first=st.booleans(),
    ring=st.sampled_from([0, 0, 40]),
)  # fmt: skip


class Side:
    """Every rank of an engine, with memory that holds `fill` and a window over the first tokens."""

    def __init__(self, stated: dict[str, Any], dtype: DType, block: int | None, tokens: int, dice: Any) -> None:
        parts = dict.fromkeys("kv", (dtype, HEADS, DIM * (2 if dtype == DType.BF16 else 1)))
        parts |= {f"{name}_scale": (DType.F32, HEADS, 4 * DIM // block) for name in "kv"} if block else {}
        cache = (
            Cache.ring("kv", LAYERS, parts=parts, ring_rows=stated["ring"])
            if stated["ring"]
            else Cache.paged("kv", LAYERS, parts=parts, page=stated["page"])
        )
        self.geometry: Geometry = lay_out([cache.converts("e4m3_block")], stated["sizes"])
        (group,) = self.geometry.groups
        self.layouts, self.windows, self.memory = {}, {}, {}
        for rank in self.geometry.ranks:
            for share in rank.owns:
                need = items_needed(group, share.cp_rank, 0, tokens)
                columns, length = columns_without_gaps(self.geometry, rank.rank, {0: need + 2}, stated["heads_first"])
                self.layouts[rank.rank] = RankLayout(self.geometry, rank.rank, columns)
                self.windows[rank.rank] = {0: Window(0, tokens, dice.permutation(need + 2)[:need])}
                self.memory[rank.rank] = bytearray(b"\xa5" * length)

    def region(self, rank: int) -> dict[int, memoryview]:
        return {0: memoryview(self.memory[rank])}


def handed_over(source: Side, sink: Side, *features: Feature) -> bool:
    """Run the programs of all pairs of ranks; whether checksums of both sides are equal."""
    equal, made = True, plan(source.geometry, sink.geometry, features)
    for a, b in sorted({(route.source, route.sink) for route in made.routes}):
        pair = Pair(made.between(a, b), source.layouts[a], sink.layouts[b])
        program = pair.lower(source.windows[a], sink.windows[b])
        execute(program, source.region(a), sink.region(b))
        sums = (checksums(program, side, sink=bool(i)) for i, side in enumerate((source.region(a), sink.region(b))))
        equal = equal and next(sums) == next(sums)
    return equal


def whole(dtype: DType, block: int | None, tokens: int) -> Side:
    """A side of one rank, with pages of one token in their order."""
    alone = {"sizes": Parallel(), "page": 1, "heads_first": False, "ring": 0}
    made = Side(alone, dtype, block, tokens, np.random.default_rng(0))
    made.windows[0] = {0: Window(0, tokens, np.arange(tokens))}
    return made


def converted(wide: Side, narrow: Side, made: Made, block: int) -> None:
    """Convert all rows of one rank to the other form, column by column."""
    views = [_columns(side) for side in (wide, narrow)]
    for part in "kv":
        for layer in range(LAYERS):
            bf16, fp8, scales = views[0][layer, part], views[1][layer, part], views[1][layer, f"{part}_scale"]
            if made == Made.WIDE:
                bf16[:] = convert(made, fp8.copy(), scales.copy(), DIM // block)
            else:
                fp8[:] = convert(made, bf16.copy(), 0, DIM // block)
                scales[:] = convert(Made.SCALES, bf16.copy(), 0, DIM // block)


def _columns(side: Side) -> dict[tuple[int, str], Array]:
    """Bytes [item, lane, byte] of each layer and part of a side of one rank."""
    own, (group,) = side.layouts[0].columns[0], side.geometry.groups
    found = {}
    for k in range(len(own.region)):
        part = group.parts[k % len(group.parts)]
        strides = int(own.item_stride[k]), int(own.lane_stride[k]), 1
        shape = own.items, HEADS, part.lane_bytes
        place = np.ndarray(shape, np.uint8, side.memory[0], int(own.offset[k]), strides)
        found[k // len(group.parts), part.name] = place
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    source=sides, sink=sides, block=st.sampled_from([4, 16]), widens=st.booleans(), tokens=st.integers(1, 37),
    seed=st.integers(0, 1 << 32),
)  # fmt: skip
def test_converting_is_converting_first(
    source: dict[str, Any], sink: dict[str, Any], block: int, widens: bool, tokens: int, seed: int
) -> None:
    """Token deals, stages, rings and HND too; KVP-CNV-PLAN, KVP-CNV-EXACT and KVP-CNV-VERIFY."""
    dice = np.random.default_rng(seed)
    wide, narrow = (DType.BF16, None), (DType.F8E4M3, block)
    forms = (narrow, wide) if widens else (wide, narrow)
    if source["ring"] or sink["ring"]:  # whose rows are not dealt
        source, sink = ({**side, "sizes": Parallel(tp=side["sizes"].tp)} for side in (source, sink))
    origin, other = (whole(*form, tokens) for form in forms)
    origin.memory[0][:] = dice.integers(0, 256, len(origin.memory[0]), np.uint8).tobytes()
    here, there = Side(source, *forms[0], tokens, dice), Side(sink, *forms[1], tokens, dice)
    wanted = Side(sink, *forms[1], tokens, np.random.default_rng(0))
    wanted.windows, wanted.layouts = there.windows, there.layouts
    converted(*((other, origin) if widens else (origin, other)), Made.WIDE if widens else Made.NARROW, block)
    assert handed_over(origin, here)
    assert handed_over(other, wanted)
    assert handed_over(here, there, Feature.CONVERT)
    assert there.memory == wanted.memory
