"""What one peer can take of a listener or a dialer: frames, turns, handshakes, connections, names."""

import contextlib
import errno
import logging
import os
import re
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvproto.errors import LocalError
from kvproto.net import AllowList, Dialer, KeyPair, Listener, limits, make_keys, private_address, sockets
from kvproto.wire import tables
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = bytes([4, len(_READY)]) + _READY


def until(condition: Callable[[], Any], *ends: Listener | Dialer) -> Any:
    """Wait for something to come until it is true; what it returned."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if found := condition():
            return found
        select.select([fd for end in ends for fd in end.filenos()], [], [], 0.005)
    raise AssertionError("it never came")


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("tcp://127.0.0.1:*", insecure=True)
    yield made
    made.close()


@pytest.fixture
def dialer() -> Iterator[Dialer]:
    made = Dialer(insecure=True)
    yield made
    made.close()


def dial(listener: Listener) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])))
    made.settimeout(0)
    return made


def greet(connection: socket.socket, listener: Listener) -> Any:
    """End the handshake, and have a first frame heard; returns the listener's name of the connection."""
    connection.sendall(GREETING + READY)
    came = b""

    def greeted() -> bool:
        nonlocal came
        with contextlib.suppress(BlockingIOError):
            came += connection.recv(1 << 16)
        return b"READY" in came

    until(greeted, listener)
    connection.sendall(b"\x00\x05hello")
    ((conn, _),) = until(lambda: [*listener.receive()], listener)
    return conn


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def heard(dialer: Dialer, listener: Listener, frame: bytes = b"hello") -> None:
    assert dialer.send((0, listener.address), frame)
    until(lambda: frame in [each for _, each in listener.receive()], listener)


def test_a_frame_beyond_the_limit_ends_its_connection_before_it_comes(listener: Listener, dialer: Dialer) -> None:
    """KVP-NET-FRAME: at its announced length; the greatest that is allowed is heard."""
    with dial(listener) as stranger:
        too_long = tables.HEADER_BYTES + tables.MAX_BODY + 1
        greet(stranger, listener)
        stranger.sendall(b"\x02" + struct.pack(">Q", too_long))
        until(lambda: [*listener.receive()] or closed(stranger), listener)
        assert closed(stranger)
    heard(dialer, listener, bytes(too_long - 1))


@pytest.mark.parametrize("sent", [b"", GREETING[:10], GREETING], ids=["nothing", "half a greeting", "a greeting"])
def test_a_handshake_that_does_not_end(monkeypatch: pytest.MonkeyPatch, dialer: Dialer, sent: bytes) -> None:
    """KVP-NET-HANDSHAKE: silent and half-open connections are closed, and cost nobody else anything."""
    assert sockets._OPTIONS[zmq.HANDSHAKE_IVL] == 1000 * limits.HANDSHAKE
    monkeypatch.setitem(sockets._OPTIONS, zmq.HANDSHAKE_IVL, 50)
    listener = Listener("tcp://127.0.0.1:*", insecure=True)
    with dial(listener) as stranger:
        stranger.sendall(sent)
        heard(dialer, listener)
        until(lambda: [*listener.receive()] or closed(stranger), listener)
        heard(dialer, listener)
    listener.close()


def test_too_many_connections(listener: Listener, dialer: Dialer, caplog: pytest.LogCaptureFixture) -> None:
    """KVP-NET-CONNECTIONS: those that are there go on, and others come in once there is room; the log says so."""
    heard(dialer, listener)
    counted = listener._connections
    counted.most = 8
    crowd = [dial(listener) for _ in range(8)]
    until(lambda: [*listener.receive()] or counted.full, listener)
    later = Dialer(insecure=True)
    later.send((0, listener.address), b"later")
    heard(dialer, listener)
    assert counted.count == 9
    for each in crowd:
        each.close()
    until(lambda: b"later" in [frame for _, frame in listener.receive()], listener)
    assert not counted.full
    full, room = (record.getMessage() for record in caplog.records)
    seen = re.fullmatch("full: (.) connections, and new ones wait until some end", full)
    assert seen is not None
    assert seen[1] in "89", "the last may have come with the one before"
    assert "new ones are accepted again" in room
    later.close()


def test_a_crowd_that_stays_away_from_the_limit_of_descriptors(listener: Listener) -> None:
    """KVP-NET-CONNECTIONS: half of the descriptors are left to everything else."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert listener._connections.most == min(limits.MAX_CONNECTIONS, most // 2)


def test_two_keys_with_one_routing_id(tmp_path: Path) -> None:
    """KVP-NET-OWNER: who takes over another's routing id does not take over its sessions."""
    pairs = [make_keys(tmp_path / name) for name in ("source", "one", "two")]
    path = tmp_path / "allow.toml"
    path.write_text("".join(f'[[client]]\nkey = "{p.public.decode()}"\nengine = "e"\n' for p in pairs[1:]))
    listener = Listener("tcp://127.0.0.1:*", keys=pairs[0], allow=AllowList(path))
    context = zmq.Context()
    found = []
    for pair in pairs[1:]:
        with stranger(context, pairs[0], pair) as made:
            made.setsockopt(zmq.ROUTING_ID, b"the same")
            made.connect(listener.address)
            made.send(b"hello")
            ((conn, _),) = until(lambda: [*listener.receive()], listener)
            found.append(conn)
        until(lambda: [*listener.receive()] or not listener._connections.count, listener)
    assert found == [(b"the same", pair.public) for pair in pairs[1:]]
    context.term()
    listener.close()


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[Listener, KeyPair, list[KeyPair]]]:
    """A listener with two clients on its list, which takes two connections of each."""
    server, *clients = (make_keys(tmp_path / name) for name in ("source", "one", "two"))
    path = tmp_path / "allow.toml"
    path.write_text("".join(f'[[client]]\nkey = "{p.public.decode()}"\nengine = "e"\n' for p in clients))
    listener = Listener("tcp://127.0.0.1:*", keys=server, allow=AllowList(path))
    listener._connections.most_of_one = 2
    yield listener, server, clients
    listener.close()


def test_too_many_connections_of_one_client(
    keyed: tuple[Listener, KeyPair, list[KeyPair]], caplog: pytest.LogCaptureFixture
) -> None:
    """KVP-NET-CLIENT: what comes beyond its bound is closed, what it has goes on, others come in; the log names it."""
    listener, server, (one, two) = keyed
    dialers = [Dialer(keys=one) for _ in range(3)]
    for n, each in enumerate(dialers):
        each.send((0, listener.address), b"first %d" % n, server.public)
        if n < 2:
            until(lambda: [*listener.receive()], listener)
    counted = listener._connections
    until(lambda: [*listener.receive()] or counted.count == 3, listener)
    until(lambda: [*listener.receive()] or counted.count == 2, listener)
    found: set[bytes] = set()
    for n, each in enumerate(dialers):
        each.send((0, listener.address), b"second %d" % n)
    other = Dialer(keys=two)
    other.send((0, listener.address), b"other", server.public)
    expected = {b"second 0", b"second 1", b"other"}
    until(lambda: found.update(f for _, f in listener.receive()) or found >= expected, listener)
    assert found == expected
    assert f"client e (key {one.public.decode()}) has 2 connections" in caplog.text
    for each in (*dialers, other):
        each.close()


def test_the_log_counts_connections_of_strangers(
    keyed: tuple[Listener, KeyPair, list[KeyPair]], caplog: pytest.LogCaptureFixture
) -> None:
    """Those that speak are none of them, and the log is not flooded."""
    caplog.set_level(logging.INFO, "kvproto")
    listener, server, (one, _) = keyed
    speaks = Dialer(keys=one)
    speaks.send((0, listener.address), b"first", server.public)
    until(lambda: [*listener.receive()], listener)
    speaks.close()
    until(lambda: [*listener.receive()] or listener._connections.count == 0, listener)
    assert not caplog.records
    for _ in range(3):
        with dial(listener):
            until(lambda: [*listener.receive()] or listener._connections.count == 1, listener)
        until(lambda: [*listener.receive()] or listener._connections.count == 0, listener)
    assert [record.getMessage() for record in caplog.records] == ["connections that ended before they sent a frame: 1"]
    assert listener._connections._silent_ends == 2, "for the next line"


def test_connections_that_say_nothing(keyed: tuple[Listener, KeyPair, list[KeyPair]]) -> None:
    """KVP-NET-SILENT: the oldest make room, and those that speak go on."""
    listener, server, (one, two) = keyed
    speaks = Dialer(keys=one)
    speaks.send((0, listener.address), b"first", server.public)
    until(lambda: [*listener.receive()], listener)
    silent = []
    for n in range(4):
        silent.append(dial(listener))
        until(lambda n=n: [*listener.receive()] or listener._connections.count == min(2 + n, 3), listener)
    until(lambda: [*listener.receive()] or [closed(each) for each in silent] == [True, True, False, False], listener)
    speaks.send((0, listener.address), b"second")
    until(lambda: b"second" in [f for _, f in listener.receive()], listener)
    later = Dialer(keys=two)
    later.send((0, listener.address), b"later", server.public)
    until(lambda: b"later" in [f for _, f in listener.receive()], listener)
    for each in (speaks, later):
        each.close()
    for connection in silent:
        connection.close()


def test_the_bound_of_one_client_leaves_room_for_another(listener: Listener) -> None:
    """KVP-NET-CLIENT: where there are few descriptors too."""
    counted = listener._connections
    assert counted.most_of_one == min(limits.MAX_CLIENT_CONNECTIONS, counted.most // 2)


def stranger(context: zmq.Context[Any], server: KeyPair, own: KeyPair) -> zmq.Socket[bytes]:
    """A DEALER that is none of ours."""
    made: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.CURVE_SERVERKEY, server.public)
    made.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    made.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    return made


def test_a_listener_hears_its_peers_in_turn(listener: Listener, dialer: Dialer) -> None:
    """KVP-NET-TURN: one frame beside a thousand of another comes, and no turn takes more than its number of frames."""
    one, other = (1, listener.address), (2, listener.address)
    for key in (one, other):
        dialer.send(key, b"first")
    conns: set[Any] = set()
    until(lambda: conns.update(conn for conn, _ in listener.receive()) or len(conns) == 2, listener)
    for _ in range(1000):
        dialer.send(one, b"many")
    dialer.send(other, b"alone")
    turns: list[list[bytes]] = []
    until(lambda: turns.append([frame for _, frame in listener.receive()]) or b"alone" in turns[-1], listener)
    until(lambda: turns.append([frame for _, frame in listener.receive()]) or sum(map(len, turns)) == 1001, listener)
    assert max(map(len, turns)) <= limits.TURN_FRAMES


def test_a_dialer_hears_its_peers_in_turn(tmp_path: Path) -> None:
    """KVP-NET-TURN: likewise, and no turn takes more than its number of frames."""
    dialer, listeners = Dialer(), [Listener(private_address(tmp_path, name)) for name in ("one", "other")]
    conns = []
    for i, each in enumerate(listeners):
        dialer.send((i, each.address), b"hello")
        ((conn, _),) = until(lambda each=each: [*each.receive()], each)
        conns.append(conn)
    for _ in range(limits.TURN_FRAMES + 100):
        assert listeners[0].send(conns[0], b"many")
    assert listeners[1].send(conns[1], b"alone")
    until(lambda: all(line.inbox.readable for line in dialer._lines.values()), dialer)
    turn = [frame for _, frame in dialer.receive()]
    assert b"alone" in turn[:2]
    assert len(turn) <= limits.TURN_FRAMES
    until(lambda: turn.extend(frame for _, frame in dialer.receive()) or len(turn) == limits.TURN_FRAMES + 101, dialer)
    assert [dialer.holds(link) for link in range(2)] == [False, False]
    listeners[0].send(conns[0], b"more")
    until(lambda: dialer.send((0, listeners[0].address), b"look") and dialer.holds(0), dialer)
    assert not dialer.holds(1)
    for end in (dialer, *listeners):
        end.close()


@pytest.mark.parametrize("silent", [True, False])
def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: bool) -> None:
    """One that is stopped may come back; one that ends each handshake without a word has another key."""
    monkeypatch.setitem(sockets._OPTIONS, zmq.HANDSHAKE_IVL, 20)
    server, client = (make_keys(tmp_path / name) for name in ("server", "client"))
    dialer = Dialer(keys=client)
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialer.send((0, f"tcp://127.0.0.1:{listening.getsockname()[1]}"), b"hello", server.public)
        for _ in range(3 if not silent else 6):
            held.append(listening.accept()[0])
            if not silent:
                held.pop().close()
        if silent:
            assert not dialer.refusals()
        else:
            ((_, error),) = until(dialer.refusals, dialer)
            assert error.code == ErrorCode.WRONG_PEER
    for each in held:
        each.close()
    dialer.close()


def test_a_connection_that_comes_back() -> None:
    """KVP-SES-BACK: each time that it does, and not when it is first there; the descriptors tell of it."""
    dialer, listener = Dialer(insecure=True), Listener("tcp://127.0.0.1:*", insecure=True)
    key, found = (0, listener.address), []

    def back() -> list[Any]:
        assert not dialer.refusals()
        ready = select.select(dialer.filenos(), [], [], 0.005)[0]
        found.extend(dialer.returned(ready))
        return found

    dialer.send(key, b"hello")
    until(lambda: [*listener.receive()], listener)
    for times in range(1, 3):
        assert len(back()) == times - 1
        listener.close()
        listener = Listener(key[1], insecure=True)
        until(lambda times=times: len(back()) == times, listener)
    assert found == [key] * 2
    dialer.drop(0)
    assert not dialer.filenos()
    assert not dialer.returned([])
    for end in (dialer, listener):
        end.close()


def test_a_peer_that_never_reads(listener: Listener) -> None:
    """Frames beyond `send_queue` are refused, and this process keeps no more of them."""
    with dial(listener) as stranger:
        conn = greet(stranger, listener)
        frame, sent = bytes(1 << 16), 0
        while listener.send(conn, frame):
            sent += 1
            assert sent < 4 * limits.SEND_QUEUE
        assert sent >= limits.SEND_QUEUE


def test_no_descriptor_is_left(dialer: Dialer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that cannot be dialled is an error of its own, and nothing else."""

    def full(*_: object) -> zmq.Socket[bytes]:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(dialer._context, "socket", full)
    with pytest.raises(LocalError, match="ulimit"):
        dialer.send((0, "tcp://127.0.0.1:1"), b"hello")


def test_a_process_that_may_open_few_more_is_told_so_before_zeromq_ends_it(tmp_path: Path) -> None:
    """ZeroMQ asserts that it has descriptors for its own threads."""
    limit, dialer = resource.getrlimit(resource.RLIMIT_NOFILE), Dialer(insecure=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, limit[1]))
    try:
        with raises(LocalError, code=ErrorCode.INTERNAL, path="sources", mine="32 descriptors"):
            Dialer(insecure=True)
        with raises(LocalError, code=ErrorCode.INTERNAL, path="listen"):
            Listener(private_address(tmp_path, "s"))
        with raises(LocalError, code=ErrorCode.INTERNAL, path="address"):
            dialer.send((0, "tcp://127.0.0.1:1"), b"hello")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    dialer.send((0, "tcp://127.0.0.1:1"), b"hello")
    dialer.close()
    Listener(private_address(tmp_path, "s")).close()


def test_one_peer_that_names_many_addresses_takes_a_share_of_the_descriptors(dialer: Dialer) -> None:
    """A source names the addresses of its ranks, and a sink or a router dials them all."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limit[1]))
    try:
        for n in range(50):
            dialer.send(("bad", f"tcp://127.0.0.1:{n + 1}"), b"hello")
        with pytest.raises(LocalError, match="INTERNAL at address: expected at most 50 connections with one engine"):
            dialer.send(("bad", "tcp://127.0.0.1:51"), b"hello")
        dialer.send(("good", "tcp://127.0.0.1:1"), b"hello")
        assert len(os.listdir("/proc/self/fd")) < 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_an_ipc_address_is_not_found_while_there_are_too_many(tmp_path: Path) -> None:
    """KVP-NET-CONNECTIONS: those that come later are served when others have gone."""
    listener = Listener(private_address(tmp_path, "s"))
    listener._connections.most = 3
    dialers = [Dialer() for _ in range(4)]
    for dialer in dialers[:3]:
        dialer.send(("x", listener.address), b"hello")
        until(lambda: [*listener.receive()], listener)
    until(lambda: [*listener.receive()] or not (tmp_path / "s").exists(), listener)
    dialers[3].send(("x", listener.address), b"late")
    dialers[0].close()
    dialers[1].close()
    assert [frame for _, frame in until(lambda: [*listener.receive()], listener)] == [b"late"]
    assert [each.name for each in tmp_path.iterdir()] == ["s"]
    for end in (*dialers[2:], listener):
        end.close()
