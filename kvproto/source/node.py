"""A source rank: it accepts requests, copies their rows into the sinks' memory, and reports when pages are free."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from kvproto.errors import KvprotoError, RemoteError
from kvproto.net import Listener
from kvproto.options import LEASE, PART_BYTES, Spread
from kvproto.planning.axes import NO_AXES
from kvproto.rank.background import Background
from kvproto.rank.checksums import BEGUN, SUM_TIME, Checksums, bytes_by_name, session_id
from kvproto.rank.events import Copied, PoolReturned, RequestOver
from kvproto.rank.lent import returned
from kvproto.rank.rank_pool import RankPool
from kvproto.rank.registration import features_of
from kvproto.session import Party, SourceEndpoint
from kvproto.session.events import Changed, Expired, Fetched, RegisterAsked, Released, TransferRequested, UnmapAsked
from kvproto.session.records import Counters
from kvproto.source.copies import Dispatcher, Read
from kvproto.source.offers import offered
from kvproto.source.prefill import Computed, Finished, Request
from kvproto.source.progress import Part, SendProgress
from kvproto.source.schedule import Attempt, LastPart, Scheduler
from kvproto.source.sink_memory import Peers
from kvproto.transport import default
from kvproto.transport.base import Piece, Transport
from kvproto.transport.process import this_process
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Ticket

__all__ = ["SourceNode"]

_TURN = 0.001
"""Seconds after which a turn stops receiving, so that slow frames do not hold up copies."""
_OVER = RemoteError(ErrorCode.ABORTED, "", "the transfer is over", "")
_AWAY = RemoteError(ErrorCode.DRAINING, "", "this engine is going away", "", "use another engine")
_LATE = RemoteError(ErrorCode.DEADLINE, "ticket", "not fetched in time", "", "make a new ticket")


class SourceNode:
    """The node of a prefill rank, driven by `kvproto.rank.driver`."""

    def __init__(
        self, party: Party, pool: RankPool, listener: Listener, endpoints: Mapping[int, str], *,
        verify: bool | Literal["pages"] = True, transports: Sequence[Transport] = (), pull: bool = False,
        part_bytes: int = PART_BYTES, lease: float = LEASE, first_part_ratio: float | None = None,
        spread: Spread = "even", cold_draft: bool = False, ticket_wait: float | None = None,
    ) -> None:  # fmt: skip
        """See `kvproto.Options`; `endpoints` are the addresses of all ranks of this replica, for Welcome."""
        self.pool, self._listener, self._lease = pool, listener, lease
        self.transports = tuple(transports) or (default(pool.memories),)
        self.endpoint = SourceEndpoint(
            party, pool.layout.geometry, dict(endpoints),
            features_of(self.transports, verify, pull, spread, cold_draft), session_id, this_process(), listener.admit,
        )  # fmt: skip
        self.endpoint.ticket_wait = ticket_wait
        self._scheduler = Scheduler(part_bytes, first_part_ratio)
        self._dispatcher = Dispatcher(pool.memories, self._unwanted, self._arrived)
        self._requests: dict[bytes, Request] = {}
        self._over: dict[bytes, RequestOver] = {}
        """Requests that have ended, while copies still read their items."""
        self._attempts: dict[bytes, dict[tuple[int, int, int], Attempt]] = {}
        """Attempts by ticket, so that the cost of a turn does not grow with the number of waiting transfers."""
        self._offers: dict[tuple[int, int, int], tuple[Attempt, float]] = {}
        """Attempts that sinks may read, and since when."""
        self._backstage = Background()
        self.endpoint.plans.defer, self.endpoint.name_of = self._backstage.defer, listener.name_of
        self._peers = Peers(self.endpoint, pool, self.transports, self._backstage.defer)
        self._computing: set[bytes] = set()
        """Requests with rows that are computed."""
        self._changed: dict[bytes, None] = {}
        """Requests that the next turn may hand over more of, in order."""
        self._leaving: list[Read] = []
        """Pools that were taken back, until nothing reads them any more."""
        self.epoch = 1
        """The epoch of the current pool, or of the last one while asleep."""
        self._to_check: set[bytes] = set()
        """Requests with transfers that may have ended."""

    # calls of the engine

    def expect(self, ticket: Ticket, content: bytes, tokens: int, axes: Mapping[str, int] = NO_AXES) -> None:
        """Accept the request of a ticket, whose prompt has `tokens` tokens and `axes` positions on other axes."""
        self._requests.setdefault(bytes(ticket.key), Request(axes))
        self._changed[bytes(ticket.key)] = None
        self.endpoint.expect(ticket, content, time.monotonic(), tokens, axes)

    def computed(self, key: bytes, computed: Computed) -> None:
        """Copy computed rows to the sinks that ask for them, in parts, each row once; items stay until RequestOver.

        Through staging slots, layers are sent in order, each when all tokens that a sink asked for are computed and all
        items are named: after the last chunk of a prompt. Transports that are not incremental write at the end.
        """
        if (request := self._requests.get(key)) is not None:  # otherwise it has ended
            request.add(computed)
            self.endpoint.hold(key, request.since, time.monotonic())
            self._computing.add(key)
            self._changed[key] = None

    def finish(self, key: bytes, finished: Finished) -> None:
        """Serve the sinks that ask for a request whose prefill is over; items must stay until RequestOver."""
        if (request := self._requests.get(key)) is not None:  # otherwise it has ended
            request.finished, request.since = finished, finished.since
            request.version += 1
            self._computing.add(key)
            self._changed[key] = None
            self.endpoint.hold(key, finished.since, time.monotonic())
            self.endpoint.finish(key)

    def refuse(self, key: bytes, error: KvprotoError) -> None:
        """End a request that cannot be produced; until the ticket's deadline, sinks that ask for it receive the error.

        Its items are free at RequestOver. Transfers that are being served after `finish` go on.
        """
        unused = self.endpoint.refuse(key, error, time.monotonic())
        self._to_check.add(key)
        if (request := self._requests.get(key)) is not None and (unused or request.finished is None):
            self._over.setdefault(key, RequestOver(key, ()))

    def drain(self) -> None:
        """Finish what sinks have asked for and refuse all other requests (KVP-SES-DRAINING)."""
        self.endpoint.drain()
        for key in self.endpoint.unasked():
            self.refuse(key, _AWAY)

    # pools

    def sleep(self, error: KvprotoError) -> Read:
        """End all requests with this error and take the pool back; PoolReturned reports when nothing reads it."""
        for key in list(self._requests):
            self.refuse(key, error)
            for attempt in self._attempts.get(key, {}).values():
                attempt.failure = attempt.failure or error
                self._dispatcher.stop(attempt, error)
        copied = tuple(a for some in self._attempts.values() for a in some.values() if a.copies)
        leaving = Read(self.epoch, self.pool, attempts=copied)
        self._leaving.append(leaving)
        self._peers.sleep()
        return leaving

    def wake(self, pool: RankPool, epoch: int, endpoints: Mapping[int, str]) -> None:
        """Serve requests from another pool; `endpoints` as in `__init__`, for a geometry that differs."""
        if pool.layout.geometry != self.endpoint.geometry:
            self.endpoint.restate(pool.layout.geometry, endpoints, time.monotonic())
        self.pool, self.epoch, self._dispatcher.memories = pool, epoch, pool.memories
        self._peers.wake(pool, self.epoch)

    def _holders(self, lent: Read) -> list[str]:
        return self._peers.holders(lent.number) + ["copies under way"] * lent.copied

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return self._dispatcher.busy

    def reads(self, key: bytes) -> bool:
        """Whether a copy still reads the items of this request."""
        return self._dispatcher.reads(key)

    def census(self) -> Counters:
        """Count its sinks now, and the messages that were sent again so far."""
        return self.endpoint.census()

    # turns

    def turn(self, ready: Collection[int] = ()) -> list[Any]:
        """Receive, copy and answer; return the events for the engine."""
        for transport in self.transports:
            if transport.fileno() in ready:
                transport.acknowledge()
        found: list[Any] = []
        if self._dispatcher.busy:  # a sink may be waiting for its end
            self._complete(found)
        now = time.monotonic()
        if self._listener.renew(now):
            self.endpoint.readmit()
        for conn, frame in self._listener.receive(ready):
            self.endpoint.receive(conn, frame, now)
            if time.monotonic() - now > _TURN:  # the next turn receives the rest, after this one has sent its answers
                break
        self._backstage.turn()
        self.endpoint.on_time(now)
        while True:
            events = self.endpoint.take_events()
            for event in events:
                found += self._handle(event)
            self._copy()
            moved = self._complete(found)
            for key in [key for key in self._over if not self.reads(key)]:
                found += self._release(self._over.pop(key))
            self._peers.unmap(a.peer.key for some in self._attempts.values() for a in some.values())
            self._flush()
            if not moved and not events:
                over = returned(self._leaving, self._holders, self.transports, self.pool)
                return found + [PoolReturned(lent.number) for lent in over]

    def filenos(self) -> list[int]:
        """Descriptors that are readable when a turn has something to do."""
        found = [self._backstage.fileno(), *(transport.fileno() for transport in self.transports)]
        return [*self._listener.filenos(), *(fd for fd in found if fd is not None)]

    def timeout(self) -> float | None:
        """Seconds until a turn is due even if no descriptor is readable; None if no timer is set."""
        if self._listener.pending or self._to_check:
            return 0.0
        found = [self._dispatcher.poll_interval]
        deadline = self.endpoint.next_deadline()
        found.append(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        return min((seconds for seconds in found if seconds is not None), default=None)

    def _handle(self, event: Any) -> list[Any]:
        """Act on an event of the endpoint; return what the engine should know."""
        match event:
            case RegisterAsked():
                self._peers.map(event)
            case UnmapAsked():
                self._peers.ask_unmap(event)
            case TransferRequested():
                self._join(event)
            case Changed():
                self._changed[event.key] = None
            case Expired():
                self._to_check.add(event.key)
                self._over.setdefault(event.key, RequestOver(event.key, None))
            case Released():
                self._to_check.add(event.key)
                self._over.setdefault(event.key, RequestOver(event.key, event.routed, event.lost))
            case Fetched():
                return self._fetched(event)
            case _:
                return [event]
        return []

    def _release(self, over: RequestOver) -> list[Any]:
        self._offers = {key: each for key, each in self._offers.items() if each[0].asked.key != over.key}
        self._computing.discard(over.key)
        self._changed.pop(over.key, None)
        return [over] if self._requests.pop(over.key, None) is not None else []

    def _flush(self) -> None:
        for conn, frame in self.endpoint.to_send(time.monotonic()):
            self._listener.send(conn, frame)

    # copies

    def _unwanted(self, attempt: Attempt) -> KvprotoError | None:
        if not self.endpoint.active(attempt.asked):
            return _OVER
        return _LATE if attempt.asked.key in self._over else None

    def _join(self, asked: TransferRequested) -> None:
        """Start or update the attempt of a sink rank that asks for a request, or grants more items for it."""
        key = (asked.session, asked.transfer.sequence, asked.transfer.attempt)
        peer = self._peers.get(asked.session, asked.transfer.epoch)
        if peer is not None:  # otherwise its session has ended
            attempts = self._attempts.setdefault(asked.key, {})
            known = attempts.setdefault(key, Attempt(asked, peer, SendProgress(peer.pair.nothing)))
            if known.asked is asked or known.take(asked):
                self._changed[asked.key] = None

    def _copy(self) -> None:
        """Start copies of requests that have changed, for all sinks that can be served; batched where that pays."""
        for key in [key for key in self._changed if key in self._computing]:
            for asked in self.endpoint.asking(key):
                self._join(asked)
        if not self._changed:
            return
        changed, self._changed = self._changed, {}
        self._to_check |= changed.keys()
        batches: dict[int, list[tuple[Attempt, Sequence[Part]]]] = {}
        for attempt in [each for key in changed for each in self._attempts.get(key, {}).values()]:
            if attempt.last is not None or attempt.failure is not None or self._unwanted(attempt) is not None:
                continue
            request = self._requests.get(attempt.asked.key)
            if request is None:
                attempt.failure = _OVER
                continue
            if attempt.stream is not None:
                self._feed(attempt, request)
                continue
            parts = self._scheduler.parts(attempt, request)
            if attempt.useful:
                self.endpoint.progress(attempt.asked, attempt.useful, time.monotonic())
            if parts:
                transport = attempt.peer.transport
                batches.setdefault(id(transport if transport.capabilities.batches else attempt), []).append(
                    (attempt, parts)
                )
        for batch in batches.values():
            self._start(batch)

    def _start(self, batch: Sequence[tuple[Attempt, Sequence[Part]]]) -> None:
        copying = self._dispatcher.start(batch, lambda attempt: self._requests[attempt.asked.key].finished is None)
        if copying is None:
            self._changed |= {attempt.asked.key: None for attempt, _ in batch if attempt.failure is None}
            return
        now = time.monotonic()
        for attempt, parts in batch:
            request = self._requests[attempt.asked.key]
            self.endpoint.copying(attempt.asked)
            if request.finished is not None and attempt.asked.whole:
                handoff = request.finished.handoffs(attempt.peer.pair)
                attempt.last = LastPart(now, sum(p.bytes for p in parts), handoff)
            elif copying.stream is not None:
                attempt.stream, attempt.seen = copying.stream, 0
                self._feed(attempt, request)
            else:
                attempt.progress.advance(attempt.there)

    def _feed(self, attempt: Attempt, request: Request) -> None:
        """Mark the rows that are computed now as ready in a stream under way."""
        assert attempt.stream is not None
        rows = self._scheduler.stream_rows(attempt, request)
        if rows is not None:
            if request.finished is not None:
                handoff = request.finished.handoffs(attempt.peer.pair)
                attempt.last = LastPart(time.monotonic(), attempt.stream.left, handoff)
            attempt.stream.mark_ready(rows.layers, rows.after)
        elif attempt.failure is not None:
            self._dispatcher.stop(attempt, attempt.failure)

    def _arrived(self, attempt: Attempt, piece: Piece) -> None:
        self.endpoint.stream(attempt.asked, piece, attempt.begins)

    def _complete(self, found: list[Any]) -> bool:
        """Answer the transfers that are copied, have failed, or are not wanted; whether there were any."""
        if self._dispatcher.busy:
            self._to_check |= {attempt.asked.key for attempt in self._dispatcher.advance()}
        keys, self._to_check = self._to_check, set()
        idle = [a for key in keys for a in self._attempts.get(key, {}).values() if not a.copies]
        over, until = [a for a in idle if a.last or a.failure or self._unwanted(a)], time.monotonic() + SUM_TIME
        for attempt in over[:BEGUN]:
            self._summed(attempt, 0.0)
        summed = [a for a in over if self._summed(a, until)]
        self._to_check |= {a.asked.key for a in over if a not in summed}
        for attempt in summed:
            key = attempt.asked.key
            del self._attempts[key][attempt.key]
            if not self._attempts[key]:
                del self._attempts[key]
            found += self._answer(attempt)
        return bool(summed)

    def _summed(self, attempt: Attempt, until: float) -> bool:
        """Start on its checksums and go on until `until`; whether they are computed, or not needed as it failed."""
        session = self.endpoint.sessions.get(attempt.asked.session)
        if attempt.failure or attempt.program is None or session is None or self._unwanted(attempt):
            return True
        if attempt.sums is None:
            attempt.sums = Checksums(attempt.peer, attempt.program, self.pool.memories, session.features)
        return attempt.sums.advance(until)

    def _answer(self, attempt: Attempt) -> list[Any]:
        """Send Done, Offer or Failed, now that no copy of the attempt is under way."""
        asked, program, last = attempt.asked, attempt.program, attempt.last
        session, now = self.endpoint.sessions.get(asked.session), time.monotonic()
        request = self._requests.get(asked.key)
        finished = request.finished if request is not None else None
        error = attempt.failure or self._unwanted(attempt)
        if error or not (session and request and finished and program and last and attempt.sums):
            self.endpoint.failed(asked, error or _OVER, now, attempt.proof)
            return []
        said = finished.outcome, last.handoff, attempt.sums.for_message(), attempt.begins
        if attempt.peer.reads:
            held = request.begun(attempt.peer.pair, asked.transfer.grants)
            grants = offered(attempt.peer.pair.routes, self.pool.layout, held, finished.items)
            self.endpoint.offer(asked, now, self._lease, grants, *said)
            self._offers[attempt.key] = attempt, now
            return []
        self.endpoint.done(asked, now, program.bytes, *said)
        self._flush()
        return [self._copied(attempt, bytes_by_name(attempt.peer, program), now - last.began, last.left)]

    def _fetched(self, event: Fetched) -> list[Any]:
        """Report that a sink rank has read what it was offered."""
        attempt, since = self._offers.pop((event.session, event.sequence, event.attempt), (None, 0.0))
        if attempt is None or attempt.program is None or event.bytes != attempt.program.bytes:
            return []
        moved, seconds = bytes_by_name(attempt.peer, attempt.program), time.monotonic() - since
        return [self._copied(attempt, moved, seconds, attempt.program.bytes)]

    def _copied(self, attempt: Attempt, moved: Mapping[str, int], seconds: float, left: int) -> Copied:
        asked, session = attempt.asked, self.endpoint.sessions.get(attempt.asked.session)
        peer, rank = session.name if session is not None else "", attempt.peer.pair.sink.rank
        return Copied(asked.key, rank, moved, seconds, left, peer, asked.transfer.epoch)

    def close(self, reason: str) -> None:
        """Say Goodbye to all sinks, then release everything."""
        self.endpoint.goodbye(reason)
        self._flush()
        self._listener.close()
        self._backstage.close()
        self._dispatcher.close()
        if not self._dispatcher.busy:
            self._peers.close()
        for transport in self.transports:
            transport.close()
