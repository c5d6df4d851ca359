"""The life of a transfer apart from its bytes, on both sides: Transfer, Accepted, Failed, Abort, Drained.

A session keeps a record of each transfer above its low-water mark; a sequence at or below it has ended, and later
messages about it change nothing. Every answer follows from the transfer's state, so that a request which is repeated
after any pause gets the answer that is true then. `PROVEN` needs a record: a transfer that was never seen is recorded
as aborted before it is called proven, and so is refused whenever its Transfer comes (KVP-END-UNSEEN).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvproto.copying.grants import check_grants, granted_until, lacks_items, no_items, placeholder_items
from kvproto.copying.program import RankLayout
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.events import ProtocolError
from kvproto.session import limits
from kvproto.session.core import Extension, Session
from kvproto.session.descriptions import Epoch
from kvproto.session.error_fields import refusal, refused
from kvproto.session.limits import MAX_TRANSFERS
from kvproto.session.records import PendingMessage, SinkAttempt, SinkTransfer, SourceAttempt
from kvproto.session.table import SessionState, TransferState
from kvproto.session.timers import Timer
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Proof, RequestState

if TYPE_CHECKING:
    from kvproto.session.sink import SinkSession
    from kvproto.session.source import SourceSession


class SourceTransfers(Extension):
    """The source's half of transfers, apart from their bytes."""

    _session: SourceSession

    def __init__(self, session: SourceSession) -> None:
        super().__init__(session)
        self._unprovable: set[int] = set()
        """Sequences whose writes may still arrive at any time, although their copy has ended."""
        self._named = 0
        """The greatest sequence of which a Transfer has come; that of one that was refused may have left no record."""

    @property
    def proven(self) -> bool:
        """Whether it is proven of all transfers that have ended that none of their writes can arrive any more."""
        return not self._unprovable

    def find(self, message: Any) -> SourceAttempt | None:
        """The transfer that a message names; None if there is no record of it."""
        found: SourceAttempt | None = self._session.attempts.get(message.sequence)
        return found

    def _transfer(self, message: m.Transfer, now: float) -> None:
        session, known, self._named = self._session, self.find(message), max(self._named, message.sequence)
        same = known is not None and known.transfer is not None and known.transfer.request == message.request
        if known is not None and same and not known.served:
            self._answer_again(known, message)
            return
        try:
            self._check_sequence(message, known)
        except RemoteError as error:
            session.reply(m.Failed, message, **refusal(error))
            return
        attempt = SourceAttempt(message.sequence, session=self._session, transfer=message)
        session.attempts[message.sequence] = attempt
        session.move(attempt, "Transfer")
        try:
            self._check(attempt, message)
        except RemoteError as error:
            self.fail(attempt, error, now)
            return
        self._session.tickets_of_rank.seek(attempt, message, now)

    def _answer_again(self, attempt: SourceAttempt, message: m.Transfer) -> None:
        """Answer a repeated Transfer by the state of its attempt (KVP-SES-REPLY)."""
        error = attempt.refused or attempt.lost
        if attempt.aborted:
            error = RemoteError(ErrorCode.ABORTED, "sequence", "aborted", str(message.sequence))
        if error is not None:
            self._session.reply(m.Failed, message, **refusal(error))
        elif attempt.progress is not None:
            self._session.reply(m.Accepted, message, state=attempt.progress())

    def _check_sequence(self, message: m.Transfer, known: SourceAttempt | None) -> None:
        """Raise if the sequence is known, over or too far ahead; such a Transfer leaves no record."""
        low, number = self._session.low_water, message.sequence
        if known is not None and known.aborted:
            raise RemoteError(ErrorCode.ABORTED, "sequence", "aborted", str(number), "use another sequence and ticket")
        if number <= low or known is not None:
            mine = f"every sequence up to {low} is over" if number <= low else f"sequence {number} is in use, or over"
            raise RemoteError(ErrorCode.STALE_TRANSFER, "sequence", mine, str(number), "number new transfers upwards")
        if number > low + MAX_TRANSFERS:
            mine = f"{MAX_TRANSFERS} transfers at once, from {low + 1}"
            raise RemoteError(ErrorCode.BUSY, "sequence", mine, str(number), "wait until earlier transfers are over")

    def _check(self, attempt: SourceAttempt, message: m.Transfer) -> None:
        """Raise if a Transfer does not fit the session (KVP-TRN-AGREE, KVP-GRANT-*); record what it grants."""
        session, holder = self._session, self._session.holder
        state = session.state if session.open else session.closed_in
        draining = session.refuses(bytes(message.ticket))
        if state != SessionState.READY or not holder.first or not (session.open or draining):
            mine = f"session {session.state.value}"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", mine, "Transfer", "register first")
        if draining:
            raise RemoteError(ErrorCode.DRAINING, "", "this engine is going away", "Transfer", "use another engine")
        epoch = holder.epochs.get(message.epoch)
        described = epoch.described if epoch is not None else session.described
        if message.source_version != session.host.stated.version:
            raise changed(session.host.stated.version, message)
        writers = message.writers[: len(described.writers) + 1].tolist()
        for field, ours, theirs, advice in (
            ("sink_version", [described.of_sink.version], message.sink_version, "describe again"),
            ("epoch", holder.open, message.epoch, "name a registered epoch that has not been taken back"),
            ("writers", [list(described.writers)], writers, "name all source ranks of the plan"),
        ):
            if theirs not in ours:
                mine = " or ".join(map(str, ours)) or "none"
                raise RemoteError(ErrorCode.BAD_GRANT, field, mine, str(theirs), advice)
        assert epoch is not None  # it is one of those that are open
        side = left_out = None
        if any(grant.items is None for grant in message.grants) and Feature.INTENT in session.features:
            side = RankLayout(described.sink, described.ranks[1], epoch.columns)
            named = tuple([grant.group for grant in message.grants]) == described.groups
            left_out = named and lacks_items(side, message.grants)
        check_grants(
            described.sink,
            described.ranks[1],
            epoch.columns,
            described.groups,
            message.grants,
            epoch.overlaps,
            left_out=bool(left_out),
        )
        attempt.epoch, attempt.granted = epoch, message.grants
        if side is not None and left_out:
            attempt.whole = Feature.PULL in session.features  # nobody but the sink writes its items
            attempt.granted = (placeholder_items if attempt.whole else no_items)(side, message.grants)
            attempt.end = None if attempt.whole else granted_until(side, attempt.granted, message.grants)

    def accept(self, attempt: SourceAttempt, progress: Callable[[], RequestState]) -> None:
        """Answer a Transfer with the state of its request; Done or Failed will follow."""
        self._session.move(attempt, "Accepted")
        attempt.progress = progress
        self._session.reply(m.Accepted, attempt.asked, state=progress())

    def fail(self, attempt: SourceAttempt, error: KvprotoError, now: float, grant: m.Grant | None = None) -> None:
        """End an attempt without its bytes, perhaps in answer to a `grant`; this proves nothing about its writes."""
        asked, attempt.lost = attempt.transfer if attempt.state == TransferState.ASKED else grant, error
        self._session.move(attempt, "Failed")
        if asked is not None:
            attempt.refused = error
            self._session.reply(m.Failed, asked, **refusal(error))
        else:
            self._session.request(
                m.Failed,
                now,
                sequence=attempt.sequence,
                **refusal(error),
                on_error=lambda error, now: self._session.move(attempt, "DoneAck"),
            )

    def refused(self, attempt: SourceAttempt, error: RemoteError) -> None:
        """Handle an Error that answers Done or Offer: neither is sent again, and the sink reads nothing."""
        attempt.loan, attempt.lost = None, error
        if attempt.state in (TransferState.DONE, TransferState.OFFERED):
            self._session.move(attempt, "Error")
        self._session.tell(ProtocolError(self._session.name, error))

    def _done_ack(self, message: m.DoneAck, now: float) -> None:
        attempt = self.find(message)
        if attempt is None and message.sequence > self._named:
            mine = "a transfer that was asked for"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, f"DoneAck of {message.sequence}")
        self._session.answered(message.request, m.Done, m.Failed, about=message.sequence)
        if attempt is not None and attempt.state != TransferState.ENDED:
            attempt.served = attempt.served or attempt.state == TransferState.DONE
            self._session.move(attempt, "DoneAck")

    def _abort(self, message: m.Abort, now: float) -> None:
        session = self._session
        if session.open and session.state != SessionState.READY:
            mine = f"session {session.state.value}"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, "Abort", "register first")
        attempt = self._aborted(message)
        if attempt is None:  # it has ended, or no more can be recorded
            self._drained(message)
            return
        if attempt.state != TransferState.ABORTING:
            session.move(attempt, "Abort")
        attempt.aborted = True
        if attempt.loan is not None:
            session.answered(attempt.loan.request)
            attempt.loan = None
        attempt.drain = message
        if attempt.copying:
            session.host.ended(session, attempt)  # the node may be waiting for a Grant, not for the copy
        else:
            self._end(attempt)

    def _aborted(self, message: m.Abort) -> SourceAttempt | None:
        """The record of the transfer to abort, made if there is none; None if it is forgotten, or one too many."""
        session, number = self._session, message.sequence
        known = self.find(message)
        if known is None and number > session.low_water and len(session.attempts) < 2 * MAX_TRANSFERS:
            known = session.attempts[number] = SourceAttempt(number, session=session)
        return known

    def _end(self, attempt: SourceAttempt) -> None:
        """Answer an Abort, now that no copy is under way."""
        if attempt.drain is not None:
            self._session.move(attempt, "Drained")
            self._drained(attempt.drain)
            attempt.drain = None

    def _drained(self, message: m.Abort) -> None:
        refused = message.sequence <= self._session.low_water or self.find(message) is not None  # if it comes yet
        proven = refused and message.sequence not in self._unprovable
        self._session.reply(m.Drained, message, proof=Proof.PROVEN if proven else Proof.UNPROVABLE)

    def copied(self, attempt: SourceAttempt, proof: Proof) -> None:
        """Note the end of an attempt's copy, and answer an Abort that waited for it with the proof (KVP-END-PROVEN)."""
        if proof != Proof.PROVEN:
            self._unprovable.add(attempt.sequence)
            if attempt.epoch is not None:
                attempt.epoch.proof = proof
        attempt.copying = False
        self._end(attempt)
        self._session.host.ended(self._session, attempt)

    def uses(self, epoch: Epoch) -> bool:
        """Whether an attempt may still use the memory of an epoch."""
        return any(
            each.copying or each.running or each.state == TransferState.OFFERED
            for each in self._session.attempts.values()
            if each.epoch is epoch
        )

    def end_epoch(self, epoch: Epoch, now: float) -> None:
        """Fail the attempts under way of an epoch that is taken back at once (KVP-EPO-MOVED)."""
        error = RemoteError(ErrorCode.POOL_MOVED, "epoch", "taken back at once", str(epoch.number), "make a new ticket")
        for attempt in list(self._session.attempts.values()):
            if attempt.epoch is epoch and attempt.running:
                self.fail(attempt, error, now)
                self._session.host.ended(self._session, attempt)

    def closed(self) -> None:
        """Mark what the sink has not acknowledged as lost, as it may not have arrived."""
        mine, yours = f"an acknowledgement from {self._session.name}", "the end of its session"
        for attempt in self._session.attempts.values():
            if attempt.state != TransferState.ENDED and not attempt.aborted:
                attempt.lost = attempt.lost or RemoteError(ErrorCode.PEER_LOST, "", mine, yours, "make a new ticket")

    handlers = ((m.Transfer, _transfer), (m.DoneAck, _done_ack), (m.Abort, _abort))


class SinkTransfers(Extension):
    """The sink's half of transfers, apart from their bytes."""

    _session: SinkSession

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._sequence = 0
        self._timer: Timer | None = None

    def closed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ask_again(self, now: float) -> None:
        """Send the Transfers again of which the source should have reported more by now (KVP-TRN-LONG)."""
        self._timer = None
        for attempt in list(self._session.attempts.values()):
            waits = attempt.state == TransferState.ACCEPTED and now - attempt.asked >= limits.PATIENCE
            if waits and attempt.ask is not None and not self._session.asks(attempt.request):
                attempt.ask.until = now + limits.PATIENCE
                self._session.ask(attempt.ask, now)
        self._watch(now)

    def _watch(self, now: float) -> None:
        if self._timer is None and self._session.attempts:
            self._timer = self._session.host.timers.at(now + limits.PATIENCE, self._ask_again)

    def compose(
        self, now: float, transfer: SinkTransfer, key: bytes, content: bytes, grants: Mapping[int, m.Grants]
    ) -> tuple[SinkAttempt, PendingMessage]:
        """Make an attempt and its Transfer, with routed grants by group id; raises LocalError: BUSY, TOO_LARGE."""
        session, owned = self._session, self._session.owner.current
        if owned is None:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", "registered memory", "none yet", "wait for Connected")
        described = owned.described
        asked = tuple(grants[g] for g in described.groups)
        late = {g.group: (g.first, g.first + g.count) for g in asked if g.late}
        attempt = SinkAttempt(
            self._sequence + 1,
            session=self._session,
            transfer=transfer,
            owned=owned,
            asked=now,
            late=late,
            asks=asked,
            granted=asked,
        )
        most = session.limits.max_transfers
        if attempt.sequence > session.low_water + most:
            mine = f"{most} transfers at once with {session.name}"
            raise LocalError(ErrorCode.BUSY, "transfer", mine, "one more", "wait until earlier transfers are over")
        request = session.compose(
            m.Transfer,
            now,
            sequence=attempt.sequence,
            ticket=key,
            content=content,
            source_version=described.of_source.version,
            sink_version=described.of_sink.version,
            epoch=owned.number,
            grants=asked,
            writers=np.array(described.writers, np.uint32),
            on_error=lambda error, now: self.lose(attempt, error),
        )
        return attempt, request

    def ask(self, attempt: SinkAttempt, request: PendingMessage, now: float) -> None:
        """Send a composed Transfer."""
        self._sequence = attempt.sequence
        self._session.attempts[attempt.sequence] = attempt
        self._session.move(attempt, "Transfer")
        attempt.ask, attempt.request = request, self._session.ask(request, now)
        self._watch(now)

    def lose(self, attempt: SinkAttempt, error: KvprotoError) -> None:
        """Record the error by which an attempt cannot succeed any more."""
        attempt.error = attempt.error or error
        self._session.host.ended(self._session, attempt)

    def find(self, message: Any) -> SinkAttempt | None:
        """The transfer that a message names; None if it has ended. Raises UNEXPECTED_MESSAGE if it never existed."""
        found: SinkAttempt | None = self._session.attempts.get(message.sequence)
        if found is None and message.sequence > self._session.low_water:
            mine, yours = "a transfer of this session", f"sequence {message.sequence}"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, yours)
        return found

    def mark_accepted(self, attempt: SinkAttempt) -> None:
        """Count the Transfer as answered by a message of its attempt, as Accepted may be lost or overtaken."""
        self._session.answered(attempt.request)
        if attempt.state == TransferState.ASKED:
            self._session.move(attempt, "Accepted")

    def accepted(self, message: m.Accepted, now: float) -> None:
        attempt = self.find(message)
        due = self._session.answered(message.request, m.Transfer, m.Grant, about=message.sequence)
        if attempt is not None and (due or message.request == attempt.request):
            self.mark_accepted(attempt)

    def settled(self, attempt: SinkAttempt) -> None:
        """Wait no longer for an answer to its Transfer or Grant, as one that ends it has come or is not needed."""
        self.mark_accepted(attempt)
        if attempt.grant:
            self._session.answered(attempt.grant)

    def _failed(self, message: m.Failed, now: float) -> None:
        attempt = self.find(message)
        if attempt is not None and attempt.done is not None:
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", "a transfer that is Done", "Failed")
        if attempt is not None and attempt.state in (TransferState.ASKED, TransferState.ACCEPTED):
            self.settled(attempt)
            self._session.move(attempt, "Failed")
            self._session.move(attempt, "DoneAck")
            self.lose(attempt, refused(message, self._session.name))
        self._session.reply(m.DoneAck, message)

    def abort(self, attempt: SinkAttempt, now: float, reason: str) -> None:
        """Stop an attempt; Drained will state what is known about its writes."""
        if attempt.state != TransferState.ABORTING:
            self._session.move(attempt, "Abort")
            self.settled(attempt)
            attempt.owned.delivery.stop(attempt)
            attempt.abort = self._session.request(
                m.Abort,
                now,
                sequence=attempt.sequence,
                reason=reason[:1000],
                on_error=lambda error, now: self._ended(attempt, Proof.UNPROVABLE),
            )

    def _drained(self, message: m.Drained, now: float) -> None:
        attempt = self.find(message)
        if attempt is None or attempt.state == TransferState.ENDED:
            return
        if attempt.abort != message.request:
            mine, yours = f"transfer {attempt.state.value}", "Drained that answers no Abort"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, yours)
        self._session.answered(message.request)
        self._ended(attempt, message.proof)

    def _ended(self, attempt: SinkAttempt, proof: Proof) -> None:
        if attempt.proof != Proof.PROVEN:  # as a Done that crossed the Abort is proof too
            attempt.proof = proof
        self._session.move(attempt, "Drained")

    handlers = ((m.Accepted, accepted), (m.Failed, _failed), (m.Drained, _drained))


def changed(version: int, message: m.Transfer) -> RemoteError:
    """The error for a Transfer that names another version of the source's Description (KVP-TRN-CHANGED)."""
    mine, yours = str(version), str(message.source_version)
    advice = "plan again before you ask again, or make a new ticket"
    return RemoteError(ErrorCode.DESCRIPTION_MISMATCH, "source_version", mine, yours, advice)
