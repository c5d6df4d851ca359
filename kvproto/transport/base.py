"""The one interface of a transport: it exposes memory, maps peers' memory, and runs copy programs between the two.

What transports differ in is data (`Capabilities`), so that no other layer asks which transport it has. A transport is
found by an entry point of the group `kvproto.transports`, which names its `Provider` (`kvproto.transport.loading`).
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.bench import Absent, BenchJob, CostedWay, Floor, Measured
from kvproto.transport.staging.packed import Layer, Packer
from kvproto.wire.enums import CreditKind, ErrorCode, Feature, MemoryKind, Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Chunk, Data, Handle, Region

if TYPE_CHECKING:
    from kvproto.transport.paging import Pager

__all__ = [
    "SUMMED", "Allocation", "Capabilities", "Connection", "Copying", "Exposure", "Layer", "Link", "Mapped", "Memory",
    "Move", "Piece", "Provider", "Receiver", "Regions", "Stream", "StreamDelivery", "Transport",
    "connect_each", "no_handle",
]  # fmt: skip


# memory


class Memory(Protocol):
    """Contiguous bytes of this process that a transport can share: one region of Register."""

    id: int
    length: int
    """Bytes."""

    @property
    def kind(self) -> MemoryKind:
        """Host or CUDA."""

    @property
    def device(self) -> int | None:
        """CUDA ordinal in this process; None on the host."""

    @property
    def region(self) -> Region:
        """What Register says of it; raises NO_TRANSPORT, with a way out, for memory that cannot be shared."""

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
    """Copy layers [lo, hi) only. Stated apart from the program, so that its table of operations stays cached."""
    grows: bool = False
    """Whether no row is there yet, so that `Copying.stream` has to be told of layers; of packed copies only."""
    background: bool = False
    """Whether more of the same request is still being computed: nobody waits for this copy, so it yields to compute."""


class Piece(Protocol):
    """Bytes of a packed stream that a message carries or announces."""

    def notice(self, session: int, sequence: int, attempt: int) -> Chunk | Data:
        """That message."""


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
    """A copy that has been started."""

    @property
    def bytes(self) -> int:
        """Bytes that it writes."""

    @property
    def stream(self) -> Stream | None:
        """The stream that it is, where its bytes are packed."""

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination; raises KvprotoError where that can no longer happen."""

    def stop(self) -> Proof | None:
        """Start nothing more; None while writes are under way, then whether any can still arrive."""


# transports

SUMMED = 4 << 20
"""Bytes of the host's memory whose checksums take about a millisecond."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a transport can do, for callers that must not know which one it is."""

    code: TransportCode
    """Its name on the wire, in handles and in Registered."""
    features: tuple[Feature, ...] = ()
    """Features that a session must offer for all of it to work."""
    reads: bool
    """Whether a sink can read a source's memory with it (feature PULL)."""
    death_is_proof: bool
    """Whether the end of the writer's process proves that nothing of it can arrive any more (KVP-END-PROVEN)."""
    batches: bool
    """Whether several moves to several sinks are better started together: they then end together."""
    incremental: bool
    """Whether a request may go in several copies, the first of them while later layers are being computed."""
    first_part_ratio: float = 0.0
    """Start the first part when it has this many times the rows still to be computed; 0: as soon as it is there."""
    poll_interval: float | None
    """Seconds between looks at a copy under way that no descriptor announces; None: no copy outlives
    `start`, or its peer's messages move it on."""
    summed_at_once: int = SUMMED
    """Bytes whose checksums one call takes: as many as take about a millisecond, in which nothing else goes on."""


class Link(Protocol):
    """At the source: what the packed streams to one peer share."""

    kind: ClassVar[CreditKind]
    """What the peer's credit counts."""


class Receiver(Protocol):
    """At the sink: the packed streams of one peer, as its session reads them."""

    kind: ClassVar[CreditKind]
    """What their credit counts."""

    @property
    def busy(self) -> bool:
        """Whether anything is being unpacked."""

    def open(self, sequence: int, attempt: int, packer: Packer) -> None:
        """Expect the stream of a transfer."""

    def finish(self, sequence: int, attempt: int) -> bool:
        """No more bytes come: whether all is unpacked; raises KvprotoError where bytes are missing."""

    def close(self, sequence: int, attempt: int) -> bool:
        """Discard the stream: whether nothing unpacks any more."""


@attrs.frozen
class StreamDelivery:
    """A sink's side of packed bytes from one source (features STAGED and INLINE)."""

    receiver: Receiver
    unpacker: Callable[[CopyProgram], Packer]
    """Makes what scatters one transfer's stream into the pages."""
    close: Callable[[], None] = lambda: None
    """Lets go of what was registered for it; the peer may not write it any more."""


@attrs.frozen
class Exposure:
    """What one peer is told of this process's memory so that it can reach it."""

    handles: Mapping[int, tuple[Handle, ...]]
    """For every region that was passed, by its id."""
    regions: tuple[Region, ...] = ()
    """Further regions that the peer needs: staging slots, or memory to measure the link with."""
    packed: StreamDelivery | None = None
    """Set where the peer packs bytes and does not write the pages."""


@attrs.define(eq=False)
class Connection:
    """A peer's regions as this process reaches them, by region id."""

    mapped: dict[int, Mapped] = attrs.Factory(dict)
    link: Link | None = None
    """Where bytes are packed, as the peer's pages cannot be written directly."""

    def close(self) -> None:
        """Unmap all of them; no copy that uses them may be under way."""
        for mapped in self.mapped.values():
            mapped.close()
        self.mapped.clear()


class Transport(Protocol):
    """Runs copy programs between memory of this process and mapped memory of peers; for use by one thread.

    A transport that derives from it has nothing to prepare, to announce or to release unless it says so.
    """

    capabilities: Capabilities

    def expose(self, memory: Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]) -> Exposure:
        """Let one peer reach these regions; further regions get ids from `next_id` on.

        `program` is any of the rank pair's, for what can be prepared; `runs` estimates the runs of a typical request.
        Raises NO_TRANSPORT for memory that this transport cannot share.
        """

    def connect(
        self, regions: Sequence[Region], used: Collection[int], writes: bool, features: Collection[int]
    ) -> Connection:
        """Reach the peer's regions whose ids are in `used`, to write or else to read them.

        `features` are those of the session. Raises NO_TRANSPORT or TRANSPORT_FAILED with the path
        `regions[i]` of what is wrong; nothing stays mapped then.
        """

    def prepare(self, move: Move) -> None:
        """Warm up tables and kernels of a rank pair, so that its first hand-over does not wait for them."""
        return

    def start(self, moves: Sequence[Move]) -> Copying:
        """Start all moves, or none; several only where the transport `batches`. Raises BUSY while too many run."""

    def checksums(self, program: CopyProgram, memory: Regions, sink: bool) -> dict[int, int]:
        """As `kvproto.copying.execute.checksums`, over memory of this process; the program's copies are over."""

    def begin_checksums(self, program: CopyProgram, memory: Regions, sink: bool) -> Callable[[], dict[int, int]]:
        """Start taking checksums where a device can do so alone; the result waits for them, or takes them now."""
        return partial(self.checksums, program, memory, sink)

    def forget(self, memory: Regions) -> None:
        """These regions are not exposed any more, and no copy uses them: keep nothing of them."""
        return

    def unreachable(self) -> None:
        """Peers say that they cannot reach what was exposed: expose it in another way from now on, if there is one."""
        return

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when a copy has made progress; None: see `Capabilities.poll_interval`."""
        return None

    def acknowledge(self) -> None:
        """Make the descriptor unreadable again, before asking after copies."""
        return

    def close(self) -> None:
        """Release everything; no copy may be under way."""
        return


def connect_each(
    regions: Sequence[Region], used: Collection[int], connect: Callable[[Region, str], Mapped]
) -> Connection:
    """Map every region in `used` by `connect(region, path)`, or none where it raises."""
    made = Connection()
    try:
        for i, region in enumerate(regions):
            if region.id in used:
                made.mapped[region.id] = connect(region, f"regions[{i}]")
    except KvprotoError:
        made.close()
        raise
    return made


@attrs.frozen
class Allocation:
    """An allocation of this process, of which one region may hold many tensors."""

    key: Hashable
    """Equal for all bytes of it."""
    adopt: Callable[[int, int], tuple[Memory, int]] = attrs.field(eq=False)
    """Memory that holds the addresses [begin, end) of it, and where that memory begins."""


@cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class Provider(ABC):
    """What an entry point of `kvproto.transports` names; to import it needs none of the transport's libraries."""

    name: str
    requires: tuple[str, ...] = ()
    """Importable names of the libraries that it needs, packages before their modules."""
    install: str = ""
    """The command that installs them."""

    def missing(self) -> str | None:
        """The first library that is not installed, or None."""
        return next((name for name in self.requires if not _installed(name)), None)

    def allocate(self, length: int, device: int | None, id: int) -> Memory | None:
        """Zeroed memory of a GPU, or of the host where `device` is None; raises LocalError(TRANSPORT_FAILED).

        None where this transport does not allocate memory of that kind.
        """
        return None

    def allocation_of(self, device: tuple[int, int], address: int, length: int) -> Allocation | None:
        """The allocation of this process that holds these bytes, where this transport can share it.

        `device`: type and number, as DLPack states them.
        """
        return None

    def device_of(self, memory: Regions) -> int | None:
        """The GPU that all regions are on, None for the host; raises LocalError(NO_TRANSPORT)."""
        devices = {m.device for m in memory.values()}
        if len(devices) != 1:
            found = ", ".join(f"region {id} on {_place(m)}" for id, m in memory.items()) or "no region"
            wanted, advice = "regions of one GPU, or of the host", "give each rank pools of one GPU"
            raise LocalError(ErrorCode.NO_TRANSPORT, "pool", wanted, found, advice)
        return devices.pop()

    @abstractmethod
    def preference(self, memory: Memory) -> int:
        """How well the transport suits this memory: 0 not at all; the highest is used where nobody chooses."""

    @abstractmethod
    def open(self, memory: Regions, measured: Sequence[Measured] = ()) -> Transport:
        """A transport for a pool of these regions; raises NO_TRANSPORT where it does not suit them.

        `measured`: what `kvproto probe` found on this machine, for choices that depend on it.
        """

    def pager(self, memory: Regions, stream: int) -> Pager | None:
        """What copies between a pool of these regions and memory of the host, where this transport has that.

        `stream`: handle of the stream on which the engine computes, 0 for the default one.
        """
        return None

    # measuring

    floors: tuple[Floor, ...] = ()
    """Rates below which something is wrong."""
    costs: tuple[CostedWay, ...] = ()
    """The ways that plans are costed with, and what they took on one machine."""

    def gpus(self) -> tuple[tuple[str, ...], str | None]:
        """The names of the GPUs that this transport sees, in order, and the version of their driver."""
        return (), None

    def bench(self, memory: int, gpus: int) -> tuple[list[BenchJob], list[Absent]]:
        """How to time each way on a machine of so many GPUs in `memory` bytes; and what cannot be timed."""
        return [], []


def no_handle(path: str, code: TransportCode, wanted: str = "") -> RemoteError:
    """The refusal of a region that has no handle of a transport."""
    advice = "use a transport that both sides have"
    return RemoteError(ErrorCode.NO_TRANSPORT, f"{path}.handles", wanted or code.name, "none", advice)


def _place(memory: Memory) -> str:
    return "the host" if memory.device is None else f"GPU {memory.device}"
