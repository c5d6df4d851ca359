"""Decode's connections to the prefill replicas: which of them answer, and when lost ones are dialled again."""

import time
from collections.abc import Mapping

import attrs

from kvproto import Seed, Sink

from ..engine.lockstep import Said

PASSING = {"BUSY", "DRAINING", "PEER_LOST", "SUPERSEDED"}
"""Codes of refusals that do not mean that the two engines are incompatible."""
_FIRST, _LONGEST = 0.5, 8.0
"""Seconds before a lost source is dialled again: the first wait, and the most that doubling it leads to."""


@attrs.define(eq=False)
class _Line:
    """The connection of one decode rank to one prefill replica."""

    answers: bool = False
    again: float | None = None
    """The time of the next dial, by time.monotonic; None: nothing is planned."""
    pause: float = _FIRST


class Lines:
    """The connections of the decode ranks in one process to all prefill replicas."""

    def __init__(self, sinks: Mapping[int, Sink], sources: Mapping[tuple[str, int], Seed]) -> None:
        self._sinks, self._sources = sinks, sources
        self._lines = {(rank, source): _Line() for rank in sinks for source in sources}
        self._told: dict[int, list[int]] = {}
        self.known = False
        """Whether a source has ever answered: a later refusal then does not mean that the engines are incompatible."""

    def turn(self) -> Said:
        """Dial what is due; returns a word for each rank whose answering replicas have changed."""
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
        """The time of the next dial, by time.monotonic; None: nothing is planned."""
        return min((line.again for line in self._lines.values() if line.again is not None), default=None)

    def _dial(self, rank: int, source: tuple[str, int]) -> None:
        seed = self._sources[source]
        self._sinks[rank].connect(*source, address=seed.address, key=seed.key)
