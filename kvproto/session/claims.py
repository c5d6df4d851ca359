"""Tickets at a source rank: who may use one, who waits for its request, and when the request may be freed.

Theory. A claim is a ticket that the engine expects, or that a Transfer names. It lives until every sink rank that this
rank serves has ended its part, or until its deadline. Only claims that something has happened to are looked at, so a
frame costs the same however many Transfers wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import attrs

from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.events import Event, Expired, Released, TransferRequested
from kvproto.session.limits import MAX_USED_TICKETS, TICKET_WAIT
from kvproto.session.source import SourceSession
from kvproto.session.table import TransferState
from kvproto.session.timers import Timer, Timers
from kvproto.session.transfers import SourceAttempt, SourceTransfers
from kvproto.wire.enums import ErrorCode, ItemKind, RequestState
from kvproto.wire.messages import Ticket, Transfer

__all__ = ["Claims"]

_User = tuple[SourceSession, SourceAttempt]


@attrs.define(eq=False)
class _Claim:
    """One ticket."""

    key: bytes = attrs.field(repr=False)
    deadline: float
    timer: Timer
    content: bytes | None = None
    """None until the engine expects the request."""
    tokens: int | None = None
    """Length of the prompt, where the engine has said it."""
    bound: tuple[str, int] | None = None
    """Engine and replica of the sink that used it first."""
    users: dict[int, _User] = attrs.Factory(dict)
    """The sequence of each session that uses it, by session."""
    waiting: list[_User] = attrs.Factory(list)
    """Of these, who is accepted and not answered."""
    finished: bool = False
    error: KvprotoError | None = None
    """Why the engine cannot produce the request."""

    def progress(self) -> RequestState:
        """How far the request is, as Accepted says it."""
        if self.content is None:
            return RequestState.PENDING
        return RequestState.READY if self.finished else RequestState.RUNNING

    def take_waiting(self) -> list[_User]:
        """Take out those that are still wanted."""
        waiting, self.waiting = self.waiting, []
        return [(session, attempt) for session, attempt in waiting if session.open and attempt.running]


class Claims:
    """All tickets of a source rank."""

    def __init__(self, rank: int, timers: Timers, tell: Callable[[Event], None]) -> None:
        self._rank, self._timers, self._tell = rank, timers, tell
        self._claims: dict[bytes, _Claim] = {}
        self._used: OrderedDict[bytes, float] = OrderedDict()
        """Deadlines of tickets that were released (KVP-TKT-USED)."""
        self._touched: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._claims)

    def expect(self, ticket: Ticket, content: bytes, tokens: int | None, now: float) -> None:
        """The engine has the request of this ticket; `tokens`: length of its prompt."""
        claim = self._claim(bytes(ticket.key), now)
        claim.timer.cancel()
        claim.deadline = now + ticket.deadline / 1000
        claim.timer = self._timers.at(claim.deadline, lambda at: self._expire(claim.key, at))
        claim.content, claim.tokens = content, tokens
        for session, attempt in claim.take_waiting():
            self._match(claim, session, attempt, now)
        self._touched.add(claim.key)

    def _claim(self, key: bytes, now: float) -> _Claim:
        if key not in self._claims:
            deadline = now + TICKET_WAIT
            self._claims[key] = _Claim(key, deadline, self._timers.at(deadline, lambda at: self._expire(key, at)))
        return self._claims[key]

    def seek(self, session: SourceSession, attempt: SourceAttempt, transfer: Transfer, now: float) -> None:
        """Match a Transfer with its ticket: accept it, or fail it."""
        key = bytes(transfer.ticket)
        if now < self._used.get(key, now):
            session.part(SourceTransfers).fail(attempt, _used("every transfer of it is over", transfer), now)
        else:
            self._match(self._claim(key, now), session, attempt, now)
        self._touched.add(key)

    def _match(self, claim: _Claim, session: SourceSession, attempt: SourceAttempt, now: float) -> None:
        """Accept a Transfer whose ticket, sink, prompt and tokens are right."""
        transfer = attempt.transfer
        if transfer is None:
            return
        transfers = session.part(SourceTransfers)
        try:
            self._check(claim, session, transfer)
        except KvprotoError as error:
            transfers.fail(attempt, error, now)
            return
        if session.session not in claim.users:
            session.claims += 1
        claim.users[session.session] = session, attempt
        claim.bound = session.peer.engine, session.peer.replica
        if attempt.state == TransferState.ASKED:
            transfers.accept(attempt, claim.progress)
        claim.waiting.append((session, attempt))
        self._serve(claim)

    def _check(self, claim: _Claim, session: SourceSession, transfer: Transfer) -> None:
        """Raise where this Transfer may not use the ticket, in the order that transfers.md gives."""
        if claim.error is not None:
            raise claim.error
        if claim.content is not None and claim.content != transfer.content:
            raise RemoteError(
                ErrorCode.CONTENT_MISMATCH, "content", claim.content.hex(), bytes(transfer.content).hex(),
                "route the same prompt to both",
            )  # fmt: skip
        sink = session.peer.engine, session.peer.replica
        if claim.bound not in (None, sink):
            yours = f"{sink[0]} replica {sink[1]}"
            raise RemoteError(ErrorCode.TICKET_BOUND, "ticket", "bound to another sink", yours, "make a new ticket")
        user = claim.users.get(session.session)
        if user is not None and user[1].sequence != transfer.sequence:
            raise _used(f"sequence {user[1].sequence} uses it", transfer)
        _check_tokens(claim, session, transfer)

    def finish(self, key: bytes) -> None:
        """Prefill of this request is over: whoever waits is served."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.finished = True
            self._serve(claim)
            self._touched.add(key)

    def _serve(self, claim: _Claim) -> None:
        if claim.finished and claim.content is not None:
            for session, attempt in claim.take_waiting():
                if attempt.transfer is not None:
                    self._tell(TransferRequested(claim.key, session.session, attempt.transfer))

    def asking(self, key: bytes) -> list[TransferRequested]:
        """Who waits for this request while its prefill runs; its first rows may be copied to them."""
        claim = self._claims.get(key)
        if claim is None or claim.content is None:
            return []
        claim.waiting = claim.take_waiting()
        return [TransferRequested(key, s.session, a.transfer) for s, a in claim.waiting if a.transfer is not None]

    def refuse(self, key: bytes, error: KvprotoError, now: float) -> None:
        """The engine cannot produce this request: whoever waits, or comes later, gets Failed."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.error = error
            for session, attempt in claim.take_waiting():
                session.part(SourceTransfers).fail(attempt, error, now)
            self._touched.add(key)

    def deadline(self, key: bytes) -> float | None:
        """When the ticket of a request ends; None: the request is over."""
        claim = self._claims.get(key)
        return claim.deadline if claim is not None else None

    def touch(self, attempt: SourceAttempt) -> None:
        """Look at the request of this attempt in the next `settle`."""
        if attempt.transfer is not None:
            self._touched.add(bytes(attempt.transfer.ticket))

    def settle(self, now: float) -> None:
        """Release requests that every routed sink rank has ended."""
        while self._touched:
            claim = self._claims.get(self._touched.pop())
            if claim is None or not claim.finished or not claim.users or claim.waiting:
                continue
            if self._all_ended(claim, now):
                session, _ = next(iter(claim.users.values()))
                self._release(claim, now)
                self._tell(Released(claim.key, tuple(sorted({r.source for r in session.plan.routes}))))

    def _all_ended(self, claim: _Claim, now: float) -> bool:
        users = claim.users.values()
        if any(a.state != TransferState.ENDED and (s.open or a.lent(now)) for s, a in users):
            return False
        asked = {s.peer.rank for s, _ in users}
        session, _ = next(iter(users))
        return asked.issuperset(session.plan.served(self._rank))

    def _expire(self, key: bytes, now: float) -> None:
        """The deadline of a ticket has passed (KVP-TKT-EARLY, KVP-TKT-DEADLINE)."""
        claim = self._claims[key]
        self._release(claim, now)
        if claim.content is None:
            mine, yours = "no prompt with this ticket", f"a Transfer that has waited {TICKET_WAIT:.0f} s for it"
            advice = "the prompt never came to this source: route it here too, under a new ticket"
            error = RemoteError(ErrorCode.UNKNOWN_TICKET, "ticket", mine, yours, advice)
        else:
            error = RemoteError(
                ErrorCode.DEADLINE, "ticket", "not finished in time", "its deadline", "make a new ticket"
            )
        for session, attempt in claim.take_waiting():
            session.part(SourceTransfers).fail(attempt, error, now)
        if claim.content is not None and claim.error is None:
            self._tell(Expired(claim.key))

    def _release(self, claim: _Claim, now: float) -> None:
        del self._claims[claim.key]
        claim.timer.cancel()
        if claim.users and now < claim.deadline:
            self._used[claim.key] = claim.deadline
            if len(self._used) > MAX_USED_TICKETS:
                self._used.popitem(last=False)
        while self._used and next(iter(self._used.values())) <= now:
            self._used.popitem(last=False)
        for session, attempt in claim.users.values():
            session.claims -= 1
            session.delivery.released(attempt)


def _used(mine: str, transfer: Transfer) -> RemoteError:
    yours = f"sequence {transfer.sequence}"
    return RemoteError(ErrorCode.TICKET_USED, "ticket", mine, yours, "make a new ticket for every request")


def _check_tokens(claim: _Claim, session: SourceSession, transfer: Transfer) -> None:
    """Raise where a Transfer is for more tokens than its prompt has (KVP-GRANT-REAL)."""
    if claim.tokens is None:
        return
    kinds = {g.id: g.kind for g in session.sink.groups}
    for i, grant in enumerate(transfer.grants):
        end, tokens = grant.first + grant.count, claim.tokens
        if kinds[grant.group] == ItemKind.HANDOFF or max(grant.valid, end) <= tokens:
            continue
        mine, yours = f"a prompt of {tokens} tokens", f"tokens up to {max(grant.valid, end)}"
        raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].valid", mine, yours, "ask for tokens of the prompt only")
