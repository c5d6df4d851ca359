"""Where frames may travel."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from kvproto.errors import LocalError
from kvproto.net import Dialer, Listener, private_address
from kvproto.net.sockets import wait


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_frames_both_ways(folder: Path) -> None:
    listener, dialer = Listener(private_address(folder, "kv-0")), Dialer()
    dialer.send(listener.address, b"ask")
    wait([listener.socket], 5)
    ((conn, frame),) = listener.receive()
    assert frame == b"ask"
    assert listener.send(conn, b"answer")
    wait(dialer.sockets, 5)
    assert dialer.receive() == [(listener.address, b"answer")]
    dialer.close()
    listener.close()


def test_what_nobody_closed_ends_with_its_owner(folder: Path) -> None:
    """Collected in a cycle, where a context alone would wait for sockets that are garbage too."""
    for n in range(3):
        address = private_address(folder, f"kv-{n}")
        listener, dialer = Listener(address), Dialer()
        assert dialer.send(address, b"hello")
        assert dialer.send(private_address(folder, "nobody"), b"hello")
        cycle: list[Any] = [listener, dialer]
        cycle.append(cycle)
        ends = [weakref.ref(each) for each in (listener, dialer)]
        del listener, dialer, cycle
        gc.collect()
        assert [end() for end in ends] == [None, None]
        Listener(address).close()  # it is free


def test_unknown_peer_is_no_crash(folder: Path) -> None:
    listener = Listener(private_address(folder, "kv-0"))
    assert not listener.send(b"nobody", b"frame")
    listener.close()


def test_address_in_use(folder: Path) -> None:
    listener = Listener(private_address(folder, "kv-0"))
    with pytest.raises(LocalError, match="in use"):
        Listener(private_address(folder, "kv-0"))
    listener.close()
    Listener(private_address(folder, "kv-0")).close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://*:0", "inproc://x", "nonsense"])
def test_in_the_clear_is_refused(address: str) -> None:
    """KVP-NET-CURVE: there is no CURVE yet, so nothing but what KVP-NET-INSECURE allows."""
    with pytest.raises(LocalError):
        Listener(address)


def test_loopback_tcp_when_insecure_is_said() -> None:
    """KVP-NET-INSECURE."""
    Listener("tcp://127.0.0.1:*", insecure=True).close()
    with pytest.raises(LocalError):
        Listener("tcp://0.0.0.0:*", insecure=True)


def test_directory_that_others_may_enter(folder: Path) -> None:
    """KVP-NET-INSECURE."""
    folder.chmod(0o755)
    with pytest.raises(LocalError, match="0700"):
        Listener(private_address(folder, "kv-0"))


def test_messages_of_several_parts_are_ignored_on_both_sides(folder: Path) -> None:
    """KVP-NET-ONE: neither heard nor answered; the next frame is."""
    listener, dialer = Listener(private_address(folder, "s")), Dialer()
    dialer.send(listener.address, b"first")
    wait([listener.socket], 5.0)
    ((conn, _),) = listener.receive()
    dialer.sockets[0].send_multipart([b"one", b"two"])
    dialer.send(listener.address, b"next")
    listener.socket.send_multipart([conn, b"one", b"two"])
    listener.send(conn, b"answer")
    heard: list[bytes] = []
    while not heard:
        wait([listener.socket], 5.0)
        heard += [frame for _, frame in listener.receive()]
    answers: list[bytes] = []
    while not answers:
        wait(dialer.sockets, 5.0)
        answers += [frame for _, frame in dialer.receive()]
    assert (heard, answers) == ([b"next"], [b"answer"])
    dialer.close()
    listener.close()
