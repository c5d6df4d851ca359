"""A sink rank: its pool and transports, links to sources, which are greeted again, and the processes that it watches.

A turn touches only what has something to do.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import attrs

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.events import Disconnected, Event, Refused
from kvproto.net import RECEIVE_TIME, Dialer
from kvproto.options import Options
from kvproto.rank.background import Background
from kvproto.rank.handles import free_pools
from kvproto.rank.machine import machine
from kvproto.rank.pool import Pool
from kvproto.rank.registration import features_of
from kvproto.session import Party
from kvproto.session.records import Counters
from kvproto.session.sink import SinkSession
from kvproto.sink.fetch import Fetch
from kvproto.sink.link import LinkContext, SourceLink
from kvproto.sink.registered_pool import LentSinkPool, Quarantine
from kvproto.transport import default
from kvproto.transport.base import Transport, bells
from kvproto.transport.process import Watch, boot_id
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode

_MOVED = RemoteError(ErrorCode.POOL_MOVED, "pages", "pages of the pool that is registered", "others", "fetch again")
UNCONNECTED = "name it in `sources`, or call Sink.connect"
"""Advice about a ticket of a source that the sink does not know."""
_MOST_UNREACHED = 3
"""Transfers in a row that are lost because the source cannot write this side's memory, before it is exposed again."""
_AGAIN, _LONGEST = 1.0, 15.0
"""Seconds until a source that was lost is greeted again: at first, doubled with each try, and at most."""
_MOST_REPORTED = 64
"""The most refusals and losses of one source that are remembered, so as to be reported once."""
Replica = tuple[str, int]
"""A source replica: the engine's name and the number of the replica."""


@attrs.define(eq=False)
class _Writer:
    """The process that writes this side's memory in a session."""

    link: SourceLink
    session: SinkSession
    watch: Watch | None
    """None if its end cannot be seen here, or was seen."""


class SinkNode:
    """The node of a decode rank, driven by `kvproto.rank.driver`."""

    def __init__(
        self,
        party: Party,
        pool: Pool,
        dialer: Dialer,
        options: Options,
        transports: Sequence[Transport] = (),
    ) -> None:
        """The transports are offered in order of preference."""
        boot_id()  # cached now, as a turn without a free descriptor could not read it
        self._dialer, self._share, self._eager = dialer, options.quarantine, options.eager
        self.pool = pool
        """The current pool, or the last one while asleep."""
        self._lent: LentSinkPool | None = LentSinkPool(1, pool, quarantine=Quarantine(pool.layout, options.quarantine))
        """The pool that fetches go into; None while asleep."""
        self._leaving: list[LentSinkPool] = []
        """Pools that were taken back, until nothing can use them any more."""
        self._recheck = False
        """Whether somebody may have ended using one of them."""
        self.epoch = 1
        """The epoch of the current pool, or of the last one while asleep."""
        self.transports = tuple(transports) or (default(pool.memories),)
        readers = tuple(t for t in self.transports if t.capabilities.reads) or (default(pool.memories),)
        features = features_of(self.transports, options)
        background, readers = Background(), readers if options.pull else ()
        self._context = LinkContext(self, party, self.transports, readers, features, background, options.ticket_wait)
        self.sources: dict[Replica, tuple[str, bytes | None]] = {}
        """The address and public key of each source replica."""
        self._links: dict[Replica, SourceLink] = {}
        self._again: dict[Replica, float] = {}
        """Seconds until a source that is lost again is greeted again."""
        self._reported: dict[Replica, set[tuple[type, str, str]]] = {}
        """The refusals and losses that were reported of a source since it was last ready."""
        self.reasons: Mapping[Replica, str] = {}
        """The last refusal or loss of each source that had one; replaced as a whole, as `ready` is."""
        self._former: dict[SourceLink, None] = {}
        """Links that have ended, while a fetch or a pool of theirs waits for proof."""
        self.ready: frozenset[Replica] = frozenset()
        """Replicas whose ranks are all registered, and none suspect; replaced as a whole, so any thread may read it."""
        self._awake: dict[SourceLink, None] = {}
        """Links that have something to do."""
        self._polled: dict[SourceLink, bool] = {}
        """Links that copy, which ends without notice, or that did so in their last turn (False)."""
        self._writers: dict[tuple[SourceLink, SinkSession], _Writer] = {}
        self._watched: dict[int, _Writer] = {}
        """Writers by the descriptor of their watch."""
        self._dying: list[_Writer] = []
        """Writers that have ended, with frames that are still to be received."""
        self._filenos: tuple[object, Mapping[int, object]] = None, {}
        """The dialer's descriptors, and all descriptors that include them."""
        self._bells: dict[int, Transport] = {}
        """Transports by the descriptors on which they announce the end of copies."""
        self._events: list[Event] = []
        self._resends = 0
        """Messages sent again by links that are gone."""

    # calls of the engine

    def connect(self, replica: Replica, address: str, server: bytes | None = None) -> None:
        """Add a source replica or change its address, to be greeted with the first fetch unless `eager`."""
        self.sources[replica] = address, server
        if self._eager or replica in self._links:
            self._greet(replica, address, server)

    def _greet(self, replica: Replica, address: str, server: bytes | None) -> None:
        known = self._links.get(replica)
        if known is None or known.over or (known.seed, known.server) != (address, server):
            self._retire(replica, "connected elsewhere")
            if self._lent is not None:
                link = self._links[replica] = SourceLink(self._context, self._lent, address, replica, server)
                link.endpoint.advice = self._dialer.names.advice
                link.endpoint.elsewhere = partial(self._prove_former, link)

    def _prove_former(self, link: SourceLink, message: m.Message) -> None:
        """Take what came over a link as proof about earlier links with the same source."""
        for former in list(self._former):
            if (former.replica, former.server) == (link.replica, link.server):
                former.endpoint.prove(message)
                self._awake[former] = None

    def _greet_later(self, link: SourceLink, now: float) -> None:
        """Greet a source again after a while, as its link is over."""
        wait = self._again.get(link.replica, _AGAIN)
        self._again[link.replica] = min(2 * wait, _LONGEST)
        self._context.timers.at(now + wait, partial(self._greet_again, link))

    def _greet_again(self, link: SourceLink, now: float) -> None:
        if self._links.get(link.replica) is not link or link.replica not in self.sources:
            return
        try:
            self._greet(link.replica, *self.sources[link.replica])
        except Exception:  # memory is short, for example
            self._greet_later(self._links.get(link.replica, link), now)

    def disconnect(self, replica: Replica, reason: str) -> None:
        """Say Goodbye to a source replica."""
        self.sources.pop(replica, None)
        self._again.pop(replica, None)
        self._reported.pop(replica, None)
        self._retire(replica, reason)

    def fetch(self, fetch: Fetch) -> None:
        """Request a fetch, or request it again; it ends with Arrived or Lost. A lost source is greeted again.

        It is lost with DEADLINE if the source does not accept it within its `seconds`, and with POOL_MOVED unless its
        epoch is current.
        """
        replica = fetch.ticket.engine, fetch.ticket.replica
        if self._lent is None or fetch.epoch != self._lent.number:
            self._lose(fetch, _MOVED)
            return
        if replica not in self.sources:
            error = LocalError(ErrorCode.WRONG_PEER, "ticket", "a connected source", str(replica), UNCONNECTED)
            self._lose(fetch, error)
            return
        try:
            self._greet(replica, *self.sources[replica])
        except Exception as error:  # memory is short, for example: nothing was requested
            own = LocalError(ErrorCode.ABORTED, "", "a connection", repr(error), "fetch again")
            self._lose(fetch, error if isinstance(error, KvprotoError) else own, error)
            raise
        self._links[replica].fetch(fetch)

    def _lose(self, fetch: Fetch, error: KvprotoError, raised: Exception | None = None) -> None:
        """Lose a fetch that no source has heard of."""
        fetch.expect_nothing()
        self._events.append(fetch.lose(error, True, raised))

    # pools

    def sleep(self, error: KvprotoError) -> LentSinkPool:
        """End all fetches with this error and take the pool back; PoolFree reports when nothing can use it."""
        assert self._lent is not None
        leaving, self._lent = self._lent, None
        self._leaving.append(leaving)
        self._recheck = True
        for link in self._all():
            link.sleep(error)
            self.needs_turn(link)
        for replica in [r for r, link in self._links.items() if not link.adaptable(self.pool)]:
            self._set_aside(replica)
        return leaving

    def move(self, pool: Pool, epoch: int) -> LentSinkPool | None:
        """Use another pool from now on; fetches under way end in the old one, until PoolFree reports it."""
        leaving, self.pool, self.epoch = self._lent, pool, epoch
        self._lent = LentSinkPool(epoch, pool, quarantine=Quarantine(pool.layout, self._share))
        if leaving is not None:
            self._leaving.append(leaving)
            self._recheck = True
        for replica, (address, server) in self.sources.items():
            link = self._links.get(replica)
            if link is not None and link.adaptable(pool):
                link.expose(self._lent)
                self.needs_turn(link)
                continue
            if link is not None:  # it finishes what is under way, and then says Goodbye
                link.drop_waiting()
                self._set_aside(replica)
            self.connect(replica, address, server)
        return leaving

    def _holders(self, lent: LentSinkPool) -> list[str]:
        return [name for link in self._all() for name in link.holders(lent)]

    def census(self) -> Counters:
        counters = [link.endpoint.census() for link in self._all()]
        return Counters(
            sum(count.peers for count in counters),
            sum(count.suspects for count in counters),
            self._resends + sum(count.resends for count in counters),
            frozenset().union(*(count.names for count in counters)),
        )

    @property
    def quarantined(self) -> dict[int, int]:
        """The number of pages, by group id, that a peer may still write."""
        return self._lent.quarantine.counts if self._lent is not None else {}

    def check_quarantine(self) -> None:
        """Raise LocalError(BUSY) if too many pages are in quarantine."""
        if self._lent is not None:
            self._lent.quarantine.check()

    # calls of links

    def needs_turn(self, link: SourceLink) -> None:
        """Give a link a turn soon."""
        self._awake[link] = None

    def report(self, link: SourceLink, event: Event) -> None:
        """Pass an event to the engine; what keeps a source from being ready is reported once, not once for each try."""
        if isinstance(event, Refused | Disconnected):
            reported = self._reported.setdefault(link.replica, set())
            reason = str(event.error) if isinstance(event, Refused) else event.reason
            self.reasons = {**self.reasons, link.replica: reason}
            if (said := (type(event), event.peer, reason)) in reported:
                return
            if len(reported) < _MOST_REPORTED:
                reported.add(said)
        self._events.append(event)

    def send(self, link: SourceLink, address: str, frame: bytes) -> None:
        """Send a frame; raises KvprotoError for an address that cannot be used."""
        self._dialer.send((link, address), frame, link.server)

    # turns

    def turn(self, ready: Collection[int] | None = None) -> list[Event]:
        """Receive, read and answer; return events. `ready` holds readable descriptors (None: look at all)."""
        context, now = self._context, machine.monotonic()
        if context.background.results:
            context.background.turn()
        for fd in ready or ():
            if fd in self._bells:
                self._bells[fd].acknowledge()
        self._receive(ready, now)
        context.timers.run(now)
        if self._polled:
            self._awake |= dict.fromkeys(self._polled)
        self._recheck = self._recheck or bool(self._awake or context.verification.waiting)
        self._turn_links(now)
        if context.verification.waiting:
            context.verification.advance()
            self._turn_links(now)
        if self._leaving and self._recheck:
            free = free_pools(self._leaving, self._holders, self.transports, self.pool)
            self._events += free
            if free:
                self._awake |= self._former
        self._recheck = False
        events, self._events = self._events, []
        return events

    def _turn_links(self, now: float) -> None:
        """Give links that have something to do their turns, and note what they have become."""
        while self._awake:
            awake, self._awake = self._awake, {}
            for link in awake:
                if not link.former and self._links.get(link.replica) is not link:
                    continue  # it has been dropped
                link.turn(now)
                if link.copying:
                    self._polled[link] = True
                elif self._polled.get(link):
                    self._polled[link] = False  # one more turn, as what has become free is granted again
                else:
                    self._polled.pop(link, None)
                self._watch(link)
                if not link.former:
                    self._note(link, now)
                elif link.idle:
                    self._forget(link)

    def _receive(self, ready: Collection[int] | None, now: float) -> None:
        """Receive for a while; the last frames of a writer that has ended are received before its end is noted."""
        if ready is None or not self._watched.keys().isdisjoint(ready):
            self._watch_ends(list(self._watched) if ready is None else ready)
        for (link, address), frame in self._dialer.receive(ready):
            link.endpoint.receive(address, frame, now)
            self._awake[link] = None
            if machine.monotonic() - now > RECEIVE_TIME:
                break
        for (link, address), error in self._dialer.refusals(ready):
            link.refuse(address, error, by_us=error.code != ErrorCode.NOT_ALLOWED)
        for link, address in self._dialer.returned(ready):
            link.endpoint.returned(address, now)
        dying, self._dying = self._dying, []
        for writer in dying:
            if self._dialer.holds(writer.link):
                self._dying.append(writer)
            else:
                writer.link.endpoint.died(writer.session, now)
                self._awake[writer.link] = None

    def _watch_ends(self, ready: Collection[int]) -> None:
        """Note the writers whose processes have ended."""
        for fd in ready:
            writer = self._watched.get(fd)
            if writer is not None and writer.watch is not None and writer.watch.ended:
                del self._watched[fd]
                self._filenos = None, {}
                writer.watch.close()
                writer.watch = None
                self._dying.append(writer)

    def _watch(self, link: SourceLink) -> None:
        """Watch the processes that write this side's memory over a link."""
        for session, process in link.endpoint.writers().items():
            if (link, session) in self._writers:
                continue
            writer = self._writers[link, session] = _Writer(link, session, machine.watch(process))
            if writer.watch is None:
                continue
            if (fd := writer.watch.fileno()) is None:  # it has ended before
                writer.watch = None
                self._dying.append(writer)
            else:
                self._watched[fd] = writer
                self._filenos = None, {}

    def _note(self, link: SourceLink, now: float) -> None:
        """Note whether a link is ready, is over, or is to be made again."""
        if link.usable != (link.replica in self.ready):
            self.ready = self.ready ^ {link.replica}
            self._again.pop(link.replica, None)
            self._reported.pop(link.replica, None)
        if self._eager and not link.awaited and link.over:
            link.awaited = True
            self._greet_later(link, now)
        unreached = self._context.unreached
        if unreached and unreached[link.replica] >= _MOST_UNREACHED:
            del unreached[link.replica]
            for transport in self.transports:
                transport.unreachable()
            self._retire(link.replica, "its copies do not arrive: the memory is exposed again")

    def filenos(self) -> Mapping[int, object]:
        """Descriptors that are readable when a turn has something to do, as `rank.driver.Node` says."""
        dialed = self._dialer.filenos()
        if self._filenos[0] is not dialed:
            self._bells = bells(self.transports)
            fixed = dict.fromkeys((self._context.background.fileno(), *self._bells), self)
            self._filenos = dialed, {**dialed, **fixed, **self._watched}
        return self._filenos[1]

    def timeout(self) -> float | None:
        if self._events or self._awake or self._dying or self._context.verification.waiting or self._dialer.pending:
            return 0.0
        intervals: list[float] = []
        for link, copying in self._polled.items():
            if not copying:
                return 0.0
            if (seconds := link.poll_interval) is not None:
                intervals.append(seconds)
        if (deadline := self._context.timers.next()) is not None:
            intervals.append(max(deadline - machine.monotonic(), 0.0))
        return min(intervals, default=None)

    def _all(self) -> list[SourceLink]:
        return [*self._links.values(), *self._former]

    def _retire(self, replica: Replica, reason: str) -> None:
        """End a link: its fetches under way are lost, and their pages stay in quarantine until there is proof."""
        link = self._links.get(replica)
        if link is None:
            return
        if not link.over:
            link.endpoint.goodbye(reason)
            link.fail(RemoteError(ErrorCode.ABORTED, "", advice=reason))
        self._set_aside(replica)

    def _set_aside(self, replica: Replica) -> None:
        """Keep a link only until nothing of its fetches waits for proof."""
        link = self._links.pop(replica)
        self._former[link], link.former = None, True
        self.ready -= {replica}
        self.needs_turn(link)

    def _forget(self, link: SourceLink) -> None:
        """Drop a former link, as nothing of its fetches waits for proof, unless it holds a pool."""
        link.close("over")
        if any(link.holders(lent) for lent in self._leaving):
            return
        del self._former[link]
        link.former = False
        self._polled.pop(link, None)
        self._resends += link.endpoint.resends
        self._dialer.drop(link)
        for key in [key for key in self._writers if key[0] is link]:
            watch = self._writers.pop(key).watch
            if watch is not None and (fd := watch.fileno()) is not None:
                del self._watched[fd]
                self._filenos = None, {}
                watch.close()

    def close(self, reason: str) -> None:
        for link in self._all():
            link.close(reason)
        for writer in self._writers.values():
            if writer.watch is not None:
                writer.watch.close()
        self._dialer.close()
        self._context.background.close()
        for transport in self.transports:
            transport.close()
