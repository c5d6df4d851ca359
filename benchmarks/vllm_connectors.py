"""Connectors of benchmarks/vllm_handover.py and vllm_gpu.py: ours, vLLM's own, and one that moves nothing; and what a
worker tells of its caches.

`kv_transfer_params` of a request may hold more than a proxy sends:

* "order": n sorts an engine's free blocks (n 0), or scatters them by the seed n;
* "tell": true has the request's blocks come back with its answer, as "blocks";
* "marks": "begin" has the scheduler's process note its times until "stop", and a path has it write them (vllm_marks.py).
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
import vllm_marks

from kvproto_vllm.releases import TransferResults
from tools.engines.vllm_corrupting import CorruptingConnector

__all__ = ["Nixl", "Nothing", "Ours", "Worker"]

POISON = 0xEE
"""The byte that caches hold before what arrives is compared."""
_CACHES: dict[str, torch.Tensor] = {}
"""Of this worker, by layer: [block, head, token, element], or without heads."""


class _Asked:
    """Both sides of any connector: the scheduler's has the pool of blocks, a worker's the caches."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
        self._blocks, self._telling = gpu_block_pool, set[str]()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        _CACHES.update(kv_caches)
        super().register_kv_caches(kv_caches)  # type: ignore[misc]

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        seed, place = params.pop("order", None), params.pop("marks", None)
        if params.pop("tell", False):
            self._telling.add(request.request_id)
        if place is not None:
            {"begin": vllm_marks.begin, "stop": vllm_marks.stop}.get(place, partial(vllm_marks.write, place))()
        if seed is not None:
            queue = self._blocks.free_block_queue
            free = queue.popleft_n(queue.num_free_blocks)
            free.sort(key=lambda block: block.block_id)
            if seed:
                random.Random(seed).shuffle(free)
            queue.append_n(free)
        super().on_new_request(request)  # type: ignore[misc]

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return self._told(request, block_ids, super().request_finished(request, block_ids))  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        answer = super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
        return self._told(request, block_ids[0], answer)

    def _told(self, request: Any, blocks: list[int], answer: tuple[bool, dict[str, Any] | None]) -> Any:
        if request.request_id not in self._telling:
            return answer
        self._telling.remove(request.request_id)
        return answer[0], (answer[1] or {}) | {"blocks": list(blocks)}


class Ours(_Asked, CorruptingConnector):
    """The connector that is measured."""


class Nothing(Ours):
    """Asks for loads as ours does and says that they have arrived, wrongly: what is left is the engines' own time."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._come = {load.request for load in self._bound.loads}

    def wait_for_save(self) -> None:
        """Nothing was saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results, self._come = TransferResults(), getattr(self, "_come", set())
        results.finished_recving, self._come = self._come, set()
        return results

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return False, super().request_finished(request, block_ids)[1]

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        return False, super().request_finished_all_groups(request, block_ids)[1]


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

    class Nixl(_Asked, NixlPullConnector):
        """vLLM's own connector, pull."""
except ImportError:
    pass


class Worker:
    """Calls of vLLM's workers beside their own (`worker_extension_cls`)."""

    def poison(self) -> None:
        """Fill all blocks but the one that stands for none; no request may be under way."""
        for cache in _CACHES.values():
            cache[1:] = torch.full((cache.itemsize,), POISON, dtype=torch.uint8, device=cache.device).view(cache.dtype)

    def digests(self, blocks: list[int]) -> tuple[list[int], bytes]:
        """Sums of all bytes of these blocks, each by a random odd weight of its place: [layer, block, head], i64."""
        sums = [self._sums(cache, blocks) for cache in _CACHES.values()]
        found = torch.stack(sums).cpu()
        return list(found.shape), found.numpy().tobytes()

    def rows(self, blocks: list[int]) -> tuple[list[int], bytes]:
        """Bytes of these blocks, their tokens one after the other: [layer, head, token, byte]."""
        found = []
        for cache in _CACHES.values():
            taken = cache[torch.tensor(blocks, device=cache.device)]
            taken = (taken if taken.dim() == 4 else taken.unsqueeze(1)).transpose(0, 1).contiguous()
            found.append(taken.flatten(1, 2).view(torch.uint8).cpu())
        rows = torch.stack(found)
        return list(rows.shape), rows.numpy().tobytes()

    @staticmethod
    def _sums(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
        taken = cache[torch.tensor(blocks, device=cache.device)].contiguous()
        taken = (taken if taken.dim() == 4 else taken.unsqueeze(1)).view(torch.uint8).flatten(2)
        generator = torch.Generator().manual_seed(11)
        weights = torch.randint(-(1 << 62), 1 << 62, taken.shape[2:], generator=generator).to(cache.device) * 2 + 1
        return torch.cat([(part.long() * weights).sum(-1) for part in taken.split(256)])

    def begin_marks(self) -> None:
        """Note times from now on."""
        vllm_marks.begin()

    def stop_marks(self) -> None:
        """Note none."""
        vllm_marks.stop()

    def marks(self) -> list[Any]:
        """The times that were noted since the last call."""
        return vllm_marks.take()
