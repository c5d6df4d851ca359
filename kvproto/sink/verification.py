"""Transfers that have arrived at a sink and wait for their checksums, some of which are computed in each turn."""

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import attrs

from kvproto.errors import KvprotoError
from kvproto.events import Arrived, Lost
from kvproto.rank.checksums import BEGUN, SUM_TIME, PageSumming, Sums
from kvproto.rank.machine import machine
from kvproto.sink.fetch import Fetch
from kvproto.sink.registered_pool import RegisteredPool, begins_stated
from kvproto.wire.enums import Outcome
from kvproto.wire.messages import Done

if TYPE_CHECKING:
    from kvproto.sink.link import SourceLink


@attrs.define(eq=False)
class Arrival:
    """A fetch whose bytes are all here."""

    link: "SourceLink"
    fetch: Fetch
    registered: RegisteredPool
    done: tuple[Done, ...]
    """The Done of each source rank, by ascending rank."""
    seconds: float
    """Seconds from the Transfer to the last Done."""
    sums: list[Sums] = attrs.Factory(list)
    """The checksums of what each source rank has sent; empty without VERIFY."""
    error: KvprotoError | None = None
    """The error that kept them from being computed, or the first difference."""
    _compared: int = 0
    """The number of source ranks whose checksums were compared."""
    _pages: PageSumming | None = None
    """The checksums of single pages of the group that differs."""

    def advance(self, until: float) -> bool:
        """Go on with the checksums until `until`; whether all are computed and compared."""
        for sums in self.sums if self.error is None else ():
            if not sums.advance(until):
                return False
        while self.error is None and self._compared < len(self.sums):
            done, sums = self.done[self._compared], self.sums[self._compared]
            group = self.registered.difference(done, sums)
            if group is None:
                self._compared += 1
                continue
            if self._pages is None:
                self._pages = self.registered.pages(done, sums, group)
            if self._pages is not None and not self._pages.advance(until):
                return False
            pages = self._pages.by_group if self._pages is not None else None
            self.error = self.registered.failure(done, sums, group, pages[group] if pages else None)
        return True

    def outcome(self) -> Arrived | Lost:
        """End the fetch: with Arrived, or with the error of the first checksum that differs."""
        names = {group.id: group.name for group in self.fetch.pool.layout.geometry.groups}
        handoff: dict[str, dict[str, bytes]] = {}
        checksums: dict[tuple[int, str], int] = {}
        since: dict[str, int] = {}
        written: dict[int, int] = {}
        finished = True
        try:
            if self.error is not None:
                raise self.error.again()
            for n, done in enumerate(self.done):
                written[done.writer], finished = done.bytes, finished and done.outcome == Outcome.FINISHED
                for group, first in begins_stated(done).items():
                    since[names[group]] = max(first, since.get(names[group], 0))
                for (group, part), data in self.registered.programs.handoff(done).items() if done.handoff else ():
                    handoff.setdefault(names[group], {})[part] = data
                for group, value in self.sums[n].by_group.items() if self.sums else ():
                    checksums[done.writer, names[group]] = value
        except KvprotoError as error:  # every writer has said Done, so nothing can arrive any more
            return self.fetch.lose(error.kept(), True)
        return self.fetch.arrive(Arrived(self.fetch, finished, handoff, checksums, written, self.seconds, since))


class Verification:
    """The arrivals of one sink rank, in order."""

    def __init__(self) -> None:
        self.waiting: deque[Arrival] = deque()
        """Arrivals whose checksums are still due."""

    def add(self, arrival: Arrival, verify: bool) -> None:
        """Add an arrival, whose checksums are due with `verify`; a GPU takes them while the source is answered."""
        try:
            if verify:
                arrival.sums = [arrival.registered.sums(done, arrival.fetch.grants) for done in arrival.done]
                for sums in arrival.sums if len(self.waiting) < BEGUN else ():
                    sums.advance(0.0)
        except KvprotoError as error:
            arrival.error = error.kept()
        self.waiting.append(arrival)

    def advance(self) -> None:
        """Go on for `SUM_TIME`; end the fetches whose checksums are all computed now."""
        for arrival in islice(self.waiting, BEGUN if len(self.waiting) > 1 else 0):
            for sums in arrival.sums:
                sums.advance(0.0)
        until = machine.monotonic() + SUM_TIME  # after the others were begun, so that each turn gets on with the first
        while self.waiting and self.waiting[0].advance(until):
            arrival = self.waiting.popleft()
            arrival.link.verified(arrival)

    def stop(self, fetch: Fetch, error: KvprotoError) -> bool:
        """End a fetch with this error in place of its checksums; False if it does not wait for them."""
        arrival = next((arrival for arrival in self.waiting if arrival.fetch is fetch), None)
        if arrival is not None:
            arrival.error = arrival.error or error
        return arrival is not None

    def reads(self, registered: RegisteredPool) -> bool:
        """Whether checksums are still due in this pool."""
        return any(arrival.registered is registered for arrival in self.waiting)
