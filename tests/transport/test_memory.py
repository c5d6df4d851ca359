"""Pools are allocated or adopted by the transports themselves, in as few regions as allocations allow."""

from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import LocalError
from kvproto.transport import find
from kvproto.transport.base import Allocation, Memory
from kvproto.transport.memory import adopt_all, allocate
from kvproto.transport.shm.memory import SharedMemory
from kvproto.wire.enums import ErrorCode, MemoryKind
from tests.errors import raises


@attrs.frozen
class Tensor:
    """A place in memory."""

    address: int
    length: int
    device: tuple[int, int] = (1, 0)
    path: str = "tensors"


def refused(*tensors: Any) -> LocalError:
    with raises(LocalError, code=ErrorCode.NO_TRANSPORT, path="tensors") as caught:
        adopt_all(dict(enumerate(tensors)))
    return caught.value


def test_tensors_of_one_allocation_share_a_region() -> None:
    one, other = SharedMemory(4096), SharedMemory(64)
    places = {"k": (one, 0), "v": (one, 2048), "state": (other, 16), "scales": (one, 4000)}
    memories, homes = adopt_all({name: Tensor(m.address + at, 48) for name, (m, at) in places.items()})
    assert list(memories.values()) == [one, other]
    for name, (memory, _) in places.items():
        region, address = homes[name]
        assert (memories[region], address) == (memory, memory.address)


def test_a_region_of_a_foreign_allocation_spans_its_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def adopt(begin: int, end: int) -> tuple[Memory, int]:
        asked.append((begin, end))
        return SharedMemory(end - begin), begin

    monkeypatch.setattr(find("shm"), "allocation_of", lambda device, at, length: Allocation(at // 1000, adopt))
    memories, homes = adopt_all({n: Tensor(n, 50) for n in (5300, 5100, 5900, 7000)})
    assert asked == [(5100, 5950), (7000, 7050)]
    assert homes == {5300: (0, 5100), 5100: (0, 5100), 5900: (0, 5100), 7000: (1, 7000)}
    assert [m.length for m in memories.values()] == [850, 50]


def test_private_memory_of_the_host_is_refused_with_what_to_do() -> None:
    array = np.zeros(64, np.uint8)
    error = refused(Tensor(array.ctypes.data, 64))
    assert error.yours == "host memory that no other process can map"
    assert "kvproto.allocate" in error.advice


def test_a_tensor_that_leaves_shared_memory_is_refused() -> None:
    memory = SharedMemory(4096)
    refused(Tensor(memory.address, 4096), Tensor(memory.address + 4090, 7))


def test_memory_of_devices_that_no_transport_knows_is_refused() -> None:
    assert refused(Tensor(1 << 20, 64, (10, 3))).yours == "DLPack device type 10, device 3"


def test_host_memory_is_allocated_zeroed_and_shareable() -> None:
    memory = allocate(4096, id=7)
    assert (memory.id, memory.length, memory.kind, memory.device) == (7, 4096, MemoryKind.HOST, None)
    assert not np.from_dlpack(memory).any()
    assert memory.region.handles


@pytest.mark.skipif(find("cuda").missing() is None, reason="cuda-core is installed")
def test_memory_of_a_gpu_without_its_transport_says_what_to_install() -> None:
    with raises(LocalError, code=ErrorCode.NO_TRANSPORT, path="device") as caught:
        allocate(4096, device=0)
    assert find("cuda").install in caught.value.advice
