"""SGLang's own KV pool in the conformance suite: `ENGINE/python -m tools.engines.sglang_suite`, as `make engines` does.

Rows are written by the pool's `set_kv_buffer` and read from what it gives to attention; kvproto_sglang states the pool.
"""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import torch

from kvproto_engines.memory import ShareableMemory
from kvproto_sglang.engine import Engine, Layout, open_pool
from kvproto_sglang.settings import Settings
from tools.engines import suite

from engine_cache import ITEMS, Bytes, EngineCache, Ints, Key  # isort: skip

PAGE, HEADS, DIM, LAYERS = 16, 2, 8, 2


class SglangCache(EngineCache):
    """World gqa in float32, in SGLang's MHATokenToKVPool."""

    def __init__(self, world: str, heads_first: bool) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        if world != "gqa":
            raise NotImplementedError(f"world {world}: kvproto_sglang states one kind of cache at a time")
        with ShareableMemory():
            self._kv: Any = MHATokenToKVPool(
                size=(ITEMS - 1) * PAGE, page_size=PAGE, dtype=torch.float32, head_num=HEADS, head_dim=DIM,
                layer_num=LAYERS, device="cpu", enable_memory_saver=False,
            )  # fmt: skip
        model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, num_hidden_layers=LAYERS, hf_text_config=None)
        buffers = SimpleNamespace(output_ids=torch.zeros(1, 16, dtype=torch.int32))
        server = SimpleNamespace(model_path="", load_format="auto")
        engine = Engine(pools=(self._kv,), models=(model,), server=server, buffers=buffers)
        opened = open_pool(engine, Layout(), Settings(facts={}), "token")
        super().__init__(opened.pool.geometry, opened.pool)

    def put(self, key: Key, table: list[int], rows: Ints, data: Bytes) -> None:
        slots, (_, layer, part) = suite.slots(table, rows, PAGE), key
        both = {"k": self._kv.get_key_buffer(layer)[slots], "v": self._kv.get_value_buffer(layer)[slots]}
        both[part] = torch.from_numpy(data.copy()).view(torch.float32)
        self._kv.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, both["k"], both["v"])

    def get(self, key: Key, table: list[int], rows: Ints) -> Bytes:
        _, layer, part = key
        held = self._kv.get_key_buffer(layer) if part == "k" else self._kv.get_value_buffer(layer)
        found: Bytes = held[suite.slots(table, rows, PAGE)].view(torch.uint8).numpy()
        return found


if __name__ == "__main__":
    release = f"sglang {importlib.metadata.version('sglang')}"
    sys.exit(suite.main(sys.argv[1:], "tools.engines.sglang_suite", release, SglangCache))
