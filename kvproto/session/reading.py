"""How a sink endpoint reads the offers of its source ranks under their leases (feature PULL)."""

from __future__ import annotations

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.session import events as e
from kvproto.session.exposing import Exposing
from kvproto.session.pull import SinkPull
from kvproto.session.records import SinkAttempt, SinkTransfer
from kvproto.wire.enums import ErrorCode, Proof

__all__ = ["Reading"]


class Reading(Exposing):
    """The part of a sink endpoint that reads offers."""

    def _fail(self, want: SinkTransfer | None, error: KvprotoError, now: float) -> None:
        """Abort the parts that have not arrived, except for those that are being read."""
        raise NotImplementedError

    def _part(self, offered: e.Offered) -> tuple[SinkTransfer, SinkAttempt] | None:
        """The transfer and the attempt that an offer belongs to; None if the transfer has ended."""
        want = self._wants.get(offered.transfer)
        return (want, want.parts[offered.offer.writer]) if want is not None else None

    def wanted(self, offered: e.Offered) -> bool:
        """Whether an offer is still wanted; if not, a copy of it should be stopped."""
        part = self._part(offered)
        return part is not None and part[0].error is None and part[1].lease is not None

    def may_read(self, offered: e.Offered, now: float) -> bool:
        """Begin to read an offer, if its lease allows it; after True, call `read` or `unread` (KVP-PUL-READ)."""
        part = self._part(offered)
        lease = part[1].lease if part is not None and part[0].error is None else None
        if part is None or lease is None or not lease.fresh(now):
            return False
        lease.reading = True
        self._watch(*part, now)
        return True

    def _watch(self, want: SinkTransfer, attempt: SinkAttempt, now: float) -> None:
        """Fail a copy that outlasts its lease, or set the timer to check that."""
        if want.error is not None or attempt.lease is None or not attempt.reading:
            return
        if attempt.lease.over(now):
            error = RemoteError(ErrorCode.DEADLINE, "lease", "a copy under way", "over", "make a new ticket")
            self._fail(want, error, now)
        else:
            self.timers.at(attempt.lease.end, lambda at: self._watch(want, attempt, at))

    def postpone(self, offered: e.Offered) -> None:
        """Undo `may_read`, as the copy could not begin yet."""
        if (part := self._part(offered)) is not None:
            part[1].stop_reading(Proof.PROVEN)

    def read(self, offered: e.Offered, count: int, now: float) -> None:
        """Report a complete copy of an offer, of `count` bytes; after the end of its lease it is of no use."""
        session, part = self._ranks[offered.offer.writer], self._part(offered)
        if part is not None and (lease := part[1].lease) is not None and lease.over(now):
            self._watch(*part, now)
        if part is None or part[0].error is not None or not session.open:
            self.unread(offered, None, now)
            return
        session.part(SinkPull).pulled(part[1], count)
        self._after(now)

    def unread(self, offered: e.Offered, error: KvprotoError | None, now: float, proof: Proof = Proof.PROVEN) -> None:
        """Report a copy of an offer that ended before it was complete; `error` is the reason if it was still wanted."""
        if (part := self._part(offered)) is not None:
            part[1].stop_reading(proof)
            self._fail(part[0], error or LocalError(ErrorCode.ABORTED, "", "", ""), now)
        self._after(now)
