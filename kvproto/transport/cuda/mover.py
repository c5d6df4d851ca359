"""Transport `cuda` as a node uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kvproto.copying.program import CopyProgram
from kvproto.errors import LocalError
from kvproto.transport.base import Mapped, Memory, Move
from kvproto.transport.cuda.copier import Copier, Copy, Job, Prepared
from kvproto.transport.cuda.driver import has_nvlink
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.memory import Mapped as DeviceMapped
from kvproto.transport.cuda.memory import connect as connect_device
from kvproto.transport.cuda.once import Once
from kvproto.transport.cuda.table import LONG
from kvproto.wire.enums import ErrorCode, Transport
from kvproto.wire.messages import Region

__all__ = ["DeviceMover"]


class DeviceMover:
    """Runs copy programs with one GPU; tables of operations are uploaded once for a rank pair."""

    transport = Transport.CUDA
    together = True
    in_parts = True

    def __init__(self, device: int = 0, blocks: int | None = None, long: int | None = None, beside: int = 16) -> None:
        """As of `Copier`; beside: thread blocks of launches while what comes after them is being computed.

        For `long`, see `kvproto.calibration.measure.choice`, which asks a file of `kvproto probe`.
        """
        long = LONG if long is None else long
        if beside < 1:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "beside", "1 at least", str(beside))
        self.copier = Copier(device, blocks, _LAUNCHES, long=long)
        self._beside = Copier(device, min(beside, self.copier.blocks), _LAUNCHES, long=long)
        """Of its own, so that what somebody waits for is not behind what waits for layers to be computed."""
        self._tables = Once[Prepared]()
        self.late = _LATE if has_nvlink(device) else 1.0

    def connect(self, region: Region, path: str) -> DeviceMapped:
        """As `kvproto.transport.cuda.memory.connect`."""
        return connect_device(region, path, self.copier.device)

    def prepare(self, move: Move) -> None:
        """Upload the table of operations, load the kernels that it asks for."""
        self._prepared(move)

    def start(self, moves: Sequence[Move]) -> Copy:
        """One launch for all; raises POOL_MOVED, OUT_OF_REGION or BUSY before any byte moves, or DeviceFault."""
        self.copier.check()
        jobs = [Job(self._prepared(m), m.program.maps, m.layers) for m in moves]
        copier = self._beside if all(m.beside for m in moves) else self.copier
        return copier.submit(jobs, sorted({event for m in moves for event in m.after}))

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        """As `kvproto.copying.execute.checksums`, on the GPU."""
        return self.copier.checksums(program, _addresses(memory), sink)

    def close(self) -> None:
        """Forget the tables."""
        self._tables.clear()

    def _prepared(self, move: Move) -> Prepared:
        sources, sinks = _addresses(move.sources), _addresses(move.sinks)
        addresses = (*sorted(sources.items()), *sorted(sinks.items()))
        make = partial(self.copier.prepare, move.program, sources, sinks)
        return self._tables.get(move.program.ops, addresses, make)


_LATE = 16.0
"""NVLink moves rows 80 times faster than a prefill of Llama-3-8B computes them; leaves room for several at once."""
_LAUNCHES = 32
"""At once: an engine that runs ahead of its GPU hands over the layers of a chunk before the first is computed."""


def _addresses(side: Mapping[int, Memory | Mapped]) -> dict[int, int]:
    found = {}
    for id, memory in side.items():
        assert isinstance(memory, DeviceMemory | DeviceMapped)
        if isinstance(memory, DeviceMemory):
            memory.check()
        found[id] = memory.address
    return found
