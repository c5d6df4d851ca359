"""What copiers are given and return: prepared tables, jobs, copies that are under way."""

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

__all__ = ["Bytes", "Copy", "Job", "LaunchBuffers", "Prepared", "Series"]


class Bytes:
    """Device memory that is freed with this object."""

    def __init__(self, size: int) -> None:
        self.address, self.size = int(call(driver.cuMemAlloc(size), f"{size} bytes")), size

    def __del__(self) -> None:
        driver.cuMemFree(self.address)


@attrs.frozen(eq=False)
class Prepared:
    """A rank pair's table of operations on the device; valid while both sides' regions stay mapped."""

    table: tables.Table
    memory: Bytes


@attrs.frozen
class Job:
    """A request's maps for one rank pair; only layers [lo, hi) where given."""

    prepared: Prepared
    maps: Sequence[RowMap]
    layers: tuple[int, int] | None = None


@attrs.define(eq=False)
class LaunchBuffers:
    """Memory of one launch: pinned memory where an image is written, its place on the device, and expanded rows."""

    host: core.Buffer
    view: npt.NDArray[np.uint8]
    image: Bytes
    rows: Bytes
    event: Event | Mark
    """After which they may be used again."""
    ends: list[Mark] = attrs.field(factory=list)
    """Of chunks, recorded in turn."""
    chunks: int = 0

    def holds(self, image: int, rows: int) -> bool:
        """Whether an image and rows of so many bytes fit."""
        return self.view.size >= image and self.rows.size >= rows


@attrs.frozen
class Copy(Copying):
    """A launch that is under way; also what a packer returns."""

    event: Event | Mark
    bytes: int
    began: Event | Mark | None = None
    """Before the upload, where the copier times."""
    jobs: Sequence[Job] = attrs.field(default=(), repr=False)
    """Held because the launch reads their tables."""
    stream: None = None

    @property
    def seconds(self) -> float:
        """Device time from the upload to the last byte, where the copier times."""
        assert isinstance(self.began, Event)
        assert isinstance(self.event, Event)
        return float(self.event - self.began) / 1000

    @property
    def done(self) -> bool:
        """As `Copying.done`; raises DeviceFault, whoever caused it."""
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
    """Copies of one upload, in their order, as far as they have been started."""

    copier: Copier
    jobs: Sequence[Job]
    made: launches.Launch
    buffers: LaunchBuffers
    copies: list[Copy] = attrs.field(factory=list)
    held: bool = True
    """Whether the buffers are kept from other launches."""

    def go_on(self, count: int) -> None:
        """Let the first `count` have been started."""
        if count > len(self.copies):
            self.copier.go_on(self, min(count, len(self.jobs)))

    def finish(self) -> Copy:
        """The last, once all have been started."""
        self.go_on(len(self.jobs))
        return self.copies[-1]
