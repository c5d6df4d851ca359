"""Shared memory that leaves nothing behind, and handles that are not believed."""

import multiprocessing
from pathlib import Path

import attrs
import pytest

from kvproto.errors import RemoteError
from kvproto.transport.shm.mover import SharedMemory, connect
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Region


def _write(region: Region) -> None:
    connect(region, "regions[0]").buffer[10:14] = b"here"


def test_another_process_writes() -> None:
    memory = SharedMemory(4096)
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(memory.region,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert bytes(memory.buffer[10:14]) == b"here"


def test_nothing_has_a_name() -> None:
    memory = SharedMemory(4096)
    connect(memory.region, "regions[0]").close()
    assert not [p for p in Path("/dev/shm").iterdir() if "kvproto" in p.name]


def refused(region: Region) -> ErrorCode:
    with pytest.raises(RemoteError) as caught:
        connect(region, "regions[0]")
    assert caught.value.path == "regions[0].handles"
    return caught.value.code


def test_handles_that_are_refused() -> None:
    region = SharedMemory(4096).region
    (handle,) = region.handles
    data = bytes(handle.data)
    wrong_nonce = attrs.evolve(handle, data=data[:-1] + bytes([data[-1] ^ 1]))
    garbage = attrs.evolve(handle, data=b"\xc1")
    assert refused(attrs.evolve(region, handles=(wrong_nonce,))) == ErrorCode.TRANSPORT_FAILED
    assert refused(attrs.evolve(region, handles=(garbage,))) == ErrorCode.TRANSPORT_FAILED
    assert refused(attrs.evolve(region, handles=())) == ErrorCode.NO_TRANSPORT
    assert refused(attrs.evolve(region, boot=bytes(16))) == ErrorCode.NO_TRANSPORT
    assert refused(attrs.evolve(region, length=8192)) == ErrorCode.TRANSPORT_FAILED
