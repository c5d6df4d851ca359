"""Registering, adopting and mapping device memory, between processes too."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import attrs
import numpy as np
import pytest

from kvproto.errors import LocalError, RemoteError
from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import call, current, driver, uuid
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory, connect
from kvproto.transport.process import attestations
from kvproto.wire import decode_struct, encode_struct
from kvproto.wire.enums import ErrorCode, MemoryKind, Transport
from kvproto.wire.messages import Region
from tests.errors import raises
from tests.gpu.memory import get, put


class Owner:
    """Another process with a region of its own: tests/gpu/owner.py."""

    def __init__(self, length: int, device: int, adopt: str = "") -> None:
        command = [sys.executable, "-m", "tests.gpu.owner", str(length), str(device), adopt]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.region = decode_struct(Region, bytes.fromhex(self.read()))

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, **what: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def owner(devices: tuple[int, int]) -> Iterator[tuple[Owner, int]]:
    made = Owner(1 << 20, devices[0])
    yield made, devices[1]
    made.kill()


def test_pull_from_another_process(owner: tuple[Owner, int]) -> None:
    peer, device = owner
    assert (peer.region.kind, peer.region.handles[0].transport) == (MemoryKind.CUDA, Transport.CUDA)
    assert "secret" not in repr(peer.region)
    mine = DeviceMemory(1 << 20, device)
    put(mine, np.full(1 << 20, 0xEE, np.uint8))
    copier = Copier(device)
    for turn in range(3):  # registered again, mapped again
        peer.ask(fill=turn + 1)
        mapped = connect(peer.region, "regions[0]", device)
        program = scattered(512, 1024, pool=2048, seed=turn)
        prepared = copier.prepare(program, {0: mapped.address}, {0: mine.address})
        copier.submit([CopyJob(prepared, program.maps)]).wait()
        there = np.random.default_rng(turn + 1).integers(0, 256, 1 << 20, np.uint8).reshape(-1, 512)
        got = get(mine).reshape(-1, 512)
        m = program.maps[0]
        assert np.array_equal(got[m.sink_row], there[m.source_row])
        mapped.close()
    mine.close()


def test_two_regions_of_one_allocation_and_a_region_inside(owner: tuple[Owner, int]) -> None:
    peer, device = owner
    peer.ask(fill=7)
    there = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
    whole = connect(peer.region, "regions[0]", device)
    inside = connect(decode_struct(Region, bytes.fromhex(peer.ask(inside=4096))), "regions[1]", device)
    assert inside.address == whole.address + 4096
    whole.close()  # the other keeps the mapping
    out = np.empty(1 << 16, np.uint8)
    current(device)
    call(driver.cuMemcpyDtoH(out.ctypes.data, inside.address, out.nbytes), "get")
    assert np.array_equal(out, there[4096 : 4096 + out.size])
    inside.close()


@pytest.mark.parametrize(
    "case", ["dead", "longer", "namespace", "boot", "device", "garbage", "no handle", "zero handle"]
)
def test_regions_that_cannot_be_mapped(owner: tuple[Owner, int], case: str) -> None:
    peer, device = owner
    region = peer.region
    handle = region.handles[0]
    code = ErrorCode.TRANSPORT_FAILED
    if case == "dead":
        peer.kill()
    elif case == "longer":
        region = attrs.evolve(region, length=region.length * 4096)
    elif case == "namespace":
        region, code = attrs.evolve(region, namespace=1), ErrorCode.NO_TRANSPORT
    elif case == "boot":
        region, code = attrs.evolve(region, boot=bytes(16)), ErrorCode.NO_TRANSPORT
    elif case == "device":
        region, code = attrs.evolve(region, device="GPU-none"), ErrorCode.NO_TRANSPORT
    elif case == "garbage":
        region = attrs.evolve(region, handles=(attrs.evolve(handle, data=b"\x93\x01"),))
    elif case == "no handle":
        region, code = (
            attrs.evolve(region, handles=(attrs.evolve(handle, transport=Transport.SHM),)),
            ErrorCode.NO_TRANSPORT,
        )
    else:
        data = bytes(handle.data)
        at = data.index(b"\xc4\x40") + 2
        region = attrs.evolve(region, handles=(attrs.evolve(handle, data=data[:at] + bytes(64) + data[at + 64 :]),))
    with raises(RemoteError, code=code) as caught:
        connect(region, "regions[0]", device)
    assert caught.value.path.startswith("regions[0].")
    if case != "dead":
        connect(peer.region, "regions[0]", device).close()  # the next good one works


def test_memory_that_is_not_attested_is_refused(owner: tuple[Owner, int]) -> None:
    """KVP-REG-ATTEST: another process's, and this process's own, which a peer may say is of another namespace."""
    peer, device = owner
    mine, session = DeviceMemory(1 << 20, device), b"s" * 32
    for region in (peer.region, mine.region):
        with raises(RemoteError, code=ErrorCode.TRANSPORT_FAILED, path="regions[0].handles"):
            connect(region, "regions[0]", device, session)
    with raises(RemoteError, code=ErrorCode.NO_TRANSPORT, path="regions[0].namespace"):
        connect(attrs.evolve(mine.region, namespace=1), "regions[0]", device, session)
    attestations.add(session)
    connect(mine.region, "regions[0]", device, session).close()
    attestations.drop(session)
    mine.close()


def test_writes_end_with_the_process(owner: tuple[Owner, int]) -> None:
    """kill -9 in the middle of its kernels: once its pidfd is readable no byte changes any more."""
    peer, device = owner
    mine = DeviceMemory(1 << 26, device)
    for _ in range(3):
        writer = Owner(1 << 26, peer.region and 0)
        handle = os.pidfd_open(writer.process.pid)
        writer.ask(write=encode_struct(mine.region).hex())
        while not get(mine, 4096).any():
            pass  # until its first bytes are here
        os.kill(writer.process.pid, signal.SIGKILL)
        assert select.select([handle], [], [], 60)[0]
        first = get(mine)
        for _ in range(20):
            assert np.array_equal(get(mine), first)
        writer.kill()
        os.close(handle)
        put(mine, np.zeros(1 << 26, np.uint8))
    mine.close()


def test_memory_that_is_gone_is_noticed() -> None:
    mine = DeviceMemory(1 << 22)
    other = DeviceMemory.adopt(mine.address + 4096, 8192)
    assert other.region.length == 8192
    mine.close()
    again = DeviceMemory(1 << 22)  # most likely at the same address
    with raises(LocalError, code=ErrorCode.POOL_MOVED):
        _ = other.region
    again.close()


def test_memory_knows_its_device(devices: tuple[int, int]) -> None:
    for device in devices:
        mine = DeviceMemory(4096, device)
        assert (mine.device, mine.__dlpack_device__()) == (device, (2, device))
        assert mine.region.device == uuid(device)
        mine.zero()
        assert not get(mine).any()
        mine.close()


def test_memory_that_is_none() -> None:
    host = np.zeros(4096, np.uint8)
    current(0)
    managed = int(call(driver.cuMemAllocManaged(4096, 1), "managed"))
    small = DeviceMemory(4096)
    for address, length, code in (
        (host.ctypes.data, 4096, ErrorCode.NO_TRANSPORT), (8, 8, ErrorCode.NO_TRANSPORT), (managed, 4096, ErrorCode.NO_TRANSPORT),
        (small.address, 1 << 40, ErrorCode.OUT_OF_REGION), (small.address, 0, ErrorCode.OUT_OF_REGION),
    ):  # fmt: skip
        with raises(LocalError, code=code):
            DeviceMemory.adopt(address, length)
    call(driver.cuMemFree(managed), "free")
    small.close()


def test_torch_takes_and_gives_memory() -> None:
    torch = pytest.importorskip("torch")
    mine = DeviceMemory(1 << 20)
    seen = torch.from_dlpack(mine)
    assert seen.data_ptr() == mine.address
    seen.fill_(3)
    torch.cuda.synchronize()
    assert (get(mine) == 3).all()
    theirs = torch.full((1 << 20,), 5, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    adopted = DeviceMemory.adopt(theirs.data_ptr(), theirs.numel())
    assert (get(adopted) == 5).all()
    assert adopted.region.kind == MemoryKind.CUDA
    del seen
    mine.close()


def test_jax_takes_memory() -> None:
    jax = pytest.importorskip("jax")
    mine = DeviceMemory(1 << 20)
    data = np.random.default_rng(3).integers(0, 100, 1 << 20, np.uint8)
    put(mine, data)
    seen = jax.dlpack.from_dlpack(mine)
    assert seen.unsafe_buffer_pointer() == mine.address
    assert np.array_equal(np.asarray(seen), data.view(np.asarray(seen).dtype))


@pytest.mark.parametrize("whose", ["jax", "torch", "torch, expandable"])
def test_pull_from_the_pool_of_a_framework(
    devices: tuple[int, int], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that the engine allocated, by legacy handle or by descriptor."""
    pytest.importorskip(whose.split(",")[0])
    if "expandable" in whose:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # a pool inside one large allocation, as JAX has it unless told
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".2")
    source, device = devices
    length = 50 << 20  # of segments of 20 MB: several allocations
    peer = Owner(length, source, whose.split(",")[0])
    peer.ask(fill=3)
    mine = DeviceMemory(length, device)
    for _ in range(2):
        mapped = connect(peer.region, "regions[0]", device)
        program = scattered(512, length // 512)
        copier = Copier(device)
        prepared = copier.prepare(program, {0: mapped.address}, {0: mine.address})
        copier.submit([CopyJob(prepared, program.maps)]).wait()
        there = np.random.default_rng(3).integers(0, 256, length, np.uint8).reshape(-1, 512)
        m = program.maps[0]
        assert np.array_equal(get(mine).reshape(-1, 512)[m.sink_row], there[m.source_row])
        mapped.close()
    peer.kill()
    with raises(RemoteError, code=ErrorCode.TRANSPORT_FAILED):
        connect(peer.region, "regions[0]", device)


def test_a_pool_of_jax_takes_what_a_peer_sends() -> None:
    """A pool in memory of JAX is written by the copier, and JAX reads it."""
    jax = pytest.importorskip("jax")
    pool = jax.device_put(np.zeros(1 << 20, np.uint8)).block_until_ready()
    adopted = DeviceMemory.adopt(pool.unsafe_buffer_pointer(), 1 << 20)
    data = np.random.default_rng(5).integers(0, 256, 1 << 20, np.uint8)
    mine = DeviceMemory(1 << 20)
    put(mine, data)
    program, copier = scattered(4096, 256), Copier(0)
    prepared = copier.prepare(program, {0: mine.address}, {0: adopted.address})
    copier.submit([CopyJob(prepared, program.maps)]).wait()
    m = program.maps[0]
    seen = np.asarray(jax.numpy.copy(pool)).reshape(-1, 4096)
    assert np.array_equal(seen[m.sink_row], data.reshape(-1, 4096)[m.source_row])
