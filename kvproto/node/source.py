"""A source rank: it expects tickets, copies finished requests into the sinks' memory, and says when they are free."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import attrs

from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, Side
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.net import Listener
from kvproto.node.offering import LEASE, NOTHING, offered
from kvproto.node.parts import Handed, Part
from kvproto.node.pool import Pool
from kvproto.node.request import Computed, Finished, Request, asked, check
from kvproto.node.ways import Way, reach
from kvproto.planning.geometry import Geometry
from kvproto.session import Party, SourceEndpoint
from kvproto.session.events import Event, Expired, Fetched, RegisterAsked, Released, TransferRequested
from kvproto.session.source import SourceSession
from kvproto.session.table import SessionState
from kvproto.transport import default
from kvproto.transport.base import Copying, Layer, Move, Stream, Transport
from kvproto.transport.process import this_process
from kvproto.wire.enums import ErrorCode, Feature, Proof
from kvproto.wire.messages import Checksum, HandOff, Region, Ticket

__all__ = ["PART", "Sent", "SourceNode"]

PART = 16 << 20
"""Bytes from which on a part of a request is worth a launch of its own."""
_GONE = RemoteError(ErrorCode.ABORTED, "", "the transfer is over", "")
_LATE = RemoteError(ErrorCode.DEADLINE, "ticket", "not fetched in time", "", "make a new ticket")


@attrs.frozen
class Sent:
    """A copy that this rank made, or a sink rank of what this one offered."""

    key: bytes = attrs.field(repr=False)
    sink: int
    bytes: dict[int, int]
    """By the sink's group id."""
    seconds: float
    """Of what was left when prefill was over."""
    left: int
    """Bytes of that."""


@attrs.define(eq=False)
class _Attempt:
    """One attempt of a transfer, from its first part to its answer."""

    serve: TransferRequested
    way: Way
    program: CopyProgram | None = None
    handed: Handed | None = None
    stream: Stream | None = None
    """That has begun before all rows were there."""
    allowed: set[Layer] = attrs.Factory(set)
    """Layers that it was told of."""
    seen: tuple[int, dict[int, int]] = (0, {})
    """The news, and the tokens of each model in the program."""
    under_way: int = 0
    last: bool = False
    """Whether all of it was handed over."""
    began: float = 0.0
    """With the last part, of ..."""
    left: int = 0
    """... so many bytes."""
    bytes: dict[int, int] = attrs.Factory(dict)
    """In all, by the sink's group id."""
    handoff: tuple[HandOff, ...] = ()
    error: KvprotoError | None = None
    proof: Proof = Proof.PROVEN


@attrs.define(eq=False)
class _Running:
    """A launch, and the attempts that it serves."""

    served: list[_Attempt]
    copying: Copying
    error: KvprotoError | None = None
    """Why it is being stopped."""


class SourceNode:
    """Everything that a prefill rank needs of kvproto; call `poll` often."""

    def __init__(
        self,
        party: Party,
        geometry: Geometry,
        pool: Pool,
        listener: Listener,
        endpoints: dict[int, str],
        verify: bool = True,
        movers: Sequence[Transport] = (),
        part: int = PART,
        pull: bool = False,
        lease: float = LEASE,
        late: float | None = None,
    ) -> None:
        """`movers` are the transports that may be used, in the sink's order; by default the one that suits the pool.

        What is computed is copied in parts of at least `part` bytes to each sink, but for the last; the first of them
        when it is `late` times what is to come (None: as suits the link), later ones when they are as much as that
        (`late` times, where it is less than 1; 0: as soon as they are there). Raises OUT_OF_RANGE for another `late`.
        With `pull` sinks that offer that too read, each for `lease` seconds, or longer if they ask (feature PULL).
        """
        if late is not None and not late >= 0:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "late", "0 at least", str(late))
        self.movers = {m.capabilities.code: m for m in movers or (default(pool.memories),)}
        features: tuple[Feature, ...] = (Feature.VERIFY,) if verify else ()
        features += tuple({f for m in movers for f in m.capabilities.features})
        features += (Feature.PULL,) if pull else ()
        self._lease = lease
        self._offers: list[tuple[TransferRequested, CopyProgram, float]] = []
        """What sinks may read, and since when."""
        self.pool, self._listener = pool, listener
        self.endpoint = SourceEndpoint(party, geometry, endpoints, features, secrets.randbits(62) | 1, this_process())
        self._part, self._late = part, late
        self._held_back: dict[bytes, Expired | Released] = {}
        """Of requests that are over while a copy still reads their items."""
        self._requests: dict[bytes, Request] = {}
        self._attempts: dict[tuple[int, int, int], _Attempt] = {}
        """By session, sequence and attempt."""
        self._running: list[_Running] = []
        self._ways: dict[int, Way] = {}

    def expect(self, ticket: Ticket, content: bytes) -> None:
        """The request of this ticket is here."""
        self.endpoint.expect(ticket, content, time.monotonic())

    def computed(self, key: bytes, computed: Computed) -> None:
        """Some rows are there: `poll` copies them to whoever asks, in parts, each once.

        Through staging slots layers go in their order, each once all tokens that a sink asked for are there, and
        none before all items are named: behind the last chunk of a prompt. Direct writes over NIXL go at the end.
        Items stay as they are until Released or Expired, or after `refuse` until nothing `reads` them.
        """
        self._requests.setdefault(key, Request()).add(computed)

    def finish(self, key: bytes, finished: Finished) -> None:
        """TransferRequested whoever asks for this request; its items stay as they are until Released or Expired."""
        self._requests.setdefault(key, Request()).finished = finished
        self.endpoint.finish(key)

    def refuse(self, key: bytes, error: KvprotoError) -> None:
        """This request cannot be produced; items of a Computed are free once nothing `reads` them."""
        self.endpoint.refuse(key, error, time.monotonic())

    def poll(self) -> list[Event | Sent]:
        """Receive, copy, answer; returns what the engine should know."""
        told = self._complete() if self._running else []  # a sink may wait for it
        now = time.monotonic()
        for conn, frame in self._listener.receive():
            self.endpoint.receive(conn, frame, now)
        self.endpoint.on_time(now)
        while True:
            for event in self.endpoint.take_events():
                if isinstance(event, RegisterAsked):
                    self._map(event)
                elif isinstance(event, TransferRequested):
                    self._join(event)
                elif isinstance(event, Expired | Released):
                    self._held_back[event.key] = event
                elif isinstance(event, Fetched):
                    told += self._fetched(event)
                else:
                    told.append(event)
            self._move()
            moved = self._complete() + self._over()
            self._unmap()
            self._flush()
            if not moved:
                return told
            told += moved

    @property
    def busy(self) -> bool:
        """Whether copies are under way, so that `poll` has something to find out soon."""
        return bool(self._running) or any(self._due(attempt) for attempt in self._attempts.values())

    def reads(self, key: bytes) -> bool:
        """Whether a copy still reads the items of this request."""
        return any(attempt.serve.key == key for running in self._running for attempt in running.served)

    def _unmap(self) -> None:
        """Let go of the memory of sessions that are over, once no copy uses it."""
        used = {number for number, _, _ in self._attempts}
        for number in [n for n in self._ways if n not in self.endpoint.sessions and n not in used]:
            self._ways.pop(number).close()

    def _flush(self) -> None:
        for conn, frame in self.endpoint.to_send(time.monotonic()):
            self._listener.send(conn, frame)

    def _map(self, event: RegisterAsked) -> None:
        """Take the first transport of the sink's that works here."""
        session = self.endpoint.sessions.get(event.session)
        if session is None or session.state != SessionState.REGISTERING:  # it has said Goodbye meanwhile
            return
        try:
            pair = self._pair(session, event)
        except KvprotoError as error:
            session.refuse_register(error)
            return
        if session.pulls:
            # nothing is mapped here; a launch of nothing waits for the rows
            mover = next((m for m in self.movers.values() if m.capabilities.reads), None) or default(self.pool.memories)
            session.accept_register(mover.capabilities.code)
            session.expose(self._readable(mover, pair), tuple(self.pool.side.columns.values()), time.monotonic())
            self._ways[event.session] = Way(event, mover, pair)
            return
        try:
            staged = Feature.STAGED in session.features
            way = reach(event, self.movers, pair, self.pool.memories, writes=True, staged=staged)
        except KvprotoError as error:
            session.refuse_register(error)
            return
        self._ways[event.session] = way
        process = self.endpoint.process if way.mover.capabilities.death_is_proof else None
        session.accept_register(way.mover.capabilities.code, way.connection.link, process)

    def _readable(self, mover: Transport, pair: Pair) -> tuple[Region, ...]:
        """This rank's regions for a sink that reads."""
        exposed = mover.expose(self.pool.memories, max(self.pool.memories) + 1, pair.nothing, pair.nothing.runs)
        regions = {id: m.region for id, m in self.pool.memories.items()}
        return (*(attrs.evolve(r, id=i, handles=exposed.handles[i]) for i, r in regions.items()), *exposed.regions)

    def _pair(self, session: SourceSession, event: RegisterAsked) -> Pair:
        sink = Side(session.sink, session.peer.rank, {c.group: c for c in event.register.columns})
        return Pair(session.plan.between(self.pool.side.rank, session.peer.rank), self.pool.side, sink)

    def _wanted(self, serve: TransferRequested) -> bool:
        return self.endpoint.active(serve) and serve.key not in self._held_back

    def _join(self, serve: TransferRequested) -> None:
        """Somebody asks."""
        key = (serve.session, serve.transfer.sequence, serve.transfer.attempt)
        if key not in self._attempts:
            self._attempts[key] = _Attempt(serve, self._ways[serve.session])

    def _due(self, attempt: _Attempt) -> bool:
        """Whether its last part waits to be handed over."""
        request = self._requests.get(attempt.serve.key)
        return request is not None and request.finished is not None and not attempt.last

    def _move(self) -> None:
        """Start copies for all sinks that have asked and can be served: one launch where that is better."""
        for key, request in self._requests.items():
            if request.finished is None:
                for serve in self.endpoint.asking(key):
                    self._join(serve)
        batches: dict[int, list[tuple[_Attempt, list[Part]]]] = {}
        for attempt in self._attempts.values():
            if attempt.last or attempt.error is not None or not self._wanted(attempt.serve):
                continue
            parts = self._parts(attempt)
            if parts:
                mover = attempt.way.mover
                batches.setdefault(id(mover if mover.capabilities.batches else attempt), []).append((attempt, parts))
        for batch in batches.values():
            self._start(batch)

    def _parts(self, attempt: _Attempt) -> list[Part]:
        """What to hand over now, if anything."""
        request = self._requests.get(attempt.serve.key)
        if request is None:
            attempt.error = _GONE
            return []
        finished, pulls = request.finished, self.endpoint.sessions[attempt.serve.session].pulls
        staged = attempt.way.staged
        early = attempt.way.mover.capabilities.incremental or staged
        if finished is None and (attempt.seen[0] == request.news or pulls or not early):
            return []
        if attempt.stream is not None:
            self._grow(attempt.stream, attempt, request)
            return []
        if finished is None and not staged and not self._worth(attempt, request):
            attempt.seen = request.news, attempt.seen[1]
            return []
        try:
            if finished is not None or attempt.program is None or attempt.seen[1] != request.tokens:
                attempt.program = request.program(attempt.way.pair, attempt.serve.transfer.grants, whole=staged)
        except KvprotoError as error:
            # before the end, an error may be that of an item or token which is not there yet
            attempt.error = error if finished is not None else None
            attempt.seen = request.news, {}
            return []
        program = attempt.program
        if finished is not None:
            after = finished.events
            whole = [Part(NOTHING, None, after, 0) if pulls else Part(program, None, after, program.bytes)]
            return attempt.handed.last(program, after) if attempt.handed and attempt.handed.begun else whole
        attempt.seen = request.news, dict(request.tokens)
        if staged:
            return [Part(program, None, (), program.bytes, grows=True)]
        assert attempt.handed is not None
        parts = attempt.handed.next(program, request.there)
        return parts if sum(p.bytes for p in parts) >= self._part else []

    def _worth(self, attempt: _Attempt, request: Request) -> bool:
        """Whether a part should go now."""
        pair, mover = attempt.way.pair, attempt.way.mover
        attempt.handed = attempt.handed or Handed(pair.nothing)
        late = mover.capabilities.first_part_ratio if self._late is None else self._late
        return attempt.handed.due(request.there, asked(pair, attempt.serve.transfer.grants), late)

    def _start(self, batch: list[tuple[_Attempt, list[Part]]]) -> None:
        here = self.pool.memories
        moves = []
        for a, parts in batch:
            background = self._requests[a.serve.key].finished is None
            there = a.way.connection.mapped
            moves += [Move(p.program, here, there, p.after, p.layers, p.grows, background) for p in parts]
        try:
            copying = batch[0][0].way.mover.start(moves)
        except KvprotoError as error:
            for attempt, _ in batch:
                attempt.error = None if error.code == ErrorCode.BUSY else error
                attempt.seen = 0, attempt.seen[1]
            return
        now = time.monotonic()
        for attempt, parts in batch:
            request = self._requests[attempt.serve.key]
            self.endpoint.copying(attempt.serve)
            attempt.under_way += 1
            if request.finished is not None:
                attempt.last, attempt.began, attempt.left = True, now, sum(p.bytes for p in parts)
                self._prepare(attempt, request.finished)
            elif copying.stream is not None:
                attempt.stream = copying.stream
                self._grow(copying.stream, attempt, request)
            elif attempt.handed is not None:
                attempt.handed.advance(request.there)
        self._running.append(_Running([attempt for attempt, _ in batch], copying))

    def _grow(self, stream: Stream, attempt: _Attempt, request: Request) -> None:
        """More layers of a stream that has begun are there, or all of it."""
        finished = request.finished
        if finished is None:
            attempt.seen = request.news, attempt.seen[1]
            complete = request.complete(attempt.way.pair, attempt.serve.transfer.grants)
            new = complete.keys() - attempt.allowed
            attempt.allowed |= new
            stream.mark_ready(attempt.allowed.copy(), sorted({event for layer in new for event in complete[layer]}))
            return
        attempt.last, attempt.began, attempt.left = True, time.monotonic(), stream.left
        try:
            for grant in attempt.serve.transfer.grants:
                check(grant, finished.tokens)
        except KvprotoError as error:
            attempt.error = error
            for running in self._running:
                if attempt in running.served:
                    running.error = error
            return
        stream.mark_ready(None, finished.events)
        self._prepare(attempt, finished)

    def _prepare(self, attempt: _Attempt, finished: Finished) -> None:
        """What will be said once the bytes are there, while they are on their way."""
        if attempt.program is not None:
            attempt.bytes = attempt.program.bytes_by_group()
            attempt.handoff = finished.handoffs(attempt.way.pair)

    def _complete(self) -> list[Event | Sent]:
        """Answer transfers whose bytes are at their destination; stop what nobody wants."""
        for running in list(self._running):
            proof = Proof.PROVEN if running.error is None and self._go_on(running) else None
            if running.error is not None:
                proof = running.copying.stop()
            if proof is not None:
                self._running.remove(running)
                for attempt in running.served:
                    attempt.under_way -= 1
                    attempt.error = attempt.error or running.error
                    attempt.proof = attempt.proof if proof == Proof.PROVEN else proof
        told: list[Event | Sent] = []
        for key, attempt in list(self._attempts.items()):
            wanted = self._wanted(attempt.serve)
            if not attempt.under_way and (attempt.last or attempt.error is not None or not wanted):
                del self._attempts[key]
                told += self._answer(attempt)
        return told

    def _go_on(self, running: _Running) -> bool:
        """Whether every byte is there."""
        serves = [attempt.serve for attempt in running.served]
        if not any(self._wanted(serve) for serve in serves):
            running.error = _LATE if any(self.endpoint.active(serve) for serve in serves) else _GONE
            return False
        done = False
        try:
            done = running.copying.done
        except KvprotoError as error:
            running.error = error
        if running.copying.stream is not None:
            for piece in running.copying.stream.take():
                self.endpoint.chunk(serves[0], piece)
        return done

    def _over(self) -> list[Event | Sent]:
        """Tell of requests that are over, once no copy reads their items."""
        return [self._held_back.pop(key) for key in list(self._held_back) if not self.reads(key)]

    def _answer(self, attempt: _Attempt) -> list[Event | Sent]:
        """Done or Failed, now that no part is under way."""
        serve, program = attempt.serve, attempt.program
        session, now = self.endpoint.sessions.get(serve.session), time.monotonic()
        request = self._requests.get(serve.key)
        finished = request.finished if request is not None else None
        error = attempt.error
        if error is None and not (attempt.last and self._wanted(serve)):
            error = _LATE if serve.key in self._held_back else _GONE
        if error is not None or session is None or finished is None or program is None:
            self.endpoint.failed(serve, error or _GONE, now, attempt.proof)
            return []
        sums = None
        if Feature.VERIFY in session.features:
            found = attempt.way.mover.checksums(program, self.pool.memories, sink=False)
            sums = tuple(Checksum(group=g, value=v) for g, v in sorted(found.items()))
        if session.pulls:
            routes = session.plan.between(self.pool.side.rank, session.peer.rank)
            grants = offered(routes, self.pool.side, serve.transfer.grants, finished.items)
            self.endpoint.offer(serve, now, self._lease, grants, finished.outcome, attempt.handoff, sums)
            self._offers = [each for each in self._offers if self.endpoint.offered(each[0])]
            self._offers.append((serve, program, now))
            return []
        self.endpoint.done(serve, now, program.bytes, finished.outcome, attempt.handoff, sums)
        self._flush()
        return [Sent(serve.key, session.peer.rank, attempt.bytes, now - attempt.began, attempt.left)]

    def _fetched(self, event: Fetched) -> list[Event | Sent]:
        """A sink rank has read what it was offered."""
        found: list[Event | Sent] = []
        session = self.endpoint.sessions.get(event.session)
        for each in list(self._offers):
            serve, program, since = each
            key = (serve.session, serve.transfer.sequence, serve.transfer.attempt)
            if key == (event.session, event.sequence, event.attempt):
                self._offers.remove(each)
                if session is not None and event.bytes == program.bytes:
                    seconds = time.monotonic() - since
                    found.append(Sent(serve.key, session.peer.rank, program.bytes_by_group(), seconds, program.bytes))
        return found

    def forget(self, key: bytes) -> None:
        """The engine has freed the request."""
        self._requests.pop(key, None)

    def close(self, reason: str) -> None:
        """Goodbye to all, then close."""
        self.endpoint.goodbye(reason)
        self._flush()
        self._listener.close()
        for mover in self.movers.values():
            mover.close()
