"""SGLang's disaggregation interface: each method in a line or two, and what of kvproto answers it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.base import conn as base
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_lora, get_parallel

from kvproto import KvprotoError, Sink, Source
from kvproto_engines import described, told
from kvproto_engines.gpu import Gpu
from kvproto_engines.settings import Presence
from kvproto_sglang import metadata
from kvproto_sglang.engine import Engine, Layout, Opened, open_pool, scales_of
from kvproto_sglang.holding import Holding
from kvproto_sglang.receiving import Receiving
from kvproto_sglang.sending import Sending
from kvproto_sglang.settings import VARIABLE, Settings
from kvproto_sglang.state import State
from kvproto_sglang.tickets import Asked, asked_of

__all__ = ["CLASSES", "ONES", "BootstrapServer", "Manager", "Receiver", "Sender"]

ONES = ("pp_size", "attn_cp_size")
"""Sizes of SGLang's parallel configuration that have to be 1 until engines with them were tried."""
_NO_HOOKS = "the plug-in's hooks are not in place: SGLang's log says why"


class Peers:
    """Of any bootstrap address what SGLang's decode queue reads; what is wrong with one is told of its request."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def get(self, address: str, default: Any = None) -> SimpleNamespace:
        replicas = 1
        with contextlib.suppress(KvprotoError):
            replicas = self._settings.replicas(self._settings.source_of(address))
        return SimpleNamespace(dp_size=replicas, follow_bootstrap_room=True)


class Manager(base.BaseKVManager):
    """One rank's pool, and its Source or Sink."""

    enable_all_cp_ranks_for_transfer = False
    is_dummy_cp_rank = False
    enable_deferred_decode_kv_release = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: Any = False) -> None:
        self.kv_args, self._server = args, server_args
        self.prefills = disaggregation_mode == DisaggregationMode.PREFILL
        self.settings = Settings.of_environment(self.prefills)
        self.prefill_info_table = Peers(self.settings)
        self.source: Source | None = None
        self.sink: Sink | None = None
        self._stopped: dict[int, Receiving] = {}
        self.holding = Holding()

    @property
    def adapters(self) -> Sequence[Any]:
        """SGLang's references to the LoRA adapters that it was started with."""
        return get_lora().lora_paths or ()

    def open(self, queue: Any) -> None:
        """SGLang's queue has made this manager: open the pool that is there, and listen or connect."""
        settings, parallel = self.settings, get_parallel()
        self.buffers, scheduler = queue.metadata_buffers, queue.scheduler
        self.layout = Layout(
            parallel.attn_tp_size, parallel.attn_tp_rank, parallel.attn_dcp_size,
            tuple((name, getattr(parallel, name)) for name in ONES),
            parallel.attn_dp_rank or parallel.dp_rank or 0, parallel.num_dp_ranks,
        )  # fmt: skip
        parts = "all" if self.prefills else settings.metadata
        self.opened: Opened = open_pool(self._engine(queue), self.layout, settings, parts)
        self.gpu = Gpu(torch.device(queue.token_to_kv_pool.device), getattr(scheduler, "forward_stream", None))
        self.drafts = queue.draft_token_to_kv_pool is not None
        described.write(VARIABLE, settings.description, self.opened.pool, self.layout.replica)
        if self.prefills:
            listen, outside = settings.places_of(self.layout.replica, self.layout.replicas)
            self.source = Source(settings.name, self.opened.pool, listen, settings.options, advertise=outside)
        else:
            self.sink = Sink(settings.name, self.opened.pool, dict(settings.sources), settings.options)
        self.presence = Presence(settings, self.layout.replica, self.layout.replicas, self.source, self.sink)

    def _engine(self, queue: Any) -> Engine:
        """SGLang's objects for the target and for its draft."""
        scheduler, args = queue.scheduler, self.kv_args
        runners = [scheduler.tp_worker.model_runner]
        if queue.draft_token_to_kv_pool is not None:
            runners += scheduler.draft_worker._draft_model_runners()
        shares = self.prefills or self._server.disaggregation_decode_enable_radix_cache
        return Engine(
            pools=(queue.token_to_kv_pool, *(each.token_to_kv_pool for each in runners[1:])),
            models=(scheduler.model_config, *(each.model_config for each in runners[1:])), server=self._server,
            buffers=self.buffers, states=[each.value for each in args.state_types], entries=args.num_draft_entries,
            scales=tuple(scales_of(each.model.modules()) for each in runners),
            window=0 if shares else scheduler.sliding_window_size or 0,
            slots=_slots(runners),
        )  # fmt: skip

    @property
    def needs(self) -> tuple[str, ...]:
        """Parts of the metadata without which no request can go on here: what a draft starts with, but a cold one."""
        return ("hidden",) if self.drafts and not self.settings.options.cold_draft else ()

    def register_to_bootstrap(self) -> None:
        """Peers are in the settings."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return True

    def submit_prefill_recompute(self, receiver: Receiver, payload: Any) -> None:
        receiver.fail("a prompt is not computed anew after its weights changed")

    def events(self) -> None:
        """End what nobody waits for. What is worth saying, kvproto's own logger says: SGLang's log has it."""
        for door in (self.source, self.sink):
            told.stop_unwanted(door.events() if door is not None else [])

    def stopped(self, room: int, receiving: Receiving) -> None:
        """SGLang will ask whether the pages of this room are free."""
        self._stopped[room] = receiving

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        receiving = self._stopped.get(bootstrap_room)
        return receiving is None or receiving.pages_free

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        self._stopped.pop(bootstrap_room, None)


def _slots(runners: list[Any]) -> tuple[Any, ...]:
    """Of each model the pool of recurrent states, where its pool of pages has none; a draft may name the target's."""
    found = [getattr(each.req_to_token_pool, "mamba_pool", None) for each in runners]
    own = [pool if n == 0 or pool is not found[0] else None for n, pool in enumerate(found)]
    inside = [hasattr(each.token_to_kv_pool, "mamba_pool") for each in runners]
    return tuple(None if has else pool for pool, has in zip(own, inside, strict=True))


class Sender(base.BaseKVSender):
    """A request of a prefill engine."""

    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:  # fmt: skip
        self.kv_mgr, self._row = mgr, 0
        self._early_send_wait_event: Any = None
        """Set by SGLang before it sends a prefix that an earlier forward may still write."""
        assert mgr.source is not None, _NO_HOOKS
        self._sending = Sending(mgr.source, mgr.opened.tables)
        self._given_up = False

    def begin(self, request: Any) -> None:
        """SGLang's request, of which this sender was made."""
        manager = self.kv_mgr
        try:
            asked = asked_of(request, manager.adapters)
            made = manager.settings.ticket_here(request, asked, manager.layout.replica)
            self._sending.begin(made, asked.prompt, asked.tokens)
        except KvprotoError as error:
            self._sending.error = error

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._row = aux_index or 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        manager = self.kv_mgr
        handoff = partial(metadata.read, manager.buffers, self._row, manager.opened.parts)
        event = manager.gpu.written(self._early_send_wait_event)
        self._early_send_wait_event = None
        self._sending.send(kv_indices, num_kv_tokens or 0, handoff, state_indices, event)

    def poll(self) -> State:
        self.kv_mgr.events()
        return self._sending.state

    def abort(self) -> None:
        """SGLang releases the pages after this, and `hold` keeps them from it."""
        self._given_up = True
        self._sending.abort("the request was aborted")

    def hold(self, request: Any, release: Callable[[], object]) -> bool:
        """Whether the pages of a request are released later, by `release`, as it was given up."""
        if self._given_up:
            self.kv_mgr.holding.keep(request, self._sending, release)
        return self._given_up

    def failure_exception(self) -> None:
        """SGLang takes the pages back after this, on all ranks where one has failed."""
        self.abort()
        raise RuntimeError(str(self._sending.error))

    def get_transfer_metric(self) -> Any:
        return base.KVTransferMetric()


class Receiver(base.BaseKVReceiver):
    """A request of a decode engine."""

    require_staging = False
    bootstrap_infos = (None,)

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr, self._address, self._room, self._row = mgr, bootstrap_addr, bootstrap_room or 0, 0
        self.abort_notified, self.conclude_state = False, None
        self._asked: Asked | None = None
        self._refused = ""
        assert mgr.sink is not None, _NO_HOOKS
        self._receiving = Receiving(mgr.sink, mgr.opened.tables, mgr.opened.page)

    def begin(self, request: Any) -> None:
        """SGLang's request, of which this receiver was made."""
        receiving, settings = self._receiving, self.kv_mgr.settings
        try:
            asked, parts = asked_of(request, self.kv_mgr.adapters), self.kv_mgr.opened.parts
            ticket = settings.ticket_there(self._room, self._address, asked)
            receiving.begin(ticket, asked.prompt, asked.tokens)
        except KvprotoError as error:
            receiving.error = error
            return
        self._asked = asked
        if not parts and asked.first_token is None:
            self._refused = "no first token: it is not handed over here, and custom_params.kvproto has none"
        needs = [*asked.needs, *self.kv_mgr.needs]
        if not self._refused and (missing := [name for name in needs if name not in parts]):
            self._refused = f'no {", ".join(missing)}: "metadata": "{settings.metadata}" does not fetch them'

    def init(self, prefill_dp_rank: int) -> None:
        named = self._asked is not None and self._asked.ticket is not None
        self._receiving.resolve(None if named else prefill_dp_rank)
        if self._refused:
            self.fail(self._refused)

    def send_metadata(
        self, kv_indices: Any, aux_index: int | None = None, state_indices: Any = None,
        decode_prefix_len: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self._row = aux_index or 0
        self._receiving.fetch(kv_indices, decode_prefix_len or 0, state_indices, self.kv_mgr.gpu.idle())

    def poll(self) -> State:
        self.kv_mgr.events()
        receiving = self._receiving
        state = receiving.state
        if state == State.SUCCESS and self._asked is not None and receiving.arrived is not None:
            handoff, token = receiving.arrived.handoff, self._asked.first_token
            metadata.write(self.kv_mgr.buffers, self._row, self._room, handoff, token)
        return state

    def fail(self, reason: str) -> None:
        self._receiving.abort(reason)

    def abort(self) -> None:
        self.fail("the request was aborted")
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """One rank has failed: this one stops too, and SGLang keeps the pages until nobody writes them."""
        if not self.abort_notified:
            self._receiving.abort("another rank has failed")
            self.kv_mgr.stopped(self._room, self._receiving)
            self.abort_notified = True

    def clear(self) -> None:
        self.kv_mgr.clear_deferred_abort_state(self._room)

    def failure_exception(self) -> None:
        raise RuntimeError(str(self._receiving.error))


class BootstrapServer(base.BaseKVBootstrapServer):
    """Peers are in the settings, so nothing listens here."""

    def __init__(self, host: str, port: int) -> None:
        pass


CLASSES = {"manager": Manager, "sender": Sender, "receiver": Receiver, "bootstrap_server": BootstrapServer}
"""By the value of SGLang's KVClassType."""
