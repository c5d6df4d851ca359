"""Transfers whose bytes the sink reads: Offer, Renew, Pulled and Released, and the source's Register (feature PULL)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import attrs
import numpy as np

from kvproto.copying.aliasing import Overlaps
from kvproto.copying.grants import check_grants
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.session.core import Handler, Session, refused
from kvproto.session.delivery import Delivery, SourceDelivery
from kvproto.session.events import Fetched, RegisterAsked, SessionRefused
from kvproto.session.leases import Lease, Loan
from kvproto.session.limits import MAX_TRANSFERS, PATIENCE
from kvproto.session.phases import Epoch, Registration
from kvproto.session.registering import agrees, check_register
from kvproto.session.table import SessionState, TransferState
from kvproto.session.transfers import SinkAttempt, SinkTransfers, SourceAttempt, SourceTransfers
from kvproto.session.verify import check_outcome
from kvproto.wire.enums import Access, ErrorCode, Outcome, Proof, Transport
from kvproto.wire.messages import (
    Checksum,
    Columns,
    Done,
    Grants,
    HandOff,
    Offer,
    Pulled,
    Refused,
    Region,
    Register,
    Registered,
    Released,
    Renew,
    Renewed,
)

__all__ = ["SinkPull", "SourcePull", "stray"]

_EPOCH = 1


class SourcePull(SourceDelivery):
    """The source's half: it registers its memory, and offers items in place of writing."""

    _exposing = 0
    """Request id of its Register."""

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Registered: self._registered,
            Refused: self._registered,
            Pulled: self._pulled,
            Renew: self._renew,
        }

    def expose(self, regions: tuple[Region, ...], columns: tuple[Columns, ...], now: float) -> None:
        """Register this rank's memory with the sink, to be read."""
        session, described = self._session, self._session.described
        session.step("Register")
        self._exposing = session.request(
            Register, now, source=described.digests[0], sink=described.digests[1], epoch=_EPOCH, access=Access.READ,
            regions=regions, columns=columns, plan=described.plan.digest, routes=described.refs,
        )  # fmt: skip

    def _registered(self, message: Registered | Refused, now: float) -> None:
        session = self._session
        if message.request != self._exposing or not session.answered(message.request):
            return
        session.step(type(message).__name__)
        try:
            if isinstance(message, Refused):
                session.tell(SessionRefused(session.name, refused(message), by_us=False))
            else:
                agrees(message, session.described)
        except RemoteError as error:
            session.tell(SessionRefused(session.name, error, by_us=True))
            session.goodbye(str(error))

    def offer(
        self, attempt: SourceAttempt, now: float, end: float, latest: float, grants: tuple[Grants, ...],
        outcome: Outcome, handoff: tuple[HandOff, ...], checksums: tuple[Checksum, ...] | None,
    ) -> None:  # fmt: skip
        """The sink may read these items until `end`; Renew prolongs that up to `latest` (KVP-PUL-OFFER)."""
        session = self._session
        session.move(attempt, "Offer")
        request = session.request(
            Offer, now, patience=max(PATIENCE, latest - now), sequence=attempt.sequence, attempt=attempt.attempt,
            writer=session.me.rank, epoch=_EPOCH, grants=grants, lease=int((end - now) * 1000), outcome=outcome,
            handoff=handoff, checksums=checksums, on_error=lambda error, now: self._refused(attempt, error),
        )  # fmt: skip
        attempt.loan = Loan(request, end, latest)

    def _refused(self, attempt: SourceAttempt, error: RemoteError) -> None:
        """The sink has refused the offer, and so does not read it."""
        attempt.loan = None
        self._session.part(SourceTransfers).refused(attempt, error)

    def closed(self) -> None:
        """A sink that says Goodbye reads nothing any more; one that is silent may read until its leases end."""
        for attempt in self._session.attempts.values():
            if self._session.said_goodbye:
                attempt.loan = None

    def released(self, attempt: SourceAttempt) -> None:
        """The engine is told to free the request; a sink that has read it hears of it."""
        if attempt.fetched and self._session.state == SessionState.READY:
            self._session.notice(
                Released(session=self._session.session, sequence=attempt.sequence, attempt=attempt.attempt)
            )
        attempt.fetched = False

    def _find(self, message: Pulled | Renew) -> SourceAttempt | None:
        found: SourceAttempt | None = self._session.attempts.get(message.sequence)
        return found if found is not None and found.attempt == message.attempt else None

    def _pulled(self, message: Pulled, now: float) -> None:
        attempt = self._find(message)
        if attempt is None or attempt.loan is None or attempt.loan.request != message.request:
            return
        if self._session.answered(message.request):
            attempt.loan, attempt.fetched = None, True
            self._session.move(attempt, "Pulled")
            self._session.tell(Fetched(self._session.session, attempt.sequence, attempt.attempt, message.bytes))

    def _renew(self, message: Renew, now: float) -> None:
        attempt = self._find(message)
        loan = attempt.loan if attempt is not None else None
        if attempt is None or loan is None or loan.renewed[0] != message.request:
            lease = min(message.lease, int(1000 * (loan.latest - now))) if loan is not None else 0
            if attempt is None or loan is None or now >= loan.end or lease < 1:
                yours = f"{message.lease} ms more"
                raise RemoteError(ErrorCode.DEADLINE, "lease", "over", yours, "make a new ticket")
            self._session.move(attempt, "Renew")
            self._session.move(attempt, "Renewed")
            loan.end, loan.renewed = max(loan.end, now + lease / 1000), (message.request, lease)
        self._session.notice(
            Renewed(
                session=message.session, request=message.request, sequence=message.sequence, attempt=message.attempt,
                lease=loan.renewed[1],
            )
        )  # fmt: skip


class SinkPull(Delivery):
    """The sink's half: it maps the source's memory and reads what is offered.

    Pages are written by this side alone, so that its copy is over is its proof, whatever the source says.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked: tuple[Register, Overlaps] | None = None
        self._epoch: Epoch | None = None
        self._pulled: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Bytes read of as many attempts as a source may still ask about again."""

    def handlers(self) -> Mapping[type, Handler]:
        return {Register: self._register, Offer: self._offer, Renewed: self._renewed, Released: self._released}

    def expose(self, exposure: Callable[[], Registration]) -> Registration:
        """The source has no use for handles, and gets none."""
        regions = exposure().regions
        return Registration(
            tuple(attrs.evolve(r, handles=tuple(attrs.evolve(h, data=b"") for h in r.handles)) for r in regions)
        )

    @property
    def ready(self) -> bool:
        return self._epoch is not None

    def _register(self, message: Register, now: float) -> None:
        session = self._session
        if (self._asked is not None and message == self._asked[0]) or session.state == SessionState.REGISTERING:
            return  # it is being mapped, or has overtaken Registered and comes again
        if self._epoch is not None and self._epoch.request == message.request:
            self._say_registered(self._epoch)
            return
        session.step("Register")
        described = session.described
        try:
            if self._asked is not None or self._epoch is not None:
                mine = "one Register of a source"
                raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "epoch", mine, str(message.epoch), "negotiate EPOCHS")
            overlaps = check_register(message, Access.READ, described, described.source)
        except KvprotoError as error:
            session.refuse(message.request, error)
            return
        self._asked = message, overlaps
        session.tell(RegisterAsked(session.session, message))

    def accept_register(self, transport: Transport) -> None:
        """The source's memory is mapped here."""
        asked, self._asked = self._asked, None
        if asked is not None and self._session.state == SessionState.READY:
            self._session.step("Registered")
            register, overlaps = asked
            columns = {c.group: c for c in register.columns}
            self._epoch = Epoch(register.epoch, columns, transport, register.request, overlaps)
            self._say_registered(self._epoch)

    def _say_registered(self, epoch: Epoch) -> None:
        described = self._session.described
        self._session.notice(
            Registered(
                session=self._session.session, request=epoch.request, epoch=epoch.number, transport=epoch.transport,
                routes=described.refs, plan=described.plan.digest,
            )
        )  # fmt: skip

    def refuse_register(self, error: KvprotoError) -> None:
        """The source's memory cannot be mapped here."""
        asked, self._asked = self._asked, None
        if asked is not None and self._session.state == SessionState.READY:
            self._session.step("Refused")
            self._session.refuse(asked[0].request, error)

    def _offer(self, message: Offer, now: float) -> None:
        transfers = self._session.part(SinkTransfers)
        attempt = transfers.find(message)
        if attempt is None or attempt.state == TransferState.ENDED:
            self._say_pulled(message, self._pulled.get((message.sequence, message.attempt), 0))
            return
        if attempt.lease is not None and attempt.lease.offer == message:
            return
        if attempt.state != TransferState.ABORTING:
            self._check(message)
        transfers.heard(attempt)
        self._session.move(attempt, "Offer")
        if attempt.state == TransferState.OFFERED:
            attempt.lease = Lease.of(message, attempt.asked)
            self._renew_at(attempt, attempt.lease.renew_at, now)
            self._session.host.ended(self._session, attempt)

    def _check(self, message: Offer) -> None:
        """Raise what speaks against an Offer: it is checked like a Transfer, before anything is read."""
        described, epoch = self._session.described, self._epoch
        check_outcome(described, self._session.features, message)
        if epoch is None or message.epoch != epoch.number:
            mine = str(epoch.number) if epoch is not None else "none"
            raise RemoteError(ErrorCode.BAD_GRANT, "epoch", mine, str(message.epoch), "name the registered epoch")
        check_grants(
            described.source, described.ranks[0], epoch.columns, described.drawn, message.grants, epoch.overlaps
        )

    def _say_pulled(self, offer: Offer, count: int) -> None:
        self._session.notice(
            Pulled(
                session=self._session.session, request=offer.request, sequence=offer.sequence, attempt=offer.attempt,
                bytes=count,
            )
        )  # fmt: skip

    def pulled(self, attempt: SinkAttempt, count: int) -> None:
        """Every byte of an offer is here; from now on it stands as Done."""
        if attempt.lease is None:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", "an offer that is leased", "pulled", "ask may_read")
        offer, attempt.lease = attempt.lease.offer, None
        self._pulled[attempt.sequence, attempt.attempt] = count
        if len(self._pulled) > MAX_TRANSFERS:
            self._pulled.popitem(last=False)
        self._say_pulled(offer, count)
        attempt.done = Done(
            session=self._session.session, request=offer.request, sequence=offer.sequence, attempt=offer.attempt,
            writer=offer.writer, groups=np.array(self._session.described.groups, np.uint32), bytes=count,
            outcome=offer.outcome, handoff=offer.handoff, checksums=offer.checksums,
        )  # fmt: skip
        self._session.move(attempt, "Pulled")

    def _renew_at(self, attempt: SinkAttempt, when: float, now: float) -> None:
        """Ask for more time at `when`, or now if that has passed."""
        if when > now:
            self._session.host.timers.at(when, lambda at: self._renew_if_due(attempt, at))
        else:
            self._renew_if_due(attempt, now)

    def _renew_if_due(self, attempt: SinkAttempt, now: float) -> None:
        lease, session = attempt.lease, self._session
        due = lease is not None and lease.renewal is None and now >= lease.renew_at
        if lease is None or not due or session.state != SessionState.READY:
            return
        session.move(attempt, "Renew")
        lease.sent = now
        lease.renewal = session.request(
            Renew, now, sequence=attempt.sequence, attempt=attempt.attempt, lease=lease.offer.lease,
            on_error=lambda error, now: session.part(SinkTransfers).lose(attempt, error),
        )  # fmt: skip

    def _renewed(self, message: Renewed, now: float) -> None:
        attempt = self._session.part(SinkTransfers).find(message)
        lease = attempt.lease if attempt is not None else None
        if attempt is None or lease is None or lease.renewal != message.request:
            return
        if self._session.answered(message.request):
            self._session.move(attempt, "Renewed")
            lease.renewed(message.lease)
            self._session.host.timers.at(lease.renew_at, lambda at: self._renew_if_due(attempt, at))

    def _released(self, message: Released, now: float) -> None:
        attempt = self._session.part(SinkTransfers).find(message)
        if attempt is not None:
            self._session.move(attempt, "Released")

    def stop(self, attempt: SinkAttempt) -> bool:
        lease, attempt.lease = attempt.lease, None if not attempt.reading else attempt.lease
        if lease is not None and lease.renewal is not None:
            self._session.answered(lease.renewal)
        return True

    def free(self, attempt: SinkAttempt) -> bool:
        return not attempt.stray


def stray(attempt: SinkAttempt, proof: Proof) -> None:
    """A copy of an offer is over, and of no use; UNPROVABLE: its writes may still arrive."""
    if attempt.lease is not None:
        attempt.lease.reading = False
    attempt.stray = attempt.stray or proof != Proof.PROVEN
