"""The part of one sink rank in a request, and which of its rows to copy next; nothing here starts a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvproto.copying.program import OP, CopyProgram, Operations
from kvproto.errors import KvprotoError, RemoteError
from kvproto.rank.checksums import Checksums
from kvproto.rank.registration import PeerMapping
from kvproto.session.records import SourceAttempt
from kvproto.session.table import TransferState
from kvproto.source.prefill import Prefill, asked_tokens, check_ends
from kvproto.source.progress import Available, CopyStep, SendProgress
from kvproto.transport.base import Stream
from kvproto.transport.staging.packed import Layer
from kvproto.wire.enums import ErrorCode, Proof
from kvproto.wire.messages import Begin, Grants, HandOff

if TYPE_CHECKING:
    from kvproto.source.page_guard import PageCheck
    from kvproto.source.request import Request

NO_ROWS = CopyProgram((), Operations(np.empty(0, OP)), (), ())
"""The empty program: its copy waits for rows but moves none."""

OVER = RemoteError(ErrorCode.ABORTED, "", "the transfer is over", "")
_LATE = RemoteError(ErrorCode.DEADLINE, "ticket", "not fetched in time", "", "make a new ticket")


@attrs.frozen
class LastPart:
    """Figures and hand-off data to report once the last bytes of a transfer are copied."""

    began: float
    """The time at which the last part was handed over, in seconds of `machine.monotonic`."""
    left: int
    """Bytes that were not copied when prefill was over."""
    handoff: tuple[HandOff, ...]


@attrs.define(eq=False)
class Send:
    """The copies of one attempt of one sink rank, from the first part to the answer."""

    request: Request
    prefill: Prefill
    """The request's rows."""
    attempt: SourceAttempt
    """The attempt as its session knows it, which refers back to this record."""
    peer: PeerMapping
    granted: tuple[Grants, ...] = ()
    """The grants with which the program was made."""
    program: CopyProgram | None = None
    """The program of the rows that were computed when it was made."""
    lowered: tuple[dict[int, int], dict[int, int], bool] | None = None
    """`Prefill.reach` of the program; None if it has to be made again."""
    available: Mapping[Layer, Available] = {}
    """The rows that were both computed and granted when the last parts were chosen."""
    useful: int = 0
    """The number of tokens for which the sink should grant items (feature SPANS)."""
    begins: tuple[Begin, ...] = ()
    """Beginnings of its late windows; known when the last part is handed over."""
    seen: int = 0
    """`Prefill.version` when it was last considered."""
    stream: Stream | None = None
    """The packed copy, which waits for credit of the sink, if its transport packs bytes."""
    ready: frozenset[Layer] = frozenset()
    """The layers that were marked ready in the stream."""
    copies: int = 0
    """The number of copies under way."""
    last: LastPart | None = None
    """Set when the last part is handed over."""
    sums: Checksums | None = None
    """Set when no copy is under way any more."""
    check: PageCheck | None = None
    """Set when no copy is under way any more, with `Options.debug_pages`."""
    failure: KvprotoError | None = None
    proof: Proof = Proof.PROVEN
    """Whether it is proven that no write of its copies can still arrive."""
    offered_at: float = 0.0
    """The time at which its items were offered for the sink to read."""
    progress: SendProgress = attrs.Factory(lambda send: SendProgress(send.peer.pair.nothing), takes_self=True)
    """The rows that were handed to the transport before prefill was over."""

    def unwanted(self) -> KvprotoError | None:
        """The reason why its bytes are not wanted any more; None if they are."""
        attempt = self.attempt
        if attempt.state != TransferState.ACCEPTED or not attempt.session.open:
            return OVER
        return None if self.request.over is None else _LATE

    def take_grants(self) -> None:
        """Note what the sink grants now; if that is more than before, there is something to decide."""
        if self.granted is not self.attempt.granted:
            self.granted, self.seen, self.lowered = self.attempt.granted, 0, None


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

    def steps(self, send: Send) -> list[CopyStep]:
        """The parts to hand over now; sets the send's `failure` if the request lacks rows that were asked for."""
        if send.stream is not None:
            return []
        if send.prefill.finished is not None and send.attempt.whole:
            return self._last(send)
        if not send.attempt.whole and not self._may_grow(send):
            return []
        # the first Chunk of a stream states where late windows begin, which is known when prefill is over
        late = send.peer.packed and any(g.late for g in send.granted)
        if send.seen == send.prefill.version or send.peer.reads or late:
            return []
        send.seen = send.prefill.version
        computed = self._computed(send)
        if not (send.peer.packed or self._worth(send, computed)):
            return []
        self._want(send)
        if send.program is None or send.lowered != send.prefill.reach:
            try:
                send.program = self._lower(send)
            except KvprotoError:  # an item or a token may not be there yet
                send.lowered = None
                return []
        send.lowered = send.prefill.reach
        program = send.program
        if send.peer.packed:
            return [CopyStep(program, None, (), program.bytes, grows=True)]
        end = send.attempt.end
        send.available = computed
        if end is not None:
            send.available = {
                layer: attrs.evolve(rows, tokens=min(rows.tokens, end)) for layer, rows in computed.items()
            }
        parts = send.progress.next(program, send.available)
        short = end is not None and (
            end <= send.useful or send.prefill.finished is not None
        )  # what is granted ends here
        return parts if short or sum(p.bytes for p in parts) >= self._part_bytes else []

    def _may_grow(self, send: Send) -> bool:
        """Whether rows may go before all is granted, as in no stream; sets `failure` if nothing should be granted."""
        if send.prefill.finished is not None:
            try:
                check_ends(send.peer.pair, send.granted, send.prefill.finished.tokens, send.prefill.axes)
            except KvprotoError as error:
                send.failure = error.kept()
        return not send.peer.packed and send.failure is None

    def _computed(self, send: Send) -> Mapping[Layer, Available]:
        finished = send.prefill.finished
        if finished is None:
            return send.prefill.available
        return dict.fromkeys(send.progress.layers, Available(finished.tokens, finished.events))

    def _want(self, send: Send) -> None:
        """Set `useful` once more items are worth a copy; when prefill is over, all are, which is reported elsewhere."""
        end, asked = send.attempt.end, send.granted
        if end is None or send.attempt.whole or send.prefill.finished is not None:
            return
        most = max((last for _, last in asked_tokens(send.peer.pair, asked).values()), default=0)
        tokens = min(max(send.prefill.tokens.values(), default=0), most)
        if tokens == most or (tokens - end) * send.peer.pair.token_bytes >= self._part_bytes:
            send.useful = max(send.useful, tokens)

    def stream_rows(self, send: Send) -> StreamRows | None:
        """The layers to mark ready in a stream under way; None if there are no more. Sets `failure` as `steps` does."""
        finished = send.prefill.finished
        if finished is not None:
            try:
                check_ends(send.peer.pair, send.granted, finished.tokens, send.prefill.axes)
            except KvprotoError as error:
                send.failure = error.kept()
                return None
            return StreamRows(None, finished.events)
        if send.seen == send.prefill.version:
            return None
        send.seen = send.prefill.version
        complete = send.prefill.complete(send.peer.pair, send.granted)
        new = complete.keys() - send.ready
        send.ready |= new
        return StreamRows(send.ready, tuple(sorted({event for layer in new for event in complete[layer]})))

    def _last(self, send: Send) -> list[CopyStep]:
        """All parts that are left when prefill is over."""
        finished = send.prefill.finished
        assert finished is not None
        try:
            program = send.program = self._lower(send)
            send.begins = send.prefill.begins(send.peer.pair, send.granted)
        except KvprotoError as error:
            send.failure = error.kept()
            return []
        if send.peer.reads:
            return [CopyStep(NO_ROWS, None, finished.events, 0)]
        if send.progress.begun:
            return send.progress.last(program, finished.events)
        return [CopyStep(program, None, finished.events, program.bytes)]

    def _lower(self, send: Send) -> CopyProgram:
        return send.prefill.program(send.peer.pair, send.granted, whole=send.peer.packed)

    def _worth(self, send: Send, computed: Mapping[Layer, Available]) -> bool:
        """Whether to send a part while prefill runs, or before everything is granted."""
        capabilities = send.peer.transport.capabilities
        if not capabilities.incremental:
            return False
        ratio = capabilities.first_part_ratio if self._first_part_ratio is None else self._first_part_ratio
        return send.progress.due(computed, asked_tokens(send.peer.pair, send.granted), ratio)
