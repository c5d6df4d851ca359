"""Pools of today's engines: bytes moved between any two of them, columns that a Register takes, and what is refused."""

import random
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvproto.copying.columns import check_columns
from kvproto.copying.execute import execute
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.errors import LocalError, PlanError
from kvproto.planning.geometry import validate
from kvproto.planning.layout import Parallel
from kvproto.planning.plan import plan
from kvproto.wire.enums import DType
from kvproto.wire.messages import Columns, Region
from kvproto_catalog.config import Config
from kvproto_catalog.engines import ENGINES, Pools, pools
from kvproto_catalog.models import Setup
from kvproto_catalog.tensors import RankMemory, rank_memory
from kvproto_catalog.vllm import BACKENDS, LAYOUTS
from tests.errors import raises
from tests.plan import oracle

HEADS = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
MLA = {"num_attention_heads": 4, "kv_lora_rank": 128, "qk_rope_head_dim": 16}
DELTA = {"linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_num_value_heads": 8, "linear_value_head_dim": 4}
MAMBA2 = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4, "conv_kernel": 4}
KDA = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
MODELS: dict[str, list[Config]] = {
    "heads": [{"num_hidden_layers": 3, **HEADS}],
    "other values": [{"num_hidden_layers": 2, **HEADS, "v_head_dim": 8}],
    "windows": [{"num_hidden_layers": 7, **HEADS, "sliding_window": 8, "sliding_window_pattern": 3}],
    "chunks": [{"num_hidden_layers": 4, **HEADS, "attention_chunk_size": 8, "no_rope_layer_interval": 4}],
    "shared layers": [{"num_hidden_layers": 5, **HEADS, "num_kv_shared_layers": 2}],
    "latent": [{"num_hidden_layers": 3, **MLA}],
    "latent and index": [{"num_hidden_layers": 2, **MLA, "index_head_dim": 128}],
    "latent, heads drafted": [{"num_hidden_layers": 3, **MLA}, {"num_hidden_layers": 2, **HEADS}],
    "delta nets": [{"num_hidden_layers": 4, **HEADS, **DELTA, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}],
    "delta attention": [{"num_hidden_layers": 4, **MLA, "linear_attn_config": KDA}],
    "Mamba 2": [{"num_hidden_layers": 5, **HEADS, **MAMBA2, "hybrid_override_pattern": "MM*M-"}],
    "Mamba 1": [
        {"num_hidden_layers": 4, **HEADS, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_expand": 2,
         "mamba_d_state": 4, "mamba_d_conv": 4},
    ],
    "both in a layer": [
        {"model_type": "falcon_h1", "torch_dtype": "bfloat16", "num_hidden_layers": 2, **HEADS, "mamba_n_heads": 8, "mamba_d_head": 8,
         "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_d_conv": 4},
    ],
    "lightning": [{"num_hidden_layers": 3, **HEADS, "attn_type_list": [0, 0, 1]}],
    "short convolutions": [
        {"num_hidden_layers": 3, **HEADS, "conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention"]},
    ],
}  # fmt: skip
F32 = DType.F32
SETUPS: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("vllm", {}, {"tp": 2}),
    ("sglang", {"page": 64}, {"tp": 4}),
    ("vllm", {"layout": "LBHNC", "page": 64}, {"tp": 1}),
    ("trtllm", {}, {"tp": 2, "pp": 2}),
    ("vllm", {"layout": "BLHNC"}, {"tp": 4}),
    ("sglang", {"page": 64, "layout": "HND", "dp": 2}, {"tp": 4}),
    ("vllm", {"layout": "LHBNC"}, {"tp": 2, "pp": 2}),
    ("vllm", {"layout": "BHLNC"}, {"tp": 1}),
    ("vllm", {"layout": "BLNHC", "state_layout": "DS"}, {"tp": 2}),
]
TOKENS, BLOCKS = 70, 96
Bytes = npt.NDArray[np.uint8]


def made(model: str, engine: str, options: dict[str, Any], sizes: dict[str, int]) -> Pools | None:
    """None where the engine has no such pool."""
    configs = MODELS[model]
    try:
        return pools(engine, configs[0], configs[1:], Setup(Parallel(**sizes), state_dtype=F32, **options))
    except LocalError as error:
        if error.path not in ("config", "layout"):
            raise
        return None


def requests(side: Pools, rank: int, rng: random.Random, tokens: int) -> dict[int, oracle.Request]:
    """Blocks of the table in no order; caches of one block table or slot have the same ones, tables never the same."""
    geometry = side.geometry
    groups = {g.id: g for g in geometry.groups}
    together: dict[int, int] = {}
    for slab in side.arranged.slabs(geometry, rank, BLOCKS):
        for _, ids in slab.layers:
            for id in ids:
                together[id] = together.get(ids[0], ids[0])
    free = rng.sample(range(BLOCKS), BLOCKS)
    tables: dict[int, list[int]] = {}
    found = {}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group, pieces = groups[share.group], side.arranged.pieces.get(share.group, 1)
        need = items_needed(group, share.cp_rank, 0, tokens)
        blocks = tables.setdefault(together[group.id], [])
        while len(blocks) * pieces < need:
            blocks.append(free.pop())
        items = [block * pieces + i for block in blocks for i in range(pieces)]
        found[group.id] = oracle.Request(0, tokens, items[:need])
    return found


def stamp(side: Pools, rank: int, memory: RankMemory, asked: dict[int, oracle.Request], into: dict[int, Bytes]) -> None:
    """Write what belongs at each place: a hash of the global coordinate of every byte."""
    groups = {g.id: g for g in side.geometry.groups}
    shares = {o.group: o for r in side.geometry.ranks if r.rank == rank for o in r.owns}
    for columns in memory.columns:
        group, share = groups[columns.group], shares[columns.group]
        rows = np.array(oracle.rows_of(group, share.cp_rank, asked[group.id]), np.int64).reshape(-1, 3)
        entry = 0
        for layer in share.layers.tolist():
            for p, part in enumerate(group.parts):
                at = {
                    name: int(getattr(columns, name)[entry])
                    for name in ("region", "offset", "item_stride", "row_stride", "lane_stride")
                }
                entry += 1
                lanes = np.array(oracle.lanes_of(share, p), np.int64)
                x = np.arange(part.lane_bytes, dtype=np.int64)
                begin = at["offset"] + rows[:, 1] * at["item_stride"] + rows[:, 2] * at["row_stride"]
                local = np.arange(lanes.size) * at["lane_stride"]
                where = begin[:, None, None] + local[None, :, None] + x
                coordinate = rows[:, 0, None, None] * 1000003 + (lanes[None, :, None] * part.lane_bytes + x) * 7919
                seed = sum(map(ord, part.name)) * 131 + layer * 8191 + group.model * 524287
                into[at["region"]][where] = ((coordinate + seed) * 2654435761 >> 13) & 0xFF


def blank(memory: RankMemory, seed: int) -> dict[int, Bytes]:
    dice = np.random.default_rng(seed)
    return {i: dice.integers(0, 256, size, np.uint8) for i, (_, size) in enumerate(memory.regions)}


def move(source: Pools, sink: Pools, tokens: int = TOKENS) -> int:
    """Hand a request over between two engines, compare every byte of every sink rank, and return how many moved."""
    rng = random.Random(repr((source.geometry, sink.geometry)))
    planned = plan(source.geometry, sink.geometry)
    have: dict[int, tuple[RankMemory, dict[int, oracle.Request], dict[int, Bytes]]] = {}
    for rank in source.geometry.ranks:
        memory = source.memory(rank.rank, BLOCKS)
        asked, held = requests(source, rank.rank, rng, tokens), blank(memory, rank.rank)
        stamp(source, rank.rank, memory, asked, held)
        have[rank.rank] = memory, asked, held
    moved = 0
    for rank in sink.geometry.ranks:
        memory = sink.memory(rank.rank, BLOCKS)
        asked, mine = requests(sink, rank.rank, rng, tokens), blank(memory, 99)
        wanted = {i: bytes_.copy() for i, bytes_ in mine.items()}
        stamp(sink, rank.rank, memory, asked, wanted)
        there = RankLayout(sink.geometry, rank.rank, by_group(memory))
        for number in planned.required(rank.rank):
            theirs, windows, held = have[number]
            here = RankLayout(source.geometry, number, by_group(theirs))
            program = Pair(planned.between(number, rank.rank), here, there).lower(of(windows), of(asked))
            moved += execute(program, views(held), views(mine))
        assert all(np.array_equal(mine[i], wanted[i]) for i in wanted), f"rank {rank.rank}"
    return moved


def by_group(memory: RankMemory) -> dict[int, Columns]:
    return {c.group: c for c in memory.columns}


def of(asked: dict[int, oracle.Request]) -> dict[int, Window]:
    return {g: Window(r.first, r.count, np.array(r.items, np.int64)) for g, r in asked.items()}


def views(held: dict[int, Bytes]) -> dict[int, memoryview]:
    return {i: memoryview(some) for i, some in held.items()}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_moves_byte_by_byte_from_each_engine_to_another(model: str) -> None:
    sides = [side for setup in SETUPS if (side := made(model, *setup)) is not None]
    assert len(sides) >= 4
    for source, sink in pairwise([*sides, sides[0]]):
        assert move(source, sink) > 0


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_quantized_heads_move_with_their_scales(kv_dtype: str) -> None:
    config = MODELS["heads"][0]
    sides = [
        pools("vllm", config, (), Setup(Parallel(tp=tp), kv_dtype=kv_dtype, layout=layout))
        for tp, layout in ((1, "LBHNC"), (2, "LBNHC"), (4, "LHBNC"))
    ]
    assert all(move(a, b) > 0 for a, b in pairwise([*sides, sides[0]]))


def test_the_packed_row_of_sparse_attention_is_alike_in_two_engines() -> None:
    config = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    a = pools("vllm", config, (), Setup(Parallel(tp=2), kv_dtype="fp8_ds_mla"))
    b = pools("sglang", config, (), Setup(Parallel(tp=2), kv_dtype="fp8_e4m3"))
    for side in (a, b):
        assert [p.lane_bytes for p in side.geometry.groups[0].parts] == [512, 16, 128]
        assert int(side.memory(0).columns[0].row_stride[0]) == 656
    assert move(a, b) > 0
    assert move(b, a) > 0


def test_decode_context_parallel_pools_move_too() -> None:
    """Tokens dealt over ranks; a draft whole on each, in SGLang in pages as wide as those of all ranks."""
    configs = MODELS["latent, heads drafted"]
    whole = pools("vllm", configs[0], configs[1:], Setup(Parallel(tp=4)))
    vllm = pools("vllm", configs[0], configs[1:2], Setup(Parallel(tp=4)))
    sglang = pools("sglang", configs[0], configs[1:], Setup(Parallel(tp=4, dcp=4), page=16))
    assert [(g.name, g.rows, g.cp_size) for g in sglang.geometry.groups] == [("target", 16, 4), ("draft", 64, 1)]
    assert move(whole, sglang) > 0
    assert move(sglang, vllm) > 0


def test_a_large_block_is_several_blocks_of_a_kernel_where_heads_are_outside() -> None:
    config = MODELS["delta nets"][0]
    setups = [Setup(Parallel(tp=1), page=128, backend="FLASHINFER", layout=layout) for layout in ("LBHNC", "LBNHC")]
    apart, inside = (pools("vllm", config, (), setup) for setup in setups)
    rows = [next(g.rows for g in side.geometry.groups if g.name == "target") for side in (apart, inside)]
    assert rows[0] in (16, 32, 64)
    assert rows[1] % rows[0] == 0
    assert rows[1] > rows[0]
    assert move(apart, inside) > 0
    assert move(inside, apart) > 0


@pytest.mark.parametrize(
    ("engine", "model"), [(e, m) for e in ENGINES for m in MODELS if (e, m) != ("trtllm", "latent and index")]
)
def test_columns_are_such_as_a_register_has(engine: str, model: str) -> None:
    side = pools(engine, MODELS[model][0], MODELS[model][1:], Setup(Parallel(tp=2)))
    validate(side.geometry)
    for rank in side.geometry.ranks:
        memory = side.memory(rank.rank, 8)
        regions = {i: Region.__new__(Region) for i, _ in enumerate(memory.regions)}
        for i, (_, size) in enumerate(memory.regions):
            object.__setattr__(regions[i], "length", size)
        check_columns(side.geometry, rank.rank, regions, memory.columns)


def test_hybrids_have_block_tables_of_equally_many_layers() -> None:
    """Gemma 3 27B: 52 layers of windows are six tables beside the ten full ones."""
    config = {
        **HEADS,
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "num_hidden_layers": 62,
        "sliding_window": 1024,
    }
    groups = pools("vllm", config).geometry.groups
    owns = {o.group: o.layers.size for o in pools("vllm", config).geometry.ranks[0].owns}
    assert [g.name for g in groups] == ["target", *(f"target window {i}" for i in range(6))]
    assert [owns[g.id] for g in groups] == [10, 9, 9, 9, 9, 8, 8]


@pytest.mark.parametrize(
    ("engine", "model", "options", "path"),
    [
        ("tensorflow", "heads", {}, "engine"),
        ("vllm", "heads", {"kv_dtype": "fp4"}, "kv_dtype"),
        ("vllm", "heads", {"backend": "FLASHMLA"}, "backend"),
        ("sglang", "heads", {"backend": "FLASH_ATTN"}, "backend"),
        ("vllm", "heads", {"backend": "FLEX_ATTENTION", "layout": "LBHNC"}, "layout"),
        ("vllm", "heads", {"layout": "NHD"}, "layout"),
        ("trtllm", "heads", {"layout": "NHD"}, "layout"),
        ("vllm", "heads", {"page": 24}, "page"),
        ("vllm", "latent", {"page": 48}, "page"),
        ("sglang", "latent and index", {"page": 16}, "page"),
        ("sglang", "latent and index", {"parallel": Parallel(tp=2, dcp=2), "page": 64}, "dcp"),
        ("trtllm", "latent and index", {}, "config"),
        ("vllm", "heads", {"kv_dtype": "nvfp4"}, "sm"),
        ("sglang", "heads", {"kv_dtype": "nvfp4", "sm": 100}, "sm"),
        ("trtllm", "heads", {"kv_dtype": "nvfp4", "sm": 120}, "sm"),
        ("vllm", "heads", {"kv_dtype": "nvfp4", "sm": 100, "backend": "FLASH_ATTN"}, "backend"),
        ("vllm", "heads", {"kv_dtype": "nvfp4", "sm": 100, "layout": "LBNHC"}, "layout"),
        ("vllm", "latent", {"kv_dtype": "nvfp4", "sm": 100}, "kv_dtype"),
        ("vllm", "delta nets", {"kv_dtype": "nvfp4", "sm": 100}, "kv_dtype"),
        ("vllm", "heads", {"kv_dtype": "turboquant_k8v4"}, "kv_dtype"),
        ("sglang", "heads", {"kv_dtype": "mxfp8"}, "kv_dtype"),
        ("sglang", "heads", {"kv_dtype": "mxfp8", "page": 64}, "page"),
        ("sglang", "heads", {"kv_dtype": "mxfp8", "layout": "HND"}, "layout"),
        ("vllm", "heads", {"dp": 2, "parallel": Parallel(tp=4)}, "dp"),
        ("sglang", "heads", {"dp": 3, "parallel": Parallel(tp=4)}, "dp"),
        ("vllm", "heads", {"parallel": Parallel(tp=3)}, "tp"),
        ("vllm", "Mamba 2", {"parallel": Parallel(tp=16)}, "tp"),
    ],
)
def test_what_no_engine_has_is_refused_by_name(engine: str, model: str, options: dict[str, Any], path: str) -> None:
    with raises(LocalError, path=path) as caught:
        pools(engine, MODELS[model][0], MODELS[model][1:], Setup(**options))
    assert caught.value.mine
    assert caught.value.yours


ODD: list[Any] = [None, 0, -1, "x", "", [], {}, 10**9, 2**40, 2.5, True, [1], ["a"], {"a": 1}, 3]
SAYS = [
    "sliding_window",
    "num_kv_shared_layers",
    "layer_types",
    "linear_attn_config",
    "attn_type_list",
    "index_head_dim",
]
SAYS += [
    "attention_chunk_size",
    "no_rope_layers",
    "full_attn_idxs",
    "sliding_window_pattern",
    "mamba_ssm_dtype",
    "use_cla",
]


@pytest.mark.parametrize("seed", range(6))
def test_nonsense_is_refused_by_name_and_nothing_else_happens(seed: int) -> None:
    """Configs with odd values, and options that do not go together: pools, or an error with a code and a path."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(120):
        config = {**rng.choice([configs[0] for configs in MODELS.values()])}
        for _ in range(rng.choice([0, 0, 1, 2])):
            config[rng.choice([*config, *SAYS])] = rng.choice(ODD)
        sizes = {"tp": rng.choice([1, 1, 1, 2, 2, 4, 3, 0, 10**9]), "dcp": rng.choice([1, 1, 1, 1, 2])}
        options: dict[str, Any] = {
            "page": rng.choice([None] * 6 + [64, 24, 0, -3, 10**9]), "layout": rng.choice([None] * 6 + ["LBHNC", "HND"]),
            "backend": rng.choice([None] * 9 + ["FLASHINFER", "CPU_ATTN", "nobody's"]), "dp": rng.choice([1] * 8 + [2, 0]),
        }  # fmt: skip
        with suppress(LocalError, PlanError):  # PlanError: of a Description beyond the limits
            side = pools(rng.choice([*ENGINES]), config, (), Setup(Parallel(**sizes), **options))
            validate(side.geometry)
            side.memory(len(side.geometry.ranks) - 1, 3)
            accepted += 1
    assert accepted > 10


def test_each_backend_has_layouts_that_vllm_has() -> None:
    assert all({*b.layouts} <= {*LAYOUTS} for kind in BACKENDS.values() for b in kind.values())


def test_pools_of_one_slab_have_equally_many_blocks() -> None:
    config = MODELS["delta nets"][0]
    side = pools("vllm", config)
    ids = [g.id for g in side.geometry.groups]
    with raises(LocalError, path="items"):
        rank_memory(side.geometry, 0, side.arranged.slabs(side.geometry, 0, 8), dict.fromkeys(ids, 8) | {ids[-1]: 9})


def test_a_cache_without_a_tensor_is_named() -> None:
    side = pools("sglang", MODELS["heads"][0])
    with raises(LocalError, path="pools of 'target'"):
        rank_memory(side.geometry, 0, [], {0: 8})
