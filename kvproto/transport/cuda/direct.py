"""Short calls of the CUDA driver, made without releasing the interpreter's lock.

cuda-python releases the lock around every call. Alongside a thread that computes in Python each release may cost
`sys.getswitchinterval()`, 5 ms, for a call that takes a microsecond, and the copy of one request makes dozens. Through
ctypes.PyDLL the lock is kept, as `kvproto.net.libzmq` keeps it for libzmq. Calls that wait for the device are left to
cuda-python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from kvproto.transport.cuda.driver import call, driver

__all__ = ["Mark", "attribute", "download", "enter", "follow", "idle", "is_done", "launch", "upload"]

_POINTER, _NUMBER, _WORD, _SIZE = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
_ARGUMENTS = {
    "cuCtxSetCurrent": (_POINTER,),
    "cuEventCreate": (_POINTER, _NUMBER),
    "cuEventDestroy_v2": (_POINTER,),
    "cuEventQuery": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuLaunchKernel": (_POINTER, *[_NUMBER] * 7, _POINTER, _POINTER, _POINTER),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _WORD, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_WORD, _POINTER, _SIZE, _POINTER),
    "cuPointerGetAttribute": (_POINTER, _NUMBER, _WORD),
    "cuStreamQuery": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _NUMBER),
}
_UNTIMED = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
_NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY.value


@cache
def _function(name: str) -> Callable[..., int]:
    found = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    found.argtypes = _ARGUMENTS[name]
    return found  # type: ignore[no-any-return]


def _run(name: str, *arguments: object) -> None:
    code = _function(name)(*arguments)
    if code:
        call((driver.CUresult(code),), name)


def _finished(name: str, handle: int) -> bool:
    code = _function(name)(handle)
    if code and code != _NOT_READY:
        call((driver.CUresult(code),), name)
    return not code


def enter(context: int) -> None:
    """Make a context current in this thread."""
    _run("cuCtxSetCurrent", context)


def launch(function: int, grid: tuple[int, int], threads: int, stream: int, parameters: int) -> None:
    """Launch a kernel; `parameters` is the address of an array of pointers to its parameters."""
    _run("cuLaunchKernel", function, *grid, 1, threads, 1, 1, 0, stream, parameters, None)


def upload(address: int, host: int, size: int, stream: int) -> None:
    """Copy `size` bytes from the host to the device in the stream's order."""
    _run("cuMemcpyHtoDAsync_v2", address, host, size, stream)


def download(host: int, address: int, size: int, stream: int) -> None:
    """Copy `size` bytes from the device to pinned memory of the host in the stream's order."""
    _run("cuMemcpyDtoHAsync_v2", host, address, size, stream)


def follow(stream: int, event: int) -> None:
    """Let what is submitted to the stream from now on wait for the event."""
    _run("cuStreamWaitEvent", stream, event, 0)


def idle(stream: int) -> bool:
    """Whether the stream has nothing left to do; raises DeviceFault."""
    return _finished("cuStreamQuery", stream)


def is_done(event: int) -> bool:
    """Whether the device has reached an event, given by its handle; raises DeviceFault."""
    return _finished("cuEventQuery", int(event))


def attribute(which: int, address: int) -> tuple[int, int]:
    """The driver's code (0: success) and the value of a pointer attribute of at most 64 bits."""
    value = ctypes.c_uint64()
    return _function("cuPointerGetAttribute")(ctypes.addressof(value), which, address), value.value


class Mark:
    """An event without timing, recorded in a stream (its handle) when made."""

    def __init__(self, stream: int) -> None:
        made = ctypes.c_void_p()
        _run("cuEventCreate", ctypes.addressof(made), _UNTIMED)
        self.handle = int(made.value or 0)
        self.record(stream)

    def record(self, stream: int) -> None:
        """Move it to where the stream stands now."""
        _run("cuEventRecord", self.handle, stream)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            _function("cuEventDestroy_v2")(self.handle)
