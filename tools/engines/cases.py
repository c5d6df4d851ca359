"""Cases of `make engines`: models by their architecture, parallel sizes and layouts, and expected refusals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvproto.planning.layout import Parallel
from kvproto_catalog.config import layer_kinds, number, text
from kvproto_catalog.engines import pools
from kvproto_catalog.models import Setup
from tools.specgen.registry import ROOT

CONFIGS = ROOT / "examples/configs"
BLOCKS = 8
Case = dict[str, Any]
Sizes = Mapping[str, Any]

ARCHITECTURES: dict[str, tuple[str, Case]] = {
    # a model with experts comes first: vLLM makes its groups of processes for it
    "mixtral-8x7b": ("MixtralForCausalLM", {}),
    "llama-3.1-8b": ("LlamaForCausalLM", {}),
    "llama-3.3-70b": ("LlamaForCausalLM", {}),
    "llama-4-scout": ("Llama4ForCausalLM", {}),
    "mistral-7b-v0.1": ("MistralForCausalLM", {}),
    "qwen2.5-7b": ("Qwen2ForCausalLM", {}),
    "qwen3-8b": ("Qwen3ForCausalLM", {}),
    "qwen3-235b-a22b": ("Qwen3MoeForCausalLM", {}),
    "qwen3-next-80b-a3b": ("Qwen3NextForCausalLM", {}),
    "gemma-2-9b": ("Gemma2ForCausalLM", {}),
    "gemma-3-27b": ("Gemma3ForCausalLM", {}),
    "gemma-3n-e4b": (
        "Gemma3nForCausalLM",
        # on the CPU, as its construction reads numbers from tensors: so small wherever caches do not depend on it
        {"device": "cpu", "hidden_size": 64, "intermediate_size": [64] * 35, "laurel_rank": 4, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 128},
    ),
    "gpt-oss-20b": ("GptOssForCausalLM", {}),
    "gpt-oss-120b": ("GptOssForCausalLM", {}),
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", {"q_lora_rank": None, "moe_intermediate_size": 64}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {}),
    "glm-4.5": ("Glm4MoeForCausalLM", {}),
    "kimi-k2": ("DeepseekV3ForCausalLM", {"model_type": "deepseek_v3"}),
    "minimax-m2": ("MiniMaxM2ForCausalLM", {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}),
    "jamba-1.5-mini": ("JambaForCausalLM", {}),
    "falcon-h1-7b": ("FalconH1ForCausalLM", {}),
    "nemotron-h-8b": ("NemotronHForCausalLM", {}),
    "granite-4.0-h-small": ("GraniteMoeHybridForCausalLM", {}),
    "phi-3-mini-4k": ("Phi3ForCausalLM", {}),
    "phi-4": ("Phi3ForCausalLM", {}),
    "command-r": ("CohereForCausalLM", {}),
    "command-r7b": ("Cohere2ForCausalLM", {}),
    "olmo-2-7b": ("Olmo2ForCausalLM", {}),
    "olmo-2-32b": ("Olmo2ForCausalLM", {}),
    "olmo-3-7b": ("Olmo3ForCausalLM", {}),
    "falcon-mamba-7b": ("FalconMambaForCausalLM", {}),
    "mamba-codestral-7b": ("Mamba2ForCausalLM", {"intermediate_size": 8192}),
    "hunyuan-a13b": ("HunYuanMoEV1ForCausalLM", {}),
    "ernie-4.5-21b-a3b": ("Ernie4_5_MoeForCausalLM", {}),
    "step3": ("Step3TextForCausalLM", {"moe_layers_enum": "4,5", "share_q_dim": 2048, "num_attention_groups": 1}),
    "lfm2-1.2b": ("Lfm2ForCausalLM", {"conv_dim": 2048, "block_dim": 2048, "block_norm_eps": 1e-5, "block_ff_dim": 64, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1, "block_auto_adjust_ff_dim": False, "conv_dim_out": 2048, "conv_bias": False, "conv_use_xavier_init": True}),
    "mimo-7b": ("MiMoForCausalLM", {"model_type": "qwen2"}),
    "seed-oss-36b": ("SeedOssForCausalLM", {}),
}  # fmt: skip
"""Of each config.json: the class of vLLM that loads it, and what more that class wants to be told."""

LISTED = (
    "deepseek-v3.2",
    "kimi-linear-48b-a3b",
    "bamba-9b",
    "minimax-text-01",
    "deepseek-v3+draft-eagle3-deepseek-v3",
    "qwen3-8b+draft-dflash-qwen3-8b",
)
"""Models whose classes do not build without a GPU, or are not in the release, and drafts: their layers are listed."""

REFUSED = ("deepseek-v4-flash", "gemma-4-31b", "glm-5.2", "hunyuan-large", "minimax-m3")
"""Files that `describe --engine` refuses, as it is not known how engines arrange such pools."""


def config(name: str) -> Case:
    """A config.json of the examples."""
    found: Case = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


def setup(case: Case, model: Case) -> Setup:
    """Arguments of `describe` by which its blocks are those of the CPU platform and its layout that of the case."""
    if "layers" in case and case["padded"]:
        return Setup(Parallel(tp=case["tp"]), layout=case["layout"])
    backend = "CPU_MLA" if model.get("kv_lora_rank") and not model.get("index_head_dim") else None
    return Setup(Parallel(tp=case["tp"]), page=case["page"], backend=backend, layout=case["layout"])


def vllm_cases(sizes: Iterable[tuple[int, str]]) -> list[Case]:
    """Each model by tensor-parallel sizes and layouts, rank 0 of them."""
    made = []
    for name, (architecture, more) in ARCHITECTURES.items():
        model = text(config(name))
        own = {k: v for k, v in model.items() if not k.startswith("_") and k != "text_config"}
        page = 16 if model.get("kv_lora_rank") else 128
        more = dict(more)
        device = more.pop("device", "meta")
        for tp, layout in sizes:
            case: Case = {
                "id": f"{name}, tp {tp}, {layout}",
                "model": name,
                "config": own,
                "architecture": architecture,
            }
            case |= {"more": more, "device": device, "tp": tp, "page": page, "layout": layout, "blocks": BLOCKS}
            made.append(case)
    return made + [_listed(name, tp, layout) for name in LISTED for tp, layout in sizes if layout.startswith("L")]


def _listed(name: str, tp: int, layout: str) -> Case:
    """Layers as the numbers of config.json give them, and as vLLM names its classes and calculators."""
    target, *drafts = name.split("+")
    layers, page = [], 16
    for prefix, model in (("model", target), *(("draft", draft) for draft in drafts)):
        sizes = text(config(model))
        for i, kind in enumerate(layer_kinds(sizes, number(sizes, "num_hidden_layers"))):
            layers += _layer(f"{prefix}.layers.{i}", kind, sizes, tp)
            if kind == "attention" and sizes.get("kv_lora_rank") and sizes.get("index_head_dim"):
                page = 64
    states, padded = any("shape" in kind for _, kind, _ in layers), None
    if states:  # the platform makes a block as long as a state; ours is, and the rest is compared
        side = pools("vllm", config(target), (), Setup(Parallel(tp=tp), layout=layout))
        page = next(group.rows for group in side.geometry.groups if group.name == "target")
        padded = int(side.memory(0, 1).columns[0].item_stride[0])
    return {
        "id": f"{name}, tp {tp}, {layout}",
        "model": target,
        "drafts": drafts,
        "config": text(config("llama-3.1-8b")),
        "architecture": "LlamaForCausalLM",
        "layers": layers,
        "tp": tp,
        "page": page,
        "padded": padded,
        "layout": layout,
        "blocks": BLOCKS,
    }


def _layer(name: str, kind: str, sizes: Sizes, tp: int) -> list[list[Any]]:
    """A layer's caches: the name of each, its class or calculator in vLLM, and the arguments of that."""
    if kind == "attention" and sizes.get("kv_lora_rank"):
        head = sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"]
        latent = [f"{name}.attn", "MLAAttentionSpec", {"num_kv_heads": 1, "head_size": head}]
        if not sizes.get("index_head_dim"):
            return [latent]
        arguments = {"num_kv_heads": 1, "head_size": 132, "dtypes": ["uint8"]}
        return [latent, [f"{name}.indexer", "MLAAttentionSpec", arguments]]
    if kind == "attention":
        dim = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
        arguments = {"num_kv_heads": max(1, sizes["num_key_value_heads"] // tp), "head_size": dim}
        return [[f"{name}.attn", "FullAttentionSpec", arguments]]
    if kind == "kda":
        linear = sizes["linear_attn_config"]
        arguments = {
            "tp_world_size": tp,
            "num_heads": linear["num_heads"],
            "head_dim": linear["head_dim"],
            "conv_kernel_size": 4,
            "dtypes": ["bfloat16", "float32"],
        }
        return [[f"{name}.kda", "kda_state_shape", arguments]]
    if kind == "lightning":
        arguments = {"tp_size": tp, "num_heads": sizes["num_attention_heads"], "head_dim": sizes["head_dim"]}
        return [[f"{name}.linear", "linear_attention_state_shape", arguments]]
    arguments = {
        "tp_world_size": tp,
        "intermediate_size": sizes["mamba_expand"] * sizes["hidden_size"],
        "n_groups": sizes["mamba_n_groups"],
        "num_heads": sizes["mamba_n_heads"],
        "head_dim": sizes["mamba_d_head"],
        "state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "dtypes": ["bfloat16", "bfloat16"],
    }
    return [[f"{name}.mamba", "mamba2_state_shape", arguments]]


def sglang_cases() -> list[Case]:
    """The pools of each model on a rank, in pages of 1, 16 and 64."""
    made = []
    for path in sorted(CONFIGS.glob("*.json")):
        name, c = path.stem, text(json.loads(path.read_text()))
        if name in REFUSED:
            continue
        for tp, page, layout in ((1, 64, "NHD"), (2, 16, "HND"), (2, 1, "NHD")):
            kinds = [k for ks in layer_kinds(c, number(c, "num_hidden_layers")) for k in ks.split("+")]
            head = {
                "id": f"{name}, tp {tp}, page {page}, {layout}",
                "model": name,
                "tp": tp,
                "page": page,
                "layout": layout,
            }
            if c.get("index_head_dim"):
                page = head["page"] = 64
            for kind in ("attention", "window", "chunked"):
                if kind in kinds:
                    made.append(head | {"kind": kind, **_pages(c, kinds.count(kind), tp, page)})
            layers = [
                i
                for i, k in enumerate(layer_kinds(c, number(c, "num_hidden_layers")))
                if {*k.split("+")} & {"mamba", "linear", "kda"}
            ]
            if layers:
                made.append(head | {"kind": "states", "slots": BLOCKS, "layers": layers, **_states(c, tp)})
    return [case | {"id": f"{case['id']}, {case['kind']}"} for case in made]


def _pages(c: Sizes, layers: int, tp: int, page: int) -> Case:
    """The pool class of SGLang's model runner, and its arguments."""
    common = {"size": (BLOCKS - 1) * page, "page_size": page, "layer_num": layers}
    if c.get("kv_lora_rank"):
        sizes = {"kv_lora_rank": c["kv_lora_rank"], "qk_rope_head_dim": c["qk_rope_head_dim"]}
        index = (
            {"index_head_dim": c["index_head_dim"], "kv_cache_dim": sum(sizes.values())}
            if c.get("index_head_dim")
            else {}
        )
        return {"pool": "dsa" if index else "mla", "dtype": "bfloat16", "numbers": common | sizes | index}
    heads = c.get("num_key_value_heads") or c.get("num_attention_groups") or c["num_attention_heads"]
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return {"pool": "mha", "dtype": "bfloat16", "numbers": common | {"head_num": max(1, heads // tp), "head_dim": dim}}


def _states(c: Sizes, tp: int) -> Case:
    """The shape class of SGLang's configs, and its arguments."""
    if c.get("linear_attn_config"):
        sizes = c["linear_attn_config"]
        return {
            "pool": "kda",
            "numbers": {
                "tp_world_size": tp,
                "num_heads": sizes["num_heads"],
                "head_dim": sizes["head_dim"],
                "conv_kernel_size": sizes["short_conv_kernel_size"],
            },
        }
    if c.get("linear_num_key_heads"):
        values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        return {
            "pool": "mamba2",
            "numbers": {
                "tp_world_size": tp,
                "intermediate_size": values,
                "n_groups": c["linear_num_key_heads"],
                "num_heads": c["linear_num_value_heads"],
                "head_dim": c["linear_value_head_dim"],
                "state_size": c["linear_key_head_dim"],
                "conv_kernel": c["linear_conv_kernel_dim"],
            },
        }
    heads = c.get("mamba_num_heads") or c.get("mamba_n_heads") or c.get("num_heads")
    conv = c.get("conv_kernel") or c["mamba_d_conv"]
    state = c.get("ssm_state_size") or c.get("mamba_d_state") or c["state_size"]
    if not heads:
        channels = c["mamba_expand"] * c["hidden_size"] if "mamba_expand" in c else c["intermediate_size"]
        return {
            "pool": "mamba1",
            "numbers": {"tp_world_size": tp, "intermediate_size": channels, "state_size": state, "conv_kernel": conv},
        }
    dim = c.get("mamba_head_dim") or c.get("mamba_d_head") or c["head_dim"]
    groups = c.get("n_groups") or c["mamba_n_groups"]
    return {
        "pool": "mamba2",
        "numbers": {
            "tp_world_size": tp,
            "intermediate_size": heads * dim,
            "n_groups": groups,
            "num_heads": heads,
            "head_dim": dim,
            "state_size": state,
            "conv_kernel": conv,
        },
    }
