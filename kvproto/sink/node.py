"""A sink rank: one pool with its quarantine, one set of transports, and links to any number of source replicas."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from kvproto.errors import KvprotoError, LocalError, RemoteError, ReportedError
from kvproto.events import Refused
from kvproto.net import Dialer
from kvproto.options import QUARANTINE, Spread
from kvproto.rank.background import Background
from kvproto.rank.events import PoolReturned, Received, TransferLost
from kvproto.rank.lent import returned
from kvproto.rank.pool import RankPool
from kvproto.rank.registration import features_of
from kvproto.session import Party
from kvproto.session.records import Counters
from kvproto.sink.link import LinkContext, SourceLink
from kvproto.sink.quarantine import Quarantine
from kvproto.sink.registered_pool import Filled
from kvproto.transport import default
from kvproto.transport.base import Transport
from kvproto.transport.process import Watch, boot_id
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

__all__ = ["UNCONNECTED", "Replica", "SinkNode"]

_MOVED = RemoteError(ErrorCode.POOL_MOVED, "pages", "pages of the pool that is registered", "others", "fetch again")
UNCONNECTED = "name it in `sources`, or call Sink.connect"
"""What to do about a ticket of a source that the sink does not know."""
_MOST_UNREACHED = 3
"""Transfers in a row that are lost because the source cannot write this side's memory, before it is exposed again."""
_TURN = 0.001
"""Seconds after which a turn stops receiving; the next goes on with the other connections (KVP-NET-TURN)."""
Replica = tuple[str, int]
"""A source replica: the engine's name and the number of the replica."""


class SinkNode:
    """The node of a decode rank, driven by `kvproto.rank.driver`."""

    def __init__(
        self, party: Party, pool: RankPool, dialer: Dialer, *, verify: bool | Literal["pages"] = True,
        transports: Sequence[Transport] = (), pull: bool = False, quarantine: float = QUARANTINE,
        spread: Spread = "even", cold_draft: bool = False, eager: bool = True, ticket_wait: float | None = None,
    ) -> None:  # fmt: skip
        """See `kvproto.Options`; the transports are offered in order of preference."""
        boot_id()  # cached now, as a turn without a free descriptor could not read it
        self._dialer, self._share, self._eager = dialer, quarantine, eager
        self.pool = pool
        """The current pool, or the last one while asleep."""
        self._lent: Filled | None = Filled(1, pool, quarantine=Quarantine(pool.layout, quarantine))
        """The pool that transfers go into; None while asleep."""
        self._leaving: list[Filled] = []
        """Pools that were taken back, until nothing can use them any more."""
        self.epoch = 1
        """The epoch of the current pool, or of the last one while asleep."""
        self.transports = tuple(transports) or (default(pool.memories),)
        readers = tuple(t for t in self.transports if t.capabilities.reads) or (default(pool.memories),)
        self._context = LinkContext(
            party, self.transports, readers if pull else (),
            features_of(self.transports, verify, pull, spread, cold_draft), Background(), ticket_wait,
        )  # fmt: skip
        self.sources: dict[Replica, tuple[str, bytes | None]] = {}
        """The address and public key of each source replica."""
        self._links: dict[Replica, SourceLink] = {}
        self._unreached: Counter[Replica] = Counter()
        """Transfers in a row that were lost because the source cannot write this side's memory."""
        self._former: list[SourceLink] = []
        """Links that have ended, while a transfer or a pool of theirs waits for proof."""
        self._transfers: dict[int, SourceLink] = {}
        self._keys = itertools.count()
        self._watches: dict[tuple[int, int], Watch | None] = {}
        """Watches of the writers' processes, by link and session; None if the end cannot be seen here, or was seen."""
        self._ended: list[Watch] = []
        """Watches to close at the end of a turn: a new one in the same turn must not reuse their descriptors, which
        the driver would not notice.
        """
        self._dying: list[tuple[SourceLink, int]] = []
        """Sessions whose writer has ended, with frames that are still to be received."""
        self._events: list[Any] = []
        self._resends = 0
        """Messages sent again by links that are gone."""

    # calls of the engine

    def connect(self, replica: Replica, address: str, server: bytes | None = None) -> None:
        """Add a source replica, or change its address; `server` is its public key.

        Unless `eager`, it is greeted with the first fetch from it.
        """
        self.sources[replica] = address, server
        if self._eager or replica in self._links:
            self._greet(replica, address, server)

    def _greet(self, replica: Replica, address: str, server: bytes | None) -> None:
        known = self._links.get(replica)
        if known is None or known.over or (known.seed, known.server) != (address, server):
            self._retire(replica, "connected elsewhere")
            if self._lent is not None:
                key = next(self._keys)
                self._links[replica] = SourceLink(self._context, self._lent, key, address, replica, server)
                self._links[replica].endpoint.advice = self._dialer.names.advice

    def disconnect(self, replica: Replica, reason: str) -> None:
        """Say Goodbye to a source replica."""
        self.sources.pop(replica, None)
        self._retire(replica, reason)

    def fetch(
        self, number: int, replica: Replica, ticket: bytes, content: bytes, grants: Mapping[int, Grants],
        seconds: float | None = None, axes: Collection[str] = (), epoch: int | None = None, claimed: bool = False,
        spans: bool = False,
    ) -> None:  # fmt: skip
        """Request a transfer, which ends with Received or TransferLost of this number; a lost source is greeted again.

        It is lost with DEADLINE if the source does not accept it within `seconds`, and with POOL_MOVED unless `epoch`,
        that of the pool whose items the grants name, is current. See `SourceLink.fetch` for `axes`, `claimed` and
        `spans`.
        """
        if self._lent is None or epoch not in (None, self._lent.number):
            self._events.append(TransferLost(number, _MOVED, True))
            return
        if replica not in self.sources:
            error = LocalError(ErrorCode.WRONG_PEER, "ticket", "a connected source", str(replica), UNCONNECTED)
            self._events.append(TransferLost(number, error, True))
            return
        try:
            self._greet(replica, *self.sources[replica])
        except Exception as error:  # memory is short, for example: nothing was requested
            own = LocalError(ErrorCode.ABORTED, "", "a connection", repr(error), "fetch again")
            self._events.append(TransferLost(number, error if isinstance(error, KvprotoError) else own, True))
            raise
        self._transfers[number] = self._links[replica]
        self._links[replica].fetch(number, ticket, content, grants, seconds, axes, claimed, spans)

    def grant(self, number: int, grants: Mapping[int, Grants], whole: bool) -> None:
        """See `SourceLink.grant`; harmless once the transfer has ended."""
        link = self._transfers.get(number)
        if link is not None:
            link.grant(number, grants, whole)

    def abort(self, number: int, error: KvprotoError) -> None:
        """Stop a transfer; TransferLost follows."""
        link = self._transfers.get(number)
        if link is not None:
            link.abort(number, error)

    # pools

    def sleep(self, error: KvprotoError) -> Filled:
        """End all transfers with this error and take the pool back; PoolReturned reports when nothing can use it."""
        assert self._lent is not None
        leaving, self._lent = self._lent, None
        self._leaving.append(leaving)
        for link in self._all():
            link.sleep(error)
        for replica in [r for r, link in self._links.items() if not link.adaptable(self.pool)]:
            self._former.append(self._links.pop(replica))
        return leaving

    def move(self, pool: RankPool, epoch: int) -> Filled | None:
        """Use another pool from now on; transfers under way end in the old one, until PoolReturned reports it."""
        leaving, self.pool, self.epoch = self._lent, pool, epoch
        self._lent = Filled(epoch, pool, quarantine=Quarantine(pool.layout, self._share))
        if leaving is not None:
            self._leaving.append(leaving)
        for replica, (address, server) in self.sources.items():
            link = self._links.get(replica)
            if link is not None and link.adaptable(pool):
                link.expose(self._lent)
                continue
            if link is not None:  # it finishes what is under way, and then says Goodbye
                link.drop_waiting()
                self._former.append(self._links.pop(replica))
            self.connect(replica, address, server)
        return leaving

    def _holders(self, lent: Filled) -> list[str]:
        return [name for link in self._all() for name in link.holders(lent)]

    def census(self) -> Counters:
        """Count its sources now, and the messages that were sent again so far."""
        found = [link.endpoint.census() for link in self._all()]
        return Counters(
            sum(each.peers for each in found),
            sum(each.suspects for each in found),
            self._resends + sum(each.resends for each in found),
        )

    @property
    def ready(self) -> frozenset[Replica]:
        """Replicas whose ranks are all registered, and none suspect."""
        links = list(self._links.items())
        return frozenset(replica for replica, link in links if link.endpoint.ready and not link.endpoint.suspect)

    @property
    def quarantined(self) -> dict[int, int]:
        """The number of pages, by group id, that a peer may still write."""
        return self._lent.quarantine.counts if self._lent is not None else {}

    def check_quarantine(self) -> None:
        """Raise LocalError(BUSY) if too many pages are in quarantine."""
        if self._lent is not None:
            self._lent.quarantine.check()

    # turns

    def turn(self, ready: Collection[int] = ()) -> list[Any]:
        """Receive, read and answer; return the events for the engine."""
        self._context.backstage.turn()
        for transport in self.transports:
            if transport.fileno() in ready:
                transport.acknowledge()
        now = time.monotonic()
        self._flush()
        by_key = {link.key: link for link in self._all()}
        self._dying += self._dead(ready, by_key)
        for conn, frame in self._dialer.receive():  # the last frames of the dead are received before giving them up
            if conn[0] in by_key:
                by_key[conn[0]].endpoint.receive(conn[1], frame, now)
            if time.monotonic() - now > _TURN:
                break
        for conn, error in self._dialer.refusals():
            if conn[0] in by_key:
                self._refuse(by_key[conn[0]], conn[1], error, by_us=error.code != ErrorCode.NOT_ALLOWED)
        for conn in self._dialer.returned(ready):
            if conn[0] in by_key:
                by_key[conn[0]].endpoint.returned(conn[1], now)
        dying, self._dying = self._dying, []
        for link, session in dying:
            if self._dialer.holds(link.key):
                self._dying.append((link, session))
            else:
                link.endpoint.died(session, now)
        for link in by_key.values():
            link.endpoint.on_time(now)
            for session, process in link.endpoint.writers().items():
                if (link.key, session) not in self._watches:
                    self._watches[link.key, session] = Watch.of(process)
        self._flush()
        found, self._events = self._events, []
        for link in by_key.values():
            some = link.take()
            self._count_unreached(link, some)
            found += some
        for event in found:
            if isinstance(event, Received | TransferLost):
                self._transfers.pop(event.number, None)
        self._flush()
        if self._former:
            self._forget()
        if self._leaving:
            over = returned(self._leaving, self._holders, self.transports, self.pool)
            found += [PoolReturned(lent.number) for lent in over]
        while self._ended:
            self._ended.pop().close()
        return found

    def _count_unreached(self, link: SourceLink, events: Iterable[Any]) -> None:
        """Expose the memory again, over a new link, after a source failed to write it a few times in a row."""
        replica = next((r for r, each in self._links.items() if each is link), None)
        if replica is None:
            return
        for event in events:
            if isinstance(event, Received):
                del self._unreached[replica]
            elif isinstance(event, TransferLost) and _unreached(event.error):
                self._unreached[replica] += 1
        if self._unreached[replica] >= _MOST_UNREACHED:
            del self._unreached[replica]
            for transport in self.transports:
                transport.unreachable()
            self._retire(replica, "its copies do not arrive: the memory is exposed again")

    def filenos(self) -> list[int]:
        """Descriptors that are readable when a turn has something to do."""
        found = [self._context.backstage.fileno(), *(transport.fileno() for transport in self.transports)]
        watches = [watch.fileno() for watch in self._watches.values() if watch is not None]
        return [*self._dialer.filenos(), *(fd for fd in (*found, *watches) if fd is not None)]

    def timeout(self) -> float | None:
        """Seconds until a turn is due even if no descriptor is readable; None if no timer is set."""
        if self._dialer.pending or self._events:
            return 0.0
        found = [link.timeout() for link in self._all()]
        return min((seconds for seconds in found if seconds is not None), default=None)

    def _all(self) -> list[SourceLink]:
        return [*self._links.values(), *self._former]

    def _retire(self, replica: Replica, reason: str) -> None:
        """End a link: its transfers under way are lost, and their pages stay in quarantine until there is proof."""
        link = self._links.pop(replica, None)
        if link is None:
            return
        if not link.over:
            link.endpoint.goodbye(reason)
            link.fail(RemoteError(ErrorCode.ABORTED, "", advice=reason))
        self._former.append(link)

    def _forget(self) -> None:
        """Drop former links once nothing of theirs waits for proof."""
        for link in [each for each in self._former if each.idle]:
            link.close("over")
            self._flush()
            if any(link.holders(lent) for lent in self._leaving):
                continue
            self._former.remove(link)
            self._resends += link.endpoint.resends
            self._dialer.drop(lambda key, gone=link.key: key[0] != gone)  # type: ignore[misc]
            for key in [k for k in self._watches if k[0] == link.key]:
                watch = self._watches.pop(key)
                if watch is not None:
                    watch.close()

    def _dead(self, ready: Collection[int], by_key: Mapping[int, SourceLink]) -> list[tuple[SourceLink, int]]:
        """The sessions whose writer's process has ended."""
        found = []
        for (key, session), watch in self._watches.items():
            if watch is not None and (watch.fileno() is None or watch.fileno() in ready) and watch.ended:
                self._watches[key, session] = None
                self._ended.append(watch)
                found.append((by_key[key], session))
        return found

    def _flush(self) -> None:
        now = time.monotonic()
        for link in self._all():
            for address, frame in link.endpoint.to_send(now):
                try:
                    self._dialer.send((link.key, address), frame, link.server)
                except KvprotoError as error:  # an address in Welcome that cannot be used
                    self._refuse(link, str(address), error)

    def _refuse(self, link: SourceLink, address: str, error: KvprotoError, by_us: bool = True) -> None:
        if not link.over:
            link.refuse(error)
            self._events.append(Refused(address, error, by_us))

    def close(self, reason: str) -> None:
        """Say Goodbye to all sources, then release everything."""
        for link in self._all():
            link.close(reason)
        self._flush()
        for watch in self._watches.values():
            if watch is not None:
                watch.close()
        self._dialer.close()
        self._context.backstage.close()
        for transport in self.transports:
            transport.close()


def _unreached(error: KvprotoError) -> bool:
    """Whether a source reported that it cannot write this side's memory."""
    return isinstance(error, ReportedError) and error.code in (ErrorCode.TRANSPORT_FAILED, ErrorCode.PEER_LOST)
