"""The simulated network: connections that delay, break, are cut off, half open or full, as those of ZeroMQ over TCP."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

from kvproto.errors import LocalError
from kvproto.net import Dialer, Listener, limits
from kvproto.session import Party
from kvproto.wire.codec import message_class
from kvproto.wire.enums import ErrorCode
from tests.simulation.simulated import Process, Simulation

_RECONNECT = 0.1
_LATE = 0.3
"""Seconds for which one frame in thirty is late, and all behind it."""


Frames = list[tuple[bytes, float]]
"""Frames, each with the seconds by which it comes later."""


class Direction:
    """Frames of one direction of a connection, in order."""

    def __init__(self, line: Line, receiver: Process, inbox: deque[tuple[Any, bytes]], name: Any) -> None:
        self._line, self._receiver, self._inbox, self._name = line, receiver, inbox, name
        self._waiting: deque[bytes] = deque()
        self._ready = 0.0
        self.open = True

    def send(self, frame: bytes) -> bool:
        """Queue a frame; False if the queue is full."""
        network = self._line.network
        if len(self._waiting) + sum(name == self._name for name, _ in self._inbox) >= limits.SEND_QUEUE:
            network.simulation.reached["queue full"] += 1
            return False
        simulation, pair = network.simulation, self._line.pair
        number = network.count(pair, self._receiver)
        chance = simulation.draw("frame", pair, self._receiver.name, number)
        delay = network.latency * (0.5 + chance)
        if chance > 0.97:
            delay += _LATE * simulation.draw("late", pair, self._receiver.name, number)
            simulation.reached["frame late"] += 1
        for each, later in network.changed(pair, self._receiver, number, frame):
            if later:
                simulation.after(later, partial(self._add, each, delay))
            else:
                self._add(each, delay)
        return True

    def _add(self, frame: bytes, delay: float) -> None:
        simulation = self._line.network.simulation
        if self.open:
            self._waiting.append(frame)
            self._ready = max(self._ready, simulation.now + delay)
            simulation.at(self._ready, self._deliver)

    def _deliver(self) -> None:
        if not self.open or not self._waiting:
            return
        network = self._line.network
        until = network.cut_until(self._line.pair)
        if until > network.simulation.now:  # TCP sends it again once the network is whole
            network.simulation.at(until, self._deliver)
            return
        frame = self._waiting.popleft()
        if not self._line.heard(self):  # the other end has forgotten the connection
            network.simulation.reached["frame to nobody"] += 1
            return
        kind = kind_of(frame)
        network.simulation.say(self._receiver, f"<- {self._line.other(self._receiver)} {kind}")
        network.delivered(kind)
        self._inbox.append((self._name, frame))
        self._receiver.wake()


def kind_of(frame: bytes) -> str:
    """The kind of message that a frame says it is."""
    try:
        return message_class(frame).__name__
    except Exception:
        return "nonsense"


class Line:
    """One DEALER's connection to an address, made again when it breaks."""

    def __init__(self, network: Network, owner: Process, key: tuple[Any, ...], inbox: deque[tuple[Any, bytes]]) -> None:
        self.network, self.owner, self.key, self._inbox = network, owner, key, inbox
        self._queue: deque[bytes] = deque()
        self._out: Direction | None = None
        self._back: Direction | None = None
        self._listener: SimulatedListener | None = None
        self._name: tuple[Any, ...] = ()
        self.returned, self.closed, self._known, self._forgotten = False, False, False, False
        self.pair = owner.name, network.host_of(str(key[-1]))
        self._connect_later(network.latency)

    def other(self, process: Process) -> object:
        return self._listener.owner if process is self.owner and self._listener is not None else self.owner

    def heard(self, direction: Direction) -> bool:
        """Whether the end that a direction leads to still knows the connection."""
        return direction is not self._out or not self._forgotten

    def send(self, frame: bytes) -> bool:
        if self._out is not None:
            return self._out.send(frame)
        if len(self._queue) >= limits.SEND_QUEUE:
            return False
        self._queue.append(frame)
        return True

    def _connect_later(self, seconds: float) -> None:
        self.network.simulation.after(seconds, self._connect)

    def _connect(self) -> None:
        if self.closed or self._out is not None or not self.owner.alive:
            return
        listener = self.network.listeners.get(str(self.key[-1]))
        now = self.network.simulation.now
        if listener is None or not listener.owner.alive or self.network.cut_until(self.pair) > now:
            self._connect_later(_RECONNECT)
            return
        if self.owner.lacks("descriptors") or listener.owner.lacks("descriptors to accept with"):
            self._connect_later(_RECONNECT)
            return
        self._listener, self._forgotten = listener, False
        self._name = ("conn", self.network.simulation.number())
        self._out = Direction(self, listener.owner, listener.inbox, self._name)
        self._back = Direction(self, self.owner, self._inbox, self.key)
        listener.lines[self._name] = self
        self.network.simulation.say(self.owner, f"-> {listener.owner} connects")
        if self._known:
            self.returned = True
            self.owner.wake()
        self._known = True
        while self._queue:
            self._out.send(self._queue.popleft())

    def answer(self, frame: bytes) -> bool:
        """Send a frame from the listener's end."""
        return self._back is not None and not self._forgotten and self._back.send(frame)

    def forget(self, seconds: float) -> None:
        """Leave it half open: the listener's end is gone, and the other end learns of it after a while."""
        if self._out is None or self._forgotten or self._listener is None:
            return
        self._forgotten = True
        self._listener.lines.pop(self._name, None)
        if self._back is not None:
            self._back.open = False
        self.network.simulation.after(seconds, self.broken)

    def broken(self) -> None:
        """Lose the connection with all that is on its way."""
        if self._out is None or self._back is None or self._listener is None:
            return
        self.network.simulation.say(self.owner, f"-> {self._listener.owner} breaks")
        self._out.open = self._back.open = False
        self._listener.lines.pop(self._name, None)
        self._out = self._back = None
        if not self.closed:
            self._connect_later(_RECONNECT)

    def close(self) -> None:
        """Close it once what is queued was sent."""
        self.closed = True
        if self._listener is not None and self._out is not None:
            self.network.simulation.after(0.5, self.broken)


class SimulatedListener(Listener):
    """A Listener in the simulated network."""

    def __init__(self, network: Network, owner: Process, address: str) -> None:
        self.network, self.owner, self.address = network, owner, address
        self.inbox: deque[tuple[Any, bytes]] = deque()
        self.lines: dict[tuple[Any, ...], Line] = {}
        network.listeners[address] = self

    @property
    def pending(self) -> bool:
        return bool(self.inbox)

    def filenos(self) -> list[int]:
        return []

    def receive(self, ready: Collection[int] | None = None) -> Iterator[tuple[Hashable, bytes]]:
        for _ in range(limits.TURN_FRAMES):
            if not self.inbox:
                return
            yield self.inbox.popleft()

    def renew(self, now: float) -> bool:
        return False

    def admit(self, conn: Hashable, party: Party, role: int) -> None:
        return

    def name_of(self, conn: Hashable) -> str:
        return "(unknown peer)"

    def send(self, conn: Hashable, frame: bytes) -> bool:
        assert isinstance(conn, tuple)
        line = self.lines.get(conn)
        return line is not None and line.answer(frame)

    def close(self) -> None:
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]
        for line in list(self.lines.values()):
            self.network.simulation.after(0.5, line.broken)


class _Names:
    def advice(self, address: str) -> str:
        return "check that it runs at this address"


class SimulatedDialer(Dialer):
    """A Dialer in the simulated network."""

    def __init__(self, network: Network, owner: Process) -> None:
        self.network, self.owner = network, owner
        self.inbox: deque[tuple[Any, bytes]] = deque()
        self.lines: dict[tuple[Any, ...], Line] = {}
        self.names = _Names()  # type: ignore[assignment]
        self._none: dict[int, object] = {}
        network.dialers[owner.number] = self

    @property
    def pending(self) -> bool:
        return bool(self.inbox)

    def filenos(self) -> Mapping[int, object]:
        return self._none

    def receive(self, ready: Collection[int] | None = None) -> Iterator[tuple[tuple[Any, ...], bytes]]:
        for _ in range(limits.TURN_FRAMES):
            if not self.inbox:
                return
            key, frame = self.inbox.popleft()
            if key in self.lines:
                yield key, frame

    def holds(self, owner: Hashable) -> bool:
        return any(key[0] is owner for key, _ in self.inbox)

    def refusals(self, ready: Collection[int] | None = None) -> list[Any]:
        return []

    def returned(self, ready: Collection[int] | None = None) -> list[tuple[Any, ...]]:
        returned = [line.key for line in self.lines.values() if line.returned]
        for key in returned:
            self.lines[key].returned = False
        return returned

    def send(self, key: tuple[Any, ...], frame: bytes, server: bytes | None = None) -> bool:
        line = self.lines.get(key)
        if line is None:
            if self.owner.lacks("descriptors to dial with"):
                advice = "raise the limit of open files (ulimit -n)"
                raise LocalError(ErrorCode.INTERNAL, "address", "a descriptor for a connection", "none", advice)
            line = self.lines[key] = Line(self.network, self.owner, key, self.inbox)
        return line.send(frame)

    def drop(self, owner: Hashable) -> None:
        for key in [key for key in self.lines if key[0] is owner]:
            self.lines.pop(key).close()

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
        self.lines.clear()


class Network:
    """All connections, and what is wrong with them."""

    def __init__(self, simulation: Simulation, latency: float) -> None:
        self.simulation, self.latency = simulation, latency
        self.listeners: dict[str, SimulatedListener] = {}
        self.dialers: dict[int, SimulatedDialer] = {}
        self._cut: dict[tuple[str, str], float] = {}
        self._counts: dict[tuple[Any, ...], int] = {}
        self._hosts: dict[str, str] = {}
        self.changes: dict[tuple[str, str, int], Callable[[bytes], Frames]] = {}
        """Functions that change the frame of this number, by sender's and receiver's names."""
        self.delivered: Callable[[str], None] = lambda kind: None
        """Called with the kind of each frame that comes."""
        self.liars: dict[str, Callable[[bytes], Frames]] = {}
        """What becomes of the frames of hostile processes, by name."""

    def listener(self, address: str, *_: Any, **__: Any) -> SimulatedListener:
        assert self.simulation.current is not None
        return SimulatedListener(self, self.simulation.current, address)

    def dialer(self, *_: Any, **__: Any) -> SimulatedDialer:
        assert self.simulation.current is not None
        return SimulatedDialer(self, self.simulation.current)

    def name_host(self, address: str, process: str) -> None:
        """Record which process listens at an address."""
        self._hosts[address] = process

    def host_of(self, address: str) -> str:
        return self._hosts.get(address, address)

    def count(self, pair: tuple[str, str], receiver: Process) -> int:
        """The number of the next frame of a direction."""
        key = (pair, receiver.name)
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    def counted(self, pair: tuple[str, str], receiver: str) -> int:
        """The number of the last frame of a direction."""
        return self._counts.get((pair, receiver), 0)

    def changed(self, pair: tuple[str, str], receiver: Process, number: int, frame: bytes) -> Frames:
        """The frames that come in place of this one."""
        sender = pair[1] if receiver.name == pair[0] else pair[0]
        change = self.changes.pop((sender, receiver.name, number), None) or self.liars.get(sender)
        return [(frame, 0.0)] if change is None else change(frame)

    # faults

    def cut(self, pair: tuple[str, str], seconds: float) -> None:
        """Let nothing pass between two processes for a while; nothing is lost."""
        self._cut[pair] = max(self._cut.get(pair, 0.0), self.simulation.now + seconds)

    def cut_until(self, pair: tuple[str, str]) -> float:
        return self._cut.get(pair, 0.0)

    def lines_between(self, pair: tuple[str, str]) -> list[Line]:
        """The connections of two processes, by the names of the sink's and the source's."""
        return [line for dialer in self.dialers.values() for line in dialer.lines.values() if line.pair == pair]

    def lose(self, process: Process, seconds: float) -> None:
        """Let the connections of a process that has died break: at once, or after a while for peers far away."""
        for address, listener in list(self.listeners.items()):
            if listener.owner is process:
                del self.listeners[address]
                for line in list(listener.lines.values()):
                    line.forget(seconds)
        dialer = self.dialers.pop(process.number, None)
        for line in list(dialer.lines.values()) if dialer is not None else ():
            line.closed = True
            line.broken()
