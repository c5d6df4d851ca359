"""What a session remembers of each transfer and of each request under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs

from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.leases import Lease, Loan
from kvproto.session.phases import Described, Epoch, Owned
from kvproto.session.table import TransferState
from kvproto.session.timers import Timer
from kvproto.wire import messages as m
from kvproto.wire.enums import Proof, RequestState

__all__ = ["Attempt", "Census", "Request", "SinkAttempt", "SourceAttempt", "Want"]


class Census(NamedTuple):
    """What an endpoint has, for who looks on."""

    peers: int
    """Sessions that are open."""
    suspects: int
    """Those of them whose peer is suspect."""
    resends: int
    """Requests sent again, in its life."""


@attrs.define(eq=False)
class Attempt:
    """One attempt of one transfer, as this side sees it."""

    sequence: int
    attempt: int
    state: TransferState = TransferState.NEW

    @property
    def over(self) -> bool:
        """Whether nothing of it needs to be remembered once all before it are over too."""
        return self.state == TransferState.ENDED

    @property
    def ids(self) -> dict[str, Any]:
        """The fields that name it in a message."""
        return {"sequence": self.sequence, "attempt": self.attempt}


@attrs.define(eq=False)
class SourceAttempt(Attempt):
    """An attempt at the source."""

    transfer: m.Transfer | None = None
    """None: it was aborted before its Transfer came."""
    epoch: Epoch | None = None
    """Of the sink's memory; None: its Transfer was refused, or has not come."""
    granted: tuple[m.Grants, ...] = ()
    """What may be written of what the Transfer asks for."""
    whole: bool = True
    """Whether that is all of it."""
    progress: Callable[[], RequestState] | None = None
    """How far the request is now."""
    refused: KvprotoError | None = None
    """What the Transfer was answered by, where that was Failed."""
    aborted: bool = False
    copying: bool = False
    """Whether writes of it may arrive."""
    drain: m.Abort | None = None
    """An Abort that waits for the copy to end."""
    loan: Loan | None = None
    fetched: bool = False
    """Whether the sink has read what it was offered."""
    served: bool = False
    """Whether the sink has said that it has it, so that no other attempt follows (KVP-TRN-AGAIN)."""
    lost: KvprotoError | None = None
    """Why the sink may not have it, although it has not aborted it."""
    end: int | None = None
    """Below this token every row that may move before prefill is over has its item; None: all of them have."""
    grant: int = 0
    """Request id of the last Grant that was accepted."""
    useful: int | None = 0
    """Up to which token items are of use by now; None: all of them are."""
    saying: Timer | None = None
    """When Progress is said again."""

    @property
    def described(self) -> Described:
        """What it is planned by, once its Transfer was found legal."""
        assert self.epoch is not None
        return self.epoch.described

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


@attrs.define(eq=False)
class SinkAttempt(Attempt):
    """An attempt at the sink: the part of one source rank in a transfer."""

    owned: Owned = attrs.field(kw_only=True)
    """The epoch of its items."""
    transfer: int = 0
    """The transfer's number at the endpoint."""
    asked: float = 0.0
    """When its Transfer was first sent."""
    request: int = 0
    """Request id of the Transfer."""
    ask: Request | None = None
    """The Transfer, to be sent again where the source says nothing more."""
    abort: int = 0
    """Request id of the Abort."""
    done: m.Done | None = None
    """What the source said; of an offer that was read, in the same words."""
    error: KvprotoError | None = None
    proof: Proof | None = None
    """What Drained said."""
    lease: Lease | None = None
    late: Mapping[int, tuple[int, int]] = {}
    """Windows that may begin later: first token and end, by group id."""
    asks: tuple[m.Grants, ...] = ()
    """The windows of its Transfer, with items unless they are granted later."""
    granted: tuple[m.Grants, ...] = ()
    """What the source may write."""
    named: tuple[m.Grants, ...] = ()
    """What it may write once it was told."""
    whole: bool = True
    """Whether it may write all of it."""
    begun: bool = False
    """Whether all of it is named, told or not."""
    grant: int = 0
    """Request id of a Grant under way."""
    ready: bool = False
    """Whether prefill is over at the source."""
    useful: int = 0
    """Up to which token items are of use before that."""
    stray: bool = False
    """Whether writes of a copy of our own may still arrive."""
    settled: bool = False
    """Whether the endpoint has reported the transfer."""

    @property
    def over(self) -> bool:
        return self.state == TransferState.ENDED and self.settled

    @property
    def described(self) -> Described:
        """What it is planned by."""
        return self.owned.described

    @property
    def delivery(self) -> Any:
        """How its bytes reach this side."""
        return self.owned.delivery

    @property
    def reading(self) -> bool:
        """Whether a copy of what was offered is under way."""
        return self.lease is not None and self.lease.reading

    def stop_reading(self, proof: Proof) -> None:
        """A copy of an offer is over, and of no use; UNPROVABLE: its writes may still arrive."""
        if self.lease is not None:
            self.lease.reading = False
        self.stray = self.stray or proof != Proof.PROVEN


@attrs.define(eq=False)
class Want:
    """A transfer at the sink: one attempt in the session of each required rank."""

    number: int
    into: object
    """The pool of its items."""
    parts: dict[int, SinkAttempt]
    started: float
    error: KvprotoError | None = None
    useful: int | None = 0
    """Up to which token the engine was told that items are of use; None: all of them."""


@attrs.define(eq=False)
class Request:
    """A message that is resent until it is answered."""

    number: int
    frame: bytes = attrs.field(repr=False)
    kind: type[Any]
    until: float
    """When it is given up."""
    on_error: Callable[[RemoteError, float], None] | None
    """Told when the peer answers by Error."""
    about: tuple[int, int]
    """The sequence and attempt that it names, or 0 and 0."""
    timer: Timer | None = None
