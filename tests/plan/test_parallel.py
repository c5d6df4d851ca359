"""How an engine divides its caches: deals by name, caches over ranks of their own, virtual stages, and what is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import LocalError
from kvproto.planning.geometry import Geometry, validate
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.wire.enums import DType, ErrorCode
from kvproto_catalog.models import PRESETS, describe
from tests.errors import raises

TARGET = Cache.gqa("target", 8, kv_heads=8, head_dim=4, page=4)
LATENT = Cache.mla("latent", 8, latent=6, rope=2, page=4)
DRAFT = Cache.gqa("draft", 2, kv_heads=4, head_dim=4, page=4, model=1)


def shares(geometry: Geometry, name: str) -> list[tuple[list[int], list[tuple[int, int]], int] | None]:
    """Layers, lanes of the first part and cp rank of one cache, rank by rank; None where a rank has none of it."""
    group = next(g.id for g in geometry.groups if g.name == name)
    found = []
    for rank in geometry.ranks:
        share = next((s for s in rank.owns if s.group == group), None)
        lanes = [(s.lo, s.hi) for s in share.lanes if s.part == 0] if share else []
        found.append((share.layers.tolist(), lanes, share.cp_rank) if share else None)
    return found


@pytest.mark.parametrize(
    ("deal", "order"),
    [
        ("cyclic", None), ("zigzag", [0, 1, 2, 3, 3, 2, 1, 0]), ((0, 1, 2, 3), None), ([3, 2, 1, 0], [3, 2, 1, 0]),
        ((0, 0, 1, 2, 2, 2, 3), [0, 0, 1, 2, 2, 2, 3]),
    ],
)  # fmt: skip
def test_deals_by_name_and_by_the_rank_of_each_run(deal: Any, order: list[int] | None) -> None:
    for sizes in (Parallel(cp=4, interleave=16, deal=deal), Parallel(tp=4, dcp=4, interleave=16, deal=deal)):
        (group,) = lay_out([LATENT], sizes).groups
        assert (None if group.order is None else group.order.tolist()) == order
        assert (group.cp_size, group.interleave) == (4, 16)


def test_a_deal_says_nothing_of_caches_that_are_not_dealt() -> None:
    made = lay_out([LATENT, DRAFT], Parallel(tp=4, dcp=4, deal="zigzag"))
    assert [g.order is None for g in made.groups] == [False, True]
    assert lay_out([LATENT], Parallel(tp=4, deal="zigzag")).groups[0].order is None
    with pytest.raises(LocalError, match="neither cp nor dcp is above 1"):
        lay_out([LATENT], Parallel(tp=4, deal=(0, 1, 1, 0)))


@pytest.mark.parametrize(
    ("sizes", "path", "says"),
    [
        ({"deal": "zigzag-by-length"}, "deal", "share of each request's length"),
        ({"deal": "contiguous"}, "deal", "interleave L / ranks"),
        ({"deal": (0, 1, 2)}, "deal", "ranks 0 to 3"),
        ({"deal": (0, 1, 2, 3, 4)}, "deal", "ranks 0 to 3"),
        ({"deal": (0, 1, 2, -3)}, "deal", "got -3"),
        ({"deal": 4}, "deal", "'cyclic', 'zigzag'"),
        ({"deal": ("a",)}, "deal", "str"),
        ({"deal": tuple(range(4)) * 1025 + (0,)}, "groups[0].order", "4096"),
        ({"interleave": 1 << 20}, "groups[0].cp_size", "1048576 tokens"),
        ({"virtual": 0}, "virtual", "1 to 1024"),
        ({"virtual": 1 << 30}, "virtual", "1 to 1024"),
        ({"tp": 1 << 30}, "tp", "at most 4096 ranks in all"),
        ({"pp": 64, "cp": 64}, "tp", "at most 4096 ranks in all"),
        ({"tp": 2.5}, "tp", "1 or more"),
        ({"tp": 10**12}, "tp", "1 to 4294967295"),
        ({"pp": 2, "virtual": 2, "stages": (4, 4)}, "stages", "layers of 4 stages"),
        ({"pp": 2, "virtual": 2, "stages": (1, 2, 3, 4)}, "stages", "8 layers in all"),
        ({"origin": -1}, "origin", "got -1"),
    ],
)
def test_sizes_are_refused_by_name_with_what_is_right(sizes: dict[str, Any], path: str, says: str) -> None:
    with raises(LocalError, match=says, path=path):
        lay_out([LATENT], Parallel(**({"tp": 4, "dcp": 4} | sizes)))


def test_a_cache_without_layers_is_refused_wherever_it_stands() -> None:
    with raises(LocalError, path="specs[1].layers"):
        lay_out([TARGET, Cache.mla("none", [], latent=6, rope=2, page=4)], Parallel(pp=2))


def test_virtual_stages_give_each_rank_several_chunks_of_layers() -> None:
    made = lay_out([TARGET, DRAFT], Parallel(pp=2, virtual=2))
    assert [s and s[0] for s in shares(made, "target")] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [s and s[0] for s in shares(made, "draft")] == [None, [0, 1]]
    uneven = lay_out([TARGET], Parallel(pp=2, virtual=2, stages=(1, 3, 0, 4)))
    assert [s and s[0] for s in shares(uneven, "target")] == [[0], [1, 2, 3, 4, 5, 6, 7]]
    assert plan(made, lay_out([TARGET, DRAFT], Parallel(tp=2))).required(0) == (0, 1)


def test_a_draft_over_fewer_ranks_than_the_target_is_copied_or_left_to_the_first() -> None:
    copied = lay_out([TARGET, DRAFT.over(tp=2)], Parallel(tp=4))
    assert [s and s[1] for s in shares(copied, "draft")] == [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]]
    alone = lay_out([TARGET, DRAFT.over(tp=1, copies=False)], Parallel(tp=4, pp=2))
    assert [s and s[1] for s in shares(alone, "draft")] == [None] * 4 + [[(0, 4)], None, None, None]
    assert [s and s[1] for s in shares(alone, "target")][:4] == [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]


def test_a_draft_is_divided_by_heads_where_the_target_is_dealt_by_tokens() -> None:
    made = lay_out([LATENT, DRAFT.over(cp=1, tp=4)], Parallel(cp=4, interleave=16))
    assert [s and s[2] for s in shares(made, "latent")] == [0, 1, 2, 3]
    assert [s and (s[1], s[2]) for s in shares(made, "draft")] == [([(i, i + 1)], 0) for i in range(4)]


def test_a_draft_has_its_own_deal_and_its_own_stages() -> None:
    made = lay_out([LATENT, DRAFT.over(dcp=2, interleave=8, stages=(1, 1))], Parallel(tp=4, dcp=4, pp=2))
    assert [(g.cp_size, g.interleave) for g in made.groups] == [(4, 1), (2, 8)]
    assert [s and s[2] for s in shares(made, "draft")] == [0, 1] * 4
    assert [s and (s[0], s[1]) for s in shares(made, "draft")][3:5] == [([0], [(2, 4)]), ([1], [(0, 2)])]
    mixed = lay_out([LATENT, DRAFT.over(tp=2)], Parallel(tp=4, dcp=4, deal=(0, 1, 2, 3, 0)))
    assert [g.cp_size for g in mixed.groups] == [4, 1]


STATES = Cache.mamba1("m", 1, channels=6, state=2, kernel=4)[0]


@pytest.mark.parametrize(
    ("make", "sizes", "path"),
    [
        (lambda: DRAFT.over(tp=3), {"tp": 8}, "specs[0].over"),
        (lambda: DRAFT.over(tp=16), {"tp": 8}, "specs[0].over"),
        (lambda: DRAFT.over(tp=9, copies=False), {"tp": 8}, "specs[0].over"),
        (lambda: DRAFT.over(tp=0), {"tp": 8}, "specs[0].over.tp"),
        (lambda: DRAFT.over(dcp=3), {"tp": 8}, "specs[0].over.dcp"),
        (lambda: DRAFT.over(stages=(1, 1, 0)), {"pp": 2}, "specs[0].over.stages"),
        (lambda: DRAFT.over(stages=(1, 2)), {"pp": 2}, "specs[0].over.stages"),
        (lambda: DRAFT.over(dcp=2, deal="zigzag-by-length"), {"tp": 2}, "specs[0].over.deal"),
        (lambda: STATES.over(interleave=4), {"tp": 2}, "'m conv'.over.interleave"),
    ],
)
def test_sizes_of_one_cache_that_its_ranks_cannot_have(make: Any, sizes: dict[str, int], path: str) -> None:
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=path):
        lay_out([make()], Parallel(**sizes))


@pytest.mark.parametrize("cache", [Cache.page_scales("rows", 1, of="latent", page=16),
    Cache.compressed("rows", 1, dim=4, tokens_per_row=4, page_rows=2, part="c4")])  # fmt: skip
def test_runs_of_a_deal_hold_whole_rows(cache: Cache) -> None:
    """A DCP interleave of 1 cannot deal rows of several tokens: the sizes are refused, not the Description."""
    for sizes in ({"interleave": 1}, {"interleave": 16, "origin": 2}):
        with raises(LocalError, match="a row of 'rows'", path="origin" if "origin" in sizes else "interleave"):
            lay_out([cache], Parallel(tp=4, dcp=4, **sizes))
    lay_out([cache, LATENT.over(interleave=1)], Parallel(tp=4, dcp=4, interleave=16))
    lay_out([cache.replicated(), LATENT], Parallel(tp=4, dcp=4))


CACHES = [
    TARGET, LATENT, DRAFT, STATES, Cache.page_scales("scales", 8, kv_heads=8, page=16),
    Cache.compressed("c4", [1, 5], dim=4, tokens_per_row=4, page_rows=2), DRAFT.sharded(),
    Cache.window("ring", [0, 2], kv_heads=2, head_dim=4, ring_rows=8), Cache.indexer("index", 8, head_dim=128, page=4),
    Cache.gqa("again", 3, kv_heads=2, head_dim=4, page=4), Cache.handoff("first token", {"token": (DType.U32, 4)}),
    Cache.gqa("n" * 129, 1, kv_heads=1, head_dim=4, page=1, model=2), Cache.mla("odd", [3, 3, 1], latent=6, rope=2, page=4, model=3),
]  # fmt: skip
SIZES = {
    "tp": st.sampled_from([1, 2, 4, 6]), "pp": st.integers(1, 3), "cp": st.sampled_from([1, 1, 2, 3]),
    "dcp": st.sampled_from([1, 1, 2, 4]), "interleave": st.sampled_from([1, 4, 16, 1 << 19]), "origin": st.sampled_from([0, 0, 3, 16]),
    "virtual": st.sampled_from([1, 1, 2]), "deal": st.sampled_from(["cyclic", "zigzag", (0, 1, 1), (1, 0)]),
}  # fmt: skip
OWN = {name: strategy for name, strategy in SIZES.items() if name not in ("pp", "virtual")}
MADE: list[Geometry] = []
REFUSED: list[LocalError] = []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(CACHES), min_size=1, max_size=3, unique_by=lambda c: c.group.name),
    st.fixed_dictionaries(SIZES),
    st.data(),
)
def _lay_out_any(specs: list[Cache], sizes: dict[str, Any], data: st.DataObject) -> None:
    try:
        if data.draw(st.booleans()):
            specs[0] = specs[0].over(
                **data.draw(st.fixed_dictionaries({}, optional=OWN)), copies=data.draw(st.booleans())
            )
        made = lay_out(specs, Parallel(**sizes))
    except LocalError as error:
        REFUSED.append(error)
    else:
        MADE.append(made)
        assert len(made.ranks) == sizes["tp"] * sizes["pp"] * sizes["cp"]


def test_whatever_is_laid_out_is_a_description_and_the_rest_is_refused_by_name() -> None:
    MADE.clear()
    REFUSED.clear()
    _lay_out_any()
    for made in MADE:
        validate(made)
    assert all(error.path and error.mine and error.yours for error in REFUSED)
    assert min(len(MADE), len(REFUSED)) > 40


@pytest.mark.parametrize(("block", "scale"), [(16, DType.F8E4M3), (32, DType.F8E8M0)])
def test_four_bit_caches_are_half_as_long_and_have_their_scales(block: int, scale: DType) -> None:
    """NVFP4 and MXFP4."""
    kv = Cache.gqa("kv", 1, kv_heads=2, head_dim=64, page=4, dtype=DType.F4E2M1, scale_block=block, scale_dtype=scale)
    assert [(p.name, p.dtype, p.lane_bytes) for p in kv.group.parts] == [
        ("k", DType.F4E2M1, 32), ("v", DType.F4E2M1, 32), ("k_scale", scale, 64 // block), ("v_scale", scale, 64 // block)
    ]  # fmt: skip
    latent = Cache.mla(
        "kv", 1, latent=512, rope=64, page=4, dtype=DType.F4E2M1, scale_block=block, scale_dtype=scale
    ).group
    assert [(p.name, p.lane_bytes) for p in latent.parts] == [("latent", 288), ("latent_scale", 576 // block)]


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Cache.gqa("kv", 1, kv_heads=2, head_dim=63, page=4, dtype=DType.F4E2M1), "Cache.head_dim"),
        (lambda: Cache.mla("kv", 1, latent=6, rope=1, page=4, dtype=DType.F4E2M1), "Cache.latent"),
        (lambda: Cache.mamba1("m", 1, channels=6, state=2, kernel=4, dtype=DType.F4E2M1), "Cache.dtype"),
        (lambda: Cache.gqa("kv", 1, kv_heads=2, head_dim=48, page=4, scale_block=16, scale_dtype=DType.F4E2M1), "Cache.scale_block"),
        (lambda: Cache.handoff("first", {"token": (DType.U32, 6)}), 'Cache.parts["token"]'),
    ],
)  # fmt: skip
def test_half_a_byte_is_nobodys(make: Any, path: str) -> None:
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=path):
        make()


def test_describe_knows_four_bit_formats_by_name() -> None:
    target, draft = PRESETS["deepseek-v3"][0], PRESETS["llama-3-70b"][0]
    made = describe(target, [draft], kv_dtype="MXFP4")
    assert [[(p.name, p.dtype.name, p.lane_bytes) for p in g.parts] for g in made.groups] == [
        [("latent", "F4E2M1", 288), ("latent_scale", "F8E8M0", 18)],
        [("k", "F4E2M1", 64), ("v", "F4E2M1", 64), ("k_scale", "F8E8M0", 4), ("v_scale", "F8E8M0", 4)],
    ]
    with raises(LocalError, match="NVFP4, MXFP4", path="kv_dtype"):
        describe(target, kv_dtype="FP4")


def test_describe_divides_caches_by_name() -> None:
    target, draft = PRESETS["deepseek-v3"][0], PRESETS["llama-3-70b"][0]
    made = describe(target, [draft], Parallel(tp=8), own={"draft": {"tp": 2, "copies": False}})
    assert [s and s[1] for s in shares(made, "draft")] == [[(0, 4)], [(4, 8)]] + [None] * 6
    with raises(LocalError, match="one of target, draft", path="own"):
        describe(target, [draft], Parallel(tp=8), own={"drift": {"tp": 2}})
    with raises(LocalError, match="tp, cp, dcp", path="own['draft']"):
        describe(target, [draft], Parallel(tp=8), own={"draft": {"pp": 2}})
