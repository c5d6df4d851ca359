"""What is copied next, and when: decisions alone, over what engines and sinks have said. Nothing here starts a copy."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from kvproto.copying.program import OP, CopyProgram
from kvproto.errors import KvprotoError
from kvproto.node.answers import Checksums
from kvproto.node.progress import Available, Part, SendProgress
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
    lowered: tuple[dict[int, int], dict[int, int], bool] | None = None
    """`Request.reach` of the program; None: it has to be made anew."""
    there: Mapping[Layer, Available] = {}
    """What is both computed and granted, of the parts that were last decided on."""
    useful: int = 0
    """Up to which token the sink should grant items (feature SPANS)."""
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
    sums: Checksums | None = None
    """Set when no copy is under way any more."""
    failure: KvprotoError | None = None
    proof: Proof = Proof.PROVEN
    """Whether writes of its copies can still arrive."""

    def take(self, asked: TransferRequested) -> bool:
        """Whether the sink has granted more by now, so that there is something to decide."""
        if self.asked.transfer.grants is asked.transfer.grants:
            return False
        self.asked, self.news, self.lowered = asked, 0, None
        return True

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
        if request.finished is not None and attempt.asked.whole:
            return self._last(attempt, request)
        if not attempt.asked.whole and not self._may_grow(attempt, request):
            return []
        late = attempt.peer.packed and any(g.late for g in attempt.asked.transfer.grants)  # its first Chunk says more
        if attempt.news == request.news or attempt.peer.reads or late:
            return []
        computed = self._computed(attempt, request)
        if not (attempt.peer.packed or self._worth(attempt, computed)):
            attempt.news = request.news
            return []
        self._want(attempt, request)
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
        end = attempt.asked.end
        attempt.there = computed
        if end is not None:
            attempt.there = {at: attrs.evolve(t, tokens=min(t.tokens, end)) for at, t in computed.items()}
        parts = attempt.progress.next(program, attempt.there)
        short = end is not None and (end <= attempt.useful or request.finished is not None)  # the sink lacks memory
        return parts if short or sum(p.bytes for p in parts) >= self._part_bytes else []

    def _may_grow(self, attempt: Attempt, request: Request) -> bool:
        """Whether some rows may go before everything is granted: a packed stream has to begin as a whole. Sets
        `failure` where nobody should grant anything.
        """
        if request.finished is not None:
            try:
                check_ends(attempt.peer.pair, attempt.asked.transfer.grants, request.finished.tokens, request.axes)
            except KvprotoError as error:
                attempt.failure = error.kept()
        return not attempt.peer.packed and attempt.failure is None

    def _computed(self, attempt: Attempt, request: Request) -> Mapping[Layer, Available]:
        """What is computed of each layer."""
        finished = request.finished
        if finished is None:
            return request.available
        return dict.fromkeys(attempt.progress.layers, Available(finished.tokens, finished.events))

    def _want(self, attempt: Attempt, request: Request) -> None:
        """Note up to where items are of use, once they are worth a copy; when prefill is over, all are and it is said
        elsewhere.
        """
        end, asked = attempt.asked.end, attempt.asked.transfer.grants
        if end is None or attempt.asked.whole or request.finished is not None:
            return
        most = max((last for _, last in asked_tokens(attempt.peer.pair, asked).values()), default=0)
        tokens = min(max(request.tokens.values(), default=0), most)
        if tokens == most or (tokens - end) * attempt.peer.pair.token_bytes >= self._part_bytes:
            attempt.useful = max(attempt.useful, tokens)

    def stream_rows(self, attempt: Attempt, request: Request) -> StreamRows | None:
        """What a stream under way should be told; None: nothing new. Sets `failure` as `parts` does."""
        finished = request.finished
        if finished is not None:
            try:
                check_ends(attempt.peer.pair, attempt.asked.transfer.grants, finished.tokens, request.axes)
            except KvprotoError as error:
                attempt.failure = error.kept()
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
            attempt.failure = error.kept()
            return []
        if attempt.peer.reads:
            return [Part(NOTHING, None, finished.events, 0)]
        if attempt.progress.begun:
            return attempt.progress.last(program, finished.events)
        return [Part(program, None, finished.events, program.bytes)]

    def _lower(self, attempt: Attempt, request: Request) -> CopyProgram:
        return request.program(attempt.peer.pair, attempt.asked.transfer.grants, whole=attempt.peer.packed)

    def _worth(self, attempt: Attempt, computed: Mapping[Layer, Available]) -> bool:
        """Whether a part should go while prefill runs, or before everything is granted."""
        capabilities = attempt.peer.transport.capabilities
        if not capabilities.incremental:
            return False
        ratio = capabilities.first_part_ratio if self._first_part_ratio is None else self._first_part_ratio
        return attempt.progress.due(computed, asked_tokens(attempt.peer.pair, attempt.asked.transfer.grants), ratio)
