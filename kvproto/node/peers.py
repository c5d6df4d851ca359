"""The memory of the sinks of a source: mapped when it is registered, and let go of when its session is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout
from kvproto.errors import KvprotoError
from kvproto.node.pool import RankPool
from kvproto.node.registrar import PeerMapping, map_peer, register
from kvproto.session import SourceEndpoint
from kvproto.session.events import RegisterAsked
from kvproto.session.source import SourceSession
from kvproto.transport import default
from kvproto.transport.base import Transport
from kvproto.wire.enums import Feature

__all__ = ["Peers"]


class Peers:
    """Mappings by session and epoch."""

    def __init__(
        self, endpoint: SourceEndpoint, pool: RankPool, transports: Sequence[Transport],
        defer: Callable[[Callable[[], Pair], Callable[[Pair | KvprotoError], None]], None],
    ) -> None:  # fmt: skip
        """`defer` works out how a pair's rows lie, which takes long where they lie in many ways."""
        self._endpoint, self._pool, self._transports, self._defer = endpoint, pool, tuple(transports), defer
        self._mapped: dict[tuple[int, int], PeerMapping] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def get(self, number: int, epoch: int) -> PeerMapping | None:
        """An epoch of a session's sink; None: it is not mapped, or not any more."""
        return self._mapped.get((number, epoch))

    def _registering(self, event: RegisterAsked) -> SourceSession | None:
        """The session, unless it has ended meanwhile."""
        session = self._endpoint.sessions.get(event.session)
        return session if session is not None and session.open else None

    def map(self, event: RegisterAsked) -> None:
        """Map a sink's memory by the first of its transports that works here, or let it read ours."""
        described, columns = event.described, {c.group: c for c in event.register.columns}
        sink = RankLayout(described.sink, described.ranks[1], columns)

        def pair() -> Pair:
            made = Pair(described.routes, self._pool.layout, sink)
            assert made.nothing.runs is not None  # made here, and not in a turn
            return made

        self._defer(pair, partial(self._reach, event))

    def _reach(self, event: RegisterAsked, pair: Pair | KvprotoError) -> None:
        session = self._registering(event)
        if session is None:
            return
        try:
            if isinstance(pair, KvprotoError):
                raise pair
            if Feature.PULL in session.features:
                self._expose(session, event, pair)
                return
            own, features = self._pool.memories, session.features
            peer = map_peer(event, self._transports, pair, own, writes=True, features=features)
        except KvprotoError as error:
            session.refuse_register(error)
            return
        self._mapped[event.session, event.register.epoch] = peer
        capabilities = peer.transport.capabilities
        process = self._endpoint.process if capabilities.death_is_proof else None
        session.accept_register(capabilities.code, peer.connection.link, process)

    def _expose(self, session: SourceSession, event: RegisterAsked, pair: Pair) -> None:
        """The sink reads: nothing of it is mapped, and a copy of nothing waits for the rows."""
        transport = next((t for t in self._transports if t.capabilities.reads), None) or default(self._pool.memories)
        made, _ = register((transport,), self._pool.memories, pair.nothing, pair.nothing.runs)
        session.accept_register(transport.capabilities.code)
        session.expose(1, self._pool, made.regions, tuple(self._pool.layout.columns.values()), time.monotonic())
        self._mapped[event.session, event.register.epoch] = PeerMapping(event, transport, pair, reads=True)

    def unmap(self, used: Iterable[tuple[int, int]]) -> None:
        """Let go of the memory of sessions that are over, but for that which copies use."""
        over = self._endpoint.over
        if over:
            for key in {key for key in self._mapped if key[0] in over}.difference(used):
                self._mapped.pop(key).close()
            over.intersection_update(number for number, _ in self._mapped)

    def close(self) -> None:
        """Let go of all; no copy may be under way."""
        for peer in self._mapped.values():
            peer.close()
