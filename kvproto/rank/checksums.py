"""Checksums of transfers at both sides, and session ids."""

from collections.abc import Callable, Collection, Generator, Iterable

from kvproto.copying.execute import PageSums, page_sums
from kvproto.copying.program import CopyProgram
from kvproto.rank.machine import machine
from kvproto.rank.registration import PeerMapping
from kvproto.transport.base import Regions, Transport
from kvproto.wire.enums import Feature
from kvproto.wire.messages import Checksum, Group

BEGUN = 8
"""The number of requests whose checksums are started before the first is awaited."""
SUM_TIME = 0.01
"""Seconds that one turn spends on checksums."""


def session_id() -> int:
    """Make a session id that cannot be guessed: 64 random bits, but not 0 (KVP-SES-GUESS)."""
    return machine.randbelow((1 << 64) - 1) + 1


class Sums:
    """Checksums by group of a program, computed part by part: a long prompt takes seconds, but a turn must not."""

    def __init__(self, program: CopyProgram, transport: Transport, memories: Regions, sink: bool) -> None:
        """`memories` are the sink's if `sink`, otherwise the source's."""
        self.program, self._parts = program, program.slices(transport.capabilities.summed_at_once)
        self._part = next(self._parts, None)
        self._transport, self._memories, self._sink = transport, memories, sink
        self.by_group: dict[int, int] = {}
        self._begun: Callable[[], dict[int, int]] | None = None
        """The checksums of the current part, once it has been started."""

    def advance(self, until: float) -> bool:
        """Compute parts until a time of `machine.monotonic`, the last begun alone; returns whether all are computed."""
        while self._part is not None:
            if self._begun is None:
                self._begun = self._transport.begin_checksums(self._part, self._memories, self._sink)
            if machine.monotonic() >= until:
                return False
            for group, value in self._begun().items():
                self.by_group[group] = self.by_group.get(group, 0) + value & (1 << 64) - 1
            self._begun, self._part = None, next(self._parts, None)
        return True

    def of_pages(self, groups: Iterable[Group], program: CopyProgram | None = None) -> "PageSumming":
        """The checksums of single layers and pages of these groups, of all of the program or of a part of it."""
        return PageSumming(page_sums(program or self.program, {group.id: group for group in groups}, self._of))

    def _of(self, part: CopyProgram) -> dict[int, int]:
        return self._transport.begin_checksums(part, self._memories, self._sink)()


class PageSumming:
    """Checksums of single layers and pages, computed one by one."""

    def __init__(self, steps: Generator[None, None, dict[int, PageSums]]) -> None:
        self._steps = steps
        self.by_group: dict[int, PageSums] | None = None
        """The sums by group id, once all are computed."""

    def advance(self, until: float) -> bool:
        """Compute sums until `until`, a time of `machine.monotonic`; returns whether all are computed."""
        while self.by_group is None and machine.monotonic() < until:
            try:
                next(self._steps)
            except StopIteration as done:
                self.by_group = done.value
        return self.by_group is not None


class Checksums:
    """The checksums of a Done or an Offer, if the features include any (KVP-VERIFY-SOURCE, KVP-VERIFY-PAGES)."""

    def __init__(self, peer: PeerMapping, program: CopyProgram, memories: Regions, features: Collection[int]) -> None:
        self._peer, self._features = peer, features
        self._sums = Sums(program, peer.transport, memories, sink=False) if Feature.VERIFY in features else None
        self._pages: PageSumming | None = None
        if self._sums is not None and Feature.VERIFY_PAGES in features:
            self._pages = self._sums.of_pages(peer.pair.sink.geometry.groups)

    def advance(self, until: float) -> bool:
        """Compute parts until `until`, as `Sums.advance` does."""
        if self._sums is not None and not self._sums.advance(until):
            return False
        return self._pages is None or self._pages.advance(until)

    def for_message(self) -> tuple[Checksum, ...] | None:
        """The message's field, once all checksums are computed; None without VERIFY."""
        if self._sums is None:
            return None
        pages = (self._pages.by_group if self._pages is not None else None) or {}
        sums = sorted(self._sums.by_group.items())
        return tuple([Checksum(group=g, value=sum, pages=pages[g].values if g in pages else None) for g, sum in sums])
