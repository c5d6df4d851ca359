"""Records of a session: its transfers, and the requests that are not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.descriptions import Described, Epoch, Owned
from kvproto.session.table import TransferState
from kvproto.session.timers import Timer
from kvproto.wire import messages as m
from kvproto.wire.enums import Outcome, Proof, RequestState

if TYPE_CHECKING:
    from kvproto.session.pull import Lease, Loan
    from kvproto.session.source import SourceSession
    from kvproto.session.tickets import TicketState


class Counters(NamedTuple):
    """The numbers of open sessions, of those whose peer is suspect, and of requests ever sent again; peers by name."""

    peers: int
    suspects: int
    resends: int
    names: frozenset[str]


@attrs.define(eq=False)
class Attempt:
    """One transfer of one session, as this side sees it."""

    sequence: int
    state: TransferState = TransferState.NEW


@attrs.define(eq=False)
class SourceAttempt(Attempt):
    """A transfer at the source: the part of this rank in what one sink rank asks for."""

    session: SourceSession = attrs.field(kw_only=True)
    transfer: m.Transfer | None = None
    """Its Transfer; None if it was aborted before that came."""
    ticket: TicketState | None = None
    """The ticket that it uses; None until its Transfer was found legal."""
    send: Any = None
    """The rank's own record of its copies, from the first part to the answer."""
    epoch: Epoch | None = None
    """The epoch of the sink's memory; None if its Transfer was refused or has not come."""
    granted: tuple[m.Grants, ...] = ()
    """The part of the Transfer's grants that the sink allows to be written."""
    whole: bool = True
    """Whether that is everything."""
    progress: Callable[[], RequestState] | None = None
    """Returns the state of the request."""
    refused: KvprotoError | None = None
    """The error in the Failed that answered its Transfer, or a Grant; None if neither was refused."""
    aborted: bool = False
    copying: bool = False
    """Whether a copy of it is under way."""
    drain: m.Abort | None = None
    """An Abort that waits for the copy to end."""
    loan: Loan | None = None
    fetched: bool = False
    """Whether the sink has read what it was offered."""
    served: bool = False
    """Whether the sink has acknowledged it, so that it is over."""
    lost: KvprotoError | None = None
    """The reason that the sink may not have it, although it did not abort it."""
    end: int | None = None
    """The token below which every row that can be sent early has its item; None if all of them have."""
    grant: int = 0
    """The request id of the last Grant that was accepted."""
    useful: int | None = 0
    """The token up to which items are of use so far; None if all of them are."""
    saying: Timer | None = None
    """The timer that repeats Progress."""

    @property
    def asked(self) -> m.Transfer:
        """Its Transfer, once it has come."""
        assert self.transfer is not None
        return self.transfer

    @property
    def described(self) -> Described:
        """Its Descriptions and plan, once its Transfer was found legal."""
        assert self.epoch is not None
        return self.epoch.described

    @property
    def wanted(self) -> bool:
        """Whether its bytes are still wanted."""
        return self.state == TransferState.ACCEPTED and self.session.open

    @property
    def over(self) -> bool:
        """Whether it can be forgotten, once all transfers before it can be as well."""
        return self.state == TransferState.ENDED and not self.copying

    @property
    def running(self) -> bool:
        """Whether Done or Failed may still answer it."""
        return self.state in (TransferState.ASKED, TransferState.ACCEPTED)

    def lent(self, now: float) -> bool:
        """Whether the sink may still read what it was offered."""
        return self.loan is not None and now < self.loan.end

    def fail(self, error: KvprotoError, now: float) -> None:
        """End it with Failed; see `SourceTransfers.fail`."""
        self.session.transfers.fail(self, error, now)


@attrs.define(eq=False)
class SinkAttempt(Attempt):
    """A transfer of one session at the sink: the part of one source rank in a fetch."""

    session: Any = attrs.field(kw_only=True, repr=False)
    """The SinkSession of its source rank."""
    transfer: SinkTransfer = attrs.field(kw_only=True, repr=False)
    owned: Owned = attrs.field(kw_only=True, repr=False)
    """The epoch of its items, with its Descriptions and the delivery of its bytes."""
    asked: float = 0.0
    """The time at which its Transfer was first sent."""
    request: int = 0
    """The request id of the Transfer."""
    ask: PendingMessage | None = None
    """The Transfer, to send again if the source sends nothing more."""
    abort: int = 0
    """The request id of the Abort."""
    done: m.Done | None = None
    """The source's Done, or an equivalent one for an offer that was read."""
    error: KvprotoError | None = None
    proof: Proof | None = None
    """Proof about writes by Drained, or by a Done that crossed the Abort."""
    lease: Lease | None = None
    late: Mapping[int, tuple[int, int]] = {}
    """The windows that may begin later, as first token and end, by group id."""
    asks: tuple[m.Grants, ...] = ()
    """The windows of its Transfer, with items unless they are granted later."""
    granted: tuple[m.Grants, ...] = ()
    """The grants that the source was told."""
    named: tuple[m.Grants, ...] = ()
    """The grants that the engine has named, whether or not the source was told."""
    whole: bool = True
    """Whether `granted` is everything."""
    begun: bool = False
    """Whether `named` is everything."""
    grant: int = 0
    """The request id of a Grant under way."""
    ready: bool = False
    """Whether prefill is over at the source."""
    useful: int = 0
    """The token up to which items are of use before that."""
    stray: bool = False
    """Whether writes of a copy of this side may still arrive."""
    settled: bool = False
    """Whether the endpoint has reported the transfer."""

    @property
    def over(self) -> bool:
        """Whether it can be forgotten, once all transfers before it can be as well."""
        return self.state == TransferState.ENDED and self.settled

    @property
    def reading(self) -> bool:
        """Whether a copy of what was offered is under way."""
        return self.lease is not None and self.lease.reading

    def stop_reading(self, proof: Proof) -> None:
        """Note that a copy of an offer ended without use; with UNPROVABLE, its writes may still arrive."""
        if self.lease is not None:
            self.lease.reading = False
        self.stray = self.stray or proof != Proof.PROVEN


@attrs.frozen
class Answer:
    """Fields that Done and Offer have in common, apart from bytes."""

    outcome: Outcome
    handoff: tuple[m.HandOff, ...] = ()
    checksums: tuple[m.Checksum, ...] | None = None
    begins: tuple[m.Begin, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome, "handoff": self.handoff, "checksums": self.checksums, "begins": self.begins or None
        }  # fmt: skip


@attrs.define(eq=False)
class SinkTransfer:
    """A transfer at the sink: one part in the session of each required rank."""

    fetch: Any
    """The record of the one who asked for it."""
    into: object
    """The pool of its items."""
    started: float
    parts: dict[int, SinkAttempt] = attrs.Factory(dict)
    """Attempts by source rank."""
    error: KvprotoError | None = None
    useful: int | None = 0
    """The token up to which items were last reported as of use; None for all of them."""
    unheard: bool = False
    """Whether it may be requested again: the source goes on, but has forgotten the session, and accepted none of it."""
    unproven: list[SinkAttempt] = attrs.Factory(list)
    """Once it is lost, the attempts whose writes may still arrive."""

    @property
    def accepted(self) -> bool:
        """Whether every source rank has answered."""
        return all(attempt.state != TransferState.ASKED for attempt in self.parts.values())


@attrs.define(eq=False)
class PendingMessage:
    """A message that is resent until it is answered."""

    number: int
    frame: bytes = attrs.field(repr=False)
    kind: type[Any]
    until: float
    """The time at which it is given up."""
    on_error: Callable[[RemoteError, float], None] | None
    """Called if the peer answers with Error."""
    about: int
    """The sequence that it names, or 0."""
    timer: Timer | None = None
