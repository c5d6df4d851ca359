"""What to copy next, and when, by what engines and sinks have reported; decisions alone, nothing here starts a copy."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from kvproto.copying.program import OP, CopyProgram
from kvproto.errors import KvprotoError
from kvproto.rank.checksums import Checksums
from kvproto.rank.registration import PeerMapping
from kvproto.session.events import TransferRequested
from kvproto.source.prefill import Request, asked_tokens, check_ends
from kvproto.source.progress import Available, Part, SendProgress
from kvproto.transport.base import Layer, Stream
from kvproto.wire.enums import Proof
from kvproto.wire.messages import Begin, HandOff

__all__ = ["NOTHING", "Attempt", "LastPart", "Scheduler", "StreamRows"]

NOTHING = CopyProgram((), np.empty(0, OP), (), ())
"""The empty program: its copy waits for rows but moves none."""


@attrs.frozen
class LastPart:
    """What to report of a transfer once its last bytes are copied."""

    began: float
    """When the last part was handed over, in seconds of `time.monotonic`."""
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
    """The program of the rows that were computed when it was made."""
    lowered: tuple[dict[int, int], dict[int, int], bool] | None = None
    """`Request.reach` of the program; None if it has to be made again."""
    there: Mapping[Layer, Available] = {}
    """The rows that were both computed and granted when the last parts were chosen."""
    useful: int = 0
    """The number of tokens for which the sink should grant items (feature SPANS)."""
    begins: tuple[Begin, ...] = ()
    """Where its late windows begin; known when the last part is handed over."""
    seen: int = 0
    """`Request.version` when the attempt was last considered."""
    stream: Stream | None = None
    """A packed copy that began before all rows were computed."""
    ready: frozenset[Layer] = frozenset()
    """The layers that were marked ready in the stream."""
    copies: int = 0
    """The number of copies under way."""
    last: LastPart | None = None
    """Set when the last part is handed over."""
    sums: Checksums | None = None
    """Set when no copy is under way any more."""
    failure: KvprotoError | None = None
    proof: Proof = Proof.PROVEN
    """Whether it is proven that no write of its copies can still arrive."""

    def take(self, asked: TransferRequested) -> bool:
        """Update the request of the sink; whether it grants more than before, so that there is something to decide."""
        if self.asked.transfer.grants is asked.transfer.grants:
            return False
        self.asked, self.seen, self.lowered = asked, 0, None
        return True

    @property
    def key(self) -> tuple[int, int, int]:
        """The transfer's session, sequence and attempt."""
        return self.asked.session, self.asked.transfer.sequence, self.asked.transfer.attempt


@attrs.frozen
class StreamRows:
    """Layers that a stream under way may send now."""

    layers: frozenset[Layer] | None
    """Every layer whose rows are computed; None: all of them."""
    after: tuple[int, ...]
    """Handles of the device events after which the newly added rows are written."""


class Scheduler:
    """Decides which rows of an attempt to send now."""

    def __init__(self, part_bytes: int, first_part_ratio: float | None) -> None:
        """See `Options.part_bytes` and `Options.first_part_ratio`."""
        self._part_bytes, self._first_part_ratio = part_bytes, first_part_ratio

    def parts(self, attempt: Attempt, request: Request) -> list[Part]:
        """The parts to hand over now; sets the attempt's `failure` if the request does not have what was asked for."""
        if attempt.stream is not None:
            return []
        if request.finished is not None and attempt.asked.whole:
            return self._last(attempt, request)
        if not attempt.asked.whole and not self._may_grow(attempt, request):
            return []
        # the first Chunk of a stream states where late windows begin, which is known when prefill is over
        late = attempt.peer.packed and any(g.late for g in attempt.asked.transfer.grants)
        if attempt.seen == request.version or attempt.peer.reads or late:
            return []
        attempt.seen = request.version
        computed = self._computed(attempt, request)
        if not (attempt.peer.packed or self._worth(attempt, computed)):
            return []
        self._want(attempt, request)
        if attempt.program is None or attempt.lowered != request.reach:
            try:
                attempt.program = self._lower(attempt, request)
            except KvprotoError:  # an item or a token may not be there yet
                attempt.lowered = None
                return []
        attempt.lowered = request.reach
        program = attempt.program
        if attempt.peer.packed:
            return [Part(program, None, (), program.bytes, grows=True)]
        end = attempt.asked.end
        attempt.there = computed
        if end is not None:
            attempt.there = {at: attrs.evolve(t, tokens=min(t.tokens, end)) for at, t in computed.items()}
        parts = attempt.progress.next(program, attempt.there)
        short = end is not None and (end <= attempt.useful or request.finished is not None)  # what is granted ends here
        return parts if short or sum(p.bytes for p in parts) >= self._part_bytes else []

    def _may_grow(self, attempt: Attempt, request: Request) -> bool:
        """Whether rows may be sent before everything is granted; a packed stream has to begin with all grants.

        Sets `failure` if the sink should not grant anything at all.
        """
        if request.finished is not None:
            try:
                check_ends(attempt.peer.pair, attempt.asked.transfer.grants, request.finished.tokens, request.axes)
            except KvprotoError as error:
                attempt.failure = error.kept()
        return not attempt.peer.packed and attempt.failure is None

    def _computed(self, attempt: Attempt, request: Request) -> Mapping[Layer, Available]:
        """The rows that are computed, by layer."""
        finished = request.finished
        if finished is None:
            return request.available
        return dict.fromkeys(attempt.progress.layers, Available(finished.tokens, finished.events))

    def _want(self, attempt: Attempt, request: Request) -> None:
        """Set `useful` once more items are worth a copy; when prefill is over, all are, which is reported elsewhere."""
        end, asked = attempt.asked.end, attempt.asked.transfer.grants
        if end is None or attempt.asked.whole or request.finished is not None:
            return
        most = max((last for _, last in asked_tokens(attempt.peer.pair, asked).values()), default=0)
        tokens = min(max(request.tokens.values(), default=0), most)
        if tokens == most or (tokens - end) * attempt.peer.pair.token_bytes >= self._part_bytes:
            attempt.useful = max(attempt.useful, tokens)

    def stream_rows(self, attempt: Attempt, request: Request) -> StreamRows | None:
        """The layers to mark ready in a stream under way; None if there are no more. Sets `failure` as `parts` does."""
        finished = request.finished
        if finished is not None:
            try:
                check_ends(attempt.peer.pair, attempt.asked.transfer.grants, finished.tokens, request.axes)
            except KvprotoError as error:
                attempt.failure = error.kept()
                return None
            return StreamRows(None, finished.events)
        if attempt.seen == request.version:
            return None
        attempt.seen = request.version
        complete = request.complete(attempt.peer.pair, attempt.asked.transfer.grants)
        new = complete.keys() - attempt.ready
        attempt.ready |= new
        return StreamRows(attempt.ready, tuple(sorted({event for layer in new for event in complete[layer]})))

    def _last(self, attempt: Attempt, request: Request) -> list[Part]:
        """All parts that are left when prefill is over."""
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
        """Whether to send a part while prefill runs, or before everything is granted."""
        capabilities = attempt.peer.transport.capabilities
        if not capabilities.incremental:
            return False
        ratio = capabilities.first_part_ratio if self._first_part_ratio is None else self._first_part_ratio
        return attempt.progress.due(computed, asked_tokens(attempt.peer.pair, attempt.asked.transfer.grants), ratio)
