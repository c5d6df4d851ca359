"""Transport `shm`: numpy strided copies between shared memory of one host; and a pager for pools of the host."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import attrs

from kvproto.copying.execute import checksums, execute
from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import KvprotoError
from kvproto.transport import base
from kvproto.transport.process import Watch
from kvproto.transport.shm.memory import SharedMapping, SharedMemory, buffers, connect, owning_process
from kvproto.wire.enums import Proof
from kvproto.wire.enums import Transport as TransportCode

_buffers = partial(buffers, wanted="memory that SHM can share", kinds=(SharedMemory, SharedMapping))
_PART = 16 << 20
"""Bytes copied between two looks at the clock."""
_CONVERTED = 1 << 20
"""The same of a program that converts, which takes ten times as long."""
_POLL = 0.01
"""Seconds for which one poll continues a copy."""
_Part = tuple[CopyProgram, Mapping[int, memoryview], Mapping[int, memoryview]]


class ShmCopy:
    """A copy that each poll of `done` continues, so that the caller can do something else in between."""

    stream = None

    def __init__(self, parts: Iterable[_Part]) -> None:
        self._parts = deque(parts)
        self.bytes = sum([program.bytes for program, _, _ in self._parts])
        _ = self.done

    @property
    def done(self) -> bool:
        """As `Copying.done`, after copying for some milliseconds."""
        until = time.monotonic() + _POLL
        while self._parts:
            execute(*self._parts.popleft())
            if time.monotonic() > until:
                break
        return not self._parts

    def stop(self) -> Proof:
        self._parts.clear()
        return Proof.PROVEN


class ShmTransport(base.Transport):
    """Runs copy programs between shared memory of one host; short ones are done when `start` returns."""

    capabilities = base.Capabilities(
        code=TransportCode.SHM,
        reads=True,
        converts=True,
        death_is_proof=True,
        batches=True,
        incremental=True,
        poll_interval=0.0,
    )

    def expose(
        self, memory: base.Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]
    ) -> base.Exposure:
        """State each region's file; raises NO_TRANSPORT for memory other than `SharedMemory`."""
        _buffers(memory)
        return base.Exposure({id: region.region.handles for id, region in memory.items()})

    def connect(self, peer: base.PeerRegions) -> base.Connection:
        """Map each region; raises what `kvproto.transport.shm.memory.connect` raises."""
        # opened first: the nonces that are then checked name the process that is watched, however PIDs are used again
        pid = owning_process(region for region in peer.regions if region.id in peer.used) if peer.writes else None
        watch = Watch.of_pid(pid) if pid is not None else None
        try:
            connection = base.connect_each(peer.regions, peer.used, partial(connect, attestation=peer.attestation))
        except KvprotoError:
            if watch is not None:
                watch.close()
            raise
        if watch is not None:
            connection.ended, connection.release = lambda: watch.ended, watch.close
        return connection

    def start(self, moves: Sequence[base.Move]) -> ShmCopy:
        """Start the moves, and poll them once."""
        parts: list[_Part] = []
        for move in moves:
            program = move.program if move.layers is None else move.program.select(layers=range(*move.layers))
            sides = _buffers(move.sources), _buffers(move.sinks)
            most = _CONVERTED if program.operations.converts else _PART
            parts += [(part, *sides) for part in program.slices(most)]
        return ShmCopy(parts)

    def begin_checksums(self, program: CopyProgram, memory: base.Regions, sink: bool) -> Callable[[], dict[int, int]]:
        return partial(checksums, program, _buffers(memory), sink)


@attrs.frozen
class _HostPaging(base.Paging):
    """A copy that was done before it was returned."""

    done: bool = True

    def hold(self, layer: int | None = None) -> None:
        return

    def wait(self) -> None:
        return


class HostPager(base.Pager):
    """`Pager` of an engine on the host, which has no stream."""

    def allocate(self, length: int) -> SharedMemory:
        return SharedMemory(length)

    def save(self, program: CopyProgram, pool: base.Regions, host: base.Regions) -> base.Paging:
        return self.copy(program, pool, host)

    def load(self, program: CopyProgram, host: base.Regions, pool: base.Regions) -> base.Paging:
        return self.copy(program, host, pool)

    def copy(self, program: CopyProgram, sources: base.Regions, sinks: base.Regions) -> base.Paging:
        """Run a program; raises LocalError(NO_TRANSPORT) for memory that is not `SharedMemory`."""
        here, there = (buffers(side, wanted="memory of the host", kinds=(SharedMemory,)) for side in (sources, sinks))
        execute(program, here, there)
        return _HostPaging()

    def close(self) -> None:
        return
