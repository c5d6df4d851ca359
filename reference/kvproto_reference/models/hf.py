"""Hugging Face checkpoints in our terms: which config key becomes which field, and which tensor which weight.

What is not understood is refused, because a model that is nearly right gives fluent wrong answers.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from ..errors import EngineError
from .config import DTYPES, Kind, ModelConfig, MoeConfig, WindowConfig
from .rope import llama3_rates, plain_rates, yarn_gain, yarn_rates

Config = Mapping[str, Any]
Allowed = Mapping[str, tuple[Any, ...]]

SIZES = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
GQA = {**SIZES, "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
MLA = {
    **SIZES,
    "latent": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "nope_dim": "qk_nope_head_dim",
    "v_dim": "v_head_dim",
    "q_rank": "q_lora_rank",
}

OFF = (None, False)
ALLOWED: Allowed = {
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "compression_config": (None,),
    "attention_bias": OFF,
    "mlp_bias": OFF,
    "partial_rotary_factor": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_sinks": OFF,
    "attention_sink_size": (None, 0),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "tie_word_embeddings": (True, False),
}
"""Values that a key may have if it is there; the same for all families."""

DERIVED: Mapping[str, Callable[[Config], Any]] = {
    "num_key_value_heads": lambda config: config["num_attention_heads"],
    "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
}
"""The value of a key that is missing or null."""
NULLABLE = ("q_lora_rank",)
"""Keys for which null has a meaning."""

WEIGHTS = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
    "attn.q_bias": "self_attn.q_proj.bias",
    "attn.k_bias": "self_attn.k_proj.bias",
    "attn.v_bias": "self_attn.v_proj.bias",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "attn.q_a": "self_attn.q_a_proj.weight",
    "attn.q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_norm": "self_attn.kv_a_layernorm.weight",
    "attn.k_up": "self_attn.kv_b_proj.weight",
    "attn.v_up": "self_attn.kv_b_proj.weight",
    "ffn.gate": "mlp.gate_proj.weight",
    "ffn.up": "mlp.up_proj.weight",
    "ffn.down": "mlp.down_proj.weight",
    "ffn.router": "mlp.gate.weight",
    "ffn.correction": "mlp.gate.e_score_correction_bias",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared.up": "mlp.shared_experts.up_proj.weight",
    "ffn.shared.down": "mlp.shared_experts.down_proj.weight",
    "ffn.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.{}.up_proj.weight",
    "ffn.experts.down": "mlp.experts.{}.down_proj.weight",
}
"""Tensors by our names, without the prefix of a layer; `{}` is the number of an expert, which we stack."""
SQUEEZED = {**WEIGHTS, "attn.q": "self_attn.q_b_proj.weight"}
"""The same for models with a low-rank projection of MLA queries."""


@attrs.frozen(kw_only=True)
class Family:
    """One `model_type`."""

    kind: Kind
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    """Fields with one value in all models of the family, which have no config key."""
    windowed: bool = True
    """Whether `sliding_window` counts if `use_sliding_window` is missing."""
    allowed: Allowed = attrs.field(factory=dict)
    derived: Mapping[str, Callable[[Config], Any]] = DERIVED
    moe: Callable[[Config], MoeConfig | None] = lambda config: None


def source(name: str, config: ModelConfig) -> str:
    """The tensor that our weight `name` comes from."""
    tensors = SQUEEZED if config.q_rank else WEIGHTS
    if not name.startswith("layers."):
        return tensors[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{tensors[rest]}"


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether the decoder does not use a tensor: stored RoPE rates, DeepSeek's layers that predict further tokens."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return config.kind == "mla" and name.startswith("model.layers.") and int(name.split(".")[2]) >= config.layers


def translate(config: Config, dtype: str) -> ModelConfig:
    """The model that a config.json describes; `dtype` may be "auto", for the one that the file names.

    Raises EngineError with the key and value of what the engine does not support.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise refused("model_type", config.get("model_type"), tuple(FAMILIES))
    _check_allowed(config, {**ALLOWED, **family.allowed})
    window = _window(config, family.windowed)
    found = {field: _value(config, key, derived=family.derived) for field, key in family.fields.items()}
    rope = _rope(config, family.kind, found["head_dim" if family.kind == "gqa" else "rope_dim"])
    tied = bool(config.get("tie_word_embeddings", False))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32") if dtype == "auto" else dtype
    if dtype not in DTYPES:
        raise refused("dtype", dtype, DTYPES)
    return ModelConfig.from_fields(
        {
            "kind": family.kind,
            **found,
            **family.fixed,
            **rope,
            "tied": tied,
            "moe": family.moe(config),
            "dtype": dtype,
            "window": window,
        }
    )


def eos_ids(config: Config, generation: Config) -> frozenset[int]:
    """Tokens that end a text, from generation_config.json or else config.json: one, several or none."""
    said = generation.get("eos_token_id")
    ids = config.get("eos_token_id") if said is None else said
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def refused(key: str, value: object, allowed: tuple[Any, ...]) -> EngineError:
    """The error for a config that needs what the engine does not support."""
    shown = repr(value) if len(repr(value)) < 120 else repr(value)[:117] + "..."
    return EngineError(f"config.json: {key} is {shown}, supported: {', '.join(map(repr, allowed))}")


def _check_allowed(config: Config, allowed: Allowed) -> None:
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise refused(key, config[key], values)


def _window(config: Config, windowed: bool) -> WindowConfig | None:
    """The sliding window of the layers that `layer_types` names, in families that say whether they use it."""
    kinds = config.get("layer_types")
    known = ("full_attention",) if windowed else ("full_attention", "sliding_attention")
    for kind in kinds or ():
        if kind not in known:
            raise refused("layer_types", kind, known)
    if not kinds and config.get("use_sliding_window", windowed) and config.get("sliding_window") is not None:
        raise refused("sliding_window", config["sliding_window"], (None,))
    layers = [layer for layer, kind in enumerate(kinds or ()) if kind == "sliding_attention"]
    return WindowConfig(layers=layers, tokens=_value(config, "sliding_window")) if layers else None


def _value(config: Config, *keys: str, derived: Mapping[str, Callable[[Config], Any]] = MappingProxyType({})) -> Any:
    """The value of the first of `keys` that is there, or what follows from other keys if none is."""
    for key in keys:
        if config.get(key) is not None or (key in NULLABLE and key in config):
            return config[key]
    for key in keys:
        if key in derived:
            return derived[key](config)
    raise EngineError(f"config.json: {' or '.join(keys)} is missing")


def _rope(config: Config, kind: Kind, dim: int) -> dict[str, Any]:
    """Fields of the rotary embedding; `rope_parameters` is the later name of `rope_scaling` with `rope_theta`."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        raise refused("rope_scaling", old, ("what rope_parameters says",))
    said = dict(new or old or {})
    said.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    name = said.pop("rope_type", None) or said.pop("type", None) or "default"
    said.pop("type", None)
    if name not in ROPES:
        raise refused("rope_type", name, tuple(ROPES))
    if name != "default":
        said.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    rope = ROPES[name]
    for key, value in said.items():
        if key not in (*rope.needed, *rope.optional) and not (key == "partial_rotary_factor" and value in (None, 1)):
            raise refused(f"{name} rope {key}", value, ("no such key",))
    for key in rope.needed:
        if not isinstance(said.get(key), int | float):
            raise EngineError(f"config.json: {name} rope {key} is {said.get(key)!r}, a number is needed")
    theta = float(said["rope_theta"])
    return {"rope_theta": theta, **rope.make(said, kind, dim, theta)}


def _llama3(said: Config, kind: Kind, dim: int, theta: float) -> dict[str, Any]:
    original, factor = said["original_max_position_embeddings"], said["factor"]
    low, high = said["low_freq_factor"], said["high_freq_factor"]
    return {"rope_rates": llama3_rates(plain_rates(dim, theta), original, factor, low, high)}


def _yarn(said: Config, kind: Kind, dim: int, theta: float) -> dict[str, Any]:
    """YaRN with DeepSeek's two weights: `mscale_all_dim` sharpens a whole score, `mscale` what RoPE rotates."""
    factor, original = said["factor"], said["original_max_position_embeddings"]
    fast, slow = said.get("beta_fast") or 32, said.get("beta_slow") or 1
    turned, whole = said.get("mscale") or 0, said.get("mscale_all_dim") or 0
    if bool(turned) != bool(whole):
        # Implementations differ in what a missing one means.
        raise refused("yarn rope mscale and mscale_all_dim", (turned, whole), ("both", "neither"))
    gain = said.get("attention_factor")
    if gain is None:
        gain = yarn_gain(factor, turned) / yarn_gain(factor, whole) if turned else yarn_gain(factor)
    return {
        "rope_rates": yarn_rates(plain_rates(dim, theta), theta, original, factor, fast, slow),
        "rope_gain": gain,
        "score_factor": yarn_gain(factor, whole) ** 2 if whole and kind == "mla" else 1.0,
    }


@attrs.frozen
class Rope:
    """One `rope_type`."""

    make: Callable[[Config, Kind, int, float], dict[str, Any]]
    """Makes our fields from its keys, the kind of model, the rotary width and theta."""
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


STRETCHED = ("rope_theta", "original_max_position_embeddings", "factor")
ROPES: Mapping[str, Rope] = {
    "default": Rope(lambda said, kind, dim, theta: {}, ("rope_theta",)),
    "llama3": Rope(_llama3, (*STRETCHED, "low_freq_factor", "high_freq_factor")),
    "yarn": Rope(_yarn, STRETCHED, ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")),
}


def _qwen3_moe(config: Config) -> MoeConfig:
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    layers = range(_value(config, "num_hidden_layers"))
    return MoeConfig(
        layers=[i for i in layers if i not in dense and (i + 1) % step == 0],
        experts=_value(config, "num_experts", "num_local_experts"),
        top_k=_value(config, "num_experts_per_tok"),
        ffn=_value(config, "moe_intermediate_size"),
        normalize=bool(config.get("norm_topk_prob", False)),
    )


def _deepseek(config: Config, grouped: bool, **fixed: Any) -> MoeConfig | None:
    if config.get("n_routed_experts", 0) is None:
        return None
    ffn = _value(config, "moe_intermediate_size")
    groups = {"groups": "n_group", "top_groups": "topk_group"} if grouped else {}
    return MoeConfig(
        layers=range(_value(config, "first_k_dense_replace"), _value(config, "num_hidden_layers")),
        experts=_value(config, "n_routed_experts", "num_local_experts"),
        top_k=_value(config, "num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * (config.get("n_shared_experts") or 0),
        scale=_value(config, "routed_scaling_factor"),
        **{field: _value(config, key) for field, key in groups.items()},
        **fixed,
    )


def _deepseek_v2(config: Config) -> MoeConfig | None:
    return _deepseek(config, grouped=config.get("topk_method") == "group_limited_greedy")


def _deepseek_v3(config: Config) -> MoeConfig | None:
    normalize = bool(config.get("norm_topk_prob", True))
    return _deepseek(config, grouped=True, scores="sigmoid", group_best=2, correction=True, normalize=normalize)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(kind="gqa", fields=GQA, fixed={"qk_norm": False}),
    "qwen2": Family(kind="gqa", fields=GQA, fixed={"qk_norm": False, "qkv_bias": True}, windowed=False),
    "qwen3": Family(kind="gqa", fields=GQA, fixed={}, windowed=False, derived={}),
    "qwen3_moe": Family(kind="gqa", fields=GQA, fixed={}, windowed=False, moe=_qwen3_moe),
    "deepseek_v2": Family(
        kind="mla",
        fields=MLA,
        fixed={"rope_pairs": True},
        allowed={
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": OFF,  # implementations differ in whether the scale then applies
            "moe_layer_freq": (1,),
        },
        moe=_deepseek_v2,
    ),
    "deepseek_v3": Family(
        kind="mla",
        fields=MLA,
        fixed={"rope_pairs": True},
        allowed={
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
            "rope_interleave": (True,),
        },
        moe=_deepseek_v3,
    ),
}
