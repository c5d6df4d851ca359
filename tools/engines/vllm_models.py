"""Models of random weights for vLLM: tiny ones, and one of the size of SmolLM2-135M."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.engines.sglang_models import MAKERS

_HEADS = {"llama": (4, 2), "llama of others": (4, 2), "window": (4, 2), "llama4": (4, 4), "llama6": (6, 6)}
"""Of models like Llama: heads, and heads of K and V."""

_DUMMIES = {"small": (576, 1536, 9, 49152), "thin": (96, 64, 3, 512)}
"""Of models whose weights are dummies: as large as SmolLM2-135M, and one that computes little with caches as large."""

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "torch_dtype": "bfloat16", "first_k_dense_replace": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
_LINEAR = {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 128, "num_heads": 4, "short_conv_kernel_size": 4}
_CONFIGS: dict[str, dict[str, Any]] = {
    "kimi": {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "linear_attn_config": _LINEAR,
        "q_lora_rank": None, "mla_use_nope": True,
    },
    "sparse": {
        "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048,
        "index_head_dim": 128, "index_n_heads": 4, "n_group": 1, "topk_group": 1, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    },
}  # fmt: skip
"""Of models that are loaded with dummy weights: Kimi's delta attention beside MLA, MLA with an index."""


def make(folder: Path, name: str) -> Path:
    """The folder of a model, made where it is not there yet; weights are spread so that greedy tokens vary."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

    path = folder / name
    if not (path / "tokenizer.json").exists():
        _tokenizer().save_pretrained(path)
    if (path / "config.json").exists():
        return path
    torch.manual_seed(int(name.endswith("others")))
    shared: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    if name in _CONFIGS:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(shared | _SIZES | _CONFIGS[name]))
        return path
    if name in _DUMMIES:
        hidden, intermediate, heads, vocabulary = _DUMMIES[name]
        LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=30, num_attention_heads=heads,
            num_key_value_heads=3, head_dim=64, architectures=["LlamaForCausalLM"], **shared | {"vocab_size": vocabulary},
        ).save_pretrained(path)  # fmt: skip
        return path
    if name == "eagle":
        _eagle(path, shared)
        return path
    if name in _HYBRIDS:
        _HYBRIDS[name](path, shared)
        return path
    if name in _HEADS:
        heads, kv_heads = _HEADS[name]
        layers = ["full_attention", "sliding_attention"] * 2
        windows: dict[str, Any] = {"layer_types": layers, "sliding_window": 80} if name == "window" else {}
        if heads % 4:
            shared["vocab_size"] = 576  # vLLM divides it by the ranks, in whole 64s
        llama = LlamaConfig(
            hidden_size=32 * heads, intermediate_size=384, num_hidden_layers=4, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=32, tie_word_embeddings=False, initializer_range=0.15, **shared, **windows,
        )  # fmt: skip
        LlamaForCausalLM(llama).save_pretrained(path)
        return path
    latent = DeepseekV3Config(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=3, q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, initializer_range=0.1, **shared,
    )  # fmt: skip
    if name == "mtp":
        _predicting(path, latent)
        return path
    latent.first_k_dense_replace = 2
    DeepseekV3ForCausalLM(latent).save_pretrained(path)
    return path


def _predicting(path: Path, latent: Any) -> None:
    """A model with a layer more that predicts the token after the next, as DeepSeek-V3 stores it beside the others."""
    import torch
    from safetensors.torch import save_file
    from transformers import DeepseekV3ForCausalLM

    size, layers, latent.num_hidden_layers = latent.hidden_size, latent.num_hidden_layers, latent.num_hidden_layers + 1
    weights = {n: w.contiguous() for n, w in DeepseekV3ForCausalLM(latent).state_dict().items()}
    latent.num_hidden_layers, latent.num_nextn_predict_layers = layers, 1
    latent.architectures = ["DeepseekV3ForCausalLM"]
    latent.save_pretrained(path)
    own = {
        "enorm.weight": torch.ones(size), "hnorm.weight": torch.ones(size), "shared_head.norm.weight": torch.ones(size),
        "eh_proj.weight": torch.cat([torch.randn(size, size) * 0.1, torch.eye(size)], 1),
        "shared_head.head.weight": weights["lm_head.weight"].clone(),
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }  # fmt: skip
    save_file(weights | {f"model.layers.{layers}.{n}": w for n, w in own.items()}, path / "model.safetensors")


def _eagle(path: Path, shared: dict[str, Any]) -> None:
    """A draft of "llama" as EAGLE has them: a layer, and what makes its input of a token and the target's last state."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, initializer_range=0.15, architectures=["LlamaForCausalLM"], **shared,
    )  # fmt: skip
    config.save_pretrained(path)
    weights = {n: w.contiguous() for n, w in LlamaModel(config).state_dict().items() if n.startswith("layers.")}
    del weights["layers.0.input_layernorm.weight"]  # the first layer has none
    save_file(weights | {"fc.weight": torch.randn(128, 256) * 0.15}, path / "model.safetensors")


def _states(path: Path, shared: dict[str, Any]) -> None:
    """Two layers of Mamba 2 and two of attention, as Granite 4 has them, without experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        hidden_size=128, shared_intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=0, num_experts_per_tok=0,
        mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=64,
        position_embedding_type="rope", attention_multiplier=32**-0.5, initializer_range=0.15, **shared,
    )  # fmt: skip
    GraniteMoeHybridForCausalLM(config).save_pretrained(path)


def _deltas(path: Path, shared: dict[str, Any]) -> None:
    """Two layers of a gated delta net and two of attention, as Qwen3-Next has them; of heads of 48 vLLM keeps K and V in
    an order that strides describe on each machine, and of 32 in tiles where it has AMX.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=48, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
        layer_types=["linear_attention", "full_attention"] * 2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, initializer_range=0.15, **shared,
    )  # fmt: skip
    Qwen3NextForCausalLM(config).save_pretrained(path)


def _convolutions(path: Path, shared: dict[str, Any]) -> None:
    """Two layers of short convolutions and two of attention, as LFM2 has them."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    of: Any = Lfm2Config  # vLLM reads names that transformers renames
    config = of(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention"] * 2, initializer_range=0.15, conv_bias=False, conv_dim=128, conv_dim_out=128,
        block_dim=128, block_ff_dim=384, block_multiple_of=64, block_ffn_dim_multiplier=1,
        block_auto_adjust_ff_dim=False, block_norm_eps=1e-5, **shared,
    )  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(path)


def _selective(path: Path, shared: dict[str, Any]) -> None:
    """Two layers of Mamba 1 and two of attention, as Jamba has them, without experts."""
    from transformers import JambaConfig, JambaForCausalLM

    config = JambaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1, mamba_d_state=16, mamba_dt_rank=8,
        initializer_range=0.15, **shared,
    )  # fmt: skip
    JambaForCausalLM(config).save_pretrained(path)


def _chunks(path: Path, shared: dict[str, Any]) -> None:
    """Layers that attend to their own chunk of 64 tokens beside full ones, as Llama 4 has them, without experts."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        hidden_size=128, intermediate_size=384, intermediate_size_mlp=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, attention_chunk_size=64, no_rope_layers=[1, 0] * 2, moe_layers=[], interleave_moe_layer_step=0,
        layer_types=["chunked_attention", "full_attention"] * 2, initializer_range=0.15, **shared,
    )  # fmt: skip
    Llama4ForCausalLM(config).save_pretrained(path)


_HYBRIDS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "states": _states, "deltas": _deltas, "convolutions": _convolutions, "selective": _selective, "chunks": _chunks, **MAKERS,
}  # fmt: skip
"""Models with layers of other kinds beside those of attention to all tokens."""


def _tokenizer() -> Any:
    """A token for each byte, and names for the rest of the ids."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    named = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    named += [f"({i})" for i in range(len(named), 512)]
    made = Tokenizer(BPE({token: i for i, token in enumerate(named)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
