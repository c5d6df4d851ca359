"""The simulated world: one queue of events, processes with clocks of their own, threads, and the trace of a run."""

from __future__ import annotations

import hashlib
import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from itertools import count
from typing import Any

from kvproto.rank.machine import machine
from kvproto.transport.process import Watch
from kvproto.wire.messages import Process as ProcessName

_BOOT, _NAMESPACE, _WALL = bytes(range(16)), 1, 1.8e9
_KEPT = 64
"""The last lines of a trace that are kept without `--trace`."""


class Violation(Exception):
    """Something that must never happen: its kind, and what happened."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Process:
    """One simulated process, which runs one rank of an engine from its start to its death."""

    def __init__(self, simulation: Simulation, name: str, run: int, rate: float = 1.0, wall: float = 0.0) -> None:
        """`rate` is the speed of its clock, and `wall` the seconds by which its time of day is wrong."""
        self.simulation, self.name, self.run, self.role = simulation, name, run, name.rstrip("0123456789")
        self.alive, self.stopped_until, self.gap = True, 0.0, 1e-4
        self.short_until, self.ever_short, self.forked = 0.0, False, False
        self._rate, self._wall, self._since, self._base, self._ticks = rate, wall, simulation.now, 1000.0, 0.0
        self._due: float | None = None
        self._turns = 0
        self.number = simulation.number()
        self.watches: list[SimulatedWatch] = []
        self.attestations = set[bytes]()
        self.threads: list[Any] = []
        """Threads that end with it, by `die`."""

    def __str__(self) -> str:
        return self.name if self.run == 1 else f"{self.name}#{self.run}"

    # clocks

    def monotonic(self) -> float:
        """This process's clock, which each reading moves on."""
        self._ticks += self.simulation.tick
        return self._base + (self.simulation.now - self._since) * self._rate + self._ticks

    def time(self) -> float:
        """This process's time of day."""
        return _WALL + self.simulation.now + self._wall

    def jump(self, seconds: float) -> None:
        """Let the clock jump forward, as after a suspension of the machine."""
        self._base += seconds
        self.wake()

    def run_clock(self, rate: float) -> None:
        """Let the clock run at another speed from now on; 0: it stands still."""
        self._base, self._since = self._base + (self.simulation.now - self._since) * self._rate, self.simulation.now
        self._rate = rate
        self.wake()

    # shortages

    def run_short(self, seconds: float) -> None:
        """Have neither descriptors nor memory left for a while."""
        self.short_until, self.ever_short = max(self.short_until, self.simulation.now + seconds), True

    def lacks(self, what: str) -> bool:
        """Whether it cannot get one more of something now."""
        lacks = self.short_until > self.simulation.now
        if lacks:
            self.simulation.reached[f"short of {what}"] += 1
        return lacks

    # turns

    def turn(self) -> float | None:
        """Take one turn; returns the seconds of its clock until the next is due, None if no timer is set."""
        raise NotImplementedError

    def call(self, work: Callable[[], object]) -> None:
        """Have the engine of this process do something, once it is not stopped."""
        if not self.alive:
            return
        if self.stopped_until > self.simulation.now:
            self.simulation.at(self.stopped_until, lambda: self.call(work))
            return
        with self.simulation.running(self):
            work()
        self.wake()

    def wake(self, seconds: float | None = None) -> None:
        """Take a turn in so many seconds, or soon."""
        if not self.alive:
            return
        if seconds is None:
            self._turns += 1
            seconds = self.gap * (0.5 + self.simulation.draw("turn", self.name, self._turns))
        when = max(self.simulation.now + seconds, self.stopped_until)
        if self._due is None or when < self._due:
            self._due = when
            self.simulation.at(when, lambda: self._take_turn(when))

    def _take_turn(self, when: float) -> None:
        if not self.alive or self._due != when:
            return
        self._due = None
        if self.stopped_until > self.simulation.now:
            self.wake(self.stopped_until - self.simulation.now)
            return
        with self.simulation.running(self):
            seconds = self.turn()
        if seconds is not None:
            self.wake(max(seconds / (self._rate or 1.0), self.gap))

    def stop(self, seconds: float) -> None:
        """Let nothing of it run for a while, as after SIGSTOP."""
        self.stopped_until = max(self.stopped_until, self.simulation.now + seconds)

    def die(self) -> None:
        """End at once; peers on the same host can see it."""
        self.alive = False
        for thread in self.threads:
            thread.die()
        for watch in self.watches:
            watch.end()


class SimulatedWatch(Watch):
    """A watch of a simulated process."""

    def __init__(self, watched: Process, owner: Process) -> None:
        self._watched, self._owner = watched, owner
        self._bell: int | None = os.eventfd(int(not watched.alive), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        watched.watches.append(self)

    def end(self) -> None:
        if self._bell is not None:
            os.eventfd_write(self._bell, 1)
            self._owner.wake()

    def fileno(self) -> int | None:
        return self._bell

    @property
    def ended(self) -> bool:
        return not self._watched.alive

    def close(self) -> None:
        if self._bell is not None:
            os.close(self._bell)
            self._bell = None


class SimulatedExecutor(Executor):
    """A thread of a process: what it is given ends after a while."""

    def __init__(self, owner: Process) -> None:
        self._owner, self._jobs, self._shut = owner, 0, False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        self._jobs += 1
        simulation = self._owner.simulation
        simulation.after(
            simulation.draw("job", self._owner.name, self._jobs) ** 2 * 0.05, lambda: self._run(future, fn, args)
        )
        return future

    def _run(self, future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self._shut or not self._owner.alive:
            future.cancel()
            return
        with self._owner.simulation.running(self._owner):
            try:
                future.set_result(work(*args))
            except Exception as error:
                future.set_exception(error)
        self._owner.wake()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._shut = True


class Simulation:
    """The queue of events; everything that happens is drawn from the seed."""

    def __init__(self, seed: int, tick: float = 0.0, traced: bool = False) -> None:
        """`tick` is what a clock moves on with each reading, so that work takes time."""
        self.seed, self.tick, self.now, self.current = seed, tick, 0.0, None
        self._seed = seed.to_bytes(8, "little")
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._numbers, self._randoms = count(), count(1), count()
        self._hardware = set[int]()
        """Events of `hardware`, by their place in the order."""
        self._traced, self.lines = traced, list[str]()
        self._digest = hashlib.blake2b(digest_size=8)
        self.reached = Counter[str]()
        """How often each kind of fault and state was reached."""
        self.processes: dict[int, Process] = {}
        self.misled = set[str]()
        """Decode engines with a frame that was changed on its way: it may fail, and its own pages may go wrong."""
        self.events = 0
        self.after_all: list[Callable[[], None]] = []
        """Calls that release what is used again by other runs."""

    current: Process | None

    def number(self) -> int:
        """The number of the next process, also its PID."""
        return next(self._numbers)

    def draw(self, *key: object) -> float:
        """A number from 0 to 1 that the seed and this key decide, whatever else happens."""
        text = self._seed + repr(key).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") / (1 << 48)

    # the queue

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def hardware(self, seconds: float, action: Callable[[], None]) -> None:
        """Something that happens in so many seconds even while a process sleeps within a turn."""
        order = next(self._order)
        self._hardware.add(order)
        heapq.heappush(self._queue, (self.now + seconds, order, action))

    def run(self, until: float, over: Callable[[], bool] = lambda: False) -> None:
        """Do what is due until a time, or until it is `over`."""
        queue = self._queue
        while queue and queue[0][0] <= until and not over():
            when, _, action = heapq.heappop(queue)
            self.now = max(self.now, when)
            self.events += 1
            if self.events > _MOST:
                raise Violation("storm", f"{_MOST} events in {self.now:.1f} s")
            action()
        self.now = max(self.now, until) if not queue or queue[0][0] > until else self.now

    @contextmanager
    def running(self, process: Process) -> Iterator[None]:
        """Let a process run: it sees its own clocks."""
        before, self.current = self.current, process
        try:
            yield
        finally:
            self.current = before

    # the trace

    def say(self, who: object, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now:12.6f} {who} {text}"
        self._digest.update(line.encode())
        self.lines.append(line)
        if not self._traced and len(self.lines) > 2 * _KEPT:
            del self.lines[:_KEPT]

    @property
    def digest(self) -> str:
        """The digest of the whole trace."""
        return self._digest.hexdigest()

    # the world

    def _process(self) -> Process:
        assert self.current is not None, "nothing runs outside a process"
        return self.current

    def _randbelow(self, bound: int) -> int:
        return int(self.draw("random", next(self._randoms)) * bound)

    def _sleep(self, seconds: float) -> None:
        """Let hardware go on meanwhile; all else comes late."""
        self._wait(seconds, lambda: False)

    def _wait(self, seconds: float, over: Callable[[], bool]) -> bool:
        """Let hardware, and threads, go on until it is `over`, for so many seconds at most."""
        until = self.now + seconds
        while not over():
            due = min(
                (event for event in self._queue if event[0] <= until and event[1] in self._hardware), default=None
            )
            if due is None:
                self.now = until
                return over()
            self._queue.remove(due)
            heapq.heapify(self._queue)
            self.now = max(self.now, due[0])
            due[2]()
        return True

    def _name(self) -> ProcessName:
        number = self._process().number
        return ProcessName(boot=_BOOT, namespace=_NAMESPACE, pid=number, start=number)

    def _watch(self, name: ProcessName) -> Watch | None:
        known, process = self.processes.get(name.pid), self._process()
        return None if known is None or process.lacks("descriptors to watch with") else SimulatedWatch(known, process)

    def _attest(self, attestation: bytes, holds: bool) -> None:
        attestations = self._process().attestations
        attestations.add(attestation) if holds else attestations.discard(attestation)

    def _getpid(self) -> int:
        process = self.current
        return os.getpid() if process is None else -process.number if process.forked else process.number

    @contextmanager
    def installed(
        self, listener: Callable[..., Any], dialer: Callable[..., Any], serve: Callable[..., None]
    ) -> Iterator[None]:
        """Let ranks run in this world."""
        names = [field.name for field in type(machine).__attrs_attrs__]
        before = {name: getattr(machine, name) for name in names}
        machine.monotonic, machine.time = lambda: self._process().monotonic(), lambda: self._process().time()
        machine.getpid, machine.attest = self._getpid, self._attest
        machine.sleep, machine.randbelow = self._sleep, self._randbelow
        machine.executor = lambda: SimulatedExecutor(self._process())
        machine.listener, machine.dialer = listener, dialer
        machine.serve, machine.wait_for = serve, lambda condition, over, seconds: self._wait(seconds, over)
        machine.process, machine.watch = self._name, self._watch
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(machine, name, value)


_MOST = 100_000
"""Events after which a run is taken for a storm."""
