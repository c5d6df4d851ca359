"""The connector, but for one bit: of requests whose name begins with "corrupt" it flips a bit of a page that arrived."""

from __future__ import annotations

from typing import Any

import torch

from kvproto_vllm.connector import KvprotoConnector

__all__ = ["CorruptingConnector"]


class CorruptingConnector(KvprotoConnector):
    """Shows that tokens are equal because of the pages that were handed over."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._tensors = kv_caches
        self._blocks: dict[str, int] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._blocks |= {load.request: load.tables[0][0] for load in self._bound.loads}
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for name in results.finished_recving:
            if name.startswith("corrupt"):
                first = next(iter(self._tensors.values()))[self._blocks[name]]
                first.view(torch.int32)[0, 0, 0] ^= 1 << 30
        return results
