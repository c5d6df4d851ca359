"""Simulated storage, and the threads that wait for it: torn, slow, full, lying, and gone with the power."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvproto.tiers.manifest import Data
from kvproto.tiers.workers import CallQueue
from tests.simulation.simulated import Process, Simulation

ILLS = ("storage fails", "storage full", "storage torn", "storage lies", "storage slow", "storage hangs")
"""Kinds of faults that last a while."""
_HANG = 25.0
"""Seconds that a call takes in a storage that hangs."""
_RECENT = 24
"""The latest changes that a loss of power may undo."""


class _Ended(BaseException):
    """The end of the process within a call."""


class SimulatedStore:
    """Bytes under keys, for all engines."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._chance = random.Random(simulation.seed ^ 0x5707A6E)
        self._kept: dict[str, tuple[bytes, float]] = {}
        self._recent: list[tuple[str, tuple[bytes, float] | None]] = []
        """The latest changes: keys, and what they had before."""
        self._ills: dict[str, float] = {}
        self.left: int | None = None
        """The number of calls until the process that makes them ends."""

    # faults

    def fall_ill(self, kind: str, seconds: float) -> None:
        self._ills[kind] = max(self._ills.get(kind, 0.0), self._simulation.now + seconds)

    def ill(self, kind: str) -> bool:
        """Whether something is wrong now."""
        return self._ills.get(kind, 0.0) > self._simulation.now

    def _strikes(self, kind: str, share: float = 0.5) -> bool:
        strikes = self.ill(kind) and self._chance.random() < share
        if strikes:
            self._simulation.reached[kind] += 1
        return strikes

    def lose_power(self) -> None:
        """Undo some of the latest changes, in no order."""
        for key, before in reversed(self._recent):
            if self._chance.random() < 0.4:
                self._simulation.reached["change undone by a loss of power"] += 1
                self._kept.pop(key, None) if before is None else self._kept.__setitem__(key, before)
        self._recent.clear()

    def seconds(self) -> float:
        """The seconds that a call takes."""
        chance = self._chance.random()
        if self._strikes("storage hangs", 0.3):
            return _HANG * (0.5 + chance)
        return (2.0 if self._strikes("storage slow", 0.7) else 0.01) * chance**2

    # the store

    def _call(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise _Ended
        if self._strikes("storage fails"):
            raise OSError(errno.EIO, "the disk has failed")

    def _change(self, key: str, content: bytes | None) -> None:
        self._recent = [*self._recent[-_RECENT:], (key, self._kept.pop(key, None))]
        if content is not None:
            self._kept[key] = content, self._simulation.now

    def put(self, key: str, data: Data) -> None:
        """Keep these bytes."""
        content = bytes(data)
        if self.left == 0 or self._strikes("storage torn", 0.3):  # nobody promises that a key is changed at once
            self._change(key, content[: self._chance.randrange(len(content) + 1)])
        self._call()
        if self._strikes("storage full"):
            raise OSError(errno.ENOSPC, "no space left")
        if self._strikes("storage torn", 0.3):
            self._change(key, content[: self._chance.randrange(len(content) + 1)])
        elif self._strikes("storage lies", 0.4):  # for good
            self._change(key, self._lie(content))
        else:
            self._change(key, content)

    def get(self, key: str) -> bytes | None:
        """The bytes of a key."""
        self._call()
        content = self._kept[key][0] if key in self._kept else None
        return self._lie(content) if self._strikes("storage lies", 0.4) else content

    def _lie(self, content: bytes | None) -> bytes | None:
        others = [other for other, _ in self._kept.values()]
        lie = self._chance.choice(("other", "flip", "longer", "none", "empty"))
        if lie == "other" and others:
            return self._chance.choice(others)
        if lie == "longer":
            return (content or b"") + b"\0"
        if lie == "flip" and content:
            at = self._chance.randrange(len(content))
            return content[:at] + bytes([content[at] ^ 1 << self._chance.randrange(8)]) + content[at + 1 :]
        return b"" if lie == "empty" else None

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._call()
        if not self._strikes("storage lies", 0.3):
            self._change(key, None)

    def keys(self, kind: str) -> Iterator[str]:
        """Keys of a kind."""
        self._call()
        found = [key for key in self._kept if key.startswith(kind + "/")]
        if self._strikes("storage lies", 0.4):
            found = [*found[1:], f"{kind}/nonsense", f"{kind}/"]
        return iter(found)

    def age(self, key: str) -> float:
        """Seconds since a key was written."""
        self._call()
        return self._simulation.now - self._kept[key][1] if key in self._kept else 0.0

    def size(self, key: str) -> int | None:
        """Bytes of a key."""
        self._call()
        size = len(self._kept[key][0]) if key in self._kept else None
        return (
            size
            if size is None or not self._strikes("storage lies", 0.2)
            else self._chance.choice((0, size + 1, 1 << 40))
        )


class RoomyStore(SimulatedStore):
    """A store that also keeps many keys at once, and reads into memory of the caller."""

    batch = 4

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """Keep each pair in turn."""
        for key, data in pairs:
            self.put(key, data)

    def get_into(self, key: str, room: memoryview) -> int | None:
        """Read a key into `room`."""
        content = self.get(key)
        if content is None:
            return None
        count = min(len(content), len(room))
        room[:count] = content[:count]
        return len(content)


class SimulatedThreads:
    """A few threads of a process that do calls of storage; each call takes as long as the storage says."""

    def __init__(self, owner: Process, store: SimulatedStore, calls: CallQueue, count: int) -> None:
        self._owner, self._store, self._calls, self._idle = owner, store, calls, count
        self._begun: list[Sequence[Any]] = []
        self._woken = 0
        calls.added = self._wake
        owner.threads.append(self)

    def _wake(self) -> None:
        self._woken += 1
        simulation = self._owner.simulation
        simulation.hardware(simulation.draw("thread", self._owner.name, self._woken) * 1e-3, self._begin)

    def _begin(self) -> None:
        if not (self._idle and self._calls.waiting and self._owner.alive):
            return
        with self._owner.simulation.running(self._owner), self._calls.changed:
            begun = self._calls.take()
        if begun:
            self._idle -= 1
            self._begun.append(begun)
            self._owner.simulation.hardware(self._store.seconds(), lambda: self._end(begun))
        self._begin()

    def _end(self, begun: Sequence[Any]) -> None:
        if begun not in self._begun:
            return
        if (late := self._owner.stopped_until - self._owner.simulation.now) > 0:
            self._owner.simulation.hardware(late, lambda: self._end(begun))
            return
        self._begun.remove(begun)
        with self._owner.simulation.running(self._owner):
            self._calls.run(begun)
        self._idle += 1
        self._owner.wake()
        self._begin()

    def die(self) -> None:
        """End within what is under way: some of it has reached the storage."""
        for begun in self._begun:
            self._owner.simulation.reached["death while storage is written"] += 1
            self._store.left = int(self._owner.simulation.draw("torn", self._owner.name, len(self._begun)) * 5)
            with self._owner.simulation.running(self._owner):
                self._calls.run(begun)
            self._store.left = None
        self._begun.clear()


def serving(simulation: Simulation, store: SimulatedStore) -> Callable[[CallQueue, int], None]:
    """The threads of the process that runs."""

    def serve(calls: CallQueue, count: int) -> None:
        assert simulation.current is not None
        SimulatedThreads(simulation.current, store, calls, count)

    return serve
