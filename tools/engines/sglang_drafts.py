"""HiCache's own pools of the host with a draft, over `kvproto_sglang.tiers`: `ENGINE/python -m tools.engines.sglang_drafts`.

An SGLang that drafts does not run on a CPU, so its pools are made here, and its calls to a storage back end are made in
its order. Rows go from a pool of a device through the host to storage, and back into other slots of other pools.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvproto_engines.memory import ShareableMemory
from kvproto_sglang.conn import ONES
from kvproto_sglang.tiers import storage
from kvproto_sglang.tiers.keys import KEYS
from tools.engines.sglang_engine import told
from tools.engines.sglang_kernels import supply

PAGE, PAGES, HEADS, DIM, LAYERS = 16, 8, 2, 8, 3
TOKENS = list(range(100, 100 + 4 * PAGE + 1))
KINDS = {"packed behind the target": "packed", "in a pool of its own": "sidecar"}
LAYOUTS = ("layer_first", "page_first_direct")


class Side:
    """An SGLang's pools of a target and its draft, on a device and on the host, and their back end."""

    def __init__(self, kind: str, layout: str, place: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.devices = [self._device(LAYERS), self._device(1)]
        for pool in self.devices:
            for tensor in (*pool.k_buffer, *pool.v_buffer):
                tensor.normal_()
        if kind == "packed":
            self.hosts = [self._host(layout, *self.devices)]
        else:
            self.hosts = [self._host(layout, pool) for pool in self.devices]
        config = {"interface_v1": 1, "storage": str(place), "weights": "of this test"}
        self.tiers: Any = storage.KvprotoTiers(SimpleNamespace(extra_config=config), {})
        self.tiers.register_mem_pool_host(self.hosts[0])
        for name, host in zip(("kv", "draft"), self.hosts, strict=False):
            self.tiers.register_mem_host_pool_v2(host, name)
        self.tiers.on_host_pools_registered()

    @staticmethod
    def _device(layers: int) -> Any:
        return MHATokenToKVPool(
            size=(PAGES - 1) * PAGE, page_size=PAGE, dtype=torch.float32, head_num=HEADS, head_dim=DIM,
            layer_num=layers, device="cpu", enable_memory_saver=False,
        )  # fmt: skip

    @staticmethod
    def _host(layout: str, pool: Any, *drafts: Any) -> Any:
        infos = [each.get_device_pool_infos()[0].buffer_info for each in (pool, *drafts)]
        return MHATokenToKVPoolHost(
            infos[0], 2.0, 0, PAGE, layout, device_capacity_tokens=PAGES * PAGE, start_layer=0,
            end_layer=pool.layer_num, draft_buffer_infos=infos[1:],
        )  # fmt: skip

    def save(self, keys: list[str], pages: list[int], slots: list[int]) -> list[bool]:
        """From pages of the device to slots of the host, and on to storage, as HiCache does: side pools first."""
        for host in self.hosts:
            host.backup_from_device_all_layer(None, _tokens(slots), _tokens(pages), "direct")
        self.tiers.batch_set_v2(self._transfers(keys, slots))
        kept: list[bool] = self.tiers.batch_set_v1(keys, _tokens(slots))
        return kept

    def load(self, keys: list[str], pages: list[int], slots: list[int]) -> tuple[int, int]:
        """Back, as far as target and draft have come; how many there were said to be, and how many came."""
        there = self.tiers.batch_exists_v2(keys, self._transfers(keys, slots)).kv_hit_pages
        came = [self.tiers.batch_get_v1(keys, _tokens(slots))]
        came += self.tiers.batch_get_v2(self._transfers(keys, slots)).values()
        count = min((each.index(False) if False in each else len(each)) for each in came)
        for host in self.hosts:
            for layer in range(host.layer_num if count else 0):
                given = None, _tokens(slots[:count]), _tokens(pages[:count]), layer, "direct"
                host.load_to_device_per_layer(*given, is_draft=layer >= host.target_layer_num)
        return there, count

    def _transfers(self, keys: list[str], slots: list[int]) -> list[Any]:
        return [PoolTransfer(PoolName.DRAFT, _tokens(slots), keys=keys)] if len(self.hosts) > 1 else []

    def rows(self, pages: list[int]) -> list[Any]:
        """Rows of these pages on the device, of target and draft."""
        return [each[_tokens(pages)] for pool in self.devices for each in (*pool.k_buffer, *pool.v_buffer)]


def _tokens(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def _keys() -> list[str]:
    """Of the prompt, as HiCache asks for them where a draft looks ahead."""
    found = KEYS.of(TOKENS, len(TOKENS) - 1, None, True, PAGE)
    assert isinstance(found, list)
    return found


def tried(kind: str, place: Path) -> Iterator[str]:
    """A draft's rows come back with those of its target, and neither without the other."""
    one = Side(kind, LAYOUTS[0], place, 1)
    if one.save(_keys(), [2, 5, 1, 3], [7, 0, 4, 9]) != [True] * 4:
        yield "not all pages were kept"
    wanted = one.rows([2, 5, 1, 3])
    one.tiers.close()
    two = Side(kind, LAYOUTS[1], place, 2)
    if (found := two.load(_keys(), [6, 4, 3, 2], [1, 8, 2, 5])) != (4, 4):
        yield f"{found} pages, not 4"
    if not all(map(torch.equal, wanted, two.rows([6, 4, 3, 2]))):
        yield "rows differ"
    third = _keys()[2]
    two.tiers.close()
    draft = max(int(each.name.split(".")[2]) for each in (place / "o").rglob("*.*"))
    for each in (place / "o").rglob(f"{third}.*.{draft}.*"):
        each.write_bytes(bytes(each.stat().st_size))
    three = Side(kind, LAYOUTS[0], place, 3)
    if (count := three.load(_keys(), [6, 4, 3, 2], [1, 8, 2, 5])[1]) != 2:
        yield f"{count} pages, not the 2 before the one whose draft is damaged"
    three.tiers.close()


def main() -> int:
    """Print each case and whether it went well; the exit status."""
    supply()

    def shared(allocator: Any, dims: Any, dtype: Any, device: str) -> Any:
        with ShareableMemory():
            return torch.zeros(tuple(dims), dtype=dtype, device=device)

    model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, hf_text_config=SimpleNamespace(rope_theta=10000.0))
    served = {"model_path": "target", "revision": None, "quantization": None, "load_format": "auto"}
    draft = {"path": "draft", "revision": None, "quantization": None}
    served |= {f"speculative_draft_model_{name}": value for name, value in draft.items()}
    sizes = dict.fromkeys((*ONES, "attn_dcp_size", "attn_tp_size"), 1) | {"attn_tp_rank": 0}
    common.HostTensorAllocator.allocate = shared
    module: Any = storage
    module.get_server_args = lambda: SimpleNamespace(**served)
    module.get_parallel = lambda: SimpleNamespace(**sizes)
    module.ModelConfig = SimpleNamespace(from_server_args=lambda server, **more: model)
    wrong = 0
    for title, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            wrong += told(f"a draft {title} is in the object of its target", list(tried(kind, Path(folder))))
    print(f"{wrong} differ", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
