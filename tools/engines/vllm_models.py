"""Models of random weights for vLLM: tiny ones, and one of the size of SmolLM2-135M."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvproto_reference.adapters import draw_adapter
from tools.engines.sglang_models import MAKERS

_HEADS = {
    "llama": (4, 2),
    "llama of others": (4, 2),
    "window": (4, 2),
    "llama4": (4, 4),
    "llama6": (6, 6),
    "one head": (4, 1),
}
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
    "v4": {
        "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "hidden_size": 256,
        "intermediate_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 512,
        "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 64, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 512,
        "layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2][:4],
        "mlp_layer_types": ["moe"] * 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "scoring_func": "softmax", "num_nextn_predict_layers": 0, "hc_mult": 4, "sliding_window": 128,
    },
    "sparse": {
        "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048,
        "index_head_dim": 128, "index_n_heads": 4, "n_group": 1, "topk_group": 1, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    },
}  # fmt: skip
"""Of models that transformers does not write: DeepSeek V4, whose weights are made here; and of two that are loaded with
dummy weights, Kimi's delta attention beside MLA, and MLA with an index.
"""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process makes models in the folder meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_adapter(model: Path, name: str) -> Path:
    """The folder of a LoRA adapter of a model, made where it is not there yet; other names give other weights."""
    path = model.with_name(f"{model.name}, adapter {name}")
    with _alone(model.parent):
        return path if path.is_dir() else draw_adapter(path, model, sum(name.encode()))


def make(folder: Path, name: str) -> Path:
    """The folder of a model, made where it is not there yet; weights are spread so that greedy tokens vary."""
    with _alone(folder):
        return _made(folder, name)


def _made(folder: Path, name: str) -> Path:
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
        config = shared | _SIZES | _CONFIGS[name]
        (path / "config.json").write_text(json.dumps(config))
        if name == "v4":
            _compressing(path, config)
        return path
    if name in _DUMMIES:
        hidden, intermediate, heads, vocabulary = _DUMMIES[name]
        LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=30, num_attention_heads=heads,
            num_key_value_heads=3, head_dim=64, architectures=["LlamaForCausalLM"], **shared | {"vocab_size": vocabulary},
        ).save_pretrained(path)  # fmt: skip
        return path
    if name in _HEADS_OF_DRAFTS:
        _HEADS_OF_DRAFTS[name](path, shared)
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


def _compressing(path: Path, config: dict[str, Any]) -> None:
    """Weights of DeepSeek V4 by the names of its own checkpoint, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    hidden, heads, head, rank = (config[n] for n in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank"))
    index, groups, middle = (config[n] for n in ("index_head_dim", "o_groups", "o_lora_rank"))
    streams, inner, experts = (config[n] for n in ("hc_mult", "intermediate_size", "n_routed_experts"))
    made: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 0.15) -> None:
        norm = name.endswith("norm.weight")
        made[name] = torch.ones(shape, dtype=dtype) if norm else (torch.randn(shape) * spread).to(dtype)

    def mixed(name: str, rows: int, scales: int) -> None:
        for part, shape in (("fn", (rows, streams * hidden)), ("base", (rows,)), ("scale", (scales,))):
            add(f"{name}_{part}", *shape, dtype=torch.float32)

    def compressor(name: str, dim: int, ratio: int) -> None:
        width = dim * (2 if ratio == 4 else 1)
        for part in ("wkv", "wgate"):
            add(f"{name}.{part}.weight", width, hidden)
        add(f"{name}.norm.weight", dim)
        add(f"{name}.ape", ratio, width, dtype=torch.float32)

    for name in ("embed", "head"):
        add(f"{name}.weight", config["vocab_size"], hidden, spread=1.0)
    add("norm.weight", hidden)
    mixed("hc_head", streams, 1)
    for layer, kind in enumerate(config["layer_types"]):
        at = f"layers.{layer}"
        for part in ("attn", "ffn"):
            mixed(f"{at}.hc_{part}", (2 + streams) * streams, 3)
            add(f"{at}.{part}_norm.weight", hidden)
        add(f"{at}.attn.attn_sink", heads, dtype=torch.float32)
        for part, shape in {
            "wq_a": (rank, hidden), "wkv": (head, hidden), "q_norm": (rank,), "kv_norm": (head,),
            "wq_b": (heads * head, rank), "wo_a": (groups * middle, heads * head // groups),
            "wo_b": (hidden, groups * middle),
        }.items():  # fmt: skip
            add(f"{at}.attn.{part}.weight", *shape)
        if kind == "compressed_sparse_attention":
            add(f"{at}.attn.indexer.wq_b.weight", config["index_n_heads"] * index, rank)
            add(f"{at}.attn.indexer.weights_proj.weight", config["index_n_heads"], hidden)
            compressor(f"{at}.attn.indexer.compressor", index, 4)
        if kind != "sliding_attention":
            compressor(f"{at}.attn.compressor", head, 4 if kind == "compressed_sparse_attention" else 128)
        add(f"{at}.ffn.gate.weight", experts, hidden)
        for place in ("shared_experts", *(f"experts.{n}" for n in range(experts))):
            for part, size in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                add(f"{at}.ffn.{place}.{part}.weight", *size)
    save_file(made, path / "model.safetensors")


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


def _eagle3(path: Path, shared: dict[str, Any]) -> None:
    """A draft of "llama" as EAGLE-3 has them: a layer that reads a token beside hidden states of three of the target's
    layers, with 4 KV heads where the target has 2.
    """
    import torch
    from safetensors.torch import save_file

    hidden, inner, made = 128, 384, dict[str, torch.Tensor]()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": hidden, "hidden_act": "silu",
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 32, "rms_norm_eps": 1e-6, "draft_vocab_size": shared["vocab_size"], "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shared | config))
    projections = {f"self_attn.{n}_proj": (hidden, 2 * hidden) for n in "qkv"} | {"self_attn.o_proj": (hidden, hidden)}
    projections |= {f"mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")} | {"mlp.down_proj": (hidden, inner)}
    made |= {f"midlayer.{n}.weight": torch.randn(shape) * 0.15 for n, shape in projections.items()}
    made |= {
        f"midlayer.{n}.weight": torch.ones(hidden)
        for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    made |= {"fc.weight": torch.randn(hidden, 3 * hidden) * 0.15, "norm.weight": torch.ones(hidden)}
    save_file(made | {"lm_head.weight": torch.randn(shared["vocab_size"], hidden) * 0.15}, path / "model.safetensors")


_HEADS_OF_DRAFTS: dict[str, Callable[[Path, dict[str, Any]], None]] = {"eagle": _eagle, "eagle3": _eagle3}
"""Drafts that read hidden states of the model "llama"."""


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


_SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.15,
}  # fmt: skip
_TURNS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 80}
_MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 64,
}  # fmt: skip
_OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma4": ("Gemma4Text", {
        **_TURNS, "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }, {}),
    "gemma3n": ("Gemma3nText", {
        **_TURNS, "head_dim": 32, "intermediate_size": [384] * 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32, "laurel_rank": 16, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
    }, {}),
    "gpt-oss": ("GptOss", {**_TURNS, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "nemotron": ("NemotronH", {
        "head_dim": 32, "hybrid_override_pattern": "M*M*", "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16,
        "n_groups": 2, "chunk_size": 64,
    }, {}),
    "falcon": ("FalconH1", {"head_dim": 32, **_MAMBA}, {}),
    "hrm": ("HrmText", {"num_hidden_layers": 2, "head_dim": 32}, {}),
    "mimo": ("MiMoV2Flash", {
        "head_dim": 48, "v_head_dim": 32, "swa_head_dim": 48, "swa_v_head_dim": 32, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "sliding_window": 80, "n_group": 1, "topk_group": 1,
    }, {
        "hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-5,
        "sliding_window_size": 80, "rope_theta": 10000.0, "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334,
        "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "attention_value_scale": None,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None,
    }),
}  # fmt: skip
"""By name: the class of transformers, the sizes that differ from _SMALL, and fields by which vLLM reads the published file."""


def _written(name: str, path: Path, shared: dict[str, Any]) -> None:
    """A model as transformers writes it; tied embeddings are small, so that not each token is followed by itself."""
    import torch
    import transformers

    kind, sizes, published = _OF_TRANSFORMERS[name]
    config = getattr(transformers, f"{kind}Config")(**shared | {"pad_token_id": 0} | _SMALL | sizes)
    model = getattr(transformers, f"{kind.removesuffix('Text') if 'Gemma' in kind else kind}ForCausalLM")(config)
    if config.tie_word_embeddings:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.05)
    model.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | published))


_HYBRIDS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "states": _states, "deltas": _deltas, "convolutions": _convolutions, "selective": _selective, "chunks": _chunks,
    **{name: partial(_written, name) for name in _OF_TRANSFORMERS},
    **MAKERS,
}  # fmt: skip
"""Models with layers of other kinds beside those of attention to all tokens, or of other sizes."""


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
