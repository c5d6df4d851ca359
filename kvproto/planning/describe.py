"""Caches of well-known models: from a Hugging Face config.json to `Cache`s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvproto.errors import LocalError
from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.wire.enums import DType, ErrorCode

__all__ = ["PRESETS", "Parallel", "describe", "draft_of", "specs"]

Config = Mapping[str, Any]


def describe(
    target: Config, drafts: Iterable[Config] = (), parallel: Parallel | None = None, page: int = 64,
    kv_dtype: DType | None = None, replica: int = 0, facts: Mapping[str, str] | None = None,
    sharded: Collection[str] = (), replicated: Collection[str] = (),
) -> Geometry:  # fmt: skip
    """The Geometry of one replica; `facts` are compared for equality by the other side.

    `sharded` and `replicated` name caches that context-parallel ranks deal among them, or store whole, where that is not
    what most engines do (`Cache.dealt`). Raises LocalError.
    """
    found = {
        c.group.name: c for model, config in enumerate((target, *drafts)) for c in specs(config, model, page, kv_dtype)
    }
    for path, named in (("sharded", sharded), ("replicated", replicated)):
        if unknown := [name for name in named if name not in found]:
            raise _bad(path, f"one of {', '.join(found)}", unknown[0])
    if both := set(sharded) & set(replicated):
        raise _bad("sharded", "caches that are not replicated too", min(both))
    found |= {name: found[name].sharded() for name in sharded} | {name: found[name].replicated() for name in replicated}
    return lay_out([*found.values()], parallel, replica, facts, _number(_text(target), "num_hidden_layers"))


def draft_of(config: Config) -> Config | None:
    """The multi-token-prediction layers of a checkpoint, as a draft; None where it has none."""
    if _nested(config):
        config = {**_text(config), "text_config": {}}
    if not config.get("num_nextn_predict_layers"):
        return None
    layers = _number(config, "num_nextn_predict_layers")
    return {**config, "num_hidden_layers": layers, "num_nextn_predict_layers": 0}


def specs(config: Config, model: int = 0, page: int = 64, kv_dtype: DType | None = None) -> list[Cache]:
    """The caches of one model, attention first; raises LocalError for a config that lacks a size."""
    config = _text(config)
    if page < 1:
        raise _bad("page", "at least 1", page)
    name = "target" if model == 0 else f"draft{model if model > 1 else ''}"
    layers: dict[str, list[int]] = {}
    count = _number(config, "num_hidden_layers")
    kinds = _layer_kinds(config, count)
    if len(kinds) != count:
        raise _bad("config.num_hidden_layers", f"{len(kinds)}, as many as the layers that are listed", count)
    for i, kind in enumerate(kinds):
        layers.setdefault(kind, []).append(i)
    made: list[Cache] = []
    for kind in _ATTENTION:
        if some := layers.get(kind):
            # windowed layers are a group of their own: a request may ask for their last tokens only
            full = name if kind == "attention" else f"{name} {kind}"
            made += _attention(config, full, some, model, page, kv_dtype or _dtype(config))
    for kind, recurrent in _RECURRENT.items():
        if some := layers.get(kind):
            made += recurrent(config, name, some, model)
    if not made:
        raise _bad("config", "layers with a cache", "none")
    return made


def _attention(config: Config, name: str, layers: list[int], model: int, page: int, dtype: DType) -> Iterable[Cache]:
    if config.get("kv_lora_rank"):
        latent, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
        yield Cache.mla(name, layers, latent=latent, rope=rope, page=page, dtype=dtype, model=model)
        if config.get("index_head_dim"):
            dim = _number(config, "index_head_dim")
            yield Cache.indexer(f"{name} index", layers, head_dim=dim, page=page, model=model)
        return
    own = [name for name in ("head_dim", "attention_head_dim") if config.get(name)]
    dim = _divided(config) if not own and not _nested(config) else _number(config, *own, "head_dim")
    v_dim = _number(config, "v_head_dim") if config.get("v_head_dim") else None
    yield Cache.gqa(
        name, layers, kv_heads=_kv_heads(config), head_dim=dim, v_head_dim=v_dim, page=page, dtype=dtype, model=model,
    )  # fmt: skip


def _mamba(config: Config, name: str, layers: list[int], model: int) -> tuple[Cache, Cache]:
    kernel = _number(config, "conv_kernel", "mamba_d_conv", "d_conv")
    state = _number(config, *_STATE)
    heads, dims = ["mamba_num_heads", "mamba_n_heads"], ["mamba_head_dim", "mamba_d_head"]
    if config.get("num_heads") and not config.get("num_attention_heads"):  # Mamba 2 alone has no prefix
        heads, dims = ["num_heads"], ["head_dim"]
    if not any(config.get(n) for n in heads):
        if "mamba_expand" not in config and config.get("intermediate_size"):
            channels = _number(config, "intermediate_size")
        else:
            channels = _number(config, "mamba_expand") * _number(config, "hidden_size")
        return Cache.mamba1(
            name, layers, channels=channels, state=state, kernel=kernel, dtype=_dtype(config), model=model
        )
    return Cache.mamba2(
        name, layers, heads=_number(config, *heads), head_dim=_number(config, *dims),
        groups=_number(config, "n_groups", "mamba_n_groups"), state=state, kernel=kernel, dtype=_dtype(config), model=model,
    )  # fmt: skip


def _linear(config: Config, name: str, layers: list[int], model: int) -> tuple[Cache, Cache]:
    return Cache.gdn(
        name, layers, key_heads=_number(config, "linear_num_key_heads"), key_dim=_number(config, "linear_key_head_dim"),
        value_heads=_number(config, "linear_num_value_heads"), value_dim=_number(config, "linear_value_head_dim"),
        kernel=_number(config, "linear_conv_kernel_dim"), dtype=_dtype(config), model=model,
    )  # fmt: skip


_STATE = ("ssm_state_size", "mamba_d_state", "state_size")
_ATTENTION = ("attention", "window")
_RECURRENT = {"mamba": _mamba, "linear": _linear}


def _layer_kinds(config: Config, count: int) -> list[str]:
    """attention, window, mamba, linear or none, layer by layer."""
    for name in ("hybrid_override_pattern", "layers_block_type", "layer_types", "attn_layer_indices", "attn_type_list"):
        if not isinstance(config.get(name) or [], list | tuple | str):
            raise _bad(f"config.{name}", "a list", config[name])
    unread = [name for name in _UNREAD if config.get(name)]
    if unread or 0 in (config.get("attn_type_list") or ()):
        raise _bad(f"config.{(unread or ['attn_type_list'])[0]}", *_BY_HAND)
    pattern = config.get("hybrid_override_pattern")
    if pattern:
        return [_named(c, _LETTERS, "hybrid_override_pattern") for c in pattern]
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed:
        return [_named(k, _KINDS, "layer_types") for k in listed]
    if config.get("attn_layer_indices"):
        beyond = [i for i in config["attn_layer_indices"] if i not in range(count)]
        if beyond:
            raise _bad("config.attn_layer_indices", f"layers of {count}", beyond[0])
        return ["attention" if i in config["attn_layer_indices"] else "mamba" for i in range(count)]
    if config.get("attn_layer_period"):
        period = _number(config, "attn_layer_period")
        offset = _number(config, "attn_layer_offset") if config.get("attn_layer_offset") else 0
        if offset >= period:
            raise _bad("config.attn_layer_offset", f"below attn_layer_period {period}", offset)
        return ["attention" if i % period == offset else "mamba" for i in range(count)]
    if config.get("full_attention_interval"):
        period = _number(config, "full_attention_interval")
        return ["attention" if i % period == period - 1 else "linear" for i in range(count)]
    if not config.get("num_attention_heads") and not config.get("kv_lora_rank"):
        if not any(config.get(name) for name in _STATE):
            raise _bad("config.num_attention_heads", "a number, or the sizes of a Mamba", "absent")
        return ["mamba"] * count
    beside = sorted(name for name in config if name.startswith(("mamba_", "linear_num_")) and config[name])
    if beside:
        raise _bad(f"config.{beside[0]}", *_BY_HAND)
    return ["attention"] * count


def _named(name: object, kinds: Mapping[str, str], path: str) -> str:
    if str(name) not in kinds:
        raise _bad(f"config.{path}", ", ".join(kinds), name)
    return kinds[str(name)]


_BY_HAND = "absent: which layers have which cache is not known of this model, state it by GroupSpecs", "present"
_UNREAD = (
    "_block_types", "block_configs", "block_types", "compress_ratios", "conv_L_cache", "cross_attention_layers",
    "global_head_dim", "hybrid_layer_ids", "hybrid_layer_pattern", "is_encoder_decoder", "layer_group_size",
    "linear_attn_config", "n_mamba_heads", "num_kv_shared_layers", "use_cla",
)  # fmt: skip
"""What gives some layers another cache, or none, in a way that is not read here."""
_LETTERS = {"*": "attention", "M": "mamba", "-": "none", "E": "none"}
_KINDS = {
    "attention": "attention", "full_attention": "attention", "sliding_attention": "window", "mamba": "mamba",
    "mamba2": "mamba", "linear_attention": "linear", "mlp": "none", "moe": "none",
}  # fmt: skip


def _text(config: Config) -> Config:
    """The language model of a checkpoint that also sees or hears."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _nested(config: Config) -> bool:
    """Whether sizes that are absent may be the defaults of a class (Gemma 3 has 256 for head_dim), not shares."""
    return isinstance(config.get("text_config"), dict)


def _number(config: Config, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _bad(f"config.{name}", "a whole number, at least 1", value)
            return value
    raise _bad(f"config.{names[0]}", "a number", "absent")


def _kv_heads(config: Config) -> int:
    """As many as the query heads where nothing says otherwise."""
    other = [name for name in _OTHER_KV_HEADS if config.get(name)]
    if other and config.get("num_key_value_heads") is None:
        raise _bad("config.num_key_value_heads", f"a number: {other[0]} is not read", "absent")
    return _number(config, "num_key_value_heads", *(() if _nested(config) else ("num_attention_heads",)))


_OTHER_KV_HEADS = ("num_kv_heads", "multi_query", "num_attention_groups")


def _divided(config: Config) -> int:
    """A head's share of the hidden size."""
    size, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    if size % heads:
        raise _bad("config.head_dim", f"a number: {heads} heads do not divide {size}", "absent")
    return size // heads


def _dtype(config: Config) -> DType:
    """Of activations: paged caches may have another, the conv states of recurrent layers have this one."""
    name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    known = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16, "float8_e4m3fn": DType.F8E4M3}
    if name not in known:
        raise _bad("config.torch_dtype", ", ".join(known), name)
    return known[name]


def _bad(path: str, mine: str, yours: object) -> LocalError:
    return LocalError(ErrorCode.OUT_OF_RANGE, path, mine, str(yours))


def _llama(layers: int, hidden: int, heads: int, kv: int, dim: int = 128) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
    }


_DEEPSEEK_V3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1}
_QWEN3_NEXT = {
    **_llama(48, 2048, 16, 2, 256), "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
PRESETS: dict[str, tuple[Config, ...]] = {
    "llama-3-70b": (_llama(80, 8192, 64, 8),),
    "qwen3-235b-a22b": (_llama(94, 4096, 64, 4),),
    "deepseek-v3": (_DEEPSEEK_V3,),
    "deepseek-v3-nextn": (_DEEPSEEK_V3, draft_of(_DEEPSEEK_V3) or {}),
    "deepseek-v3-eagle3": (_DEEPSEEK_V3, _llama(1, 7168, 56, 8)),
    "deepseek-v3.2": ({**_DEEPSEEK_V3, "index_head_dim": 128},),
    "qwen3-next-80b-a3b": (_QWEN3_NEXT,),
    "nemotron-h-8b": (
        {
            **_llama(52, 4096, 32, 8), "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        },
    ),
}  # fmt: skip
"""Shapes of well-known models, the target first, then drafts; dtypes are bfloat16 unless told otherwise."""
