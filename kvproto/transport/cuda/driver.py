"""The driver: calls that fail raise, devices have names, processes are told apart."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver
from cuda.core import Device

from kvproto.errors import LocalError
from kvproto.wire.enums import ErrorCode

__all__ = ["call", "current", "driver", "enable_peer", "ordinal_of", "uuid"]


def call(result: tuple[Any, ...], what: str, advice: str = "") -> Any:
    """The values of a driver call; raises LocalError(TRANSPORT_FAILED) with the driver's words."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        said = driver.cuGetErrorString(code)[1]
        text = said.decode() if said else str(code)
        raise LocalError(ErrorCode.TRANSPORT_FAILED, "", what, f"{code.name}: {text}", advice)
    return values[0] if len(values) == 1 else tuple(values)


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
    """Which of the devices that this process sees has that name."""
    for device in range(call(driver.cuDeviceGetCount(), "devices")):
        if uuid(device) == name:
            return device
    return None


_peers: set[tuple[int, int]] = set()


def enable_peer(device: int, owner: int) -> bool:
    """Let kernels on `device` touch memory of `owner`; False where the hardware cannot."""
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
