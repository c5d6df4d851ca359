"""SGLang's pools, stated from its own objects: what is stated, what is compared, and what is refused by its name."""

import re
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvproto import LocalError, Options
from kvproto.wire.enums import FactRule
from kvproto_sglang.engine import Engine, Layout, Opened, open_pool, scales_of
from kvproto_sglang.pools.classes import KINDS as STATED
from kvproto_sglang.pools.refusals import REFUSED as CLASSES
from kvproto_sglang.settings import Settings
from tests.sglang.families import FAMILIES
from tests.sglang.handover import model_of, server_of
from tests.sglang.kinds import KINDS, Standins, side
from tests.sglang.standins import MambaPool, MHATokenToKVPool, buffers

HEADS, DIM = 2, 16


class UnifiedMHATokenToKVPool(MHATokenToKVPool):
    """A class that derives from one that is stated."""


def mha(
    page: int = 16, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16, kind: Any = MHATokenToKVPool, **more: Any
) -> Any:
    return kind(size=8 * page, page_size=page, dtype=dtype, head_num=heads, head_dim=DIM, layer_num=2, **more)


def engine(*pools: Any, **more: Any) -> Engine:
    models = tuple(model_of(HEADS) for _ in pools)
    return Engine(**{"pools": pools, "models": models, "server": server_of(), "buffers": buffers()} | more)


def opened(given: Engine, layout: Layout | None = None, parts: str = "request", **settings: Any) -> Opened:
    return open_pool(given, layout or Layout(), Settings(**settings), parts)


def of_kind(kind: str, spoil: Any = None, **more: Any) -> Engine:
    """An engine of a kind of the tests, with something else about it."""
    made = side(kind, 64, 1)
    if spoil is not None:
        spoil(made.ranks[0][0])
    return engine(*made.ranks[0], **{"models": made.configs, "states": made.states} | more)


def of_family(family: str, spoil: Any = None, **more: Any) -> Engine:
    """The same of a family."""
    made = FAMILIES[family].side(64, 1, Standins())
    if spoil is not None:
        spoil(made.ranks[0][0])
    slots = made.slots_of[0] if made.slots_of else ()
    return engine(*made.ranks[0], **{"models": made.configs, "states": made.states, "slots": slots} | more)


def facts(made: Opened) -> dict[str, str]:
    return {fact.name: fact.value for fact in made.pool.geometry.facts}


def test_two_ranks_have_half_of_the_heads_each() -> None:
    pool = opened(engine(mha(heads=1)), Layout(tp=2, rank=1)).pool
    assert [pool.rank, len(pool.geometry.ranks)] == [1, 2]


def test_weights_and_rope_are_compared() -> None:
    found = facts(opened(engine(mha())))
    assert found.keys() == {"weights.target", "rope.target"}
    assert found["weights.target"] == "nobody/model@main"


def test_a_draft_is_a_model_of_its_own() -> None:
    made = opened(engine(mha(), mha(), entries=4))
    assert {group.name: group.model for group in made.pool.geometry.groups} == {"kv": 0, "draft": 1}
    assert facts(made)["weights.draft"] == "nobody/draft@main"


def test_each_layer_of_an_mtp_is_a_model_of_its_own() -> None:
    made = opened(engine(mha(), mha(), mha(), entries=4, scales=({}, {}, {})))
    assert {group.name: group.model for group in made.pool.geometry.groups} == {"kv": 0, "draft": 1, "draft2": 2}
    assert {"weights.draft", "weights.draft2"} < facts(made).keys()


def test_a_model_may_have_more_caches_than_layers() -> None:
    """As LongCat, which has two in each."""
    model = model_of(HEADS, 1)
    with pytest.raises(LocalError, match="below depth 1"):
        opened(engine(mha(), models=(model,)))
    model.num_attention_layers = 2
    assert opened(engine(mha(), models=(model,))).pool.geometry.groups[0].name == "kv"


def test_the_weights_of_a_draft_that_may_start_cold_are_not_insisted_on() -> None:
    made = opened(engine(mha(), mha(), entries=4), options=Options(cold_draft=True))
    warned = {fact.name for fact in made.pool.geometry.facts if fact.rule == FactRule.WARN}
    assert warned == {"weights.draft", "rope.draft"}


def test_what_scales_a_quantized_cache_is_compared() -> None:
    layers = [SimpleNamespace(layer_id=n, k_scale_float=k, v_scale_float=None) for n, k in ((1, 0.5), (0, None))]
    scales = scales_of([*layers, SimpleNamespace(k_scale_float=3.0)])
    assert scales == {0: (1.0, 1.0), 1: (0.5, 1.0)}
    quantized = mha(dtype=torch.float8_e4m3fn)
    one, two = (facts(opened(engine(quantized, scales=(each, {})))) for each in ({}, scales))
    assert one["kv_scales.target"] != two["kv_scales.target"]
    assert "kv_scales.target" not in facts(opened(engine(mha(), scales=(scales, {}))))


def test_the_order_of_a_matrix_that_shapes_do_not_tell_is_a_fact() -> None:
    assert facts(opened(of_kind("gated delta nets")))["state_order.target"] == "value, key"
    assert "state_order.target" not in facts(opened(of_kind("Mamba 2")))


def test_layers_that_share_an_index_have_none() -> None:
    made = Standins().dsa(
        size=640, page_size=64, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=3,
        kv_cache_dim=576, index_head_dim=128, skip_topk_layers=[False, True, False],
    )  # fmt: skip
    groups = {group.name: group.id for group in opened(engine(made, states=["dsa"])).pool.geometry.groups}
    owns = {
        share.group: share.layers.tolist() for share in opened(engine(made, states=["dsa"])).pool.geometry.ranks[0].owns
    }
    assert owns[groups["kv"]] == [0, 1, 2]
    assert owns[groups["kv index"]] == [0, 2]


_SMALL: Any = {
    "size": 128,
    "page_size": 16,
    "dtype": torch.bfloat16,
    "head_num": HEADS,
    "head_dim": DIM,
    "layer_num": 2,
}


def _set(name: str, value: Any) -> Any:
    return lambda pool: setattr(pool, name, value)


REFUSED: dict[str, tuple[Any, str]] = {
    "another class": (lambda: engine(mha(kind=UnifiedMHATokenToKVPool)), "UnifiedMHATokenToKVPool"),
    "a state that no pool has": (lambda: engine(mha(), states=["mamba"]), "mamba"),
    "a state that SGLang does not name": (lambda: of_kind("Mamba 2", states=()), "mamba"),
    "the ring of a kpool": (lambda: of_kind("sparse MLA", states=["dsa", "dsa_tail"]), "dsa_tail"),
    "rings with drafts of a kpool": (lambda: of_family("GLM-5-Next", _set("tail_extra_slots", 4)), "tail_extra_slots"),
    "index values of MiniMax": (lambda: of_family("MiniMax-M3", _set("index_kv_pool", 1)), "keys of an indexer alone"),
    "pages of 128 in MXFP8": (lambda: of_family("MXFP8", _set("mxfp8_sf_interleaved", True)), "pages of 128"),
    "rings of DeepSeek V4": (lambda: of_family("DeepSeek V4", _set("unified_kv_pool", 1)), "DeepSeekV4UnifiedKVPool"),
    "windows of a request of DeepSeek V4": (lambda: of_family("DeepSeek V4", _set("request_window", 1)), "rings of a request"),
    "a draft of DSpark": (lambda: of_family("DeepSeek V4", _set("swa_valid_from", 1)), "DSpark"),
    "sums of a compressor": (
        lambda: of_family("DeepSeek V4", lambda pool: setattr(pool.compress_state_pools[2], "online", True)), "sums of what came",
    ),
    "rings with drafts of DeepSeek V4": (
        lambda: of_family("DeepSeek V4", lambda pool: setattr(pool.compress_state_pools[2], "ring_size", 200)), "200, as with drafts",
    ),
    "another row of DeepSeek V4": (
        lambda: of_family("DeepSeek V4", lambda pool: setattr(pool.swa_kv_pool.kv_layout.encoding, "value", "v5")), "v5",
    ),
    "another order of an index of DeepSeek V4": (
        lambda: of_family("DeepSeek V4", lambda pool: setattr(pool.index_pools[4], "index_k_page8", True)), "another order",
    ),
    "what a row of a request holds": (
        lambda: of_family("DeepSeek V4", states=("swa", "c128_state", "request_row")), "request_row: from which position",
    ),
    "convolutions that ranks share": (
        lambda: of_family("Inkling", models=(model_of(HEADS, 5, local_layer_ids=[0, 2], hidden_size=48),)), "48 channels each",
    ),
    "an element of a key": (
        lambda: of_family("MiniMax-M3", lambda pool: setattr(pool.index_k_pool, "dtype", torch.float64)), "float64",
    ),
    "two windows": (lambda: of_kind("sliding windows", states=["swa", "swa"]), "swa, swa"),
    "a draft without a pool": (lambda: engine(mha(), entries=4), "0 buffers"),
    "a draft of other buffers": (lambda: engine(mha(), mha(), entries=2), "2 buffers of one"),
    "a draft of another class": (
        lambda: engine(mha(), FAMILIES["MiniMax-M3"].side(16, 1, Standins()).ranks[0][0], entries=4), "MiniMaxSparseKVPool",
    ),
    "a draft of other pages": (lambda: engine(mha(16), mha(32), entries=4), "pages of .32"),
    "an element type": (lambda: engine(mha(dtype=torch.float64)), "kv_cache_dtype"),
    "FP4": (lambda: of_kind("MHA", _set("is_quantized_kv_cache", True)), "is_quantized_kv_cache"),
    "memory behind addresses": (lambda: of_kind("MHA", _set("post_capture_active", True)), "post_capture_active"),
    "layers of one shard": (lambda: of_kind("MLA", _set("layer_shard_enabled", True)), "layer_shard_enabled"),
    "memory of another allocator": (lambda: of_kind("MHA", _set("enable_custom_mem_pool", True)), "enable_custom_mem_pool"),
    "a layout": (lambda: of_kind("MHA", _set("kv_cache_layout", "vectorized_5d")), "vectorized_5d"),
    "slots that are no pages": (lambda: of_kind("MHA", _set("page_size", 7)), "slots"),
    "heads of another number": (lambda: engine(mha(heads=3)), "3 on a rank"),
    "heads that ranks do not divide": (lambda: engine(mha(heads=1), models=(model_of(3),)), "1 on a rank"),
    "windows in rows of requests": (lambda: of_kind("sliding windows", _set("swa_req_ring_size", 128)), "rows of a request"),
    "an index of several tokens in other pages": (lambda: of_kind("sparse MLA", _set("index_kpool", 4)), "pages of 16 keys"),
    "a draft with windows of its own": (
        lambda: engine(mha(), side("sliding windows", 16, 1).ranks[0][0], entries=4), "expected swa, got none",
    ),
    "a row of other sizes": (lambda: of_kind("sparse MLA in FP8", _set("qk_rope_head_dim", 32)), "kv_cache_dim"),
    "other states beside": (
        lambda: of_kind("Mamba 2", lambda pool: setattr(pool.mamba_pool, "_slot_siblings", [1])), "embeddings per layer in a slot, got int",
    ),
    "states of another class": (
        lambda: of_kind("Mamba 2", lambda pool: setattr(pool, "mamba_pool", SimpleNamespace())), "SimpleNamespace",
    ),
    "Mamba of another model": (lambda: of_kind("Mamba 2", models=(model_of(HEADS, model_type="zamba"),)), "zamba"),
    "groups of another number": (
        lambda: of_kind("Mamba 2", models=(model_of(HEADS, model_type="nemotron_h", n_groups=3),)), "2 on a rank",
    ),
    "channels of another number": (
        lambda: of_kind("gated delta nets", lambda pool: setattr(pool.mamba_pool, "conv_shard_groups", [12, 12, 64])),
        "56 channels",
    ),
    "checksums of SGLang's": (
        lambda: engine(mha(), buffers=SimpleNamespace(**vars(buffers()) | {"kv_checksum": 1})), "enable_kv_checksum",
    ),
    "memory that is given back": (lambda: engine(mha(), server=server_of(enable_memory_saver=True)), "enable_memory_saver"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_stated_is_refused_by_name(what: str) -> None:
    make, says = REFUSED[what]
    with pytest.raises(LocalError, match=says):
        opened(make())


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_that_is_not_stated_is_refused_with_what_it_holds(name: str) -> None:
    assert name not in STATED
    with pytest.raises(LocalError, match=re.escape(f"{name}: {CLASSES[name]}")):
        opened(engine(type(name, (MHATokenToKVPool,), {})(**_SMALL)))


def test_a_class_that_nobody_knows_is_refused() -> None:
    with pytest.raises(LocalError, match="Tomorrow: not here"):
        opened(engine(type("Tomorrow", (MHATokenToKVPool,), {})(**_SMALL)))


def test_pools_whose_tokens_are_not_dealt_are_refused_with_context_parallel() -> None:
    given = of_kind("sliding windows")
    with pytest.raises(LocalError, match="SWAKVPool"):
        opened(given, Layout(tp=2, dcp=2))
    with pytest.raises(LocalError, match="a latent, where ranks deal"):
        opened(engine(mha(), mha(32), entries=4), Layout(tp=2, dcp=2))


def test_sizes_that_have_to_be_one_are_refused_by_name() -> None:
    with pytest.raises(LocalError, match="pp_size"):
        opened(engine(mha()), Layout(refused=(("pp_size", 2),)))


def test_ranks_that_nobody_reads_are_refused() -> None:
    with pytest.raises(LocalError, match="spread"):
        opened(engine(mha(heads=1)), Layout(tp=2), options=Options(spread="few"))


def test_every_kind_of_the_tests_opens_as_it_is() -> None:
    """So that what is refused above is refused for what was changed."""
    for name, kind in KINDS.items():
        made = side(name, 64, 1)
        drafts = sum(2 if hasattr(pool, "k_buffer") else 1 for pool in made.ranks[0][1:])
        given = attrs.evolve(of_kind(name), entries=drafts)
        assert len(opened(given).tables) >= len(kind.models)


def test_groups_of_mamba_that_ranks_hold_alike() -> None:
    """One group for two ranks: each has it."""
    full = mha(heads=1)
    state = MambaPool(size=4, mamba_layer_ids=[0], conv=(16 + 6 + 6, 3), temporal=(2, 8, 6))
    hybrid = type("HybridLinearKVPool", (), {})()
    hybrid.full_kv_pool, hybrid.mamba_pool, hybrid.page_size, hybrid.device = full, state, 16, "cpu"
    hybrid.full_attention_layer_id_mapping = {1: 0, 3: 1}
    config = model_of(HEADS, model_type="granitemoehybrid", mamba_n_groups=1)
    made = opened(engine(hybrid, models=(config,), states=["mamba"]), Layout(tp=2, rank=1))
    groups = {group.name: group for group in made.pool.geometry.groups}
    assert [part.lanes for part in groups["kv conv"].parts] == [32 + 6 + 6]
