"""SGLang's disaggregation interface: each method in a line or two, and what of kvproto answers it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferMetric,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel

from kvproto import KvprotoError, Sink, Source
from kvproto.events import Disconnected, Event, ProtocolError, Refused, Suspected
from kvproto_engines import described
from kvproto_sglang import metadata
from kvproto_sglang.engine import Layout, Opened, open_pool
from kvproto_sglang.receiving import Receiving
from kvproto_sglang.sending import Sending, stop_unwanted
from kvproto_sglang.settings import VARIABLE, Settings
from kvproto_sglang.state import State
from kvproto_sglang.tickets import Asked, asked_of, ticket_of

__all__ = ["CLASSES", "BootstrapServer", "Manager", "Receiver", "Sender"]

logger = logging.getLogger("sglang.kvproto")

_POLL: dict[State, Any] = {
    State.FAILED: KVPoll.Failed,
    State.BOOTSTRAPPING: KVPoll.Bootstrapping,
    State.WAITING: KVPoll.WaitingForInput,
    State.TRANSFERRING: KVPoll.Transferring,
    State.SUCCESS: KVPoll.Success,
}
_WORTH_SAYING = (Disconnected, ProtocolError, Refused, Suspected)
_ONES = ("pp_size", "attn_cp_size", "attn_dcp_size")
"""Sizes of SGLang's parallel configuration that have to be 1 until engines with them were tried."""
_NOT_ASKED = "the plug-in's hooks are not in place: SGLang's log says why"


class Peer:
    """What SGLang's decode queue reads of a prefill engine's topology."""

    follow_bootstrap_room = True

    def __init__(self, replicas: int) -> None:
        self.dp_size = replicas


class Peers:
    """Of any bootstrap address: what is wrong with one is told of its request."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def get(self, address: str, default: Any = None) -> Peer:
        try:
            return Peer(self._settings.replicas(self._settings.source_of(address)))
        except KvprotoError:
            return Peer(1)


class Manager(BaseKVManager):
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

    def open(self, queue: Any) -> None:
        """SGLang's queue has made this manager: open the pool that is there, and listen or connect."""
        settings, parallel, args = self.settings, get_parallel(), self.kv_args
        self.buffers = queue.metadata_buffers
        names = metadata.SETS["all" if self.prefills else settings.metadata]
        self.layout = Layout(
            parallel.attn_tp_size, parallel.attn_tp_rank, tuple((name, getattr(parallel, name)) for name in _ONES),
            parallel.attn_dp_rank or parallel.dp_rank or 0, parallel.num_dp_ranks,
        )  # fmt: skip
        self.opened: Opened = open_pool(
            queue.token_to_kv_pool, queue.scheduler.model_config, self._server, self.buffers, args.state_types,
            args.num_draft_entries, self.layout, settings, names,
        )  # fmt: skip
        described.write(VARIABLE, settings.description, self.opened.pool, self.layout.replica)
        if self.prefills:
            listen = settings.listen_of(self.layout.replica, self.layout.replicas)
            self.source = Source(settings.name, self.opened.pool, listen, settings.options)
        else:
            self.sink = Sink(settings.name, self.opened.pool, dict(settings.sources), settings.options)

    def register_to_bootstrap(self) -> None:
        """Peers are in the settings."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return True

    def submit_prefill_recompute(self, receiver: Receiver, payload: Any) -> None:
        receiver.fail("a prompt is not computed anew after its weights changed")

    def events(self) -> None:
        """Say what is worth saying, and end what nobody waits for."""
        told: list[Event] = []
        for door in (self.source, self.sink):
            told += door.events() if door is not None else []
        for event in told:
            if isinstance(event, _WORTH_SAYING):
                logger.warning("kvproto: %s", event)
        stop_unwanted(told)

    def stopped(self, room: int, receiving: Receiving) -> None:
        """SGLang will ask whether the pages of this room are free."""
        self._stopped[room] = receiving

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        receiving = self._stopped.get(bootstrap_room)
        return receiving is None or receiving.pages_free

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        self._stopped.pop(bootstrap_room, None)


class Sender(BaseKVSender):
    """A request of a prefill engine."""

    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:  # fmt: skip
        self.kv_mgr, self._room, self._row = mgr, bootstrap_room, 0
        self._sending = None if mgr.source is None else Sending(mgr.source, mgr.opened.groups)

    def begin(self, request: Any) -> None:
        """SGLang's request, of which this sender was made."""
        sending, manager = self._sending, self.kv_mgr
        if sending is None:
            return
        try:
            asked = asked_of(request)
            name, replica, deadline = manager.settings.name, manager.layout.replica, manager.settings.deadline
            made = asked.ticket or ticket_of(self._room, name, replica, deadline)
            sending.begin(made, asked.prompt)
        except KvprotoError as error:
            sending.error = error

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._row = aux_index or 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        manager = self.kv_mgr
        if self._sending is not None:
            handoff = partial(metadata.read, manager.buffers, self._row, manager.opened.parts)
            self._sending.send(kv_indices, num_kv_tokens or 0, handoff)

    def poll(self) -> Any:
        self.kv_mgr.events()
        return _POLL[self._sending.state] if self._sending is not None else KVPoll.Failed

    def abort(self) -> None:
        if self._sending is not None:
            self._sending.abort("the request was aborted")

    def failure_exception(self) -> None:
        """SGLang takes the pages back after this, on all ranks where one has failed."""
        self.abort()
        raise RuntimeError(str(self._sending.error if self._sending is not None else _NOT_ASKED))

    def get_transfer_metric(self) -> Any:
        return KVTransferMetric()


class Receiver(BaseKVReceiver):
    """A request of a decode engine."""

    require_staging = False
    bootstrap_infos = (None,)

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr, self._address, self._room, self._row = mgr, bootstrap_addr, bootstrap_room or 0, 0
        self.abort_notified, self.conclude_state = False, None
        self._asked: Asked | None = None
        self._refused = ""
        self._receiving = None if mgr.sink is None else Receiving(mgr.sink, mgr.opened.groups, mgr.opened.page)

    def begin(self, request: Any) -> None:
        """SGLang's request, of which this receiver was made."""
        receiving, settings = self._receiving, self.kv_mgr.settings
        if receiving is None:
            return
        try:
            asked, parts = asked_of(request), self.kv_mgr.opened.parts
            made = asked.ticket or ticket_of(self._room, settings.source_of(self._address), 0, settings.deadline)
            receiving.begin(made, asked.prompt)
        except KvprotoError as error:
            receiving.error = error
            return
        self._asked = asked
        if not parts and asked.first_token is None:
            self._refused = "no first token: it is not handed over here, and custom_params.kvproto has none"
        elif missing := [name for name in asked.needs if name not in parts]:
            self._refused = f'no {", ".join(missing)}: "metadata": "{settings.metadata}" does not fetch them'

    def init(self, prefill_dp_rank: int) -> None:
        if self._receiving is not None:
            named = self._asked is not None and self._asked.ticket is not None
            self._receiving.resolve(None if named else prefill_dp_rank)
        if self._refused:
            self.fail(self._refused)

    def send_metadata(
        self, kv_indices: Any, aux_index: int | None = None, state_indices: Any = None,
        decode_prefix_len: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self._row = aux_index or 0
        if self._receiving is not None:
            self._receiving.fetch(kv_indices, decode_prefix_len or 0)

    def poll(self) -> Any:
        self.kv_mgr.events()
        receiving = self._receiving
        if receiving is None:
            return KVPoll.Failed
        state = receiving.state
        if state == State.SUCCESS and self._asked is not None and receiving.arrived is not None:
            handoff, token = receiving.arrived.handoff, self._asked.first_token
            metadata.write(self.kv_mgr.buffers, self._row, self._room, handoff, token)
        return _POLL[state]

    def fail(self, reason: str) -> None:
        if self._receiving is not None:
            self._receiving.abort(reason)

    def abort(self) -> None:
        self.fail("the request was aborted")
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """One rank has failed: this one stops too, and SGLang keeps the pages until nobody writes them."""
        if self._receiving is not None and not self.abort_notified:
            self._receiving.abort("another rank has failed")
            self.kv_mgr.stopped(self._room, self._receiving)
            self.abort_notified = True

    def clear(self) -> None:
        self.kv_mgr.clear_deferred_abort_state(self._room)

    def failure_exception(self) -> None:
        error = self._receiving.error if self._receiving is not None else _NOT_ASKED
        raise RuntimeError(str(error))


class BootstrapServer(BaseKVBootstrapServer):
    """Peers are in the settings, so nothing listens here."""

    def __init__(self, host: str, port: int) -> None:
        pass


CLASSES = {"manager": Manager, "sender": Sender, "receiver": Receiver, "bootstrap_server": BootstrapServer}
"""By the value of SGLang's KVClassType."""
