"""Tiny random models of each Hugging Face family, made and run by transformers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB = 96
TOKENS = [(7 * i * i + 3 * i) % VOCAB for i in range(40)]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 24}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 6.0, "original_max_position_embeddings": 24}
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
         "num_attention_heads": 6, "max_position_embeddings": 144}  # fmt: skip
GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 10}
MLA = {**SIZES, "num_key_value_heads": 6, "kv_lora_rank": 14, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
       "v_head_dim": 5, "moe_intermediate_size": 12, "n_routed_experts": 8, "first_k_dense_replace": 1}  # fmt: skip
DEEP_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**GQA, "num_key_value_heads": 3, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama-tied": ("Llama", {**GQA, "num_key_value_heads": 6, "head_dim": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**SIZES, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {**GQA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {**GQA, "rope_parameters": YARN}),
    "qwen3-window": ("Qwen3", {**GQA, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-moe": ("Qwen3Moe", {**GQA, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3,
                               "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-step": ("Qwen3Moe", {**GQA, "moe_intermediate_size": 7, "num_experts": 5, "num_experts_per_tok": 2,
                                    "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "deepseek-v2-lite": ("DeepseekV2", {**MLA, "q_lora_rank": None, "topk_method": "greedy", "num_experts_per_tok": 3,
                                        "n_shared_experts": 2, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-3,
                                        "rope_parameters": {**DEEP_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek-v2": ("DeepseekV2", {**MLA, "q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4,
                                   "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1,
                                   "routed_scaling_factor": 3.0,
                                   "rope_parameters": {**DEEP_YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "deepseek-v3": ("DeepseekV3", {**MLA, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
                                   "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
                                   "rope_parameters": {**DEEP_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek-v3-plain": ("DeepseekV3", {**MLA, "q_lora_rank": None, "n_group": 2, "topk_group": 1,
                                         "num_experts_per_tok": 2, "n_shared_experts": 1, "norm_topk_prob": False,
                                         "routed_scaling_factor": 1.5}),
}  # fmt: skip
"""Architecture and config by name; scaled rotary embeddings reach beyond their original length within TOKENS."""


def drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """A random case: sizes, experts and rotary scaling of any family."""
    draw = random.Random(seed)
    kind, sizes = CASES[draw.choice(list(CASES))]
    kv_heads, each = draw.randint(1, 3), draw.randint(1, 3)
    groups = draw.choice([1, 2, 4])
    more: dict[str, Any] = {
        "num_attention_heads": kv_heads * each,
        "num_key_value_heads": kv_heads if "kv_lora_rank" not in sizes else kv_heads * each,
        "hidden_size": kv_heads * each * draw.choice([2, 4, 6, 8]),
        "intermediate_size": draw.randint(3, 40),
        "num_hidden_layers": draw.randint(1, 4),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": 10 ** draw.uniform(-6, -2),
        "head_dim": draw.choice([2, 4, 10]),
        "kv_lora_rank": 2 * draw.randint(2, 10),
        "q_lora_rank": draw.choice([None, 7, 16]),
        "qk_rope_head_dim": draw.choice([4, 8, 12]),
        "qk_nope_head_dim": 2 * draw.randint(1, 4),
        "v_head_dim": draw.randint(1, 9),
        "moe_intermediate_size": draw.randint(3, 16),
        "n_routed_experts": 8,
        "num_experts": draw.randint(4, 7),
        "num_experts_per_tok": draw.randint(1, 2),
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "n_shared_experts": draw.randint(1, 2),
        "routed_scaling_factor": draw.uniform(0.5, 4),
        "first_k_dense_replace": draw.randint(0, 2),
        "decoder_sparse_step": draw.randint(1, 2),
        "rope_parameters": {**draw.choice(ROPES), "rope_theta": 10 ** draw.uniform(2, 6)},
    }
    return kind, {**sizes, **{key: more[key] for key in more if key in sizes or key not in OF_SOME}}


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    LLAMA3,
    YARN,
    {**YARN, "factor": 2.5, "beta_fast": 3, "beta_slow": 0.5, "attention_factor": 0.8},
    {**DEEP_YARN, "mscale": 0.4, "mscale_all_dim": 0.9},
]
OF_SOME = set(MLA) | {"head_dim", "q_lora_rank", "num_experts", "n_group", "topk_group", "n_shared_experts",
                      "routed_scaling_factor", "decoder_sparse_step", "num_experts_per_tok"}  # fmt: skip
"""Keys that only some families have."""


def write(case: str | int, folder: Path, **changes: Any) -> torch.Tensor:
    """Save a model of random weights, in shards, to a folder; its logits [tokens, vocab] of TOKENS.

    The case is one of CASES, or the seed of one that is drawn.
    """
    import transformers

    kind, sizes = CASES[case] if isinstance(case, str) else drawn(case)
    torch.manual_seed(list(CASES).index(case) if isinstance(case, str) else case)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **plain).eval().requires_grad_(False)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        draw = next((d for part, d in DRAWS.items() if part in key), _matrix)
        if "inv_freq" not in key:
            tensor.copy_(draw(tensor))
    model.save_pretrained(folder, max_shard_size="60KB")
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(tensor) * 1.5 * tensor.shape[-1] ** -0.5


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda tensor: 0.5 + torch.rand_like(tensor),
    "bias": lambda tensor: 0.4 * torch.randn_like(tensor),
    "embed": torch.randn_like,
}
