"""Models of random weights of families that SGLang runs on a CPU, as transformers has them: tiny ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

__all__ = ["MAKERS"]

_ATTENTION: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.15,
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}
_WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 80}
_STATES = {"layer_types": ["linear_attention", "full_attention"] * 2}
_DELTAS = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", _ATTENTION | _WINDOWS | {"query_pre_attn_scalar": 32}),
    "laguna": (
        "Laguna",
        _ATTENTION | _WINDOWS | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen35": ("Qwen3_5", _ATTENTION | _STATES | _DELTAS | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}),
    "granite": (
        "GraniteMoeHybrid",
        _ATTENTION | _STATES | _MAMBA2 | {
            "shared_intermediate_size": 384, "num_local_experts": 0, "num_experts_per_tok": 0,
            "position_embedding_type": "rope", "attention_multiplier": 32**-0.5,
        },
    ),
    "falcon-h1": ("FalconH1", _ATTENTION | _MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 256}),
    "falcon-mamba": (
        "FalconMamba",
        {
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "state_size": 16, "time_step_rank": 8,
            "initializer_range": 0.15,
        },
    ),
}  # fmt: skip
"""By name: what transformers calls the family, and sizes. Norms of Mamba 2 go by groups in SGLang and not in
transformers, so there is one group."""


def _maker(name: str) -> Callable[[Path, dict[str, Any]], None]:
    family, sizes = _MODELS[name]

    def make(path: Path, shared: dict[str, Any]) -> None:
        one = f"{family}TextConfig" if hasattr(transformers, f"{family}TextConfig") else f"{family}Config"
        config = getattr(transformers, one)(**sizes, **shared)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(path)

    return make


MAKERS = {name: _maker(name) for name in _MODELS}
"""By name: what makes the folder of a model, given the sizes that all models share."""
