"""Transport `nixl`: writes between hosts over UCX, on memory of the host or of one GPU.

Direct: the peer's pages are registered with NIXL and written. Packed: only its staging memory is; a program becomes a
packed stream through slots, and the node passes Chunk and Credit on. The sink chooses by what it registers.

NIXL does not say how UCX reaches a GPU, and UCX's last resort is a hundred times slower than the others. So a source
writes to staging memory of the sink before it says Registered, and refuses a slow link; a sink whose GPU pages are
written directly registers some staging memory for that purpose.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport import base
from kvproto.transport.nixl.agent import Agent, Peer, Registered
from kvproto.transport.nixl.backend import HostBackend, MemoryBackend
from kvproto.transport.nixl.direct import DEVICE_FLOOR, Costs, DirectWrite, WriteMode, choose, probe, require_fast
from kvproto.transport.staging.packed import Layer, Packer, PeerPages
from kvproto.transport.staging.staged import StagedLink, StagedReceiver, StagedSender
from kvproto.wire.enums import ErrorCode, Feature, MemoryKind
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region

_PROBED, _LEAST_PROBED = 16 << 20, 1 << 20
"""Bytes of a write that measures how fast a GPU is reached; latency would dominate shorter ones."""
_EMPTY = Handle(transport=TransportCode.NIXL, data=b"")
"""Says that the pages are behind staging slots."""
_POLL = 20e-6, 10e-3
"""Seconds between polls of a GPU's events and writes; and on the host, where a descriptor announces every write."""


class NixlTransport(base.Transport):
    """Writes peers' memory by NIXL; `mode` and the slots are what this side registers as a sink.

    With `Costs` as the mode, pages are registered if runs are long, else staging memory. `device` is the GPU of the
    pools, or None for the host, which `slot_bytes` depends on by default. `floor`: bytes a second below which a link to
    a GPU is refused as slow; 0 accepts any. Raises NO_TRANSPORT if NIXL or the GPU is missing, TRANSPORT_FAILED if UCX
    cannot start.
    """

    def __init__(
        self,
        mode: WriteMode | Costs = WriteMode.PACKED,
        slots: int = 8,
        slot_bytes: int | None = None,
        device: int | None = None,
        floor: float = DEVICE_FLOOR,
    ) -> None:
        self.backend, self._floor = _backend_of(device), floor  # first, so that UCX finds the GPU's context
        self.mode, self.slots, self.slot_bytes = mode, slots, slot_bytes or self.backend.slot_bytes
        self.agent = Agent(self.backend.eager)
        self.capabilities = base.Capabilities(
            code=TransportCode.NIXL,
            features=(Feature.STAGED,),
            reads=False,
            converts=self.backend.converts,
            death_is_proof=False,
            batches=False,
            incremental=False,  # a transfer is one stream, or one set of writes, whose end is its completion
            poll_interval=_POLL[device is None],
            summed_at_once=self.backend.summed_at_once,
        )
        self._former: Agent | None = None
        """The agent before this one, until nothing uses it."""
        self._renewing = False
        """Whether the next exposure is to be made by a new agent."""
        self._registered: dict[tuple[int, str], tuple[base.Memory, Registered]] = {}
        """By identity of the memory and name of the agent."""
        self._probed: Registered | None = None
        """Staging memory that is written only to measure the link."""

    # as a sink

    def expose(
        self, memory: base.Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]
    ) -> base.Exposure:
        """Register the pages, or leave their handles empty and register fresh staging slots (KVP-REG-STAGING)."""
        for region in memory.values():
            self.backend.of(region)
        if self._renewing:
            self._renew()
        mode = self.mode if isinstance(self.mode, WriteMode) else choose(runs(), self.mode)
        if mode is WriteMode.DIRECT and (other := self._needs_packing(program, memory)):
            if self.mode is WriteMode.DIRECT:
                raise LocalError(ErrorCode.NO_TRANSPORT, "regions[0].handles", *other)
            mode = WriteMode.PACKED
        device = self.backend.device_name
        if mode is WriteMode.DIRECT:
            handles = {id: (self._register(m, self.agent).handle,) for id, m in memory.items()}
            return base.Exposure(handles, () if device is None else (self._to_probe().region(next_id, device),))
        staging = self._staging(self.slots * self.slot_bytes, self.slot_bytes)
        self.backend.prepare(program, "sink", memory)
        delivery = base.StreamDelivery(
            StagedReceiver(staging),
            unpacker=lambda program: self.backend.packer(program, "sink", memory),
            close=lambda: self._free(staging),
        )
        return base.Exposure(dict.fromkeys(memory, (_EMPTY,)), (staging.region(next_id, device),), delivery)

    def _needs_packing(self, program: CopyProgram, memory: base.Regions) -> tuple[str, str, str] | None:
        """The reason why a peer cannot write these pages directly, as the last fields of an error; None if it can."""
        if program.operations.converts:
            return "bytes as they are", "a conversion", "write packed (WriteMode.PACKED)"
        if all(self.backend.mappable(region) for region in memory.values()):
            return None
        advice = "write packed, or allocate with kvproto.transport.memory"
        return "memory of cuMemAlloc", "virtual memory", advice

    # as a source

    def connect(self, peer: base.PeerRegions) -> base.Connection:
        """Reach the peer's pages or staging slots, checking the link; raises NO_TRANSPORT or TRANSPORT_FAILED."""
        if not peer.writes:
            raise RemoteError(ErrorCode.NO_TRANSPORT, "regions[0].handles", "a transport that reads", "NIXL", "push")
        ours = {r.id for r in peer.regions if any(h.transport == TransportCode.NIXL for h in r.handles)}
        connection = base.connect_each(peer.regions, ours.union(peer.used), self._reach)
        try:
            self._stage(connection, Feature.STAGED in peer.features)
        except KvprotoError:
            connection.close()
            raise
        return connection

    def _reach(self, region: Region, path: str) -> Peer | PeerPages:
        if any(h.transport == TransportCode.NIXL and not h.data for h in region.handles):
            return PeerPages(path)
        return self.agent.connect(region, path)

    def _stage(self, connection: base.Connection, allowed: bool) -> None:
        """Link the pages that are behind staging slots, if any; check that a GPU is reached fast."""
        mapped = connection.mapped.values()
        behind = [m for m in mapped if isinstance(m, PeerPages)]
        peer = next((m for m in mapped if isinstance(m, Peer) and m.slots), None)
        if not behind:
            for page in (m for m in mapped if isinstance(m, Peer) and m.memory.kind == MemoryKind.CUDA):
                if peer is None and self._floor:
                    wanted = "staging memory to probe, beside memory of a GPU"
                    raise RemoteError(ErrorCode.NO_TRANSPORT, f"{page.path}.handles", wanted, "none")
            if peer is not None:
                self._require_fast(self._to_probe, peer)
            return
        if peer is None or not allowed:
            wanted = "a handle, or STAGED and staging memory"
            raise RemoteError(ErrorCode.NO_TRANSPORT, f"{behind[0].path}.handles", wanted, "an empty handle")
        size = min(self.slot_bytes, peer.slot_bytes)
        own = self._staging(self.slots * size, size)
        try:
            link = StagedLink(own, peer)
            self._require_fast(lambda: own, peer)
        except KvprotoError:
            self._free(own)
            raise
        for pages in behind:
            pages.link = link
        connection.link, connection.release = link, lambda: self._free(own)

    def prepare(self, move: base.Move) -> None:
        """Make what a packer needs; raises NO_TRANSPORT if a program that converts would be written directly."""
        if self._link(move) is not None:
            self.backend.prepare(move.program, "source", _own(move.sources))

    def _link(self, move: base.Move) -> StagedLink | None:
        link: StagedLink | None = next((m.link for m in move.sinks.values() if isinstance(m, PeerPages)), None)
        if link is None and move.program.operations.converts:
            wanted = "staging slots, as NIXL converts while it packs"
            raise RemoteError(ErrorCode.NO_TRANSPORT, "regions[0].handles", wanted, "pages", "register packed")
        return link

    def start(self, moves: Sequence[base.Move]) -> "DirectWrite | StagedCopy":
        """Start one move; raises OUT_OF_REGION, TRANSPORT_FAILED, and NO_TRANSPORT as `prepare`."""
        (move,) = moves
        sources, link = _own(move.sources), self._link(move)
        if link is not None:
            packer = self.backend.packer(move.program, "source", sources, move.after)
            return StagedCopy(link, packer, move.grows, self.backend.happened)
        sinks = {i: m for i, m in move.sinks.items() if isinstance(m, Peer)}
        agent = next((peer.agent for peer in sinks.values()), self.agent)
        registered = {i: self._register(m, agent) for i, m in sources.items()}
        return DirectWrite(agent, move.program, registered, sinks, lambda: self.backend.happened(move.after))

    def begin_checksums(self, program: CopyProgram, memory: base.Regions, sink: bool) -> Callable[[], dict[int, int]]:
        return self.backend.begin_checksums(program, memory, sink)

    def forget(self, memory: base.Regions) -> None:
        self.backend.settle()
        gone = {id(region) for region in memory.values()}
        for key in [key for key in self._registered if key[0] in gone]:
            self._registered.pop(key)[1].close()

    def unreachable(self) -> None:
        """Expose memory by a new agent: UCX accepts no connection any more once it lacked a descriptor for one."""
        self._retire()
        self._renewing = self._former is None

    def _renew(self) -> None:
        """Make a new agent, and leave the former one to what uses it; if that fails, the next exposure tries again."""
        with contextlib.suppress(KvprotoError):
            agent = Agent(self.backend.eager)
            self._former, self.agent, self._renewing, self._probed = self.agent, agent, False, None

    def _retire(self) -> None:
        """Close the former agent once nothing uses it."""
        if self._former is not None and self._former.idle:
            self._former.close()
            self._former = None

    def fileno(self) -> int:
        return self.agent.fileno()

    def acknowledge(self) -> None:
        self.agent.wait(0)

    def close(self) -> None:
        if self._former is not None:
            self._former.close()
        self.agent.close()
        self.backend.close()

    def _register(self, memory: base.Memory, agent: Agent) -> Registered:
        """Register a region with an agent, once."""
        known = self._registered.get((id(memory), agent.name))
        if known is None:
            known = memory, agent.register(self.backend.of(memory))
            self._registered[id(memory), agent.name] = known
        return known[1]

    def _staging(self, length: int, slot_bytes: int) -> Registered:
        memory = self.backend.allocate(length)
        try:
            return self.agent.register(memory, slot_bytes)
        except KvprotoError:
            self.backend.free(memory)
            raise

    def _free(self, staging: Registered) -> None:
        staging.close()
        self.backend.free(staging.memory)
        self._retire()

    def _to_probe(self) -> Registered:
        if self._probed is None:
            self._probed = self._staging(_PROBED, _PROBED)
        return self._probed

    def _require_fast(self, own: Callable[[], Registered], peer: Peer) -> None:
        """Refuse a GPU that UCX reaches by neither cuda_ipc nor RDMA."""
        if peer.memory.kind != MemoryKind.CUDA or not self._floor:
            return
        if peer.memory.length < _LEAST_PROBED:
            mine, yours = f"{_LEAST_PROBED} bytes of staging memory to probe", str(peer.memory.length)
            raise RemoteError(ErrorCode.TRANSPORT_FAILED, peer.path, mine, yours, "larger slots, or a floor of 0")
        source = own()
        size = min(_PROBED, peer.memory.length, source.memory.length)
        require_fast(probe(source, peer, size), peer, self._floor)


def _own(side: Mapping[int, base.Memory | base.Mapped]) -> dict[int, base.Memory]:
    return {i: m for i, m in side.items() if not isinstance(m, Peer | PeerPages)}  # type: ignore[misc]


def _backend_of(device: int | None) -> MemoryBackend:
    """The backend of a GPU, or of the host; raises NO_TRANSPORT if there is no such GPU."""
    if device is None:
        return HostBackend()
    from kvproto.transport.nixl.device import DeviceBackend

    return DeviceBackend(device)


# copies that are under way


class StagedCopy(StagedSender):
    """A stream that is packed once its rows are there."""

    def __init__(
        self, link: StagedLink, packer: Packer, grows: bool, happened: Callable[[Sequence[int]], bool]
    ) -> None:
        super().__init__(link, packer, grows)
        self._happened = happened
        self._coming: deque[tuple[Collection[Layer] | None, Sequence[int]]] = deque()
        """Layers, and the device events after which their rows are there."""

    @property
    def done(self) -> bool:
        """Whether every byte is in a slot of the sink, after advancing it; raises PEER_LOST, TRANSPORT_FAILED."""
        # the host polls events: if the device awaited them, chunks of other streams would queue behind them
        while self._coming and self._happened(self._coming[0][1]):
            super().mark_ready(self._coming.popleft()[0])
        while True:
            before = self.under_way
            pieces = self.step()
            self._pieces += pieces
            if not pieces and self.under_way == before:
                return super().done

    def mark_ready(self, layers: Collection[Layer] | None, after: Sequence[int] = ()) -> None:
        self._coming.append((layers, after))
