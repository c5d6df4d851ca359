"""A pager for pools in memory of the host, whose copies are done when they have been started."""

from __future__ import annotations

import attrs

from kvproto.copying.execute import execute
from kvproto.copying.program import CopyProgram
from kvproto.transport.base import Regions
from kvproto.transport.paging import Pager, Paging
from kvproto.transport.shm.memory import SharedMemory, buffers

__all__ = ["HostPager"]


@attrs.frozen
class _Done(Paging):
    bytes: int

    @property
    def done(self) -> bool:
        return True

    def hold(self, layer: int | None = None) -> None:
        return

    def wait(self) -> None:
        return


class HostPager(Pager):
    """`Pager` of an engine on the host, which has no stream."""

    def allocate(self, length: int) -> SharedMemory:
        return SharedMemory(length)

    def save(self, program: CopyProgram, pool: Regions, host: Regions) -> Paging:
        return self.copy(program, pool, host)

    def load(self, program: CopyProgram, host: Regions, pool: Regions) -> Paging:
        return self.copy(program, host, pool)

    def copy(self, program: CopyProgram, sources: Regions, sinks: Regions) -> Paging:
        """Run a program; raises LocalError(NO_TRANSPORT) for memory that is not `SharedMemory`."""
        here, there = (buffers(side, "memory of the host", SharedMemory) for side in (sources, sinks))
        return _Done(execute(program, here, there))

    def close(self) -> None:
        return
