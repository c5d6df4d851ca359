"""Connectors of benchmarks/vllm_gpu.py: ours, vLLM's own, and one that moves nothing; a request may put free blocks into
another order.

A request with `kv_transfer_params` {"order": n} sorts an engine's free blocks (n 0), or scatters them by the seed n.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from kvproto_vllm.releases import TransferResults
from tools.engines.vllm_corrupting import CorruptingConnector

__all__ = ["Nixl", "Nothing", "Ours"]


class _Ordering:
    """The scheduler's side has the pool of blocks."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
        self._blocks = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        seed = (request.kv_transfer_params or {}).pop("order", None)
        if seed is not None:
            queue = self._blocks.free_block_queue
            free = queue.popleft_n(queue.num_free_blocks)
            free.sort(key=lambda block: block.block_id)
            if seed:
                random.Random(seed).shuffle(free)
            queue.append_n(free)
        super().on_new_request(request)  # type: ignore[misc]


class Ours(_Ordering, CorruptingConnector):
    """Says when loads begin, and when they have arrived."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._bound.loads:
            print(f"{time.monotonic():.6f} loads {len(self._bound.loads)}", file=sys.stderr, flush=True)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            print(f"{time.monotonic():.6f} arrived {len(results.finished_recving)}", file=sys.stderr, flush=True)
        return results


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

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, super().request_finished(request, block_ids)[1]

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, super().request_finished_all_groups(request, block_ids)[1]


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

    class Nixl(_Ordering, NixlPullConnector):
        """vLLM's own connector, pull."""
except ImportError:
    pass
