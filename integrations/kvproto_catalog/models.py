"""Caches of well-known models: from a Hugging Face config.json to `Cache`s, also in the element types of an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from types import NoneType
from typing import Any

import attrs

from kvproto.errors import KvprotoError, bad, check_type, check_whole
from kvproto.planning.cache import BITS, BLOCK_SCALED, Block, Cache, bytes_of
from kvproto.planning.geometry import Geometry, Part
from kvproto.planning.kinds import KINDS
from kvproto.planning.layout import Parallel, lay_out
from kvproto.wire.enums import DType, FactRule
from kvproto.wire.messages import Fact
from kvproto_catalog.config import (
    STATE_SIZE,
    Config,
    Read,
    compress_ratios,
    draft_of,
    foreign_fields,
    index_layers,
    layer_kinds,
    nested,
    number,
    own_sizes,
    text,
)
from kvproto_catalog.tensors import Slab


def describe(
    target: Config,
    drafts: Iterable[Config] = (),
    parallel: Parallel | None = None,
    page: int | None = None,
    kv_dtype: DType | str | None = None,
    replica: int = 0,
    facts: Mapping[str, str] | None = None,
    sharded: Collection[str] = (),
    replicated: Collection[str] = (),
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> Geometry:
    """The Geometry of one replica of a model and its drafts, from their config.json files.

    `page` is in tokens (64, or the longest row if that is longer), and the peer must state equal `facts`. `sharded` and
    `replicated` name caches whose tokens context-parallel ranks deal among themselves, or all store, if that is not the
    default (`Cache.dealt`); `own` has arguments of `Cache.over` by cache name. Raises LocalError(OUT_OF_RANGE).
    """
    configs = (target, *drafts)
    if kv_dtype is None:
        check_stored_as_computed(target)
    caches = {c.group.name: c for model, config in enumerate(configs) for c in specs(config, model, page, kv_dtype)}
    for path, names in (("sharded", sharded), ("replicated", replicated), ("own", own or {})):
        if unknown := [name for name in names if name not in caches]:
            raise bad(path, f"one of {', '.join(caches)}", unknown[0])
    if both := set(sharded) & set(replicated):
        raise bad("sharded", "caches that are not replicated too", min(both))
    caches |= {name: caches[name].sharded() for name in sharded}
    caches |= {name: caches[name].replicated() for name in replicated}
    for name, sizes in (own or {}).items():
        if unknown := [size for size in sizes if size not in _OWN]:
            raise bad(f"own[{name!r}]", ", ".join(_OWN), unknown[0])
        caches[name] = caches[name].over(**sizes)
    for cache in caches.values():
        _check_groups(cache, int(dict(cache.own).get("tp") or (parallel or Parallel()).tp))
    depth = len(_kinds(text(target)))
    return with_windows(lay_out([*caches.values()], parallel, replica, facts, depth), configs)


def with_windows(geometry: Geometry, configs: Iterable[Config]) -> Geometry:
    """The Geometry with WARN facts of each model that it lacks: its windows or chunks, and its rotary embedding."""
    stated = {fact.name for fact in geometry.facts}
    windows = []
    for model, config in enumerate(map(text, configs)):
        kinds = {kind for kinds in _kinds(config) for kind in kinds.split("+")}
        if compress_ratios(config, number(config, "num_hidden_layers")) is not None:
            kinds = {"window"}
        reach = next((number(config, key) for kind, key in _REACH.items() if kind in kinds), None)
        said = {"window": None if reach is None else str(reach), "rope": _rope(config)}
        names = {f"{name}.{_model_name(model)}": value for name, value in said.items() if value is not None}
        windows += [Fact(name=n, value=v, rule=FactRule.WARN) for n, v in names.items() if n not in stated]
    return attrs.evolve(geometry, facts=tuple(sorted((*geometry.facts, *windows), key=lambda fact: fact.name)))


def _rope(config: Config) -> str | None:
    """The rotary embedding as text, alike for both forms that a config.json may have; None if it says nothing."""
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    rope = {**stated} if isinstance(stated, dict) else {}
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(name) is not None:
            rope.setdefault(name, config[name])
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if not rope:
        return None
    shown = json.dumps({"rope_type": "default", **rope}, sort_keys=True)
    return shown if len(shown) <= _LONGEST_FACT else f"sha256:{sha256(shown.encode()).hexdigest()}"


_LONGEST_FACT = 200
"""Characters of a fact that people can compare."""
_REACH = {"window": "sliding_window", "chunked": "attention_chunk_size"}
"""Fields of a config that say how many tokens a layer of each kind attends to."""


def _kinds(config: Config) -> list[str]:
    """The kind of each layer; as many as a token passes."""
    return layer_kinds(config, number(config, "num_hidden_layers"))


def _model_name(model: int) -> str:
    return "target" if model == 0 else f"draft{model if model > 1 else ''}"


_OWN = ("tp", "cp", "dcp", "interleave", "origin", "deal", "stages", "virtual", "copies")
"""Arguments of `Cache.over`."""


def specs(
    config: Config,
    model: int = 0,
    page: int | None = None,
    kv_dtype: DType | str | None = None,
    state_dtype: DType | None = None,
) -> list[Cache]:
    """The caches of one model, attention first; `kv_dtype` may name a row of `BLOCK_SCALED`; raises OUT_OF_RANGE."""
    read = Read(text(config))
    longest = max(compress_ratios(read, number(read, "num_hidden_layers")) or (1,))
    page = check_whole("page", max(64, longest) if page is None else page, 1)
    if page % max(longest, 1):
        raise bad("page", f"a multiple of {longest}, the tokens of a compressed row", page)
    states = state_dtype or _state_type(read) or DType.F32
    element = _element(kv_dtype or element_type(read))
    caches = _caches(read, model, page, element, states)
    read.check()
    if not caches:
        raise bad("config", "layers with a cache", "none")
    for name in foreign_fields(config):
        foreign = text(config, (name,))
        try:
            unused = foreign[name] is None or _caches(Read(foreign), model, page, element, states) == caches
        except KvprotoError:
            unused = False
        if not unused:
            wanted = f"absent: the class of {read['model_type']} has no such field and ignores it (--ignore)"
            raise bad(f"config.{name}", wanted, repr(foreign[name])[:80])
    return caches


def fields_read(config: Config) -> frozenset[str]:
    """The fields on which the caches of a model depend, present or not; raises LocalError(OUT_OF_RANGE)."""
    read = Read(text(config))
    _caches(read, 0, 128, _element(element_type(read)), DType.F32)
    return read.fields - {*foreign_fields(config)}


def _caches(config: Read, model: int, page: int, element: Mapping[str, Any], state_dtype: DType) -> list[Cache]:
    name = _model_name(model)
    layers: dict[str, list[int]] = {}
    kinds_of = _kinds(config)
    if (ratios := compress_ratios(config, number(config, "num_hidden_layers"))) is not None:
        return _compressed(config, name, ratios, page, model, element)
    for i, kinds in enumerate(kinds_of):
        for kind in kinds.split("+"):
            layers.setdefault(kind, []).append(i)
    caches: list[Cache] = []
    for kind in (kind for kind in _ATTENTION if kind in layers):
        # windowed layers are a separate group, since a request may ask for their last tokens only
        full = name if kind == "attention" else f"{name} {kind}"
        for n, (sizes, own) in enumerate(_by_size(own_sizes(config, kinds_of), layers[kind])):
            label = f"{full} {n + 1}" if n else full
            caches += _attention(config.with_sizes(sizes), label, own, {"page": page, "model": model}, element)
    for kind in (kind for kind in _RECURRENT if kind in layers):
        caches += _recurrent(kind, config, name, layers[kind], state_dtype, model)
    return caches


def _by_size(sizes: Mapping[int, Config], layers: Sequence[int]) -> list[tuple[Config, list[int]]]:
    """Layers divided by the sizes of their own, those without any first."""
    groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for layer in layers:
        groups.setdefault(tuple(sorted(sizes.get(layer, {}).items())), []).append(layer)
    return [(dict(own), groups[own]) for own in sorted(groups)]


def _element(kv_dtype: DType | str) -> Mapping[str, Any]:
    """The constructor arguments that state the element type and its scales."""
    if isinstance(kv_dtype, DType):
        return {"dtype": kv_dtype}
    if not isinstance(kv_dtype, str) or kv_dtype not in BLOCK_SCALED:
        raise bad("kv_dtype", f"a kvproto.DType, or one of {', '.join(BLOCK_SCALED)}", kv_dtype)
    return BLOCK_SCALED[kv_dtype]


def _attention(
    config: Config, name: str, layers: list[int], more: Mapping[str, Any], element: Mapping[str, Any]
) -> Iterable[Cache]:
    if config.get("kv_lora_rank"):
        yield Cache.mla(name, layers, **_sizes(config, _LATENT), **element, **more)
        if own := index_layers(config, layers):
            yield Cache.indexer(f"{name} index", own, head_dim=number(config, "index_head_dim"), **more)
        return
    if config.get("qk_rope_head_dim"):
        raise bad(
            "config.kv_lora_rank", "a number, as the rotary part of a latent is there: qk_rope_head_dim", "absent"
        )
    v_dim = number(config, "v_head_dim") if config.get("v_head_dim") else None
    heads, dim = _kv_heads(config), _head_dim(config)
    yield Cache.gqa(name, layers, kv_heads=heads, head_dim=dim, v_head_dim=v_dim, **element, **more)
    if own := index_layers(config, layers):
        sparse = config.get("sparse_attention_config")
        size = number(sparse, "sparse_index_dim") if sparse else number(config, "index_head_dim")
        plain: dict[str, Any] = {"dtype": element_type(config), "scale_block": None}
        yield Cache.indexer(f"{name} index", own, head_dim=size, **plain, **more)


def _compressed(
    config: Config, name: str, ratios: Sequence[int], page: int, model: int, element: Mapping[str, Any]
) -> list[Cache]:
    """The caches of DeepSeek V4: a window in each layer, and where a layer compresses, rows and what is to be one."""
    dtype, dim = element["dtype"], number(config, "head_dim")
    config.get("qk_rope_head_dim")  # the end of each latent
    if BITS[dtype] < 16:
        wanted = (
            "one of 16 bits or more: a row of fewer has scales, and its rotary part in BF16, state it by kvproto.Cache"
        )
        raise bad("kv_dtype", wanted, dtype.name)
    latent = dtype, 1, bytes_of(dtype, dim)
    index = number(config, "index_head_dim") if config.get("index_head_dim") or 4 in ratios else 0
    caches = [Cache.paged(f"{name} window", len(ratios), parts={"window_latent": latent}, page=page, model=model)]
    for ratio in sorted({*ratios} - {0}):
        layers, of = [i for i, r in enumerate(ratios) if r == ratio], f"{name} c{ratio}"
        rows: dict[str, Any] = {"page": page, "tokens_per_row": ratio, "model": model}
        sizes, windows = {"": dim}, 2 if ratio == 4 else 1  # those of ratio 4 overlap
        caches.append(Cache.paged(of, layers, parts={"latent": latent}, **rows))
        if ratio == 4:
            sizes["index_"] = index
            keys: Mapping[str, Any] = {"index": (DType.F8E4M3, 1, index), "index_scale": (DType.F32, 1, 4)}
            caches.append(Cache.paged(f"{of} index", layers, parts=keys, **rows).replicated())
        for prefix, size in sizes.items():
            state = {f"{prefix}compress_state": (DType.F32, 1, bytes_of(DType.F32, 2 * windows * size))}
            label = f"{of} {prefix}state".replace("_", " ")
            caches.append(Cache.ring(label, layers, parts=state, ring_rows=ratio * windows, model=model))
    return caches


_ATTENTION = ("attention", "window", "chunked")
_RECURRENT = ("mamba", "linear", "kda", "lightning", "conv")
_LATENT = {"latent": ("kv_lora_rank",), "rope": ("qk_rope_head_dim",)}
_KERNEL = ("conv_kernel", "mamba_d_conv", "d_conv")
_MAMBA_HEADS, _MAMBA_DIMS = ["mamba_num_heads", "mamba_n_heads"], ["mamba_head_dim", "mamba_d_head"]
_KDA = {"n": ("num_heads",), "dim": ("head_dim",), "kernel": ("short_conv_kernel_size",)}
_KDA_SAVED = {"n": ("linear_num_heads",), "dim": ("linear_head_dim",), "kernel": ("linear_conv_kernel_dim",)}
_DELTA = {
    "key_heads": ("linear_num_key_heads",),
    "key_dim": ("linear_key_head_dim",),
    "value_heads": ("linear_num_value_heads",),
    "value_dim": ("linear_value_head_dim",),
    "kernel": ("linear_conv_kernel_dim",),
}
"""By argument of a constructor: the fields that state it, in order of preference."""


def _sizes(config: Config, fields: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {argument: number(config, *names) for argument, names in fields.items()}


def _recurrent(
    kind: str, config: Config, name: str, layers: list[int], state_dtype: DType, model: int
) -> Iterable[Cache]:
    """The recurrent caches of some layers of one kind."""
    dtype = element_type(config)
    more: dict[str, Any] = {"dtype": dtype, "state_dtype": state_dtype, "model": model}
    match kind:
        case "mamba":
            return _mamba(config, name, layers, more)
        case "linear":
            sizes = _sizes(config, _DELTA)
            if sizes["value_heads"] % sizes["key_heads"]:
                raise bad("config.linear_num_key_heads", f"a divisor of {sizes['value_heads']}", sizes["key_heads"])
            return Cache.gdn(name, layers, **sizes, **more)
        case "kda":  # a gated delta net whose q, k and v have the same heads
            saved = config.get("linear_num_heads")  # by transformers 5, beside the published form
            kda = _sizes(config, _KDA_SAVED) if saved else _sizes(config["linear_attn_config"], _KDA)
            if config.get("short_conv_kernel_size", kda["kernel"]) != kda["kernel"]:  # Ling says it twice
                raise bad("config.short_conv_kernel_size", str(kda["kernel"]), config["short_conv_kernel_size"])
            heads = {"key_heads": kda["n"], "value_heads": kda["n"], "key_dim": kda["dim"], "value_dim": kda["dim"]}
            return Cache.gdn(name, layers, **heads, kernel=kda["kernel"], **more)
        case "lightning":  # a square state for each query head
            size = bytes_of(state_dtype, _head_dim(config) ** 2)
            parts = {"ssm": (state_dtype, number(config, "num_attention_heads"), size)}
            return [Cache.state(f"{name} ssm", layers, parts=parts, model=model)]
    # a gated short convolution over the hidden size, which has no other state
    parts = {"conv": (dtype, number(config, "conv_dim", "hidden_size"), bytes_of(dtype, 1))}
    rows = number(config, "conv_L_cache") - 1
    return [Cache.state(f"{name} conv", layers, parts=parts, rows=rows, model=model)]


def _mamba(config: Config, name: str, layers: list[int], more: Mapping[str, Any]) -> Iterable[Cache]:
    sizes = _sizes(config, {"kernel": _KERNEL, "state": STATE_SIZE})
    heads, dims = _MAMBA_HEADS, _MAMBA_DIMS
    if config.get("num_heads") and not config.get("num_attention_heads"):  # Mamba 2 alone has no prefix
        heads, dims = ["num_heads"], ["head_dim"]
    if any(config.get(n) for n in heads):
        groups = "n_groups", "mamba_n_groups"
        sizes |= _sizes(config, {"heads": heads, "head_dim": dims, "groups": groups})
        if sizes["heads"] % sizes["groups"]:
            of = next(name for name in groups if config.get(name))
            raise bad(f"config.{of}", f"a divisor of {sizes['heads']} heads", sizes["groups"])
        return Cache.mamba2(name, layers, **sizes, **more)
    if half := [n for n in (*dims, "mamba_n_groups") if n.startswith("mamba") and config.get(n)]:
        raise bad(f"config.{heads[0]}", f"a number, as {half[0]} is there", "absent")
    if "mamba_expand" not in config and config.get("intermediate_size"):
        channels = number(config, "intermediate_size")
    else:
        channels = number(config, "mamba_expand") * number(config, "hidden_size")
    return Cache.mamba1(name, layers, channels=channels, **sizes, **more)


def _kv_heads(config: Config) -> int:
    """The number of KV heads, which is that of query heads unless the config says otherwise."""
    named = _KV_HEADS.get(str(config.get("model_type")))
    if config.get("num_key_value_heads") is None and named and config.get(named):
        one = named == "num_kv_heads" and config.get("multi_query") and not config.get("new_decoder_architecture")
        return 1 if one else number(config, named)
    other = [name for name in ("num_kv_heads", "multi_query", "num_attention_groups") if config.get(name)]
    if other and config.get("num_key_value_heads") is None:
        raise bad("config.num_key_value_heads", f"a number: {other[0]} is not read", "absent")
    heads = number(config, "num_key_value_heads", *(() if nested(config) else ("num_attention_heads",)))
    if config.get("num_attention_heads") and number(config, "num_attention_heads") % heads:
        raise bad("config.num_key_value_heads", f"a divisor of {config['num_attention_heads']} query heads", heads)
    return heads


_KV_HEADS = {"step3_text": "num_attention_groups", "falcon": "num_kv_heads"}
"""By model type: the field that stands for num_key_value_heads."""


def _head_dim(config: Config) -> int:
    """Elements of a head: as stated, or a head's share of the hidden size."""
    own = [name for name in ("head_dim", "attention_head_dim") if config.get(name)]
    if own or nested(config):
        return number(config, *own, "head_dim")
    size, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    if size % heads:
        raise bad("config.head_dim", f"a number: {heads} heads do not divide {size}", "absent")
    return size // heads


ACTIVATIONS = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}
"""Element types of activations, by their names in a config.json."""


def element_type(config: Config, path: str = "torch_dtype") -> DType:
    """The element type of activations, which conv states have too; paged caches may have another."""
    stated = [str(config[key]) for key in ("torch_dtype", "dtype") if config.get(key)]
    if len({*stated}) > 1:
        raise bad("config.torch_dtype", f"{stated[1]}, as dtype says", stated[0])
    name = stated[0] if stated else "bfloat16"
    known = {**ACTIVATIONS, "float8_e4m3fn": DType.F8E4M3}
    if name not in known:
        raise bad(f"config.{path}", ", ".join(known), name)
    return known[name]


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, dim: int = 128) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "head_dim": dim}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


_DEEPSEEK_V3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1}
PRESETS: dict[str, tuple[Config, ...]] = {
    "llama-3-70b": (_llama(80, 8192, 64, 8),),
    "qwen3-235b-a22b": (_llama(94, 4096, 64, 4),),
    "deepseek-v3": (_DEEPSEEK_V3,),
    "deepseek-v3-nextn": (_DEEPSEEK_V3, draft_of(_DEEPSEEK_V3) or {}),
    "deepseek-v3-eagle3": (_DEEPSEEK_V3, _llama(1, 7168, 56, 8)),
    "deepseek-v3.2": ({**_DEEPSEEK_V3, "index_head_dim": 128},),
    "qwen3-next-80b-a3b": ({
        **_llama(48, 2048, 16, 2, 256), "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },),
    "nemotron-h-8b": ({
        **_llama(52, 4096, 32, 8), "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
    },),
}  # fmt: skip
"""Shapes of well-known models by name: the target, then its drafts. Dtypes are bfloat16 unless `kv_dtype` is given."""


@attrs.frozen
class Setup:
    """Options of an engine; None stands for its default."""

    parallel: Parallel = attrs.field(factory=Parallel)
    page: int | None = None
    """Tokens of a page: what engines call block_size, page_size or tokens_per_block."""
    kv_dtype: str = "auto"
    backend: str | None = None
    """Attention backend of vLLM."""
    layout: str | None = None
    """Order of a pool: LBNHC and five more of vLLM, NHD or HND of SGLang."""
    state_layout: str = "SD"
    """Order of vLLM's conv states: SD, or DS with channels outermost."""
    dp: int = 1
    """Attention data parallel over the tensor-parallel ranks (SGLang): a replica has tp / dp ranks."""
    state_dtype: DType | None = None
    dtype: DType | None = None
    """Element type of activations: what engines call --dtype; None for that of the config."""
    sm: int | None = None
    """Compute capability of the GPUs, such as 90, 100 or 120, if a pool depends on it."""

    def check(self) -> None:
        """Raise LocalError(OUT_OF_RANGE) for an option that no engine has."""
        check_type("parallel", self.parallel, Parallel, "a kvproto.Parallel")
        self.parallel.check()
        for name in ("page", "dp", "sm"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        for name in ("kv_dtype", "backend", "layout"):
            check_type(name, getattr(self, name), (str, NoneType), "a name")
        if self.state_layout not in ("SD", "DS"):
            raise bad("state_layout", "SD or DS", self.state_layout)
        for name in ("dtype", "state_dtype"):
            check_type(name, getattr(self, name), (DType, NoneType), "a kvproto.DType")
        if self.dtype not in (None, *ACTIVATIONS.values()):
            raise bad("dtype", ", ".join(ACTIVATIONS), self.dtype)


@attrs.frozen
class KvDtype:
    """The form of K and V, and of a latent, under one cache dtype of an engine."""

    element: DType | None = None
    """Element type of K and V; None for that of the model."""
    scaled: bool = False
    """Whether an F32 scale follows K and V of each token and head."""
    row: str = "never"
    """Whether a latent, its rotary key and scales form a packed row: never, always, or indexed (with an indexer)."""
    packed: tuple[DType, int, DType, DType, str | None] = (DType.F8E4M3, 128, DType.F32, DType.BF16, None)
    """Types of the latent, of the scale of so many elements, and of the rotary key, and the encoding of the scales."""
    blocks: tuple[int, DType] | None = None
    """The number of elements of K and V, or of a latent, that share a scale, and its type."""
    apart: Mapping[str, int] = {}
    """Scales that are a separate group, and the number of tokens whose scales each of their rows interleaves."""
    of: tuple[str, ...] = ("attention", "mla", "indexer", "conv", "ssm")
    """The kinds of caches that a model may have for this dtype to be possible."""
    backends: tuple[str, ...] = ()
    """Attention backends that support it; empty for all."""
    layouts: tuple[str, ...] = ()
    """Pool layouts that support it; empty for all."""
    page: int | None = None
    """Tokens of its pages, if it supports only one size."""
    by_sm: Mapping[int, KvDtype] = {}
    """Its form by compute capability, if it is not the same on all GPUs."""


Make = Callable[[int], list[Cache]]
"""Makes the caches of a model and its drafts, in pages of that many tokens."""


@attrs.frozen
class Arranged:
    """An engine's caches, in the order of their group ids, and its pools."""

    caches: list[Cache]
    slabs: Callable[[Geometry, int, int], list[Slab]]
    """Makes the slabs of one rank from a Description, the rank, and the number of blocks of its pool."""
    pieces: Mapping[int, int] = {}
    """By group id: how many items one block of the engine's tables is, if more than one."""


def stored_caches(configs: Sequence[Config], page: int, kv: KvDtype, state: Callable[[Config], DType]) -> list[Cache]:
    """The caches of a target and its drafts, in the element types of an engine."""
    stored = []
    for model, config in enumerate(configs):
        for cache in specs(config, model, page, kv.element, state(text(config))):
            kind = cache_kind(cache)
            if kind == "attention" and kv.scaled:
                sizes = [(p.name, DType(p.dtype), p.lane_bytes) for p in cache.group.parts]
                scaled = [row for n, d, size in sizes for row in ((n, d, size), (f"{n}_scale", DType.F32, 4))]
                cache = _with_parts(cache, scaled)
            if kind == "mla" and (kv.row == "always" or (kv.row == "indexed" and text(config).get("index_head_dim"))):
                latent, rope = number(text(config), "kv_lora_rank"), number(text(config), "qk_rope_head_dim")
                cache = _row(cache, latent, rope, kv.packed)
            if kind not in kv.of:
                raise bad("kv_dtype", f"one that supports layers of kind {kind}", "one that does not")
            stored += _blocks(cache, kv) if kv.blocks and kind in ("attention", "mla") else [cache]
    return stored


def dtype_of(name: str, known: Mapping[str, KvDtype], setup: Setup) -> KvDtype:
    """The cache dtype of that name under a setup; raises LocalError(OUT_OF_RANGE) if the setup does not support it."""
    if name not in known:
        raise bad("kv_dtype", ", ".join(known), name)
    kv = known[name]
    if kv.by_sm:
        if setup.sm is None or setup.sm not in kv.by_sm:
            sms = ", ".join(map(str, sorted(kv.by_sm)))
            raise bad("sm", f"the GPUs' compute capability, as {name} depends on it: {sms}", setup.sm)
        kv = kv.by_sm[setup.sm]
    for path, wanted in (("backend", kv.backends), ("layout", kv.layouts)):
        if wanted and getattr(setup, path) not in (None, *wanted):
            raise bad(path, f"{', '.join(wanted)}, with {name}", getattr(setup, path))
    if kv.page not in (None, setup.page) and setup.page is not None:
        raise bad("page", f"{kv.page}, with {name}", setup.page)
    return kv


def cache_kind(cache: Cache) -> str:
    """attention, mla, indexer, conv or ssm, as the registry groups parts; scales for a cache of scales alone."""
    first = cache.group.parts[0].name
    kinds = {"k": "attention", "latent": "mla", "index": "indexer", "k_scale": "scales", "v_scale": "scales"}
    return kinds.get(first, first)


def model_dtype(config: Config) -> DType:
    """The element type of states: the config's for them, F32 for Kimi delta attention, else that of activations."""
    if stated := _state_type(config):
        return stated
    return DType.F32 if config.get("linear_attn_config") else element_type(config)


def _state_type(config: Config) -> DType | None:
    """The element type that a config states of states."""
    key = next((key for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype") if config.get(key)), None)
    return None if key is None else element_type({"dtype": config[key]}, key)


def check_stored_as_computed(config: Config) -> None:
    """Raise LocalError for a checkpoint that asks for a cache of another dtype, if no dtype of pages is stated."""
    if name := _asked_cache(text(config).get("quantization_config")):
        raise bad("kv_dtype", f"the name of one, not auto: {name} of quantization_config may change it", "auto")


def _asked_cache(quantization: Any) -> str | None:
    """The field that states a cache's dtype, of a quantization_config or of an object in it, as ModelOpt nests them."""
    if not isinstance(quantization, Mapping):
        return None
    asked = next((n for n in ("kv_cache_scheme", "kv_cache_quant_algo") if quantization.get(n)), None)
    return asked or next(filter(None, map(_asked_cache, quantization.values())), None)


def _with_parts(
    cache: Cache, parts: Sequence[tuple[str, DType, int]], encodings: Mapping[str, str] | None = None
) -> Cache:
    """The same cache with parts of these names, types and bytes of a lane."""
    lanes, encoding = cache.group.parts[0].lanes, encodings or {}
    stated = tuple(
        Part(name=name, dtype=dtype, lanes=lanes, lane_bytes=size, encoding=encoding.get(name))
        for name, dtype, size in parts
    )
    blocks = tuple((Block(lanes),) for _ in stated)
    return attrs.evolve(cache, group=attrs.evolve(cache.group, parts=stated), blocks=blocks)


def _row(cache: Cache, latent: int, rope: int, packed: tuple[DType, int, DType, DType, str | None]) -> Cache:
    element, block, scale, rotary, encoding = packed
    values = "latent", element, bytes_of(element, latent)
    scales = "latent_scale", scale, bytes_of(scale, -(-latent // block))
    key = "rope", rotary, bytes_of(rotary, rope)
    if encoding is None:
        return _with_parts(cache, [values, scales, key])
    return _with_parts(cache, [values, key, scales], {"latent_scale": encoding})


def _blocks(cache: Cache, kv: KvDtype) -> list[Cache]:
    """A cache with the scales of its blocks, and a separate cache for each part of scales that lies apart."""
    assert kv.blocks is not None
    block, dtype = kv.blocks
    scales = {}
    for part in cache.group.parts:
        elements = part.lane_bytes * 8 // BITS[part.dtype]
        if elements % block:
            raise bad("kv_dtype", f"one whose blocks divide {elements} elements of {part.name}", f"blocks of {block}")
        scales[part.name] = f"{part.name}_scale", dtype, bytes_of(dtype, elements // block)
    parts = [
        part
        for p in cache.group.parts
        for part in ((p.name, DType(p.dtype), p.lane_bytes), scales[p.name])
        if part[0] not in kv.apart
    ]
    stored = [_with_parts(cache, parts)]
    for name, tokens in kv.apart.items():
        if cache.group.rows % tokens:
            raise bad("page", f"a multiple of {tokens}, as {name} lies by so many tokens", cache.group.rows)
        apart = _with_parts(cache, [(name, dtype, scales[name.removesuffix("_scale")][2] * tokens)])
        name, partial = f"{apart.group.name} {name}", tokens > 1 or None
        rows = cache.group.rows // tokens
        group = attrs.evolve(apart.group, name=name, rows=rows, tokens_per_row=tokens, partial=partial)
        stored.append(attrs.evolve(apart, group=group))
    return stored


def _check_groups(cache: Cache, ranks: int) -> None:
    """Raise LocalError unless each rank that has value heads of a state has the keys, or B and C, that they share."""
    for blocks in (blocks for blocks in cache.blocks if len(blocks) > 1):
        few, many = (pick(blocks, key=lambda block: block.lanes // block.unit) for pick in (min, max))
        cuts = [(few.cut(rank, ranks), many.cut(rank, ranks)) for rank in range(ranks)]
        if any(a * many.lanes > c * few.lanes or b * many.lanes < d * few.lanes for (a, b), (c, d) in cuts):
            wanted = f"a size that divides {few.lanes // few.unit} groups of heads in {cache.group.name!r}"
            raise bad("tp", wanted, ranks)


def check_heads(cache: Cache, ranks: int) -> None:
    """Raise LocalError unless an engine can divide heads over so many ranks; heads of states are never replicated."""
    for part, blocks in zip(cache.group.parts, cache.blocks, strict=True):
        for block in blocks:
            units = block.lanes // block.unit
            copies = ranks % units == 0 and (KINDS[cache.group.kind].paged or block is not blocks[0])
            if units > 1 and units % ranks and not copies:
                raise bad("tp", f"a size that divides {units} heads of {part.name} in {cache.group.name!r}", ranks)
