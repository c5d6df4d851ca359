"""A source rank: it expects tickets, copies finished requests into the sinks' memory, and says when they are free."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import attrs
import numpy as np

from kvproto.errors import KvprotoError, RemoteError
from kvproto.execute import checksums, execute
from kvproto.geometry import Geometry
from kvproto.lowering import Pair
from kvproto.net import Listener
from kvproto.node.pool import Pool
from kvproto.program import CopyProgram, Side, Window, windows
from kvproto.session import Party, SourceEndpoint
from kvproto.session.events import Event, RegisterAsked, Serve
from kvproto.session.source import SourceSession
from kvproto.transport import shm
from kvproto.wire.enums import ErrorCode, Feature, ItemKind, Outcome, Transport
from kvproto.wire.messages import Checksum, HandOff, Ticket

__all__ = ["Finished", "Sent", "SourceNode"]


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


@attrs.frozen
class Sent:
    """A copy that this rank made."""

    key: bytes = attrs.field(repr=False)
    sink: int
    bytes: dict[int, int]
    """By the sink's group id."""
    seconds: float


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
    ) -> None:
        features = (Feature.VERIFY,) if verify else ()
        self.pool, self._listener = pool, listener
        self.endpoint = SourceEndpoint(party, geometry, endpoints, features, secrets.randbits(62) | 1)
        self._verify = verify
        self._maps: dict[int, dict[int, shm.Mapping]] = {}
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
        while events := self.endpoint.take_events():
            for event in events:
                if isinstance(event, RegisterAsked):
                    self._map(event)
                elif isinstance(event, Serve):
                    told += self._copy(event)
                else:
                    told.append(event)
            for number in [n for n in self._maps if n not in self.endpoint.sessions]:
                self._pairs.pop(number, None)
                for mapping in self._maps.pop(number).values():
                    mapping.close()
            self._flush()
        self._flush()
        return told

    def _flush(self) -> None:
        for conn, frame in self.endpoint.to_send(time.monotonic()):
            self._listener.send(conn, frame)

    def _map(self, event: RegisterAsked) -> None:
        session = self.endpoint.sessions[event.session]
        made: dict[int, shm.Mapping] = {}
        try:
            for i, region in enumerate(event.register.regions):
                made[region.id] = shm.connect(region, f"regions[{i}]")
        except KvprotoError as error:
            for mapping in made.values():
                mapping.close()
            session.refuse_register(error)
            return
        self._maps[event.session] = made
        self._pairs.pop(event.session, None)
        session.accept_register(Transport.SHM)

    def _copy(self, serve: Serve) -> list[Event | Sent]:
        if not self.endpoint.active(serve):
            return []
        session = self.endpoint.sessions[serve.session]
        finished = self._finished[serve.key]
        now = time.monotonic()
        try:
            program = self._program(session, serve, finished)
            own = {0: self.pool.memory.buffer}
            theirs = {i: m.buffer for i, m in self._maps[serve.session].items()}
            execute(program, own, theirs)
            sums = (
                tuple(Checksum(group=g, value=v) for g, v in sorted(checksums(program, own, sink=False).items()))
                if self._verify
                else None
            )
        except KvprotoError as error:
            self.endpoint.failed(serve, error, now)
            return []
        handoff = self._handoff(session, finished)
        assert session.peer is not None
        self.endpoint.done(serve, now, program.bytes, finished.outcome, handoff, sums)
        return [Sent(serve.key, session.peer.rank, program.bytes_by_group(), time.monotonic() - now)]

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
