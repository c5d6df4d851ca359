"""Tickets at a source rank: who may use one, who waits for its request, and when the request may be freed.

A claim is a ticket that the engine expects, or that a Transfer names. It lives until every sink rank that this rank
serves has ended its part, or until its deadline. Only claims that have changed are examined, so that the cost of a
frame does not grow with the number of waiting Transfers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import attrs

from kvproto.copying.window_start import held_from
from kvproto.errors import KvprotoError, RemoteError
from kvproto.planning.axes import NO_AXES, axis_of, length_of
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import kind_of
from kvproto.session import limits
from kvproto.session.descriptions import Party
from kvproto.session.endpoint import Endpoint
from kvproto.session.error_fields import mismatch
from kvproto.session.events import Changed, Declined, Expired, Released, TransferRequested, Unwanted
from kvproto.session.intent import SourceIntent
from kvproto.session.pull import SourcePull
from kvproto.session.records import SourceAttempt
from kvproto.session.source import SourceSession
from kvproto.session.table import TransferState
from kvproto.session.timers import Timer
from kvproto.session.transfers import SourceTransfers, changed
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, RequestState

__all__ = ["Claims", "check_held"]

_GONE = "begin there, or allow the window to begin late"
_UNGRANTED = "the ticket's deadline passed before the sink had granted all items: make a new ticket"
_LATE = "the ticket's deadline passed before prefill was finished: make a new ticket"


class _User(NamedTuple):
    """A transfer that uses a ticket."""

    session: SourceSession
    attempt: SourceAttempt
    transfer: m.Transfer

    def fail(self, error: KvprotoError, now: float) -> None:
        self.session.part(SourceTransfers).fail(self.attempt, error, now)


@attrs.define(eq=False)
class _Claim:
    """One ticket."""

    key: bytes = attrs.field(repr=False)
    deadline: float
    timer: Timer
    content: bytes | None = None
    """None until the engine expects the request."""
    tokens: int | None = None
    """The length of the prompt, if the engine has stated it."""
    axes: Mapping[str, int] = {}
    """The lengths of its other axes."""
    bound: tuple[str, int] | None = None
    """The engine and replica of the sink that used the ticket first."""
    users: dict[int, _User] = attrs.Factory(dict)
    """The transfers that use the ticket, by session."""
    waiting: dict[int, _User] = attrs.Factory(dict)
    """Those of the users that are accepted but not answered."""
    finished: bool = False
    unwanted: bool = False
    """Whether Unwanted was reported: every transfer that asked has been aborted or lost."""
    since: Mapping[int, int] = {}
    """The first token whose items the engine holds, by group id, unless it is token 0."""
    error: KvprotoError | None = None
    """Why the engine cannot produce the request."""

    def progress(self) -> RequestState:
        """The state of the request, as Accepted states it."""
        if self.content is None:
            return RequestState.PENDING
        return RequestState.READY if self.finished else RequestState.RUNNING

    def take_waiting(self) -> list[_User]:
        """Remove all waiting users, and return those that are still wanted."""
        waiting, self.waiting = self.waiting, {}
        return [user for user in waiting.values() if user.session.open and user.attempt.running]

    def served(self, now: float) -> bool:
        """Whether a transfer of the request has not ended, so that its items are still needed."""
        return any(a.state != TransferState.ENDED and (s.open or a.lent(now)) for s, a, _ in self.users.values())

    def asked_by(self, user: _User) -> TransferRequested:
        """The event that reports a user to the engine."""
        transfer, granted = user.transfer, user.attempt.granted
        if granted is not transfer.grants:
            transfer = attrs.evolve(transfer, grants=granted)
        return TransferRequested(self.key, user.session.session, transfer, user.attempt.whole, user.attempt.end)


class Claims(Endpoint):
    """All tickets of a source rank."""

    def __init__(self, me: Party, geometry: Geometry) -> None:
        super().__init__(me, geometry)
        self.ticket_wait: float | None = None
        """Seconds that a Transfer waits for the prompt of its ticket; None: what `limits` says."""
        self._claims: dict[bytes, _Claim] = {}
        self._used: OrderedDict[bytes, float] = OrderedDict()
        """Deadlines of tickets whose claims have ended (KVP-TKT-USED)."""
        self._touched: set[bytes] = set()
        """Keys of claims to examine in the next `_settle`."""
        self._closed: set[int] = set()
        """Sessions that have ended and may be forgotten; one that is still needed is added again later."""

    def expect(
        self, ticket: m.Ticket, content: bytes, now: float, tokens: int | None = None, axes: Mapping[str, int] = NO_AXES
    ) -> None:
        """Accept the engine's request for a ticket; its first use by a Transfer binds it to one sink.

        `tokens` and `axes` are the lengths of its prompt and of its other axes. If `tokens` is given, a Transfer for
        more is refused at once (KVP-GRANT-PROMPT).
        """
        claim = self._claim(bytes(ticket.key), now)
        claim.timer.cancel()
        claim.deadline = now + ticket.deadline / 1000
        claim.timer = self.timers.at(claim.deadline, partial(self._expire, claim))
        claim.content, claim.tokens, claim.axes = content, tokens, axes
        self._touched.add(claim.key)
        for user in claim.take_waiting():
            self._match(claim, user, now)
        self._after(now)

    def used(self, key: bytes, now: float) -> bool:
        """Whether a request used this ticket and its deadline has not passed; may be called from any thread."""
        claim = self._claims.get(key)
        return now < self._used.get(key, now) or (claim is not None and claim.content is not None)

    @property
    def _wait(self) -> float:
        return limits.TICKET_WAIT if self.ticket_wait is None else self.ticket_wait

    def _claim(self, key: bytes, now: float) -> _Claim:
        if key not in self._claims:
            deadline = now + self._wait
            timer = self.timers.at(deadline, lambda at: self._expire(self._claims[key], at))
            self._claims[key] = _Claim(key, deadline, timer)
        return self._claims[key]

    def _seek(self, session: SourceSession, attempt: SourceAttempt, transfer: m.Transfer, now: float) -> None:
        """Match a Transfer with its ticket, and accept or fail it."""
        key, user = bytes(transfer.ticket), _User(session, attempt, transfer)
        if now < self._used.get(key, now):
            user.fail(_used("no more transfers, as all of this ticket are over", transfer), now)
        else:
            self._match(self._claim(key, now), user, now)
        self._touched.add(key)

    def _match(self, claim: _Claim, user: _User, now: float) -> None:
        """Accept a Transfer whose ticket, sink, prompt and tokens are right, and fail others.

        A Transfer that is wrong only in its tokens has used the ticket, whether it came before the prompt or later.
        """
        session, attempt, transfer = user
        try:
            _check(claim, user)
        except KvprotoError as error:
            user.fail(error, now)
            if claim.content is not None and claim.error is None:
                self._events.append(Declined(claim.key, session.name, error.kept()))
            return
        if session.session not in claim.users:
            session.claims += 1
        claim.users[session.session], claim.unwanted = user, False
        claim.bound = session.peer.engine, session.peer.replica
        try:
            _check_windows(claim, user)
        except KvprotoError as error:
            user.fail(error, now)
            return
        if attempt.state == TransferState.ASKED:
            session.part(SourceTransfers).accept(attempt, transfer, claim.progress)
        claim.waiting[session.session] = user
        self._serve(claim)

    def hold(self, key: bytes, since: Mapping[int, int], now: float) -> None:
        """Record the first token, by group id, whose items the engine still holds; fail Transfers for earlier ones."""
        claim = self._claims.get(key)
        if claim is None or claim.since == since:
            return
        claim.since = dict(since)
        for user in claim.take_waiting():
            try:
                _check_held(claim, user)
                claim.waiting[user.session.session] = user
            except RemoteError as error:
                user.fail(error, now)
        self._touched.add(key)

    def _restated(self, now: float) -> None:
        """Fail Transfers of an earlier Description whose prompt has not come; their tickets count as unused.

        Clauses KVP-TRN-CHANGED and KVP-TKT-CHANGED.
        """
        for claim in [each for each in self._claims.values() if each.content is None]:
            for user in list(claim.users.values()):
                if user.session.open and user.attempt.running:
                    user.fail(changed(self.stated.version, user.transfer), now)
                self._drop(claim, user)
            claim.bound = None

    def _drop(self, claim: _Claim, user: _User) -> None:
        """Remove a transfer from its claim, as if it had never used the ticket."""
        del claim.users[user.session.session]
        claim.waiting.pop(user.session.session, None)
        self._left(user.session)

    def _left(self, session: SourceSession) -> None:
        """Note that one claim fewer needs this session."""
        session.claims -= 1
        if not session.open:
            self._closed.add(session.session)

    def finish(self, key: bytes) -> None:
        """Serve the transfers that wait for this request, as its prefill is over."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.finished = True
            self._serve(claim)
            self._touched.add(key)

    def _serve(self, claim: _Claim) -> None:
        if claim.finished and claim.content is not None:
            for user in claim.take_waiting():
                if user.attempt.whole:
                    self._events.append(claim.asked_by(user))
                else:
                    claim.waiting[user.session.session] = user

    def _granted(self, attempt: SourceAttempt) -> None:
        """Handle a sink rank's Grant."""
        claim = self._claims.get(bytes(attempt.transfer.ticket)) if attempt.transfer is not None else None
        if claim is not None:
            self._serve(claim)
            self._touched.add(claim.key)

    def asking(self, key: bytes) -> list[TransferRequested]:
        """The transfers that wait for this request, which may get some rows before all are computed."""
        claim = self._claims.get(key)
        if claim is None or claim.content is None:
            return []
        claim.waiting = {user.session.session: user for user in claim.take_waiting()}
        return [claim.asked_by(user) for user in claim.waiting.values()]

    def refuse(self, key: bytes, error: KvprotoError, now: float) -> bool:
        """Fail the transfers that wait for this request, and later ones, as the engine cannot produce it.

        Returns whether no transfer of it is still being served.
        """
        claim = self._claims.get(key)
        if claim is None:
            return True
        claim.error = error
        for user in claim.take_waiting():
            user.fail(error, now)
        served = claim.served(now)
        self._touched.add(key)
        self._after(now)
        return not served

    def unasked(self) -> list[bytes]:
        """Keys of requests that the engine has accepted but no sink has asked for."""
        return [key for key, claim in self._claims.items() if claim.content is not None and not claim.users]

    def _touch(self, attempt: SourceAttempt) -> None:
        """Examine the request of this attempt in the next `_settle`."""
        if attempt.transfer is not None:
            self._touched.add(bytes(attempt.transfer.ticket))

    def _settle(self, now: float) -> None:
        """Release requests that every routed sink rank has ended."""
        while self._touched:
            key = self._touched.pop()
            self._events.append(Changed(key))
            claim = self._claims.get(key)
            if claim is None or not claim.users:
                continue
            if claim.finished and claim.content is not None:
                self._ask_for_items(claim, now)
            if claim.served(now):
                continue
            if not claim.finished and claim.content is not None and claim.error is None and not claim.unwanted:
                claim.unwanted = True
                self._events.append(Unwanted(claim.key))
            if not claim.finished or claim.waiting:
                continue
            users = sorted(claim.users.values(), key=lambda user: user.attempt.lost is None)
            plan = users[0].attempt.described.plan
            said = {user.session.peer.rank: user.attempt.lost for user in users}  # a rank may have used two sessions
            if said.keys() >= set(plan.served(self.me.rank)):
                self._release(claim, now)
                lost = {rank: error for rank, error in said.items() if error is not None}
                self._events.append(Released(claim.key, tuple(sorted({r.source for r in plan.routes})), lost))

    @staticmethod
    def _ask_for_items(claim: _Claim, now: float) -> None:
        """Ask the sinks that have not granted all items for the rest, as prefill is over."""
        claim.waiting = {user.session.session: user for user in claim.take_waiting()}
        for session, attempt, _ in claim.waiting.values():
            session.part(SourceIntent).progress(attempt, None, now)

    def _expire(self, claim: _Claim, now: float) -> None:
        """End a claim whose ticket's deadline has passed (KVP-TKT-EARLY, KVP-TKT-DEADLINE)."""
        self._release(claim, now)
        self._touched.add(claim.key)
        error = RemoteError(ErrorCode.DEADLINE, "ticket", advice=_UNGRANTED if claim.finished else _LATE)
        if claim.content is None:
            error = RemoteError(
                ErrorCode.UNKNOWN_TICKET, "ticket",
                f"a prompt with this ticket within {self._wait:g} s of the first Transfer", "only Transfers",
                "the prompt never came to this source: route it here too, under a new ticket",
            )  # fmt: skip
        for user in claim.take_waiting():
            user.fail(error, now)
        if claim.content is not None and (claim.error is None or claim.finished):
            self._events.append(Expired(claim.key))

    def _release(self, claim: _Claim, now: float) -> None:
        del self._claims[claim.key]
        claim.timer.cancel()
        if (claim.users or claim.content is not None) and now < claim.deadline:
            self._used[claim.key] = claim.deadline
            if len(self._used) > limits.MAX_USED_TICKETS:
                self._used.popitem(last=False)
        while self._used and next(iter(self._used.values())) <= now:
            self._used.popitem(last=False)
        for session, attempt, _ in claim.users.values():
            self._left(session)
            if attempt.fetched:
                session.part(SourcePull).released(attempt)
        claim.users.clear()  # breaks a reference cycle, as each attempt refers to the claim


def _used(mine: str, transfer: m.Transfer) -> RemoteError:
    yours = f"sequence {transfer.sequence}"
    return RemoteError(ErrorCode.TICKET_USED, "ticket", mine, yours, "make a new ticket for every request")


def _check(claim: _Claim, asking: _User) -> None:
    """Raise the first reason why a Transfer may not use the ticket, in the order of transfers.md (KVP-TRN-CHECKS)."""
    session, _, transfer = asking
    if claim.error is not None:
        raise claim.error.again()
    if claim.content is not None and claim.content != transfer.content:
        raise mismatch(claim.content, claim.tokens, transfer, asking.attempt.described.sink)
    sink = session.peer.engine, session.peer.replica
    if claim.bound not in (None, sink):
        yours = f"{sink[0]} replica {sink[1]}"
        raise RemoteError(ErrorCode.TICKET_BOUND, "ticket", "the sink that it is bound to", yours, "make a new ticket")
    user = claim.users.get(session.session)
    if user is not None and user.attempt.sequence != transfer.sequence:
        raise _used(f"only sequence {user.attempt.sequence}, which uses it", transfer)


def _check_windows(claim: _Claim, user: _User) -> None:
    """Raise if a Transfer asks for tokens that the request does not have: the last two of those checks."""
    if claim.tokens is not None:
        _check_ends(claim.tokens, claim.axes, user)
    _check_held(claim, user)


def _check_ends(tokens: int, axes: Mapping[str, int], user: _User) -> None:
    """Raise BAD_GRANT if a window ends beyond its axis (KVP-GRANT-PROMPT)."""
    groups = {g.id: g for g in user.attempt.described.sink.groups}
    for i, grant in enumerate(user.transfer.grants):
        group, end = groups[grant.group], max(grant.valid, grant.first + grant.count)
        most, axis = length_of(group, tokens, axes), axis_of(group)
        if end > most and kind_of(group).has_memory:
            mine, yours = f"a prompt of {most} {axis}", f"{axis} up to {end}"
            advice = "the two prompts differ in length"
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].valid", mine, yours, advice)


def _check_held(claim: _Claim, user: _User) -> None:
    if claim.since:
        described = user.attempt.described
        groups = {g.id: g for g in described.sink.groups}
        check_held(held_from(described.routes, groups, claim.since), user.transfer.grants)


def check_held(held: Mapping[int, int], grants: Sequence[m.Grants]) -> None:
    """Raise NOT_HELD if a window begins before the first token that is `held`, by group id (KVP-GRANT-HELD)."""
    for i, grant in enumerate(grants):
        first = held.get(grant.group, 0)
        if grant.count and not grant.late and grant.first < first:
            mine, yours = f"tokens from {first} on", f"tokens from {grant.first} on"
            raise RemoteError(ErrorCode.NOT_HELD, f"grants[{i}].first", mine, yours, _GONE)
