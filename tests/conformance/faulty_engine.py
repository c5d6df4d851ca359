"""Reference engines with one fault each, as engines have had them: `python faulty_engine.py NAME` is an adapter.

Without a name every fault is planted in turn, and looked for by the scenario that is to find it. A fault is a method of the adapter that does something else, or a change to what kvproto sends or does.
"""

import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Timer
from typing import Any

import attrs
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "conformance/testees"))

import toy_engine
from live_sink import Decode
from live_source import Prefill
from toy_engine import serve

from kvproto.copying.columns import Overlaps
from kvproto.errors import KvprotoError, LocalError, PlanError, RemoteError
from kvproto.net.allow_list import Allowed, AllowList
from kvproto.session import core, descriptions, endpoint, push, sink, sink_endpoint, tickets
from kvproto.session.catalogue import SinkCatalogue
from kvproto.session.error_fields import refusal
from kvproto.session.inline import SinkInline, SourceInline
from kvproto.session.intent import SinkIntent, SourceIntent
from kvproto.session.pull import Lease, SinkPull, SourcePull
from kvproto.session.registering import Holder
from kvproto.session.sink import SinkSession
from kvproto.session.source import SourceSession
from kvproto.session.source_endpoint import SourceEndpoint
from kvproto.session.stream import Credits, SinkStream
from kvproto.session.table import SessionState
from kvproto.session.transfers import SinkTransfers, SourceTransfers
from kvproto.session.watching import WatchEndpoint
from kvproto.sink.link import SourceLink
from kvproto.sink.node import SinkNode
from kvproto.source import prefill
from kvproto.transport.inline.transport import InlineReceiver
from kvproto.transport.nixl.transport import NixlTransport
from kvproto.transport.shm import memory
from kvproto.transport.staging.staged import StagedLink, StagedReceiver
from kvproto.wire import codec
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Proof
from kvproto_conformance.live import Result, list_scenarios, run

Ask = dict[str, Any]


def another_minor(adapter: Any) -> None:
    """Frames of a minor version that is not the session's."""
    plain = core.encode
    core.encode = lambda message, **more: plain(message, **more | {"minor": 7})  # type: ignore[attr-defined]


def says(cls: type[Any], **changes: Any) -> Callable[[Any], None]:
    """Change what is sent: of messages of a class the fields that are named, by a value or a function of the message."""

    def plant(adapter: Any) -> None:
        plain = core.encode

        def encode(message: Any, *args: Any, **more: Any) -> Any:
            if isinstance(message, cls):
                made = {name: c(message) if callable(c) else c for name, c in changes.items()}
                message = attrs.evolve(message, **made)
            return plain(message, *args, **more)

        core.encode = encode  # type: ignore[attr-defined]

    return plant


def does(name: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Change an operation of the adapter; `make` is given the operation as it was."""
    return lambda adapter: setattr(adapter, name, make(getattr(adapter, name)))


def has(where: Any, name: str, instead: Any) -> Callable[[Any], None]:
    """Change a function or method of kvproto."""
    return lambda adapter: setattr(where, name, instead)


def _rotated(adapter: Any, ask: Ask) -> None:
    request, table, cache = adapter.requests[ask["id"]]
    adapter.requests[ask["id"]] = request, {name: [*items[1:], items[0]] for name, items in table.items()}, cache


def last_credit(self: SinkInline) -> m.Credit | None:
    """Credit only once nothing may be sent any more."""
    if self._came.bytes < self._came.total:
        return None
    self._came.total = self._came.bytes + self._reader.window
    return m.Credit(session=self._session.session, kind=self._reader.kind, total=self._came.total)


def page_off_by_one(finish: Any) -> Any:
    def on_finish(ask: Ask) -> None:
        _rotated(finish.__self__, ask)
        finish(ask)

    return on_finish


def bytes_moved(fill: Any) -> Any:
    def on_fill(ask: Ask) -> None:
        data = np.frombuffer(bytes.fromhex(ask["data"]), np.uint8)
        fill(ask | {"data": np.roll(data, 1).tobytes().hex()})

    return on_fill


def heads_exchanged(fill: Any) -> Any:
    def on_fill(ask: Ask) -> None:
        shape = fill.__self__.toy._cells[ask["group"], ask["layer"], ask["part"]].shape[2:]
        data = np.frombuffer(bytes.fromhex(ask["data"]), np.uint8).reshape(-1, *shape)
        fill(ask | {"data": data[:, ::-1].tobytes().hex()})

    return on_fill


def done_before_prefill(request: Any) -> Any:
    def on_request(ask: Ask) -> None:
        request(ask)
        adapter = request.__self__
        made, table, _ = adapter.requests[ask["id"]]
        made.finish(table, handoff={"first": {"token": bytes(4)}})
        adapter.on_computed = adapter.on_finish = lambda ask: None

    return on_request


def hand_off_of_nobody(finish: Any) -> Any:
    return lambda ask: finish(ask | {"handoff": {"first": {"token": "00000000"}}})


def free_at_once(wait: Any) -> Any:
    return lambda ask: wait(ask) | {"free": True}


def other_heads_read(read: Any) -> Any:
    def on_read(ask: Ask) -> Ask:
        data = np.frombuffer(bytes.fromhex(read(ask)["data"]), np.uint8).reshape(ask["count"], 2, -1)
        return {"data": data[:, ::-1].tobytes().hex()}

    return on_read


def arrived_too_early(wait: Any) -> Any:
    def on_wait(ask: Ask) -> Ask:
        found: Ask = wait(ask)
        return {"state": "arrived", "handoff": {}, "free": True} if found["state"] == "waiting" else found

    return on_wait


def named_at_once(fetch: Any) -> Any:
    return lambda ask: fetch(ask | {"intent": False})


def free_when_asked(returned: Any) -> Any:
    return lambda ask: {"free": True}


def lent_again(wait: Any) -> Any:
    """The next request gets the pages that are offered."""

    def on_wait(ask: Ask) -> Ask:
        adapter, found = wait.__self__, wait(ask)
        if found["state"] == "held":
            for name, items in adapter.requests[ask["id"]][1].items():
                adapter.toy._free[name][:0] = items
        return found  # type: ignore[no-any-return]

    return on_wait


def any_renewal(self: SourcePull, message: m.Renew, now: float) -> None:
    self._session.reply(m.Renewed, message, lease=message.lease)


def internal(error: KvprotoError) -> Ask:
    """What a refusal says that does not say why."""
    return refusal(error) | {"code": ErrorCode.INTERNAL}


def from_its_offer(offer: m.Offer, asked: float) -> Lease:
    """A lease that counts from when its Offer came."""
    return Lease(offer, time.monotonic() + offer.lease / 1000, offer.lease / 1000)


def sink_without_keys(adapter: Any) -> None:
    """The adapter forgets its keys and the source's; its options say that TCP may go without."""
    open_, connect, plain = adapter.on_open, adapter.on_connect, toy_engine.Options
    toy_engine.Options = lambda **more: plain(insecure=True, **more)  # type: ignore[assignment,misc]
    adapter.on_open = lambda ask: open_({name: value for name, value in ask.items() if name != "keys"})
    adapter.on_connect = lambda ask: connect({name: value for name, value in ask.items() if name != "key"})


_link, _chunk = StagedLink.__init__, StagedReceiver.chunk


def granted_from_the_start(self: StagedLink, *both: Any) -> None:
    """A source that waits for no Credit."""
    _link(self, *both)
    self.granted.extend(range(self.target.slots))


def any_grant(self: StagedLink, credit: m.Credit) -> None:
    """A source that counts no slot."""
    assert credit.slots is not None
    self.granted.extend(slot for slot in credit.slots.tolist() if slot < self.target.slots)


def full_slots(self: StagedReceiver, chunk: m.Chunk) -> None:
    """A sink that takes a slot for full, whatever its Chunk says."""
    _chunk(self, attrs.evolve(chunk, bytes=self._own.slot_bytes))


def shorter(grant: m.Grant) -> tuple[m.Grants, ...]:
    """Windows that begin a token later than those of the Transfer."""
    return tuple(attrs.evolve(g, valid=g.valid - 1) if g.count else g for g in grant.grants)


def held_for_ever(held: Any) -> Any:
    """The most that it has ever said."""
    best: Ask = {"tokens": 0, "device": 0}

    def on_held(ask: Ask) -> Ask:
        return best if (found := held(ask))["tokens"] < best["tokens"] else best.update(found) or found

    return on_held


def any_rank(self: WatchEndpoint) -> dict[int, SinkCatalogue] | None:
    """The pages of one rank for those of all."""
    found = [s.part(SinkCatalogue) for s in self.sessions.values() if s.known and s.open]
    return {0: found[0]} if found and found[0].whole else None


def byte_late(adapter: Any) -> None:
    """A byte of the sink's memory changes half a second after each Drained."""
    plain = SourceTransfers._drained

    def drained(self: SourceTransfers, *args: Any, **more: Any) -> None:
        plain(self, *args, **more)
        for epoch in self._session.holder.epochs.values():
            for region in epoch.mapping.connection.mapped.values():
                Timer(0.5, lambda region=region: region.buffer.__setitem__(0, region.buffer[0] ^ 1)).start()  # type: ignore[misc]

    SourceTransfers._drained = drained  # type: ignore[method-assign]


def order_of_its_own(adapter: Any) -> None:
    """The version of the sink is checked before that of the source."""
    plain = SourceTransfers._check

    def check(self: SourceTransfers, attempt: Any, message: m.Transfer) -> None:
        if message.sink_version != self._session.described.of_sink.version:
            raise RemoteError(ErrorCode.BAD_GRANT, "sink_version", "another", str(message.sink_version))
        plain(self, attempt, message)

    SourceTransfers._check = check  # type: ignore[method-assign]


def remembers_incarnations(adapter: Any) -> None:
    greatest: dict[Any, int] = {}
    plain = SourceEndpoint._check

    def check(self: SourceEndpoint, hello: m.Hello, peer: Any, new: bool) -> None:
        if peer.incarnation < greatest.setdefault(peer.place, peer.incarnation):
            raise RemoteError(ErrorCode.SUPERSEDED, "incarnation", str(greatest[peer.place]), str(peer.incarnation))
        plain(self, hello, peer, new)
        greatest[peer.place] = peer.incarnation

    SourceEndpoint._check = check  # type: ignore[method-assign]


def welcomes_earlier_runs(adapter: Any) -> None:
    SourceEndpoint._open = lambda self, place: []  # type: ignore[method-assign]


def any_replica(adapter: Any) -> None:
    plain = tickets._check

    def check(state: Any, attempt: Any, sink: tuple[str, int]) -> None:
        plain(state, attempt, (sink[0], state.bound[1]) if state.bound else sink)

    tickets._check = check


def bound_all_the_same(self: Any, state: Any, attempt: Any, now: float, match: Any = tickets.Tickets._match) -> None:
    """A Transfer that its prompt refuses has bound the ticket."""
    before = state.bound
    match(self, state, attempt, now)
    state.bound = state.bound or before


def drained_alone(self: SinkTransfers, attempt: Any, proof: Proof) -> None:
    """What Drained says is all that is known, whatever Done has proven."""
    attempt.proof = proof
    self._session.move(attempt, "Drained")


def hears(
    kind: type[Any], handle: Callable[[Any, Any, float], None], by: Any = SourceTransfers
) -> Callable[[Any], None]:
    """Have a source, or a sink, handle a message of a transfer otherwise."""
    return has(by, "handlers", tuple((k, handle if k is kind else h) for k, h in by.handlers))


def failed_after_done(self: SinkTransfers, message: m.Failed, now: float, plain: Any = SinkTransfers._failed) -> None:
    """Failed of a transfer that is Done is acknowledged, and costs the fetch."""
    attempt = self.find(message)
    if attempt is None or attempt.done is None:
        plain(self, message, now)
        return
    self.lose(attempt, LocalError(ErrorCode.BUSY, "", "", ""))
    self._session.reply(m.DoneAck, message)


def drained_unasked(self: SinkTransfers, message: m.Drained, now: float, plain: Any = SinkTransfers._drained) -> None:
    """Drained that answers no Abort is passed over."""
    attempt = self.find(message)
    if attempt is None or attempt.abort == message.request:
        plain(self, message, now)


def accepted_by_any(self: SinkTransfers, message: m.Accepted, now: float) -> None:
    """Accepted answers the Transfer of its sequence, whatever its id."""
    attempt = self.find(message)
    if attempt is not None:
        self.mark_accepted(attempt)


def drained_early(self: SourceTransfers, message: m.Abort, now: float) -> None:
    """Abort is answered by Drained even where there can be no transfer."""
    if self._session.state == SessionState.READY:
        self._abort(message, now)
    else:
        self._drained(message)


def no_deals(cls: Any, message: Any, read: Any = descriptions.Stated.read) -> Any:
    stated = read(message)
    for i, group in enumerate(stated.geometry.groups):
        if group.cp_size > 1:
            raise PlanError(ErrorCode.ROW_MISMATCH, f"geometry.groups[{i}].cp_size", "1", str(group.cp_size), "")
    return stated


def used_first(adapter: Any) -> None:
    plain = SourceTransfers._check

    def check(self: SourceTransfers, attempt: Any, message: m.Transfer) -> None:
        if bytes(message.ticket) in self._session.tickets_of_rank._used:
            raise RemoteError(ErrorCode.TICKET_USED, "ticket", "new", "used")
        plain(self, attempt, message)

    SourceTransfers._check = check  # type: ignore[method-assign]


def done_once_computed(computed: Any) -> Any:
    def on_computed(ask: Ask) -> None:
        request, table, _ = computed.__self__.requests[ask["id"]]
        request.finish(table, handoff={"first": {"token": bytes(4)}})

    return on_computed


def prints_keys(request: Any) -> Any:
    def on_request(ask: Ask) -> None:
        print("request", ask["key"], file=sys.stderr, flush=True)
        request(ask)

    return on_request


_IDS = count(1001)
NOTHING = bytes(32)
Fault = tuple[str, Callable[[Any], None], str, str]
FAULTS: dict[str, Fault] = {
    # name: role, fault, the scenario that finds it, how its failure begins
    "page off by one": ("source", does("on_finish", page_off_by_one), "LIVE-101", "every byte"),
    "bytes one place off": ("source", does("on_fill", bytes_moved), "LIVE-101", "every byte"),
    "heads exchanged": ("source", does("on_fill", heads_exchanged), "LIVE-101", "every byte"),
    "heads exchanged in a stream": ("source", does("on_fill", heads_exchanged), "LIVE-102", "every byte"),
    "hand-off of nobody": ("source", does("on_finish", hand_off_of_nobody), "LIVE-101", "hand-off"),
    "Done before prefill": ("source", does("on_request", done_before_prefill), "LIVE-113", "not ready"),
    "another writer in Done": ("source", says(m.Done, writer=3), "LIVE-101", "writer"),
    "another number of bytes in Done": ("source", says(m.Done, bytes=lambda d: d.bytes + 1), "LIVE-101", "bytes"),
    "checksums of before": (
        "source", says(m.Done, checksums=lambda d: tuple(attrs.evolve(c, value=c.value ^ 1) for c in d.checksums)),
        "LIVE-101", "checksums",
    ),
    "another plan in Registered": ("source", says(m.Registered, plan=NOTHING), "LIVE-101", "Registered with other"),
    "a reply under another id": ("source", says(m.Pong, request=lambda p: p.request + 7), "LIVE-116", "engine: Pong"),
    "another session id": ("source", says(m.Description, session=5), "LIVE-101", "engine: Description of session"),
    "a minor of its own": ("source", another_minor, "LIVE-101", "engine: Description of minor 7"),
    "a feature that was not offered": ("source", says(m.Welcome, features=(Feature.PULL,)), "LIVE-143", "no grease"),
    "Accepted READY of nothing": ("source", says(m.Accepted, state=3), "LIVE-112", "pending"),
    "PROVEN of what goes on": (
        "source", has(SourceTransfers, "_aborted", lambda self, message: None), "LIVE-121", "engine: ",
    ),
    "Abort before Register is answered by Drained": ("source", hears(m.Abort, drained_early), "LIVE-206", "Error has not come"),
    "DoneAck is heard at any time": ("source", hears(m.DoneAck, lambda self, message, now: None), "LIVE-208", "Error has not come"),
    "an Abort that is not recorded is proven": (
        "source", has(SourceTransfers, "_drained", lambda self, message: self._session.reply(m.Drained, message, proof=Proof.PROVEN)),
        "LIVE-209", "code: BUSY",
    ),
    "a Transfer that its prompt refuses has bound the ticket": (
        "source", has(tickets.Tickets, "_match", bound_all_the_same), "LIVE-192", "Transfer was refused: TICKET_BOUND",
    ),
    "Drained takes back what Done has proven": ("sink", has(SinkTransfers, "_ended", drained_alone), "LIVE-905", "pages are free"),
    "Done that crosses an Abort is proof, whatever it says": (
        "sink", has(push, "check_outcome", lambda described, features, message: None), "LIVE-913", "a Done of another writer is refused",
    ),
    "a late Done is proof, whatever it says": (
        "sink", has(sink_endpoint, "is_right", lambda attempt, done: True), "LIVE-914", "pages are not free",
    ),
    "proof that comes over the next connection is passed over": (
        "sink", has(SinkNode, "_prove_former", lambda self, link, message: None), "LIVE-910", "pages are free",
    ),
    "Drained that nobody asked for": ("sink", hears(m.Drained, drained_unasked, SinkTransfers), "LIVE-915", "Error has not come"),
    "Failed after Done": ("sink", hears(m.Failed, failed_after_done, SinkTransfers), "LIVE-917", "refused: DoneAck"),
    "Accepted under any id": ("sink", hears(m.Accepted, accepted_by_any, SinkTransfers), "LIVE-923", "Transfer has not come"),
    "another engine in Welcome": ("source", says(m.Welcome, engine="other"), "LIVE-101", "Welcome of 'other'"),
    "no endpoint of its own in Welcome": ("source", says(m.Welcome, endpoints=lambda w: (attrs.evolve(w.endpoints[0], rank=7),)), "LIVE-101", "Welcome of"),
    "no Data is the last": ("source", says(m.Data, last=False), "LIVE-102", "Done, though"),
    "a beginning that nobody asked for": (
        "source", says(m.Done, begins=lambda d: (m.Begin(group=int(d.groups[0]), first=1),)), "LIVE-101", "begins",
    ),
    "the process of somebody else": (
        "source", says(m.Registered, process=lambda r: r.process and attrs.evolve(r.process, pid=1)), "LIVE-101", "process",
    ),
    "Registered of epoch 1": ("source", says(m.Registered, epoch=1), "LIVE-101", "Registered names"),
    "refusals that say nothing": ("source", says(m.Failed, mine="", yours=""), "LIVE-402", "mine and yours"),
    "sessions that are counted": (
        "source", has(SourceEndpoint, "_fresh", lambda self: next(_IDS)), "LIVE-171", "far apart",
    ),
    "a ticket for two sequences": ("source", has(tickets, "_check", lambda *_: None), "LIVE-172", "Failed has not come"),
    "a ticket for any replica": ("source", any_replica, "LIVE-173", "Failed has not come"),
    "incarnations that outlive their sessions": ("source", remembers_incarnations, "LIVE-174", "Hello was refused: SUPERSEDED"),
    "earlier runs beside later ones": ("source", welcomes_earlier_runs, "LIVE-174", "Refused has not come"),
    "sequences that are never over": ("source", has(SourceSession, "forget", lambda self: None), "LIVE-175", "Failed has not"),
    "Done once all is computed": ("source", does("on_computed", done_once_computed), "LIVE-176", "no Done"),
    "columns over each other": ("source", has(Overlaps, "check", lambda self, grants: None), "LIVE-177", "Failed has not come"),
    "a used ticket before its items": ("source", used_first, "LIVE-178", "code"),
    "any Credit": ("source", has(SourceInline, "grant", lambda self, credit: None), "LIVE-179", "Error has not come"),
    "keys on stderr": ("source", does("on_request", prints_keys), "LIVE-181", "no key"),
    "a byte changes late": ("source", byte_late, "LIVE-139", "memory as before"),
    "checks in another order": ("source", order_of_its_own, "LIVE-435", "code"),
    "an old sequence is served": (
        "source", has(SourceTransfers, "_check_sequence", lambda self, message: None), "LIVE-421", "Failed has not come",
    ),
    "nothing is unmapped": ("source", has(memory, "_unmap", lambda address, length, process: None), "LIVE-101", "nothing is held"),
    "a refusal by another code": ("source", says(m.Failed, code=0x0601), "LIVE-401", "code"),
    "intents are not spoken of": ("source", has(SourceIntent, "_say", lambda self, attempt, now: None), "LIVE-1001", "Progress has not"),
    "an intent cannot be given up": ("source", says(m.Drained, proof=Proof.UNPROVABLE), "LIVE-1002", "proof"),
    **{
        f"a Grant is not checked ({id})": (
            "source", has(SourceIntent, "_check", lambda self, attempt, transfer, grant: grant.grants), id, "Failed has not",
        )
        for id in ("LIVE-1003", "LIVE-1004", "LIVE-1005", "LIVE-1006", "LIVE-1007", "LIVE-1022")
    },
    "grants of both kinds, refused otherwise": ("source", says(m.Failed, code=0x0601), "LIVE-1008", "code"),
    "rows that come with the end of prefill are left out": (
        "source", has(prefill.Prefill, "reach", property(lambda self: (dict(self.tokens), dict(self.since), False))),
        "LIVE-1021", "every byte",
    ),
    "memory that was given back stays mapped": (
        "source", has(memory, "_unmap", lambda address, length, process: None), "LIVE-1031", "unmapped",
    ),
    "memory that was given back stays mapped, and nobody asks": (
        "source", has(memory, "_unmap", lambda address, length, process: None), "LIVE-1032", "unmapped",
    ),
    "memory that was given back stays mapped, under way": (
        "source", has(memory, "_unmap", lambda address, length, process: None), "LIVE-1282", "unmapped",
    ),
    "nothing is ended at once": (
        "source", has(SourceTransfers, "end_epoch", lambda self, epoch, now: None), "LIVE-1033", "Failed has not come",
    ),
    "any epoch may follow": (
        "source", has(Holder, "_may_follow", lambda self, message: True), "LIVE-1034", "Refused has not come",
    ),
    "heads exchanged by attention": ("sink", does("on_read", other_heads_read), "LIVE-301", "every byte"),
    "another prompt": ("sink", says(m.Transfer, content=NOTHING), "LIVE-301", "content digest"),
    "a version that there is not": ("sink", says(m.Transfer, sink_version=9), "LIVE-301", "Transfer with sink_version"),
    "another route digest": ("sink", says(m.Register, plan=NOTHING), "LIVE-301", "Register with plan"),
    "a writer too few": ("sink", says(m.Transfer, writers=np.array([0], np.uint32)), "LIVE-311", "Transfer with writers"),
    "begun before the last writer": ("sink", does("on_wait", arrived_too_early), "LIVE-311", "still waiting"),
    "pages free without proof": ("sink", does("on_wait", free_at_once), "LIVE-319", "pages are not free"),
    "anybody is let in": ("source", has(AllowList, "knows", lambda self, key: True), "LIVE-1042", "no word"),
    "an allow-list that is not asked": ("source", has(Allowed, "covers", lambda self, party, role: True), "LIVE-1044", "a client is welcome"),
    "a sink that takes any source": ("sink", sink_without_keys, "LIVE-1143", "no word"),
    "page off by one under keys": ("source", does("on_finish", page_off_by_one), "LIVE-1041", "every byte"),
    "heads exchanged by attention, under keys": ("sink", does("on_read", other_heads_read), "LIVE-1141", "every byte"),
    "an intent names pages at once": ("sink", does("on_fetch", named_at_once), "LIVE-1101", "items of groups"),
    "pages are never named": ("sink", has(SinkIntent, "_next", lambda self, attempt, now: None), "LIVE-1102", "Grant has not"),
    "Done before Grant is accepted": (
        "sink", has(push, "check_whole", lambda *attempt: None), "LIVE-1103", "refused",
    ),
    "pieces are granted and never the last": ("sink", says(m.Grant, grants=shorter), "LIVE-1121", "a Grant of"),
    "a pool is free when it has moved": ("sink", does("on_returned", free_when_asked), "LIVE-1131", "not free yet"),
    "page off by one in an Offer": ("source", does("on_finish", page_off_by_one), "LIVE-1051", "every byte"),
    "checksums of before in an Offer": (
        "source", says(m.Offer, checksums=lambda o: tuple(attrs.evolve(c, value=c.value ^ 1) for c in o.checksums)),
        "LIVE-1052", "checksums",
    ),
    "another writer in an Offer": ("source", says(m.Offer, writer=3), "LIVE-1053", "writer"),
    "heads exchanged by attention, which pulled": ("sink", does("on_read", other_heads_read), "LIVE-1151", "every byte"),
    "another number of bytes in Pulled": ("sink", says(m.Pulled, bytes=lambda p: p.bytes + 1), "LIVE-1152", "Pulled of"),
    "handles of memory that only the sink writes": (
        "sink", says(m.Register, regions=lambda r: tuple(
            attrs.evolve(g, handles=tuple(attrs.evolve(h, data=b"1") for h in g.handles)) for g in r.regions)),
        "LIVE-1153", "handles of memory",
    ),
    "Data that is too long for its reader": (
        "source", has(SourceInline, "messages", lambda self, said: iter([said])), "LIVE-150", "Done or Data",
    ),
    "a lease of more than was asked": ("source", says(m.Renewed, lease=lambda r: r.lease + 1), "LIVE-1061", "a lease of"),
    "pages are lent twice": ("source", does("on_wait", lent_again), "LIVE-1062", "every byte"),
    "an Offer cannot be given back": ("source", says(m.Drained, proof=Proof.UNPROVABLE), "LIVE-1063", "proof"),
    "a lease outlives its ticket": ("source", says(m.Offer, lease=60_000), "LIVE-1064", "no longer than"),
    **{
        f"any lease is renewed ({id})": (
            "source", has(SourcePull, "handlers", ((m.Pulled, SourcePull._pulled), (m.Renew, any_renewal))), id, begins,
        )
        for id, begins in (("LIVE-1063", "refused"), ("LIVE-1064", "refused"), ("LIVE-1065", "refused"))
    },
    **{
        f"a lease counts from its Offer ({id})": ("sink", has(Lease, "of", from_its_offer), id, "nothing read")
        for id in ("LIVE-1161", "LIVE-1162", "LIVE-1163")
    },
    **{
        f"an Offer is not checked ({id})": ("sink", has(SinkPull, "_check", lambda self, attempt, message: None), id, begins)
        for id, begins in (
            ("LIVE-1171", "Error or Pulled"), ("LIVE-1173", "Error or Pulled"), ("LIVE-1174", "Error or Pulled"),
            ("LIVE-1175", "Error or Pulled"), ("LIVE-1176", "refused"),
        )
    },
    **{
        f"an Offer is refused by another code ({id})": ("sink", has(endpoint, "refusal", internal), id, "refused")
        for id in ("LIVE-1172", "LIVE-1177")
    },
    "Released is heard of what was not read": (
        "sink", has(SinkPull, "handlers", (*SinkPull.handlers[:2], (m.Released, lambda self, message, now: None))), "LIVE-1164",
        "Error has not come",
    ),
    "an Offer of memory that is being mapped is refused": (
        "sink", has(Holder, "mapping", lambda self, epoch: False), "LIVE-1165", "Offer was refused",
    ),
    **{
        f"page off by one in staging slots ({id})": ("source", does("on_finish", page_off_by_one), id, "every byte")
        for id in ("LIVE-1201", "LIVE-1202", "LIVE-1203")
    },
    "slots are written that nobody granted": ("source", has(StagedLink, "__init__", granted_from_the_start), "LIVE-1204", "nothing"),
    **{
        f"any Credit will do ({id})": ("source", has(StagedLink, "grant", any_grant), id, "Error has not come")
        for id in ("LIVE-1211", "LIVE-1212")
    },
    "a Credit of bytes is taken for none": (
        "source", has(Credits, "handlers", ((m.Credit, lambda self, message, now: None),)), "LIVE-1213", "Error has not come",
    ),
    **{
        f"staging memory is not looked for ({id})": (
            "source", has(NixlTransport, "_stage", lambda self, mapped, allowed: None), id, "Refused has not come",
        )
        for id in ("LIVE-1221", "LIVE-1222")
    },
    **{
        f"heads exchanged by attention, which unpacked ({id})": ("sink", does("on_read", other_heads_read), id, "every byte")
        for id in ("LIVE-1251", "LIVE-1252", "LIVE-1253")
    },
    "every slot is taken for full": ("sink", has(StagedReceiver, "chunk", full_slots), "LIVE-1254", ""),
    **{
        f"any Chunk will do ({id})": ("sink", has(StagedReceiver, "chunk", lambda self, chunk: None), id, begins)
        for id, begins in (
            ("LIVE-1261", "Error has"), ("LIVE-1262", "Error has"), ("LIVE-1263", "Error has"), ("LIVE-1264", "Error has"),
            ("LIVE-1265", "Error has"),
        )
    },
    **{
        f"Done is the end of any stream ({id})": ("sink", has(receiver, "check_end", lambda self, id: None), id, "an early Done")
        for receiver, id in ((StagedReceiver, "LIVE-1266"), (InlineReceiver, "LIVE-827"))
    },
    "Credit when the window is used up": ("sink", has(SinkInline, "credit", last_credit), "LIVE-356", "Credit has not come"),
    "Data waits for Accepted": ("sink", has(SinkTransfers, "mark_accepted", lambda self, attempt: None), "LIVE-949", ""),
    "the last fault is named": ("sink", has(sink, "check_version", lambda terms, welcome: None), "LIVE-942", "fetch lost by"),
    "whatever cannot be read is answered": (
        "sink", has(endpoint, "read_head", lambda frame: codec.Head()), "LIVE-946", "silence",
    ),
    "a deadline that nobody keeps": (
        "sink", has(SourceLink, "give_up_late", lambda self, fetch, now: None), "LIVE-948", "Abort has not come",
    ),
    "pages that only the sink writes wait for proof": (
        "sink", has(SinkStream, "free", lambda self, attempt: attempt.proof == Proof.PROVEN), "LIVE-951", "pages are free",
    ),
    "a stream goes on after a connection broke": (
        "source", has(SourceInline, "reconnected", lambda self: None), "LIVE-151", "Failed has not come",
    ),
    "bytes count on after a connection broke": ("sink", has(SinkInline, "reconnected", lambda self: None), "LIVE-828", "from 0"),
    "Credit while the session is resumed": ("sink", has(SinkSession, "resuming", False), "LIVE-828", "no Credit"),
    "a Kept counts whatever its number": (
        "sink", has(SinkCatalogue, "_again", lambda self, now: None), "LIVE-1416", "Watch has not come",
    ),
    "what a source had before it ended": ("sink", does("on_held", held_for_ever), "LIVE-1426", "{'tokens': 48"),
    "the pages of one rank for those of all": ("sink", has(WatchEndpoint, "known", any_rank), "LIVE-1429", "{'tokens': 80"),
    "a piece counts whatever it says": ("sink", has(core.Session, "give_up", lambda self, error: None), "LIVE-1422", "Goodbye has"),
    "deals that are not planned are refused as rows": (
        "source", has(descriptions.Stated, "read", classmethod(no_deals)), "LIVE-164", "ROW_MISMATCH at",
    ),
    "a pool is free without proof": ("sink", does("on_returned", free_when_asked), "LIVE-1132", "not free"),
}  # fmt: skip


def found(name: str) -> Result:
    """What the scenario that is to find a fault says of it."""
    chosen = [scenario for scenario in list_scenarios() if scenario.id == FAULTS[name][2]]
    (result,) = run([sys.executable, __file__, name], chosen)
    return result


def main() -> int:
    """Serve as the adapter with a fault, or look for all of them."""
    if len(sys.argv) > 1:
        role, plant, *_ = FAULTS[sys.argv[1]]
        engine = Prefill() if role == "source" else Decode()
        plant(engine)
        serve(engine)
        return 0
    missed = 0
    for name, (_, _, id, begins) in FAULTS.items():
        result = found(name)
        good = result.status == "fail" and result.text.startswith(begins)
        missed += not good
        print(
            f"{'found ' if good else 'MISSED'} {name}: {id} {result.status} {result.clause} {result.text[:100]}",
            flush=True,
        )
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
