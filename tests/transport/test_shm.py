"""Shared memory that leaves nothing behind, and handles that are not believed."""

import faulthandler
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import msgpack
import numpy as np
import pytest

from kvproto.errors import LocalError, RemoteError
from kvproto.transport import load
from kvproto.transport.process import boot_id
from kvproto.transport.shm.memory import SharedMemory, connect, owner_of
from kvproto.wire.enums import ErrorCode, MemoryKind, Transport
from kvproto.wire.messages import Handle, Region
from tests.errors import raises
from tests.processes import FORKED, imported

imported(__name__)


@pytest.fixture(autouse=True, scope="module")
def no_memory_of_other_tests() -> None:
    """What tests before these have left alive is set aside, so that collections here need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_memory_of_the_test_before() -> None:
    gc.collect()


def _write(region: Region) -> None:
    connect(region, "regions[0]").buffer[10:14] = b"here"


def test_another_process_writes() -> None:
    memory = SharedMemory(4096)
    process = FORKED.Process(target=_write, args=(memory.region,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert bytes(memory.buffer[10:14]) == b"here"


def test_byte_0_of_the_region_is_offset_0_of_the_file() -> None:
    memory = SharedMemory(4096)
    memory.buffer[:3] = b"abc"
    link = Path(f"/proc/self/fd/{msgpack.unpackb(bytes(memory.region.handles[0].data))[1]}")
    assert link.read_bytes()[:3] == b"abc"


def test_nothing_has_a_name() -> None:
    memory = SharedMemory(4096)
    connect(memory.region, "regions[0]").close()
    assert not [p for p in Path("/dev/shm").iterdir() if "kvproto" in p.name]


def descriptors() -> int:
    gc.collect()  # what tests before this one left to it would be counted
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kvproto-")


def test_a_mapping_holds_no_descriptor_and_is_gone_when_closed() -> None:
    other = SharedMemory(4096)  # all memory of a process has one file of attestations
    before = descriptors(), mappings()
    memory = SharedMemory(4096)
    assert (descriptors(), mappings()) == (before[0] + 1, before[1] + 1)
    mapped = [connect(memory.region, "regions[0]") for _ in range(100)]
    assert (descriptors(), mappings()) == (before[0] + 1, before[1] + 101)
    mapped[0].buffer[0] = 7
    assert {m.buffer[0] for m in mapped} == {7}
    for each in mapped:
        each.close()
    memory.close()
    assert (descriptors(), mappings()) == before
    other.close()


def test_memory_in_use_is_not_unmapped() -> None:
    memory = SharedMemory(4096)
    mapped = connect(memory.region, "regions[0]")
    arrays = [np.frombuffer(m.buffer, np.uint8) for m in (memory, mapped)]
    for each in (memory, mapped):
        with pytest.raises(BufferError):
            each.close()
    arrays[0][5] = 9
    assert arrays[1][5] == 9
    kept = mapped.buffer[5:6]
    del arrays
    memory.close()
    with pytest.raises(BufferError):
        mapped.close()
    assert kept[0] == 9
    del kept
    mapped.close()


def test_a_forked_child_has_neither_pool_nor_mapping() -> None:
    """KVP-REG-FORK: else the end of this process would not prove that nothing is written any more."""
    memory = SharedMemory(4096)
    mapped = connect(memory.region, "regions[0]")
    for view in (memory.buffer, mapped.buffer):
        child = os.fork()
        if not child:
            faulthandler.disable()
            view[0] = 1
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert memory.buffer[0] == 0


def test_memory_of_a_parent_is_not_found_at_the_addresses_of_its_child() -> None:
    """There the child has other memory: its Region would name the parent's, and peers would write that."""
    memory = SharedMemory(1 << 20)
    assert owner_of(memory.address, 4096) is memory
    child = os.fork()
    if not child:
        os._exit(owner_of(memory.address, 4096) is not None)
    assert not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert owner_of(memory.address, 4096) is memory


def refused(region: Region) -> RemoteError:
    before = descriptors(), mappings()
    with pytest.raises(RemoteError) as caught:
        connect(region, "regions[3]")
    assert (descriptors(), mappings()) == before
    return caught.value


def handle(*fields: object) -> tuple[Handle]:
    return (Handle(transport=Transport.SHM, data=msgpack.packb(fields)),)


def region_of(fd: int, length: int = 4096) -> Region:
    """A region as an owner without kvproto may state it."""
    named = handle(os.getpid(), fd, "nonce", 0)
    return Region(id=0, base=0, length=length, kind=MemoryKind.HOST, boot=boot_id(), handles=named)


def file(flags: int, size: int = 4096) -> int:
    fd = os.memfd_create("kvproto-nonce", os.MFD_CLOEXEC | flags)
    os.ftruncate(fd, size)
    return fd


def ended() -> int:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


CASES: dict[str, tuple[Callable[[Region], Region], str, ErrorCode, str]] = {
    "no handle": (lambda r: attrs.evolve(r, handles=()), "handles", ErrorCode.NO_TRANSPORT, "none"),
    "another host": (lambda r: attrs.evolve(r, boot=bytes(16)), "boot", ErrorCode.NO_TRANSPORT, "00" * 16),
    "no boot": (lambda r: attrs.evolve(r, boot=None), "boot", ErrorCode.NO_TRANSPORT, "none"),
    "no msgpack": (
        lambda r: attrs.evolve(r, handles=(Handle(transport=Transport.SHM, data=b"\xc1"),)),
        "handles", ErrorCode.TRANSPORT_FAILED, "1 other bytes",
    ),
    "other types": (
        lambda r: attrs.evolve(r, handles=handle("1", 2, "3")), "handles", ErrorCode.TRANSPORT_FAILED, "other bytes"
    ),
    "another PID namespace": (
        lambda r: attrs.evolve(r, namespace=1), "namespace", ErrorCode.NO_TRANSPORT, "another, 1",
    ),
    "too few fields": (
        lambda r: attrs.evolve(r, handles=handle(1, 2, "3")), "handles", ErrorCode.TRANSPORT_FAILED, "other bytes"
    ),
    "a path in place of a number": (
        lambda r: attrs.evolve(r, handles=handle("self", 0, "x")), "handles", ErrorCode.TRANSPORT_FAILED, "other bytes"
    ),
    "another nonce": (
        lambda r: attrs.evolve(r, handles=handle(*msgpack.unpackb(bytes(r.handles[0].data))[:2], "0" * 32, 0)),
        "handles", ErrorCode.TRANSPORT_FAILED, "kvproto-",
    ),
    "a closed descriptor": (
        lambda r: attrs.evolve(r, handles=handle(os.getpid(), 1 << 20, "x", 0)),
        "handles", ErrorCode.TRANSPORT_FAILED, "it was closed",
    ),
    "a process that has ended": (
        lambda r: attrs.evolve(r, handles=handle(ended(), 3, "x", 0)),
        "handles", ErrorCode.TRANSPORT_FAILED, "no such process here",
    ),
    "longer than the file": (
        lambda r: attrs.evolve(r, length=8192), "handles", ErrorCode.TRANSPORT_FAILED, "4096 bytes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_handles_that_are_refused(case: str) -> None:
    """KVP-REG-FAIL"""
    memory = SharedMemory(4096)
    change, field, code, says = CASES[case]
    error = refused(change(memory.region))
    assert (error.code, error.path) == (code, f"regions[3].{field}")
    assert says in error.yours
    assert error.advice
    connect(memory.region, "regions[3]").close()


@pytest.mark.parametrize("flags", [0, os.MFD_ALLOW_SEALING])
def test_a_file_that_may_become_shorter_is_refused(flags: int) -> None:
    """Reading past the end of a file would kill the reader."""
    fd = file(flags)
    error = refused(region_of(fd))
    assert (error.code, error.path) == (ErrorCode.TRANSPORT_FAILED, "regions[3].handles")
    assert "F_SEAL_SHRINK" in error.mine
    assert "MFD_ALLOW_SEALING" in error.advice
    os.close(fd)


def test_a_descriptor_that_is_no_file_of_memory_is_refused() -> None:
    reader, writer = os.pipe()
    error = refused(region_of(reader))
    assert error.yours.startswith("pipe:")
    os.close(reader)
    os.close(writer)


def test_without_descriptors_memory_is_refused_and_nothing_else_happens() -> None:
    memory = SharedMemory(4096)
    region, (soft, hard) = memory.region, resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.dup(0)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        with pytest.raises(RemoteError, match="Too many open files") as caught:
            connect(region, "regions[0]")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.code == ErrorCode.TRANSPORT_FAILED
    connect(region, "regions[0]").close()


def test_memory_that_cannot_be_had_is_a_typed_error_that_leaks_nothing() -> None:
    before = descriptors()
    with raises(LocalError, code=ErrorCode.TRANSPORT_FAILED):
        SharedMemory(0)
    assert descriptors() == before


def test_shared_memory_is_found_by_its_addresses() -> None:
    memory = SharedMemory(4096)
    assert owner_of(memory.address + 96, 4000) is memory
    assert owner_of(memory.address + 97, 4000) is None
    assert owner_of(memory.address - 1, 1) is None
    memory.close()
    assert owner_of(memory.address + 96, 4000) is None


def test_memory_of_another_kind_is_refused_with_what_to_do() -> None:
    memory = SharedMemory(64)
    transport = load("shm").open({0: memory})
    other: object = np.zeros(64, np.uint8)
    with raises(LocalError, code=ErrorCode.NO_TRANSPORT, path="regions[2]") as caught:
        transport.begin_checksums(None, {2: other}, sink=False)  # type: ignore[arg-type, dict-item]
    assert "kvproto.transport.memory" in caught.value.advice


def test_a_copy_imports_nothing() -> None:
    """Where no file can be opened any more, an import in the midst of a copy would end the thread that serves it."""
    code = (
        "import sys, numpy, kvproto.copying.execute; before = {*sys.modules}; "
        "numpy.unique(numpy.arange(9)); sys.exit(str({*sys.modules} - before) if before != {*sys.modules} else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
