"""The life of a transfer but for its bytes, at both sides: Transfer, Accepted, Failed, Abort, Drained.

Theory. A session keeps the latest attempt of each sequence above its low-water mark; a sequence at or below it is over,
and whatever comes of it later changes nothing. Every answer follows from the attempt's state, so a request that is
repeated after any pause gets the answer that is true now. `PROVEN` needs a record: an attempt that was never seen is
recorded as aborted before it is called proven, and so refused whenever its Transfer comes (KVP-END-UNSEEN).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from kvproto.copying.grants import check_grants
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.session.core import Attempt, Handler, Part, Session, refusal, refused
from kvproto.session.events import ProtocolError
from kvproto.session.leases import Lease, Loan
from kvproto.session.limits import MAX_TRANSFERS
from kvproto.session.phases import Epoch
from kvproto.session.table import SessionState, TransferState
from kvproto.wire.enums import ErrorCode, Proof, RequestState
from kvproto.wire.messages import Abort, Accepted, Done, DoneAck, Drained, Failed, Grants, Transfer

__all__ = ["SinkAttempt", "SinkTransfers", "SourceAttempt", "SourceTransfers"]


@attrs.define(eq=False)
class SourceAttempt(Attempt):
    """An attempt at the source."""

    transfer: Transfer | None = None
    """None: it was aborted before its Transfer came."""
    progress: Callable[[], RequestState] | None = None
    """How far the request is now."""
    refused: KvprotoError | None = None
    """What the Transfer was answered by, where that was Failed."""
    aborted: bool = False
    copying: bool = False
    """Whether writes of it may arrive."""
    drain: int | None = None
    """Request id of an Abort that waits for the copy to end."""
    loan: Loan | None = None
    fetched: bool = False
    """Whether the sink has read what it was offered."""

    @property
    def over(self) -> bool:
        return self.state == TransferState.ENDED and not self.copying

    @property
    def running(self) -> bool:
        """Whether Done or Failed may still answer it."""
        return self.state in (TransferState.ASKED, TransferState.ACCEPTED)

    def lent(self, now: float) -> bool:
        """Whether the sink may still read what this attempt was offered."""
        return self.loan is not None and now < self.loan.end


class SourceTransfers(Part):
    """What a source does with transfers, but for their bytes.

    `epoch` is the memory that the sink has registered, None before that; `sought` is told of each Transfer that is
    legal, to be matched with its ticket; `draining` says whether new ones are refused.
    """

    def __init__(
        self, session: Session, epoch: Callable[[], Epoch | None],
        sought: Callable[[SourceAttempt, float], None], draining: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._session, self._epoch, self._sought, self._draining = session, epoch, sought, draining
        self._unprovable: set[tuple[int, int]] = set()
        """Attempts whose writes may arrive at any time, although their copy is over."""

    def handlers(self) -> Mapping[type, Handler]:
        return {Transfer: self._transfer, DoneAck: self._done_ack, Abort: self._abort}

    def _transfer(self, message: Transfer, now: float) -> None:
        session = self._session
        known: SourceAttempt | None = session.attempts.get(message.sequence)
        if known is not None and self._is_repeated(known, message):
            self._answer_again(known, message)
            return
        try:
            self._check_sequence(message, known)
        except RemoteError as error:
            self._failed(message, error)
            return
        attempt = SourceAttempt(message.sequence, message.attempt, transfer=message)
        session.attempts[message.sequence] = attempt
        session.move(attempt, "Transfer")
        try:
            self._check(message)
        except RemoteError as error:
            self.fail(attempt, error, now)
            return
        self._sought(attempt, now)

    def _is_repeated(self, known: SourceAttempt, message: Transfer) -> bool:
        asked = known.transfer
        return asked is not None and (asked.request, asked.attempt) == (message.request, message.attempt)

    def _answer_again(self, attempt: SourceAttempt, message: Transfer) -> None:
        """KVP-SES-REPLY."""
        if attempt.aborted:
            self._failed(message, RemoteError(ErrorCode.ABORTED, "sequence", "aborted", str(message.sequence)))
        elif attempt.refused is not None:
            self._failed(message, attempt.refused)
        elif attempt.progress is not None:
            self._session.notice(Accepted(**self._head(message), state=attempt.progress()))

    def _check_sequence(self, message: Transfer, known: SourceAttempt | None) -> None:
        """Raise where the sequence or the attempt is not the next; such a Transfer leaves no record."""
        low, number = self._session.low_water, message.sequence
        if number <= low or (known is not None and message.attempt <= known.attempt):
            if known is not None and known.aborted and message.attempt == known.attempt:
                raise RemoteError(ErrorCode.ABORTED, "sequence", "aborted", str(number), "use the next attempt")
            mine = f"every sequence up to {low} is over" if number <= low else f"sequence {number} is in use"
            raise RemoteError(ErrorCode.STALE_TRANSFER, "sequence", mine, str(number), "number new transfers upwards")
        mine = "no attempt yet" if known is None else f"attempt {known.attempt} is {known.state.value}"
        if message.attempt != (1 if known is None else known.attempt + 1) or (known is not None and not known.over):
            advice = "abort the attempt before, and wait until it is Drained"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "attempt", mine, f"attempt {message.attempt}", advice)
        if number > low + MAX_TRANSFERS:
            mine = f"{MAX_TRANSFERS} transfers at once, from {low + 1}"
            raise RemoteError(ErrorCode.BUSY, "sequence", mine, str(number), "wait until earlier transfers are over")

    def _check(self, message: Transfer) -> None:
        """Raise where the Transfer does not fit the session (KVP-TRN-AGREE, KVP-GRANT-*)."""
        session, epoch = self._session, self._epoch()
        state = session.state if session.open else session.closed_in
        if state != SessionState.READY or epoch is None or not (session.open or self._draining()):
            mine = f"session {session.state.value}"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", mine, "Transfer", "register first")
        if self._draining():
            raise RemoteError(ErrorCode.DRAINING, "", "this engine is going away", "Transfer", "ask another engine")
        described = session.described
        for field, ours, theirs, advice in (
            ("source_version", described.versions[0], message.source_version, "describe again"),
            ("sink_version", described.versions[1], message.sink_version, "describe again"),
            ("epoch", epoch.number, message.epoch, "name the epoch of the last Registered"),
            ("writers", list(described.writers), message.writers.tolist(), "name all source ranks of the plan"),
        ):
            if ours != theirs:
                raise RemoteError(ErrorCode.BAD_GRANT, field, str(ours), str(theirs), advice)
        check_grants(
            described.sink, described.ranks[1], epoch.columns, described.groups, message.grants, epoch.overlaps
        )

    def _head(self, message: Transfer) -> dict[str, Any]:
        return {
            "session": self._session.session,
            "request": message.request,
            "sequence": message.sequence,
            "attempt": message.attempt,
        }

    def _failed(self, message: Transfer, error: KvprotoError) -> None:
        self._session.notice(Failed(**self._head(message), **refusal(error)))

    def accept(self, attempt: SourceAttempt, progress: Callable[[], RequestState]) -> None:
        """Answer a Transfer by how far its request is; Done or Failed will follow."""
        if attempt.transfer is not None:
            self._session.move(attempt, "Accepted")
            attempt.progress = progress
            self._session.notice(Accepted(**self._head(attempt.transfer), state=progress()))

    def fail(self, attempt: SourceAttempt, error: KvprotoError, now: float) -> None:
        """End an attempt without its bytes; this proves nothing about its writes."""
        asked = attempt.state == TransferState.ASKED
        self._session.move(attempt, "Failed")
        if asked and attempt.transfer is not None:
            attempt.refused = error
            self._failed(attempt.transfer, error)
        else:
            self._session.request(
                Failed, now, sequence=attempt.sequence, attempt=attempt.attempt, **refusal(error),
                on_error=lambda error, now: self._session.move(attempt, "DoneAck"),
            )  # fmt: skip

    def refused(self, attempt: SourceAttempt, error: RemoteError) -> None:
        """The sink answered Done or Offer by Error: nothing is sent again."""
        if attempt.state in (TransferState.DONE, TransferState.OFFERED):
            self._session.move(attempt, "Error")
        self._session.tell(ProtocolError(self._session.name, error))

    def _done_ack(self, message: DoneAck, now: float) -> None:
        self._session.answered(message.request)
        attempt = self._session.attempts.get(message.sequence)
        if attempt is None or attempt.attempt != message.attempt:
            return
        if attempt.state in (TransferState.DONE, TransferState.FAILED):
            self._session.move(attempt, "DoneAck")

    def _abort(self, message: Abort, now: float) -> None:
        attempt = self._aborted(message)
        if attempt is None:  # over: the low-water mark refuses it from now on
            self._drained((message.sequence, message.attempt), message.request)
            return
        if attempt.state != TransferState.ABORTING:
            self._session.move(attempt, "Abort")
        attempt.aborted = True
        if attempt.loan is not None:
            self._session.answered(attempt.loan.request)
            attempt.loan = None
        attempt.drain = message.request
        if not attempt.copying:
            self._end(attempt)

    def _aborted(self, message: Abort) -> SourceAttempt | None:
        """The record of what is to be aborted, made if there is none; None: it is over and forgotten."""
        session, number = self._session, message.sequence
        known: SourceAttempt | None = session.attempts.get(number)
        if number <= session.low_water or (known is not None and message.attempt < known.attempt):
            return None
        if known is not None and known.attempt == message.attempt:
            return known
        if message.attempt != (1 if known is None else known.attempt + 1) or (known is not None and not known.over):
            mine = "no attempt yet" if known is None else f"attempt {known.attempt} is {known.state.value}"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "attempt", mine, f"attempt {message.attempt}")
        if len(session.attempts) >= 2 * MAX_TRANSFERS:
            mine = f"records of {len(session.attempts)} transfers"
            raise RemoteError(ErrorCode.BUSY, "sequence", mine, str(number), "wait until earlier transfers are over")
        made = SourceAttempt(number, message.attempt)
        session.attempts[number] = made
        return made

    def _end(self, attempt: SourceAttempt) -> None:
        """Answer an Abort, now that no copy is under way."""
        if attempt.drain is not None:
            self._session.move(attempt, "Drained")
            self._drained((attempt.sequence, attempt.attempt), attempt.drain)
            attempt.drain = None

    def _drained(self, key: tuple[int, int], request: int) -> None:
        self._session.notice(
            Drained(
                session=self._session.session, request=request, sequence=key[0], attempt=key[1],
                proof=Proof.UNPROVABLE if key in self._unprovable else Proof.PROVEN,
            )
        )  # fmt: skip

    def copied(self, attempt: SourceAttempt, proof: Proof) -> None:
        """The copy of an attempt is over; an Abort that waited for it is answered with the proof (KVP-END-PROVEN)."""
        if proof != Proof.PROVEN:
            self._unprovable.add((attempt.sequence, attempt.attempt))
        attempt.copying = False
        self._end(attempt)
        self._session.host.ended(self._session, attempt)


@attrs.define(eq=False)
class SinkAttempt(Attempt):
    """An attempt at the sink: the part of one source rank in a transfer."""

    transfer: int = 0
    """The transfer's number at the endpoint."""
    asked: float = 0.0
    """When its Transfer was first sent."""
    request: int = 0
    """Of the Transfer."""
    abort: int = 0
    """Request id of the Abort."""
    done: Done | None = None
    """What the source said; of an offer that was read, in the same words."""
    error: KvprotoError | None = None
    proof: Proof | None = None
    """What Drained said."""
    lease: Lease | None = None
    stray: bool = False
    """Whether writes of a copy of our own may still arrive."""
    settled: bool = False
    """Whether the endpoint has reported the transfer."""

    @property
    def over(self) -> bool:
        return self.state == TransferState.ENDED and self.settled

    @property
    def reading(self) -> bool:
        """Whether a copy of what was offered is under way."""
        return self.lease is not None and self.lease.reading


class SinkTransfers(Part):
    """What a sink does with transfers, but for their bytes; `stop` is told of each attempt that is aborted."""

    def __init__(self, session: Session, epoch: int, stop: Callable[[SinkAttempt], object]) -> None:
        self._session, self._epoch, self._stop = session, epoch, stop
        self._sequence = 0

    def handlers(self) -> Mapping[type, Handler]:
        return {Accepted: self._accepted, Failed: self._failed, Drained: self._drained}

    def compose(
        self, now: float, number: int, key: bytes, content: bytes, grants: Mapping[int, Grants], most: int
    ) -> tuple[SinkAttempt, Callable[[], None]]:
        """Make a Transfer of `grants` (by group id; the routed ones go), and what sends it.

        Raises LocalError: BUSY beyond the `most` transfers that the source takes at once, TOO_LARGE beyond its
        `max_body`. Then nothing was sent.
        """
        session = self._session
        attempt = SinkAttempt(self._sequence + 1, 1, transfer=number, asked=now)
        if attempt.sequence > session.low_water + most:
            mine = f"{most} transfers at once with {session.name}"
            raise LocalError(ErrorCode.BUSY, "transfer", mine, "one more", "wait until earlier transfers are over")
        described = session.described
        send = session.compose(
            Transfer, now, sequence=attempt.sequence, attempt=1, ticket=key, content=content,
            source_version=described.versions[0], sink_version=described.versions[1], epoch=self._epoch,
            grants=tuple(grants[g] for g in described.groups), writers=np.array(described.writers, np.uint32),
            on_error=lambda error, now: self.lose(attempt, error),
        )  # fmt: skip

        def ask() -> None:
            self._sequence = attempt.sequence
            session.attempts[attempt.sequence] = attempt
            session.move(attempt, "Transfer")
            attempt.request = send()

        return attempt, ask

    def lose(self, attempt: SinkAttempt, error: KvprotoError) -> None:
        """The attempt cannot succeed any more."""
        attempt.error = attempt.error or error
        self._session.host.ended(self._session, attempt)

    def find(self, message: Any) -> SinkAttempt | None:
        """The attempt that a message names; None: it is over. Raises UNEXPECTED_MESSAGE for one that never was."""
        found: SinkAttempt | None = self._session.attempts.get(message.sequence)
        if found is not None and found.attempt == message.attempt:
            return found
        if message.sequence <= self._session.low_water:
            return None
        mine = "a transfer of this session"
        yours = f"sequence {message.sequence}, attempt {message.attempt}"
        raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, yours)

    def heard(self, attempt: SinkAttempt) -> None:
        """The source has answered the Transfer, be it that Accepted was lost or overtaken."""
        self._session.answered(attempt.request)
        if attempt.state == TransferState.ASKED:
            self._session.move(attempt, "Accepted")

    def _accepted(self, message: Accepted, now: float) -> None:
        self._session.answered(message.request)
        attempt = self.find(message)
        if attempt is not None and attempt.state == TransferState.ASKED:
            self._session.move(attempt, "Accepted")

    def _failed(self, message: Failed, now: float) -> None:
        attempt = self.find(message)
        if attempt is not None and attempt.state in (TransferState.ASKED, TransferState.ACCEPTED):
            self._session.answered(attempt.request)
            self._session.move(attempt, "Failed")
            self._session.move(attempt, "DoneAck")
            self.lose(attempt, refused(message))
        self.acknowledge(message)

    def acknowledge(self, message: Done | Failed) -> None:
        """Done or Failed was heard."""
        self._session.notice(
            DoneAck(
                session=self._session.session, request=message.request, sequence=message.sequence,
                attempt=message.attempt,
            )
        )  # fmt: skip

    def abort(self, attempt: SinkAttempt, now: float, reason: str) -> None:
        """Stop an attempt; Drained says what is known of its writes."""
        if attempt.state != TransferState.ABORTING:
            self._session.move(attempt, "Abort")
            self._session.answered(attempt.request)
            self._stop(attempt)
            attempt.abort = self._session.request(
                Abort, now, sequence=attempt.sequence, attempt=attempt.attempt, reason=reason[:1000],
                on_error=lambda error, now: self._ended(attempt, Proof.UNPROVABLE),
            )  # fmt: skip

    def _drained(self, message: Drained, now: float) -> None:
        attempt = self.find(message) if self._session.asks(message.request) else None
        if attempt is not None and attempt.abort == message.request:
            self._session.answered(message.request)
            self._ended(attempt, message.proof)

    def _ended(self, attempt: SinkAttempt, proof: Proof) -> None:
        attempt.proof = proof
        self._session.move(attempt, "Drained")
