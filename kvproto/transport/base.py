"""The one interface of a transport: it exposes memory, maps peers', and copies; `Capabilities` say how it differs."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import attrs

from kvproto.copying.program import CopyProgram, Runs
from kvproto.copying.streams import Piece, Receiver
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.bench import Absent, BenchJob, CostedWay, Floor, Measured
from kvproto.transport.staging.packed import Layer, PackedLink, Packer
from kvproto.wire.enums import ErrorCode, Feature, MemoryKind, Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region


class Memory(Protocol):
    """Contiguous bytes of this process that a transport can share: one region of Register."""

    id: int
    length: int

    @property
    def kind(self) -> MemoryKind:
        """Host or CUDA."""

    @property
    def device(self) -> int | None:
        """CUDA ordinal in this process; None on the host."""

    @property
    def region(self) -> Region:
        """Its entry in Register; raises NO_TRANSPORT, with advice, for memory that cannot be shared."""

    def __dlpack__(self, **options: Any) -> Any:
        """The bytes, as a one-dimensional array of uint8, without a copy."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and number."""

    def close(self) -> None:
        """Free it, if it was allocated here; raises BufferError while views of it live."""


Regions = Mapping[int, Memory]
"""Memory of this process by region id."""


class Mapped(Protocol):
    """A peer's region as this process reaches it."""

    def close(self) -> None:
        """Unmap it; no copy that uses it may be under way."""


# copies


@attrs.frozen
class Move:
    """One copy program and the memory of its two sides, by region id."""

    program: CopyProgram
    sources: Mapping[int, Memory | Mapped]
    sinks: Mapping[int, Memory | Mapped]
    after: tuple[int, ...] = ()
    """Handles of the device events after which the source's rows are there."""
    layers: tuple[int, int] | None = None
    """Copy only layers [lo, hi). It is not selected in the program, so that its table of operations stays cached."""
    grows: bool = False
    """For packed copies: whether no row is there yet, and `Copying.stream` is told as layers become ready."""
    background: bool = False
    """Whether more of the request is still being computed, so that this copy is not urgent and yields to compute."""


class Stream(Protocol):
    """A packed copy whose rows may become ready while it runs, and whose pieces are sent or announced."""

    @property
    def left(self) -> int:
        """Bytes that have not been started."""

    def mark_ready(self, layers: Collection[Layer] | None, after: Sequence[int]) -> None:
        """The rows of these layers, or of all, are there once these device events have happened."""

    def take(self) -> Sequence[Piece]:
        """The pieces that have arrived, or are to be sent, since the last call; in this order."""


class Copying(Protocol):
    """A copy between peers that has been started (`Transport.start`)."""

    @property
    def bytes(self) -> int:
        """Bytes that it writes."""

    @property
    def stream(self) -> Stream | None:
        """The stream of a packed copy; None for others."""

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination; raises KvprotoError if that can no longer happen."""

    def stop(self) -> Proof | None:
        """Start nothing more; None while writes are under way, then whether any can still arrive."""


# copies between a pool and memory of the host within one process, by which pages are kept (`kvproto.tiers`)


class Paging(Protocol):
    """A copy between a pool and memory of the host that has been started (`Pager`)."""

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination; raises KvprotoError if that can no longer happen."""

    def hold(self, layer: int | None = None) -> None:
        """Make later work on the engine's stream wait for layers 0 to `layer` of this copy, or for all of it."""

    def wait(self) -> None:
        """Return when it is done; raises what `done` raises."""


class Pager(Protocol):
    """Runs copy programs between one pool and memory that it allocates, each after earlier work of the engine."""

    def allocate(self, length: int) -> Memory:
        """`length` zeroed bytes of the host, which its copies reach fast; raises LocalError(TRANSPORT_FAILED)."""

    def save(self, program: CopyProgram, pool: Regions, host: Regions) -> Paging:
        """Start a copy to the host."""

    def load(self, program: CopyProgram, host: Regions, pool: Regions) -> Paging:
        """Start a copy to the pool, its layers in ascending order."""

    def close(self) -> None:
        """Wait for what is under way, and release the memory that was allocated."""


# transports

SUMMED = 4 << 20
"""Bytes of the host's memory whose checksums take about a millisecond."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """The abilities of a transport, for callers that do not know which one it is."""

    code: TransportCode
    """Its name on the wire, in handles and in Registered."""
    features: tuple[Feature, ...] = ()
    """Features that a session must offer for every part of it to work."""
    reads: bool
    """Whether a sink can read a source's memory with it (feature PULL)."""
    death_is_proof: bool
    """Whether the end of the writer's process proves that nothing of it can arrive any more (KVP-END-PROVEN)."""
    batches: bool
    """Whether moves to several sinks are better started together, in which case they end together."""
    incremental: bool
    """Whether a request may go in several copies, the first of them while later layers are being computed."""
    converts: bool = False
    """Whether it runs programs that convert (feature CONVERT); a transport without this is given none."""
    first_part_ratio: float = 0.0
    """Start the first part when it has this many times the rows still to be computed; 0: as soon as it is there."""
    poll_interval: float | None
    """Seconds between polls of a running copy; None: copies end within `start`, or the peer's messages advance them."""
    summed_at_once: int = SUMMED
    """Bytes whose checksums one call computes: about a millisecond's worth, as nothing else happens meanwhile."""


@attrs.frozen
class StreamDelivery:
    """A sink's side of packed bytes from one source (features STAGED and INLINE)."""

    receiver: Receiver
    unpacker: Callable[[CopyProgram], Packer]
    """Makes the packer that scatters one transfer's stream into the pages."""
    close: Callable[[], None] = lambda: None
    """Releases what was registered for it, which the peer may no longer write."""


@attrs.frozen
class Exposure:
    """Handles and regions by which one peer reaches memory of this process."""

    handles: Mapping[int, tuple[Handle, ...]]
    """For every region that was passed, by its id."""
    regions: tuple[Region, ...] = ()
    """Further regions that the peer needs: staging slots, or memory to measure the link with."""
    packed: StreamDelivery | None = None
    """Set if the peer packs bytes and does not write the pages."""


@attrs.define(eq=False)
class Connection:
    """A peer's regions as this process reaches them, by region id."""

    mapped: dict[int, Mapped] = attrs.Factory(dict)
    link: PackedLink | None = None
    """Set if bytes are packed, because the peer's pages cannot be written directly."""
    ended: Callable[[], bool] | None = None
    """Says whether the peer's process has ended; None if that cannot be seen from here."""
    release: Callable[[], None] | None = None
    """Releases the rest, once, after all regions are unmapped."""

    def close(self) -> None:
        """Unmap all of them; no copy that uses them may be under way."""
        for mapped in self.mapped.values():
            mapped.close()
        self.mapped.clear()
        release, self.release, self.ended = self.release, None, None
        if release is not None:
            release()


@attrs.frozen
class PeerRegions:
    """Regions that a peer has registered, and what a session agrees on about reaching them."""

    regions: Sequence[Region]
    used: Collection[int]
    """The ids of regions with columns."""
    writes: bool
    """Whether to write them; otherwise to read them."""
    features: Collection[int]
    attestation: bytes
    """If a peer could name memory of another process, the one that a handle names has to have written it, as
    `kvproto.transport.process.attested` says (KVP-REG-ATTEST)."""


class Transport(Protocol):
    """Runs copy programs between own memory and mapped memory of peers, on one thread; the defaults do nothing."""

    capabilities: Capabilities

    def expose(self, memory: Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]) -> Exposure:
        """Let one peer reach these regions; further regions get ids from `next_id` on.

        `program` is any program of the rank pair, to prepare what its requests share; `runs` estimates the runs of a
        typical request. Raises NO_TRANSPORT for memory that this transport cannot share.
        """

    def connect(self, peer: PeerRegions) -> Connection:
        """Reach the regions that are used; raises NO_TRANSPORT or TRANSPORT_FAILED, and then maps none."""

    def prepare(self, move: Move) -> None:
        """Warm up tables and kernels of a rank pair, so that its first hand-over does not wait for them."""
        return

    def start(self, moves: Sequence[Move]) -> Copying:
        """Start all moves, or none; several only if the transport `batches`. Raises BUSY while too many run."""

    def begin_checksums(self, program: CopyProgram, memory: Regions, sink: bool) -> Callable[[], dict[int, int]]:
        """Start checksums of own memory (`copying.execute`), whose copies are over; the result waits or takes them."""

    def forget(self, memory: Regions) -> None:
        """Drop all state of these regions, which are no longer exposed and which no copy uses."""
        return

    def unreachable(self) -> None:
        """Expose memory in another way from now on, if there is one, as peers cannot reach what was exposed."""
        return

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when a copy has made progress; None: see `Capabilities.poll_interval`."""
        return None

    def acknowledge(self) -> None:
        """Make the descriptor unreadable again, before copies are polled."""
        return

    def close(self) -> None:
        """Release everything; no copy may be under way."""
        return


def connect_each(
    regions: Sequence[Region], used: Collection[int], connect: Callable[[Region, str], Mapped]
) -> Connection:
    """Map every region in `used` by `connect(region, path)`, or none if it raises."""
    connection = Connection()
    try:
        for i, region in enumerate(regions):
            if region.id in used:
                connection.mapped[region.id] = connect(region, f"regions[{i}]")
    except KvprotoError:
        connection.close()
        raise
    return connection


@attrs.frozen
class Allocation:
    """An allocation of this process; one region of it may hold many tensors."""

    key: Hashable
    """Equal for all of its bytes."""
    adopt: Callable[[int, int], tuple[Memory, int]] = attrs.field(eq=False)
    """Returns memory that holds its addresses [begin, end), and the address at which that memory begins."""


@cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class Provider(ABC):
    """A transport's entry point in `kvproto.transports`, whose import needs none of the transport's libraries."""

    name: str
    requires: tuple[str, ...] = ()
    """Importable names of the libraries that it needs, packages before their modules."""
    install: str = ""
    """The command that installs them."""

    def missing(self) -> str | None:
        """The first library that is not installed, or None."""
        return next((name for name in self.requires if not _installed(name)), None)

    def allocate(self, length: int, device: int | None, id: int) -> Memory | None:
        """Zeroed memory of a GPU, or of the host (None); returns None for other kinds; raises TRANSPORT_FAILED."""
        return None

    def allocation_of(self, device: tuple[int, int], address: int, length: int) -> Allocation | None:
        """The allocation that holds these bytes of a DLPack device (type, number); None if it cannot be shared."""
        return None

    def device_of(self, memory: Regions) -> int | None:
        """The GPU that all regions are on, None for the host; raises LocalError(NO_TRANSPORT)."""
        devices = {m.device for m in memory.values()}
        if len(devices) != 1:
            on = {id: "the host" if m.device is None else f"GPU {m.device}" for id, m in memory.items()}
            places = ", ".join(f"region {id} on {place}" for id, place in on.items()) or "no region"
            wanted, advice = "regions of one GPU, or of the host", "give each rank pools of one GPU"
            raise LocalError(ErrorCode.NO_TRANSPORT, "pool", wanted, places, advice)
        return devices.pop()

    @abstractmethod
    def preference(self, memory: Memory) -> int:
        """The rank of the transport for this memory, 0 if it does not suit; by default the highest is used."""

    @abstractmethod
    def open(self, memory: Regions, measured: Sequence[Measured] = ()) -> Transport:
        """A transport for a pool of these regions, given what `kvproto probe` measured; raises NO_TRANSPORT."""

    def pager(self, memory: Regions, stream: int) -> Pager | None:
        """A pager between a pool and the host after the engine's `stream` (0: default); None if there is none."""
        return None

    # measuring

    floors: tuple[Floor, ...] = ()
    """Rates below which something is wrong."""
    costs: tuple[CostedWay, ...] = ()
    """The ways of copying that plans are costed by, with their constants on one machine."""

    def gpus(self) -> tuple[tuple[str, ...], str | None]:
        """The names of the GPUs that this transport sees, in order, and the version of their driver."""
        return (), None

    def bench(self, memory: int, gpus: int) -> tuple[list[BenchJob], list[Absent]]:
        """Jobs that time each way on a machine of `gpus` GPUs within `memory` bytes, and what cannot be timed."""
        return [], []


def handle_of(region: Region, path: str, code: TransportCode) -> Handle:
    """The first handle of a transport; raises NO_TRANSPORT for a region without one."""
    for handle in region.handles:
        if handle.transport == code:
            return handle
    advice = "use a transport that both sides have"
    raise RemoteError(ErrorCode.NO_TRANSPORT, f"{path}.handles", code.name, "none", advice)


def bells(transports: Iterable[Transport]) -> dict[int, Transport]:
    """Transports by their descriptors, without those that have none."""
    return {fd: transport for transport in transports if (fd := transport.fileno()) is not None}
