"""A pager between a GPU's pool and pinned host memory, whose kernel copies while the engine computes."""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from kvproto.copying.program import CopyProgram
from kvproto.errors import KvprotoError
from kvproto.transport.base import Memory, Pager, Paging, Regions
from kvproto.transport.cuda.copier import Copier, Series
from kvproto.transport.cuda.driver import call, current, driver
from kvproto.transport.cuda.kernel import LONG, CopyJob, PerProgramCache, Prepared
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.memory import allocate

_BLOCKS = 8
"""Thread blocks of a launch in each direction: enough to fill the bus, and few of the GPU's."""
_PART = 8 << 20
"""Least bytes of the layers that share an event: a sixth of a millisecond on the bus."""
_AHEAD = 3
"""Intervals of layers that are started with the one that somebody waits for."""
_LONG = 16 << 10
"""Bytes from which the copy engine loads a run, while the GPU computes; the kernel saves, at less cost to the host."""
_LAUNCHES = 16
"""Copies that may be under way at once in one direction."""


@attrs.frozen
class _LayerCopies(Paging):
    """Copies of ascending intervals of layers; the first has been started.

    Starting one takes the host 0.2 ms if the copy engine copies each run. So an engine that waits layer by layer goes
    on as soon as the first is on its way, and starts others while its GPU computes the layers before them.
    """

    first: Series
    rest: Series | None
    """Of all intervals but the first."""
    lasts: Sequence[int]
    """The last layer of each interval."""
    stream: int

    @property
    def done(self) -> bool:
        if self.rest is None:
            return self.first.finish().done
        if len(self.rest.copies) < len(self.rest.jobs):
            if (self.rest.copies or self.first.copies)[-1].done:  # no layer is waited for, or not yet
                self.rest.finish()
            return False
        return self.rest.finish().done

    def hold(self, layer: int | None = None) -> None:
        at = len(self.lasts) - 1 if layer is None else min(bisect_left(self.lasts, layer), len(self.lasts) - 1)
        copy = self.first.copies[0]
        if at and self.rest is not None:
            self.rest.go_on(at - 1 + _AHEAD)
            copy = self.rest.copies[at - 1]
        call(driver.cuStreamWaitEvent(self.stream, copy.event.handle, 0), "copy's event")

    def wait(self) -> None:
        (self.first if self.rest is None else self.rest).finish().wait()


class _Direction:
    """One direction: its copier, and the tables of rank pairs."""

    def __init__(self, device: int, blocks: int, long: int) -> None:
        self.copier = Copier(device, blocks, _LAUNCHES, long=long)
        self._tables = PerProgramCache[Prepared]()
        self._flying: deque[Series] = deque()

    def start(
        self, program: CopyProgram, sides: Sequence[Mapping[int, int]], cuts: Sequence[tuple[int, int]], after: int
    ) -> tuple[Series, Series | None]:
        """A copy of each interval of layers: the first under way, others prepared, after an earlier one if too many."""
        table = self._tables.get(program.ops, (), lambda: self.copier.prepare(program, *sides))
        while self._flying and (len(self._flying) > _LAUNCHES - 2 or self._flying[0].finish().done):
            self._flying.popleft().finish().wait()
        jobs = [CopyJob(table, program.maps, cut) for cut in cuts]
        first = self.copier.series(jobs[:1], [after])
        first.go_on(1)
        self._flying.append(first)
        if len(jobs) == 1:
            return first, None
        try:
            rest = self.copier.series(jobs[1:])  # after the first, in stream order; prepared while that moves
        except KvprotoError:
            first.finish().wait()
            raise
        self._flying.append(rest)
        return first, rest

    def close(self) -> None:
        """Wait for what was started, and free the tables."""
        while self._flying:
            self._flying.popleft().finish().wait()
        self._tables.clear()


class CudaPager(Pager):
    """`Pager` between regions of one GPU and memory that it allocates; `stream` is a handle of the engine's stream."""

    def __init__(self, device: int, stream: int = 0, blocks: int = _BLOCKS, long: int = _LONG) -> None:
        current(device)
        self.device, self.stream = device, stream
        self._out, self._in = _Direction(device, blocks, LONG), _Direction(device, blocks, long)
        self._pinned: list[Memory] = []
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._event = call(driver.cuEventCreate(flags.value), "event")

    def allocate(self, length: int) -> Memory:
        current(self.device)
        memory = allocate(length)
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        call(driver.cuMemHostRegister(_address(memory), length, flags), f"{length} bytes pinned", "keep fewer pages")
        self._pinned.append(memory)
        return memory

    def save(self, program: CopyProgram, pool: Regions, host: Regions) -> Paging:
        return self._copy(self._out, program, pool, host, [(0, 1 << 31)])

    def load(self, program: CopyProgram, host: Regions, pool: Regions) -> Paging:
        return self._copy(self._in, program, host, pool, _cuts(program))

    def _copy(
        self, way: _Direction, program: CopyProgram, sources: Regions, sinks: Regions, cuts: Sequence[tuple[int, int]]
    ) -> Paging:
        current(self.device)
        call(driver.cuEventRecord(self._event, self.stream), "engine's stream")
        sides = [{id: _address(memory) for id, memory in side.items()} for side in (sources, sinks)]
        first, rest = way.start(program, sides, cuts, int(self._event))
        return _LayerCopies(first, rest, [hi - 1 for _, hi in cuts], self.stream)

    def close(self) -> None:
        current(self.device)
        self._out.close()
        self._in.close()
        for memory in self._pinned:
            call(driver.cuMemHostUnregister(_address(memory)), "unpin")
        self._pinned = []


def _address(memory: Memory) -> int:
    """The address at which a GPU finds it; raises POOL_MOVED."""
    if isinstance(memory, DeviceMemory):
        memory.check()
        return memory.address
    return int(np.from_dlpack(memory).ctypes.data)


def _cuts(program: CopyProgram) -> list[tuple[int, int]]:
    """Intervals of layers, about `_PART` bytes each."""
    layers = np.unique(program.ops["layer"])
    intervals = np.array_split(layers, max(1, min(len(layers), program.bytes // _PART)))
    return [(int(interval[0]), int(interval[-1]) + 1) for interval in intervals]
