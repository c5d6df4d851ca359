"""Decode's lines to the replicas of prefill: which of them answer, and the dialling of those that went away."""

import time
from collections.abc import Mapping

import attrs

from kvproto import Seed, Sink

from ..engine.lockstep import Said

PASSING = {"BUSY", "DRAINING", "PEER_LOST", "SUPERSEDED"}
"""Codes of refusals that say nothing about whether the two engines fit each other."""
_FIRST, _LONGEST = 0.5, 8.0
"""Seconds until a source that went away is dialled again; twice as many after each time, up to the latter."""


@attrs.define(eq=False)
class _Line:
    """One rank and one replica."""

    answers: bool = False
    again: float | None = None
    """When it is dialled."""
    pause: float = _FIRST


class Lines:
    """Of the ranks of one process to all replicas."""

    def __init__(self, sinks: Mapping[int, Sink], sources: Mapping[tuple[str, int], Seed]) -> None:
        self._sinks, self._sources = sinks, sources
        self._lines = {(rank, source): _Line() for rank in sinks for source in sources}
        self._told: dict[int, list[int]] = {}
        self.known = False
        """Whether a source has ever answered, so that what it refuses now is no misfit."""

    def turn(self) -> Said:
        """Dial what is due; the words for what has changed."""
        now, ready = time.monotonic(), {rank: sink.ready for rank, sink in self._sinks.items()}
        for (rank, source), line in self._lines.items():
            if source in ready[rank]:
                self.known, line.again, line.pause = True, None, _FIRST
            elif line.answers or line.again is None:
                line.again = now + line.pause
            elif now >= line.again:
                self._dial(rank, source)
                line.pause = min(2 * line.pause, _LONGEST)
                line.again = now + line.pause
            line.answers = source in ready[rank]
        found = {rank: sorted(replica for _, replica in some) for rank, some in ready.items()}
        said = [
            {"op": "sources", "rank": r, "replicas": some} for r, some in found.items() if self._told.get(r) != some
        ]
        self._told = found
        return said

    def next_timer(self) -> float | None:
        """When to dial next, by time.monotonic."""
        return min((line.again for line in self._lines.values() if line.again is not None), default=None)

    def _dial(self, rank: int, source: tuple[str, int]) -> None:
        seed = self._sources[source]
        self._sinks[rank].connect(*source, address=seed.address, key=seed.key)
