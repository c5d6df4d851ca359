"""Which layer of a model has which cache, according to its Hugging Face config.json; there are many ways to say it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvproto.errors import U32, bad

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
    kinds = _stated_kinds(config, count)
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


def _stated_kinds(config: Config, count: int) -> list[str]:
    """The kind of each layer, by the first field that says it."""
    field, layers = config.get, range(count)
    if letters := field("hybrid_override_pattern"):
        return [_named(letter, _LETTERS, "hybrid_override_pattern") for letter in letters]
    if listed := field("layers_block_type") or field("layer_types"):
        linear = "linear" if any(map(field, _DELTA)) else "lightning"
        kinds = [_named(kind, _KINDS, "layer_types") for kind in listed]
        return [linear if kind == "linear" else kind for kind in kinds]
    for key, rest in _INDICES.items():
        if indices := field(key):
            if beyond := [i for i in indices if i not in layers]:
                raise bad("config.attn_layer_indices", f"layers of {count}", beyond[0])
            return ["attention" if i in indices else rest for i in layers]
    if field("attn_layer_period"):
        period = number(config, "attn_layer_period")
        offset = number(config, "attn_layer_offset") if field("attn_layer_offset") else 0
        if offset >= period:
            raise bad("config.attn_layer_offset", f"below attn_layer_period {period}", offset)
        return ["attention" if i % period == offset else "mamba" for i in layers]
    for key, rest in _INTERVALS.items():
        if (interval := field(key)) and (rest != "window" or field("sliding_window")):
            if isinstance(interval, str):  # LLLG
                return [_named(interval[i % len(interval)], {"L": rest, "G": "attention"}, key) for i in layers]
            period = number(config, key)
            return ["attention" if i % period == period - 1 else rest for i in layers]
    if delta := field("linear_attn_config"):  # counts layers from 1
        kda = delta.get("kda_layers")
        if not isinstance(kda, list) or not all(_is_whole(layer, 1, count) for layer in kda):
            raise bad("config.linear_attn_config.kda_layers", f"a list of layers, 1 to {count}", repr(kda))
        return ["kda" if i + 1 in kda else "attention" for i in layers]
    if types := field("attn_type_list"):
        return ["attention" if kind == 1 else "lightning" for kind in types]
    if field("attention_chunk_size"):  # in every layer that rotates positions
        period = number(config, "no_rope_layer_interval") if field("no_rope_layer_interval") else count + 1
        rotated = field("no_rope_layers") or [(i + 1) % period for i in layers]
        return ["chunked" if turn else "attention" for turn in rotated]
    if field("sliding_window") and config.get("use_sliding_window", True):
        return ["window"] * count
    return [_only_kind(config)] * count


def _only_kind(config: Config) -> str:
    """The kind of all layers of a model that states none: attention, or Mamba."""
    if not config.get("num_attention_heads") and not config.get("kv_lora_rank"):
        if not any(config.get(name) for name in STATE_SIZE):
            raise bad("config.num_attention_heads", "a number, or the sizes of a Mamba", "absent")
        return "mamba"
    beside = sorted(name for name in config if name.startswith(HYBRID) and config[name])
    if beside and not config.get("_both"):
        raise bad(f"config.{beside[0]}", *_BY_HAND)
    return "attention"


def draft_of(config: Config) -> Config | None:
    """The multi-token-prediction layers of a checkpoint as a draft of attention layers; None if it has none."""
    config = {**text(config), "text_config": {}} if nested(config) else config
    key = next((key for key in PREDICTING if config.get(key)), None)
    if key is None:
        return None
    of_target = (*PREDICTING, *SAYS_LAYERS, "model_type")
    kept = {name: value for name, value in config.items() if name not in of_target and not name.startswith(HYBRID)}
    return {**kept, "num_hidden_layers": number(config, key)}


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


def _is_whole(value: Any, least: int = 0, most: int = U32) -> bool:
    return type(value) is int and least <= value <= most


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _is_list(is_element: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(is_element, value))


_FIELDS: tuple[tuple[Iterable[str], str, Callable[[Any], bool]], ...] = (
    (_WHOLE, f"a whole number, 0 to {U32}", _is_whole),
    (_WORDS, "a name", _is(str)),
    (("use_cla", "use_sliding_window"), "true or false", _is(bool)),
    (_INDICES, "a list of layers", _is_list(_is_whole)),
    (("attn_type_list", "no_rope_layers"), "a list of 0 and 1", _is_list(lambda element: _is_whole(element, 0, 1))),
    (("layers_block_type", "layer_types"), "a list of names", _is_list(lambda element: isinstance(element, str))),
    (("hybrid_override_pattern",), "letters", _is(str, list, tuple)),
    (("sliding_window_pattern",), "a whole number, or letters", lambda value: type(value) is str or _is_whole(value)),
    (("linear_attn_config", "text_config"), "an object", _is(dict)),
)
"""Fields whose absence, 0 or null means something, which a value of a wrong type must not be taken for."""


def _check(config: Config) -> None:
    """Raise LocalError for a field of a wrong type."""
    for names, mine, is_right in _FIELDS:
        for name in names:
            if config.get(name) is not None and not is_right(config[name]):
                raise bad(f"config.{name}", mine, repr(config[name]))


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
