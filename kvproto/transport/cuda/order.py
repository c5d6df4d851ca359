"""Orders a framework's work and copies by events of the device, so that the host waits for nothing."""

from typing import Any

from kvproto.transport.base import Memory
from kvproto.transport.cuda.copier import Copier, DeviceCopy
from kvproto.transport.cuda.driver import call, driver

_NONE_NEEDED = -1
"""The stream that a consumer which orders its own work passes to DLPack."""


class After:
    """Memory for `from_dlpack`, whose framework's stream waits for a copy, or the host if it names no stream."""

    def __init__(self, memory: Memory, copy: DeviceCopy) -> None:
        self._memory, self._copy = memory, copy

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if stream is None:
            self._copy.wait()
        elif int(stream) != _NONE_NEEDED:
            call(driver.cuStreamWaitEvent(int(stream), self._copy.event.handle, 0), "copy's event")
        return self._memory.__dlpack__(stream=_NONE_NEEDED, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.__dlpack_device__()


def follow(copier: Copier, array: Any) -> None:
    """Make later copies wait for the work that makes a torch or JAX array, by its `__dlpack__`; nothing is shared."""
    array.__dlpack__(stream=int(copier.stream.handle))
