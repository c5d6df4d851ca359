"""Caches of a model's layers, according to its Hugging Face config.json; there are many ways to state them."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvproto.errors import U32, bad
from kvproto_catalog.types import CLASSES, TYPES, ModelClass

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
    "gemma4_text": {"global_head_dim": 512},
}  # fmt: skip
"""By model type: defaults of its configuration class for fields that a config.json may leave out."""
HYBRID = ("mamba_", "linear_num_", "conv_L_cache")
"""Prefixes of fields that only hybrid models have."""
UNREAD = (
    "_block_types", "block_configs", "block_types", "cross_attention_layers", "hybrid_layer_ids",
    "index_source_layer_ids", "kv_source_layer_ids", "layer_group_size", "n_mamba_heads",
)  # fmt: skip
"""Fields that give some layers another cache, or none, in a way that is not supported here."""
_LISTED = ("layer_group_size",)
"""Fields of these that `layer_types` says in another way, as transformers saves Ling."""
CODED = {"mimo_v2_flash": "swa_num_key_value_heads"}
"""Model types whose code gives some layers other sizes, unless this field of the model card says them.

The code of transformers is known: it has `layer_types`, and windows with twice the heads."""
ABOUT_CACHES = re.compile(
    r"^(?!audio_|image_|mm_|moe_|mtp_|video_|vision_)(.*_)?(attn_types?|attention_types?|block_types?|cache|channels|chunk|cla"
    r"|compress(ed|ion|or)?|conv|cross|cycles?|delta|dim_head|global|heads?|hybrid|(?<!token_)index(er)?|kda|kv|latent"
    r"|layer_types|lightning|linear|local|loops?|mamba|multi_query|per_layer|recurrent|shared_layers|sparse|ssm|states?|swa"
    r"|window)(_|$)"
)
"""Names of fields on which a cache may depend, and which therefore have to be read, or be among `BESIDE`."""
BESIDE = frozenset((
    "L_bp_cycles", "L_cycles", "_sliding_window_pattern", "add_swa_attention_sink_bias", "hybrid_block_size",
    "sliding_window_size", "swa_num_attention_heads", "attention_chunk_size", "attn_type_list",
    "cache_implementation", "chunk_size", "cla_share_factor", "compress_rope_theta", "conv_L_cache", "conv_bias",
    "conv_dim_out", "conv_use_xavier_init", "decoder_sparse_step", "full_attn_idxs", "global_attn_every_n_layers",
    "global_rope_theta", "head_dim", "hidden_size_per_layer_input", "index_block_size", "index_local_blocks",
    "index_n_heads", "index_share_for_mtp_iteration", "index_topk", "index_topk_blocks", "indexer_rope_interleave",
    "linear_allow_neg_eigval", "linear_attn_alpha_factor",
    "kda_safe_gate", "linear_attn_beta_factor", "local_rope_theta",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_dt_rank", "mamba_expand", "mamba_hidden_act",
    "mamba_inner_layernorms", "mamba_norm_before_gate", "mamba_proj_bias", "mamba_rms_norm", "mamba_ssm_cache_dtype",
    "mamba_ssm_dtype", "mamba_use_mlp", "max_window_layers", "mlp_layer_types", "n_recurrent_layers",
    "num_attention_heads", "num_attention_heads_per_layer", "num_key_value_heads", "num_local_experts",
    "output_hidden_states", "prefix_dense_sliding_window_pattern", "qk_head_dim", "qk_nope_head_dim",
    "qk_rope_head_dim", "rope_local_base_freq", "sliding_window", "sliding_window_pattern", "use_cache",
    "use_conv_bias", "use_mamba_kernels", "use_sliding_window", "v_head_dim", "vocab_size_per_layer_input",
))  # fmt: skip
"""Such names that say nothing of caches, or, where they are not read, say what another field has said."""
MOST_LAYERS = 1 << 12
"""Several times as many as any model has."""
_BY_HAND = "absent: which layers of this model have which cache is not known, state them by kvproto.Cache", "present"
_LETTERS = {"*": "attention", "M": "mamba", "-": "none", "E": "none"}
_KINDS = {
    "attention": "attention", "full_attention": "attention", "sliding_attention": "window",
    "chunked_attention": "chunked", "mamba": "mamba", "mamba2": "mamba", "linear_attention": "linear", "conv": "conv",
    "mlp": "none", "moe": "none", "minimax_m3_sparse": "attention", "compressed_sparse_attention": "window",
    "heavily_compressed_attention": "window",
}  # fmt: skip
_INDEXED = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
"""Model types whose "indexed_attention" is a latent and plain index keys; others pool theirs, or have K and V."""
_CHOOSING = ("minimax_m3_vl_text",)
"""Model types with K and V, and index keys in the layers of `layer_types` that say so."""
_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of a compressed row, by the kind of layer of DeepSeek V4, unless `compress_rates` has others."""


_PER_LAYER: tuple[tuple[tuple[str, ...], tuple[object, ...] | None], ...] = (
    (("layer_types",), None),
    (("attn_type_list",), (0, 1)),
    (("hybrid_layer_pattern",), (0, 1)),
    (("no_rope_layers",), (0, 1)),
    (("indexer_types",), ("full", "shared")),
    (("index_topk_pattern",), ("F", "S", "full", "shared")),
    (("sparse_attention_config", "sparse_attention_freq"), (0, 1)),
    (("sparse_attention_config", "sparse_disable_index_value"), (0, 1)),
)
"""Lists with an element for each layer, and the values that are known; None: those of the kinds of layers."""


def _check_lists(config: Config, count: int) -> None:
    """Raise LocalError(OUT_OF_RANGE) for a list of another length than the layers, or with other values."""
    stated = dict(config)  # what is checked has not been read
    for path, known in _PER_LAYER:
        *outer, name = path
        held = (stated.get(outer[0]) or {}) if outer else stated
        if (listed := held.get(name)) is None or (name == "no_rope_layers" and not listed):
            continue
        at = ".".join(("config", *path))
        if not isinstance(listed, str | list | tuple) or len(listed) != count:
            yours = f"{len(listed)} of them" if isinstance(listed, str | list | tuple) else repr(listed)
            raise bad(at, f"a list of {count}, as many as num_hidden_layers", yours)
        for value in listed if known else ():
            if not any(value == word and type(value) is type(word) for word in known or ()):
                raise bad(at, f"of each layer one of {', '.join(map(str, known or ()))}", repr(value))


def check_layers(count: int) -> None:
    """Raise LocalError(OUT_OF_RANGE) for more layers than any model has, before they are listed."""
    if count > MOST_LAYERS:
        raise bad("config.num_hidden_layers", f"at most {MOST_LAYERS}", count)


def layer_kinds(config: Config, count: int) -> list[str]:
    """The kind of each layer: attention, window, chunked, mamba, linear, kda, lightning, conv, none, or two with a "+".

    A layer that reads the cache of another one counts as none, and one that is passed several times is there for each
    pass (KVP-GEO-W-LAYERS). Raises LocalError(OUT_OF_RANGE) for a config that does not say the kind of each of the
    `count` layers.
    """
    check_layers(count)
    listed = config.get("layer_types")
    if unread := [name for name in UNREAD if config.get(name) and not (listed and name in _LISTED)]:
        raise bad(f"config.{unread[0]}", *_BY_HAND)
    coded = CODED.get(str(config.get("model_type")))
    if coded and not config.get(coded) and not listed:
        raise bad("config.model_type", "one whose fields say what its caches are", config["model_type"])
    _check_lists(config, count)
    kinds = _stated_kinds(config, count)
    if len(kinds) != count:
        raise bad("config.num_hidden_layers", f"{len(kinds)}, as many as the layers that are listed", count)
    if config.get("_both"):
        kinds = [f"{kind}+{config['_both']}" for kind in kinds]
    return _passed(config, _shared(config, kinds, count))


def own_sizes(config: Config, kinds: Sequence[str]) -> dict[int, Config]:
    """The sizes in which single layers differ from the model's, by layer; `kinds` are those of `layer_kinds`.

    transformers states them by layer, and model cards by kind of layer. Raises LocalError(OUT_OF_RANGE).
    """
    sizes: dict[int, Config] = {}
    if (coded := CODED.get(str(config.get("model_type")))) and not config.get(coded):
        twice = {"num_key_value_heads": 2 * number(config, "num_key_value_heads")}
        sizes |= {i: twice for i, kind in enumerate(kinds) if kind == "window"}
    for kind, names in _OF_KIND.items() if {*_OF_KIND} <= {*kinds} else ():
        found = {field: number(config, name) for field, name in names.items() if config.get(name) is not None}
        if config.get("attention_k_eq_v") is False:
            found.pop("num_key_value_heads", None)
        if found:
            sizes |= {i: found for i, each in enumerate(kinds) if each == kind}
    if "per_layer_config" in config and config.get("model_type") in _FULL_AT_LAST and not config["per_layer_config"]:
        return {}  # its class overrides sizes only if a file lacks the field
    if (stated := config.get("per_layer_config")) is not None:  # in place of what a model card says
        return {_layer(name, len(kinds)): _own(name, fields) for name, fields in stated.items()}
    return sizes


_OF_KIND: dict[str, Config] = {
    "attention": {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
    "window": {"head_dim": "swa_head_dim", "num_key_value_heads": "swa_num_key_value_heads",
               "v_head_dim": "swa_v_head_dim"},
}  # fmt: skip
"""By kind of layer: the fields of a model card that state its sizes, of Gemma 4 and of MiMo-V2."""
_OWN_SIZES = ("head_dim", "kv_lora_rank", "num_key_value_heads", "qk_rope_head_dim", "v_head_dim")
_OF_QUERIES = ("num_attention_heads", "qk_nope_head_dim")
"""Fields of single layers that say nothing of caches."""


def _layer(name: object, count: int) -> int:
    if not str(name).isdecimal() or int(str(name)) >= count:
        raise bad("config.per_layer_config", f"layers of {count}", repr(name))
    return int(str(name))


def _own(layer: str, fields: object) -> Config:
    path = f"config.per_layer_config[{layer}]"
    if not isinstance(fields, dict):
        raise bad(path, "an object", repr(fields))
    if unknown := fields.keys() - {*_OWN_SIZES, *_OF_QUERIES}:
        raise bad(path, f"{', '.join(_OWN_SIZES)}: state other caches by kvproto.Cache", min(unknown))
    return {name: number(fields, name) for name in _OWN_SIZES if name in fields}


def _passed(config: Config, kinds: list[str]) -> list[str]:
    """The kinds in the order in which a token passes the layers, those of a loop once for each pass."""
    if config.get("H_cycles") and not config.get("num_layers_per_stack"):  # HRM, of which this is one stack
        return kinds * _turns("H_cycles", kinds, number(config, "H_cycles") * (number(config, "L_cycles") + 1))
    if not config.get("n_recurrent_loops"):
        return kinds
    turns = _turns("n_recurrent_loops", kinds, number(config, "n_recurrent_loops"))
    first, last = number(config, "n_input_layers"), number(config, "n_output_layers")
    looped = kinds[first:-last]
    if not looped:
        raise bad("config.n_output_layers", f"less than the {len(kinds) - first} layers behind the first ones", last)
    unwritten = ["none"] * len(looped) if config.get("recurrent_kv_cache_mode") == "last_loop" else looped
    return [*kinds[:first], *unwritten * (turns - 1), *looped, *kinds[-last:]]


def _turns(name: str, kinds: Sequence[str], turns: int) -> int:
    """The passes of a loop; raises LocalError(OUT_OF_RANGE) if they are more layers than any model has."""
    if len(kinds) * turns > MOST_LAYERS:
        wanted = f"at most {MOST_LAYERS} layers, each counted once for each pass"
        raise bad(f"config.{name}", wanted, len(kinds) * turns)
    return turns


def compress_ratios(config: Config, count: int) -> list[int] | None:
    """The tokens behind a compressed row of each layer of DeepSeek V4, 0 without any; None for other models."""
    listed, types = config.get("compress_ratios"), config.get("layer_types") or ()
    rates = _RATES | (config.get("compress_rates") or {})
    if odd := [kind for kind in rates if rates[kind] not in _RATES.values()]:
        raise bad(f"config.compress_rates.{odd[0]}", "4 or 128", repr(rates[odd[0]]))
    saved = [rates.get(kind, 0) for kind in types] if {*types} & _RATES.keys() or listed else None
    if listed is None and saved is None:
        if config.get("model_type") == "deepseek_v4":
            raise bad("config.compress_ratios", "a list", "absent")
        return None
    if listed is None:
        listed = saved or []
    if len(listed) < count or not all(ratio in (0, *_RATES.values()) for ratio in listed):
        raise bad("config.compress_ratios", f"0, 4 or 128 for each of {count} layers", repr(listed))
    if types and saved != list(listed[:count]):
        raise bad("config.layer_types", "the kinds of layers that compress_ratios has", "others")
    return list(listed[:count])


def index_layers(config: Config, layers: Iterable[int]) -> list[int]:
    """Layers with index keys; the others take the choice of the one before (KVP-GEO-W-SHARED)."""
    if not config.get("kv_lora_rank"):
        return _choosing_layers(config, layers)
    if not config.get("index_head_dim"):
        if half := [name for name in _OF_INDEX if config.get(name)]:
            raise bad("config.index_head_dim", f"a number, as {half[0]} is there", "absent")
        return []
    kinds = config.get("layer_types") or ()
    if "indexed_attention" in kinds:
        layers = [i for i in layers if kinds[i] == "indexed_attention"]
    every = number(config, "index_topk_freq") if config.get("index_topk_freq") else 1
    first = number(config, "index_skip_topk_offset") if config.get("index_skip_topk_offset") else 2
    counted = [i for i in layers if max(i - first + 1, 0) % every == 0]
    for name in ("indexer_types", "index_topk_pattern"):
        if stated := config.get(name):
            listed = [i for i in layers if stated[i] not in ("shared", "S")]
            if config.get("index_topk_freq") and listed != counted:
                raise bad(f"config.{name}", "the layers that index_topk_freq and index_skip_topk_offset have", "others")
            return listed
    if config.get("cli_factor"):
        return [i for i in layers if i % number(config, "cli_factor") == 0]
    return counted


_OF_INDEX = ("index_n_heads", "index_topk", "indexer_types", "index_topk_pattern", "index_topk_freq", "cli_factor")
"""Fields that only a latent with index keys beside it has."""


def _choosing_layers(config: Config, layers: Iterable[int]) -> list[int]:
    """The layers of MiniMax-M3, which has K and V, that have index keys; none of other models."""
    kinds = config.get("layer_types") or ()
    saved = [i for i in layers if "minimax_m3_sparse" in kinds[i : i + 1]]
    if config.get("model_type") in _CHOOSING and kinds:
        config.get("index_head_dim")  # of the layers that choose, if one does
    if not (sparse := config.get("sparse_attention_config")):
        return saved
    freq = sparse.get("sparse_attention_freq")
    if freq is None and not saved and sparse.get("use_sparse_attention") is not False:
        raise bad("config.sparse_attention_config.sparse_attention_freq", "a list of 0 and 1", "absent")
    chosen = saved if freq is None else [i for i in layers if freq[i]]
    if chosen and sparse.get("use_sparse_attention") is False:
        raise bad("config.sparse_attention_config.use_sparse_attention", "true, as layers are sparse", "false")
    values = sparse.get("sparse_disable_index_value")
    if values and any(not flag for i, flag in enumerate(values) if i in chosen):
        wanted = "1 in each sparse layer, as the others keep values beside index keys: state them by kvproto.Cache"
        raise bad("config.sparse_attention_config.sparse_disable_index_value", wanted, repr(values)[:80])
    if kinds and chosen != saved:
        raise bad("config.layer_types", "minimax_m3_sparse where sparse_attention_freq is 1", "another list")
    return chosen


def _shared(config: Config, kinds: list[str], count: int) -> list[str]:
    """The kinds, with none for layers that read another's cache: the last ones, or all but the first of each few."""
    if config.get("num_kv_shared_layers"):
        last = number(config, "num_kv_shared_layers")
        if last == count:
            wanted = (
                f"below num_hidden_layers {count}: this model reads another's cache and has none, leave the model out"
            )
            raise bad("config.num_kv_shared_layers", wanted, last)
        if last > count:
            raise bad("config.num_kv_shared_layers", f"below num_hidden_layers {count}", last)
        kinds = [*kinds[:-last], *["none"] * last]
    if config.get("use_cla"):
        share = number(config, "cla_share_factor")
        kinds = [kind if i % share == 0 else "none" for i, kind in enumerate(kinds)]
    return kinds


def _stated_kinds(config: Config, count: int) -> list[str]:
    """The kind of each layer, by the first field that says it; raises LocalError if another list says otherwise."""
    statements = [*_listed(config, count)]
    for name, kinds in statements[1:]:
        if kinds != statements[0][1]:
            raise bad(f"config.{name}", f"the kinds of layers that {statements[0][0]} has", "others")
    return statements[0][1] if statements else _implied_kinds(config, count)


def _listed(config: Config, count: int) -> Iterator[tuple[str, list[str]]]:
    """The fields that list layers, each with the kind of each layer."""
    field, layers = config.get, range(count)
    if "swa_num_key_value_heads" in config and (windows := field("hybrid_layer_pattern")):
        yield "hybrid_layer_pattern", ["window" if window else "attention" for window in windows]
    if letters := field("hybrid_override_pattern"):
        yield (
            "hybrid_override_pattern",
            [_named(letter, _LETTERS, "hybrid_override_pattern") for letter in letters],
        )
    for name in ("layers_block_type", "layer_types"):
        if not (listed := field(name)):
            continue
        like = {
            "linear": any(map(field, _DELTA)),
            "kda": field("linear_attn_config") or field("linear_num_heads"),
            "mamba": any(map(field, STATE_SIZE)),
        }
        linear = next((kind for kind, stated in like.items() if stated), "lightning")
        indexed = {"indexed_attention": "attention"} if field("model_type") in _INDEXED else {}
        kinds = [_named(kind, _KINDS | indexed, name) for kind in listed]
        yield name, [linear if kind == "linear" else kind for kind in kinds]
    for key, rest in _INDICES.items():
        if indices := field(key):
            if beyond := [i for i in indices if i not in layers]:
                raise bad(f"config.{key}", f"layers of {count}", beyond[0])
            yield key, ["attention" if i in indices else rest for i in layers]
    if delta := field("linear_attn_config"):  # counts layers from 1
        kda, full = delta.get("kda_layers"), delta.get("full_attn_layers")
        for name, ids in (("kda_layers", kda), ("full_attn_layers", full)):
            optional = ids is None and name == "full_attn_layers" and field("layer_types")
            if not optional and not _is_list(lambda layer: _is_whole(layer, 1, count))(ids):
                raise bad(f"config.linear_attn_config.{name}", f"a list of layers, 1 to {count}", repr(ids)[:80])
        if full is not None and sorted([*kda, *full]) != [*range(1, count + 1)]:
            wanted = "each layer that is not in kda_layers, and no other"
            raise bad("config.linear_attn_config.full_attn_layers", wanted, repr(full)[:80])
        yield "linear_attn_config.kda_layers", ["kda" if i + 1 in kda else "attention" for i in layers]
    if types := field("attn_type_list"):
        yield "attn_type_list", ["attention" if kind == 1 else "lightning" for kind in types]


def _implied_kinds(config: Config, count: int) -> list[str]:
    """The kind of each layer of a model that lists none, by the first field that implies it."""
    field, layers = config.get, range(count)
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
    if field("attention_chunk_size"):  # in every layer that rotates positions
        period = number(config, "no_rope_layer_interval") if field("no_rope_layer_interval") else count + 1
        rotated = field("no_rope_layers") or [(i + 1) % period for i in layers]
        return ["chunked" if turn else "attention" for turn in rotated]
    if field("sliding_window") and config.get("use_sliding_window", True):
        first = field("max_window_layers") or 0
        return ["window" if i >= first else "attention" for i in layers]
    return [_only_kind(config)] * count


def _only_kind(config: Config) -> str:
    """The kind of all layers of a model that states none: attention, or Mamba."""
    if not config.get("num_attention_heads") and not config.get("kv_lora_rank"):
        if not any(config.get(name) for name in STATE_SIZE):
            raise bad("config.num_attention_heads", "a number, or the sizes of a Mamba", "absent")
        return "mamba"
    beside = sorted(name for name in config if name.startswith(HYBRID) and config[name])
    if beside and not config.get("_both"):
        wanted = f"the kind of each layer, as {beside[0]} gives some of them a state: state them by kvproto.Cache"
        raise bad("config.layer_types", wanted, "absent")
    return "attention"


def draft_of(config: Config) -> Config | None:
    """The multi-token-prediction layers of a checkpoint as a draft of attention layers; None if it has none."""
    config = {**text(config), "text_config": {}} if nested(config) else config
    key = next((key for key in PREDICTING if config.get(key)), None)
    if key is None:
        return None
    of_target = (*PREDICTING, *SAYS_LAYERS, "compress_rates", "model_type")
    kept = {name: value for name, value in config.items() if name not in of_target and not name.startswith(_OF_STATES)}
    count, target = number(config, key), number(config, "num_hidden_layers")
    if (ratios := compress_ratios(config, target)) is not None:  # behind those of the target, or windows alone
        behind = (config.get("compress_ratios") or ratios)[target : target + count]
        kept["compress_ratios"] = [*behind, *[0] * (count - len(behind))]
    return {**kept, "num_hidden_layers": count}


_DELTA = ("linear_num_key_heads", "linear_num_value_heads")
_INDICES = {"attn_layer_indices": "mamba", "full_attn_idxs": "conv"}
_INTERVALS = {"full_attention_interval": "linear", "sliding_window_pattern": "window"}
SAYS_LAYERS = (
    *_INDICES, *_INTERVALS, "hybrid_override_pattern", "layers_block_type", "layer_types", "attn_layer_period",
    "attn_type_list", "hybrid_layer_pattern", "linear_attn_config", "per_layer_config", "num_kv_shared_layers",
    "use_cla", "sparse_attention_config", "attention_chunk_size",
    "no_rope_layers", "indexer_types", "index_topk_pattern", "index_topk_freq",
    "index_skip_topk_offset", "cli_factor", "H_cycles", "n_recurrent_loops",
)  # fmt: skip
"""Fields that say which layer of a target has which cache."""
_OF_STATES = ("conv_", "linear_", "mamba_", "ssm_")
"""Prefixes of the sizes of a target's states, which its draft does not have."""
PREDICTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields that say how many layers of a checkpoint are a draft of it."""
_WHOLE = (
    "attention_chunk_size", "attention_head_dim", "attn_layer_offset", "attn_layer_period", "full_attention_interval",
    "head_dim", "index_head_dim", "kv_lora_rank", "no_rope_layer_interval", "num_attention_heads",
    "num_key_value_heads", "num_kv_shared_layers", "sliding_window", "v_head_dim", "H_cycles", "L_cycles", "cli_factor",
    "index_skip_topk_offset", "index_topk_freq", "max_window_layers", "n_input_layers", "n_output_layers",
    "n_recurrent_loops", "num_layers_per_stack", *_DELTA, *PREDICTING, *STATE_SIZE,
)  # fmt: skip
GEOMETRY = frozenset((
    "H_cycles", "L_cycles", "_block_types", "attention_chunk_size", "attention_head_dim", "attention_k_eq_v",
    "attn_layer_indices", "attn_layer_offset", "attn_layer_period", "attn_type_list", "block_configs", "block_types",
    "cla_share_factor", "cli_factor", "compress_rates", "compress_ratios", "conv_L_cache", "conv_dim", "conv_kernel",
    "cross_attention_layers", "d_conv", "full_attention_interval", "full_attn_idxs", "global_head_dim", "head_dim",
    "hidden_size", "hybrid_layer_ids", "hybrid_layer_pattern", "hybrid_override_pattern", "index_head_dim",
    "index_n_heads", "index_skip_topk_offset", "index_source_layer_ids", "index_topk", "index_topk_freq",
    "index_topk_pattern", "indexer_types", "intermediate_size", "kv_lora_rank", "kv_source_layer_ids",
    "layer_group_size", "layer_types", "layers_block_type", "linear_attn_config", "linear_conv_kernel_dim",
    "linear_head_dim", "linear_key_head_dim", "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_head_dim",
    "mamba_n_groups", "mamba_n_heads", "mamba_num_heads", "max_window_layers", "multi_query", "n_groups",
    "n_input_layers", "n_mamba_heads", "n_output_layers", "n_recurrent_loops", "new_decoder_architecture",
    "no_rope_layer_interval", "no_rope_layers", "num_attention_groups", "num_attention_heads",
    "num_global_key_value_heads", "num_heads", "num_hidden_layers", "num_key_value_heads", "num_kv_heads",
    "num_kv_shared_layers", "num_layers", "num_layers_per_stack", "per_layer_config", "qk_rope_head_dim",
    "recurrent_kv_cache_mode", "short_conv_kernel_size", "sliding_window", "sliding_window_pattern",
    "sparse_attention_config", "ssm_state_size", "state_size", "swa_head_dim", "swa_num_key_value_heads",
    "swa_v_head_dim", "use_cla", "use_sliding_window", "v_head_dim",
))  # fmt: skip
"""Fields on which the caches of some type depend: `CLASSES` says which of them the class of a type has."""
_NAMES = ("layers_block_type", "layer_types", "indexer_types")
_WORDS = ("dtype", "recurrent_kv_cache_mode", "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "model_type", "torch_dtype")


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
    (
        ("attn_type_list", "hybrid_layer_pattern", "no_rope_layers"),
        "a list of 0 and 1",
        _is_list(lambda element: _is_whole(element, 0, 1)),
    ),
    (_NAMES, "a list of names", _is_list(lambda element: isinstance(element, str))),
    (("hybrid_override_pattern", "index_topk_pattern"), "letters", _is(str, list, tuple)),
    (("compress_ratios",), "a list of whole numbers", _is_list(_is_whole)),
    (("sliding_window_pattern",), "a whole number, or letters", lambda value: type(value) is str or _is_whole(value)),
    (
        (
            "compress_rates",
            "linear_attn_config",
            "per_layer_config",
            "quantization_config",
            "sparse_attention_config",
            "text_config",
        ),
        "an object",
        _is(dict),
    ),
)
"""Fields whose absence, 0 or null means something, which a value of a wrong type must not be taken for."""


class Read(dict[str, Any]):
    """A config that knows which of its fields were read."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    @property
    def fields(self) -> frozenset[str]:
        """The names that were read, of fields that are there and of others."""
        return frozenset(self._read)

    def with_sizes(self, sizes: Config) -> "Read":
        """The same config with other sizes, which notes what was read for both."""
        other = Read({**self, **sizes})
        other._read = self._read
        return other

    def check(self) -> None:
        """Raise OUT_OF_RANGE for fields that were not read, unless they are fractions or empty, and so no cache's.

        And for a type that is not known, whose class may give each layer any cache.
        """
        defaults = CLASSES.get(str(self.get("model_type")), ModelClass()).defaults
        unknown = [
            name
            for name, value in self.items()
            if name not in self._read
            and (name not in defaults or defaults[name] != value)
            and name not in BESIDE
            and ABOUT_CACHES.search(name)
            and any(v and not isinstance(v, float) for v in (value if isinstance(value, list) else [value]))
        ]
        if unknown:
            wanted = "fields that are known" if len(unknown) > 1 else "a field that is known"
            wanted += ": state the caches by kvproto.Cache; if none depends on it, leave it out (--ignore)"
            values = ", ".join(f"{name} {self[name]!r}"[:80] for name in unknown)
            raise bad(f"config.{unknown[0]}", wanted, values if len(unknown) > 1 else repr(self[unknown[0]])[:80])
        if self.get("model_type") not in (None, *TYPES):
            wanted = "a type whose caches are known: state them by kvproto.Cache, or have the other fields read alone"
            raise bad("config.model_type", f"{wanted} (--ignore model_type)", self["model_type"])


def _check(config: Config) -> None:
    for names, mine, is_right in _FIELDS:
        for name in names:
            if config.get(name) is not None and not is_right(config[name]):
                raise bad(f"config.{name}", mine, repr(config[name]))


def _named(name: object, kinds: Mapping[str, str], path: str) -> str:
    if str(name) not in kinds:
        raise bad(f"config.{path}", f"{', '.join(kinds)}: state the caches of other layers by kvproto.Cache", name)
    return kinds[str(name)]


def text(config: Config, foreign: Collection[str] = ()) -> Config:
    """The config of a checkpoint's language model with the defaults of its class; raises LocalError(OUT_OF_RANGE).

    Fields that the class lacks are left out, except `foreign` ones.
    """
    merged = _merged(config)
    if merged.get("is_encoder_decoder") or merged.get("decoder_layers"):
        wanted = "a decoder: encoder-decoders are not read, state their caches by Cache.gqa, Cache.cross, Cache.encoder"
        raise bad("config.is_encoder_decoder", wanted, merged.get("model_type", "an encoder-decoder"))
    kind = str(merged.get("model_type"))
    model_class = CLASSES.get(kind, ModelClass())
    unread = {*foreign_fields(config)} - {*foreign}
    stated = {name: value for name, value in merged.items() if name not in unread}
    implied = {**model_class.defaults, **IMPLIED.get(kind, {})}
    if listed := stated.get("layers_block_type"):
        implied["num_hidden_layers"] = len(listed)
    found = _as_its_class_reads(kind, {**implied, **_with_aliases(stated, model_class.aliases)})
    for name in sorted(model_class.derived):
        if found.get(name) is None if name == "layer_types" else name not in stated:
            raise bad(f"config.{name}", f"a value, as the class of {kind} has a default of its own", "absent")
    return _paired(found) if found.get("model_type") == "dory" else found


def _with_aliases(config: Config, aliases: Mapping[str, str]) -> Config:
    """A config with the value of a field under its other name too; raises LocalError if they differ."""
    both = dict(config)
    for alias, name in aliases.items():
        if type(config.get(alias)) is int and both.setdefault(name, config[alias]) != config[alias]:
            raise bad(f"config.{alias}", f"{both[name]}, as {name} says, which it is another name of", config[alias])
    return both


def _as_its_class_reads(kind: str, config: dict[str, Any]) -> Config:
    """A config with the values that the class of its type puts in place of those that are stated."""
    if kind == "longcat_flash" and config.get("num_layers"):  # two latents in each
        layers = 2 * number(config, "num_layers")
        if config.setdefault("num_hidden_layers", layers) != layers:
            raise bad("config.num_hidden_layers", f"{layers}, two for each of num_layers", config["num_hidden_layers"])
    if kind in _FULL_AT_LAST and isinstance(count := config.get("num_hidden_layers"), int):
        check_layers(count)
        kinds = config.get("layer_types") or [
            "full_attention" if i % 6 == 5 else "sliding_attention" for i in range(count)
        ]
        config["layer_types"] = [*kinds[:-1], "full_attention"]
    if config.get("use_bidirectional_attention") in _HALVES.get(kind, ()) and config.get("sliding_window"):
        config["sliding_window"] = number(config, "sliding_window") // 2 + 1
    return config


_FULL_AT_LAST = ("gemma4_text", "gemma4_unified_text")
"""Types whose class makes each sixth layer full, or the last one of those that a file lists."""
_HALVES: dict[str, tuple[object, ...]] = {
    "gemma3_text": (True,),
    "gemma4_text": ("all",),
    "gemma4_unified_text": ("all",),
}
"""By type: values of use_bidirectional_attention that make a window of half the tokens to each side."""


def _merged(config: Config) -> Config:
    """A config with the fields of its language model, whose type it names."""
    if not isinstance(config, Mapping):
        raise bad("config", "an object, as a config.json is", type(config).__name__)
    _check(config)
    inner = config.get("text_config") or {}
    _check({**config, **inner})
    outer = CLASSES.get(str(config.get("model_type")), ModelClass())
    of_text = {"model_type": outer.text} if outer.text else {}
    return {**config, **of_text, **inner} if inner or of_text else config


def foreign_fields(config: Config) -> list[str]:
    """Fields of `GEOMETRY` that a config has and the class of its type lacks; none if no class of it is known."""
    merged, inner = _merged(config), config.get("text_config") or {}
    if (model_class := CLASSES.get(str(merged.get("model_type")))) is None:
        return []
    outer = CLASSES.get(str(config.get("model_type")), ModelClass())
    mine = inner if inner or outer.text else merged
    return [name for name in merged if name in GEOMETRY and (name not in mine or name not in model_class.fields)]


def _paired(config: Config) -> Config:
    """A config that lists attention and MLP as layers of their own, in the form that counts each two as a layer."""
    kinds = config.get("layer_types") or ()
    if "mlp" not in kinds:
        return config
    if {*kinds[1::2]} != {"mlp"} or "mlp" in kinds[::2]:
        raise bad("config.layer_types", "attention and mlp in turn", repr(kinds)[:80])
    halves = {name: number(config, name) // 2 for name in ("num_hidden_layers", "n_input_layers", "n_output_layers")}
    return {**config, **halves, "layer_types": kinds[::2]}


def nested(config: Config) -> bool:
    """Whether an absent size may be a default of the class (head_dim of Gemma 3 is 256) and not follow from others."""
    return isinstance(config.get("text_config"), dict)


def number(config: Config, *names: str) -> int:
    """The first of these fields that is present; raises LocalError(OUT_OF_RANGE) if it is not a size, or none is."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad(f"config.{name}", "a whole number, at least 1", repr(value))
            return value
    raise bad(f"config.{names[0]}", "a number", "absent")
