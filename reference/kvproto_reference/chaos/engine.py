"""Shared parts of both engines of chaos: a process with a door, a pipe to the harness, and a checked end."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from kvproto import Geometry, KvprotoError, Options, Pool, Prompt, Sink, Source
from kvproto.events import Event
from kvproto.rank.handles import Withdrawal
from kvproto.session import limits as times

from . import limits
from .book import Finding, Name, Shelf
from .clock import Clock
from .labels import GEOMETRY, LAYERS, WITH_DRAFT
from .slow import SlowShm

__all__ = ["TIMES", "Engine", "Setup", "prompt_of", "tokens_of"]

TIMES = {"RESEND": 0.12, "PATIENCE": 1.2, "TICKET_WAIT": 0.6, "PING_SILENCE": 0.25}
"""Times of a session, in seconds: short, so that a stop can be longer than all of them (kvproto.session.limits)."""
LEASE = 0.6
_STEP = 0.01
"""Seconds of a step."""
PAGES = 160


@attrs.frozen
class Setup:
    """Arguments of one run of an engine."""

    name: str
    number: int
    folder: str
    listen: str
    """Address at which a prefill engine listens."""
    sources: dict[str, tuple[str, str]]
    """Addresses and keys of prefill engines, for a decode engine."""
    routed: dict[str, tuple[str, str]]
    """The same for its router."""
    transport: str
    pull: bool
    thread: bool
    verify: bool | str
    rate: float
    behind: float
    """Seconds by which the wall clock is behind, as a negative number."""
    full_shm: bool
    broken: str
    """A fault that is built in to test the checker: a name of BREAKS, or empty."""
    log: str

    @property
    def keys(self) -> str:
        """The folder with its keys."""
        return f"{self.folder}/{self.name}"

    def options(self) -> Options:
        """The options of its Source or Sink."""
        writes = (self.name.startswith("prefill")) != self.pull
        pause = 0.04 if self.broken in ("late write", "no proof") else 0.006
        transports: list[Any] = [self.transport if self.transport in ("inline", "nixl") else "shm"]
        if self.transport.startswith("slow") and writes:
            transports = [SlowShm(LAYERS, pause, self.broken)]
        return Options(
            keys=self.keys,
            transports=transports,
            pull=self.pull,
            thread=self.thread,
            verify=self.verify,  # type: ignore[arg-type]
            lease=LEASE,
            cold_draft=True,
        )


def prompt_of(request: int, tokens: int, other: bool = False) -> Prompt:
    """The prompt of a request, or with `other` a different one."""
    return Prompt(tokens_of(request + other, tokens))


def tokens_of(request: int, tokens: int) -> list[int]:
    """The tokens of a request's prompt."""
    return [request, *range(1, tokens)]


@attrs.define
class Old:
    """A pool that is being withdrawn from peers."""

    withdrawal: Withdrawal
    pool: Pool
    shelf: Shelf
    steps: int = -1
    """Steps for which it is still checked, once no peer may touch it; -1 before that."""


class Engine:
    """One run of a prefill or decode engine."""

    door: Source | Sink
    shelf: Shelf

    def __init__(self, conn: Connection, setup: Setup) -> None:
        self.conn, self.setup = conn, setup
        self.clock = Clock(setup.rate, setup.behind)
        if setup.broken == "shorter":
            limits.seal_nothing()
        self.pool = Pool.allocate(GEOMETRY, PAGES)
        self._said: list[tuple[Any, ...]] = []
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._old: list[Old] = []
        self.ending = False
        if setup.broken == "shorter":
            self.after(0.2, self.on_shorten)

    # the harness

    def say(self, *word: Any) -> None:
        """Tell the harness, together with the other words of this step."""
        self._said.append(word)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` in the step that is `seconds` from now."""
        self._later.append((self.clock.real() + seconds, call))

    def serve(self) -> None:
        """Run steps until the harness says that it is over."""
        self.say("up")
        while not self.ending:
            self._flush()
            for event in self._turn():
                self.hear(event)
            while not self.ending and self.conn.poll():
                op, *arguments = self.conn.recv()
                getattr(self, f"on_{op}")(*arguments)
            now = self.clock.real()
            due, self._later = [x for x in self._later if x[0] <= now], [x for x in self._later if x[0] > now]
            for _, call in due:
                if not self.ending:
                    call()
            self.look()
            self._close_old()

    def _flush(self) -> None:
        if self._said:
            said, self._said = self._said, []
            self.conn.send(said)

    def _turn(self) -> list[Event]:
        if self.setup.thread:
            self.conn.poll(_STEP)
            return self.door.events()
        return self.door.step(_STEP)

    def hear(self, event: Event) -> None:
        """Handle an event of kvproto."""
        raise NotImplementedError

    def look(self) -> None:
        """Check all pages at the end of a step."""
        for shelf in (self.shelf, *self.old_shelves()):
            self.find(shelf.check())

    def find(self, findings: list[Finding]) -> None:
        """Tell the harness of findings."""
        for each in findings:
            self.say("finding", each)

    # what the harness says to both kinds of engine

    def on_jump(self, seconds: float) -> None:
        """Let the clock jump forward."""
        self.clock.jump(seconds)

    def on_descriptors(self, left: float, seconds: float) -> None:
        """Allow only `left` more descriptors for a while."""
        limits.descriptors(int(left))
        self.after(seconds, limits.lift)

    def on_memory(self, left: float, seconds: float) -> None:
        """Allow only `left` more MiB of address space for a while."""
        limits.memory(int(left))
        self.after(seconds, limits.lift)

    def on_calm(self, slow: float) -> None:
        """Lift all limits; on a machine that is slower by the factor `slow`, wait longer for peers."""
        limits.lift()
        for name in ("PATIENCE", "TICKET_WAIT"):
            setattr(times, name, slow * TIMES[name])

    def on_fork(self, seconds: float) -> None:
        """Fork a child that calls the door, and lingers."""
        said = limits.fork(self.door, seconds)
        self.after(seconds + 0.3, said)

    def on_shorten(self) -> None:
        """Shorten the memory that peers have mapped."""
        self.say("shortened", limits.shorten())
        self._flush()  # a process that has lost its memory does not get far

    # pools that come and go

    def on_sleep(self, seconds: float) -> None:
        """Give the memory up for a while."""
        self._sleep(seconds, self.pool.geometry)

    def on_caches(self, seconds: float) -> None:
        """Give the memory up for a while, and come back with a draft, or without it."""
        self._sleep(seconds, self.other_caches())

    def other_caches(self) -> Geometry:
        """The caches that this engine does not have now: with a draft, or without it."""
        return GEOMETRY if self.pool.geometry == WITH_DRAFT else WITH_DRAFT

    def _sleep(self, seconds: float, geometry: Geometry) -> None:
        if not self.door.asleep:
            self.retire(self.door.sleep())
            self.after(seconds, lambda: self._wake(geometry))

    def _wake(self, geometry: Geometry) -> None:
        try:
            pool = Pool.allocate(geometry, PAGES)
        except KvprotoError:  # memory is short
            self.after(0.05, lambda: self._wake(geometry))
            return
        self.door.wake(pool)
        self.use(pool)

    def use(self, pool: Pool) -> None:
        """Use this pool from now on."""
        raise NotImplementedError

    def in_use(self, shelf: Shelf) -> list[tuple[Name, str]]:
        """Requests whose pages a peer may still touch, and what is known of each; none at prefill, where they may only
        be waiting for an acknowledgement.
        """
        return []

    def retire(self, withdrawal: Withdrawal) -> None:
        """Keep the present pool as it is until no peer may touch it."""
        self._old.append(Old(withdrawal, self.pool, self.shelf))

    def old_shelves(self) -> list[Shelf]:
        """The shelves of withdrawn pools that are still there."""
        return [old.shelf for old in self._old]

    def free_pool(self, withdrawal: Withdrawal) -> None:
        """Blank a pool that no peer may touch now, once all events are heard; watch it for a while, then close it."""
        old = next(each for each in self._old if each.withdrawal is withdrawal)
        old.steps = 20

    def _close_old(self) -> None:
        for old in [each for each in self._old if each.steps >= 0]:
            old.steps -= 1
            if old.steps == 18:
                for name, state in self.in_use(old.shelf):
                    text = f"{old.withdrawal} is done while request {name[0]}.{name[1]} is under way in it, {state}"
                    self.say("finding", Finding("freed too early", text, name, name))
                old.shelf.wipe()
            if old.steps < 0:
                self._old.remove(old)
                old.shelf.close()
                old.pool.close()

    def status(self, waiting: list[str], quarantined: int) -> None:
        """Say what is not over."""
        held = [repr(old.withdrawal) for old in self._old if old.steps < 0]
        self.say("status", waiting, quarantined, held)

    def on_drain(self) -> None:
        """Finish what is under way, then stop; the harness starts it again."""
        self.door.drain()
        self._drained()

    def _drained(self) -> None:
        if self.door.drained:
            self.door.close("drained")
            self.say("drained")
            self._flush()
            self.ending = True
        else:
            self.after(0.02, self._drained)

    def on_end(self) -> None:
        """Release everything, and say what is left."""
        self.ending = True
        self.door.close("over")
        self.let_go()
        for pool, shelf in [(self.pool, self.shelf), *((old.pool, old.shelf) for old in self._old)]:
            shelf.close()
            pool.close()
        left = {"threads": [t.name for t in threading.enumerate() if t.name.startswith(("kvproto", "chaos"))],
                "mappings": Path("/proc/self/maps").read_text().count("memfd:kvproto"),
                "descriptors": dict(limits.opened() - self._before)}  # fmt: skip
        self.say("ended", left)
        self._flush()

    def let_go(self) -> None:
        """Drop all views of the pool."""

    _before: Counter[str]

    def began(self, descriptors: Counter[str]) -> None:
        """Remember the descriptors that were open before the door was."""
        self._before = descriptors


def run(make: Callable[[Connection, Setup], Engine], conn: Connection, setup: Setup) -> None:
    """The process of an engine, from its first line to its last."""
    os.setsid()
    log = os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    logging.basicConfig(level=logging.ERROR)  # whatever an engine says on stderr is a violation
    for name, seconds in TIMES.items():
        setattr(times, name, seconds)
    before = limits.opened()
    try:
        if setup.full_shm:
            conn.send([("full shm", limits.fill_shm())])
        engine = make(conn, setup)
    except KvprotoError as error:
        with contextlib.suppress(OSError):
            conn.send([("refused to start", error.code.name, str(error))])
        sys.exit(3)
    engine.began(before)
    try:
        engine.serve()
    except (BrokenPipeError, EOFError):  # the harness is gone
        os._exit(0)
