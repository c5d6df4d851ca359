"""What has arrived at a sink, until its checksums are taken: some of them in each turn, in the order of arrival."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from itertools import islice

from kvproto.errors import KvprotoError
from kvproto.node.answers import BEGUN, LOOK, Sums
from kvproto.node.terms import Terms, begins_of
from kvproto.node.told import Received, TransferLost
from kvproto.session.events import Arrived
from kvproto.wire.enums import Feature, Outcome
from kvproto.wire.messages import Grants

__all__ = ["Arrivals", "Taken", "received"]

Taken = list[Sums] | KvprotoError
"""The checksums of what each source rank has sent; or why there are none."""


class Arrivals:
    """Those of one link."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Arrived, Terms, Taken]] = deque()

    def add(self, event: Arrived, terms: Terms, grants: Mapping[int, Grants], features: Collection[int]) -> None:
        """Every byte is here; there are checksums to take where the features have VERIFY."""
        taken: Taken = []
        try:
            taken = [terms.sums(done, grants) for done in event.done if Feature.VERIFY in features]
        except KvprotoError as error:
            taken = error.kept()
        self._waiting.append((event, terms, taken))

    def take(self) -> list[tuple[Arrived, Taken]]:
        """Go on for a while; those whose checksums are all taken now."""
        found, until = [], time.monotonic() + LOOK
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
        """Whether checksums are still to be taken."""
        return bool(self._waiting)

    def reads(self, terms: Terms) -> bool:
        """Whether they are taken in this pool."""
        return any(each is terms for _, each, _ in self._waiting)


def received(number: int, event: Arrived, taken: Taken, terms: Terms) -> Received | TransferLost:
    """What is told of a transfer whose checksums are taken, under the link's number."""
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
    except KvprotoError as error:  # every writer is Done: nothing can arrive any more
        return TransferLost(number, error.kept(), True)
    finished = all(d.outcome == Outcome.FINISHED for d in event.done)
    return Received(
        number, Outcome.FINISHED if finished else Outcome.CONTINUE, handoff, sums,
        {d.writer: d.bytes for d in event.done}, event.seconds, since,
    )  # fmt: skip
