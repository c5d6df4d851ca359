"""Transport `cuda`: the copy kernel of one GPU, over memory that GPUs of one host map."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import LocalError, bad
from kvproto.transport import base
from kvproto.transport.cuda.copier import Copier, DeviceCopy
from kvproto.transport.cuda.driver import has_nvlink
from kvproto.transport.cuda.kernel import LONG, SUMMED, CopyJob, PerProgramCache, Prepared
from kvproto.transport.cuda.memory import DeviceMemory, MappedDeviceMemory
from kvproto.transport.cuda.memory import connect as connect_device
from kvproto.wire.enums import ErrorCode
from kvproto.wire.enums import Transport as TransportCode


class CudaTransport(base.Transport):
    """Runs copy programs on one GPU; tables of operations are uploaded once for a rank pair.

    `blocks` and `long` are those of `Copier`, and `kvproto probe` measures `long`. `background` is the number of thread
    blocks of a launch while later layers are being computed. Raises LocalError: OUT_OF_RANGE, NO_TRANSPORT.
    """

    def __init__(
        self, device: int = 0, blocks: int | None = None, long: int | None = None, background: int = 16
    ) -> None:
        long = LONG if long is None else long
        if background < 1:
            raise bad("background", "at least 1", background)
        self.copier = Copier(device, blocks, _LAUNCHES, long=long)
        self._background = Copier(device, min(background, self.copier.blocks), _LAUNCHES, long=long)
        """A separate copier, so that urgent copies do not queue behind background ones."""
        self._tables = PerProgramCache[Prepared]()
        self.capabilities = base.Capabilities(
            code=TransportCode.CUDA,
            reads=True,
            converts=True,
            death_is_proof=True,
            batches=True,
            incremental=True,
            first_part_ratio=_NVLINK_RATIO if has_nvlink(device) else 1.0,
            poll_interval=_POLL,
            summed_at_once=SUMMED,
        )

    def expose(
        self, memory: base.Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]
    ) -> base.Exposure:
        """Make handles of device memory; raises NO_TRANSPORT for an allocation that cannot be shared, POOL_MOVED."""
        _addresses(memory)
        return base.Exposure({id: region.region.handles for id, region in memory.items()})

    def connect(self, peer: base.PeerRegions) -> base.Connection:
        """Map each region; raises what `kvproto.transport.cuda.memory.connect` raises."""
        connect = partial(connect_device, device=self.copier.device, attestation=peer.attestation)
        return base.connect_each(peer.regions, peer.used, connect)

    def prepare(self, move: base.Move) -> None:
        """Upload the table of operations, and load the kernels that it needs."""
        self._prepared(move)

    def start(self, moves: Sequence[base.Move]) -> DeviceCopy:
        """Start one launch for all; raises POOL_MOVED, OUT_OF_REGION or BUSY before a byte moves, or DeviceFault."""
        self.copier.check()
        jobs = [CopyJob(self._prepared(m), m.program.maps, m.layers) for m in moves]
        copier = self._background if all(m.background for m in moves) else self.copier
        return copier.submit(jobs, sorted({event for m in moves for event in m.after}))

    def begin_checksums(self, program: CopyProgram, memory: base.Regions, sink: bool) -> Callable[[], dict[int, int]]:
        return self.copier.begin_checksums(program, _addresses(memory), sink)

    def forget(self, memory: base.Regions) -> None:
        self.copier.settle()
        for region in memory.values():
            if isinstance(region, DeviceMemory):
                region.forget()

    def close(self) -> None:
        self.copier.settle()
        self._tables.clear()

    def _prepared(self, move: base.Move) -> Prepared:
        sources, sinks = _addresses(move.sources), _addresses(move.sinks)
        addresses = (*sorted(sources.items()), *sorted(sinks.items()))
        make = partial(self.copier.prepare, move.program, sources, sinks)
        return self._tables.get(move.program.ops, addresses, make)


_NVLINK_RATIO = 16.0
"""NVLink moves rows 80 times as fast as a prefill of Llama-3-8B computes them; this leaves room for several sinks."""
_LAUNCHES = 32
"""Launches at once: an engine that runs ahead of its GPU submits all layers of a chunk before one is computed."""
_POLL = 20e-6
"""Seconds between queries of an event: about the time of a small launch."""


def _addresses(side: Mapping[int, base.Memory | base.Mapped]) -> dict[int, int]:
    addresses = {}
    for id, memory in side.items():
        if not isinstance(memory, DeviceMemory | MappedDeviceMemory):
            kind, advice = type(memory).__name__, "allocate or adopt it with kvproto.transport.memory"
            raise LocalError(ErrorCode.NO_TRANSPORT, f"regions[{id}]", "memory of a GPU", kind, advice)
        if isinstance(memory, DeviceMemory):
            memory.check()
        addresses[id] = memory.address
    return addresses
