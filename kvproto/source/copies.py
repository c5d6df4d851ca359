"""Copies under way at a source: started for the sends that they serve, advanced, and stopped when not wanted."""

from collections.abc import Callable, Mapping, Sequence

import attrs

from kvproto.copying.streams import Piece
from kvproto.errors import KvprotoError
from kvproto.rank.handles import LentPool
from kvproto.rank.machine import machine
from kvproto.source.progress import CopyStep
from kvproto.source.schedule import Send
from kvproto.transport.base import Copying, Memory, Move
from kvproto.wire.enums import ErrorCode, Proof

_RETRY = 1e-3
"""Seconds before a copy that could not be started is tried again."""
_TURN = 0.02
"""Seconds after which `advance` leaves the other copies to the next call (KVP-INL-TURN)."""


@attrs.define(eq=False)
class _CopyUnderWay:
    """A copy, and the sends that it serves."""

    sends: list[Send]
    copying: Copying
    stopping: KvprotoError | None = None
    """The reason why it is being stopped."""


class Copies:
    """Starts copies from this rank's memory, and reports the sends whose copies have ended."""

    def __init__(self, memories: Mapping[int, Memory], packed: Callable[[Send, Piece], None]) -> None:
        """`packed` receives the pieces of streams."""
        self.memories, self._packed = memories, packed
        self.under_way: list[_CopyUnderWay] = []
        """Copies that have not ended."""
        self._refused = False
        """Whether a copy could not be started and has to be tried again."""
        self._behind = False
        """Whether the last `advance` left copies to the next."""

    def poll_interval(self) -> float | None:
        """Seconds until `advance` should be called, for copies whose progress no descriptor announces."""
        if not (self.under_way or self._refused):
            return None
        transports = {send.peer.transport for copy in self.under_way for send in copy.sends}
        intervals = [transport.capabilities.poll_interval for transport in transports]
        intervals += [_RETRY] * self._refused + [0.0] * self._behind
        return min((seconds for seconds in intervals if seconds is not None), default=None)

    def start(self, batch: Sequence[tuple[Send, Sequence[CopyStep]]]) -> Copying | None:
        """Start one copy for a batch; None if it cannot start now (BUSY) or has failed, which sets `failure`."""
        moves = []
        for send, steps in batch:
            background, mapped = send.prefill.finished is None, send.peer.connection.mapped
            moves += [
                Move(step.program, self.memories, mapped, step.after, step.layers, step.grows, background)
                for step in steps
            ]
        try:
            copying = batch[0][0].peer.transport.start(moves)
        except KvprotoError as error:
            self._refused = error.code == ErrorCode.BUSY
            for send, _ in batch:
                send.failure = None if self._refused else error.kept()
                send.seen = 0
            return None
        self._refused = False
        sends = [send for send, _ in batch]
        for send in sends:
            send.copies += 1
            send.attempt.copying = True
        self.under_way.append(_CopyUnderWay(sends, copying))
        return copying

    def stop(self, send: Send, error: KvprotoError) -> None:
        """Stop the copies that serve a send."""
        for copy in self.under_way:
            if send in copy.sends:
                copy.stopping = copy.stopping or error

    def close(self) -> None:
        """Stop all copies, and forget those that have ended by that."""
        self.under_way = [copy for copy in self.under_way if copy.copying.stop() is None]

    def advance(self) -> list[Send]:
        """Note which copies are complete and stop those that nobody wants; return the sends of copies that ended."""
        ended, until, copies = [], machine.monotonic() + _TURN, self.under_way
        self._behind = False
        for n, copy in enumerate(copies):
            if n and machine.monotonic() > until:
                self.under_way, self._behind = [*copies[n:], *copies[:n]], True
                break
            proof = Proof.PROVEN if copy.stopping is None and self._complete(copy) else None
            if copy.stopping is not None:
                proof = copy.copying.stop()
            if proof is not None:
                ended.append(copy)
                for send in copy.sends:
                    send.copies -= 1
                    send.failure = send.failure or copy.stopping
                    send.proof = send.proof if proof == Proof.PROVEN else proof
        for copy in ended:
            self.under_way.remove(copy)
        return [send for copy in ended for send in copy.sends]

    def _complete(self, copy: _CopyUnderWay) -> bool:
        """Whether every byte is at its destination; sets `stopping` if that is not wanted any more, or failed."""
        for send in copy.sends:
            if (reason := send.unwanted()) is None:
                break
        else:
            copy.stopping = reason
            return False
        done = False
        try:
            done = copy.copying.done
        except KvprotoError as error:
            copy.stopping = error.kept()
        if copy.copying.stream is not None:
            for piece in copy.copying.stream.take():
                self._packed(copy.sends[0], piece)
        return done


@attrs.define(eq=False)
class LentSourcePool(LentPool):
    """A pool of a source, which its own copies read, or sinks do."""

    sends: tuple[Send, ...] = ()
    """Sends with copies that were under way when it was taken back and have not ended since."""

    @property
    def copied(self) -> bool:
        """Whether a copy from it is under way."""
        self.sends = tuple(send for send in self.sends if send.copies)
        return bool(self.sends)
