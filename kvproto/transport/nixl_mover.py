"""Transport `nixl` as a node uses it, on host memory.

Direct: the peer's pages are registered with NIXL and written. Staged: its staging memory alone is; a program becomes a
packed stream that goes through slots, and the node passes Chunk and Credit on. The sink chooses, by what it registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import attrs

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.execute import checksums
from kvproto.program import CopyProgram, Runs
from kvproto.transport.base import Mapped, Memory, Move
from kvproto.transport.nixl import Agent, Peer, Registered, Write
from kvproto.transport.nixl import Memory as Bytes
from kvproto.transport.nixl_direct import Costs, Direct, Way, choose
from kvproto.transport.packed import PackedStream
from kvproto.transport.shm import SharedMemory
from kvproto.transport.staged import Link, Piece, StagedSender
from kvproto.wire.enums import ErrorCode, Proof, Transport
from kvproto.wire.messages import Handle, Region

__all__ = ["Behind", "NixlMover", "Streaming", "Writing"]


@attrs.define
class Behind:
    """A peer's pages that we may not write: its staging slots lead there."""

    path: str
    link: Link | None = None
    own: Registered | None = None

    def close(self) -> None:
        """Free our own slots; no write of them may be under way."""
        if self.own is not None:
            self.own.close()


@attrs.frozen
class Writing:
    """Direct writes that are under way."""

    write: Write

    @property
    def bytes(self) -> int:
        """That it writes."""
        return self.write.bytes

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination; raises PEER_LOST, TRANSPORT_FAILED."""
        return self.write.ready()

    def stop(self) -> Proof | None:
        """What is known, once it is over."""
        return self.write.proof


class Streaming:
    """A packed stream that is under way; send what `take` returns, in order."""

    def __init__(self, sender: StagedSender, bytes_: int) -> None:
        self._sender, self.bytes = sender, bytes_
        self._pieces: list[Piece] = []

    @property
    def done(self) -> bool:
        """Go on with it: whether every byte is in a slot of the sink; raises PEER_LOST, TRANSPORT_FAILED."""
        while True:
            before = self._sender.under_way
            found = self._sender.step()
            self._pieces += found
            if not found and self._sender.under_way == before:
                return self._sender.done

    def take(self) -> list[Piece]:
        """What has arrived since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def stop(self) -> Proof | None:
        """Begin nothing more: what is known, once nothing is under way."""
        return self._sender.abort()


class NixlMover:
    """Writes peers' memory by NIXL; `way` and the slots are what this side registers as a sink.

    With costs for `way`, pages are registered where runs are long, else staging memory. Raises NO_TRANSPORT where NIXL
    is not installed, TRANSPORT_FAILED where UCX cannot start.
    """

    transport = Transport.NIXL
    together = False
    in_parts = False  # a transfer is one stream, or one set of writes, whose end is its completion

    def __init__(self, way: Way | Costs = Way.PACKED, slots: int = 8, slot_bytes: int = 1 << 20) -> None:
        self.way, self.slots, self.slot_bytes = way, slots, slot_bytes
        self.agent = Agent()
        self._registered: dict[int, tuple[Memory, Registered]] = {}
        self._staging: list[Registered] = []
        """Kept until we are closed, as a peer may write them till then."""

    # as a sink

    def expose(self, memory: Memory, runs: Callable[[], Runs]) -> tuple[Handle, Registered | None]:
        """How a peer reaches the memory: by its own handle, or by an empty one and fresh staging memory.

        `runs` are those of a request of that peer.
        """
        _buffer(memory)
        way = self.way if isinstance(self.way, Way) else choose(runs(), self.way)
        if way is Way.DIRECT:
            return self._register(memory).handle, None
        staging = self.agent.register(bytearray(self.slots * self.slot_bytes), self.slot_bytes)
        self._staging.append(staging)
        return Handle(transport=Transport.NIXL, data=b""), staging

    def packer(
        self, program: CopyProgram, side: Literal["source", "sink"], memory: Mapping[int, Memory]
    ) -> PackedStream:
        """One side's end of a program's stream; memory by region id."""
        return PackedStream(program, side, {i: _buffer(m) for i, m in memory.items()})

    # as a source

    def connect(self, region: Region, path: str) -> Peer | Behind:
        """Reach a peer's region, or learn that it is behind staging; raises NO_TRANSPORT or TRANSPORT_FAILED."""
        if any(h.transport == Transport.NIXL and not h.data for h in region.handles):
            return Behind(path)
        return self.agent.connect(region, path)

    def stage(self, mapped: Iterable[Mapped], allowed: bool) -> Link | None:
        """Lead to the pages that are behind staging, if any; raises NO_TRANSPORT (KVP-REG-STAGING)."""
        some = list(mapped)
        behind = [m for m in some if isinstance(m, Behind)]
        if not behind:
            return None
        peer = next((m for m in some if isinstance(m, Peer) and m.slots), None)
        if peer is None or not allowed:
            wanted = "a handle, or STAGED and staging memory"
            raise RemoteError(ErrorCode.NO_TRANSPORT, f"{behind[0].path}.handles", wanted, "an empty handle")
        size = min(self.slot_bytes, peer.slot_bytes)
        own = self.agent.register(bytearray(self.slots * size), size)
        try:
            link = Link(own, peer)
        except KvprotoError:
            own.close()
            raise
        for each in behind:
            each.link, each.own = link, own
        return link

    def start(self, moves: Sequence[Move]) -> Writing | Streaming:
        """Start one move; raises OUT_OF_REGION, TRANSPORT_FAILED."""
        (move,) = moves
        sources = {i: m for i, m in move.sources.items() if not isinstance(m, Peer | Behind)}
        link = next((m.link for m in move.sinks.values() if isinstance(m, Behind)), None)
        if link is not None:
            packer = self.packer(move.program, "source", sources)  # type: ignore[arg-type]
            return Streaming(StagedSender(link, packer), move.program.bytes)
        registered = {i: self._register(m) for i, m in sources.items()}  # type: ignore[arg-type]
        sinks = {i: m for i, m in move.sinks.items() if isinstance(m, Peer)}
        return Writing(Direct(self.agent, move.program, registered, sinks).post())

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        """As `kvproto.execute.checksums`."""
        return checksums(program, {i: _buffer(m) for i, m in memory.items()}, sink)

    def close(self) -> None:
        """End all writes and connections."""
        self.agent.close()

    def _register(self, memory: Memory) -> Registered:
        """Of a pool, once."""
        known = self._registered.get(id(memory))
        if known is None:
            known = self._registered[id(memory)] = memory, self.agent.register(Bytes.of(_buffer(memory)))
        return known[1]


def _buffer(memory: Memory) -> memoryview:
    if not isinstance(memory, SharedMemory):
        raise LocalError(ErrorCode.NO_TRANSPORT, "", "host memory", type(memory).__name__, "use another transport")
    return memory.buffer
