"""The connector itself: vLLM's hooks, each in a line or two, and what of kvproto answers them."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.platforms import current_platform

from kvproto import Sink, Source
from kvproto_engines import described, told
from kvproto_engines.loading import Loading
from kvproto_engines.memory import only_context
from kvproto_engines.orders import Orders
from kvproto_engines.sending import Sending, Unread
from kvproto_engines.settings import Presence, of_replica
from kvproto_vllm.engine import Opened, open_pool
from kvproto_vllm.releases import BlockTables, LostBlocks, TransferResults, check_release, layers_of
from kvproto_vllm.scheduling import Scheduling
from kvproto_vllm.settings import WHERE, Settings
from kvproto_vllm.specs import RING, STATE, WINDOWS, specs_of

__all__ = ["KvprotoConnector"]

logger = logging.getLogger("vllm.kvproto")


@dataclass
class _Metadata(base.KVConnectorMetadata):
    """From the scheduler's side to each worker."""

    orders: Orders


@dataclass
class _WorkerMetadata(base.KVConnectorWorkerMetadata):
    """From workers to the scheduler's side.

    Fields:
        taken: The source ranks that handed a request over, by its id.
        unread: What workers say of the blocks of preempted requests.
    """

    taken: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unread: Unread = field(default_factory=lambda: Unread({}, {}))

    def aggregate(self, other: Any) -> base.KVConnectorWorkerMetadata:
        """The words of both workers."""
        free, busy = (
            dict(Counter(mine) + Counter(theirs)) for mine, theirs in zip(self.unread, other.unread, strict=True)
        )
        return _WorkerMetadata(self.taken | other.taken, Unread(free, busy))


class KvprotoConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Hands prompts from vLLM to any engine that speaks kvproto, and fetches them from one.

    Both transfers run in kvproto's own thread; a step of vLLM only says what it computed and asks what has arrived.
    """

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises LocalError for a release of vLLM or settings that cannot be used."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_release(vllm.__version__)
        transfer = vllm_config.kv_transfer_config
        self._roles = transfer.is_kv_producer, transfer.is_kv_consumer
        self._settings = Settings.read(transfer.kv_connector_extra_config, transfer.engine_id, *self._roles)
        self._replica = vllm_config.parallel_config.data_parallel_index
        self._sending: Sending | None = None
        self._loading: Loading | None = None
        self._presence: Presence | None = None
        groups = {type(spec).__name__ for each in kv_cache_config.kv_cache_groups for spec in specs_of(each).values()}
        kinds = bool(groups & {*WINDOWS}), bool(groups & {STATE, RING})  # a ring has lost what a token more overwrites
        early, workers = (
            hasattr(base.KVConnectorBase_V1, "has_pending_block_frees"),
            vllm_config.parallel_config.world_size,
        )
        recomputes = getattr(transfer, "kv_load_failure_policy", "") == "recompute"
        given = (*self._roles, *kinds, early, workers, recomputes)
        self._scheduling = Scheduling(self._settings, self._replica, *given)
        self._tables, self._lost = BlockTables(), LostBlocks()
        self._gpu: torch.device | None = None
        self._zeroed = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
        self._opened: Opened | None = None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False  # peers map the caches where they were at the start

    # the scheduler's side, in the order in which vLLM calls

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._roles[0]:
            self._scheduling.holds.bind(gpu_block_pool)

    def has_pending_block_frees(self) -> bool:
        return self._scheduling.holds.pending

    def on_new_request(self, request: Any) -> None:
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduling.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Groups whose blocks vLLM need not zero: none, as rows behind the prompt, not fetched, may be no numbers."""
        return ()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        manager = getattr(self, "_kv_cache_manager", None)
        if manager is None and self._roles[0]:
            self._tables.scheduled(scheduler_output)
        tables = manager.get_block_ids if manager else self._tables
        return _Metadata(self._scheduling.orders(scheduler_output, tables))

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(told := connector_output.kv_connector_worker_meta, _WorkerMetadata):
            self._scheduling.taken(told.taken)
            self._scheduling.holds.told(*told.unread)
        self._scheduling.holds.sent(connector_output.finished_sending or ())

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request)

    request_finished_all_groups = request_finished

    # a worker's side, in the order in which vLLM calls

    def get_mem_pool_context(self) -> Any:
        return only_context(torch.int8) if current_platform.is_cpu() else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the pool. Raises LocalError for caches that cannot be stated."""
        first, tp = next(iter(kv_caches.values())), self._vllm_config.parallel_config.tensor_parallel_size
        device = (first if isinstance(first, torch.Tensor) else first[0]).device  # states are several tensors
        rank = get_pp_group().rank_in_group * tp + get_tensor_model_parallel_rank()
        self._opened = open_pool(self._vllm_config, self._kv_cache_config, kv_caches, rank, self._settings)
        described.write(WHERE, self._settings.description, self._opened.pool, self._replica)
        self._gpu = device if device.type == "cuda" else None

    def get_handshake_metadata(self) -> None:
        """The engine has started: begin to listen, or to connect.

        Not before: while it captures CUDA graphs, a call to the GPU from another thread would spoil them.
        """
        settings, opened, self._opened = self._settings, self._opened, None
        if opened is None:
            return
        told.follow(logger)
        source: Source | None = None
        if self._roles[0]:
            listen, outside = (of_replica(each, self._replica) for each in (settings.listen, settings.advertise))
            source = Source(settings.name, opened.pool, listen or "", settings.options, advertise=outside)
            self._sending = Sending(source, opened.tables, logger)
        sink = Sink(settings.name, opened.pool, dict(settings.sources), settings.options) if self._roles[1] else None
        whole = self._vllm_config.cache_config.enable_prefix_caching
        self._loading = Loading(sink, opened.tables, logger, whole)
        replicas = self._vllm_config.parallel_config.data_parallel_size
        self._presence = Presence(settings, self._replica, replicas, source, sink)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        self.register_kv_caches(layers_of(kv_cache, attn_backend, self._kv_cache_config))

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        if self._sending is not None and isinstance(kv_connector_metadata, _Metadata):
            self._sending.preempt(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.get_handshake_metadata()
        if self._sending is not None:
            self._sending.take(self._bound)
        if self._loading is not None:
            if self._zeroed and self._gpu is not None and self._bound.loads:
                torch.cuda.current_stream(self._gpu).synchronize()  # blocks are zeroed before they are written
            self._loading.take(self._bound)
            self._lost.begun(self._bound)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are between steps, so a layer waits for none."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are read where they are, so nothing is saved."""

    def wait_for_save(self) -> None:
        """The forward is over: say what it computed. Its copies go on during the next one."""
        if self._sending is not None:
            stream = torch.cuda.current_stream(self._gpu) if self._gpu is not None else None
            self._sending.computed(self._bound, stream)

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        results = TransferResults()
        if self._sending is not None:
            results.finished_sending = self._sending.freed(self._bound)
            self._sending.source.events()  # raises the error that ended its thread, if one did
        if self._loading is not None:
            results.finished_recving, results.failed_recving = self._loading.results()
            self._lost.over(results.finished_recving, results.failed_recving)
            if self._loading.sink is not None:
                self._loading.sink.events()
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._lost.take()

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        if self._sending is None:
            return None
        taken, unread = self._sending.taken(), self._sending.unread()
        return _WorkerMetadata(taken, unread) if taken or any(unread) else None

    def shutdown(self) -> None:
        if self._presence is not None:
            self._presence.close()
        if self._loading is not None and self._loading.sink is not None:
            self._loading.sink.close()
        if self._sending is not None:
            self._sending.source.close()

    @property
    def _bound(self) -> Orders:
        """The orders of the scheduler's side for this step."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        return metadata.orders
