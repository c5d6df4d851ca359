"""Transfers that have arrived at a sink and wait for their checksums, some of which are computed in each turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from itertools import islice

from kvproto.errors import KvprotoError
from kvproto.rank.checksums import BEGUN, SUM_TIME, Sums
from kvproto.rank.events import Received, TransferLost
from kvproto.session.events import Arrived
from kvproto.sink.registered_pool import RegisteredPool, begins_of
from kvproto.wire.enums import Feature, Outcome
from kvproto.wire.messages import Grants

__all__ = ["Taken", "Verification", "received"]

Taken = list[Sums] | KvprotoError
"""The checksums of what each source rank has sent, or the error that kept them from being computed."""


class Verification:
    """The arrivals of one link, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Arrived, RegisteredPool, Taken]] = deque()

    def add(
        self, event: Arrived, terms: RegisteredPool, grants: Mapping[int, Grants], features: Collection[int]
    ) -> None:
        """Add a transfer of which every byte is here; its checksums are due if the features include VERIFY."""
        taken: Taken = []
        try:
            taken = [terms.sums(done, grants) for done in event.done if Feature.VERIFY in features]
        except KvprotoError as error:
            taken = error.kept()
        self._waiting.append((event, terms, taken))

    def take(self) -> list[tuple[Arrived, Taken]]:
        """Go on for `SUM_TIME`; return the transfers whose checksums are all computed now."""
        found, until = [], time.monotonic() + SUM_TIME
        for _, _, taken in islice(self._waiting, BEGUN):
            for sums in () if isinstance(taken, KvprotoError) else taken:
                sums.advance(0.0)
        while self._waiting:
            event, _, taken = self._waiting[0]
            if not isinstance(taken, KvprotoError) and not all(sums.advance(until) for sums in taken):
                break
            self._waiting.popleft()
            found.append((event, taken))
        return found

    @property
    def busy(self) -> bool:
        """Whether checksums are still due."""
        return bool(self._waiting)

    def reads(self, terms: RegisteredPool) -> bool:
        """Whether checksums are still due in the pool of these terms."""
        return any(each is terms for _, each, _ in self._waiting)


def received(number: int, event: Arrived, taken: Taken, terms: RegisteredPool) -> Received | TransferLost:
    """The event for a transfer whose checksums are computed, with the link's number of it."""
    handoff: dict[tuple[int, str], bytes] = {}
    sums: dict[tuple[int, int], int] = {}
    since: dict[int, int] = {}
    try:
        if isinstance(taken, KvprotoError):
            raise taken.again()
        for n, done in enumerate(event.done):
            since |= {group: max(first, since.get(group, 0)) for group, first in begins_of(done).items()}
            handoff |= terms.expected.handoff(done)
            if taken:
                sums |= terms.verify(done, taken[n])
    except KvprotoError as error:  # every writer has said Done, so nothing can arrive any more
        return TransferLost(number, error.kept(), True)
    finished = all(d.outcome == Outcome.FINISHED for d in event.done)
    return Received(
        number, Outcome.FINISHED if finished else Outcome.CONTINUE, handoff, sums,
        {d.writer: d.bytes for d in event.done}, event.seconds, since,
    )  # fmt: skip
