"""Bytes in and out of device memory."""

import numpy as np
import numpy.typing as npt

from kvproto import Pool
from kvproto.transport.cuda.driver import call, current, driver
from kvproto.transport.cuda.memory import DeviceMemory
from tests import pools

Bytes = npt.NDArray[np.uint8]


def on_gpu(pool: Pool) -> DeviceMemory:
    found = pools.memory(pool)
    assert isinstance(found, DeviceMemory)
    return found


def put(memory: DeviceMemory, data: Bytes) -> None:
    """Waits, as the driver's own call returns when it has read pageable memory, and kernels of ours wait for no stream."""
    current(memory.device)
    call(driver.cuMemcpyHtoD(memory.address, data.ctypes.data, data.nbytes), "put")
    call(driver.cuCtxSynchronize(), "put")


def get(memory: DeviceMemory, length: int | None = None) -> Bytes:
    current(memory.device)
    out = np.empty(memory.length if length is None else length, np.uint8)
    call(driver.cuMemcpyDtoH(out.ctypes.data, memory.address, out.nbytes), "get")
    return out
