"""One run of a story: engines, requests and faults; then quiet, in which everything has to end; then the end of all."""

from __future__ import annotations

import gc
import os
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial

import attrs

from kvproto.session import limits
from tests.simulation.engines import DecodeRank, PrefillRank, address
from tests.simulation.hostile import change
from tests.simulation.memory import GhostPool, Place, spare
from tests.simulation.network import Network
from tests.simulation.simulated import Simulation, Violation
from tests.simulation.story import DECODE, PREFILL, Ask, Fault, Story

_PROBE = 9999
QUIET = limits.TICKET_WAIT + 3 * limits.PATIENCE + 30
"""Seconds after the last fault and deadline in which everything has to end."""


@attrs.frozen
class Result:
    """The outcome of a run."""

    violation: Violation | None
    digest: str
    lines: list[str]
    reached: Counter[str]
    seconds: float
    """Simulated seconds."""
    events: int


class Run:
    """One run of a story."""

    def __init__(self, story: Story, traced: bool = False) -> None:
        self.story, self.setup = story, story.setup
        self.simulation = Simulation(story.seed, story.setup.tick, traced)
        self.network = Network(self.simulation, story.setup.latency)
        for rank in range(self.setup.prefill):
            self.network.name_host(address(rank), f"{PREFILL}{rank}")
        self._places: dict[bytes, Place] = {}
        self._runs = Counter[str]()
        self.prefill: list[PrefillRank] = []
        self.decode: list[DecodeRank] = []
        self._unproven = False
        """Whether a writer died whose death proves nothing, so that pages may stay in quarantine."""

    # engines

    def _start(self, role: str, wall: float = 0.0) -> None:
        if self._alive(role):
            return
        self._runs[role] += 1
        make = PrefillRank if role == PREFILL else DecodeRank
        count = self.setup.prefill if role == PREFILL else self.setup.decode
        wall += self._runs[role] * 1e-3
        ranks = [
            make(self.simulation, self.setup, role, rank, self._runs[role], self._places, wall) for rank in range(count)
        ]
        if role == PREFILL:
            self.prefill = ranks  # type: ignore[assignment]
        else:
            self.decode = ranks  # type: ignore[assignment]

    def _ranks(self, role: str) -> list[PrefillRank] | list[DecodeRank]:
        return self.prefill if role == PREFILL else self.decode

    def _alive(self, role: str) -> bool:
        return any(rank.alive for rank in self._ranks(role))

    def _end_engine(self, role: str, fault: Fault) -> None:
        """End an engine, rank by rank, and start it again later."""
        far = self.simulation.draw("far", fault.at, fault.number) < 0.4
        for rank in self._ranks(role):
            if not rank.alive:
                continue
            if fault.kind == "leave":
                self._unproven = self._unproven or self._unprovable(rank)
                rank.call(rank.leave)
                if rank.alive:  # it is stopped: its operator loses patience
                    self._kill(rank, 0.0)
                continue
            self._kill(rank, 20.0 if far else 0.0)
        wall = -3600.0 if fault.kind == "clock back" else 0.0
        self.simulation.after(min(fault.seconds, 45.0), lambda: self._start(role, wall))
        if wall:
            self.simulation.after(min(fault.seconds, 45.0) + 20.0, lambda: self._set_clock(role))

    def _set_clock(self, role: str) -> None:
        for rank in self._ranks(role):
            if rank.alive:
                self._kill(rank, 0.0)
        self._start(role)

    def _kill(self, rank: PrefillRank | DecodeRank, seconds: float) -> None:
        self._unproven = self._unproven or self._unprovable(rank)
        self.network.lose(rank, seconds)
        rank.kill()

    def _unprovable(self, rank: PrefillRank | DecodeRank) -> bool:
        """Whether the end of this rank proves nothing about its writes."""
        return (rank.role == PREFILL) != self.setup.pull and self.setup.way == "remote"

    # requests and faults

    def _ask(self, ask: Ask) -> None:
        for role, lag in zip((PREFILL, DECODE), ask.lags, strict=True):
            if lag < 0:
                continue
            for rank in range(self.setup.prefill if role == PREFILL else self.setup.decode):
                skew = self.simulation.draw("skew", role, rank, ask.id) * 2e-3
                for delay in (lag, ask.again) if ask.again >= 0 else (lag,):
                    self.simulation.after(delay + skew, partial(self._tell, role, rank, ask))

    def _tell(self, role: str, rank: int, ask: Ask) -> None:
        process = self._ranks(role)[rank]
        process.call(lambda: process.hear_of(ask))

    def _fault(self, fault: Fault) -> None:
        self.simulation.say("fault", f"{fault.kind} {fault}")
        self.simulation.reached[f"fault: {fault.kind}"] += 1
        role = DECODE if fault.at_decode else PREFILL
        pair = f"{DECODE}{fault.decode}", f"{PREFILL}{fault.prefill}"
        rank = self._ranks(role)[fault.decode if fault.at_decode else fault.prefill]
        lines = self.network.lines_between(pair)
        match fault.kind:
            case "break":
                for line in lines:
                    line.broken()
            case "half open":
                for line in lines:
                    line.forget(min(fault.seconds, 40.0))
            case "cut":
                self.network.cut(pair, fault.seconds)
                if fault.seconds > 15:  # TCP gives up
                    for line in lines:
                        self.simulation.after(15.0, line.broken)
            case "stop":
                rank.stop(fault.seconds)
            case "slow":
                rank.gap = 0.05
                self.simulation.after(fault.seconds, lambda: setattr(rank, "gap", 1e-4))
            case "jump":
                rank.jump(fault.seconds * 3)
            case "kill" | "leave" | "clock back":
                self._end_engine(role, fault)
            case "sleep":
                for each in self._ranks(role):
                    each.call(partial(each.sleep, min(fault.seconds, 10.0)))
            case "move":
                for each in self.decode:
                    each.call(each.move)
            case "drain":
                for each in self._ranks(role):
                    each.call(lambda each=each: each.try_(each.door.drain))  # type: ignore[misc]
                self.simulation.after(min(fault.seconds, 20.0), lambda: self._end_engine(role, attrs.evolve(fault, kind="leave", seconds=0.1)))
            case "change frame" | "repeat frame":
                self.simulation.lied = self.simulation.lied or fault.kind == "change frame"
                sender, receiver = pair if fault.at_decode else pair[::-1]
                number = self.network.counted(pair, receiver) + fault.number
                self.network.changes[sender, receiver, number] = change(fault, self.simulation)

    # a run

    def whole(self) -> None:
        """Play the story; raises Violation."""
        simulation, story = self.simulation, self.story
        self._start(PREFILL)
        self._start(DECODE)
        for ask in story.asks:
            simulation.at(ask.at, partial(self._ask, ask))
        for fault in story.faults:
            simulation.at(fault.at, partial(self._fault, fault))
        last = max((fault.at + min(fault.seconds, 110.0) + 25.0 for fault in story.faults), default=0.0)
        asked = max((ask.at + max(*ask.lags, ask.again, 0.0) + ask.compute + 1 for ask in story.asks), default=0.0)
        simulation.run(max(last, asked))
        calm = simulation.now
        for role in (PREFILL, DECODE):
            if any(getattr(rank.door, "_draining", False) or not rank.alive for rank in self._ranks(role)):
                self._end_engine(role, Fault(calm, "leave", seconds=0.0))
        longest = max((ask.deadline for ask in story.asks), default=0.0)
        simulation.run(calm + 1.05 * longest + QUIET, self._over)
        self._check_over()
        self._check_arrived()
        self._probe()
        for each in (*self.decode, *self.prefill):
            each.check()
            with simulation.running(each):
                each.leave()

    def _over(self) -> bool:
        return not any(rank.waiting() or rank.door.quarantined or len(rank.ghosts) > 1 for rank in (*self.prefill, *self.decode) if rank.alive)

    def _check_over(self) -> None:
        """Raise Violation for what has not ended."""
        for rank in (*self.prefill, *self.decode):
            for text in rank.waiting():
                if "lost True" in text and (self._unproven or self.simulation.lied):
                    continue
                raise Violation("hang", text)
            if rank.door.quarantined and not (self._unproven or self.simulation.lied):
                raise Violation("hang", f"{rank} keeps {rank.door.quarantined} in quarantine")
            if len(rank.ghosts) > 1 and not (self._unproven or self.simulation.lied):
                raise Violation("hang", f"{rank} does not get a pool back")

    def _check_arrived(self) -> None:
        """Raise Violation for a request that nothing hindered and that has not arrived, or a source that is not ready."""
        undisturbed = not self.story.faults and len(self.story.asks) <= 3
        for ask in self.story.asks if undisturbed else ():
            usual = ask.deadline >= 10 and ask.abort < 0 and ask.fail < 0 and ask.again < 0 and not ask.other_prompt
            if usual and 0 <= min(ask.lags) and max(ask.lags) < 4 and not self.simulation.reached["decode out of pages"]:
                for rank in self.decode:
                    if ask.id not in rank.arrived:
                        raise Violation("lost", f"{rank}: request {ask.id}, which nothing hindered, has not arrived")
        if self.setup.eager and not self.simulation.lied and not self._unproven:
            self.simulation.run(self.simulation.now + limits.PATIENCE, lambda: all(rank.door.ready for rank in self.decode))
            for rank in self.decode:
                if not rank.door.ready:
                    raise Violation("hang", f"{rank} is not ready: {rank.door.sources}")

    def _probe(self) -> None:
        """Let each pair complete a new request."""
        for rank in self.decode:
            if self._unproven or self.simulation.lied:
                return  # engines that were misled, or whose pages are held, are started again by their operators
        ask = Ask(_PROBE, 0.0, 9)
        began = self.simulation.now
        self._ask(ask)
        self.simulation.run(began + limits.PATIENCE + limits.TICKET_WAIT, lambda: all(_PROBE in rank.arrived for rank in self.decode))
        for rank in self.decode:
            if _PROBE not in rank.arrived:
                raise Violation("hang", f"{rank}: a request after all faults does not arrive: {rank.outcomes.get(_PROBE)} {rank.door.sources}")
        self.simulation.run(self.simulation.now + limits.PATIENCE, self._over)
        self._check_over()

    def clean(self) -> None:
        """Release what is left after a violation."""
        for rank in (*self.prefill, *self.decode):
            if rank.alive:
                self._guarded(lambda rank=rank: self._kill(rank, 0.0))  # type: ignore[misc]

    @staticmethod
    def _guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            return


def play(story: Story, traced: bool = False) -> Result:
    """Play a story; an exception of kvproto is a violation too."""
    if not spare():  # the first memory of a process takes descriptors that stay
        GhostPool(Simulation(0), 1, 0, 4, 0).close()
    before = _descriptors()
    run = Run(story, traced)
    found: Violation | None = None
    with run.simulation.installed(run.network.listener, run.network.dialer):
        try:
            run.whole()
        except Violation as violation:
            found = violation
        except Exception as error:
            found = Violation("crash", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        if found is not None:
            run.clean()
    simulation = run.simulation
    if found is None and _descriptors() > before:
        gc.collect()
        if _descriptors() > before:
            found = Violation("leak", f"{_descriptors() - before} descriptors")
    return Result(found, simulation.digest, simulation.lines, simulation.reached, simulation.now, simulation.events)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - spare()
