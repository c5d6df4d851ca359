"""The pools of today's engines by name: `pools("vllm", config)` is a Description and the tensors of each rank.

The tables describe the releases in `ENGINES`; `make engines` compares them with the packages' own functions.
State a pool that is not here with `Cache`, `lay_out` and the strides of its tensors.
"""

from collections.abc import Callable, Iterable, Mapping

import attrs

from kvproto.errors import bad, check_type
from kvproto.planning.cache import Cache
from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import lay_out
from kvproto.wire.enums import DType
from kvproto_catalog import vllm
from kvproto_catalog.config import (
    Config,
    check_layers,
    compress_ratios,
    index_layers,
    layer_kinds,
    number,
    own_sizes,
    text,
)
from kvproto_catalog.models import (
    ACTIVATIONS,
    Arranged,
    KvDtype,
    Make,
    Setup,
    cache_kind,
    check_heads,
    check_stored_as_computed,
    dtype_of,
    model_dtype,
    stored_caches,
    with_windows,
)
from kvproto_catalog.tensors import RankMemory, Slab, rank_memory

__all__ = ["ENGINES", "EngineProfile", "Pools", "Setup", "pools"]


@attrs.frozen
class Pools:
    """A Description and the memory of each of its ranks."""

    geometry: Geometry
    arranged: Arranged

    def memory(self, rank: int = 0, blocks: int = 1024) -> RankMemory:
        """The allocations, tensors and columns of one rank whose pool has `blocks` blocks; raises LocalError."""
        items = {g.id: blocks * self.arranged.pieces.get(g.id, 1) for g in self.geometry.groups}
        return rank_memory(self.geometry, rank, self.arranged.slabs(self.geometry, rank, blocks), items)


@attrs.frozen
class EngineProfile:
    """The cache dtypes and layouts of an engine, and how it arranges its pools."""

    releases: str
    dtypes: Mapping[str, KvDtype]
    state: Callable[[Config], DType]
    arrange: Callable[[Make, Setup, Config], Arranged]
    layouts: tuple[str, ...] = ()
    dp: bool = False


def pools(
    engine: str,
    target: Config,
    drafts: Iterable[Config] = (),
    setup: Setup | None = None,
    replica: int = 0,
    facts: Mapping[str, str] | None = None,
) -> Pools:
    """A model as an engine runs it, its Description and the tensors of each rank; raises LocalError(OUT_OF_RANGE)."""
    if not isinstance(engine, str) or engine not in ENGINES:
        raise bad("engine", ", ".join(ENGINES), engine)
    setup = Setup() if setup is None else setup
    check_type("setup", setup, Setup, "a Setup")
    setup.check()
    if setup.dtype is not None:
        target, *drafts = (computed_in(setup.dtype, config) for config in (target, *drafts))
    row, configs, tp = ENGINES[engine], [target, *drafts], setup.parallel.tp
    for config in map(text, configs):
        _check_known(config)
    if tp % setup.dp or (setup.dp > 1 and not row.dp):
        raise bad("dp", f"a divisor of tp {tp}" if row.dp else f"1: a replica of {engine} is one rank group", setup.dp)
    if setup.layout is not None and setup.layout not in row.layouts:
        raise bad("layout", ", ".join(row.layouts) or "the engine's only one", setup.layout)
    if setup.backend is not None and engine != "vllm":
        raise bad("backend", "none, as only vllm's pools depend on it", setup.backend)
    if setup.state_layout != "SD" and engine != "vllm":
        raise bad("state_layout", "SD, except for vllm", setup.state_layout)
    if setup.kv_dtype == "auto":
        check_stored_as_computed(target)
        _check_dtype(engine, setup, text(target))
    kv = dtype_of(setup.kv_dtype, row.dtypes, setup)
    parallel = attrs.evolve(setup.parallel, tp=tp // setup.dp)
    backend, layout = setup.backend or next(iter(kv.backends), None), setup.layout or next(iter(kv.layouts), None)
    setup = attrs.evolve(setup, parallel=parallel, page=setup.page or kv.page, backend=backend, layout=layout)
    setup.parallel.check()
    dtype = setup.state_dtype

    def make(page: int) -> list[Cache]:
        return stored_caches(configs, page, kv, (lambda _: dtype) if dtype else row.state)

    arranged = row.arrange(make, setup, text(target))
    for cache in arranged.caches:
        dealt = cache.dealt if cache.dealt is not None else cache.group.model == 0
        check_heads(cache, setup.parallel.tp // (setup.parallel.dcp if dealt else 1))
    if any(cache_kind(cache) == "conv" for cache in arranged.caches):
        _check_dtype(engine, setup, text(target))
    depth = number(text(target), "num_hidden_layers")
    geometry = lay_out(arranged.caches, setup.parallel, replica, facts, depth)
    return Pools(with_windows(geometry, configs), arranged)


def computed_in(dtype: DType, config: Config) -> Config:
    """A config of a checkpoint whose activations an engine computes in this dtype."""
    name = next(name for name, known in ACTIVATIONS.items() if known == dtype)
    stated = {"dtype": name, "torch_dtype": name}
    inner = config.get("text_config")
    return {**config, **stated, **({"text_config": {**inner, **stated}} if isinstance(inner, dict) else {})}


def _check_dtype(engine: str, setup: Setup, config: Config) -> None:
    """Raise LocalError for a checkpoint whose activations an engine computes in a dtype of its own choice."""
    if setup.dtype is not None:
        return
    stated = next((name for name in ("torch_dtype", "dtype") if config.get(name)), None)
    wanted = f"bfloat16 or float16: {engine} chooses one by the GPU or the model otherwise, state it (--dtype)"
    if stated is None and config.get("model_type"):
        raise bad("config.torch_dtype", wanted, "absent")
    if stated is not None and config[stated] == "float32" and engine != "trtllm":
        raise bad(f"config.{stated}", wanted, "float32")


def _check_known(config: Config) -> None:
    """Raise LocalError for a model of whose pools no table says how an engine arranges them."""
    count = number(config, "num_hidden_layers")
    check_layers(count)
    if config.get("use_cla"):
        raise bad("config.use_cla", "false: whether an engine stores layers that share is not known", "true")
    indexed = len(index_layers(config, range(count)))
    for fields, is_there in (
        ("compress_ratios layer_types", compress_ratios(config, count) is not None),
        ("sparse_attention_config layer_types", not config.get("kv_lora_rank") and indexed),
        (
            "indexer_types index_topk_pattern index_topk_freq cli_factor layer_types",
            config.get("kv_lora_rank") and 0 < indexed < count,
        ),
        (
            "per_layer_config swa_num_key_value_heads global_head_dim num_global_key_value_heads model_type",
            bool(own_sizes(config, layer_kinds(config, count))),
        ),
        ("n_recurrent_loops H_cycles", len(layer_kinds(config, count)) > count),
    ):
        if is_there:
            wanted = "absent with --engine: how engines arrange such pools is not known, state them by kvproto.Cache"
            raise bad(f"config.{next(name for name in fields.split() if config.get(name))}", wanted, "present")


_TOKENS_OUT = {"attention": "L|PBNH", "mla": "L|BNHP", "indexer": "L|BPNH", "conv": "LBHN", "ssm": "LBNH"}
_SGLANG = {"NHD": _TOKENS_OUT, "HND": _TOKENS_OUT | {"attention": "L|PBHN"}}
"""A tensor for each layer: K, then V, each [block, token, head] or [block, head, token]; all states share one."""
_TRTLLM = {"attention": "BLPHN", "mla": "BLPHN", "scales": "BLPHN", "conv": "LBHN", "ssm": "LBNH"}
"""One pool [block, layer, K or V, head, token, dim] for all layers of one shape; all states share a tensor."""


def _sglang(make: Make, setup: Setup, target: Config) -> Arranged:
    indexed = any(cache_kind(c) == "indexer" for c in make(setup.page or 64))
    page, dcp = setup.page or (64 if indexed else 1), setup.parallel.dcp
    if indexed and page != 64:
        raise bad("page", "64, with an index", page)
    if indexed and dcp > 1:
        raise bad("dcp", "1 with an index, as its pages would differ from the latent's", dcp)
    # each rank stores the whole draft, in pages as long as those of all ranks together
    drafts = [c for c in make(page * dcp) if c.group.model]
    stored = [c for c in make(page) if not c.group.model] + drafts
    orders = _SGLANG[setup.layout or "NHD"]

    def order(cache: Cache) -> str:
        kind, sizes = cache_kind(cache), {p.lane_bytes for p in cache.group.parts}
        names = {p.name for p in cache.group.parts}
        if kind == "scales" or names == {"latent", "latent_scale"}:
            return "LP|BNH"
        if kind == "attention" and len(sizes) > 1:
            return "LP|BNH" if setup.layout != "HND" else "LP|BHN"
        return "LBNH" if kind == "conv" and target.get("linear_attn_config") else orders[kind]

    return _apart(stored, order)


def _trtllm(make: Make, setup: Setup, target: Config) -> Arranged:
    stored = make(setup.page or 32)
    if unknown := [c for c in stored if cache_kind(c) not in _TRTLLM]:
        raise bad("config", f"layers with {', '.join(_TRTLLM)}", unknown[0].group.name)
    return _apart(stored, lambda cache: _TRTLLM[cache_kind(cache)], joined=True)


def _apart(stored: list[Cache], order: Callable[[Cache], str], joined: bool = False) -> Arranged:
    """A pool for each cache; if `joined`, the scales of the same values share one."""
    pools: dict[str, list[int]] = {}
    for i, c in enumerate(stored):
        name = c.group.name
        if joined and cache_kind(c) == "scales":
            name = name.removesuffix(c.group.parts[0].name) + "scales"
        pools.setdefault(name, []).append(i)
    slabs = [
        Slab(name.replace(" ", "_"), order(stored[i]), tuple((layer, (i, *others)) for layer in stored[i].layers))
        for name, (i, *others) in pools.items()
    ]
    return Arranged(stored, lambda geometry, rank, blocks: slabs)


_NVFP4 = KvDtype(DType.F4E2M1, blocks=(16, DType.F8E4M3), of=("attention",))
_NVFP4_MIXED = attrs.evolve(_NVFP4, apart={"v_scale": 4})
"""As kernels for Blackwell's data-center GPUs need it: the scales of V are interleaved over four tokens of a head."""
_DENSE = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
_VLLM_PLAIN = attrs.evolve(_NVFP4, backends=("FLASHINFER",), layouts=_DENSE)
_VLLM_MIXED = attrs.evolve(_NVFP4_MIXED, backends=("FLASHINFER",), layouts=("LBHNC", "BLHNC"))
_FP8 = {"fp8": KvDtype(DType.F8E4M3), "fp8_e5m2": KvDtype(DType.F8E5M2)}
_BF16 = KvDtype(DType.BF16)
_FP4_MX = KvDtype(DType.F4E2M1, blocks=(16, DType.F8E8M0), of=("attention", "mla"), layouts=("NHD",))
ENGINES: dict[str, EngineProfile] = {
    "vllm": EngineProfile(
        "0.32.0, 0.33.0",
        {
            "auto": KvDtype(), "bfloat16": _BF16, "float16": KvDtype(DType.F16), **_FP8, "fp8_e4m3": _FP8["fp8"],
            "fp8_per_token_head": KvDtype(DType.F8E4M3, scaled=True),
            "int8_per_token_head": KvDtype(DType.I8, scaled=True),
            "fp8_ds_mla": KvDtype(row="always"),
            "nvfp4": KvDtype(by_sm={80: _VLLM_PLAIN, 90: _VLLM_PLAIN, 120: _VLLM_PLAIN, 100: _VLLM_MIXED}),
            "nvfp4_4over6": KvDtype(by_sm={100: _VLLM_MIXED}),
            "nvfp4_ds_mla": KvDtype(
                row="always", of=("mla", "indexer"),
                packed=(DType.F4E2M1, 16, DType.F8E4M3, DType.F8E4M3, "vllm.nvfp4_ds_mla"),
            ),
        },
        model_dtype, vllm.arrange, vllm.LAYOUTS,
    ),
    "sglang": EngineProfile(
        "0.5.23",
        {
            "auto": KvDtype(), "bf16": _BF16, "bfloat16": _BF16,
            "fp8_e4m3": KvDtype(DType.F8E4M3, row="indexed"), "fp8_e5m2": KvDtype(DType.F8E5M2),
            # on SM 100 SGLang does not hand such pages over itself, and keeps their scales in two orders at once
            "nvfp4": KvDtype(by_sm={120: attrs.evolve(_NVFP4, layouts=("NHD",))}),
            "fp4_mx_block16": _FP4_MX,
            "mxfp8": KvDtype(
                DType.F8E4M3, blocks=(32, DType.F8E8M0), apart={"k_scale": 128, "v_scale": 128}, page=128,
                of=("attention",), layouts=("NHD",),
            ),
        },
        lambda config: DType.F32, _sglang, ("NHD", "HND"), dp=True,
    ),
    "trtllm": EngineProfile(
        "1.0 and later",
        {
            "auto": KvDtype(), "fp8": KvDtype(DType.F8E4M3),
            "nvfp4": KvDtype(by_sm={100: attrs.evolve(_NVFP4_MIXED, apart={"k_scale": 1, "v_scale": 4})}),
        },
        model_dtype, _trtllm,
    ),
}  # fmt: skip
