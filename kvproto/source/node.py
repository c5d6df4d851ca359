"""A turn of a source rank: receive, copy, answer, and report the requests whose pages are free."""

import logging
from collections.abc import Collection, Mapping, Sequence

from kvproto.copying.streams import Piece
from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import Event, Expired, Freed, Over, Sent, Undelivered
from kvproto.net import RECEIVE_TIME, Listener
from kvproto.options import Options
from kvproto.planning.kinds import NO_AXES
from kvproto.rank.background import Background
from kvproto.rank.checksums import BEGUN, SUM_TIME, Checksums, session_id
from kvproto.rank.handles import free_pools
from kvproto.rank.machine import machine
from kvproto.rank.pool import Pool
from kvproto.rank.registration import features_of
from kvproto.session import Party, SourceEndpoint
from kvproto.session.descriptions import Described
from kvproto.session.records import Answer, Counters, SourceAttempt
from kvproto.session.source import SourceSession
from kvproto.source.copies import Copies, LentSourcePool
from kvproto.source.page_guard import GuardedPages, PageGuard
from kvproto.source.prefill import Computed, Finished, offered
from kvproto.source.progress import CopyStep
from kvproto.source.request import Request
from kvproto.source.schedule import OVER, LastPart, Scheduler, Send
from kvproto.source.sink_memory import SinkMemory
from kvproto.transport import default
from kvproto.transport.base import Transport, bells
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Register

_log = logging.getLogger("kvproto")
_AWAY = RemoteError(ErrorCode.DRAINING, "", "this engine is going away", "", "use another engine")


class SourceNode:
    """The turns of a prefill rank, driven by `kvproto.rank.driver`; it answers the calls of its endpoint."""

    def __init__(
        self,
        party: Party,
        pool: Pool,
        listener: Listener,
        endpoints: Mapping[int, str],
        options: Options,
        transports: Sequence[Transport] = (),
    ) -> None:
        """`endpoints` are the addresses of all ranks of this replica, for Welcome."""
        self.pool, self._listener, self._lease = pool, listener, options.lease
        self.transports = tuple(transports) or (default(pool.memories),)
        features = features_of(self.transports, options)
        self.endpoint = SourceEndpoint(
            self, party, pool.layout.geometry, dict(endpoints), features, session_id, machine.process(), listener.admit
        )
        self.tickets = self.endpoint.tickets
        if options.ticket_wait is not None:
            self.tickets.wait = options.ticket_wait
        self._guard: PageGuard | None = None
        """Made with the first request that is guarded, for the pool of that time (`Options.debug_pages`)."""
        self._scheduler = Scheduler(options.part_bytes, options.first_part_ratio)
        self._copies = Copies(pool.memories, self._packed)
        self._background = Background()
        self.endpoint.plans.defer, self.endpoint.name_of = self._background.defer, listener.name_of
        self.memory = SinkMemory(self.endpoint, pool, self.transports, self._background.defer)
        self.requests: dict[Request, None] = {}
        """Requests that have not ended, in order."""
        self._events: list[Event] = []
        self._changed: dict[Request, None] = {}
        """Requests that the next turn may hand over more of, in order."""
        self._retry: list[Request] = []
        """Requests whose copies could not begin, to be examined again with the next turn."""
        self._to_check: dict[Send, None] = {}
        """Sends that may have ended."""
        self._ending: dict[Request, None] = {}
        """Requests that end as soon as no copy reads their items."""
        self._leaving: list[LentSourcePool] = []
        """Pools that were taken back, until nothing reads them any more."""
        self._filenos: dict[int, object] | None = None
        self._bells: dict[int, Transport] = {}
        """Transports by the descriptors on which they announce the end of copies."""
        self.epoch = 1
        """The epoch of the current pool, or of the last one while asleep."""

    # calls of the engine

    def expect(self, request: Request, content: bytes, tokens: int | None, axes: Mapping[str, int] = NO_AXES) -> None:
        """Accept a request, by the digest of its prompt and the lengths of the prompt and of its other axes."""
        self.requests[request] = self._changed[request] = None
        request.state = self.tickets.expect(request.ticket, request, content, machine.monotonic(), tokens, axes)

    def computed(self, request: Request, computed: Computed) -> None:
        """Note computed rows, which the next turn copies to the sinks that ask for them, each row once.

        Through staging slots, layers are sent in order, each when all tokens that a sink asked for are computed and all
        items are named: after the last chunk of a prompt. Transports that are not incremental write at the end.
        """
        if request.state is not None and request.over is None:
            request.prefill.add(computed)
            self.tickets.hold(request.state, request.prefill.since, machine.monotonic())
            self._changed[request] = None

    def finish(self, request: Request, finished: Finished) -> None:
        """Note the end of the prefill; the next turn copies what is left to the sinks that ask for the request."""
        if request.state is not None and request.over is None:
            request.prefill.finish(finished)
            self._changed[request] = None
            self.tickets.hold(request.state, finished.since, machine.monotonic())
            self.tickets.finish(request.state)

    def guard(self, finished: Finished, axes: Mapping[str, int]) -> GuardedPages:
        """Take checksums of a request's pages, between two turns (`Options.debug_pages`)."""
        if self._guard is None or self._guard.pool is not self.pool:
            self._guard = PageGuard(self.pool, self.transports[0])
        return self._guard.guard(finished, axes)

    def refuse(self, request: Request, error: KvprotoError) -> None:
        """End a request that cannot be produced; until the ticket's deadline, sinks that ask for it receive the error.

        Copies of what was finished before go on, but streams, which wait for their sink, are stopped. The request ends
        once nothing reads its items: no copy, and no sink under a lease.
        """
        state, now = request.state, machine.monotonic()
        if state is None or request.over is not None:
            return
        self.tickets.refuse(state, error, now)
        self._ending[request] = None
        for send in request.sends:
            if send.last is None or send.stream is not None:
                send.failure = send.failure or error
                self._copies.stop(send, error)
            self._to_check[send] = None
        for attempt in state.users.values():
            if attempt.loan is not None and attempt.lent(now):
                attempt.loan.latest = attempt.loan.end
                self.endpoint.timers.at(attempt.loan.end, lambda at: self._lease_over(request))

    def _lease_over(self, request: Request) -> None:
        if request in self.requests:
            self._ending[request] = None

    def drain(self) -> None:
        """Finish what sinks have asked for and refuse all other requests (KVP-SES-DRAINING)."""
        self.endpoint.drain(machine.monotonic())
        for state in list(self.tickets):
            if state.content is not None and not state.users:
                self.refuse(state.request, _AWAY)

    # pools

    def sleep(self, error: KvprotoError) -> LentSourcePool:
        """End all requests with this error and take the pool back; PoolFree reports when nothing reads it."""
        sends = [send for request in self.requests for send in request.sends]
        for request in list(self.requests):
            self.refuse(request, error)
        for send in sends:
            send.failure = send.failure or error
            self._copies.stop(send, error)
        leaving = LentSourcePool(self.epoch, self.pool, sends=tuple(send for send in sends if send.copies))
        self._leaving.append(leaving)
        self.memory.sleep()
        return leaving

    def wake(self, pool: Pool, epoch: int, endpoints: Mapping[int, str]) -> None:
        """Serve requests from another pool; `endpoints` as in `__init__`, for a geometry that differs."""
        if pool.layout.geometry != self.endpoint.geometry:
            self.endpoint.restate(pool.layout.geometry, endpoints, machine.monotonic())
        self.pool, self.epoch, self._copies.memories = pool, epoch, pool.memories
        self.memory.wake(pool, self.epoch)

    def _holders(self, lent: LentSourcePool) -> list[str]:
        return self.memory.holders(lent.number) + ["copies under way"] * lent.copied

    def census(self) -> Counters:
        return self.endpoint.census()

    @property
    def quarantined(self) -> dict[int, int]:
        """The number of pages, by group id, of requests that are over but that a copy or a sink may still read."""
        counts: dict[int, int] = {}
        for request in list(self._ending):
            finished = request.prefill.finished
            for group, items in (request.prefill.items if finished is None else finished.items).items():
                counts[group] = counts.get(group, 0) + len(items)
        return counts

    # calls of the endpoint

    def report(self, event: Event) -> None:
        self._events.append(event)

    def attest(self, attestation: bytes, holds: bool) -> None:
        machine.attest(attestation, holds)

    def map_memory(self, session: SourceSession, register: Register, described: Described) -> None:
        self.memory.map(session, register, described)

    def unmap_memory(self, session: SourceSession, epoch: int) -> None:
        self.memory.unmapping.add((session.session, epoch))

    def request_changed(self, request: Request) -> None:
        if request.sends or (request.state is not None and request.state.waiting):
            self._changed[request] = None

    def transfer_due(self, attempt: SourceAttempt) -> None:
        self._join(attempt)
        if attempt.send is not None:
            self._changed[attempt.send.request] = None

    def request_released(self, request: Request, routed: tuple[int, ...], lost: Mapping[int, KvprotoError]) -> None:
        self._end(request, Undelivered(request, routed, lost) if lost else Freed(request, routed))

    def request_expired(self, request: Request) -> None:
        self._end(request, Expired(request))

    def transfer_read(self, attempt: SourceAttempt, count: int) -> None:
        send, attempt.send = attempt.send, None
        if send is None or send.program is None or send.request not in self.requests:  # its engine has forgotten it
            return
        if count == send.program.bytes:
            self._report_sent(send, machine.monotonic() - send.offered_at, count)

    def _end(self, request: Request, over: Over) -> None:
        if request.over is None:
            request.over, self._ending[request] = over, None
            self._to_check |= dict.fromkeys(request.sends)

    # turns

    def turn(self, ready: Collection[int] | None = None) -> list[Event]:
        """Receive, copy and answer; return the events for the engine."""
        for fd in ready or ():
            if fd in self._bells:
                self._bells[fd].acknowledge()
        if self._copies.under_way:  # a sink may be waiting for its end
            self._complete()
        now = machine.monotonic()
        if self._listener.renew(now):
            self.endpoint.readmit()
        for conn, frame in self._listener.receive(ready):
            self.endpoint.receive(conn, frame, now)
            if machine.monotonic() - now > RECEIVE_TIME:  # the next turn receives the rest, once this has answered
                break
        if self._background.results:
            self._background.turn()
        self.endpoint.on_time(now)
        if self._retry:
            self._changed |= dict.fromkeys(self._retry)
            self._retry.clear()
        self._flush()  # what has been answered does not wait for copies
        more = True
        while more:
            if self._changed:
                self._copy()
            if self._to_check or self._copies.under_way:
                self._complete()
            if self._ending:
                self._end_requests()
            if self.memory.unmapping or self.endpoint.over:
                self.memory.unmap(send.peer for request in self.requests for send in request.sends)
            ending = len(self._ending)
            self._flush()
            more = bool(self._changed) or len(self._ending) > ending
        if self._leaving:
            self._events += free_pools(self._leaving, self._holders, self.transports, self.pool)
        events, self._events = self._events, []
        return events

    def filenos(self) -> Mapping[int, object]:
        """Descriptors that are readable when a turn has something to do, as `rank.driver.Node` says."""
        if self._filenos is None:
            self._bells = bells(self.transports)
            fds = (*self._listener.filenos(), self._background.fileno(), *self._bells)
            self._filenos = dict.fromkeys(fds, self)
        return self._filenos

    def timeout(self) -> float | None:
        if self._to_check or self._changed or self._listener.pending:
            return 0.0
        interval, deadline = self._copies.poll_interval(), self.endpoint.timers.next()
        if deadline is None:
            return interval
        seconds = max(deadline - machine.monotonic(), 0.0)
        return seconds if interval is None else min(seconds, interval)

    def _end_requests(self) -> None:
        """End the requests that wait for it and whose items no copy and no sink reads any more."""
        now = machine.monotonic()
        for request in list(self._ending):
            if not request.sends and (request.over is not None or not request.lent(now)):
                del self._ending[request]
                self.requests.pop(request, None)
                if request.changed_for:
                    request.over = Undelivered(request, getattr(request.over, "routed", ()), request.changed_for)
                self._changed.pop(request, None)
                request.over = request.over or Freed(request, ())
                request._end(request.over)
                self._events.append(request.over)

    def _flush(self) -> None:
        endpoint = self.endpoint
        if endpoint.out or endpoint.tickets.touched:
            for conn, frame in endpoint.to_send(machine.monotonic()):
                self._listener.send(conn, frame)

    # copies

    def _join(self, attempt: SourceAttempt) -> None:
        """Begin to send to a sink rank that asks for a request, or note that it grants more items for it."""
        if attempt.send is not None:
            attempt.send.take_grants()
        elif attempt.epoch is not None and attempt.ticket is not None and attempt.epoch.mapping is not None:
            request, peer = attempt.ticket.request, attempt.epoch.mapping
            send = Send(request, request.prefill, attempt, peer, attempt.granted)
            request.sends.append(send)
            attempt.send = send

    def _copy(self) -> None:
        """Start copies of requests that have changed, for all sinks that can be served; batched where that pays."""
        changed, self._changed = self._changed, {}
        batches: dict[int, list[tuple[Send, Sequence[CopyStep]]]] = {}
        for request in changed:
            if request.state is not None and request.prefill.version:
                for attempt in request.state.asking():
                    self._join(attempt)
            for send in request.sends:
                self._to_check[send] = None
                if send.last is not None or send.failure is not None or send.unwanted() is not None:
                    continue
                if send.stream is not None:
                    self._feed(send)
                    continue
                steps = self._scheduler.steps(send)
                if send.useful:
                    self.endpoint.progress(send.attempt, send.useful, machine.monotonic())
                if steps:
                    transport = send.peer.transport
                    batch = id(transport if transport.capabilities.batches else send)
                    batches.setdefault(batch, []).append((send, steps))
        for sends in batches.values():
            self._start(sends)

    def _start(self, batch: Sequence[tuple[Send, Sequence[CopyStep]]]) -> None:
        copying = self._copies.start(batch)
        if copying is None:
            self._retry += [send.request for send, _ in batch if send.failure is None]
            return
        now = machine.monotonic()
        for send, steps in batch:
            finished = send.prefill.finished
            if finished is not None and send.attempt.whole:
                send.last = LastPart(now, sum([step.bytes for step in steps]), finished.handoffs(send.peer.pair))
                send.stream = copying.stream
            elif copying.stream is not None:
                send.stream, send.seen = copying.stream, 0
                self._feed(send)
            else:
                send.progress.advance(send.available)

    def _feed(self, send: Send) -> None:
        """Mark the rows that are computed now as ready in a stream under way."""
        assert send.stream is not None
        rows, finished = self._scheduler.stream_rows(send), send.prefill.finished
        if rows is not None:
            if finished is not None:
                send.last = LastPart(machine.monotonic(), send.stream.left, finished.handoffs(send.peer.pair))
            send.stream.mark_ready(rows.layers, rows.after)
        elif send.failure is not None:
            self._copies.stop(send, send.failure)

    def _packed(self, send: Send, piece: Piece) -> None:
        self.endpoint.stream(send.attempt, piece, send.begins)

    def _complete(self) -> None:
        """Answer the transfers that are copied, have failed, or are not wanted."""
        if self._copies.under_way:
            self._to_check |= dict.fromkeys(self._copies.advance())
        sends, self._to_check = self._to_check, {}
        over = [send for send in sends if not send.copies and (send.last or send.failure or send.unwanted())]
        if not over:
            return
        for send in over[1:BEGUN]:
            self._summed(send, 0.0)
        until = machine.monotonic() + SUM_TIME
        for send in over:
            if self._summed(send, until) and self._unchanged(send, until):
                send.request.sends.remove(send)
                self._answer(send)
                if send.check is not None and send.check.error is not None:
                    self.refuse(send.request, send.check.error)
            else:
                self._to_check[send] = None

    def _summed(self, send: Send, until: float) -> bool:
        """Start on its checksums and go on until `until`; whether they are computed, or not needed as it failed."""
        if send.failure or send.program is None or send.unwanted():
            return True
        if send.sums is None:
            send.sums = Checksums(send.peer, send.program, self.pool.memories, send.attempt.session.features)
        return send.sums.advance(until)

    def _unchanged(self, send: Send, until: float) -> bool:
        """Compare its pages with what `finish` found, if that is asked for; whether that is over, or it has failed."""
        finished = send.prefill.finished
        if finished is None or finished.guarded is None or send.failure or send.unwanted():
            return True
        send.check = send.check or finished.guarded.check()
        if not send.check.advance(until):
            return False
        if send.check.error is not None:
            send.failure = send.request.changed_for[send.peer.pair.sink.rank] = send.check.error
            _log.error("%s", send.check.error)
        return True

    def _answer(self, send: Send) -> None:
        """Send Done, Offer or Failed, now that no copy of the send is under way."""
        attempt, program, last, finished = send.attempt, send.program, send.last, send.prefill.finished
        now, attempt.send = machine.monotonic(), None
        error = send.failure or send.unwanted()
        if error or not (finished and program and last and send.sums):
            self.endpoint.failed(attempt, error or OVER, now, send.proof)
            return
        answer = Answer(finished.outcome, last.handoff, send.sums.for_message(), send.begins)
        if send.peer.reads:
            held = send.prefill.begun(send.peer.pair, send.granted)
            grants = offered(send.peer.pair.routes, self.pool.layout, held, finished.items)
            attempt.send, send.offered_at = send, now  # until the sink has read them
            self.endpoint.offer(attempt, self._lease, grants, answer, now)
            return
        self.endpoint.done(attempt, program.bytes, answer, now)
        self._flush()
        self._report_sent(send, now - last.began, last.left)

    def _report_sent(self, send: Send, seconds: float, left: int) -> None:
        attempt, program = send.attempt, send.program
        assert program is not None
        groups, peer = send.peer.pair.sink.groups, attempt.session.name
        moved = {groups[group].name: count for group, count in program.bytes_by_group().items()}
        sink, epoch = send.peer.pair.sink.rank, attempt.asked.epoch
        self._events.append(Sent(send.request, sink, moved, seconds, left, peer, epoch))

    def close(self, reason: str) -> None:
        self.endpoint.goodbye(reason)
        self._flush()
        self._listener.close()
        self._background.close()
        self._copies.close()
        if not self._copies.under_way:
            self.memory.close()
        self._to_check.clear()
        for request in self.requests:  # handles that the engine keeps must not hold memory
            for send in request.sends:
                send.attempt.send = None
            request.sends.clear()
        for transport in self.transports:
            transport.close()
