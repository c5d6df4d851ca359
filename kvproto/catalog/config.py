"""Which layer of a model has which cache, according to its Hugging Face config.json; there are many ways to say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvproto.errors import U32, bad

__all__ = [
    "HYBRID", "MOST_LAYERS", "PREDICTING", "SAYS_LAYERS", "STATE_SIZE", "Config", "layer_kinds", "nested", "number",
    "text",
]  # fmt: skip

Config = Mapping[str, Any]
STATE_SIZE = ("ssm_state_size", "mamba_d_state", "state_size")
IMPLIED: dict[str, Config] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "sliding_window_pattern": 6, "sliding_window": 4096, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window_pattern": 2},
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
    "falcon_h1": {"_both": "mamba"},
    "qwen3_next": {"full_attention_interval": 4},
    "nemotron_h": {"mamba_ssm_cache_dtype": "float32"},
}  # fmt: skip
"""By model type: defaults of its configuration class for fields that a config.json may leave out."""
HYBRID = ("mamba_", "linear_num_", "conv_L_cache")
"""Prefixes of fields that only hybrid models have."""
UNREAD = (
    "_block_types", "block_configs", "block_types", "compress_ratios", "cross_attention_layers", "global_head_dim",
    "hybrid_layer_ids", "hybrid_layer_pattern", "layer_group_size", "n_mamba_heads",
)  # fmt: skip
"""Fields that give some layers another cache, or none, in a way that is not supported here."""
MOST_LAYERS = 1 << 12
"""Several times as many as any model has."""
_BY_HAND = "absent: which layers of this model have which cache is not known, state them by kvproto.Cache", "present"
_LETTERS = {"*": "attention", "M": "mamba", "-": "none", "E": "none"}
_KINDS = {
    "attention": "attention", "full_attention": "attention", "sliding_attention": "window",
    "chunked_attention": "chunked", "mamba": "mamba", "mamba2": "mamba", "linear_attention": "linear", "conv": "conv",
    "mlp": "none", "moe": "none",
}  # fmt: skip


def layer_kinds(config: Config, count: int) -> list[str]:
    """The kind of each layer: attention, window, chunked, mamba, linear, kda, lightning, conv, none, or two with a "+".

    A layer that reads the cache of another one counts as none. Raises LocalError(OUT_OF_RANGE) for a config that does
    not say the kind of each of the `count` layers.
    """
    if count > MOST_LAYERS:
        raise bad("config.num_hidden_layers", f"at most {MOST_LAYERS}", count)
    if unread := [name for name in UNREAD if config.get(name)]:
        raise bad(f"config.{unread[0]}", *_BY_HAND)
    kinds = next(kinds for read in _WAYS if (kinds := read(config, count)) is not None)
    if len(kinds) != count:
        raise bad("config.num_hidden_layers", f"{len(kinds)}, as many as the layers that are listed", count)
    if config.get("_both"):
        kinds = [f"{kind}+{config['_both']}" for kind in kinds]
    return _shared(config, kinds, count)


def _shared(config: Config, kinds: list[str], count: int) -> list[str]:
    """The kinds, with none for layers that read another's cache: the last ones, or all but the first of each few."""
    if config.get("num_kv_shared_layers"):
        last = number(config, "num_kv_shared_layers")
        if last >= count:
            raise bad("config.num_kv_shared_layers", f"below num_hidden_layers {count}", last)
        kinds = [*kinds[:-last], *["none"] * last]
    if config.get("use_cla"):
        share = number(config, "cla_share_factor")
        kinds = [kind if i % share == 0 else "none" for i, kind in enumerate(kinds)]
    return kinds


def _by_letters(config: Config, count: int) -> list[str] | None:
    letters = config.get("hybrid_override_pattern")
    return [_named(c, _LETTERS, "hybrid_override_pattern") for c in letters] if letters else None


def _by_list(config: Config, count: int) -> list[str] | None:
    listed = config.get("layers_block_type") or config.get("layer_types")
    if not listed:
        return None
    linear = "linear" if any(config.get(name) for name in _DELTA) else "lightning"
    return [linear if kind == "linear" else kind for kind in (_named(k, _KINDS, "layer_types") for k in listed)]


def _by_indices(config: Config, count: int) -> list[str] | None:
    indices, rest = next(((config[key], rest) for key, rest in _INDICES.items() if config.get(key)), (None, ""))
    if indices is None:
        return None
    if beyond := [i for i in indices if i not in range(count)]:
        raise bad("config.attn_layer_indices", f"layers of {count}", beyond[0])
    return ["attention" if i in indices else rest for i in range(count)]


def _by_period(config: Config, count: int) -> list[str] | None:
    if not config.get("attn_layer_period"):
        return None
    period = number(config, "attn_layer_period")
    offset = number(config, "attn_layer_offset") if config.get("attn_layer_offset") else 0
    if offset >= period:
        raise bad("config.attn_layer_offset", f"below attn_layer_period {period}", offset)
    return ["attention" if i % period == offset else "mamba" for i in range(count)]


def _by_interval(config: Config, count: int) -> list[str] | None:
    """Every nth layer is full attention, and the name of the interval says what the others are."""
    for key, rest in _INTERVALS.items():
        if config.get(key) and (rest != "window" or config.get("sliding_window")):
            if isinstance(config[key], str):  # LLLG
                letters = {"L": rest, "G": "attention"}
                return [_named(config[key][i % len(config[key])], letters, key) for i in range(count)]
            period = number(config, key)
            return ["attention" if i % period == period - 1 else rest for i in range(count)]
    return None


def _by_numbers(config: Config, count: int) -> list[str] | None:
    """1 stands for full attention, 0 for lightning attention."""
    types = config.get("attn_type_list")
    return ["attention" if kind == 1 else "lightning" for kind in types] if types else None


def _by_delta(config: Config, count: int) -> list[str] | None:
    """Kimi's delta attention in the layers that are listed, counted from 1."""
    given = config.get("linear_attn_config")
    if not given:
        return None
    layers = given.get("kda_layers")
    if not isinstance(layers, list) or not all(_is_whole(layer, 1, count) for layer in layers):
        raise bad("config.linear_attn_config.kda_layers", f"a list of layers, 1 to {count}", repr(layers))
    return ["kda" if i + 1 in given["kda_layers"] else "attention" for i in range(count)]


def _by_rope(config: Config, count: int) -> list[str] | None:
    """Chunked attention in every layer that rotates positions."""
    if not config.get("attention_chunk_size"):
        return None
    period = number(config, "no_rope_layer_interval") if config.get("no_rope_layer_interval") else count + 1
    rotated = config.get("no_rope_layers") or [(i + 1) % period for i in range(count)]
    return ["chunked" if turn else "attention" for turn in rotated]


def _by_window(config: Config, count: int) -> list[str] | None:
    """All layers have the window if nothing says which do."""
    return ["window"] * count if config.get("sliding_window") and config.get("use_sliding_window", True) else None


def _by_sizes(config: Config, count: int) -> list[str] | None:
    """No list at all: all attention, or all Mamba."""
    if not config.get("num_attention_heads") and not config.get("kv_lora_rank"):
        if not any(config.get(name) for name in STATE_SIZE):
            raise bad("config.num_attention_heads", "a number, or the sizes of a Mamba", "absent")
        return ["mamba"] * count
    beside = sorted(name for name in config if name.startswith(HYBRID) and config[name])
    if beside and not config.get("_both"):
        raise bad(f"config.{beside[0]}", *_BY_HAND)
    return ["attention"] * count


_DELTA = ("linear_num_key_heads", "linear_num_value_heads")
_INDICES = {"attn_layer_indices": "mamba", "full_attn_idxs": "conv"}
_INTERVALS = {"full_attention_interval": "linear", "sliding_window_pattern": "window"}
SAYS_LAYERS = (
    *_INDICES, *_INTERVALS, "hybrid_override_pattern", "layers_block_type", "layer_types", "attn_layer_period",
    "attn_type_list", "linear_attn_config", "num_kv_shared_layers", "use_cla", "attention_chunk_size", "no_rope_layers",
)  # fmt: skip
"""Fields that say which layer of a target has which cache."""
PREDICTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields that say how many layers of a checkpoint are a draft of it."""
_WHOLE = (
    "attention_chunk_size", "attention_head_dim", "attn_layer_offset", "attn_layer_period", "full_attention_interval",
    "head_dim", "index_head_dim", "kv_lora_rank", "no_rope_layer_interval", "num_attention_heads",
    "num_key_value_heads", "num_kv_shared_layers", "sliding_window", "v_head_dim", *_DELTA, *PREDICTING, *STATE_SIZE,
)  # fmt: skip
_WORDS = ("dtype", "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "model_type", "torch_dtype")


@attrs.frozen
class _Said:
    """What a field may hold."""

    mine: str
    types: tuple[type, ...]
    elements: Callable[[Any], bool] = lambda element: True


def _is_whole(value: Any, least: int = 0, most: int = U32) -> bool:
    return type(value) is int and least <= value <= most


_FIELDS: dict[str, _Said] = {
    **dict.fromkeys(_WHOLE, _Said(f"a whole number, 0 to {U32}", (int,))),
    **dict.fromkeys(_WORDS, _Said("a name", (str,))),
    **dict.fromkeys(("use_cla", "use_sliding_window"), _Said("true or false", (bool,))),
    **dict.fromkeys(_INDICES, _Said("a list of layers", (list, tuple), _is_whole)),
    **dict.fromkeys(
        ("attn_type_list", "no_rope_layers"),
        _Said("a list of 0 and 1", (list, tuple), lambda element: _is_whole(element, 0, 1)),
    ),
    **dict.fromkeys(
        ("layers_block_type", "layer_types"),
        _Said("a list of names", (list, tuple), lambda element: isinstance(element, str)),
    ),
    "hybrid_override_pattern": _Said("letters", (str, list, tuple)),
    "sliding_window_pattern": _Said("a whole number, or letters", (int, str)),
    "linear_attn_config": _Said("an object", (dict,)),
    "text_config": _Said("an object", (dict,)),
}
"""Fields whose absence, 0 or null means something, which a value of a wrong type must not be taken for."""


def _check(config: Config) -> None:
    """Raise LocalError for a field of a wrong type."""
    for name, said in _FIELDS.items():
        value = config.get(name)
        if value is None:
            continue
        right = type(value) in said.types and (type(value) is not int or _is_whole(value))
        if not right or (isinstance(value, list | tuple) and not all(map(said.elements, value))):
            raise bad(f"config.{name}", said.mine, repr(value))


_WAYS: tuple[Callable[[Config, int], list[str] | None], ...] = (
    _by_letters, _by_list, _by_indices, _by_period, _by_interval, _by_delta, _by_numbers, _by_rope, _by_window,
    _by_sizes,
)  # fmt: skip
"""The first of these that returns a list decides."""


def _named(name: object, kinds: Mapping[str, str], path: str) -> str:
    if str(name) not in kinds:
        raise bad(f"config.{path}", ", ".join(kinds), name)
    return kinds[str(name)]


def text(config: Config) -> Config:
    """The config of a checkpoint's language model, taken out of a multimodal one, with the defaults of its class.

    Raises LocalError(OUT_OF_RANGE) for a field of a wrong type and for an encoder-decoder.
    """
    if not isinstance(config, Mapping):
        raise bad("config", "an object, as a config.json is", type(config).__name__)
    _check(config)
    inner = config.get("text_config")
    merged = {**config, **inner} if inner else config
    _check(merged)
    if merged.get("is_encoder_decoder") or merged.get("decoder_layers"):
        wanted = "a decoder: encoder-decoders are not read, state their caches by Cache.gqa, Cache.cross, Cache.encoder"
        raise bad("config.is_encoder_decoder", wanted, merged.get("model_type", "an encoder-decoder"))
    implied = IMPLIED.get(str(merged.get("model_type")), {})
    return {**implied, **{name: value for name, value in merged.items() if value is not None or name not in implied}}


def nested(config: Config) -> bool:
    """Whether an absent size may be a default of the class (head_dim of Gemma 3 is 256) and not follow from others."""
    return isinstance(config.get("text_config"), dict)


def number(config: Config, *names: str) -> int:
    """The first of these fields that is present; raises LocalError(OUT_OF_RANGE) if it is not a size, or none is."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad(f"config.{name}", "a whole number, at least 1", value)
            return value
    raise bad(f"config.{names[0]}", "a number", "absent")
