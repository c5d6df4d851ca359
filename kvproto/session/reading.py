"""What a sink endpoint reads itself (feature PULL): offers of its source ranks, under their leases."""

from __future__ import annotations

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.session import events as e
from kvproto.session.exposing import Exposing
from kvproto.session.pull import SinkPull
from kvproto.session.records import SinkAttempt, Want
from kvproto.wire.enums import ErrorCode, Proof

__all__ = ["Reading"]


class Reading(Exposing):
    """What a sink endpoint knows of what it is offered."""

    def _fail(self, want: Want | None, error: KvprotoError, now: float) -> None:
        """Abort the parts that are not here, but for those that are being read."""
        raise NotImplementedError

    def _part(self, offered: e.Offered) -> tuple[Want, SinkAttempt] | None:
        """The part of a transfer that an offer is about; None: the transfer is over."""
        want = self._wants.get(offered.transfer)
        return (want, want.parts[offered.offer.writer]) if want is not None else None

    def wanted(self, offered: e.Offered) -> bool:
        """Whether an offer is still of use; if not, a copy of it should stop."""
        part = self._part(offered)
        return part is not None and part[0].error is None and part[1].lease is not None

    def may_read(self, offered: e.Offered, now: float) -> bool:
        """Whether a copy of an offer begins now: if so, `read` or `unread` must follow (KVP-PUL-READ)."""
        part = self._part(offered)
        lease = part[1].lease if part is not None and part[0].error is None else None
        if part is None or lease is None or not lease.fresh(now):
            return False
        lease.reading = True
        self._watch(*part, now)
        return True

    def _watch(self, want: Want, attempt: SinkAttempt, now: float) -> None:
        """Fail a copy that outlives its lease."""
        if want.error is not None or attempt.lease is None or not attempt.reading:
            return
        if attempt.lease.over(now):
            error = RemoteError(ErrorCode.DEADLINE, "lease", "a copy under way", "over", "make a new ticket")
            self._fail(want, error, now)
        else:
            self.timers.at(attempt.lease.end, lambda at: self._watch(want, attempt, at))

    def postpone(self, offered: e.Offered) -> None:
        """The copy could not begin yet."""
        if (part := self._part(offered)) is not None:
            part[1].stop_reading(Proof.PROVEN)

    def read(self, offered: e.Offered, count: int, now: float) -> None:
        """The copy of an offer is complete: `count` bytes; without a lease they are of no use."""
        session, part = self._ranks[offered.offer.writer], self._part(offered)
        if part is not None and (lease := part[1].lease) is not None and lease.over(now):
            self._watch(*part, now)
        if part is None or part[0].error is not None or not session.open:
            self.unread(offered, None, now)
            return
        session.part(SinkPull).pulled(part[1], count)
        self._after(now)

    def unread(self, offered: e.Offered, error: KvprotoError | None, now: float, proof: Proof = Proof.PROVEN) -> None:
        """Nothing reads an offer any more, and not all of it was; `error`: why, where it is still wanted."""
        if (part := self._part(offered)) is not None:
            part[1].stop_reading(proof)
            self._fail(part[0], error or LocalError(ErrorCode.ABORTED, "", "", ""), now)
        self._after(now)
