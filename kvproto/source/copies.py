"""Copies under way at a source: started for the attempts that they serve, advanced, and stopped when not wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from kvproto.errors import KvprotoError
from kvproto.rank.lent import Lent
from kvproto.source.progress import Part
from kvproto.source.schedule import Attempt
from kvproto.transport.base import Copying, Memory, Move, Piece
from kvproto.wire.enums import ErrorCode, Proof

__all__ = ["Dispatcher", "Read"]

_RETRY = 1e-3
"""Seconds before a copy that could not be started is tried again."""
_TURN = 0.02
"""Seconds after which `advance` leaves the other copies to the next call (KVP-INL-TURN)."""


@attrs.define(eq=False)
class _Launch:
    """A copy, and the attempts that it serves."""

    attempts: list[Attempt]
    copying: Copying
    stopping: KvprotoError | None = None
    """The reason why it is being stopped."""


class Dispatcher:
    """Starts copies from this rank's memory, and reports the attempts whose copies have ended."""

    def __init__(
        self, memories: Mapping[int, Memory], unwanted: Callable[[Attempt], KvprotoError | None],
        arrived: Callable[[Attempt, Piece], None],
    ) -> None:  # fmt: skip
        """`unwanted` returns why an attempt is not wanted any more, or None; `arrived` receives pieces of streams."""
        self.memories, self._unwanted, self._arrived = memories, unwanted, arrived
        self._launches: list[_Launch] = []
        self._refused = False
        """Whether a copy could not be started and has to be tried again."""
        self._behind = False
        """Whether the last `advance` left copies to the next."""

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._launches)

    @property
    def poll_interval(self) -> float | None:
        """Seconds until `advance` should be called, for copies whose progress no descriptor announces."""
        found = [a.peer.transport.capabilities.poll_interval for each in self._launches for a in each.attempts]
        found += [_RETRY] * self._refused + [0.0] * self._behind
        return min((seconds for seconds in found if seconds is not None), default=None)

    def reads(self, key: bytes) -> bool:
        """Whether a copy still reads the items of this request."""
        return any(attempt.asked.key == key for each in self._launches for attempt in each.attempts)

    def start(
        self, batch: Sequence[tuple[Attempt, Sequence[Part]]], background: Callable[[Attempt], bool]
    ) -> Copying | None:
        """Start one copy for a batch; None if it cannot start now (BUSY) or has failed, which sets `failure`."""
        moves = [
            Move(p.program, self.memories, a.peer.connection.mapped, p.after, p.layers, p.grows, background(a))
            for a, parts in batch for p in parts
        ]  # fmt: skip
        try:
            copying = batch[0][0].peer.transport.start(moves)
        except KvprotoError as error:
            self._refused = error.code == ErrorCode.BUSY
            for attempt, _ in batch:
                attempt.failure = None if self._refused else error.kept()
                attempt.seen = 0
            return None
        self._refused = False
        attempts = [attempt for attempt, _ in batch]
        for attempt in attempts:
            attempt.copies += 1
        self._launches.append(_Launch(attempts, copying))
        return copying

    def stop(self, attempt: Attempt, error: KvprotoError) -> None:
        """Stop the copies that serve an attempt."""
        for each in self._launches:
            if attempt in each.attempts:
                each.stopping = each.stopping or error

    def close(self) -> None:
        """Stop all copies, and forget those that have ended by that."""
        self._launches = [each for each in self._launches if each.copying.stop() is None]

    def advance(self) -> list[Attempt]:
        """Note which copies are complete and stop those that nobody wants; return the attempts of copies that ended."""
        over, until, launches = [], time.monotonic() + _TURN, self._launches
        self._behind = False
        for n, each in enumerate(launches):
            if n and time.monotonic() > until:
                self._launches, self._behind = [*launches[n:], *launches[:n]], True
                break
            proof = Proof.PROVEN if each.stopping is None and self._complete(each) else None
            if each.stopping is not None:
                proof = each.copying.stop()
            if proof is not None:
                over.append(each)
                for attempt in each.attempts:
                    attempt.copies -= 1
                    attempt.failure = attempt.failure or each.stopping
                    attempt.proof = attempt.proof if proof == Proof.PROVEN else proof
        for each in over:
            self._launches.remove(each)
        return [attempt for each in over for attempt in each.attempts]

    def _complete(self, launch: _Launch) -> bool:
        """Whether every byte is at its destination; sets `stopping` if that is not wanted any more, or failed."""
        reasons = [self._unwanted(attempt) for attempt in launch.attempts]
        if all(reason is not None for reason in reasons):
            launch.stopping = reasons[0]
            return False
        done = False
        try:
            done = launch.copying.done
        except KvprotoError as error:
            launch.stopping = error.kept()
        if launch.copying.stream is not None:
            for piece in launch.copying.stream.take():
                self._arrived(launch.attempts[0], piece)
        return done


@attrs.define(eq=False)
class Read(Lent):
    """A pool of a source, which its own copies read, or sinks do."""

    attempts: tuple[Attempt, ...] = ()
    """Attempts with copies that were under way when it was taken back and have not ended since."""

    @property
    def copied(self) -> bool:
        """Whether a copy from it is under way."""
        self.attempts = tuple(attempt for attempt in self.attempts if attempt.copies)
        return bool(self.attempts)
