"""Where frames may travel."""

import contextlib
import gc
import select
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvproto.errors import LocalError
from kvproto.net import Dialer, Listener, libzmq, private_address
from kvproto.wire.enums import ErrorCode
from tests.errors import raises


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with contextlib.closing(Listener(private_address(tmp_path, "kv-0"))) as made:
        yield made


@pytest.fixture
def dialer() -> Iterator[Dialer]:
    with contextlib.closing(Dialer()) as made:
        yield made


def readable(fds: Sequence[int], seconds: float = 5) -> bool:
    return bool(select.select(fds, [], [], seconds)[0])


def test_frames_both_ways(listener: Listener, dialer: Dialer) -> None:
    key = ("a source", listener.address)
    dialer.send(key, b"ask")
    ((conn, frame),) = _all(listener, 1)
    assert frame == b"ask"
    assert listener.send(conn, b"answer")
    assert _all(dialer, 1) == [(key, b"answer")]


def test_what_comes_while_a_frame_is_sent_is_not_slept_over(listener: Listener, dialer: Dialer) -> None:
    """Sending takes note of what has come, and the descriptor tells of it no more; `pending` does."""
    key = ("a source", listener.address)
    dialer.send(key, b"hello")
    ((conn, _),) = _all(listener, 1)
    silent = 0
    for n in range(20):
        dialer.send(key, b"ask %d" % n)
        assert readable(listener.filenos())
        until = time.perf_counter() + 0.003  # ZeroMQ looks at its mailbox once in a while
        while time.perf_counter() < until:
            pass
        listener.send(conn, b"answer")
        if not readable(listener.filenos(), 0):
            silent += 1
            assert listener.pending
        assert [frame for _, frame in listener.receive()] == [b"ask %d" % n]
    assert silent


def test_what_one_turn_leaves_behind_is_pending(listener: Listener, dialer: Dialer) -> None:
    """One turn takes 256 frames of a connection, so that no peer holds the others up (KVP-NET-ONE)."""
    for n in range(600):
        assert dialer.send(("a source", listener.address), b"%d" % n)
    found: list[bytes] = []
    while len(found) < 600:
        assert listener.pending or readable(listener.filenos())
        some = list(listener.receive())
        assert len(some) <= 256
        found += [frame for _, frame in some]
    assert found == [b"%d" % n for n in range(600)]
    assert not listener.pending


def test_connections_by_key(listener: Listener, dialer: Dialer) -> None:
    """Two links to one address are two connections; one that is dropped leaves no descriptor."""
    keys = [(name, listener.address) for name in ("first", "second")]
    for key in keys:
        dialer.send(key, key[0].encode())
    conns: dict[bytes, Any] = {}
    while len(conns) < 2:
        assert listener.pending or readable(listener.filenos())
        conns |= {frame: conn for conn, frame in listener.receive()}
    assert len(set(conns.values())) == len(dialer.filenos()) == 2
    dialer.drop(keys[0][0])
    assert len(dialer.filenos()) == 1
    listener.send(conns[b"second"], b"answer")
    assert _all(dialer, 1) == [(keys[1], b"answer")]


def test_what_nobody_closed_ends_with_its_owner(tmp_path: Path) -> None:
    """Collected in a cycle, where a context alone would wait for sockets that are garbage too."""
    for n in range(3):
        address = private_address(tmp_path, f"kv-{n}")
        listener, dialer = Listener(address), Dialer()
        assert dialer.send((0, address), b"hello")
        assert dialer.send((0, private_address(tmp_path, "nobody")), b"hello")
        cycle: list[Any] = [listener, dialer]
        cycle.append(cycle)
        ends = [weakref.ref(each) for each in (listener, dialer)]
        del listener, dialer, cycle
        gc.collect()
        assert [end() for end in ends] == [None, None]
        Listener(address).close()  # it is free


def test_unknown_peer_is_no_crash(listener: Listener) -> None:
    assert not listener.send((b"nobody", b""), b"frame")


def test_address_in_use(tmp_path: Path) -> None:
    listener = Listener(private_address(tmp_path, "kv-0"))
    with pytest.raises(LocalError, match="in use"):
        Listener(private_address(tmp_path, "kv-0"))
    listener.close()
    Listener(private_address(tmp_path, "kv-0")).close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://*:0", "inproc://x", "nonsense", "ipc://@abstract"])
def test_in_the_clear_is_refused(address: str) -> None:
    """KVP-NET-CURVE: without keys nothing but what KVP-NET-INSECURE allows."""
    with pytest.raises(LocalError):
        Listener(address)
    with pytest.raises(LocalError):
        Dialer().send((0, address), b"hello")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*", "tcp://[::1]:*"])
def test_tcp_without_keys_when_insecure_is_said(address: str) -> None:
    """KVP-NET-INSECURE."""
    Listener(address, insecure=True).close()


@pytest.mark.parametrize(
    "address", ["tcp://", "tcp://host", "tcp://host:http", "tcp://a b:1", "tcp://h:70000", "ipc://@x"]
)
def test_insecure_makes_no_address_of_what_is_none(address: str) -> None:
    with pytest.raises(LocalError):
        Listener(address, insecure=True)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ipc://@kv-0-0", "any user of this host can connect to an abstract socket: name a file"),
        (f"ipc:///{'x' * 200}", "at most 107 bytes"),
        ("tcp://no-such-host.invalid:7100", "an address of this machine"),
        ("tcp://10.77.0.1", r"tcp://10\.77\.0\.1, without a port"),
        ("tcp://[::1]", r"without a port"),
    ],
)
def test_an_address_that_cannot_be_is_refused_with_its_reason(address: str, says: str) -> None:
    with raises(LocalError, match=says, code=ErrorCode.OUT_OF_RANGE):
        Listener(address, insecure=True)


@pytest.mark.parametrize("address", ["tcp://*:7100", "tcp://-x:7100"])
def test_a_host_that_cannot_be_dialled_is_the_user_s_error(address: str) -> None:
    with raises(LocalError, match="a host name that can be resolved here", code=ErrorCode.OUT_OF_RANGE) as caught:
        Dialer(insecure=True).send((0, address), b"hello")
    assert address in caught.value.yours


def test_directory_that_others_may_enter(tmp_path: Path) -> None:
    """KVP-NET-INSECURE."""
    tmp_path.chmod(0o755)
    with pytest.raises(LocalError, match="0700"):
        Listener(private_address(tmp_path, "kv-0"))


def test_messages_of_several_parts_are_ignored_on_both_sides(
    tmp_path: Path, listener: Listener, dialer: Dialer
) -> None:
    """KVP-NET-ONE: neither heard nor answered; the next frame is."""
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(listener.address)
    stranger.send_multipart([b"one", b"two"])
    stranger.send(b"next")
    heard: list[bytes] = []
    while not heard:
        assert listener.pending or readable(listener.filenos())
        heard += [frame for _, frame in listener.receive()]
    assert heard == [b"next"]
    source = context.socket(zmq.ROUTER)
    source.bind(private_address(tmp_path, "kv-1"))
    key = ("a source", private_address(tmp_path, "kv-1"))
    dialer.send(key, b"ask")
    conn, _ = source.recv_multipart()
    source.send_multipart([conn, b"one", b"two"])
    source.send_multipart([conn, b"answer"])
    answers: list[bytes] = []
    while not answers:
        assert dialer.pending or readable(dialer.filenos())
        answers += [frame for _, frame in dialer.receive()]
    assert answers == [b"answer"]
    context.destroy(0)


@pytest.mark.parametrize("library", [True, False])
def test_frames_arrive_with_libzmq_called_directly_and_by_pyzmq(
    listener: Listener, dialer: Dialer, monkeypatch: pytest.MonkeyPatch, library: bool
) -> None:
    """Clause KVP-NET-ONE: one frame is one message; a message of several is ignored by both."""
    if not library:
        monkeypatch.setattr(libzmq, "_zmq", None)
    address = listener.address
    frames = [b"", b"\0zero\0", bytes(range(256)) * 300]
    for frame in frames:
        assert dialer.send((0, address), frame)
    found = _all(listener, len(frames))
    assert [frame for _, frame in found] == frames
    assert list(listener.receive()) == []
    several = dialer._lines[0, address].inbox.socket
    several.send_multipart([b"a", b"b", b"c", b"d", b"e"])
    assert dialer.send((0, address), b"alone")
    assert [frame for _, frame in _all(listener, 1)] == [b"alone"]
    assert listener.send(found[0][0], b"back")
    assert [frame for _, frame in _all(dialer, 1)] == [b"back"]
    assert not listener.send((b"nobody", b""), b"lost")


@pytest.mark.parametrize("library", [True, False])
def test_a_message_of_very_many_frames_is_read_in_turns(
    listener: Listener, dialer: Dialer, monkeypatch: pytest.MonkeyPatch, library: bool
) -> None:
    """KVP-NET-ONE: it is ignored, no turn reads all of it, and the next frame is heard."""
    if not library:
        monkeypatch.setattr(libzmq, "_zmq", None)
    key = (0, listener.address)
    assert dialer.send(key, b"first")
    _all(listener, 1)
    dialer._lines[key].inbox.socket.send_multipart([b"x"] * 40_000)
    dialer.send(key, b"next")
    found: list[bytes] = []
    left = 0
    while not found:
        assert listener.pending or readable(listener.filenos())
        found = [frame for _, frame in listener.receive()]
        left += not found and listener.pending
    assert found == [b"next"]
    assert left >= 2


def _all(end: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        select.select(end.filenos(), [], [], 0.01)
        found += end.receive()
    return found


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70])
def test_a_name_that_is_not_known_is_told(host: str) -> None:
    dialer = Dialer(insecure=True)
    address = f"tcp://{host}:7100"
    assert dialer.names.advice(address) == "check that it runs at this address"
    dialer.send((0, address), b"hello")
    _looked_up()
    assert "its host name cannot be resolved here" in dialer.names.advice(address)
    dialer.close()


def test_a_name_that_is_known_and_an_address_need_no_word() -> None:
    dialer = Dialer(insecure=True)
    for address in ("tcp://localhost:7100", "tcp://127.0.0.1:7100", "tcp://[::1]:7100"):
        dialer.send((0, address), b"hello")
        _looked_up()
        assert dialer.names.advice(address) == "check that it runs at this address"
    dialer.close()


def _looked_up() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvproto names":
            thread.join(60)
