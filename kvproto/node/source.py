"""A source rank: it expects tickets, copies finished requests into the sinks' memory, and says when they are free."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from kvproto.errors import KvprotoError, RemoteError
from kvproto.geometry import Geometry
from kvproto.lowering import Pair
from kvproto.net import Listener
from kvproto.node.offering import LEASE, NOTHING, offered
from kvproto.node.pool import Pool
from kvproto.program import CopyProgram, Side, Window, windows
from kvproto.session import Party, SourceEndpoint
from kvproto.session.events import Event, Expired, Fetched, RegisterAsked, Serve
from kvproto.session.source import SourceSession
from kvproto.session.table import SessionState
from kvproto.transport import mover_of
from kvproto.transport.base import Copying, Mapped, Move, Mover
from kvproto.transport.nixl_mover import NixlMover, Streaming
from kvproto.wire.enums import ErrorCode, Feature, ItemKind, Outcome, Transport
from kvproto.wire.messages import Checksum, HandOff, Register, Ticket

__all__ = ["Finished", "Sent", "SourceNode"]

_GONE = RemoteError(ErrorCode.ABORTED, "", "the transfer is over", "")
_LATE = RemoteError(ErrorCode.DEADLINE, "ticket", "not fetched in time", "", "make a new ticket")


@attrs.frozen
class Finished:
    """A request whose prefill is over."""

    items: Mapping[int, list[int]]
    """Item ids by this side's group id, from the one that holds token 0."""
    tokens: int
    """Positions [0, tokens) hold real rows."""
    outcome: Outcome
    handoff: Mapping[tuple[int, str], bytes]
    """Bytes of each hand-off part, by group id and part name."""
    after: int | None = None
    """Handle of the device event that the rows wait for; None: they are there."""


@attrs.frozen
class Sent:
    """A copy that this rank made, or a sink rank of what this one offered."""

    key: bytes = attrs.field(repr=False)
    sink: int
    bytes: dict[int, int]
    """By the sink's group id."""
    seconds: float


@attrs.define(eq=False)
class _Running:
    """A launch, and the transfers that it serves with their programs."""

    served: list[tuple[Serve, CopyProgram]]
    mover: Mover
    copying: Copying
    began: float
    error: KvprotoError | None = None
    """Why it is being stopped."""


@attrs.frozen
class _Way:
    """How one session's memory is reached."""

    mover: Mover
    mapped: dict[int, Mapped]

    def close(self) -> None:
        for mapping in self.mapped.values():
            mapping.close()


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
        movers: Sequence[Mover] = (),
        pull: bool = False,
        lease: float = LEASE,
    ) -> None:
        """`movers` may be used, in the sink's order of preference; without any, the one of the pool's memory.

        With `pull` sinks that offer that too read, each for `lease` seconds, or longer if they ask (feature PULL).
        """
        self.movers = {m.transport: m for m in movers or (mover_of(pool.memory),)}
        features: tuple[Feature, ...] = (Feature.VERIFY,) if verify else ()
        features += (Feature.STAGED,) if any(isinstance(m, NixlMover) for m in movers) else ()
        features += (Feature.PULL,) if pull else ()
        self._lease = lease
        self._offers: list[tuple[Serve, CopyProgram, float]] = []
        """What sinks may read, and since when."""
        self.pool, self._listener = pool, listener
        self.endpoint = SourceEndpoint(party, geometry, endpoints, features, secrets.randbits(62) | 1)
        self._verify = verify
        self._asked: list[Serve] = []
        self._late: dict[bytes, Expired] = {}
        """Expired while a copy still reads their items."""
        self._running: list[_Running] = []
        self._ways: dict[int, _Way] = {}
        self._pairs: dict[int, Pair] = {}
        self._finished: dict[bytes, Finished] = {}

    def expect(self, ticket: Ticket, content: bytes) -> None:
        """The request of this ticket is here."""
        self.endpoint.expect(ticket, content, time.monotonic())

    def finish(self, key: bytes, finished: Finished) -> None:
        """Serve whoever asks for this request; its items stay as they are until Released or Expired."""
        self._finished[key] = finished
        self.endpoint.finish(key)

    def refuse(self, key: bytes, error: KvprotoError) -> None:
        """This request cannot be produced."""
        self.endpoint.refuse(key, error, time.monotonic())

    def poll(self) -> list[Event | Sent]:
        """Receive, copy, answer; returns what the engine should know."""
        now = time.monotonic()
        for conn, frame in self._listener.receive():
            self.endpoint.receive(conn, frame, now)
        self.endpoint.on_time(now)
        told: list[Event | Sent] = []
        while True:
            for event in self.endpoint.take_events():
                if isinstance(event, RegisterAsked):
                    self._map(event)
                elif isinstance(event, Serve):
                    self._asked.append(event)
                elif isinstance(event, Expired):
                    self._late[event.key] = event
                elif isinstance(event, Fetched):
                    told += self._fetched(event)
                else:
                    told.append(event)
            moved = self._move() + self._complete() + self._expired()
            self._unmap()
            self._flush()
            if not moved:
                return told
            told += moved

    @property
    def busy(self) -> bool:
        """Whether copies are under way, so that `poll` has something to find out soon."""
        return bool(self._running or self._asked)

    def _unmap(self) -> None:
        """Let go of the memory of sessions that are over, once no copy uses it."""
        used = {serve.session for running in self._running for serve, _ in running.served}
        for number in [n for n in self._ways if n not in self.endpoint.sessions and n not in used]:
            self._pairs.pop(number, None)
            self._ways.pop(number).close()

    def _flush(self) -> None:
        for conn, frame in self.endpoint.to_send(time.monotonic()):
            self._listener.send(conn, frame)

    def _map(self, event: RegisterAsked) -> None:
        """Take the first transport of the sink's that works here."""
        session = self.endpoint.sessions.get(event.session)
        if session is None or session.state != SessionState.REGISTERING:  # it has said Goodbye meanwhile
            return
        if session.pulls:
            region = self.pool.memory.region
            session.accept_register(Transport(region.handles[0].transport))
            session.expose((region,), tuple(self.pool.side.columns.values()), time.monotonic())
            # nothing is mapped here; a launch of nothing waits for the rows
            mover = next((m for m in self.movers.values() if not isinstance(m, NixlMover)), None)
            self._ways[event.session] = _Way(mover or mover_of(self.pool.memory), {})
            return
        error: KvprotoError = RemoteError(
            ErrorCode.NO_TRANSPORT, "regions[0].handles", str([t.name for t in self.movers]), "none of them",
            "use a common transport",
        )  # fmt: skip
        for handle in event.register.regions[0].handles if event.register.regions else ():
            mover = next((m for t, m in self.movers.items() if t == handle.transport), None)
            if mover is None:
                continue
            way = _Way(mover, {})
            try:
                self._connect(way, event.register)
                staged = Feature.STAGED in session.features
                link = mover.stage(way.mapped.values(), staged) if isinstance(mover, NixlMover) else None
            except KvprotoError as e:
                error = e
                way.close()
                continue
            self._ways[event.session] = way
            self._pairs.pop(event.session, None)
            session.accept_register(mover.transport, link)
            return
        session.refuse_register(error)

    def _connect(self, way: _Way, register: Register) -> None:
        """Every region that a column names, or that has a handle of this transport."""
        named = {i for columns in register.columns for i in columns.region.tolist()}
        for i, region in enumerate(register.regions):
            if region.id in named or any(h.transport == way.mover.transport for h in region.handles):
                way.mapped[region.id] = way.mover.connect(region, f"regions[{i}]")

    def _wanted(self, serve: Serve) -> bool:
        return self.endpoint.active(serve) and serve.key not in self._late

    def _move(self) -> list[Event | Sent]:
        """Start copies for all sinks that have asked and can be served: one launch where that is better."""
        asked, self._asked = self._asked, []
        batches: dict[int, tuple[Mover, list[tuple[Serve, CopyProgram, Move]]]] = {}
        for serve in asked:
            if not self._wanted(serve):
                self.endpoint.failed(serve, _LATE, time.monotonic())
                continue
            finished, way = self._finished[serve.key], self._ways[serve.session]
            try:
                program = self._program(self.endpoint.sessions[serve.session], serve, finished)
            except KvprotoError as error:
                self.endpoint.failed(serve, error, time.monotonic())
                continue
            moved = NOTHING if self.endpoint.sessions[serve.session].pulls else program
            move = Move(moved, {0: self.pool.memory}, way.mapped, finished.after)
            batch = id(way.mover) if way.mover.together else id(move)
            batches.setdefault(batch, (way.mover, []))[1].append((serve, program, move))
        for mover, batch_ in batches.values():
            self._start(mover, batch_)
        return []

    def _start(self, mover: Mover, batch: list[tuple[Serve, CopyProgram, Move]]) -> None:
        served = [(serve, program) for serve, program, _ in batch]
        try:
            copying = mover.start([move for *_, move in batch])
        except KvprotoError as error:
            if error.code == ErrorCode.BUSY:
                self._asked += [serve for serve, _ in served]
            else:
                for serve, _ in served:
                    self.endpoint.failed(serve, error, time.monotonic())
            return
        for serve, _ in served:
            self.endpoint.copying(serve)
        self._running.append(_Running(served, mover, copying, time.monotonic()))

    def _complete(self) -> list[Event | Sent]:
        """Answer transfers whose bytes are at their destination; stop what nobody wants."""
        told: list[Event | Sent] = []
        for running in list(self._running):
            if running.error is None and self._go_on(running):
                self._running.remove(running)
                for serve, program in running.served:
                    told += self._answer(running, serve, program)
            elif running.error is not None and (proof := running.copying.stop()) is not None:
                self._running.remove(running)
                for serve, _ in running.served:
                    self.endpoint.failed(serve, running.error, time.monotonic(), proof)
        return told

    def _go_on(self, running: _Running) -> bool:
        """Whether every byte is there."""
        if not any(self._wanted(serve) for serve, _ in running.served):
            running.error = _LATE if any(self.endpoint.active(serve) for serve, _ in running.served) else _GONE
            return False
        done = False
        try:
            done = running.copying.done
        except KvprotoError as error:
            running.error = error
        if isinstance(running.copying, Streaming):
            for piece in running.copying.take():
                self.endpoint.chunk(running.served[0][0], piece)
        return done

    def _expired(self) -> list[Event | Sent]:
        """Tell of requests whose time is over, once no copy reads their items."""
        read = {serve.key for running in self._running for serve, _ in running.served}
        return [self._late.pop(key) for key in list(self._late) if key not in read]

    def _answer(self, running: _Running, serve: Serve, program: CopyProgram) -> list[Event | Sent]:
        session, now = self.endpoint.sessions.get(serve.session), time.monotonic()
        finished = self._finished.get(serve.key)
        if session is None or session.peer is None or finished is None or not self._wanted(serve):
            self.endpoint.failed(serve, _LATE if serve.key in self._late else _GONE, now)
            return []
        sums = None
        if self._verify:
            found = running.mover.checksums(program, {0: self.pool.memory}, sink=False)
            sums = tuple(Checksum(group=g, value=v) for g, v in sorted(found.items()))
        if session.pulls:
            sums = sums if Feature.VERIFY in session.features else None
            assert session.plan is not None
            routes = session.plan.between(self.pool.side.rank, session.peer.rank)
            grants = offered(routes, self.pool.side, serve.transfer.grants, finished.items)
            handoff = self._handoff(session, finished)
            self.endpoint.offer(serve, now, self._lease, grants, finished.outcome, handoff, sums)
            self._offers = [each for each in self._offers if self.endpoint.offered(each[0])]
            self._offers.append((serve, program, now))
            return []
        self.endpoint.done(serve, now, program.bytes, finished.outcome, self._handoff(session, finished), sums)
        return [Sent(serve.key, session.peer.rank, program.bytes_by_group(), now - running.began)]

    def _fetched(self, event: Fetched) -> list[Event | Sent]:
        """A sink rank has read what it was offered."""
        found: list[Event | Sent] = []
        session = self.endpoint.sessions.get(event.session)
        for each in list(self._offers):
            serve, program, since = each
            key = (serve.session, serve.transfer.sequence, serve.transfer.attempt)
            if key == (event.session, event.sequence, event.attempt):
                self._offers.remove(each)
                if session is not None and session.peer is not None and event.bytes == program.bytes:
                    seconds = time.monotonic() - since
                    found.append(Sent(serve.key, session.peer.rank, program.bytes_by_group(), seconds))
        return found

    def _program(self, session: SourceSession, serve: Serve, finished: Finished) -> CopyProgram:
        assert session.plan is not None
        assert session.sink is not None
        assert session.peer is not None
        routes = session.plan.between(self.pool.side.rank, session.peer.rank)
        grants = {g.group: g for g in serve.transfer.grants}
        sinks = windows(serve.transfer.grants)
        sources = {}
        for route in routes:
            grant = grants[route.group]
            for box in route.boxes:
                group = self.pool.side.group(box.source_group)
                if group.kind == ItemKind.HANDOFF:
                    continue
                if grant.valid > finished.tokens:
                    raise RemoteError(
                        ErrorCode.BAD_GRANT, f"grants[{route.group}].valid", str(finished.tokens), str(grant.valid)
                    )
                if grant.state_after not in (None, finished.tokens):
                    raise RemoteError(
                        ErrorCode.STATE_POSITION,
                        f"grants[{route.group}].state_after",
                        str(finished.tokens),
                        str(grant.state_after),
                    )
                sources[group.id] = Window(0, finished.tokens, np.array(finished.items[group.id], np.int64))
        pair = self._pairs.get(serve.session)
        if pair is None:
            sink = Side(session.sink, session.peer.rank, session.columns)
            pair = self._pairs[serve.session] = Pair(routes, self.pool.side, sink)
        return pair.lower(sources, sinks)

    def _handoff(self, session: SourceSession, finished: Finished) -> tuple[HandOff, ...]:
        assert session.plan is not None
        assert session.sink is not None
        assert session.peer is not None
        found = []
        for route in session.plan.between(self.pool.side.rank, session.peer.rank):
            group = next(g for g in session.sink.groups if g.id == route.group)
            if group.kind == ItemKind.HANDOFF:
                parts = sorted({(box.part, box.source_group) for box in route.boxes})
                data = b"".join(finished.handoff[source, group.parts[p].name] for p, source in parts)
                found.append(HandOff(group=group.id, data=data))
        return tuple(found)

    def forget(self, key: bytes) -> None:
        """The engine has freed the request."""
        self._finished.pop(key, None)

    def close(self, reason: str) -> None:
        """Goodbye to all, then close."""
        self.endpoint.goodbye(reason)
        self._flush()
        self._listener.close()
        for mover in self.movers.values():
            mover.close()
