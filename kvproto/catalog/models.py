"""Caches of well-known models: from a Hugging Face config.json to `Cache`s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvproto.catalog.config import STATE_SIZE, Config, draft_of, layer_kinds, nested, number, text
from kvproto.errors import bad, check_whole
from kvproto.planning.cache import BLOCK_SCALED, Cache, bytes_of
from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Parallel, lay_out
from kvproto.wire.enums import DType, FactRule
from kvproto.wire.messages import Fact

__all__ = ["PRESETS", "Config", "Parallel", "describe", "draft_of", "element_type", "specs", "with_windows"]


def describe(
    target: Config,
    drafts: Iterable[Config] = (),
    parallel: Parallel | None = None,
    page: int = 64,
    kv_dtype: DType | str | None = None,
    replica: int = 0,
    facts: Mapping[str, str] | None = None,
    sharded: Collection[str] = (),
    replicated: Collection[str] = (),
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> Geometry:
    """The Geometry of one replica of a model and its drafts, from their config.json files.

    `page` is in tokens, and the peer must state equal `facts`. `sharded` and `replicated` name caches whose tokens
    context-parallel ranks deal among themselves, or all store, if that is not the default (`Cache.dealt`); `own` has
    arguments of `Cache.over` by cache name. Raises LocalError(OUT_OF_RANGE).
    """
    configs = (target, *drafts)
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
    depth = number(text(target), "num_hidden_layers")
    return with_windows(lay_out([*caches.values()], parallel, replica, facts, depth), configs)


def with_windows(geometry: Geometry, configs: Iterable[Config]) -> Geometry:
    """The Geometry with a WARN fact for each model with windowed or chunked layers, unless it states one already."""
    stated = {fact.name for fact in geometry.facts}
    windows = []
    for model, config in enumerate(map(text, configs)):
        kinds = {
            kind for kinds in layer_kinds(config, number(config, "num_hidden_layers")) for kind in kinds.split("+")
        }
        reach = next((config[key] for kind, key in _REACH.items() if kind in kinds and config.get(key)), None)
        name = f"window.{_model_name(model)}"
        if reach is not None and name not in stated:
            windows.append(Fact(name=name, value=str(reach), rule=FactRule.WARN))
    return attrs.evolve(geometry, facts=tuple(sorted((*geometry.facts, *windows), key=lambda fact: fact.name)))


_REACH = {"window": "sliding_window", "chunked": "attention_chunk_size"}
"""Where a config says how many tokens a layer of each kind attends to."""


def _model_name(model: int) -> str:
    return "target" if model == 0 else f"draft{model if model > 1 else ''}"


_OWN = ("tp", "cp", "dcp", "interleave", "origin", "deal", "stages", "virtual", "copies")
"""Arguments of `Cache.over`."""


def specs(
    config: Config,
    model: int = 0,
    page: int = 64,
    kv_dtype: DType | str | None = None,
    state_dtype: DType | None = None,
) -> list[Cache]:
    """The caches of one model, attention first, in pages of `page` tokens.

    `kv_dtype` is the element type of pages, or a name from `BLOCK_SCALED`; `state_dtype` is that of recurrent states,
    F32 by default. Raises LocalError(OUT_OF_RANGE) for a config that lacks a size.
    """
    config = text(config)
    check_whole("page", page, 1)
    name = _model_name(model)
    layers: dict[str, list[int]] = {}
    for i, kinds in enumerate(layer_kinds(config, number(config, "num_hidden_layers"))):
        for kind in kinds.split("+"):
            layers.setdefault(kind, []).append(i)
    caches: list[Cache] = []
    for kind in (kind for kind in _ATTENTION if kind in layers):
        # windowed layers are a separate group, since a request may ask for their last tokens only
        full = name if kind == "attention" else f"{name} {kind}"
        element = _element(kv_dtype or element_type(config))
        caches += _attention(config, full, layers[kind], {"page": page, "model": model}, element)
    for kind in (kind for kind in _RECURRENT if kind in layers):
        caches += _recurrent(kind, config, name, layers[kind], state_dtype or DType.F32, model)
    if not caches:
        raise bad("config", "layers with a cache", "none")
    return caches


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
        if config.get("index_head_dim"):
            yield Cache.indexer(f"{name} index", layers, head_dim=number(config, "index_head_dim"), **more)
        return
    v_dim = number(config, "v_head_dim") if config.get("v_head_dim") else None
    heads, dim = _kv_heads(config), _head_dim(config)
    yield Cache.gqa(name, layers, kv_heads=heads, head_dim=dim, v_head_dim=v_dim, **element, **more)


_ATTENTION = ("attention", "window", "chunked")
_RECURRENT = ("mamba", "linear", "kda", "lightning", "conv")
_LATENT = {"latent": ("kv_lora_rank",), "rope": ("qk_rope_head_dim",)}
_KERNEL = ("conv_kernel", "mamba_d_conv", "d_conv")
_MAMBA_HEADS, _MAMBA_DIMS = ["mamba_num_heads", "mamba_n_heads"], ["mamba_head_dim", "mamba_d_head"]
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
            return Cache.gdn(name, layers, **_sizes(config, _DELTA), **more)
        case "kda":  # a gated delta net whose q, k and v have the same heads
            kda = _sizes(config["linear_attn_config"], {"n": ("num_heads",), "dim": ("head_dim",)})
            kernel = number(config["linear_attn_config"], "short_conv_kernel_size")
            heads = {"key_heads": kda["n"], "value_heads": kda["n"], "key_dim": kda["dim"], "value_dim": kda["dim"]}
            return Cache.gdn(name, layers, **heads, kernel=kernel, **more)
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
        sizes |= _sizes(config, {"heads": heads, "head_dim": dims, "groups": ("n_groups", "mamba_n_groups")})
        return Cache.mamba2(name, layers, **sizes, **more)
    if "mamba_expand" not in config and config.get("intermediate_size"):
        channels = number(config, "intermediate_size")
    else:
        channels = number(config, "mamba_expand") * number(config, "hidden_size")
    return Cache.mamba1(name, layers, channels=channels, **sizes, **more)


def _kv_heads(config: Config) -> int:
    """The number of KV heads, which is that of query heads unless the config says otherwise."""
    named = _KV_HEADS.get(str(config.get("model_type")))
    if config.get("num_key_value_heads") is None and named and config.get(named):
        return number(config, named)
    other = [name for name in ("num_kv_heads", "multi_query", "num_attention_groups") if config.get(name)]
    if other and config.get("num_key_value_heads") is None:
        raise bad("config.num_key_value_heads", f"a number: {other[0]} is not read", "absent")
    return number(config, "num_key_value_heads", *(() if nested(config) else ("num_attention_heads",)))


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


def element_type(config: Config) -> DType:
    """The element type of activations, which conv states have too; paged caches may have another."""
    name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    known = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16, "float8_e4m3fn": DType.F8E4M3}
    if name not in known:
        raise bad("config.torch_dtype", ", ".join(known), name)
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
