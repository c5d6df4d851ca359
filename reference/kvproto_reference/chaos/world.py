"""One seed: four engines, the proxy between them, the orders and faults of its plan, and an orderly end."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import zmq

from kvproto import new_ticket, write_ticket
from kvproto.net import KeyPair

from .book import Name
from .breaks import BREAKS
from .engine import Setup
from .faults import Faults
from .judge import Ask, Judge
from .labels import PAGE
from .plan import DECODES, ENGINES, PREFILLS, Order, Plan, Weather
from .processes import Runner
from .proxy import Proxy
from .report import Result

__all__ = ["Keys", "World"]

_SETTLE, _FRESH, _END = 8.0, 8.0, 8.0
"""Seconds within which everything under way is over, fresh requests arrive, and engines end."""
_TRIES = 100
"""Starts of an engine whose address is taken, for example by a child of its former run."""


_OF_UCX = {"pipe": 2, "anon_inode": 1}
"""Descriptors of a thread that UCX cannot end, because a lack of descriptors cost it the port that it listened at."""
_ENDS = re.compile(r"^\[[^\]]*\] +\w+\.c:\d+ +(Assertion|Fatal)", re.MULTILINE)
"""A line that UCX writes when it ends a process, such as one whose peer's port was lost."""


@attrs.frozen
class Keys:
    """Key pairs of a run: of the engines, and of the proxy towards each side."""

    folder: Path
    engines: dict[str, KeyPair]
    front: KeyPair
    backs: dict[str, KeyPair]


class World:
    """Runs one plan."""

    def __init__(self, plan: Plan, keys: Keys, broken: str = "") -> None:
        self.plan, self._keys, self._broken = plan, keys, broken
        self.judge = Judge(plan)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._idle: dict[str, tuple[Any, ...]] = {}
        self._errors: dict[int, str] = {}
        """By request number: how its latest attempt was lost."""
        self._keeps: dict[str, int] = {}
        """Pages that prefill engines keep for routers to find."""
        self._found: dict[str, dict[str, tuple[int, int]]] = {}
        """By decode engine: what its router knows of prefill engines, as tokens of the prompt and pages."""
        self._ended: set[str] = set()
        self.calm = self._closing = False
        self._slow = 1.0
        """The factor by which engines wait longer for each other than on an idle machine, once the faults are over."""
        ports = dict(zip(PREFILLS, _ports(len(PREFILLS)), strict=True))
        listens = {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}
        self.faults = Faults(self)
        self.proxy = Proxy(
            plan.seed, keys.front, keys.backs, {p: (listens[p], keys.engines[p].public) for p in PREFILLS}, self.faults
        )
        self._break = BREAKS.get(broken)
        self.proxy.weather = (self._break and self._break.weather) or plan.weather
        front = keys.front.public.decode()
        self.engines = {
            name: Runner(
                Setup(
                    name,
                    i,
                    str(keys.folder),
                    listens.get(name, ""),
                    self._ways(name, front, False),
                    self._ways(name, front, True),
                    plan.transports[name],
                    plan.way == "pull",
                    plan.threads[name],
                    plan.verify,
                    plan.rates[name],
                    0.0,
                    False,
                    broken,
                    str(keys.folder / f"{name}.log"),
                )
            )
            for i, name in enumerate(ENGINES)
        }

    def _ways(self, name: str, key: str, router: bool) -> dict[str, tuple[str, str]]:
        """Addresses and keys by which a decode engine, or its router, finds prefill engines."""
        lanes = [lane for lane in self.proxy.lanes.values() if lane.pair.decode == name and lane.pair.router == router]
        return {lane.pair.prefill: (lane.address, key) for lane in lanes}

    # time

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` in `seconds` seconds."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), call))

    def _ends(self, done: Callable[[], bool], seconds: float) -> bool:
        """Take turns until `done`; returns whether it is within `seconds`, or longer if the machine is crowded."""
        if self._break is not None and self._break.patience is not None and self.calm:
            seconds = self._break.patience
        return self._until(done, seconds * max(1.0, _crowd()))

    def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Take turns until `done`, for at most `seconds`; returns whether it is."""
        end = time.monotonic() + seconds
        while not done():
            now = time.monotonic()
            if now >= end:
                return False
            next_due = self._due[0][0] - now if self._due else 1.0
            self.proxy.poller.poll(int(1000 * max(0.0, min(next_due, self.proxy.wait(), end - now, 0.05))))
            self.proxy.turn()
            for name, engine in self.engines.items():
                self._hear(name, engine)
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
        return True

    # the whole

    def run(self) -> Result:
        """Run the plan from start to end."""
        began = time.monotonic()
        try:
            for name in ENGINES:
                self._start(name)
            if not self._ends(lambda: all(e.up for e in self.engines.values()), _SETTLE):
                raise RuntimeError("the engines do not start")
            for order in self.plan.orders:
                self.at(order.at, lambda order=order: self._ask(order, 0))  # type: ignore[misc]
            for fault in self.plan.faults:
                if fault.kind != "kill at":
                    self.at(fault.at, lambda fault=fault: self.faults.happen(fault))  # type: ignore[misc]
            if not self._until(self._is_found, self.plan.seconds):
                self._end_of_faults()
                self._finish()
        finally:
            for engine in self.engines.values():
                engine.signal(signal.SIGKILL)
                engine.gone()
            self.proxy.close()
            self.faults.close()
        return self.judge.result(time.monotonic() - began, self._broken, self.proxy, self.engines)

    def _is_found(self) -> bool:
        """Whether the fault that is built in has been found, so that the rest does not matter."""
        return self._break is not None and bool(self._break.kinds & self.judge.kinds)

    def _end_of_faults(self) -> None:
        self.proxy.weather = Weather()
        self.calm, self._slow = True, max(1.0, _crowd() / 4)
        for name, engine in self.engines.items():
            engine.signal(signal.SIGCONT)
            engine.tell("calm", self._slow)
            if engine.behind or name in self.judge.misled:  # else it would stay behind, or misled
                self.kill(name, 0.0)
        for pair in self.judge.liars:
            self.engines[pair.decode].tell("reconnect", pair.prefill)

    def _finish(self) -> None:
        everybody = list(self.engines.values())
        if not self._ends(lambda: all(e.up for e in everybody), _SETTLE):
            down = [name for name, e in self.engines.items() if not e.up]
            self.judge.violation("hang", f"{down} did not start again")
            return
        self._ask_status()
        if not self._ends(lambda: all(self._idle.get(name) == ([], 0, []) for name in ENGINES), _SETTLE):
            busy = {name: self._idle.get(name) for name in ENGINES if self._idle.get(name) != ([], 0, [])}
            self.judge.violation("hang", f"requests under way, and pages in quarantine, that come to no end: {busy}")
            if self._is_found():
                return
        self._find(self._fresh())
        self._closing = True
        for engine in everybody:
            engine.tell("end")
        if not self._ends(lambda: not any(e.alive for e in everybody), _END):
            late = [name for name, e in self.engines.items() if e.alive]
            self.judge.violation("hang", f"{late} did not end")
        self._ends(lambda: not any(engine.left() for engine in everybody), _END)  # a forked child lingers, and goes
        for name, engine in self.engines.items():
            if left := engine.left():
                self.judge.violation("leak", f"{name} has left processes: {left}")

    def _ask_status(self) -> None:
        for engine in self.engines.values():
            engine.tell("status")
        if not self._closing:
            self.at(0.04, self._ask_status)

    def _fresh(self) -> list[Order]:
        """Have every pair complete a new request; returns those that arrived."""
        pairs = [pair for pair in self.proxy.lanes if not pair.router]
        orders = [
            Order(1000 + i, 0.0, pair.prefill, pair.decode, 20 + i, 0, 0.0, ((0.0, 20 + i),), 2.0 * self._slow, 1)
            for i, pair in enumerate(pairs)
        ]
        for order in orders:
            self._ask(order, 0)
        arrived = self.judge.arrived
        if not self._ends(lambda: all(order.number in arrived for order in orders), _FRESH):
            for order in [o for o in orders if o.number not in arrived]:
                why = f"{self.judge.lost_by(order.number)}, the latest: {self._errors.get(order.number, '')}"
                self.judge.violation("hang", f"no fresh request from {order.prefill} to {order.decode}: {why}")
        return [order for order in orders if order.number in arrived]

    def _find(self, orders: list[Order]) -> None:
        """Check that routers find fresh prompts where they were computed, and know the number of pages there."""
        asked = {name: {o.prefill: (o.number, o.tokens) for o in orders if o.decode == name} for name in DECODES}

        def told() -> dict[tuple[str, str], tuple[object, object]]:
            """By decode and prefill engine: what the router should say, and what it does say."""
            return {
                (o.decode, o.prefill): (
                    (o.tokens // PAGE * PAGE, self._keeps.get(o.prefill)),
                    self._found.get(o.decode, {}).get(o.prefill),
                )
                for o in orders
            }

        def ask() -> None:
            for name, prompts in asked.items():
                self.engines[name].tell("find", prompts)
            if not self._closing:
                self.at(0.04, ask)

        ask()
        if not self._ends(lambda: all(wanted == said for wanted, said in told().values()), _FRESH):
            wrong = {pair: both for pair, both in told().items() if both[0] != both[1]}
            self.judge.violation("stale", f"what routers should find (tokens, pages), and do: {wrong}")

    # engines

    def _start(self, name: str, **changes: Any) -> None:
        engine = self.engines[name]
        engine.start(**changes)
        assert engine.conn is not None
        self.proxy.poller.register(engine.conn.fileno(), zmq.POLLIN)

    def _gone(self, name: str) -> int | None:
        engine = self.engines[name]
        if engine.conn is not None:
            self.proxy.poller.unregister(engine.conn.fileno())
        code = engine.gone()
        for pair, lane in self.proxy.lanes.items():
            if pair.decode == name:
                lane.leave()
        self.judge.died(name)
        return code

    def kill(self, name: str, seconds: float, **changes: Any) -> None:
        """Kill an engine, and start another run after a while, with `changes` unless the faults are over by then."""
        engine = self.engines[name]
        if engine.alive:
            engine.signal(signal.SIGKILL)
            if self._gone(name) not in (None, -signal.SIGKILL):  # it was ending
                self._ended_by_itself(name, "")
            self.at(seconds, lambda: self._start(name, **({} if self.calm else changes)))

    def _hear(self, name: str, engine: Runner) -> None:
        if not engine.alive:
            return
        said = engine.heard()
        if said is None:
            code = self._gone(name)
            if name in self._ended:
                if code:
                    self.judge.violation("crash", f"{name} ended with {code}")
                return
            self._ended_by_itself(name, f"{name} has ended by itself with {code}")
            self.at(0.0, lambda: self._start(name))
            return
        for op, *arguments in said:
            self._said(name, engine, op, arguments)

    def _ended_by_itself(self, name: str, why: str) -> None:
        """Count an engine that ended by itself for want of memory, as libzmq and UCX do; any other is a violation."""
        engine, log = self.engines[name], Path(self.engines[name].setup.log)
        if engine.short or _by_ucx(log):
            self.judge.count("ended for want of memory" if engine.short else "ended by UCX")
            log.unlink(missing_ok=True)
        elif why:
            self.judge.violation("crash", why)

    def _said(self, name: str, engine: Runner, op: str, a: list[Any]) -> None:
        match op:
            case "up":
                engine.up = True
                if self.calm:
                    engine.tell("calm", self._slow)
                self.judge.count("starts")
            case "refused to start":
                self._gone(name)
                self.judge.count("starts refused")
                if engine.runs > _TRIES:
                    self.judge.violation("hang", f"{name} cannot start: {a[1]}")
                else:
                    self.at(0.05, lambda: self._start(name))
            case "drained":
                self.judge.count(op)
                self._gone(name)
                self.at(0.02, lambda: self._start(name))
            case "status":
                self._idle[name] = tuple(a)
            case "keeps":
                self._keeps[name] = a[0]
            case "found":
                self._found[name] = a[0]
            case "ended":
                self._ended.add(name)
                for what, number in a[0].items():
                    if number == _OF_UCX:
                        self.judge.count("left by UCX")
                    elif number:
                        self.judge.violation("leak", f"{name} has {what} left: {number}")
            case "arrived":
                self.judge.arrives(a[0])
            case "lost":
                self._lost(name, *a)
            case "finding":
                self.judge.finding(name, a[0])
            case "violation":
                self.judge.violation(a[0], f"{name}: {a[1]}")
            case "shortened":
                self.judge.count(f"shortening {a[0]}")
                if a[0] == "shorter":
                    self.judge.violation("shorter", f"{name} could shorten memory that peers have mapped")
            case "full shm":
                self.judge.count("full shm" if a[0] else "full shm not allowed here")
            case "over" | "refused" | "proven":
                self.judge.count(f"prefill {op} {a[1]}" if op != "proven" else op)

    # requests

    def _ask(self, order: Order, attempt: int) -> None:
        """Tell both engines of a request, as a router does."""
        name = order.number, attempt
        ticket = new_ticket(order.prefill, deadline=order.deadline)
        form = write_ticket(ticket)
        self.judge.asked(Ask(name, order, bytes(ticket.key)))
        for side, engine, word, late in (
            ("prefill", order.prefill, "request", max(-order.first, 0.0)),
            ("decode", order.decode, "fetch", max(order.first, 0.0)),
        ):
            if order.unheard != side:
                self.at(late, lambda e=engine, w=word: self._tell(e, name, w, order, form))  # type: ignore[misc]

    def _tell(self, engine: str, name: Name, word: str, order: Order, form: Any) -> None:
        runner = self.engines[engine]
        if runner.up:
            self.judge.told(name, engine)
            runner.tell(word, name, order, form)
        elif word == "fetch":
            self.judge.count("decode was down")
            self.at(0.1, lambda: self._tell(engine, name, word, order, form))

    def _lost(self, engine: str, name: Name, code: str, text: str) -> None:
        self.judge.loses(name, code)
        self._errors[name[0]] = text
        order, attempt = self.judge.asks[name].order, name[1]
        fresh = order.number >= 1000
        if not self._closing and (fresh or (attempt < 2 and not self.calm)):
            again = attrs.evolve(order, abort=None, fail=None, unheard="", other_prompt=False)
            if attempt < 200:
                self.at(0.05, lambda: self._ask(again, attempt + 1))


def _crowd() -> float:
    """The number of processes that share each processor."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _ports(count: int) -> list[int]:
    """Free ports below those that the kernel assigns, so that an engine can have the same port again."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for _ in range(1000):
        port = 10000 + int.from_bytes(os.urandom(2), "little") % max(lowest - 10000, 1000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


def _by_ucx(log: Path) -> bool:
    return log.exists() and _ENDS.search(log.read_text(errors="replace")) is not None
