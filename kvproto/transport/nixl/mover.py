"""Transport `nixl` as a node uses it, on memory of the host or of one GPU.

Direct: the peer's pages are registered with NIXL and written. Staged: its staging memory alone is; a program becomes a
packed stream that goes through slots, and the node passes Chunk and Credit on. The sink chooses, by what it registers.

NIXL does not say how UCX reaches a GPU, and its way of last resort is a hundred times slower than the others. So a
source writes some staging memory of the sink before it says Registered, and refuses what is slow; a sink whose GPU's
pages are written directly registers some for that alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import attrs

from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.base import Layer, Mapped, Memory, Move
from kvproto.transport.nixl.agent import Agent, Peer, Registered, Write
from kvproto.transport.nixl.direct import DEVICE_FLOOR, Costs, Direct, Way, choose, probe, require_fast
from kvproto.transport.nixl.place import place_of
from kvproto.transport.staging.staged import Link, Piece, StagedSender
from kvproto.wire.enums import ErrorCode, MemoryKind, Proof, Transport
from kvproto.wire.messages import Handle, Region

__all__ = ["Behind", "NixlMover", "Streaming", "Writing"]

_PROBED, _LEAST_PROBED = 16 << 20, 1 << 20
"""Bytes of a write that tells how fast a GPU is reached; the latency of shorter ones hides it."""


@attrs.define
class Behind:
    """A peer's pages that we may not write: its staging slots lead there."""

    path: str
    link: Link | None = None
    release: Callable[[], None] | None = None
    """Frees our own slots."""

    def close(self) -> None:
        """Free our own slots; no write of them may be under way."""
        if self.release is not None:
            self.release()


@attrs.define
class Writing:
    """Direct writes that are under way, or wait for device events."""

    _direct: Direct
    _ready: Callable[[], bool]
    """Whether the rows are there."""
    _write: Write | None = None

    @property
    def bytes(self) -> int:
        """That it writes."""
        return self._direct.bytes

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination; raises PEER_LOST, TRANSPORT_FAILED."""
        if self._write is None:
            if not self._ready():
                return False
            self._write = self._direct.post()
        return self._write.ready()

    def stop(self) -> Proof | None:
        """What is known, once it is over; what was not posted never is."""
        return Proof.PROVEN if self._write is None else self._write.proof


class Streaming:
    """A packed stream that is under way; send what `take` returns, in order."""

    def __init__(self, sender: StagedSender, bytes_: int, happened: Callable[[Sequence[int]], bool]) -> None:
        self._sender, self.bytes, self._happened = sender, bytes_, happened
        self._pieces: list[Piece] = []
        self._coming: deque[tuple[Collection[Layer] | None, Sequence[int]]] = deque()
        """Layers, and the device events after which they are there."""

    @property
    def done(self) -> bool:
        """Go on with it: whether every byte is in a slot of the sink; raises PEER_LOST, TRANSPORT_FAILED."""
        while self._coming and self._happened(self._coming[0][1]):  # here: others' chunks would wait behind it there
            self._sender.allow(self._coming.popleft()[0])
        while True:
            before = self._sender.under_way
            found = self._sender.step()
            self._pieces += found
            if not found and self._sender.under_way == before:
                return self._sender.done

    @property
    def left(self) -> int:
        """Bytes that were not begun."""
        return self._sender.left

    def allow(self, there: Collection[Layer] | None, after: Sequence[int]) -> None:
        """Rows of these layers are there after these device events, or of all layers."""
        self._coming.append((there, after))

    def take(self) -> list[Piece]:
        """What has arrived since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def stop(self) -> Proof | None:
        """Begin nothing more: what is known, once nothing is under way."""
        return self._sender.abort()


class NixlMover:
    """Writes peers' memory by NIXL; `way` and the slots are what this side registers as a sink.

    With costs for `way`, pages are registered where runs are long, else staging memory. `device` is the GPU of the
    pools, None the host; slots are as large as suits that, if nobody says another number. Raises
    NO_TRANSPORT where NIXL or the GPU is missing, TRANSPORT_FAILED where UCX cannot start.
    """

    transport = Transport.NIXL
    together = False
    in_parts = False  # a transfer is one stream, or one set of writes, whose end is its completion
    late = 0.0

    def __init__(
        self,
        way: Way | Costs = Way.PACKED,
        slots: int = 8,
        slot_bytes: int | None = None,
        device: int | None = None,
        floor: float = DEVICE_FLOOR,
    ) -> None:
        """`floor`: bytes a second below which a GPU is refused as reached a slow way; 0 takes any."""
        self.place, self._floor = place_of(device), floor  # first, so that UCX finds the GPU's context
        self.way, self.slots, self.slot_bytes = way, slots, slot_bytes or self.place.slot_bytes
        self.agent = Agent(self.place.eager)
        self._registered: dict[int, tuple[Memory, Registered]] = {}
        self._probed: Registered | None = None
        """What peers, or we, write to see how fast it is."""

    # as a sink

    def expose(self, memory: Memory, runs: Callable[[], Runs]) -> tuple[Handle, Registered | None]:
        """How a peer reaches the memory: by its own handle, or by an empty one and fresh staging memory.

        `runs` are those of a request of that peer. Beside a handle of a GPU's memory there is staging memory to probe.
        Staging memory is kept until we are closed, as a peer may write it till then.
        """
        bytes_ = self.place.of(memory)
        way = self.way if isinstance(self.way, Way) else choose(runs(), self.way)
        if way is Way.DIRECT and not self.place.mappable(memory):
            if self.way is Way.DIRECT:
                raise LocalError(
                    ErrorCode.NO_TRANSPORT, "regions[0].handles", "memory of cuMemAlloc", "virtual memory",
                    "write packed, or allocate with kvproto.transport.memory",
                )  # fmt: skip
            way = Way.PACKED
        if way is Way.DIRECT:
            return self._register(memory).handle, self._to_probe() if bytes_.kind == MemoryKind.CUDA else None
        return Handle(transport=Transport.NIXL, data=b""), self._staging(self.slots * self.slot_bytes, self.slot_bytes)

    # as a source

    def connect(self, region: Region, path: str) -> Peer | Behind:
        """Reach a peer's region, or learn that it is behind staging; raises NO_TRANSPORT or TRANSPORT_FAILED."""
        if any(h.transport == Transport.NIXL and not h.data for h in region.handles):
            return Behind(path)
        return self.agent.connect(region, path)

    def stage(self, mapped: Iterable[Mapped], allowed: bool) -> Link | None:
        """Lead to the pages that are behind staging, if any, and see that GPUs are reached fast.

        Raises NO_TRANSPORT (KVP-REG-STAGING), TRANSPORT_FAILED for a slow way.
        """
        some = list(mapped)
        behind = [m for m in some if isinstance(m, Behind)]
        peer = next((m for m in some if isinstance(m, Peer) and m.slots), None)
        if not behind:
            for page in (m for m in some if isinstance(m, Peer) and m.memory.kind == MemoryKind.CUDA):
                if peer is None and self._floor:
                    wanted = "staging memory to probe, beside memory of a GPU"
                    raise RemoteError(ErrorCode.NO_TRANSPORT, f"{page.path}.handles", wanted, "none")
            if peer is not None:
                self._see(self._to_probe, peer)
            return None
        if peer is None or not allowed:
            wanted = "a handle, or STAGED and staging memory"
            raise RemoteError(ErrorCode.NO_TRANSPORT, f"{behind[0].path}.handles", wanted, "an empty handle")
        size = min(self.slot_bytes, peer.slot_bytes)
        own = self._staging(self.slots * size, size)
        try:
            link = Link(own, peer)
            self._see(lambda: own, peer)
        except KvprotoError:
            self._free(own)
            raise
        for each in behind:
            each.link = link
        behind[0].release = lambda: self._free(own)
        return link

    def prepare(self, move: Move) -> None:
        """What a rank pair's streams share; `stage` has done the rest."""
        if any(isinstance(m, Behind) for m in move.sinks.values()):
            self.place.prepare(move.program, "source", _own(move.sources))

    def start(self, moves: Sequence[Move]) -> Writing | Streaming:
        """Start one move; raises OUT_OF_REGION, TRANSPORT_FAILED."""
        (move,) = moves
        sources = _own(move.sources)
        link = next((m.link for m in move.sinks.values() if isinstance(m, Behind)), None)
        if link is not None:
            packer = self.place.packer(move.program, "source", sources, move.after)
            return Streaming(StagedSender(link, packer, move.grows), move.program.bytes, self.place.happened)
        registered = {i: self._register(m) for i, m in sources.items()}
        sinks = {i: m for i, m in move.sinks.items() if isinstance(m, Peer)}
        return Writing(Direct(self.agent, move.program, registered, sinks), lambda: self.place.happened(move.after))

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        """As `kvproto.copying.execute.checksums`."""
        return self.place.checksums(program, memory, sink)

    def close(self) -> None:
        """End all writes and connections."""
        self.agent.close()
        self.place.close()

    def _register(self, memory: Memory) -> Registered:
        """Of a pool, once."""
        known = self._registered.get(id(memory))
        if known is None:
            known = self._registered[id(memory)] = memory, self.agent.register(self.place.of(memory))
        return known[1]

    def _staging(self, length: int, slot_bytes: int) -> Registered:
        memory = self.place.allocate(length)
        try:
            return self.agent.register(memory, slot_bytes)
        except KvprotoError:
            self.place.free(memory)
            raise

    def _free(self, staging: Registered) -> None:
        staging.close()
        self.place.free(staging.memory)

    def _to_probe(self) -> Registered:
        if self._probed is None:
            self._probed = self._staging(_PROBED, _PROBED)
        return self._probed

    def _see(self, own: Callable[[], Registered], peer: Peer) -> None:
        """Refuse a GPU that UCX reaches by neither cuda_ipc nor RDMA."""
        if peer.memory.kind != MemoryKind.CUDA or not self._floor:
            return
        if peer.memory.length < _LEAST_PROBED:
            wanted, found = f"{_LEAST_PROBED} bytes of staging memory to probe", str(peer.memory.length)
            raise RemoteError(ErrorCode.TRANSPORT_FAILED, peer.path, wanted, found, "larger slots, or a floor of 0")
        source = own()
        size = min(_PROBED, peer.memory.length, source.memory.length)
        require_fast(probe(source, peer, size), peer, self._floor)


def _own(side: Mapping[int, Memory | Mapped]) -> dict[int, Memory]:
    return {i: m for i, m in side.items() if not isinstance(m, Peer | Behind)}  # type: ignore[misc]
