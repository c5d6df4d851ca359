"""Tickets at a source rank: who may use one, who waits for its request, and when the request may be freed.

A ticket has a state from when the engine expects its request, or a Transfer names it, until every sink rank that this
rank serves has ended its part, or until its deadline. Only tickets that have changed are examined, so that the cost of
a frame does not grow with the number of waiting Transfers.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from kvproto.copying.grants import held_from
from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import Declined, Unwanted
from kvproto.planning.kinds import KINDS, NO_AXES, axis_of, length_of
from kvproto.session import limits
from kvproto.session.descriptions import Described
from kvproto.session.endpoint import SourceCalls
from kvproto.session.error_fields import mismatch
from kvproto.session.records import SourceAttempt
from kvproto.session.table import TransferState
from kvproto.session.timers import Timer, Timers
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, RequestState

_GONE = "begin there, or allow the window to begin late"
_UNGRANTED = "the ticket's deadline passed before the sink had granted all items: make a new ticket"
_LATE = "the ticket's deadline passed before prefill was finished: make a new ticket"


@attrs.define(eq=False)
class TicketState:
    key: bytes = attrs.field(repr=False)
    deadline: float
    timer: Timer
    request: Any = None
    """The engine's record of the request; None until it expects one."""
    content: bytes | None = None
    """The digest of the prompt; None until the engine expects the request."""
    tokens: int | None = None
    """The length of the prompt, if the engine has stated it."""
    axes: Mapping[str, int] = {}
    """The lengths of its other axes."""
    bound: tuple[str, int] | None = None
    """The engine and replica of the sink that used the ticket first."""
    users: dict[int, SourceAttempt] = attrs.Factory(dict)
    """The transfers that use the ticket, by session."""
    waiting: dict[int, SourceAttempt] = attrs.Factory(dict)
    """The users that are accepted but not answered."""
    finished: bool = False
    unwanted: bool = False
    """Whether Unwanted was reported: every transfer that asked has been aborted or lost."""
    since: Mapping[int, int] = {}
    """The first token whose items the engine holds, by group id, unless it is token 0."""
    error: KvprotoError | None = None
    """The reason that the engine cannot produce the request."""

    def progress(self) -> RequestState:
        """The state of the request, as Accepted states it."""
        if self.content is None:
            return RequestState.PENDING
        return RequestState.READY if self.finished else RequestState.RUNNING

    def take_waiting(self) -> list[SourceAttempt]:
        """Remove all waiting transfers, and return the ones that are still wanted."""
        waiting, self.waiting = self.waiting, {}
        return [attempt for attempt in waiting.values() if attempt.session.open and attempt.running]

    def asking(self) -> list[SourceAttempt]:
        """The transfers that wait for the request, which may get some rows before all are computed."""
        if self.waiting and self.content is not None:
            self.waiting = {attempt.session.session: attempt for attempt in self.take_waiting()}
            return list(self.waiting.values())
        return []

    def served(self, now: float) -> bool:
        """Whether any transfer of the request is still under way."""
        for attempt in self.users.values():
            if attempt.state != TransferState.ENDED and (attempt.session.open or attempt.lent(now)):
                return True
        return False


class Tickets:
    """All tickets of a source rank."""

    def __init__(self, rank: int, timers: Timers, calls: SourceCalls, closed: set[int]) -> None:
        """`closed` collects the ids of sessions that have ended and may be forgotten, as no ticket needs them."""
        self._rank, self._timers, self._calls, self._closed = rank, timers, calls, closed
        self.wait = limits.TICKET_WAIT
        """Seconds that a Transfer waits for the prompt of its ticket."""
        self._states: dict[bytes, TicketState] = {}
        self._used: OrderedDict[bytes, float] = OrderedDict()
        """Deadlines of tickets whose states have ended (KVP-TKT-USED)."""
        self.touched: dict[TicketState, None] = {}
        """States to examine in the next `settle`; a set that was large once would stay slow to take from."""

    def __iter__(self) -> Iterator[TicketState]:
        return iter(self._states.values())

    # calls of the engine

    def expect(
        self,
        ticket: m.Ticket,
        request: Any,
        content: bytes,
        now: float,
        tokens: int | None = None,
        axes: Mapping[str, int] = NO_AXES,
    ) -> TicketState:
        """Accept the engine's request for a ticket; its first use by a Transfer binds it to one sink.

        `tokens` and `axes` are the lengths of its prompt and of its other axes. If `tokens` is given, a Transfer for
        more is refused at once (KVP-GRANT-PROMPT).
        """
        state = self._state(bytes(ticket.key), now)
        state.timer.cancel()
        state.deadline = now + ticket.deadline / 1000
        state.timer = self._timers.at(state.deadline, partial(self._expire, state))
        state.request, state.content, state.tokens, state.axes = request, content, tokens, axes
        self.touched[state] = None
        for attempt in state.take_waiting():
            self._match(state, attempt, now)
        return state

    def used(self, key: bytes, now: float) -> bool:
        """Whether a request used this ticket and its deadline has not passed; may be called from any thread."""
        state = self._states.get(key)
        return now < self._used.get(key, now) or (state is not None and state.content is not None)

    def hold(self, state: TicketState, since: Mapping[int, int], now: float) -> None:
        """Record the first token, by group id, whose items the engine still holds; fail Transfers for earlier ones."""
        if state.since == since:
            return
        state.since = dict(since)
        for attempt in state.take_waiting():
            try:
                _check_held(state, attempt.described, attempt.asked)
                state.waiting[attempt.session.session] = attempt
            except RemoteError as error:
                attempt.fail(error, now)
        self.touched[state] = None

    def finish(self, state: TicketState) -> None:
        """Serve the transfers that wait for this request, as its prefill is over."""
        state.finished = True
        self._serve(state)
        self.touched[state] = None

    def refuse(self, state: TicketState, error: KvprotoError, now: float) -> None:
        """Fail the transfers that wait for this request, and later ones, as the engine cannot produce it."""
        state.error = error
        for attempt in state.take_waiting():
            attempt.fail(error, now)
        self.touched[state] = None

    # transfers

    def is_asked(self, key: bytes) -> bool:
        """Whether a rank of a sink uses this ticket."""
        state = self._states.get(key)
        return state is not None and bool(state.users)

    def seek(self, attempt: SourceAttempt, transfer: m.Transfer, now: float) -> None:
        """Match a Transfer with its ticket, and accept or fail it."""
        key = bytes(transfer.ticket)
        if now < self._used.get(key, now):
            attempt.fail(_used("no more transfers, as all of this ticket are over", transfer), now)
            return
        state = attempt.ticket = self._state(key, now)
        self._match(state, attempt, now)
        self.touched[state] = None

    def granted(self, attempt: SourceAttempt) -> None:
        """Serve a transfer whose sink rank has granted more items."""
        if attempt.ticket is not None:
            self._serve(attempt.ticket)
            self.touched[attempt.ticket] = None

    def touch(self, attempt: SourceAttempt) -> None:
        """Examine the request of this attempt in the next `settle`."""
        if attempt.ticket is not None:
            self.touched[attempt.ticket] = None

    def restated(self, version: int, error: Any, now: float) -> None:
        """Fail Transfers of an earlier Description whose prompt has not come; their tickets count as unused.

        `error` makes the reason from the version and the Transfer. Clauses KVP-TRN-CHANGED and KVP-TKT-CHANGED.
        """
        for state in [state for state in self._states.values() if state.content is None]:
            for attempt in list(state.users.values()):
                if attempt.session.open and attempt.running:
                    attempt.fail(error(version, attempt.transfer), now)
                del state.users[attempt.session.session]
                state.waiting.pop(attempt.session.session, None)
                self._leave(attempt)
            state.bound = None

    def settle(self, now: float) -> None:
        """Release requests that every routed sink rank has ended."""
        while self.touched:
            state, _ = self.touched.popitem()
            if state.request is not None:
                self._calls.request_changed(state.request)
            if not state.users or self._states.get(state.key) is not state:
                continue
            if state.finished and state.content is not None:
                for attempt in state.asking():  # prefill is over: ask for the items that are not granted yet
                    if attempt.session.intent is not None:
                        attempt.session.intent.progress(attempt, None, now)
            if state.served(now):
                continue
            if not state.finished and state.content is not None and state.error is None and not state.unwanted:
                state.unwanted = True
                self._calls.report(Unwanted(state.request))
            if state.finished and not state.waiting:
                self._conclude(state, now)

    def _conclude(self, state: TicketState, now: float) -> None:
        """Release a request if all sink ranks that the plan names have ended."""
        attempts = sorted(state.users.values(), key=lambda attempt: attempt.lost is None)
        plan = attempts[0].described.plan
        lost_by = {attempt.session.peer.rank: attempt.lost for attempt in attempts}  # a rank may use two sessions
        if lost_by.keys() >= set(plan.served(self._rank)):
            self._release(state, now)
            lost = {rank: error for rank, error in lost_by.items() if error is not None}
            routed = tuple(sorted({route.source for route in plan.routes}))
            self._calls.request_released(state.request, routed, lost)

    def _state(self, key: bytes, now: float) -> TicketState:
        state = self._states.get(key)
        if state is None:
            deadline = now + self.wait
            timer = self._timers.at(deadline, lambda at: self._expire(self._states[key], at))
            state = self._states[key] = TicketState(key, deadline, timer)
        return state

    def _match(self, state: TicketState, attempt: SourceAttempt, now: float) -> None:
        """Accept a right Transfer, or fail it; one that is wrong only in its tokens has used the ticket."""
        session, peer, described, transfer = attempt.session, attempt.session.peer, attempt.described, attempt.asked
        try:
            _check(state, transfer, described, (peer.engine, peer.replica), state.users.get(session.session))
        except KvprotoError as error:
            attempt.fail(error, now)
            if state.users.get(session.session) is attempt:  # it came before its prompt, and has used nothing
                del state.users[session.session]
                self._leave(attempt)
                state.bound = state.bound if state.users else None
            if state.content is not None and state.error is None:
                self._calls.report(Declined(state.request, session.name, error.kept()))
            return
        if session.session not in state.users:
            session.tickets += 1
        state.users[session.session], state.unwanted = attempt, False
        state.bound = peer.engine, peer.replica
        try:
            if state.tokens is not None:
                _check_ends(state.tokens, state.axes, described, transfer)
            _check_held(state, described, transfer)
        except KvprotoError as error:
            attempt.fail(error, now)
            return
        if attempt.state == TransferState.ASKED:
            session.transfers.accept(attempt, state.progress)
        state.waiting[session.session] = attempt
        self._serve(state)

    def _serve(self, state: TicketState) -> None:
        if state.finished and state.content is not None:
            for attempt in state.take_waiting():
                if attempt.whole:
                    self._calls.transfer_due(attempt)
                else:
                    state.waiting[attempt.session.session] = attempt

    def _expire(self, state: TicketState, now: float) -> None:
        """End a ticket whose deadline has passed (KVP-TKT-EARLY, KVP-TKT-DEADLINE)."""
        self._release(state, now)
        self.touched[state] = None
        error = RemoteError(ErrorCode.DEADLINE, "ticket", advice=_UNGRANTED if state.finished else _LATE)
        if state.content is None:
            wanted = f"a prompt with this ticket within {self.wait:g} s of the first Transfer"
            advice = "the prompt never came to this source: route it here too, under a new ticket"
            error = RemoteError(ErrorCode.UNKNOWN_TICKET, "ticket", wanted, "only Transfers", advice)
        for attempt in state.take_waiting():
            attempt.fail(error, now)
        if state.content is not None and (state.error is None or state.finished):
            self._calls.request_expired(state.request)

    def _release(self, state: TicketState, now: float) -> None:
        del self._states[state.key]
        state.timer.cancel()
        if (state.users or state.content is not None) and now < state.deadline:
            self._used[state.key] = state.deadline
            if len(self._used) > limits.MAX_USED_TICKETS:
                self._used.popitem(last=False)
        while self._used and next(iter(self._used.values())) <= now:
            self._used.popitem(last=False)
        for attempt in state.users.values():
            self._leave(attempt)
            if attempt.session.pull is not None:
                attempt.session.pull.released(attempt)
        state.users.clear()  # breaks a reference cycle, as each attempt refers to its ticket

    def _leave(self, attempt: SourceAttempt) -> None:
        """Note that one ticket fewer needs the session of an attempt."""
        session = attempt.session
        session.tickets -= 1
        if not session.open:
            self._closed.add(session.session)


def _used(mine: str, transfer: m.Transfer) -> RemoteError:
    yours = f"sequence {transfer.sequence}"
    return RemoteError(ErrorCode.TICKET_USED, "ticket", mine, yours, "make a new ticket for every request")


def _check(
    state: TicketState, transfer: m.Transfer, described: Described, sink: tuple[str, int], user: SourceAttempt | None
) -> None:
    """Raise the first reason why a Transfer may not use the ticket, in the order of transfers.md (KVP-TRN-CHECKS).

    `user` is the transfer of the same session that uses it already.
    """
    if state.error is not None:
        raise state.error.again()
    if state.content is not None and state.content != transfer.content:
        raise mismatch(state.content, state.tokens, transfer, described.sink)
    if state.bound not in (None, sink):
        yours = f"{sink[0]} replica {sink[1]}"
        raise RemoteError(ErrorCode.TICKET_BOUND, "ticket", "the sink that it is bound to", yours, "make a new ticket")
    if user is not None and user.sequence != transfer.sequence:
        raise _used(f"only sequence {user.sequence}, which uses it", transfer)


def _check_ends(tokens: int, axes: Mapping[str, int], described: Described, transfer: m.Transfer) -> None:
    """Raise BAD_GRANT if a window ends beyond its axis (KVP-GRANT-PROMPT)."""
    groups = {group.id: group for group in described.sink.groups}
    for i, grant in enumerate(transfer.grants):
        group, end = groups[grant.group], max(grant.valid, grant.first + grant.count)
        most = length_of(group, tokens, axes)
        if end > most and KINDS[group.kind].has_memory:
            axis = axis_of(group)
            mine, yours = f"a prompt of {most} {axis}", f"{axis} up to {end}"
            advice = "the two prompts differ in length"
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].valid", mine, yours, advice)


def _check_held(state: TicketState, described: Described, transfer: m.Transfer) -> None:
    if state.since:
        groups = {group.id: group for group in described.sink.groups}
        check_held(held_from(described.routes, groups, state.since), transfer.grants)


def check_held(held: Mapping[int, int], grants: Sequence[m.Grants]) -> None:
    """Raise NOT_HELD if a window begins before the first token that is `held`, by group id (KVP-GRANT-HELD)."""
    for i, grant in enumerate(grants):
        first = held.get(grant.group, 0)
        if grant.count and not grant.late and grant.first < first:
            mine, yours = f"tokens from {first} on", f"tokens from {grant.first} on"
            raise RemoteError(ErrorCode.NOT_HELD, f"grants[{i}].first", mine, yours, _GONE)
