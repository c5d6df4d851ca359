"""Cache and lay_out: the caches in use, stated in a few lines, cut over ranks, and handed over byte for byte."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.copying.execute import checksums, execute
from kvproto.copying.grants import items_needed
from kvproto.copying.program import RankLayout, Window
from kvproto.errors import LocalError, PlanError
from kvproto.planning.geometry import Geometry, validate
from kvproto.planning.layout import Block, Cache, Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import DType, ErrorCode, ItemKind
from kvproto_catalog.config import draft_of
from kvproto_catalog.models import PRESETS, describe, specs
from tests.errors import raises
from tests.pools import lower

F8, F4 = DType.F8E4M3, DType.F4E2M1


def one(spec: Cache, parallel: Parallel | None = None) -> Geometry:
    geometry = lay_out([spec], parallel)
    validate(geometry)
    return geometry


CACHES: dict[str, tuple[Cache, int, int]] = {
    # spec, rows of a window of 7 tokens, bytes of a row
    "gqa": (Cache.gqa("kv", 1, kv_heads=2, head_dim=4, page=4), 7, 32),
    "wide K": (Cache.gqa("kv", 1, kv_heads=2, head_dim=6, v_head_dim=4, page=4), 7, 40),
    "block scales": (Cache.gqa("kv", 1, kv_heads=2, head_dim=8, page=4, dtype=F8, scale_block=4), 7, 32 + 32),
    "NVFP4": (Cache.gqa("kv", 1, kv_heads=2, head_dim=32, page=4, dtype=F4, scale_block=16, scale_dtype=F8), 7, 64 + 8),
    "MXFP4": (
        Cache.mla("mla", 1, latent=24, rope=8, page=4, dtype=F4, scale_block=32, scale_dtype=DType.F8E8M0),
        7,
        17,
    ),
    "mla": (Cache.mla("mla", 1, latent=6, rope=2, page=4), 7, 16),
    "indexer": (Cache.indexer("index", 1, head_dim=128, page=4), 7, 132),
    "indexer without scales": (Cache.indexer("index", 1, head_dim=128, page=4, scale_block=None), 7, 128),
    "page scales": (Cache.page_scales("scales", 1, kv_heads=2, page=4), 2, 16),
    "C4": (Cache.compressed("c4", 1, dim=4, tokens_per_row=4, page_rows=2), 1, 8),
    "window": (Cache.window("swa", 1, kv_heads=2, head_dim=4, ring_rows=16), 7, 32),
    "conv": (Cache.mamba1("m", 1, channels=6, state=2, kernel=4, scratch_rows=2)[0], 3, 12),
    "ssm": (Cache.mamba1("m", 1, channels=6, state=2, kernel=4)[1], 1, 48),
    "conv 2": (Cache.mamba2("m", 1, heads=2, head_dim=3, groups=1, state=2, kernel=4)[0], 3, 20),
    "ssm 2": (Cache.mamba2("m", 1, heads=2, head_dim=3, groups=1, state=2, kernel=4)[1], 1, 48),
    "conv gdn": (Cache.gdn("g", 1, key_heads=1, key_dim=2, value_heads=2, value_dim=3, kernel=3)[0], 2, 20),
    "ssm gdn": (Cache.gdn("g", 1, key_heads=1, key_dim=2, value_heads=2, value_dim=3, kernel=3)[1], 1, 48),
}


@pytest.mark.parametrize("cache", CACHES)
def test_each_cache_copies_what_it_says(cache: str) -> None:
    spec, rows, size = CACHES[cache]
    geometry = one(spec)
    group = geometry.groups[0]
    columns, length = columns_without_gaps(geometry, 0, {0: 6})
    side, items = RankLayout(geometry, 0, columns), np.arange(items_needed(group, 0, 0, 7))
    program = lower(plan(geometry, geometry).routes, side, side, {0: Window(0, 7, items)}, {0: Window(0, 7, items + 1)})
    assert program.bytes == rows * size
    here, there = (np.random.default_rng(i).integers(0, 256, length, np.uint8) for i in (1, 2))
    assert execute(program, {0: memoryview(here)}, {0: memoryview(there)}) == program.bytes
    sums = (checksums(program, {0: memoryview(x)}, sink=k) for k, x in enumerate((here, there)))
    assert next(sums) == next(sums)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 50))
def test_blocks_are_cut_into_whole_units_that_cover(units: int, unit: int, ranks: int) -> None:
    cuts = [Block(units * unit, unit).cut(r, ranks) for r in range(ranks)]
    assert all(lo % unit == hi % unit == 0 and lo < hi for lo, hi in cuts)
    assert (cuts[0][0], cuts[-1][1]) == (0, units * unit)
    if ranks <= units:
        assert all(a[1] == b[0] for a, b in pairwise(cuts))
        assert max(hi - lo for lo, hi in cuts) - min(hi - lo for lo, hi in cuts) <= unit
    else:
        assert all(a == b or a[1] == b[0] for a, b in pairwise(cuts))
        held = [cuts.count(c) for c in set(cuts)]
        assert max(held) - min(held) <= 1


def test_sub_blocks_of_a_conv_state_are_cut_on_their_own() -> None:
    """16 key heads of 128 and 32 value heads of 128 over 4 ranks; one group of B and C on each of 4."""
    gdn = one(Cache.gdn("g", 1, key_heads=16, key_dim=128, value_heads=32, value_dim=128, kernel=4)[0], Parallel(tp=4))
    assert [(s.lo, s.hi) for s in gdn.ranks[1].owns[0].lanes] == [(512, 1024), (2560, 3072), (5120, 6144)]
    mamba = one(Cache.mamba2("m", 1, heads=8, head_dim=64, groups=1, state=128, kernel=4)[0], Parallel(tp=4))
    assert [(s.lo, s.hi) for s in mamba.ranks[3].owns[0].lanes] == [(384, 512), (512, 640), (640, 768)]


def test_both_states_of_a_recurrent_layer_have_its_layers_however_they_are_given() -> None:
    both = Cache.mamba2("m", iter([1, 3]), heads=2, head_dim=3, groups=1, state=2, kernel=4)
    assert [s.layers for s in both] == [(1, 3), (1, 3)]


def test_stages_divide_the_layers_of_the_target_and_a_draft_is_on_the_last() -> None:
    target, draft = (
        Cache.gqa(n, k, kv_heads=1, head_dim=8, page=4, model=m) for m, (n, k) in enumerate((("t", 7), ("d", 2)))
    )
    first = Cache.handoff("first token", {"token": (DType.U8, 4)})
    for stages, wanted in ((None, [3, 2, 2]), ((1, 4, 2), [1, 4, 2])):
        made = lay_out([target, draft, first], Parallel(pp=3, stages=stages))
        validate(made)
        assert [r.owns[0].layers.size for r in made.ranks] == wanted
        assert [[o.group for o in r.owns] for r in made.ranks] == [[0], [0], [0, 1, 2]]


def test_stages_cut_a_hybrid_by_the_model_not_by_the_cache() -> None:
    """48 layers, every fourth with attention, in stages of 10, 26 and 12."""
    made = describe(PRESETS["qwen3-next-80b-a3b"][0], parallel=Parallel(pp=3, stages=(10, 26, 12)))
    attention = [r.owns[0].layers.tolist() for r in made.ranks]
    assert attention == [[3, 7], [11, 15, 19, 23, 27, 31, 35], [39, 43, 47]]


def test_describe_says_which_caches_are_dealt() -> None:
    """Engines deal the target alone; these deal its index and the draft, from token 3 on, and store the target whole."""
    target, draft = PRESETS["deepseek-v3.2"][0], PRESETS["llama-3-70b"][0]
    sizes = Parallel(tp=4, dcp=2, origin=3)
    made = describe(target, [draft], sizes, sharded=["target index", "draft"], replicated=["target"])
    assert {g.name: (g.cp_size, g.origin) for g in made.groups} == {
        "target": (1, 0), "target index": (2, 3), "draft": (2, 3)
    }  # fmt: skip
    usual = describe(target, [draft], sizes)
    assert {g.name: g.cp_size for g in usual.groups} == {"target": 2, "target index": 1, "draft": 1}


@pytest.mark.parametrize(
    ("named", "path", "says"),
    [
        ({"sharded": ["drift"]}, "sharded", "one of target, target index"),
        ({"replicated": [""]}, "replicated", "one of target, target index"),
        ({"sharded": ["target"], "replicated": ["target"]}, "sharded", "not replicated too"),
    ],
)
def test_describe_refuses_names_of_no_cache_and_lists_those_that_there_are(
    named: dict[str, list[str]], path: str, says: str
) -> None:
    with raises(LocalError, match=says, code=ErrorCode.OUT_OF_RANGE, path=path):
        describe(PRESETS["deepseek-v3.2"][0], parallel=Parallel(tp=2, dcp=2), **named)


@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ({"tp": 0}, "tp"), ({"interleave": 0}, "interleave"), ({"tp": 4, "dcp": 3}, "dcp"), ({"tp": 2, "dcp": 2, "cp": 2}, "dcp"),
        ({"pp": 2, "stages": (1,)}, "stages"), ({"pp": 2, "stages": (9, -1)}, "stages"), ({"pp": 2, "stages": (1, 2)}, "stages"),
    ],
)  # fmt: skip
def test_sizes_that_no_engine_has(sizes: dict[str, Any], path: str) -> None:
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=path):
        lay_out([Cache.mla("m", 8, latent=6, rope=2, page=4)], Parallel(**sizes))


CONV = {"conv": (DType.U8, 10, 1)}


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (Cache.mla("m", 9, latent=6, rope=2, page=4), "specs[0].layers"),
        (Cache.mla("m", 0, latent=6, rope=2, page=4), "specs[0].layers"),
        (Cache.state("m", 1, parts=CONV, blocks={"conv": [Block(10, 4)]}), "specs[0].blocks[conv]"),
        (Cache.state("m", 1, parts=CONV, blocks={"conv": [Block(4), Block(4)]}), "specs[0].blocks[conv]"),
        (Cache.state("m", 1, parts=CONV, blocks={"conv": [Block(10, 0)]}), "specs[0].blocks[conv]"),
    ],
)
def test_layers_and_lanes_are_somebodys(spec: Cache, path: str) -> None:
    with raises(LocalError, path=path):
        lay_out([spec], depth=8)


def test_blocks_are_of_parts() -> None:
    with raises(LocalError, path="blocks"):
        Cache.state("m", 1, parts=CONV, blocks={"cnov": [Block(10, 5)]})


def test_layers_of_a_hybrid_are_dealt_evenly_over_replicas() -> None:
    """Attention in each fourth layer, held twice: neither copy gives all of it."""
    config = PRESETS["qwen3-next-80b-a3b"][0]
    made = plan(describe(config, parallel=Parallel(tp=4)), describe(config, parallel=Parallel(tp=1)))
    given_ = {
        r.source: sum(b.layer_hi - b.layer_lo for b in r.boxes if b.part == 0) for r in made.routes if r.group == 0
    }
    assert given_ == {0: 6, 1: 6, 2: 6, 3: 6}


def test_page_scales_want_equal_pages() -> None:
    pages = [one(Cache.page_scales("scales", 1, kv_heads=2, page=p)) for p in (16, 32)]
    with raises(PlanError, code=ErrorCode.ROW_MISMATCH, path="groups[scales].tokens_per_row"):
        plan(*pages)


def test_scales_of_what_is_not_there() -> None:
    """Refused with the parts that are there, so that nothing arrives without what makes it numbers."""
    latent = Cache.mla("kv", 2, latent=6, rope=2, page=16)
    with raises(LocalError, code=ErrorCode.PART_MISSING, path="'scales'.parts[k_scale]") as caught:
        lay_out([latent, Cache.page_scales("scales", 2, kv_heads=1, page=16)])
    assert caught.value.yours == "k_scale, latent, v_scale, no k"
    with pytest.raises(LocalError, match="latent of layer 2"):
        lay_out([latent, Cache.page_scales("scales", 3, of="latent", page=16)])
    lay_out([latent, Cache.page_scales("scales", 2, of="latent", page=16)])
    for wrong in ({"of": "latent", "kv_heads": 1}, {}, {"of": "rope"}):
        with pytest.raises(LocalError):
            Cache.page_scales("scales", 2, page=16, **wrong)


def test_scales_of_several_tokens_move_before_their_row_is_full() -> None:
    latent = Cache.mla("kv", 1, latent=6, rope=2, page=16)
    whole = Cache.compressed("scales", 1, dim=1, tokens_per_row=16, page_rows=1, dtype=DType.F32, part="latent_scale")
    with raises(LocalError, code=ErrorCode.ROW_MISMATCH, path="'scales'.parts[latent_scale]") as caught:
        lay_out([latent, whole])
    assert 'page_scales (of="latent")' in (caught.value.advice or "")
    rows = Cache.compressed("kv", 1, dim=8, tokens_per_row=16, page_rows=1)  # a row is there as soon as its scale is
    lay_out([rows, whole])


CONFIGS: dict[str, tuple[dict[str, Any], list[tuple[str, ItemKind, int, int]]]] = {
    # config.json, and of each group: name, kind, layers, bytes of all lanes of a row
    "Llama": (
        {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "torch_dtype": "float16"},
        [("target", ItemKind.PAGE, 4, 64)]),
    "multi-head, fp32": (
        {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "dtype": "float32"}, [("target", ItemKind.PAGE, 2, 512)]),
    "sliding layers": (
        {"num_hidden_layers": 4, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        [("target", ItemKind.PAGE, 2, 64), ("target window", ItemKind.PAGE, 2, 64)]),
    "sparse MLA": (
        {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
        [("target", ItemKind.PAGE, 3, 1152), ("target index", ItemKind.PAGE, 3, 132)]),
    "Mamba 1": (
        {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "state_size": 8, "conv_kernel": 4},
        [("target conv", ItemKind.SLOT, 2, 64), ("target ssm", ItemKind.SLOT, 2, 1024)]),
    "Mamba 1, fp32": (
        {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "state_size": 8, "conv_kernel": 4, "torch_dtype": "float32"},
        [("target conv", ItemKind.SLOT, 2, 128), ("target ssm", ItemKind.SLOT, 2, 1024)]),
    "Mamba 2": (
        {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 8, "conv_kernel": 4},
        [("target conv", ItemKind.SLOT, 2, 128), ("target ssm", ItemKind.SLOT, 2, 1024)]),
    "Mamba 1 and attention": (
        {"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 4, "attn_layer_offset": 1,
         "mamba_expand": 2, "mamba_d_state": 8, "mamba_d_conv": 4},
        [("target", ItemKind.PAGE, 2, 128), ("target conv", ItemKind.SLOT, 6, 256), ("target ssm", ItemKind.SLOT, 6, 4096)]),
    "gated delta net": (
        PRESETS["qwen3-next-80b-a3b"][0],
        [("target", ItemKind.PAGE, 12, 2048), ("target conv", ItemKind.SLOT, 36, 16384), ("target ssm", ItemKind.SLOT, 36, 32 * 128 * 128 * 4)]),
    "heads wider than their share": (
        {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_head_dim": 32},
        [("target", ItemKind.PAGE, 1, 256)]),
    "text inside": (
        {"text_config": {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}}, [("target", ItemKind.PAGE, 1, 32)]),
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_config_json(config: str) -> None:
    given_, wanted = CONFIGS[config]
    made = [
        (s.group.name, s.group.kind, len(s.layers), sum(p.lanes * p.lane_bytes for p in s.group.parts))
        for s in specs(given_)
    ]
    assert made == wanted
    validate(describe(given_, parallel=Parallel(tp=2)))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"num_attention_heads": None}, "config.num_attention_heads"),
        (
            {"num_attention_heads": None, "state_size": 16},
            "config.conv_kernel",
        ),  # no attention: a Mamba, which lacks its sizes
        ({"text_config": {"num_key_value_heads": 2}}, "config.head_dim"),  # Gemma 3: the default of its class
        ({"text_config": {"head_dim": 8}}, "config.num_key_value_heads"),
        ({"torch_dtype": "int3"}, "config.torch_dtype"),
        ({"layer_types": ["full_attention", "novel"]}, "config.layer_types"),
        ({"num_hidden_layers": None}, "config.num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "config.num_hidden_layers"),
        ({"layer_types": 2}, "config.layer_types"),
        ({"layer_types": ["full_attention"] * 3}, "config.layer_types"),
        ({"hybrid_override_pattern": "*"}, "config.num_hidden_layers"),
        ({"hybrid_override_pattern": "*|"}, "config.hybrid_override_pattern"),
        ({"attn_layer_indices": [1, 2]}, "config.attn_layer_indices"),
        ({"attn_layer_period": 2, "attn_layer_offset": 2}, "config.attn_layer_offset"),
        ({"num_key_value_heads": [2, 4]}, "config.num_key_value_heads"),
        ({"num_key_value_heads": 0}, "config.num_key_value_heads"),
        ({"num_kv_heads": 2}, "config.num_key_value_heads"),  # Falcon
        ({"num_attention_groups": 1}, "config.num_key_value_heads"),  # Step 3
        ({"v_head_dim": "auto"}, "config.v_head_dim"),
        ({"hidden_size": 63}, "config.head_dim"),
    ],
)
def test_config_that_is_not_understood(changes: dict[str, Any], path: str) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8} | changes
    with raises(LocalError, path=path):
        specs({k: v for k, v in config.items() if v is not None})


@pytest.mark.parametrize(
    "said",
    [
        {"mamba_d_head": 64, "mamba_n_heads": 48},  # Falcon-H1: both caches in every layer
        {"linear_attn_config": {"full_attn_layers": [1]}},  # without the layers that have a state
        {"block_types": ["recurrent", "attention"]},  # RecurrentGemma
        {"block_configs": [{"attention": {"n_heads_in_group": 8}}]},  # Nemotron Super
        {"conv_L_cache": 3},  # LFM2
        {"cross_attention_layers": [1]},  # Llama 3.2 Vision
        {"num_kv_shared_layers": 2},  # nobody would have what is shared
        {"cla_share_factor": 0, "use_cla": True},
        {"hybrid_layer_pattern": [0, 1]},  # MiMo V2
        {"n_mamba_heads": 2, "attn_layer_period": 2},  # Zamba
    ],
    ids=lambda said: next(iter(said)),
)
def test_hybrids_that_are_not_read_are_not_taken_for_plain_attention(said: dict[str, Any]) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    assert len(specs(config)) == 1
    with pytest.raises(LocalError) as caught:
        specs(config | said)
    assert next(iter(said)) in f"{caught.value.path}: {caught.value.mine}"


@pytest.mark.parametrize("nested", [False, True])
def test_a_draft_has_the_layers_that_predict_and_the_sizes_of_its_target(nested: bool) -> None:
    config = {"num_hidden_layers": 9, "kv_lora_rank": 6, "qk_rope_head_dim": 2, "num_nextn_predict_layers": 2}
    draft = draft_of({"text_config": config, "num_nextn_predict_layers": 2} if nested else config)
    assert draft is not None
    assert [(s.layers, s.group.parts[0].lane_bytes) for s in specs(draft, 1)] == [((0, 1), 16)]
    assert draft_of(draft) is None


def test_a_size_that_has_no_default_is_stated() -> None:
    with raises(LocalError, path="Cache.page"):
        Cache.gqa("kv", 2, kv_heads=4, head_dim=8, page=None)  # type: ignore[arg-type]


def test_an_engine_may_divide_heads_in_its_own_way() -> None:
    cache = Cache.gqa("kv", 2, kv_heads=4, head_dim=8, page=16)
    made = lay_out([cache.divided([(0, 1), (1, 3), (2, 4)])], Parallel(tp=3))
    spans = [[(s.part, s.lo, s.hi) for s in rank.owns[0].lanes] for rank in made.ranks]
    assert spans == [[(0, 0, 1), (1, 0, 1)], [(0, 1, 3), (1, 1, 3)], [(0, 2, 4), (1, 2, 4)]]
    validate(made)


@pytest.mark.parametrize("shares", [[(0, 1), (2, 4)], [(0, 2), (2, 5)], [(0, 4), (2, 2)]])
def test_shares_that_leave_a_head_out_or_are_none_are_refused(shares: list[tuple[int, int]]) -> None:
    with pytest.raises(LocalError, match="shares of 'k'"):
        Cache.gqa("kv", 2, kv_heads=4, head_dim=8, page=16).divided(shares)


def test_shares_of_another_number_of_ranks_are_refused() -> None:
    cache = Cache.gqa("kv", 2, kv_heads=4, head_dim=8, page=16).divided([(0, 2), (2, 4)])
    with pytest.raises(LocalError, match=r"each of 4 ranks"):
        lay_out([cache], Parallel(tp=4))
