"""What goes wrong on GPUs, at the level of nodes: each is told by its code, moves no other byte, and the next works."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import RemoteError
from kvproto.events import Disconnected
from kvproto.source.prefill import Computed
from kvproto.transport.cuda import memory
from kvproto.transport.cuda.driver import call, driver
from kvproto.transport.cuda.memory import DeviceMemory, connect, has_fabric
from kvproto.wire.enums import ErrorCode
from tests.gpu import nodes
from tests.gpu.conftest import FOUND
from tests.gpu.gate import Gate
from tests.gpu.memory import get, on_gpu, put
from tests.gpu.test_memory import Owner
from tests.node.nodes import Received, TransferLost
from tests.session.driver import ticket


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while nodes.OPEN:
        nodes.OPEN.pop().close()


def hand_over(sink: nodes.Sink) -> None:
    """One good request of a source of this process; its kernels are loaded from then on."""
    made = ticket()
    node = sink.sources[0]
    node.expect(made, nodes.CONTENT, nodes.TOKENS)
    node.finish(bytes(made.key), nodes.FINISHED)
    sink.ask(made)
    sink.first(Received)


def test_an_abort_between_parts_is_proven_only_when_their_writes_are_over(
    tmp_path: Path, devices: tuple[int, int]
) -> None:
    here, sent = nodes.filled(devices[0], 1)
    there, _ = nodes.filled(devices[1], 2)
    address = nodes.place(tmp_path)
    sink = nodes.Sink(address, there, [nodes.source(address, here)])
    hand_over(sink)
    before = nodes.fill(there, 3)
    gate, made = Gate(devices[0]), ticket()
    node, key = sink.sources[0], bytes(made.key)
    node.expect(made, nodes.CONTENT, nodes.TOKENS)
    number = sink.ask(made)
    node.computed(key, Computed({0: np.array(nodes.HERE)}, nodes.TOKENS, (0, 1), 0, gate.handle))
    sink.until(lambda: node.reads(key))
    sink.abort(0, number)
    sink.turns(200)
    assert not [e for e in sink.told if isinstance(e, TransferLost)]
    gate.open()
    lost = sink.first(TransferLost)
    seen = nodes.bytes_of(there)
    assert (lost.number, lost.error.code, lost.proven) == (number, ErrorCode.ABORTED, True)
    assert np.array_equal(seen, nodes.expected(there, sent, before, (0,), 1))  # the part that had begun, and no other
    node.finish(key, nodes.FINISHED)
    sink.turns(50)
    assert np.array_equal(nodes.bytes_of(there), seen)
    hand_over(sink)
    assert np.array_equal(nodes.bytes_of(there), nodes.expected(there, sent, before))


def test_a_pool_that_moved_ends_its_transfers_and_one_registered_anew_works(
    tmp_path: Path, devices: tuple[int, int]
) -> None:
    here, _ = nodes.filled(devices[0], 1)
    there, before = nodes.filled(devices[1], 2)
    address, made = nodes.place(tmp_path), ticket()
    sink = nodes.Sink(address, there, [nodes.source(address, here)])
    sink.sources[0].expect(made, nodes.CONTENT, nodes.TOKENS)
    number = sink.ask(made)
    on_gpu(here).close()
    again, sent = nodes.filled(devices[0], 3)  # most likely at the same address
    sink.sources[0].finish(bytes(made.key), nodes.FINISHED)
    lost = sink.first(TransferLost)
    assert (lost.number, lost.error.code, lost.proven) == (number, ErrorCode.POOL_MOVED, True)
    assert np.array_equal(nodes.bytes_of(there), before)
    address = nodes.place(tmp_path)
    following = nodes.Sink(address, there, [nodes.source(address, again)])
    hand_over(following)
    assert np.array_equal(nodes.bytes_of(there), nodes.expected(there, sent, before))


@attrs.frozen
class Prefill:
    """Another process with a source node: tests/gpu/prefill.py."""

    process: subprocess.Popen[str]

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


@pytest.fixture
def prefill() -> Iterator[Any]:
    made: list[subprocess.Popen[str]] = []

    def start(address: str, device: int, seed: int, key: bytes) -> Prefill:
        command = [sys.executable, "-m", "tests.gpu.prefill", address, str(device), str(seed), key.hex()]
        pipe = subprocess.PIPE
        made.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline() == "listening\n"
        return Prefill(made[-1])

    yield start
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", ["fault", "kill"])
def test_a_source_process_that_ends_costs_its_transfer_alone(
    tmp_path: Path, devices: tuple[int, int], prefill: Any, end: str
) -> None:
    """Part of a request is here; a device fault ends the process by itself. Its death is the proof."""
    there, before = nodes.filled(devices[1], 2)
    address, made = nodes.place(tmp_path), ticket()
    peer = prefill(address, devices[0], 1, bytes(made.key))
    sink = nodes.Sink(address, there, [])
    number = sink.ask(made)
    peer.say("part")
    sink.until(lambda: not np.array_equal(nodes.bytes_of(there), before), 0.01)
    peer.process.kill() if end == "kill" else peer.say("fault")
    lost = sink.first(TransferLost)
    seen = nodes.bytes_of(there)
    assert (lost.number, lost.error.code, lost.proven) == (number, ErrorCode.PEER_LOST, True)
    assert sink.first(Disconnected).reason == "its process has ended"
    assert sink.node.quarantined == {}
    _, said = peer.process.communicate(timeout=60)
    assert peer.process.returncode == (3 if end == "fault" else -9), said
    if end == "fault":
        assert "TRANSPORT_FAILED" in said
        assert "CUDA_ERROR_" in said
    for _ in range(20):
        assert np.array_equal(nodes.bytes_of(there), seen)
    address, again = nodes.place(tmp_path), ticket()
    following = prefill(address, devices[0], 5, bytes(again.key))
    sink = nodes.Sink(address, there, [])
    sink.ask(again)
    following.say("finish")
    sink.first(Received)
    sent = np.random.default_rng(5).integers(0, 256, before.size, np.uint8)
    assert np.array_equal(nodes.bytes_of(there), nodes.expected(there, sent, before))


def test_gpus_that_are_no_peers_are_told_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    if FOUND < 2:
        pytest.skip("needs two GPUs")
    peer = Owner(1 << 20, 1)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "Device", Lonely)
        with pytest.raises(RemoteError) as caught:
            connect(peer.region, "regions[0]", 0)
    assert (caught.value.code, caught.value.path) == (ErrorCode.NO_TRANSPORT, "regions[0].device")
    connect(peer.region, "regions[0]", 0).close()
    peer.kill()


class Lonely:
    """A device that reaches no other."""

    def __init__(self, number: int) -> None:
        pass

    def can_access_peer(self, other: int) -> bool:
        return False


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_fabric_handle_is_taken_where_the_gpu_says_so(elsewhere: bool) -> None:
    """Another host has FABRIC handles alone; a GPU without them refuses by its attribute, not by trial."""
    import msgpack

    mine = DeviceMemory(1 << 21)
    region = mine.region
    data = [3, 1, 1, bytes(16), 0, 1 << 21, [[bytes(64), 1 << 21]]]
    handle = attrs.evolve(region.handles[0], data=msgpack.packb(data))
    boot = bytes(16) if elsewhere else region.boot
    with pytest.raises(RemoteError) as caught:
        connect(attrs.evolve(region, boot=boot, handles=(handle,)), "regions[0]", 0)
    code = ErrorCode.TRANSPORT_FAILED if has_fabric(0) else ErrorCode.NO_TRANSPORT
    assert (caught.value.code, caught.value.path) == (code, "regions[0].handles")
    if not has_fabric(0):
        assert "no FABRIC handles" in caught.value.mine
    with pytest.raises(RemoteError) as caught:  # another host, and no FABRIC handle
        connect(attrs.evolve(region, boot=bytes(16)), "regions[0]", 0)
    assert (caught.value.code, caught.value.path) == (ErrorCode.NO_TRANSPORT, "regions[0].handles")
    connect(region, "regions[0]", 0).close()
    mine.close()


def test_a_dead_process_s_handle_is_refused_and_its_successor_s_opens(devices: tuple[int, int]) -> None:
    peer = Owner(1 << 20, devices[0])
    peer.kill()
    with pytest.raises(RemoteError) as caught:
        connect(peer.region, "regions[0]", devices[1])
    assert caught.value.code == ErrorCode.TRANSPORT_FAILED
    following = Owner(1 << 20, devices[0])
    following.ask(fill=9)
    mapped = connect(following.region, "regions[0]", devices[1])
    mine = DeviceMemory(1 << 20, devices[1])
    put(mine, np.zeros(1 << 20, np.uint8))
    call(driver.cuMemcpyDtoD(mine.address, mapped.address, 1 << 20), "copy")
    call(driver.cuCtxSynchronize(), "copy")
    assert np.array_equal(get(mine), np.random.default_rng(9).integers(0, 256, 1 << 20, np.uint8))
    mapped.close()
    mine.close()
    following.kill()
