"""What is copied next, and when: decisions alone, over what engines and sinks have said. Nothing here starts a copy."""

from __future__ import annotations

import attrs
import numpy as np

from kvproto.copying.program import OP, CopyProgram
from kvproto.errors import KvprotoError
from kvproto.node.progress import Part, SendProgress
from kvproto.node.registrar import PeerMapping
from kvproto.node.request import Request, asked_tokens, check_ends
from kvproto.session.events import TransferRequested
from kvproto.transport.base import Layer, Stream
from kvproto.wire.enums import Proof
from kvproto.wire.messages import Begin, HandOff

__all__ = ["NOTHING", "Attempt", "LastPart", "Scheduler", "StreamRows"]

NOTHING = CopyProgram((), np.empty(0, OP), (), ())
"""A copy of it waits for the rows and moves none."""


@attrs.frozen
class LastPart:
    """What will be said of a transfer once its last bytes are there."""

    began: float
    left: int
    """Bytes that were not copied when prefill was over."""
    handoff: tuple[HandOff, ...]


@attrs.define(eq=False)
class Attempt:
    """One attempt of a transfer at the source, from its first part to its answer."""

    asked: TransferRequested
    peer: PeerMapping
    progress: SendProgress
    program: CopyProgram | None = None
    """Of the rows that were there when it was made."""
    lowered: tuple[dict[int, int], dict[int, int]] | None = None
    """`Request.reach` of the program."""
    begins: tuple[Begin, ...] = ()
    """Where its late windows begin, once the last part was handed over."""
    news: int = 0
    """Of the request, when it was looked at last."""
    stream: Stream | None = None
    """A packed copy that has begun before all rows were there."""
    ready: frozenset[Layer] = frozenset()
    """Layers that the stream was told of."""
    copies: int = 0
    """Under way."""
    last: LastPart | None = None
    """Set when the last part was handed over."""
    failure: KvprotoError | None = None
    proof: Proof = Proof.PROVEN
    """Whether writes of its copies can still arrive."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Session, sequence and attempt."""
        return self.asked.session, self.asked.transfer.sequence, self.asked.transfer.attempt


@attrs.frozen
class StreamRows:
    """Rows that a stream under way may take now."""

    layers: frozenset[Layer] | None
    """All layers whose rows are there; None: all of them."""
    after: tuple[int, ...]
    """Device events after which the new ones are there."""


class Scheduler:
    """Decides which rows of an attempt go now."""

    def __init__(self, part_bytes: int, first_part_ratio: float | None) -> None:
        """A part that goes while prefill runs has `part_bytes` bytes at least; `first_part_ratio` None: as suits the
        link.
        """
        self._part_bytes, self._first_part_ratio = part_bytes, first_part_ratio

    def parts(self, attempt: Attempt, request: Request) -> list[Part]:
        """The parts to hand over now; sets `failure` where the request cannot give what was asked for."""
        if attempt.stream is not None:
            return []
        if request.finished is not None:
            return self._last(attempt, request)
        late = attempt.peer.packed and any(g.late for g in attempt.asked.transfer.grants)  # its first Chunk says more
        if attempt.news == request.news or attempt.peer.reads or late:
            return []
        if not (attempt.peer.packed or self._worth(attempt, request)):
            attempt.news = request.news
            return []
        if attempt.program is None or attempt.lowered != request.reach:
            try:
                attempt.program = self._lower(attempt, request)
            except KvprotoError:  # it may be that of an item or token which is not there yet
                attempt.news, attempt.lowered = request.news, None
                return []
        attempt.news, attempt.lowered = request.news, request.reach
        program = attempt.program
        if attempt.peer.packed:
            return [Part(program, None, (), program.bytes, grows=True)]
        parts = attempt.progress.next(program, request.available)
        return parts if sum(p.bytes for p in parts) >= self._part_bytes else []

    def stream_rows(self, attempt: Attempt, request: Request) -> StreamRows | None:
        """What a stream under way should be told; None: nothing new. Sets `failure` as `parts` does."""
        finished = request.finished
        if finished is not None:
            try:
                check_ends(attempt.peer.pair, attempt.asked.transfer.grants, finished.tokens, request.axes)
            except KvprotoError as error:
                attempt.failure = error
                return None
            return StreamRows(None, finished.events)
        if attempt.news == request.news:
            return None
        attempt.news = request.news
        complete = request.complete(attempt.peer.pair, attempt.asked.transfer.grants)
        new = complete.keys() - attempt.ready
        attempt.ready |= new
        return StreamRows(attempt.ready, tuple(sorted({event for layer in new for event in complete[layer]})))

    def _last(self, attempt: Attempt, request: Request) -> list[Part]:
        """All that is left."""
        finished = request.finished
        assert finished is not None
        try:
            program = attempt.program = self._lower(attempt, request)
            attempt.begins = request.begins(attempt.peer.pair, attempt.asked.transfer.grants)
        except KvprotoError as error:
            attempt.failure = error
            return []
        if attempt.peer.reads:
            return [Part(NOTHING, None, finished.events, 0)]
        if attempt.progress.begun:
            return attempt.progress.last(program, finished.events)
        return [Part(program, None, finished.events, program.bytes)]

    def _lower(self, attempt: Attempt, request: Request) -> CopyProgram:
        return request.program(attempt.peer.pair, attempt.asked.transfer.grants, whole=attempt.peer.packed)

    def _worth(self, attempt: Attempt, request: Request) -> bool:
        """Whether a part should go while prefill runs."""
        capabilities = attempt.peer.transport.capabilities
        if not capabilities.incremental:
            return False
        ratio = capabilities.first_part_ratio if self._first_part_ratio is None else self._first_part_ratio
        return attempt.progress.due(
            request.available, asked_tokens(attempt.peer.pair, attempt.asked.transfer.grants), ratio
        )
