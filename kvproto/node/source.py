"""A source rank: it expects tickets, copies finished requests into the sinks' memory, and says when they are free."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import attrs
import numpy as np

from kvproto.errors import KvprotoError, RemoteError
from kvproto.geometry import Geometry
from kvproto.lowering import Pair
from kvproto.net import Listener
from kvproto.node.pool import Pool
from kvproto.program import CopyProgram, Side, Window, windows
from kvproto.session import Party, SourceEndpoint
from kvproto.session.events import Event, RegisterAsked, Serve
from kvproto.session.source import SourceSession
from kvproto.transport import mover_of
from kvproto.transport.base import Copying, Mapped, Move, Mover
from kvproto.wire.enums import ErrorCode, Feature, ItemKind, Outcome
from kvproto.wire.messages import Checksum, HandOff, Ticket

__all__ = ["Finished", "Sent", "SourceNode"]

_GONE = RemoteError(ErrorCode.ABORTED, "", "the transfer is over", "")


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
    """A copy that this rank made."""

    key: bytes = attrs.field(repr=False)
    sink: int
    bytes: dict[int, int]
    """By the sink's group id."""
    seconds: float


@attrs.frozen
class _Running:
    """A launch, and the transfers that it serves with their programs."""

    served: list[tuple[Serve, CopyProgram]]
    copying: Copying
    began: float


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
        mover: Mover | None = None,
    ) -> None:
        features = (Feature.VERIFY,) if verify else ()
        self.pool, self._listener = pool, listener
        self.endpoint = SourceEndpoint(party, geometry, endpoints, features, secrets.randbits(62) | 1)
        self._verify = verify
        self.mover = mover or mover_of(pool.memory)
        self._asked: list[Serve] = []
        self._running: list[_Running] = []
        self._maps: dict[int, dict[int, Mapped]] = {}
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
                else:
                    told.append(event)
            moved = self._move() + self._complete()
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
        for number in [n for n in self._maps if n not in self.endpoint.sessions and n not in used]:
            self._pairs.pop(number, None)
            for mapping in self._maps.pop(number).values():
                mapping.close()

    def _flush(self) -> None:
        for conn, frame in self.endpoint.to_send(time.monotonic()):
            self._listener.send(conn, frame)

    def _map(self, event: RegisterAsked) -> None:
        session = self.endpoint.sessions[event.session]
        made: dict[int, Mapped] = {}
        try:
            for i, region in enumerate(event.register.regions):
                made[region.id] = self.mover.connect(region, f"regions[{i}]")
        except KvprotoError as error:
            for mapping in made.values():
                mapping.close()
            session.refuse_register(error)
            return
        self._maps[event.session] = made
        self._pairs.pop(event.session, None)
        session.accept_register(self.mover.transport)

    def _move(self) -> list[Event | Sent]:
        """One launch for all sinks that have asked and can be served."""
        asked, self._asked = self._asked, []
        served, moves = [], []
        for serve in asked:
            if not self.endpoint.active(serve):
                continue
            finished = self._finished[serve.key]
            try:
                program = self._program(self.endpoint.sessions[serve.session], serve, finished)
            except KvprotoError as error:
                self.endpoint.failed(serve, error, time.monotonic())
                continue
            served.append((serve, program))
            moves.append(Move(program, {0: self.pool.memory}, self._maps[serve.session], finished.after))
        if not moves:
            return []
        try:
            copying = self.mover.start(moves)
        except KvprotoError as error:
            if error.code == ErrorCode.BUSY:
                self._asked = [serve for serve, _ in served]
            else:
                for serve, _ in served:
                    self.endpoint.failed(serve, error, time.monotonic())
            return []
        for serve, _ in served:
            self.endpoint.copying(serve)
        self._running.append(_Running(served, copying, time.monotonic()))
        return []

    def _complete(self) -> list[Event | Sent]:
        """Answer transfers whose bytes are at their destination."""
        told: list[Event | Sent] = []
        for running in [r for r in self._running if r.copying.done]:
            self._running.remove(running)
            for serve, program in running.served:
                told += self._answer(serve, program, time.monotonic() - running.began)
        return told

    def _answer(self, serve: Serve, program: CopyProgram, seconds: float) -> list[Event | Sent]:
        session, now = self.endpoint.sessions.get(serve.session), time.monotonic()
        finished = self._finished.get(serve.key)
        if session is None or session.peer is None or finished is None or not self.endpoint.active(serve):
            self.endpoint.failed(serve, _GONE, now)
            return []
        sums = None
        if self._verify:
            found = self.mover.checksums(program, {0: self.pool.memory}, sink=False)
            sums = tuple(Checksum(group=g, value=v) for g, v in sorted(found.items()))
        self.endpoint.done(serve, now, program.bytes, finished.outcome, self._handoff(session, finished), sums)
        return [Sent(serve.key, session.peer.rank, program.bytes_by_group(), seconds)]

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
