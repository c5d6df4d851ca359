"""Transfers whose bytes the source writes itself: Done and its acknowledgement."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from kvproto.session.core import Handler, Session
from kvproto.session.delivery import Delivery, SourceDelivery
from kvproto.session.table import TransferState
from kvproto.session.transfers import SinkAttempt, SinkTransfers, SourceAttempt, SourceTransfers
from kvproto.session.verify import check_outcome
from kvproto.wire.enums import Outcome, Proof
from kvproto.wire.messages import Checksum, Done, HandOff, Registered

__all__ = ["SinkPush", "SourcePush"]


class SourcePush(SourceDelivery):
    """The source's half."""

    def done(
        self, attempt: SourceAttempt, now: float, written: int, outcome: Outcome, handoff: tuple[HandOff, ...],
        checksums: tuple[Checksum, ...] | None,
    ) -> None:  # fmt: skip
        """Every byte of the attempt is at its destination (KVP-TRN-ORDER)."""
        session = self._session
        session.move(attempt, "Done")
        session.request(
            Done, now, sequence=attempt.sequence, attempt=attempt.attempt, writer=session.me.rank,
            groups=np.array(session.described.groups, np.uint32), bytes=written, outcome=outcome, handoff=handoff,
            checksums=checksums,
            on_error=lambda error, now: session.part(SourceTransfers).refused(attempt, error),
        )  # fmt: skip


class SinkPush(Delivery):
    """The sink's half; `proving` are the transports by which the writer's death is proof."""

    def __init__(self, session: Session, proving: Collection[int]) -> None:
        self._session, self._proving = session, proving
        self.prover = session.session
        self.dead = False
        """Whether the writer has ended."""

    def handlers(self) -> Mapping[type, Handler]:
        return {Done: self._done}

    def registered(self, message: Registered) -> None:
        self.process = message.process if message.transport in self._proving else None

    def _done(self, message: Done, now: float) -> None:
        transfers = self._session.part(SinkTransfers)
        attempt = transfers.find(message)
        if attempt is not None and attempt.state in (TransferState.ASKED, TransferState.ACCEPTED):
            check_outcome(self._session.described, self._session.features, message)
            transfers.heard(attempt)
            attempt.done = message
            self._session.move(attempt, "Done")
            self._session.move(attempt, "DoneAck")
        transfers.acknowledge(message)

    def free(self, attempt: SinkAttempt) -> bool:
        return self.dead or attempt.done is not None or attempt.proof == Proof.PROVEN
