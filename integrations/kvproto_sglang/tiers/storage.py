"""A storage back end of SGLang's HiCache: its pages in storage, found by engines of any kind, and theirs by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import hicache_storage as base
from sglang.srt.runtime_context import get_parallel, get_server_args

from kvproto import LocalError, Parallel, Pool, lay_out
from kvproto.tiers import Chain, StoredPages
from kvproto_engines.settings import refuse
from kvproto_engines.tiers import ONLY_TOKENS, Tiered, names_of, read
from kvproto_sglang.conn import ONES
from kvproto_sglang.engine import Layout, facts, title_of
from kvproto_sglang.pools.stated import Owner, refused
from kvproto_sglang.tiers.host_pools import state_host
from kvproto_sglang.tiers.keys import KEYS, PageKeys

__all__ = ["KvprotoTiers"]

WHERE = "hicache_storage_backend_extra_config"
_DYNAMIC = ("backend_name", "module_path", "class_name", "interface_v1")
"""Settings that SGLang itself reads there."""
_KV, _DRAFT = "kv", "draft"
"""Names of HiCache's pools."""


class KvprotoTiers(base.HiCacheStorage):
    """Pages of HiCache's pool of the host, target and draft as one object."""

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        """Raises LocalError for settings that cannot be used."""
        given = dict(storage_config.extra_config or {})
        if not given.get("interface_v1"):
            raise refuse(
                WHERE, "interface_v1", "1", str(given.get("interface_v1")), "set it: pages are not copied twice"
            )
        own = {name: value for name, value in given.items() if name not in _DYNAMIC}
        self._settings: Tiered = read(WHERE, Tiered, own, ("most",))
        self._pools: dict[str, Any] = {}
        self._pages: StoredPages | None = None
        self._got: set[str] = set()
        """Keys that the last `batch_get_v1` has read, drafts' rows too."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[_KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name not in (_KV, _DRAFT):
            raise refused("host pools", f"{_KV}, {_DRAFT}: {ONLY_TOKENS}", name)
        if self._pages is not None:
            raise refused("host pools", "those of the start", name)
        self._pools[name] = host_pool

    def on_host_pools_registered(self) -> None:
        """All pools are known: open storage. Raises LocalError for what cannot be stated, and OSError."""
        server, parallel = get_server_args(), get_parallel()
        for name, size in ((name, getattr(parallel, name)) for name in (*ONES, "attn_dcp_size")):
            if size != 1:
                raise refused(name, "1", str(size))
        layout = Layout(parallel.attn_tp_size, parallel.attn_tp_rank)
        models = [ModelConfig.from_server_args(server)]
        if server.speculative_draft_model_path:
            draft = {"model_path": server.speculative_draft_model_path, "is_draft_model": True}
            models.append(ModelConfig.from_server_args(server, **draft))
        owners = [Owner(n, title_of(n), model, layout.tp) for n, model in enumerate(models)]
        stated = state_host(self._pools[_KV], owners[0], *owners[1:])
        if _DRAFT in self._pools:
            if len(owners) < 2:
                raise refused("draft model", "a model of its own", "none")
            stated += state_host(self._pools[_DRAFT], attrs.evolve(owners[1], ids=None))
        named: dict[str, str] = {}
        for n in range(len(models)):
            named |= facts(n, models[n], server, self._settings.weights, {}, stated)
        geometry = lay_out([each.cache for each in stated], Parallel(tp=layout.tp), 0, named)
        tensors = {each.cache.group.name: each.tensors for each in stated}
        axes = {each.cache.group.name: each.axes for each in stated}
        pool = Pool(geometry, tensors, rank=layout.rank, axes=axes)
        page = self._pools[_KV].page_size
        ahead = [group.name for group in geometry.groups if group.model]  # SGLang's drafts see the next token
        self._pages = StoredPages(
            pool, names_of(geometry), page=page, storage=self._settings.storage, most=self._settings.most, ahead=ahead,
            durable=self._settings.durable, seal=self._settings.seal,
        )  # fmt: skip
        most = 4 * self._pools[_KV].page_num + (1 << 16)  # several times what its tree can hold
        KEYS.open(PageKeys(self._pages.space, page, most), self._pages.space_of)

    def _prompt(self, keys: Sequence[str]) -> tuple[StoredPages, Chain, int] | None:
        """The pages of these keys, the prompt that they are of, and the number of the first of them."""
        found = KEYS.chain(keys) if keys and self._pages is not None else None
        return None if found is None or self._pages is None else (self._pages, *found)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        if (found := self._prompt(keys)) is None:
            return 0
        pages, chain, first = found
        return pages.count(chain, first, first + len(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        found, count = self._prompt(keys), 0
        if found is not None:
            pages, chain, first = found
            count = pages.get(chain, first, self._slots(host_indices))
        self._got = set(keys[:count])
        return [i < count for i in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        if (found := self._prompt(keys)) is None:
            return [False] * len(keys)
        pages, chain, first = found
        return pages.put(chain, first, self._slots(host_indices))

    def _slots(self, host_indices: torch.Tensor) -> list[int]:
        """Pages of the pool, of the tokens that SGLang names."""
        page = self._pools[_KV].page_size
        return [int(index) // page for index in host_indices[::page]]

    # a draft with a pool of its own: its rows are in the same slots, and in the same object

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        count = self.batch_exists(keys, extra_info)
        return base.PoolTransferResult(count, {each.name: count for each in pool_transfers or ()})

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """They have come with those of the target, just before."""
        return {each.name: [key in self._got for key in each.keys or ()] for each in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """They are written with those of the target, just after."""
        return {each.name: [True] * len(each.keys or ()) for each in transfers}

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise _only_v1()

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> int:
        raise _only_v1()

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise _only_v1()

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise _only_v1()

    def clear(self) -> None:
        """Delete nothing: pages are other engines' too, and `kvproto tiers PLACE --drop` deletes them."""

    def close(self) -> None:
        KEYS.close()
        if self._pages is not None:
            self._pages.close()


def _only_v1() -> LocalError:
    return refuse(WHERE, "interface_v1", "calls of the interface v1", "one of v0", "set it to 1")
