"""The model of benchmarks/vllm_gpu.py: random weights, spread so that greedy tokens vary."""

from __future__ import annotations

import json
from pathlib import Path


def make_model(folder: Path, small: bool) -> Path:
    """A Llama of 8 layers and 8 KV heads of 128, as a folder."""
    import torch
    from safetensors.torch import save_file

    layers, width, heads, kv, dim, inner, words = (
        (4, 128, 4, 2, 32, 256, 512) if small else (8, 1024, 16, 8, 128, 2816, 8192)
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim,
        "vocab_size": words, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)

    def some(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    ones = torch.ones(width, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": some(words, width, scale=1), "lm_head.weight": some(words, width, scale=1)}
    weights["model.norm.weight"] = ones
    for i in range(layers):
        at = f"model.layers.{i}."
        weights |= {
            f"{at}self_attn.q_proj.weight": some(heads * dim, width, scale=1.5 * width**-0.5),
            f"{at}self_attn.k_proj.weight": some(kv * dim, width, scale=1.5 * width**-0.5),
            f"{at}self_attn.v_proj.weight": some(kv * dim, width, scale=2 * width**-0.5),
            f"{at}self_attn.o_proj.weight": some(width, heads * dim, scale=2 * (heads * dim) ** -0.5),
            f"{at}mlp.gate_proj.weight": some(inner, width, scale=width**-0.5),
            f"{at}mlp.up_proj.weight": some(inner, width, scale=width**-0.5),
            f"{at}mlp.down_proj.weight": some(width, inner, scale=inner**-0.5),
            f"{at}input_layernorm.weight": ones.clone(), f"{at}post_attention_layernorm.weight": ones.clone(),
        }  # fmt: skip
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
