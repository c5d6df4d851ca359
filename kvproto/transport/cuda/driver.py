"""The CUDA driver: calls that raise if they fail, names of devices, and access between them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from cuda.core import Device

from kvproto.errors import DeviceFault, LocalError
from kvproto.wire.enums import ErrorCode

__all__ = [
    "FAULTS", "call", "copy_all", "current", "driver", "enable_peer", "has_nvlink", "ordinal_of", "uuid",
]  # fmt: skip


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
        made = Device(device)
        made.set_current()
    except (RuntimeError, ValueError) as error:  # no driver, no such device
        mine = f"GPU {device} and its driver"
        raise LocalError(ErrorCode.NO_TRANSPORT, "", mine, str(error), "use transport SHM or NIXL") from error
    return made


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
            found = driver.cuDeviceGetP2PAttribute(kind.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, device, peer)
            reach.append(bool(call(found, "link")))
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
