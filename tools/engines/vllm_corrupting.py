"""The connector, but for one bit: of requests whose name begins with "corrupt" it flips a bit of each group's first page that arrived.

Of those whose name begins with ROUNDED it rounds all pages and states that arrived to bfloat16; with WIPED and a number, it
zeroes those of that block table; with UNZEROED, it leaves rows behind the prompt as they were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvproto_engines.orders import Load, Tables
from kvproto_vllm.connector import KvprotoConnector
from kvproto_vllm.specs import STATE
from tools.engines.vllm_engine import ROUNDED, UNZEROED, WIPED

FETCHED: dict[str, float] = {}
"""Requests whose prompts have arrived, by the names that the engine gave them, and how long that took: seconds from the
step in which the engine orders it until it knows."""
_ORDERED: dict[str, float] = {}

_LARGE = 1 << 30
"""The bit that makes a small number a large one."""


class CorruptingConnector(KvprotoConnector):
    """Shows that tokens are equal because of the pages that were handed over."""

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Of requests whose blocks are to be as they were: what vLLM takes of a connector that does not say."""
        if request.request_id.startswith(UNZEROED):
            groups: tuple[int, ...] = self._kv_cache_config.prefix_cacheable_group_ids
            return groups
        return super().get_loaded_kv_cache_group_ids(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        made: Any = super().build_connector_meta(scheduler_output)
        _ORDERED.update(dict.fromkeys((load.request for load in made.orders.loads), time.perf_counter()))
        return made

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        failed = getattr(connector_output, "failed_recving", None) or set()  # 0.26 has no such field
        for name in (connector_output.finished_recving or set()) - failed:
            FETCHED[name] = time.perf_counter() - _ORDERED.pop(name)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._tensors = kv_caches
        self._blocks: dict[str, list[torch.Tensor]] = {}
        self._loaded: dict[str, Tables] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._blocks |= {load.request: list(self._firsts(load)) for load in self._bound.loads}
        kept = (load for load in self._bound.loads if load.request.startswith((ROUNDED, WIPED)))
        self._loaded |= {load.request: load.tables for load in kept}
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for name in results.finished_recving:
            if name.startswith("corrupt"):
                for block in self._blocks[name]:
                    words = block[0].view(torch.int32)
                    at = tuple(torch.nonzero(words & _LARGE == 0)[0].tolist())
                    words[at] ^= _LARGE
            elif name.startswith(ROUNDED):
                self._round(self._loaded.pop(name))
            elif name.startswith(WIPED):
                self._wipe(int(name.split("-")[1]), self._loaded.pop(name))
        return results

    def _round(self, tables: Tables) -> None:
        """Have all pages and states in these tables keep 8 bits of each number."""
        for group, table in zip(self._kv_cache_config.kv_cache_groups, tables, strict=True):
            blocks = list(filter(None, table))
            for tensor in (each for name in group.layer_names for each in self._parts(group, name)):
                tensor[blocks] = tensor[blocks].bfloat16().float()

    def _wipe(self, number: int, tables: Tables) -> None:
        """Zero the pages of one block table."""
        group, blocks = self._kv_cache_config.kv_cache_groups[number], list(filter(None, tables[number]))
        for tensor in (each for name in group.layer_names for each in self._parts(group, name)):
            tensor[blocks] = 0

    def _firsts(self, load: Load) -> Iterator[torch.Tensor]:
        """The first block of each group that is loaded, of its first layer; of "corrupt-state" those with states alone, and
        of "corrupt-page" the others.
        """
        for group, table in zip(self._kv_cache_config.kv_cache_groups, load.tables, strict=True):
            first = next(filter(None, table), None)  # none where the next token begins a chunk of its own
            if first and not load.request.startswith("corrupt-page" if _has_states(group) else "corrupt-state"):
                yield self._parts(group, group.layer_names[0])[-1][first]

    def _parts(self, group: Any, name: str) -> Sequence[torch.Tensor]:
        """The tensors of a layer, by block."""
        if not _has_states(group):
            return [self._tensors[name]]
        parts: Sequence[torch.Tensor] = self._vllm_config.compilation_config.static_forward_context[name].kv_cache
        return parts


def _has_states(group: Any) -> bool:
    return type(group.kv_cache_spec).__name__ == STATE
