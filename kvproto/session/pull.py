"""Transfers whose bytes the sink reads: Offer, Renew, Pulled and Released, and the source's Register (feature PULL).

A lease is a duration, and a frame may be delayed anywhere. The source counts the lease from when it sends its answer.
The sink counts it from when it first sent the request that was answered, the Transfer or the Renew: the source cannot
have begun earlier, so the lease never ends later at the sink than at the source. The sink also counts it 1/64 shorter,
as its clock may be slower (KVP-PUL-SPEED).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvproto.copying.grants import check_grants
from kvproto.errors import LocalError, RemoteError
from kvproto.session import limits
from kvproto.session.core import Extension, Session
from kvproto.session.descriptions import Epoch
from kvproto.session.push import Delivery, check_begins, check_outcome
from kvproto.session.records import Answer, SinkAttempt, SourceAttempt
from kvproto.session.registering import Holder, Owner
from kvproto.session.table import SessionState, TransferState
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, ErrorCode

if TYPE_CHECKING:
    from kvproto.session.source import SourceSession

_RENEW, _START = 0.5, 0.25
"""Shares of a lease: it is renewed when `_RENEW` is left, and no copy starts when less than `_START` is left."""
_COUNTED = 63 / 64 / 1000
"""Seconds that a sink counts for each millisecond of a lease."""


@attrs.define(eq=False)
class Loan:
    """At the source: what a sink may read."""

    request: int
    """The request id of the Offer."""
    end: float
    latest: float
    """The ticket's deadline, beyond which no lease extends."""
    renewed: tuple[int, int] = (0, 0)
    """The request id of the last Renew that was granted, and its lease in milliseconds."""


@attrs.define(eq=False)
class Lease:
    """At the sink: an offer, and until when it may be read."""

    offer: m.Offer
    end: float
    length: float
    """The length of the lease in seconds."""
    renewal: int | None = None
    """The request id of a Renew under way."""
    sent: float = 0.0
    """The time at which that Renew was first sent."""
    reported: bool = False
    """Whether the offer was reported to the engine."""
    reading: bool = False
    """Whether a copy is under way."""

    @classmethod
    def of(cls, offer: m.Offer, asked: float) -> Lease:
        """The lease of an Offer whose Transfer was first sent at `asked`."""
        length = offer.lease * _COUNTED
        return cls(offer, asked + length, length)

    def over(self, now: float) -> bool:
        """Whether the lease has ended, so that nothing may be read any more (KVP-PUL-READ)."""
        return now >= self.end

    def fresh(self, now: float) -> bool:
        """Whether a copy may begin."""
        return self.end - now >= _START * self.length

    @property
    def renew_at(self) -> float:
        """The time at which to ask for more."""
        return self.end - _RENEW * self.length

    def renewed(self, lease: int) -> None:
        """Extend the lease to `lease` milliseconds from when the Renew was sent, but no longer than the Offer's."""
        self.length = min(lease, self.offer.lease) * _COUNTED
        self.end, self.renewal = max(self.end, self.sent + self.length), None


class SourcePull(Extension):
    """The source's half, which registers its memory and offers items instead of writing."""

    _session: SourceSession

    def __init__(self, session: SourceSession) -> None:
        super().__init__(session)
        self.owner = Owner(session, Access.READ)
        session.install(self.owner)

    def offer(
        self,
        attempt: SourceAttempt,
        end: float,
        latest: float,
        grants: tuple[m.Grants, ...],
        answer: Answer,
        now: float,
    ) -> None:
        """Offer these items to the sink until `end`, which Renew can extend up to `latest` (KVP-PUL-OFFER)."""
        session, owned = self._session, self.owner.newest  # its Registered may still be behind the Transfer
        if owned is None or owned.back is not None:
            error = RemoteError(ErrorCode.POOL_MOVED, "epoch", "memory that is registered", "none", "make a new ticket")
            session.transfers.fail(attempt, error, now)
            return
        session.move(attempt, "Offer")
        request = session.request(
            m.Offer,
            now,
            patience=max(limits.PATIENCE, latest - now),
            sequence=attempt.sequence,
            writer=session.me.rank,
            epoch=owned.number,
            grants=grants,
            lease=int((end - now) * 1000),
            **answer.fields,
            on_error=lambda error, now: session.transfers.refused(attempt, error),
        )
        attempt.loan = Loan(request, end, latest)

    def closed(self) -> None:
        """End the loans of a sink that has said Goodbye; one that is silent may read until its leases end."""
        for attempt in self._session.attempts.values():
            if self._session.goodbye_received:
                attempt.loan = None

    def released(self, attempt: SourceAttempt) -> None:
        """Send Released for a request that the engine may free, to a sink that has read it."""
        if attempt.fetched and self._session.state == SessionState.READY:
            self._session.notice(m.Released(session=self._session.session, sequence=attempt.sequence))
        attempt.fetched = False

    def _pulled(self, message: m.Pulled, now: float) -> None:
        session = self._session
        attempt = session.transfers.find(message)
        if attempt is None or attempt.loan is None or attempt.loan.request != message.request:
            return
        if session.answered(message.request):
            attempt.loan, attempt.fetched, attempt.served = None, True, True
            session.move(attempt, "Pulled")
            session.host.calls.transfer_read(attempt, message.bytes)

    def _renew(self, message: m.Renew, now: float) -> None:
        attempt = self._session.transfers.find(message)
        loan = attempt.loan if attempt is not None else None
        if attempt is None or loan is None or loan.renewed[0] != message.request:
            lease = min(message.lease, int(1000 * (loan.latest - now))) if loan is not None else 0
            if attempt is None or loan is None or now >= loan.end or lease < 1:
                yours = f"{message.lease} ms more"
                raise RemoteError(ErrorCode.DEADLINE, "lease", "over", yours, "make a new ticket")
            self._session.move(attempt, "Renew")
            self._session.move(attempt, "Renewed")
            loan.end, loan.renewed = max(loan.end, now + lease / 1000), (message.request, lease)
        self._session.reply(m.Renewed, message, lease=loan.renewed[1])

    handlers = ((m.Pulled, _pulled), (m.Renew, _renew))


class SinkPull(Delivery):
    """The sink's half, which maps the source's memory and reads it; the end of its own copy is proof."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._holder = Holder(session, Access.READ, lambda epoch: bool(self._of(epoch)), self._end_epoch)
        session.install(self._holder)
        self._read: OrderedDict[int, int] = OrderedDict()
        """Bytes read, by sequence, for the transfers whose Offer the source may still repeat."""
        self._early: dict[int, m.Offer] = {}
        """Offers of an epoch that is still being mapped, by sequence."""

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return bool(self._holder.open)

    def _offer(self, message: m.Offer, now: float) -> None:
        session, transfers = self._session, self._session.transfers
        attempt = transfers.find(message)
        if attempt is None or attempt.state == TransferState.ENDED:
            session.reply(m.Pulled, message, bytes=self._read.get(message.sequence, 0))
            return
        if attempt.lease is not None and attempt.lease.offer == message:
            return
        if self._holder.mapping(message.epoch):
            self._early[message.sequence] = message
            return
        if attempt.state != TransferState.ABORTING:
            self._check(attempt, message)
        transfers.mark_accepted(attempt)
        session.move(attempt, "Offer")
        if attempt.state == TransferState.OFFERED:
            attempt.lease = Lease.of(message, attempt.asked)
            self._renew(attempt, now)
            session.host.ended(session, attempt)

    def take_early(self) -> list[m.Offer]:
        """Return the Offers that came while their epoch was being mapped, to be heard now (KVP-PUL-EARLY)."""
        early, self._early = list(self._early.values()), {}
        return early

    def _check(self, attempt: SinkAttempt, message: m.Offer) -> None:
        """Raise what is wrong with an Offer, which is checked like a Transfer before anything is read."""
        described, epoch = attempt.owned.described, self._holder.epochs.get(message.epoch)
        check_outcome(described, self._session.features, message)
        check_begins(attempt, message.begins)
        if epoch is None or epoch.back is not None:
            mine = " or ".join(map(str, self._holder.open)) or "none"
            raise RemoteError(ErrorCode.BAD_GRANT, "epoch", mine, str(message.epoch), "name a registered epoch")
        check_grants(
            described.source, described.ranks[0], epoch.columns, described.drawn, message.grants, written=False
        )

    def pulled(self, attempt: SinkAttempt, count: int) -> None:
        """Send Pulled, as every byte of an offer is here; from now on the attempt counts as Done."""
        if attempt.lease is None:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", "a leased offer", "none", "call may_read first")
        session, offer, attempt.lease = self._session, attempt.lease.offer, None
        self._read[attempt.sequence] = count
        if len(self._read) > limits.MAX_TRANSFERS:
            self._read.popitem(last=False)
        session.reply(m.Pulled, offer, bytes=count)
        attempt.done = m.Done(
            session=session.session,
            request=offer.request,
            sequence=attempt.sequence,
            writer=offer.writer,
            groups=np.array(attempt.owned.described.groups, np.uint32),
            bytes=count,
            outcome=offer.outcome,
            handoff=offer.handoff,
            checksums=offer.checksums,
            begins=offer.begins,
        )
        session.move(attempt, "Pulled")

    def _renew(self, attempt: SinkAttempt, now: float) -> None:
        """Send Renew, if that is still due, or set the timer to do so."""
        lease, session = attempt.lease, self._session
        if lease is not None and now < lease.renew_at:
            session.host.timers.at(lease.renew_at, lambda at: self._renew(attempt, at))
        elif lease is not None and lease.renewal is None and session.state == SessionState.READY:
            session.move(attempt, "Renew")
            lease.sent = now
            lease.renewal = session.request(
                m.Renew,
                now,
                sequence=attempt.sequence,
                lease=lease.offer.lease,
                on_error=lambda error, now: session.transfers.lose(attempt, error),
            )

    def _renewed(self, message: m.Renewed, now: float) -> None:
        attempt = self._session.transfers.find(message)
        lease = attempt.lease if attempt is not None else None
        if attempt is None or lease is None or lease.renewal != message.request:
            return
        if self._session.answered(message.request):
            self._session.move(attempt, "Renewed")
            lease.renewed(message.lease)
            self._session.host.timers.at(lease.renew_at, lambda at: self._renew(attempt, at))

    def _released(self, message: m.Released, now: float) -> None:
        attempt = self._session.transfers.find(message)
        if attempt is not None:
            self._session.move(attempt, "Released")

    def stop(self, attempt: SinkAttempt) -> bool:
        lease = attempt.lease
        if lease is not None and lease.renewal is not None:
            self._session.answered(lease.renewal)
        if not attempt.reading:
            attempt.lease = None
        return True

    def free(self, attempt: SinkAttempt) -> bool:
        return not attempt.stray

    def _of(self, epoch: Epoch) -> list[SinkAttempt]:
        """The attempts that were offered items of an epoch of the source."""
        attempts: list[SinkAttempt] = list(self._session.attempts.values())
        return [each for each in attempts if each.lease is not None and each.lease.offer.epoch == epoch.number]

    def _end_epoch(self, epoch: Epoch, now: float) -> None:
        """Stop reading an epoch that is taken back at once (KVP-EPO-MOVED)."""
        error = RemoteError(ErrorCode.POOL_MOVED, "epoch", "to be read", "taken back", "make a new ticket")
        for attempt in self._of(epoch):
            self._session.transfers.lose(attempt, error)

    handlers = ((m.Offer, _offer), (m.Renewed, _renewed), (m.Released, _released))
