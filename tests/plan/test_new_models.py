"""Models of 2026 by their config.json: the caches of spec/v1/parts.md, "Caches of 2026", under their names and layer ids."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvproto import DType, Parallel
from kvproto.errors import LocalError, PlanError
from kvproto.planning.geometry import Geometry, validate
from kvproto.planning.plan import differences, plan
from kvproto.wire.enums import ErrorCode, ItemKind
from kvproto_catalog.engines import Setup, pools
from kvproto_catalog.models import describe, draft_of, fields_read
from kvproto_catalog.types import CLASSES
from tests.errors import raises

V4: dict[str, Any] = {
    "model_type": "deepseek_v4", "num_hidden_layers": 7, "hidden_size": 4096, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128, "index_head_dim": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0], "num_nextn_predict_layers": 1,
}  # fmt: skip
V4_TYPES = {
    **{name: value for name, value in V4.items() if name != "compress_ratios"},
    "layer_types": [
        {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}[ratio]
        for ratio in V4["compress_ratios"][:7]
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
}
"""The same as transformers saves it."""
DSA = {"num_hidden_layers": 10, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
GQA = {"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
LOOPED = {**GQA, "n_input_layers": 1, "n_output_layers": 2, "n_recurrent_loops": 3}
M3 = {**GQA, "sparse_attention_config": {"sparse_attention_freq": [0, 0, 0, 1, 1, 1], "sparse_index_dim": 128}}

Held = dict[tuple[str, int], tuple[str, int, int, list[int]]]


def held(made: Geometry, model: int = 0) -> Held:
    """By part and tokens of a row: kind of items, rows, bytes of a lane, layers."""
    layers = {share.group: share.layers.tolist() for share in made.ranks[0].owns}
    return {
        (part.name, g.tokens_per_row): (ItemKind(g.kind).name, g.rows, part.lane_bytes, layers[g.id])
        for g in made.groups
        if g.model == model
        for part in g.parts
    }


@pytest.mark.parametrize("config", [V4, V4_TYPES], ids=["compress_ratios", "layer_types"])
def test_deepseek_v4_has_a_window_in_each_layer_and_rows_of_4_and_of_128(config: Mapping[str, Any]) -> None:
    made = describe(config, page=256)
    validate(made)
    found = held(made)
    found.pop(("compress_state", 1))  # of two groups
    assert found == {
        ("window_latent", 1): ("PAGE", 256, 1024, [*range(7)]),
        ("latent", 4): ("PAGE", 64, 1024, [2, 4, 6]),
        ("index", 4): ("PAGE", 64, 128, [2, 4, 6]),
        ("index_scale", 4): ("PAGE", 64, 4, [2, 4, 6]),
        ("index_compress_state", 1): ("RING", 8, 2048, [2, 4, 6]),
        ("latent", 128): ("PAGE", 2, 1024, [3, 5]),
    }
    states = {g.name: (g.rows, g.parts[0].lane_bytes) for g in made.groups if g.parts[0].name == "compress_state"}
    assert states == {"target c4 state": (8, 8192), "target c128 state": (128, 4096)}
    assert {fact.name: fact.value for fact in made.facts} == {"window.target": "128"}


@pytest.mark.parametrize("config", [V4, V4_TYPES], ids=["compress_ratios", "layer_types"])
def test_the_draft_of_deepseek_v4_has_a_window_and_counts_from_0(config: Mapping[str, Any]) -> None:
    """KVP-GEO-W-LAYERS: layer 7 of the checkpoint is layer 0 of the draft."""
    draft = draft_of(config)
    assert draft is not None
    assert held(describe(config, [draft]), 1) == {("window_latent", 1): ("PAGE", 64, 1024, [0])}


GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "sliding_window": 1024, "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}  # fmt: skip
MIMO: dict[str, Any] = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 192, "v_head_dim": 128, "sliding_window": 128, "sliding_window_size": 128, "swa_head_dim": 192,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0, 1, 1, 0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "heads"),
    [
        ({"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}, 2),
        ({"per_layer_config": {"05": {"head_dim": 512, "num_key_value_heads": 2}}}, 2),
        (
            {"num_global_key_value_heads": 2, "attention_k_eq_v": False},
            8,
        ),  # the class has 512 where a card says nothing
    ],
)
def test_full_layers_of_gemma_4_have_sizes_of_their_own(more: dict[str, Any], heads: int) -> None:
    made = describe({**GEMMA4, **more})
    shares = {share.group: share.layers.tolist() for share in made.ranks[0].owns}
    found = {tuple(shares[g.id]): {(p.name, p.lanes, p.lane_bytes) for p in g.parts} for g in made.groups}
    assert found == {
        (0, 1, 2, 3, 4): {("k", 8, 512), ("v", 8, 512)},
        (5,): {("k", heads, 1024), ("v", heads, 1024)},
    }


def test_windows_of_mimo_have_more_heads_where_the_card_says_so() -> None:
    made = describe(MIMO)
    found = {g.name: {(p.name, p.lanes, p.lane_bytes) for p in g.parts} for g in made.groups}
    assert found == {
        "target": {("k", 4, 384), ("v", 4, 256)},
        "target window": {("k", 8, 384), ("v", 8, 256)},
    }


@pytest.mark.parametrize(
    ("stated", "path"),
    [
        ({"06": {"head_dim": 512}}, "config.per_layer_config"),
        ({"x": {"head_dim": 512}}, "config.per_layer_config"),
        ({"05": 512}, "config.per_layer_config[05]"),
        ({"05": {"sliding_window": 9}}, "config.per_layer_config[05]"),
        ({"05": {"head_dim": "512"}}, "config.head_dim"),
        ([512], "config.per_layer_config"),
    ],
)
def test_sizes_of_single_layers_that_cannot_be_read(stated: object, path: str) -> None:
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=path):
        describe({**GEMMA4, "per_layer_config": stated})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (GEMMA4, "global_head_dim"),
        (MIMO, "swa_num_key_value_heads"),
        (V4, "compress_ratios"),
        (V4_TYPES, "layer_types"),
        ({**DSA, "qk_nope_head_dim": 128, "indexer_types": ["full", *["shared"] * 9]}, "indexer_types"),
    ],
)
def test_how_engines_arrange_layers_of_several_sizes_is_not_known(config: dict[str, Any], field: str) -> None:
    """Of the fields that say so, one that the file has is named."""
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=f"config.{field}", yours="present"):
        pools("vllm", config)


@pytest.mark.parametrize("page", [1, 64, 100, 200])
def test_pages_hold_whole_rows(page: int) -> None:
    """Of 128 tokens: a page table of another length than was asked for is nobody's."""
    with raises(LocalError, path="page", mine="a multiple of 128, the tokens of a compressed row"):
        describe(V4, page=page)
    assert held(describe(V4))["latent", 128] == ("PAGE", 1, 1024, [3, 5])


def test_two_engines_of_deepseek_v4_are_planned_and_one_that_lacks_a_latent_is_refused() -> None:
    """KVP-PLAN-LEFT: K and V of an engine that knows one kind of latent alone."""
    wide, narrow = describe(V4, (), Parallel(tp=8, pp=2), 256), describe(V4_TYPES, (), Parallel(tp=2), 128)
    assert len({route.group for route in plan(wide, narrow).routes}) == len(narrow.groups)
    windows = describe({**V4, "compress_ratios": [0] * 8}, (), Parallel(tp=2))
    with raises(PlanError, code=ErrorCode.PART_MISSING, path="groups[target window].parts[window_latent]"):
        plan(wide, windows)


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"compress_ratios": [0, 0, 4]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 8, 128, 4, 128, 4, 0]}, "compress_ratios"),
        ({"compress_ratios": None}, "compress_ratios"),
        ({"compress_ratios": ["4"] * 8}, "compress_ratios"),
        ({"kv_source_layer_ids": [2, 5]}, "kv_source_layer_ids"),
        ({"index_head_dim": None}, "index_head_dim"),
    ],
)
def test_a_model_that_is_not_quite_it_is_refused_by_name(more: Mapping[str, Any], path: str) -> None:
    with raises(LocalError, path=f"config.{path}"):
        describe({**V4, **more})


def test_scales_of_a_latent_of_deepseek_v4_are_not_guessed() -> None:
    """An FP8 row of it is codes, scales and a rotary part in BF16 (spec/v1/parts.md)."""
    for kv_dtype in ("NVFP4", DType.F8E4M3):
        with raises(LocalError, path="kv_dtype"):
            describe(V4, kv_dtype=kv_dtype)
    assert held(describe(V4, kv_dtype=DType.F16))["latent", 4][2] == 1024


@pytest.mark.parametrize(
    "config",
    [V4, M3, LOOPED, {**DSA, "qk_nope_head_dim": 128, "index_topk_freq": 4}],
    ids=["V4", "M3", "looped", "some layers indexed"],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_how_an_engine_arranges_such_pools_is_not_guessed(engine: str, config: Mapping[str, Any]) -> None:
    with raises(LocalError, match="state them by kvproto.Cache"):
        pools(engine, config)


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({}, [*range(10)]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_freq": 4}, [0, 1, 5, 9]),
        ({"indexer_types": ["full", *["shared"] * 4] * 2}, [0, 5]),
        ({"index_topk_pattern": "FFSSSFSSSF"}, [0, 1, 5, 9]),
        ({"index_topk_pattern": "FFSSSFSSSF", "index_topk_freq": 4}, [0, 1, 5, 9]),
        ({"cli_factor": 3}, [0, 3, 6, 9]),
    ],
    ids=lambda value: next(iter(value), "all") if isinstance(value, dict) else "",
)
def test_layers_that_take_what_another_has_chosen_have_no_index_keys(
    more: Mapping[str, Any], layers: list[int]
) -> None:
    """KVP-GEO-W-SHARED: GLM-5.2 and LongCat, whose other layers have a latent alone."""
    found = held(describe({**DSA, **more}))
    assert found["index", 1][3] == layers
    assert found["latent", 1][3] == [*range(10)]


@pytest.mark.parametrize("form", ["published", "saved"])
def test_minimax_m3_has_index_keys_beside_k_and_v(form: str) -> None:
    types = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 3
    found = held(describe(M3 if form == "published" else {**GQA, "layer_types": types, "index_head_dim": 128}))
    assert found["index", 1] == ("PAGE", 64, 256, [3, 4, 5])
    assert found["k", 1][3] == [*range(6)]
    assert ("index_scale", 1) not in found


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({}, [*range(12)]),
        ({"recurrent_kv_cache_mode": "last_loop"}, [0, *range(7, 12)]),
        ({"n_recurrent_loops": 1}, [*range(6)]),
    ],
    ids=["per loop", "last loop", "once"],
)
def test_each_pass_of_a_loop_is_a_layer(more: Mapping[str, Any], layers: list[int]) -> None:
    """KVP-GEO-W-LAYERS: one layer, three that are passed three times, two; a pass that only reads has no cache."""
    assert held(describe({**LOOPED, **more}))["k", 1][3] == layers


def test_attention_and_mlp_of_dory_are_one_layer() -> None:
    """Its published form lists them apart, and counts both where it counts layers."""
    dory: dict[str, Any] = {
        **GQA, "model_type": "dory", "sliding_window": 128, "num_hidden_layers": 8, "n_input_layers": 2, "n_output_layers": 2,
        "n_recurrent_loops": 3, "layer_types": ["full_attention", "mlp"] * 4,
    }  # fmt: skip
    assert held(describe(dory))["k", 1][3] == [*range(1 + 2 * 3 + 1)]
    with raises(LocalError, path="config.layer_types", mine="attention and mlp in turn"):
        describe({**dory, "layer_types": ["full_attention"] * 4 + ["mlp"] * 4})


@pytest.mark.parametrize(("stack", "layers"), [({}, 6 * 2 * 4), ({"num_layers_per_stack": 1}, 6)])
def test_each_cycle_of_a_hierarchy_is_a_layer(stack: Mapping[str, Any], layers: int) -> None:
    """KVP-GEO-W-LAYERS: HRM counts its layers itself once it has been saved."""
    assert len(held(describe({**GQA, "H_cycles": 2, "L_cycles": 3, **stack}))["k", 1][3]) == layers


MAMBA = {
    **GQA, "hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
    "mamba_d_conv": 4, "layer_types": ["linear_attention", "full_attention"] * 3,
}  # fmt: skip
KDA = {
    **DSA, "index_head_dim": None, "layer_types": ["linear_attention", "full_attention"] * 5, "linear_num_heads": 32,
    "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
KDA_BOTH = {
    **KDA,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3, 5, 7, 9],
    },
}


@pytest.mark.parametrize(
    ("config", "conv", "state"),
    [(MAMBA, 8448, 128 * 64 * 128), (KDA, 12288, 32 * 128 * 128), (KDA_BOTH, 12288, 32 * 128 * 128)],
)
def test_linear_attention_is_what_the_other_fields_say(config: Mapping[str, Any], conv: int, state: int) -> None:
    """Granite 4 and Kimi Linear as transformers saves them: both have a convolution, and neither a square state."""
    groups = {g.parts[0].name: g for g in describe(config).groups}
    assert groups["conv"].parts[0].lanes == conv
    assert groups["ssm"].parts[0].lanes * groups["ssm"].parts[0].lane_bytes == 4 * state


@pytest.mark.parametrize("more", [{"n_recurrent_loops": 1 << 30}, {"H_cycles": 1 << 20, "L_cycles": 1 << 20}])
def test_loops_without_end_are_refused(more: Mapping[str, Any]) -> None:
    with raises(LocalError, path=f"config.{next(iter(more))}"):
        describe({**LOOPED, "n_recurrent_loops": 1, **more})


def test_the_layers_of_a_loop_are_between_others() -> None:
    with raises(LocalError, path="config.n_output_layers"):
        describe({**LOOPED, "n_output_layers": 5})


UNKNOWN = [
    (GQA, "index_head_dim", 128),
    (GQA, "swa_num_key_value_heads", 8),
    (GQA, "ssm_cfg", {"d_state": 16}),
    (GQA, "engram_cache_size", 3),
    (GQA, "kv_channels", 128),
    (GQA, "recurrent_state_size", [64, 64]),
    (GQA, "attention_types", [[["global", "local"], 12]]),
    (GQA, "share_cross_kv", True),
    (DSA, "latent_window", 128),
    (V4, "compress_overlap", 2),
    (MAMBA, "lightning_heads", 8),
]


@pytest.mark.parametrize(("config", "field", "value"), UNKNOWN, ids=[field for _, field, _ in UNKNOWN])
def test_a_field_that_may_be_about_caches_and_is_not_known_is_refused(
    config: Mapping[str, Any], field: str, value: Any
) -> None:
    """A cache that nobody states is not missed: two descriptions that lack it agree."""
    for new in ({**config, field: value}, {"text_config": {**config, field: value}}):
        with raises(LocalError, path=f"config.{field}", match="--ignore"):
            describe(new)


@pytest.mark.parametrize("nothing", [None, False, 0, [], {}, 0.5, [0.5, 1.0]], ids=repr)
def test_nothing_and_fractions_are_no_caches(nothing: Any) -> None:
    assert describe({**GQA, "engram_cache_size": nothing}) == describe(GQA)


@pytest.mark.parametrize(
    "more",
    [
        {"num_local_experts": 8, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 1000},
        {"rms_norm_eps": 1e-6, "rope_theta": 10000, "vocab_size": 32000, "intermediate_size": 11008},
        {
            "image_token_index": 4,
            "vision_config": {"num_heads": 8},
            "audio_chunk_size": 480,
            "mtp_layer_types": ["moe"],
        },
        {"use_cache": True, "rope_scaling": {"type": "linear"}, "max_window_layers": 28, "sliding_window": None},
    ],
)
def test_fields_of_other_things_are_not_asked_about(more: Mapping[str, Any]) -> None:
    made, plain = describe({**GQA, **more}), describe(GQA)
    assert (made.groups, made.ranks) == (plain.groups, plain.ranks)


@pytest.mark.parametrize(("shown", "heads"), [({"multi_query": True}, 1), ({"multi_query": False}, 71), ({"new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 8}, 8)])  # fmt: skip
def test_falcon_has_one_kv_head_or_as_many_as_it_says(shown: Mapping[str, Any], heads: int) -> None:
    falcon = {"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 4544, "num_attention_heads": 71}
    assert {p.lanes for p in describe({**falcon, "num_kv_heads": 71, **shown}).groups[0].parts} == {heads}


def test_windows_of_mimo_have_twice_the_heads_where_its_card_does_not_say_so() -> None:
    """As transformers saves it: the factor is in its code. In another form the heads are not known."""
    saved = {**GQA, "model_type": "mimo_v2_flash", "sliding_window": 128, "v_head_dim": 128}
    made = describe({**saved, "layer_types": ["full_attention", "sliding_attention"] * 3})
    lanes = {group.name: group.parts[0].lanes for group in made.groups}
    assert lanes["target window"] == 2 * lanes["target"]
    with raises(LocalError, path="config.model_type"):
        describe({**saved, "hybrid_layer_pattern": [0, 1] * 3})


def test_a_layer_of_longcat_has_two_latents() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 64, "num_layers": 3}
    made = describe({"model_type": "longcat_flash", "hidden_size": 64, "torch_dtype": "bfloat16", **latent})
    assert made.ranks[0].owns[0].layers.tolist() == list(range(6))


def test_layers_of_ling_are_those_that_transformers_lists() -> None:
    """Not those that its card gives by the size of a group, which another model may mean otherwise."""
    kda = {"linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "short_conv_kernel_size": 4}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_group_size": 2}
    ling = {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 64,
        **kda,
        **latent,
    }
    listed = {"layer_types": ["linear_attention", "full_attention"] * 2, "torch_dtype": "bfloat16"}
    made = describe({**ling, **listed})
    assert {own.group: own.layers.tolist() for own in made.ranks[0].owns} == {0: [1, 3], 1: [0, 2], 2: [0, 2]}
    with raises(LocalError, path="config.layer_group_size"):
        describe(ling)
    with raises(LocalError, path="config.short_conv_kernel_size"):
        describe({**ling, **listed, "short_conv_kernel_size": 5})


def test_a_draft_that_only_reads_the_target_has_no_cache_to_describe() -> None:
    """The assistant of Gemma 4, all of whose layers share."""
    with raises(LocalError, path="config.num_kv_shared_layers", match="leave the model out"):
        describe(GQA, [{**GQA, "num_kv_shared_layers": 6}])


def test_a_kind_of_layer_that_is_not_known_is_stated_by_hand() -> None:
    with raises(LocalError, path="config.layer_types", match="kvproto.Cache"):
        describe({**GQA, "layer_types": ["indexed_attention"] * 6})


def test_a_list_of_sparse_layers_is_a_list() -> None:
    with raises(LocalError, path="config.sparse_attention_config.sparse_attention_freq"):
        describe({**GQA, "sparse_attention_config": {"sparse_attention_freq": 1}})


INDEXED = {**DSA, "indexer_types": ["full", *["shared"] * 4] * 2}
SPARSE: dict[str, Any] = M3["sparse_attention_config"]
LISTS: list[tuple[Mapping[str, Any], str, Any]] = [
    (INDEXED, "indexer_types", ["bogus"] * 10),
    (INDEXED, "indexer_types", ["Shared"] * 10),
    (INDEXED, "indexer_types", ["shared"] * 4),
    (INDEXED, "indexer_types", ["shared"] * 11),
    (INDEXED, "indexer_types", []),
    (INDEXED, "index_topk_pattern", "FFSSS"),
    ({**DSA, "index_topk_pattern": "FFSSSFSSSF", "index_topk_freq": 4}, "index_topk_pattern", "FFFSSFSSSF"),
    (INDEXED, "index_topk_pattern", "FFSSSXFSSS"),
    (M3, "sparse_attention_config.sparse_attention_freq", ["0", "0", "0", "1", "1", "1"]),
    (M3, "sparse_attention_config.sparse_attention_freq", [0, 0, 0, 1, 1]),
    (M3, "sparse_attention_config.sparse_attention_freq", [None] * 6),
    (M3, "sparse_attention_config.sparse_attention_freq", [False, True] * 3),
    (M3, "sparse_attention_config.sparse_attention_freq", []),
    (M3, "sparse_attention_config.sparse_attention_freq", None),
    (M3, "sparse_attention_config.use_sparse_attention", False),
    (M3, "layer_types", ["full_attention"] * 4 + ["minimax_m3_sparse"] * 2),
    (GQA, "layer_types", ["full_attention"] * 5),
    (GQA, "no_rope_layers", [1] * 5),
    (GQA, "attn_type_list", [1] * 7),
    (V4, "layer_types", ["sliding_attention"] * 7),
    (V4_TYPES, "compress_rates.compressed_sparse_attention", 0),
    (V4_TYPES, "compress_rates.heavily_compressed_attention", 64),
]


@pytest.mark.parametrize(("config", "field", "value"), LISTS, ids=str)
def test_a_list_of_layers_has_each_layer_and_values_that_are_known(
    config: Mapping[str, Any], field: str, value: Any
) -> None:
    """What is not understood is not taken for the value that is most common: each layer would have, or lack, a cache."""
    outer, _, inner = field.partition(".")
    changed = {**config, outer: {**config[outer], inner: value} if inner else value}
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=f"config.{field}"):
        describe(changed)
    assert describe(config)


KIMI: dict[str, Any] = {**KDA_BOTH["linear_attn_config"], "full_attn_layers": [2, 4, 6, 8, 10]}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"kda_layers": [1, 2, 3]}, "full_attn_layers"),
        ({"full_attn_layers": [*range(1, 11)]}, "full_attn_layers"),
        ({"full_attn_layers": "abc"}, "full_attn_layers"),
        ({"full_attn_layers": None}, "full_attn_layers"),
        ({"full_attn_layers": [2, 4, 6, 8, 11]}, "full_attn_layers"),
        ({"kda_layers": [1, 1, 3, 5, 7, 9]}, "full_attn_layers"),
    ],
)
def test_each_layer_of_kimi_is_in_one_of_two_lists(more: dict[str, Any], field: str) -> None:
    plain = {name: value for name, value in DSA.items() if name != "index_head_dim"}
    assert describe({**plain, "linear_attn_config": KIMI})
    with raises(LocalError, path=f"config.linear_attn_config.{field}"):
        describe({**plain, "linear_attn_config": {**KIMI, **more}})


def test_two_lists_of_layers_agree() -> None:
    for config in (KDA_BOTH, {**KDA_BOTH, "linear_attn_config": KIMI}):
        assert describe(config)
        with raises(
            LocalError, path="config.linear_attn_config.kda_layers", mine="the kinds of layers that layer_types has"
        ):
            describe({**config, "layer_types": ["full_attention", "linear_attention"] * 5})


HALVES: list[tuple[Mapping[str, Any], str, str]] = [
    (DSA, "kv_lora_rank", "kv_lora_rank"),
    (DSA, "qk_rope_head_dim", "qk_rope_head_dim"),
    (INDEXED, "index_head_dim", "index_head_dim"),
    ({**DSA, "index_topk": 2048}, "index_head_dim", "index_head_dim"),
    (MAMBA, "mamba_n_heads", "mamba_num_heads"),
    (MAMBA, "mamba_d_state", "mamba_n_heads"),
    (KDA, "linear_head_dim", "linear_head_dim"),
]


@pytest.mark.parametrize(("config", "gone", "path"), HALVES, ids=str)
def test_half_of_a_family_is_not_taken_for_another(config: Mapping[str, Any], gone: str, path: str) -> None:
    """A latent without its rank would be K and V of many heads, an index without its size none at all."""
    config = {"num_attention_heads": 16, "hidden_size": 4096, **config}
    assert describe(config)
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path=f"config.{path}"):
        describe({name: value for name, value in config.items() if name != gone})


SPARSE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model_type": "seed_oss", "hidden_size": 5120, "num_attention_heads": 80}, {"head_dim": 128}),
    ({"model_type": "glm4_moe", "num_attention_heads": 96, "head_dim": 128}, {"num_key_value_heads": 8}),
    (
        {"model_type": "glm_moe_dsa", "hidden_size": 6144, "num_attention_heads": 64},
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
    ),
    ({"model_type": "mistral", "num_attention_heads": 32, "hidden_size": 4096}, {"sliding_window": 4096}),
    ({**GEMMA4, "num_global_key_value_heads": 4}, {"attention_k_eq_v": False, "global_head_dim": 512}),
    (
        {"model_type": "qwen3_5_text", "num_key_value_heads": 4, "layer_types": ["linear_attention"] * 8},
        {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    ),
]


@pytest.mark.parametrize(("sparse", "implied"), SPARSE, ids=str)
def test_a_field_that_is_left_out_has_the_value_of_its_class(sparse: dict[str, Any], implied: dict[str, Any]) -> None:
    """`make models` leaves out each field of each type."""
    sparse = {"num_hidden_layers": 8, **sparse}
    assert describe(sparse) == describe({**sparse, **implied})
    other = next(iter(implied))
    assert describe(sparse) != describe({**sparse, **implied, other: 2})


WITHOUT_LAYERS: list[dict[str, Any]] = [
    {"model_type": "qwen3_5_text", "num_key_value_heads": 4, "head_dim": 256},
    {"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 256}},
    {"model_type": "kimi_linear", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    {"model_type": "olmo_hybrid", "hidden_size": 3840},
    {"model_type": "granitemoehybrid", "hidden_size": 4096, "num_attention_heads": 32},
    {"model_type": "bamba", "hidden_size": 4096, "num_attention_heads": 32},
    {"model_type": "gemma3n_text", "hidden_size": 2048},
    {"model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32},
]


@pytest.mark.parametrize("sparse", WITHOUT_LAYERS, ids=str)
def test_layers_of_a_hybrid_that_does_not_list_them_are_not_guessed(sparse: dict[str, Any]) -> None:
    """The list is what is missing, and not the size of a state that the class has."""
    with raises(LocalError, path="config.layer_types", yours="absent"):
        describe({"num_hidden_layers": 8, **sparse})


OF_OTHERS: list[tuple[str, str, Any]] = [
    ("llama", "num_kv_shared_layers", 2), ("qwen3", "num_kv_shared_layers", 2), ("llama", "v_head_dim", 32),
    ("gpt_oss", "swa_head_dim", 32), ("mistral", "use_sliding_window", False), ("phi3", "sliding_window_pattern", 2),
    ("biogpt", "num_key_value_heads", 1), ("opt", "head_dim", 32), ("gpt_neox", "head_dim", 32),
    ("flex_olmo", "attention_head_dim", 32), ("qwen3", "attention_chunk_size", 64),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value"), OF_OTHERS)
def test_a_field_of_another_class_is_refused_or_ignored_and_never_used(kind: str, field: str, value: Any) -> None:
    """If caches were to depend on it; otherwise nobody misses it."""
    config = {
        "model_type": kind, "num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 16, "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0,
    }  # fmt: skip
    config = {name: config[name] for name in config if name == "model_type" or name in CLASSES[kind].fields}
    with raises(LocalError, path=f"config.{field}", match=f"the class of {kind} has no such field"):
        describe({**config, field: value})
    assert field not in fields_read({**config, field: value})
    assert describe({**config, field: None}) == describe(config)


def test_fields_of_a_text_config_are_not_those_around_it() -> None:
    inner = {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 2304}
    with raises(LocalError, path="config.head_dim"):
        describe({"model_type": "gemma3", "head_dim": 64, "text_config": inner})
    with raises(LocalError, path="config.num_hidden_layers"):
        describe({**inner, "model_type": "gemma3"})


@pytest.mark.parametrize(("first", "windows"), [(4, [4, 5, 6, 7]), (0, [*range(8)]), (28, [])])
def test_windows_of_qwen_begin_behind_its_full_layers(first: int, windows: list[int]) -> None:
    made = describe(
        {
            "model_type": "qwen3", "num_hidden_layers": 8, "sliding_window": 64, "use_sliding_window": True,
            "max_window_layers": first,
        }
    )  # fmt: skip
    names = {group.id: group.name for group in made.groups}
    assert [n for share in made.ranks[0].owns if names[share.group] == "target window" for n in share.layers] == windows


def test_the_last_layer_of_gemma_4_is_full() -> None:
    assert describe({**GEMMA4, "layer_types": ["sliding_attention"] * 6}) == describe(GEMMA4)


def test_sizes_of_gemma_4_that_are_null_are_those_of_all_layers() -> None:
    """Its class has others for full layers only if the field is absent."""
    lanes = {part.lane_bytes for group in describe({**GEMMA4, "per_layer_config": None}).groups for part in group.parts}
    assert lanes == {512}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"model_type": "gemma3_text", "num_hidden_layers": 6, "use_bidirectional_attention": True}, "2049"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "513"),
        ({**GEMMA4, "use_bidirectional_attention": "vision"}, "1024"),
    ],
)
def test_a_window_to_both_sides_has_half_the_tokens(config: dict[str, Any], tokens: str) -> None:
    assert {fact.name: fact.value for fact in describe(config).facts}["window.target"] == tokens


def test_values_beside_index_keys_of_minimax_m3_are_stated_by_hand() -> None:
    sparse = M3["sparse_attention_config"]
    assert describe({**M3, "sparse_attention_config": {**sparse, "sparse_disable_index_value": [0, 0, 0, 1, 1, 1]}})
    with raises(LocalError, path="config.sparse_attention_config.sparse_disable_index_value"):
        describe({**M3, "sparse_attention_config": {**sparse, "sparse_disable_index_value": [0, 0, 0, 1, 0, 1]}})


def test_two_names_of_a_field_agree() -> None:
    exaone = {"model_type": "exaone", "hidden_size": 4096}
    assert describe({**exaone, "num_layers": 4}) == describe({**exaone, "num_hidden_layers": 4})
    with raises(LocalError, path="config.num_layers", match="num_hidden_layers says"):
        describe({**exaone, "num_layers": 4, "num_hidden_layers": 5})


def test_a_type_that_nobody_knows_is_refused_by_name() -> None:
    """Its class may give each layer any cache; without the name, the other fields are read alone."""
    with raises(LocalError, path="config.model_type", yours="bogus", match="--ignore model_type"):
        describe({**GQA, "model_type": "bogus"})
    assert describe(GQA)


def test_two_names_of_the_dtype_agree() -> None:
    with raises(LocalError, path="config.torch_dtype", mine="float16, as dtype says", yours="bfloat16"):
        describe({**GQA, "torch_dtype": "bfloat16", "dtype": "float16"})


def test_all_fields_that_are_not_known_are_named_at_once() -> None:
    with raises(LocalError, path="config.engram_cache_size", yours="engram_cache_size 3, kv_channels 128"):
        describe({**GQA, "engram_cache_size": 3, "kv_channels": 128})


DELTA: dict[str, Any] = {
    **GQA, "hidden_size": 4096, "layer_types": ["linear_attention", "full_attention"] * 3, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_num_value_heads": 64, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "more", "path"),
    [
        (DELTA, {"linear_num_key_heads": 7}, "linear_num_key_heads"),
        (GQA, {"num_key_value_heads": 7}, "num_key_value_heads"),
        (MAMBA, {"mamba_n_groups": 3}, "mamba_n_groups"),
    ],
)
def test_heads_are_shared_evenly(config: Mapping[str, Any], more: Mapping[str, Any], path: str) -> None:
    with raises(LocalError, path=f"config.{path}"):
        describe({**config, **more})


@pytest.mark.parametrize("tp", [3, 6, 24])
def test_a_rank_has_the_keys_of_its_values(tp: int) -> None:
    """Of 16 key heads with four value heads each, three ranks would hold value heads whose key head is elsewhere."""
    with raises(LocalError, path="tp"):
        describe(DELTA, parallel=Parallel(tp=tp))
    for good in (2, 16, 32):
        assert describe(DELTA, parallel=Parallel(tp=good))


def test_engines_do_not_copy_key_heads_of_delta_rules() -> None:
    with raises(LocalError, path="tp"):
        pools("vllm", DELTA, setup=Setup(Parallel(tp=32)))


@pytest.mark.parametrize("asked", [{"kv_cache_scheme": {"num_bits": 8}}, {"kv_cache_quant_algo": "FP8"}])
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_that_asks_for_another_cache_has_the_dtype_stated(asked: Mapping[str, Any], nested: bool) -> None:
    """ModelOpt has it in an object of its own too."""
    config = {**GQA, "quantization_config": {"quant_method": "modelopt", "quantization": asked} if nested else asked}
    for refused in (lambda: describe(config), lambda: pools("vllm", config), lambda: pools("sglang", config)):
        with raises(LocalError, path="kv_dtype", match=next(iter(asked))):
            refused()
    assert describe(config, kv_dtype=DType.F8E4M3)
    assert pools("vllm", config, setup=Setup(kv_dtype="fp8"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_chooses_a_dtype_has_it_stated(engine: str) -> None:
    """Both run a checkpoint of float32 in 16 bits, and one that states no dtype in one that depends on the model."""
    qwen = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 4096}
    for stated, yours in (({"dtype": "float32"}, "float32"), ({"torch_dtype": "float32"}, "float32"), ({}, "absent")):
        with raises(LocalError, path=f"config.{next(iter(stated), 'torch_dtype')}", yours=yours):
            pools(engine, {**qwen, **stated})
    assert pools(engine, {**qwen, "dtype": "float32"}, setup=Setup(kv_dtype="bfloat16"))
    assert pools(engine, qwen, setup=Setup(dtype=DType.F32)).geometry.groups[0].parts[0].dtype == DType.F32
    lfm2 = {
        "model_type": "lfm2",
        "num_hidden_layers": 2,
        "hidden_size": 2048,
        "layer_types": ["conv", "full_attention"],
    }
    with raises(LocalError, path="config.dtype", yours="float32"):  # the states of a convolution have the model's
        pools(engine, {**lfm2, "dtype": "float32"}, setup=Setup(kv_dtype="bfloat16"))


def test_states_have_the_dtype_that_is_stated() -> None:
    made = describe({**DELTA, "mamba_ssm_dtype": "bfloat16"})
    assert {p.dtype for g in made.groups for p in g.parts if p.name == "ssm"} == {DType.BF16}


def rope(config: Mapping[str, Any]) -> str | None:
    return {fact.name: fact.value for fact in describe({**GQA, **config}).facts}.get("rope.target")


def test_the_rotary_embedding_is_a_fact_in_either_form() -> None:
    """A rotary embedding of another kind gives other keys; both forms of a file say the same."""
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}}
    assert rope(old) == rope(new) == '{"factor": 4.0, "rope_theta": 500000.0, "rope_type": "yarn"}'
    assert rope({}) is None
    plain, odd = ({**GQA, "rope_theta": 5e5, **more} for more in ({}, {"rope_scaling": {"type": "hyperrope"}}))
    assert [path for path, _, _ in differences(describe(plain), describe(odd))] == ["facts[rope.target]"]
    assert describe(plain, facts={"rope.target": "mine"}).facts[0].value == "mine"
