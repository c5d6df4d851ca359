"""The CUDA driver: calls that raise if they fail, names of devices, and access between them.

cuda-python releases the interpreter's lock around every call. Alongside a thread that computes in Python each release
may cost `sys.getswitchinterval()`, 5 ms, for a call that takes a microsecond, and the copy of one request makes dozens.
So the short calls of a copy go through ctypes.PyDLL, which keeps the lock, as `kvproto.net.libzmq` keeps it for libzmq.
Calls that wait for the device are left to cuda-python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as driver
from cuda.core import Device

from kvproto.errors import DeviceFault, LocalError
from kvproto.wire.enums import ErrorCode

_R = driver.CUresult
_FAULTS = """
ASSERT CONTAINED CONTEXT_IS_DESTROYED DEINITIALIZED ECC_UNCORRECTABLE EXTERNAL_DEVICE HARDWARE_STACK_ERROR
ILLEGAL_ADDRESS ILLEGAL_INSTRUCTION INVALID_ADDRESS_SPACE INVALID_PC LAUNCH_FAILED LAUNCH_TIMEOUT MISALIGNED_ADDRESS
MPS_CLIENT_TERMINATED NVLINK_UNCORRECTABLE TENSOR_MEMORY_LEAK
"""
FAULTS = frozenset(getattr(_R, f"CUDA_ERROR_{name}").value for name in _FAULTS.split())
"""Codes after which a context is lost for the whole process."""


def call(result: tuple[Any, ...], what: str, advice: str = "") -> Any:
    """The results of a driver call; raises LocalError(TRANSPORT_FAILED) with the driver's words, or DeviceFault."""
    code, *values = result
    if code != _R.CUDA_SUCCESS:
        said = driver.cuGetErrorString(code)[1]
        text = f"{code.name}: {said.decode() if said else code}"
        if code.value in FAULTS:
            raise DeviceFault(LocalError(ErrorCode.TRANSPORT_FAILED, "", what, text, "restart this process"))
        raise LocalError(ErrorCode.TRANSPORT_FAILED, "", what, text, advice)
    return values[0] if len(values) == 1 else tuple(values)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: sources are read in the stream's order, and multiprocessors are left to others."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_ATTRIBUTES, _FIRST = _Attributes(1, (0, 0, 0, 0), 1), ctypes.c_size_t(0)


@cache
def _batch() -> tuple[Any, tuple[Any, ...]]:
    """The driver's function, and the last arguments of its older form; cuda-python would take 1 us for each number."""
    library = ctypes.CDLL("libcuda.so.1")
    newer = getattr(library, "cuMemcpyBatchAsync_v2", None)
    return (newer, ()) if newer else (library.cuMemcpyBatchAsync, (ctypes.byref(ctypes.c_size_t(0)),))


def copy_all(runs: npt.NDArray[np.uint64], stream: int) -> None:
    """Copies by the copy engine in a stream's order; `runs` [3, n] are sources, sinks and lengths in bytes."""
    function, rest = _batch()
    sources, sinks, lengths = (ctypes.c_void_p(row.ctypes.data) for row in runs)
    how = ctypes.c_size_t(runs.shape[1]), ctypes.byref(_ATTRIBUTES), ctypes.byref(_FIRST), ctypes.c_size_t(1)
    call((_R(function(sinks, sources, lengths, *how, *rest, ctypes.c_void_p(stream))),), "copy")


def current(device: int) -> Device:
    """Make the device's primary context, which frameworks use too, current in this thread; raises NO_TRANSPORT."""
    try:
        gpu = Device(device)
        gpu.set_current()
    except (RuntimeError, ValueError) as error:  # no driver, no such device
        mine = f"GPU {device} and its driver"
        raise LocalError(ErrorCode.NO_TRANSPORT, "", mine, str(error), "use transport SHM or NIXL") from error
    return gpu


def uuid(device: int) -> str:
    """The device's name on the wire, `GPU-...`."""
    return f"GPU-{Device(device).uuid.removeprefix('GPU-')}"


def ordinal_of(name: str) -> int | None:
    """The device of that name that this process sees, or None."""
    return next((i for i in range(call(driver.cuDeviceGetCount(), "devices")) if uuid(i) == name), None)


def has_nvlink(device: int) -> bool:
    """Whether this process sees peers, each over a link with atomics, which PCIe does not have."""
    kind, reach = driver.CUdevice_P2PAttribute, []
    for peer in range(call(driver.cuDeviceGetCount(), "devices")):
        if peer != device and Device(device).can_access_peer(peer):
            atomics = kind.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
            reach.append(bool(call(driver.cuDeviceGetP2PAttribute(atomics, device, peer), "link")))
    return bool(reach) and all(reach)


_peers: set[tuple[int, int]] = set()


def enable_peer(device: int, owner: int) -> bool:
    """Let kernels on `device` access memory of `owner`; False if the hardware cannot."""
    if device == owner or (device, owner) in _peers:
        return True
    if not Device(device).can_access_peer(owner):
        return False
    current(owner)
    theirs = call(driver.cuCtxGetCurrent(), "context")
    current(device)
    code = driver.cuCtxEnablePeerAccess(theirs, 0)[0]
    if code != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        call((code,), "peer access")
    _peers.add((device, owner))
    return True


# short calls, made without releasing the interpreter's lock

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
    function: Callable[..., int] = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    function.argtypes = _ARGUMENTS[name]  # type: ignore[attr-defined]
    return function


def run(name: str, *arguments: object) -> None:
    """Call a function of `_ARGUMENTS`; raises as `call`."""
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
    run("cuCtxSetCurrent", context)


def is_idle(stream: int) -> bool:
    """Whether the stream has nothing left to do; raises DeviceFault."""
    return _finished("cuStreamQuery", stream)


def is_done(event: int) -> bool:
    """Whether the device has reached an event, given by its handle; raises DeviceFault."""
    return _finished("cuEventQuery", int(event))


def pointer_attribute(which: driver.CUpointer_attribute, address: int) -> int:
    """An attribute of an address, without cuda-python, which gets one wrong; 0 if there is none; raises DeviceFault."""
    value = ctypes.c_uint64()
    code = _function("cuPointerGetAttribute")(ctypes.addressof(value), which.value, address)
    if code in FAULTS:  # unlike freed memory, which the driver does not know
        call((driver.CUresult(code),), "pointer attribute")
    return 0 if code else value.value


class Mark:
    """An event without timing, recorded in a stream (its handle) when it is constructed."""

    def __init__(self, stream: int) -> None:
        event = ctypes.c_void_p()
        run("cuEventCreate", ctypes.addressof(event), _UNTIMED)
        self.handle = int(event.value or 0)
        self.record(stream)

    def record(self, stream: int) -> None:
        """Record it again, behind all work that the stream has now."""
        run("cuEventRecord", self.handle, stream)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            _function("cuEventDestroy_v2")(self.handle)
