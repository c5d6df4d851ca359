"""The proxy between the engines: a listener for each pair of them, which terminates CURVE on both sides.

Every frame passes through `Proxy.turn`, in the harness's own thread, so that an engine can be killed right before or
after it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import struct
import time
from collections import Counter
from itertools import product
from typing import Any, Protocol

import attrs
import zmq

from kvproto.errors import KvprotoError
from kvproto.net import KeyPair
from kvproto.wire import decode
from kvproto.wire import messages as m

from .plan import Weather

__all__ = ["Pair", "Passing", "Proxy", "Watcher", "read"]

_NAMES = {cls.TYPE: name for name, cls in vars(m).items() if isinstance(getattr(cls, "TYPE", None), int)}
_UNREPEATED = {"Data", "Chunk", "Credit", "Kept"}
"""Messages that are lost only if their connection is; if the proxy loses one, it cuts the connection too."""
Socket = zmq.Socket[bytes]


@attrs.frozen
class Pair:
    """A prefill engine and a decode engine."""

    prefill: str
    decode: str
    router: bool = attrs.field(default=False, repr=False)
    """Whether it is the decode engine's router that connects to prefill."""


@attrs.frozen
class Passing:
    """A frame on its way."""

    pair: Pair
    up: bool
    """Whether it goes from decode to prefill."""
    frame: bytes
    client: bytes
    """The decode engine's connection."""

    @property
    def name(self) -> str:
        """The name of its message, or "unknown"."""
        number = struct.unpack_from("<H", self.frame, 6)[0] if len(self.frame) >= 8 else -1
        return _NAMES.get(number, "unknown")


class Watcher(Protocol):
    """An observer of the proxy's frames."""

    def before(self, one: Passing) -> None:
        """Called before a frame passes."""

    def after(self, one: Passing) -> None:
        """Called after a frame has passed."""

    def forged(self, one: Passing) -> bytes:
        """The frame to pass instead."""

    def lied(self, one: Passing, said: Any, made: Any) -> None:
        """Called for a frame that was changed and can be read, with the message before and after."""


class _Lane:
    """One pair's sockets: a ROUTER where decode dials, and a DEALER to prefill for each of its connections."""

    def __init__(self, proxy: Proxy, pair: Pair, backend: str, server: bytes) -> None:
        self.pair, self._proxy, self._backend, self._server = pair, proxy, backend, server
        self.backs: dict[bytes, Socket] = {}
        self.front: Socket | None = None
        self.address = "tcp://127.0.0.1:*"
        self.listen()

    def listen(self) -> None:
        """Open the side of decode, unless the address is not free yet."""
        made = self._proxy.open(zmq.ROUTER)
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, self._proxy.keys.secret)
        try:
            made.bind(self.address)
        except zmq.ZMQError:
            self._proxy.shut(made)
            return
        self.front, self.address = made, made.getsockopt_string(zmq.LAST_ENDPOINT)

    def back(self, client: bytes) -> Socket:
        """The socket to prefill for one connection of decode."""
        made = self.backs.get(client)
        if made is None:
            keys = self._proxy.clients[self.pair.decode]
            made = self.backs[client] = self._proxy.open(zmq.DEALER)
            made.setsockopt(zmq.CURVE_SERVERKEY, self._server)
            made.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            made.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            made.connect(self._backend)
        return made

    def cut(self) -> None:
        """Break all connections of the pair; decode dials again by itself, and frames on their way are lost."""
        if self.front is not None:
            self._proxy.shut(self.front)
            self.front = None
        self.leave()

    def leave(self) -> None:
        """Close the connections to prefill, as when the decode engine's process has ended."""
        for socket in self.backs.values():
            self._proxy.shut(socket)
        self.backs.clear()


class Proxy:
    """All pairs' lanes, and what the weather does to frames."""

    def __init__(
        self,
        seed: int,
        keys: KeyPair,
        clients: dict[str, KeyPair],
        backends: dict[str, tuple[str, bytes]],
        watcher: Watcher,
    ) -> None:
        """`backends` has the address and public key of each prefill engine."""
        self.seed, self.keys, self.clients, self._watcher = seed, keys, clients, watcher
        self._context: zmq.Context[Socket] = zmq.Context()
        self.poller = zmq.Poller()
        self.weather = Weather()
        self.counts: Counter[str] = Counter()
        """Frames by what was done to them."""
        self.passed: Counter[str] = Counter()
        """Frames by message."""
        self._late: list[tuple[float, int, Passing]] = []
        self._numbers = itertools.count()
        self._seen: Counter[tuple[Pair, bool]] = Counter()
        self._swapped: dict[tuple[Pair, bool], Passing] = {}
        self.lanes = {
            pair: _Lane(self, pair, *backends[pair.prefill])
            for pair in (Pair(*each) for each in product(backends, clients, (False, True)))
        }

    def open(self, kind: int) -> Socket:
        """A socket that the loop watches."""
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, 20)
        self.poller.register(made, zmq.POLLIN)
        return made

    def shut(self, socket: Socket) -> None:
        """Close such a socket."""
        self.poller.unregister(socket)
        socket.close()

    def wait(self) -> float:
        """Seconds until a frame that was held is due."""
        return max(self._late[0][0] - time.monotonic(), 0.0) if self._late else 1.0

    def turn(self) -> None:
        """Pass on what has arrived, and held frames that are due."""
        for lane in self.lanes.values():
            self._drain(lane)
        while self._late and self._late[0][0] <= time.monotonic():
            self._pass(heapq.heappop(self._late)[2])

    def _drain(self, lane: _Lane) -> None:
        if lane.front is None:
            lane.listen()
        front = lane.front
        for _ in range(64 if front is not None else 0):
            assert front is not None
            try:
                client, *frames = front.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                break
            if len(frames) == 1:
                self._treat(Passing(lane.pair, True, frames[0], client))
            if lane.front is not front:
                return
        for client, back in list(lane.backs.items()):
            for _ in range(64):
                if lane.backs.get(client) is not back:
                    return
                try:
                    frame = back.recv(zmq.DONTWAIT)
                except zmq.ZMQError:
                    break
                self._treat(Passing(lane.pair, False, frame, client))

    def _treat(self, one: Passing) -> None:
        """Do what the weather does, drawn from the seed, the pair, the direction, and the number of frames before."""
        way = one.pair, one.up
        self._seen[way] += 1
        rng = random.Random(f"{self.seed} {one.pair} {one.up} {self._seen[way]}")
        weather, drawn = self.weather, rng.random()
        before = self._swapped.pop(way, None)
        for what in ("drop", "delay", "double", "swap", "cut", "garble", "lie"):
            drawn -= getattr(weather, what)
            if drawn < 0:
                self.counts[what] += 1
                getattr(self, f"_{what}")(one, rng)
                break
        else:
            self._pass(one)
        if before is not None:
            self._pass(before)

    def _pass(self, one: Passing) -> None:
        lane = self.lanes[one.pair]
        self.passed[one.name] += 1
        self._watcher.before(one)
        try:
            if one.up:
                lane.back(one.client).send(self._watcher.forged(one), zmq.DONTWAIT)
            elif lane.front is not None:
                lane.front.send_multipart([one.client, one.frame], zmq.DONTWAIT)
        except zmq.ZMQError:
            self.counts["nobody there"] += 1
        self._watcher.after(one)

    def _hold(self, one: Passing, seconds: float) -> None:
        heapq.heappush(self._late, (time.monotonic() + seconds, next(self._numbers), one))

    # weather

    def _drop(self, one: Passing, rng: random.Random) -> None:
        if one.name in _UNREPEATED:
            self.lanes[one.pair].cut()

    def _delay(self, one: Passing, rng: random.Random) -> None:
        if one.name in _UNREPEATED:
            self._pass(one)
        else:
            self._hold(one, rng.expovariate(1 / 0.05))

    def _double(self, one: Passing, rng: random.Random) -> None:
        self._pass(one)
        if one.name not in _UNREPEATED:
            self._hold(one, rng.expovariate(1 / 0.1))

    def _swap(self, one: Passing, rng: random.Random) -> None:
        if one.name in _UNREPEATED:
            self._pass(one)
        else:
            self._swapped[one.pair, one.up] = one

    def _cut(self, one: Passing, rng: random.Random) -> None:
        self._damage(one, one.frame[: rng.randrange(len(one.frame))], False)

    def _garble(self, one: Passing, rng: random.Random) -> None:
        self._damage(one, _changed(one.frame, rng), False)

    def _lie(self, one: Passing, rng: random.Random) -> None:
        for _ in range(40):
            made = _changed(one.frame, rng)
            if read(made) is not None:
                self._damage(one, made, True)
                return
        self._pass(one)

    def _damage(self, one: Passing, frame: bytes, may_read: bool) -> None:
        made = read(frame)
        if made is not None:
            if not may_read:
                self.counts["lie"] += 1
            self._watcher.lied(one, read(one.frame), made)
        self._pass(attrs.evolve(one, frame=frame))
        if one.name in _UNREPEATED:
            self.lanes[one.pair].cut()

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(0)


def _changed(frame: bytes, rng: random.Random) -> bytes:
    made = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    return bytes(made)


def read(frame: bytes) -> Any:
    """The message of a frame, or None if a reader refuses it."""
    try:
        return decode(frame)
    except KvprotoError:
        return None
