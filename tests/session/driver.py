"""A source and sinks whose frames pass through plain lists; time is a number."""

import secrets
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Self

import attrs
import numpy as np

from kvproto import Pool
from kvproto.copying.grants import items_needed
from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import Connected
from kvproto.planning.geometry import Geometry, Group, Rank, facts, gqa, handoff, mla, owns
from kvproto.planning.kinds import NO_AXES
from kvproto.session import Exposed, Party, Registration, SinkEndpoint, SourceEndpoint
from kvproto.session.descriptions import Described
from kvproto.session.records import Answer, SinkAttempt, SinkTransfer, SourceAttempt
from kvproto.session.sink import SinkSession
from kvproto.session.source import SourceSession
from kvproto.session.tickets import TicketState
from kvproto.wire import decode, encode
from kvproto.wire.enums import DType, ErrorCode, Feature, ItemKind, Outcome, Proof, Transport
from kvproto.wire.messages import Done, Error, Grants, HandOff, Offer, Register, Ticket, Transfer
from tests.pools import allocate, memory

PAGES = 8
Event = Any
"""An event of `kvproto.events`, or a call that an endpoint has made on its rank."""
Filter = Callable[[str, bytes], int]
"""How often a frame arrives at its address."""


def geometry(
    tp: int, dtype: DType = DType.F32, weights: str = "a", groups: tuple[Group, ...] | None = None
) -> Geometry:
    """MLA target of 3 layers, GQA draft of 1 layer and 2 heads, first token."""
    made = groups or (
        mla(0, "target", 0, 40, 4, dtype),
        gqa(1, "draft", 1, 2, 16, 4, dtype),
        handoff(2, "first token", {"token": (DType.U32, 4)}),
    )
    ranks = []
    for r in range(tp):
        heads = (r * 2 // tp, max(r * 2 // tp + 1, (r + 1) * 2 // tp))
        ranks.append(Rank(rank=r, owns=(owns(made[0], range(3)), owns(made[1], [0], [heads]), owns(made[2], [0]))))
    return Geometry(replica=0, facts=facts({"weights": weights}), groups=made, ranks=tuple(ranks))


def without_draft(tp: int = 1) -> Geometry:
    """The draft is unloaded."""
    whole = geometry(tp)
    ranks = tuple(attrs.evolve(r, owns=tuple(o for o in r.owns if o.group != 1)) for r in whole.ranks)
    return attrs.evolve(whole, groups=tuple(g for g in whole.groups if g.id != 1), ranks=ranks)


def ticket(deadline: float = 60.0) -> Ticket:
    return Ticket(key=secrets.token_bytes(16), engine="p", replica=0, deadline=int(deadline * 1000))


@attrs.frozen
class Ready:
    """A sink may start transfers."""


@attrs.frozen
class MemoryAsked:
    """A sink is to map memory of a source."""

    session: SinkSession
    register: Register


@attrs.frozen
class MemoryUnwanted:
    """A sink is to unmap memory of a source."""

    session: SinkSession
    epoch: int


@attrs.frozen
class Useful:
    transfer: SinkTransfer
    tokens: int | None


@attrs.frozen
class Offered:
    attempt: SinkAttempt
    offer: Offer


@attrs.frozen
class Arrived:
    transfer: SinkTransfer
    done: tuple[Done, ...]
    seconds: float


@attrs.frozen
class Lost:
    transfer: SinkTransfer
    error: KvprotoError
    proof: Proof


@attrs.frozen
class Proven:
    transfer: SinkTransfer


@attrs.frozen
class SinkRecorder:
    """Writes down what a sink's endpoint calls."""

    told: Callable[[Any], None]

    def needs_turn(self) -> None: ...

    def report(self, event: Event) -> None:
        self.told(event)

    def planned(self, event: Connected) -> None:
        self.told(event)

    def ready(self) -> None:
        self.told(Ready())

    def map_memory(self, session: SinkSession, register: Register, described: Described) -> None:
        self.told(MemoryAsked(session, register))

    def attest(self, attestation: bytes, holds: bool) -> None:
        """Ranks of this process are not asked for attestations."""

    def unmap_memory(self, session: SinkSession, epoch: int) -> None:
        self.told(MemoryUnwanted(session, epoch))

    def useful(self, transfer: SinkTransfer) -> None:
        self.told(Useful(transfer, transfer.useful))

    def offered(self, attempt: SinkAttempt) -> None:
        assert attempt.lease is not None
        self.told(Offered(attempt, attempt.lease.offer))

    def arrived(self, transfer: SinkTransfer, done: tuple[Done, ...], seconds: float) -> None:
        self.told(Arrived(transfer, done, seconds))

    def lost(self, transfer: SinkTransfer, proof: Proof) -> None:
        assert transfer.error is not None
        self.told(Lost(transfer, transfer.error, proof))

    def proven(self, transfer: SinkTransfer) -> None:
        self.told(Proven(transfer))


@attrs.frozen
class RegisterAsked:
    """The peer has registered memory."""

    session: int
    register: Register = attrs.field(repr=False)
    described: Described = attrs.field(repr=False)


@attrs.frozen
class UnmapAsked:
    """The peer wants an epoch back, and nothing uses it."""

    session: int
    epoch: int


@attrs.frozen
class TransferRequested:
    """A source is to copy the rows of a transfer, which `of` names, as its session knows it."""

    key: bytes
    session: int
    transfer: Transfer
    whole: bool
    end: int | None
    of: SourceAttempt


@attrs.frozen
class Changed:
    """Something about the request of this ticket has changed."""

    key: bytes


@attrs.frozen
class Fetched:
    """A sink rank has read what it was offered."""

    session: int
    sequence: int
    bytes: int


@attrs.frozen
class Released:
    """No sink rank needs the request of this ticket any more."""

    key: bytes
    routed: tuple[int, ...]
    lost: Mapping[int, KvprotoError]


@attrs.frozen
class Expired:
    """The deadline of this ticket has passed."""

    key: bytes


def requested(of: SourceAttempt) -> TransferRequested:
    """What a source is to copy now: the Transfer with what is granted so far."""
    transfer = attrs.evolve(of.asked, grants=of.granted)
    return TransferRequested(bytes(transfer.ticket), of.session.session, transfer, of.whole, of.end, of)


class Calls:
    """A source rank that only records the calls of its endpoint; its requests are keys of tickets."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def report(self, event: Any) -> None:
        self.told.append(event)

    def map_memory(self, session: SourceSession, register: Register, described: Described) -> None:
        self.told.append(RegisterAsked(session.session, register, described))

    def attest(self, attestation: bytes, holds: bool) -> None:
        """Ranks of this process are not asked for attestations."""

    def unmap_memory(self, session: SourceSession, epoch: int) -> None:
        self.told.append(UnmapAsked(session.session, epoch))

    def request_changed(self, request: bytes) -> None:
        self.told.append(Changed(request))

    def transfer_due(self, attempt: SourceAttempt) -> None:
        self.told.append(requested(attempt))

    def request_released(self, request: bytes, routed: tuple[int, ...], lost: Mapping[int, KvprotoError]) -> None:
        self.told.append(Released(request, routed, lost))

    def request_expired(self, request: bytes) -> None:
        self.told.append(Expired(request))

    def transfer_read(self, attempt: SourceAttempt, count: int) -> None:
        self.told.append(Fetched(attempt.session.session, attempt.sequence, count))


class DrivenSource(SourceEndpoint):
    """A source endpoint that tests drive by keys of tickets, and by what its calls have recorded."""

    def __init__(self, *about: Any, **more: Any) -> None:
        self.calls, self.states = Calls(), dict[bytes, TicketState]()
        super().__init__(self.calls, *about, **more)

    def take_events(self) -> list[Any]:
        told, self.calls.told = self.calls.told, []
        return told

    def expect(self, made: Ticket, content: bytes, now: float, tokens: int | None = None, axes: Any = NO_AXES) -> None:
        key = bytes(made.key)
        self.states[key] = self.tickets.expect(made, key, content, now, tokens, axes)
        self._after(now)

    def finish(self, key: bytes) -> None:
        if key in self.states:
            self.tickets.finish(self.states[key])

    def prefill(self, made: Ticket, content: bytes, now: float, tokens: int | None = None) -> None:
        """A request whose prefill is over."""
        self.expect(made, content, now, tokens)
        self.finish(bytes(made.key))

    def hold(self, key: bytes, since: Mapping[int, int], now: float) -> None:
        self.tickets.hold(self.states[key], since, now)

    def refuse(self, key: bytes, error: KvprotoError, now: float) -> None:
        self.tickets.refuse(self.states[key], error, now)
        self._after(now)

    def asking(self, key: bytes) -> list[TransferRequested]:
        """The transfers that wait for a request."""
        return [requested(attempt) for attempt in self.states[key].asking()] if key in self.states else []

    @staticmethod
    def active(event: TransferRequested) -> bool:
        return event.of.wanted

    @staticmethod
    def copying(event: TransferRequested) -> None:
        event.of.copying = True

    def progress(self, event: TransferRequested, tokens: int, now: float) -> None:
        super().progress(event.of, tokens, now)

    def stream(self, event: TransferRequested, piece: Any, begins: Any = ()) -> None:
        super().stream(event.of, piece, begins)

    def done(self, event: TransferRequested, now: float, written: int, *answer: Any) -> None:
        super().done(event.of, written, Answer(*answer), now)

    def offer(self, event: TransferRequested, now: float, lease: float, offered: Any, *answer: Any) -> None:
        super().offer(event.of, lease, offered, Answer(*answer), now)

    def failed(self, event: Any, error: KvprotoError, now: float, proof: Proof = Proof.PROVEN) -> None:
        super().failed(event.of if isinstance(event, TransferRequested) else event, error, now, proof)


class World:
    """One source replica, any number of sink ranks, and what they said."""

    features: tuple[Feature, ...] = (Feature.VERIFY,)

    def __init__(self, source: Geometry) -> None:
        self.now, self.runs = 0.0, 0
        self.sources: dict[str, DrivenSource] = {}
        addresses = {r.rank: f"s{r.rank}" for r in source.ranks}
        for rank, address in addresses.items():
            party = Party("p", 0, rank, 100 + rank)
            self.sources[address] = DrivenSource(
                party, source, addresses, self.features, count(1000 * (rank + 1)).__next__
            )
        self.sinks: dict[str, SinkEndpoint] = {}
        self.pools: dict[str, Pool] = {}
        self.told: dict[str, list[Event]] = {a: [] for a in self.sources}
        self.keep: Filter = lambda to, frame: True

    def sink(self, name: str, sink: Geometry, rank: int = 0, engine: str = "d") -> SinkEndpoint:
        pool = allocate(sink, rank, {g.id: PAGES for g in sink.groups})
        self.runs += 1  # a later sink of a rank has the greater incarnation
        party = Party(engine, sink.replica, rank, self.runs)
        columns = tuple(pool.layout.columns.values())
        self.pools[name], self.told[name] = pool, []
        recorder = SinkRecorder(lambda event: self.told[name].append(event))
        self.sinks[name] = endpoint = SinkEndpoint(party, sink, self.features, "s0", recorder)
        endpoint.expose(Exposed(1, columns, self.staging(name, pool)), self.now)
        endpoint.dial(self.now)
        return endpoint

    def ready(self, sink_tp: int = 1) -> Self:
        """With so many sink ranks that are registered everywhere."""
        for rank in range(sink_tp):
            self.sink(f"d{rank}", geometry(sink_tp), rank)
        self.run()
        assert all(s.ready for s in self.sinks.values())
        return self

    def staging(self, name: str, pool: Pool) -> Any:
        """What a sink registers with a source rank."""
        return lambda rank: Registration((memory(pool).region,))

    def accept(self, address: str, session: int) -> None:
        """A source maps memory."""
        self.sources[address].sessions[session].accept_register(Transport.SHM)

    def unmap(self, address: str, event: UnmapAsked) -> None:
        """A source gives memory back."""
        self.sources[address].sessions[event.session].holder.unmapped(event.epoch)

    def run(self) -> None:
        """Pass frames until nobody has any."""
        moved = True
        while moved:
            moved = False
            for name, sink in self.sinks.items():
                for address, frame in sink.to_send(self.now):
                    moved = True
                    known = str(address) in self.sources
                    for _ in range(self.keep(str(address), frame) if known else 0):
                        self.sources[str(address)].receive(name, frame, self.now)
            for address, source in self.sources.items():
                for event in source.take_events():
                    if isinstance(event, RegisterAsked):
                        self.accept(address, event.session)
                        moved = True
                    elif isinstance(event, UnmapAsked):
                        self.unmap(address, event)
                        moved = True
                    self.told[address].append(event)
                for conn, frame in source.to_send(self.now):
                    moved = True
                    for _ in range(self.keep(str(conn), frame)):
                        self.sinks[str(conn)].receive(address, frame, self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for endpoint in (*self.sources.values(), *self.sinks.values()):
            endpoint.on_time(self.now)
        self.run()

    def transfer(self, name: str, made: Ticket, content: bytes, tokens: int = 6) -> SinkTransfer:
        return self.sinks[name].transfer(bytes(made.key), content, grants(self.pools[name], tokens), self.now)

    def fetch(self, name: str, made: Ticket, content: bytes, tokens: int = 6) -> SinkTransfer:
        """A transfer that every source has heard of."""
        begun = self.transfer(name, made, content, tokens)
        self.run()
        return begun

    def prefill(self, made: Ticket, content: bytes) -> None:
        """Every source has the request and has computed it."""
        for source in self.sources.values():
            source.prefill(made, content, self.now)

    def abort(self, name: str, transfer: SinkTransfer) -> None:
        self.sinks[name].abort(transfer, RemoteError(ErrorCode.ABORTED, "", "", ""), self.now)
        self.run()

    def join(self, name: str, sink: Geometry, rank: int = 0, engine: str = "d") -> SinkEndpoint:
        """A sink that has said all that it says before its first transfer."""
        joined = self.sink(name, sink, rank, engine)
        self.run()
        return joined

    def hears(self, name: str, message: Any, address: str = "s0") -> None:
        """Give a sink a message of a source, and pass on what follows."""
        self.sinks[name].receive(address, encode(message), self.now)
        self.run()

    def lost(self, name: str = "d0") -> list[tuple[ErrorCode, Proof]]:
        """How the transfers of a sink were lost."""
        return [(event.error.code, event.proof) for event in self.events(name, "Lost")]

    def done(self, address: str, event: TransferRequested, **changes: Any) -> None:
        """Say that the bytes are there."""
        said: dict[str, Any] = {
            "handoff": self.handoff(address, event.session),
            "checksums": (),
            "begins": (),
            **changes,
        }
        source = self.sources[address]
        source.done(event, self.now, 1, Outcome.CONTINUE, said["handoff"], said["checksums"], said["begins"])

    def handoff(self, address: str, session: int) -> tuple[HandOff, ...]:
        """The first token, where this source rank sends it."""
        described = self.sources[address].sessions[session].described
        kinds = {g.id: g.kind for g in described.sink.groups}
        return tuple(HandOff(group=g, data=b"toke") for g in described.groups if kinds[g] == ItemKind.HANDOFF)

    def serve(self, address: str = "s0") -> None:
        """Answer every TransferRequested as if the bytes were there."""
        self.run()
        for event in self.events(address, "TransferRequested"):
            if self.sources[address].active(event):
                self.done(address, event)
        self.run()

    def go_on(self) -> None:
        """Answer whatever is asked."""
        for address in self.sources:
            self.serve(address)

    def events(self, name: str, kind: str) -> list[Any]:
        return [e for e in self.told[name] if type(e).__name__ == kind]


class Hearing(World):
    """One that keeps what was said, by its receiver."""

    def __init__(self, source: Geometry) -> None:
        super().__init__(source)
        self.heard: list[tuple[str, Any]] = []
        self.keep = self.hear

    def hear(self, to: str, frame: bytes) -> int:
        self.heard.append((to, decode(frame)))
        return 1

    def of(self, kind: type, to: str | None = None) -> list[Any]:
        return [m for t, m in self.heard if isinstance(m, kind) and to in (None, t)]

    def errors(self, to: str = "s0") -> list[tuple[ErrorCode, int | None]]:
        return [(error.code, error.about) for error in self.of(Error, to)]

    def from_sink(self, message: Any, name: str = "d0") -> None:
        """Give the source a message of a sink."""
        self.sources["s0"].receive(name, encode(message), self.now)
        self.run()


class EpochWorld(World):
    """One whose sessions have EPOCHS; a sink's pools are numbered as they come."""

    features = (Feature.VERIFY, Feature.EPOCHS)

    def another(self, name: str, caches: Geometry | None = None) -> Exposed:
        """Another pool of a sink, which later transfers of it name items of."""
        sink = self.sinks[name]
        caches = caches or sink.geometry
        made = allocate(caches, sink.me.rank, {g.id: PAGES for g in caches.groups})
        self.pools[name] = made
        self.runs += 1
        return Exposed(self.runs, tuple(made.layout.columns.values()), self.staging(name, made))


def grants(pool: Pool, tokens: int) -> dict[int, Grants]:
    found = {}
    for group in pool.layout.geometry.groups:
        count = 0 if group.kind == ItemKind.HANDOFF else tokens
        items = np.arange(items_needed(group, 0, 0, count), dtype=np.uint32)
        found[group.id] = Grants(group=group.id, first=0, count=count, valid=count, items=items)
    return found
