"""The connector that keeps pages on the host and in storage: vLLM's hooks, each in a line or two."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.platforms import current_platform

from kvproto.tiers import HostTiers
from kvproto_engines.memory import only_context
from kvproto_engines.tiers import ONLY_TOKENS, names_of
from kvproto_vllm.engine import open_pool
from kvproto_vllm.releases import RELEASES, BlockTables, TransferResults, check_release, layers_of
from kvproto_vllm.settings import Settings
from kvproto_vllm.specs import refused
from kvproto_vllm.tiers.finding import Finding, Found, TierOrders, TierSettings, merged
from kvproto_vllm.tiers.keeping import Keeping

__all__ = ["KvprotoTiers"]

logger = logging.getLogger("vllm.kvproto")
_OWN = "draft_model"
"""vLLM's name of drafts whose rows depend on the tokens of their page alone; those of others depend on the next one."""


@dataclass
class _TierMetadata(base.KVConnectorMetadata):
    """From the scheduler's side to each worker."""

    orders: TierOrders


@dataclass
class _TierAnswers(base.KVConnectorWorkerMetadata):
    """From workers to the scheduler's side."""

    found: Found = field(default_factory=dict)

    def aggregate(self, other: Any) -> base.KVConnectorWorkerMetadata:
        """The pages of both workers."""
        return _TierAnswers(merged(self.found, other.found))


class KvprotoTiers(base.KVConnectorBase_V1):
    """Keeps pages of target and draft as one object, for engines of any kind that share the storage."""

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises LocalError for a release of vLLM, settings or caches that cannot be used."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_release(vllm.__version__, RELEASES[1:])  # the first knows failed loads by their blocks
        self._settings = TierSettings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
        if len(groups) != 1:
            found = ", ".join(type(each.kv_cache_spec).__name__ for each in groups)
            raise refused("block tables", f"one: {ONLY_TOKENS}", f"{len(groups)}: {found}")
        if parallel.pipeline_parallel_size != 1:
            raise refused("pipeline_parallel_size", "1", str(parallel.pipeline_parallel_size))
        self._page = groups[0].kv_cache_spec.block_size
        speculative = vllm_config.speculative_config
        self._ahead = speculative is not None and getattr(speculative, "method", "") != _OWN
        size = sum(each.size for each in kv_cache_config.kv_cache_tensors) // kv_cache_config.num_blocks
        # the other half of the host is for what is written, as in HiCache
        half = self._settings.host_bytes // size // 2 * self._page
        self._finding = Finding(self._settings, self._page, parallel.tensor_parallel_size, self._ahead, half)
        self._tables = BlockTables()
        self._keeping: Keeping | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not kept is computed again

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False  # the caches are copied from where they were at the start

    # the scheduler's side, in the order in which vLLM calls

    def on_new_request(self, request: Any) -> None:
        self._finding.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._finding.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._finding.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        manager = getattr(self, "_kv_cache_manager", None)
        if manager is None:
            self._tables.scheduled(scheduler_output)
        return _TierMetadata(self._finding.orders(scheduler_output, manager.get_block_ids if manager else self._tables))

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(connector_output.kv_connector_worker_meta, _TierAnswers):
            self._finding.answered(connector_output.kv_connector_worker_meta.found)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._finding.finished(request)
        return False, None

    # a worker's side, in the order in which vLLM calls

    def get_mem_pool_context(self) -> Any:
        return only_context(torch.int8) if current_platform.is_cpu() else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the tiers. Raises LocalError for caches that cannot be stated or kept, and OSError for storage."""
        first = next(iter(kv_caches.values()))
        device, settings = (first if isinstance(first, torch.Tensor) else first[0]).device, self._settings
        rank = get_tensor_model_parallel_rank()
        stated = Settings(name="tiers", weights=settings.weights, pages="strides")
        opened = open_pool(self._vllm_config, self._kv_cache_config, kv_caches, rank, stated)
        for name, table in opened.tables.items():
            if table.state or table.window:
                raise refused(name, ONLY_TOKENS, "a state" if table.state else "a window")
        pool = opened.pool
        ahead = [group.name for group in pool.geometry.groups if group.model and self._ahead]
        self._keeping = Keeping(
            HostTiers(
                pool, names_of(pool.geometry), page=self._page, host_bytes=settings.host_bytes,
                storage=settings.storage, most=settings.most, ahead=ahead, durable=settings.durable, seal=settings.seal,
                stream=torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
            ),
            settings,
        )  # fmt: skip
        logger.info("kvproto: keeps pages of %d tokens in %s", self._page, settings.storage)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        self.register_kv_caches(layers_of(kv_cache, attn_backend, self._kv_cache_config))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._keeping is not None
        self._keeping.take(self._bound)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are between steps, so a layer waits for none."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are copied whole, after the step."""

    def wait_for_save(self) -> None:
        assert self._keeping is not None
        self._keeping.keep(self._bound)

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        assert self._keeping is not None
        results = TransferResults()
        results.finished_recving, results.failed_recving = self._keeping.results()
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        found = self._keeping.found() if self._keeping is not None else {}
        return _TierAnswers(found) if found else None

    def shutdown(self) -> None:
        if self._keeping is not None:
            self._keeping.close()

    @property
    def _bound(self) -> TierOrders:
        """The orders of the scheduler's side for this step."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _TierMetadata)
        return metadata.orders
