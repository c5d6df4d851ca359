"""What strangers and bad clients send to a source on loopback TCP with CURVE; beside each, a good sink completes a transfer."""

import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest
import zmq

from kvproto import Options, Pool, Seed, Sink, Source, new_ticket, read_ticket, write_ticket
from kvproto import events as told
from kvproto.net import read_keys
from kvproto.wire import encode
from kvproto.wire import messages as m
from tests.processes import FORKED, imported

from .doors import GEOMETRY, PAGES, PROMPT, Two, filled
from .keyed import Host, allow, entry, host, keyed, served

imported(__name__)
pytestmark = pytest.mark.usefixtures("watchful")

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def port(both: Two) -> int:
    return int(both.source._node._listener.address.rpartition(":")[2])


def crowd(both: Two, stack: ExitStack, sent: Callable[[int], bytes], count: int = 150) -> list[socket.socket]:
    """TCP connections, each of which sends something and stays."""
    made = []
    for i in range(count):
        each = stack.enter_context(socket.create_connection(("127.0.0.1", port(both))))
        each.sendall(sent(i))
        made.append(each)
    return made


@pytest.mark.parametrize(
    "sent", [b"", GREETING[:30], GREETING], ids=["half-open", "in mid-greeting", "after the greeting"]
)
def test_a_crowd_that_says_no_more(tmp_path: Path, sent: bytes) -> None:
    """KVP-NET-HANDSHAKE."""
    with keyed(tmp_path) as (both, _, _), ExitStack() as stack:
        crowd(both, stack, lambda i: sent)
        served(both)


def test_garbage_of_strangers(tmp_path: Path) -> None:
    random = Random(1)
    with keyed(tmp_path) as (both, _, _), ExitStack() as stack:
        crowd(both, stack, lambda i: random.randbytes(500))
        crowd(both, stack, lambda i: GREETING + random.randbytes(500))
        hello = b"\x04\xc8\x05HELLO\x01\x00"
        crowd(both, stack, lambda i: GREETING + hello + random.randbytes(192))
        served(both)


def test_a_slow_handshake(tmp_path: Path) -> None:
    """A byte at a time, each just before its next turn."""
    with keyed(tmp_path) as (both, _, _), ExitStack() as stack:
        slow = crowd(both, stack, lambda i: GREETING[:1], 20)
        for i in range(1, len(GREETING)):
            for each in slow:
                each.sendall(GREETING[i : i + 1])
            both.turn()
        served(both)


def few_descriptors(folder: Path, line: Connection) -> None:
    """A source that serves whatever ticket comes; it may open 400 descriptors more, and needs 8 for each request."""
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 400, used + 400))
    with Source("prefill", filled(), "tcp://127.0.0.1:*", Options(keys=folder)) as source:
        line.send(source._node._listener.address)
        while (ticket := line.recv()) is not None:
            for fd in [os.dup(0) for _ in range(8)]:
                os.close(fd)
            source.request(read_ticket(ticket), PROMPT).finish({"kv": [3, 1, 2]})
    line.send("closed in order")


def until_connected(sink: Sink) -> None:
    while not any(isinstance(event, told.Connected) for event in sink.step(0.1)):
        pass


def test_more_connections_than_descriptors(tmp_path: Path) -> None:
    """KVP-NET-CONNECTIONS: some are left to the engine, and to the peers that it has."""
    prefill, decode = host(tmp_path, "prefill"), host(tmp_path, "decode")
    allow(prefill, [entry(decode)])
    line, there = FORKED.Pipe()
    FORKED.Process(target=few_descriptors, args=(prefill.folder, there), daemon=True).start()
    there.close()
    address = line.recv()
    seed = {"prefill": Seed(address, prefill.public)}
    with (
        Sink("decode", Pool.allocate(GEOMETRY, PAGES), seed, Options(keys=decode.folder, thread=False)) as sink,
        ExitStack() as stack,
    ):
        for _ in range(500):
            made = stack.enter_context(socket.socket())
            made.setblocking(False)
            made.connect_ex(("127.0.0.1", int(address.rpartition(":")[2])))
        for _ in range(10):  # the kernel tries connections again that found no room, after a second
            ticket = new_ticket("prefill")
            line.send(write_ticket(ticket))
            sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]}).wait(30)
            assert not line.poll(0.2)
    line.send(None)
    line.send(None)
    assert line.recv() == "closed in order"


@contextmanager
def client(both: Two, prefill: Host, decode: Host, folder: Path) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER of a client that is on the list, and is none of ours."""
    own = host(folder, "bad")
    allow(prefill, [entry(decode), entry(own, "bad")])
    allowed = both.source._node._listener._allow
    assert allowed is not None
    both.until(lambda: allowed.knows(own.public.encode()))
    pair, context = read_keys(own.folder), zmq.Context()
    made: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.CURVE_SERVERKEY, prefill.public.encode())
    made.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    made.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    made.connect(both.source._node._listener.address)
    yield made
    context.destroy(0)


HEAD = b"KVPW\x01\x00"
FRAMES: dict[str, Callable[[Random], list[bytes]]] = {
    "garbage": lambda random: [random.randbytes(300)],
    "heads and garbage": lambda random: [HEAD + struct.pack("<HHHI", 0x0202, 0, 0, 100) + random.randbytes(100)],
    "many parts": lambda random: [b"part"] * 50,
    "well formed": lambda random: [encode(m.Ping(session=random.getrandbits(64), request=1))],
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_flood_of_a_client_that_is_on_the_list(tmp_path: Path, kind: str) -> None:
    """KVP-NET-TURN, KVP-NET-ONE."""
    random = Random(2)
    with keyed(tmp_path) as (both, prefill, decode), client(both, prefill, decode, tmp_path) as bad:
        for _ in range(1000):
            bad.send_multipart(FRAMES[kind](random))
        served(both)


def test_a_flood_of_connections_with_unknown_keys(tmp_path: Path) -> None:
    """KVP-NET-UNKNOWN."""
    with keyed(tmp_path) as (both, prefill, _):
        context = zmq.Context()
        for _ in range(50):
            made = context.socket(zmq.DEALER)
            public, secret = zmq.curve_keypair()
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.CURVE_SERVERKEY, prefill.public.encode()),
                (zmq.CURVE_PUBLICKEY, public),
                (zmq.CURVE_SECRETKEY, secret),
            ):
                made.setsockopt(option, value)
            made.connect(both.source._node._listener.address)
            made.send(b"let me in")
        served(both)
        assert len(both.source._node.endpoint.sessions) == 1
        context.destroy(0)
