"""What copiers are given and return: prepared tables, jobs, and copies that are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt
from cuda import core
from cuda.core import Event

from kvproto.copying.program import RowMap
from kvproto.transport.base import Copying
from kvproto.transport.cuda import launch as launches
from kvproto.transport.cuda import table as tables
from kvproto.transport.cuda.direct import Mark, is_done
from kvproto.transport.cuda.driver import call, driver
from kvproto.wire.enums import Proof

if TYPE_CHECKING:
    from kvproto.transport.cuda.copier import Copier

__all__ = ["Copy", "DeviceBytes", "Job", "LaunchBuffers", "Prepared", "Series"]


class DeviceBytes:
    """`size` bytes of device memory, freed with this object; raises LocalError(TRANSPORT_FAILED)."""

    def __init__(self, size: int) -> None:
        self.address, self.size = int(call(driver.cuMemAlloc(size), f"{size} bytes")), size

    def __del__(self) -> None:
        driver.cuMemFree(self.address)


@attrs.frozen(eq=False)
class Prepared:
    """A rank pair's table of operations on the device; valid while both sides' regions stay mapped."""

    table: tables.Table
    memory: DeviceBytes


@attrs.frozen
class Job:
    """A request's maps for one rank pair; only layers [lo, hi) if given."""

    prepared: Prepared
    maps: Sequence[RowMap]
    layers: tuple[int, int] | None = None


@attrs.define(eq=False)
class LaunchBuffers:
    """Memory of one launch: pinned memory for an image, its place on the device, and expanded rows."""

    host: core.Buffer
    view: npt.NDArray[np.uint8]
    image: DeviceBytes
    rows: DeviceBytes
    event: Event | Mark
    """The event after which they may be used again."""
    ends: list[Mark] = attrs.field(factory=list)
    """Events of the ends of chunks, recorded in turn."""
    chunks: int = 0

    def holds(self, image: int, rows: int) -> bool:
        """Whether an image and rows of these sizes in bytes fit."""
        return self.view.size >= image and self.rows.size >= rows


@attrs.frozen
class Copy(Copying):
    """A launch that is under way; also what a packer returns."""

    event: Event | Mark
    bytes: int
    began: Event | Mark | None = None
    """The event before the upload, if the copier is timed."""
    jobs: Sequence[Job] = attrs.field(default=(), repr=False)
    """Held because the launch reads their tables."""
    stream: None = None

    @property
    def seconds(self) -> float:
        """Device time in seconds from the upload to the last byte; the copier must be timed."""
        assert isinstance(self.began, Event)
        assert isinstance(self.event, Event)
        return float(self.event - self.began) / 1000

    @property
    def done(self) -> bool:
        """As `Copying.done`; raises DeviceFault, whatever caused it."""
        return is_done(self.event.handle)

    def ready(self) -> bool:
        """As `Ready.ready`."""
        return self.done

    def stop(self) -> Proof | None:
        """PROVEN when the launch is done, as it cannot be stopped; raises DeviceFault."""
        return Proof.PROVEN if self.done else None

    def wait(self) -> None:
        """Block until done; raises DeviceFault."""
        call(driver.cuEventSynchronize(self.event.handle), "copy")


@attrs.define(eq=False)
class Series:
    """Copies of one upload, of which the first ones have been started."""

    copier: Copier
    jobs: Sequence[Job]
    made: launches.Launch
    buffers: LaunchBuffers
    copies: list[Copy] = attrs.field(factory=list)
    held: bool = True
    """Whether other launches may not use the buffers yet."""

    def go_on(self, count: int) -> None:
        """Start copies until the first `count` of them have been started."""
        if count > len(self.copies):
            self.copier.go_on(self, min(count, len(self.jobs)))

    def finish(self) -> Copy:
        """Start all copies, and return the last one."""
        self.go_on(len(self.jobs))
        return self.copies[-1]
