"""One run of a story: engines, requests and faults; then quiet, in which everything has to end; then the end of all."""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections import Counter
from functools import partial
from itertools import product

import attrs

from kvproto.session import limits
from tests.simulation.engines import DecodeRank, PrefillRank, World, address, tokens_of
from tests.simulation.hostile import Liar, change
from tests.simulation.memory import GhostPool, spare
from tests.simulation.network import Network
from tests.simulation.routing import ROUTER, Router
from tests.simulation.simulated import Simulation, Violation
from tests.simulation.storage import ILLS, RoomyStore, SimulatedStore, serving
from tests.simulation.story import DECODES, PREFILLS, Ask, Fault, Story

QUIET = limits.TICKET_WAIT + 3 * limits.PATIENCE + 30
"""Seconds after the last fault and deadline in which everything has to end."""
_PROBE = 9000
"""The requests that each decode engine makes when all is quiet, counted from here."""
_MILD = {"break", "cut", "half open", "stop", "slow", "repeat frame"}
"""Kinds of faults that lose no request if they are short."""
_FAR = 20.0
"""Seconds after which a connection to a machine that has vanished breaks."""
AnyRank = PrefillRank | DecodeRank


@attrs.frozen
class Result:
    """The outcome of a run."""

    violation: Violation | None
    digest: str
    """The digest of its trace."""
    lines: list[str]
    reached: Counter[str]
    seconds: float
    """Simulated seconds."""
    events: int


class Run:
    """One run of a story."""

    def __init__(self, story: Story, traced: bool = False) -> None:
        setup = story.setup  # a story that was shrunk may name ranks that are no longer there
        asks = [attrs.evolve(ask, to=ask.to % setup.engines, of=ask.of % setup.sources) for ask in story.asks]
        places = [(fault.prefill % setup.prefill, fault.decode % setup.decode) for fault in story.faults]
        faults = [
            attrs.evolve(fault, prefill=prefill, decode=decode, engine=fault.engine % setup.engines)
            for fault, (prefill, decode) in zip(story.faults, places, strict=True)
        ]
        faults = [attrs.evolve(fault, source=fault.source % setup.sources) for fault in faults]
        self.story, self.setup = attrs.evolve(story, asks=asks, faults=faults), setup
        self.simulation = Simulation(story.seed, story.setup.tick, traced)
        self.network = Network(self.simulation, story.setup.latency)
        prefills = PREFILLS[: setup.sources]
        for role, rank in product(prefills, range(setup.prefill)):
            self.network.name_host(address(role, rank), f"{role}{rank}")
        self.store = (RoomyStore if setup.store == "roomy" else SimulatedStore)(self.simulation)
        self._world = World({}, self.store)
        self.router: Router | None = None
        self._runs, self._kinds = Counter[str](), Counter[str]()
        self.prefills: dict[str, list[PrefillRank]] = {role: [] for role in prefills}
        self.decodes: dict[str, list[DecodeRank]] = {role: [] for role in DECODES[: self.setup.engines]}
        self._unproven = False
        """Whether a writer died whose death proves nothing, so that pages may stay in quarantine."""
        self._doubted = set[str]()
        """Prefill engines with a peer that was misled in a frame of theirs."""
        self._haunted = set[str]()
        """Engines with pages that a liar may still have, for all they know."""

    @property
    def decode(self) -> list[DecodeRank]:
        """The ranks of all decode engines."""
        return [rank for ranks in self.decodes.values() for rank in ranks]

    @property
    def prefill(self) -> list[PrefillRank]:
        """The ranks of all prefill engines."""
        return [rank for ranks in self.prefills.values() for rank in ranks]

    @property
    def roles(self) -> tuple[str, ...]:
        """All engines."""
        return (*self.prefills, *self.decodes)

    @property
    def everyone(self) -> list[AnyRank]:
        """All ranks."""
        return [*self.decode, *self.prefill]

    # engines

    def _start(self, role: str, wall: float = 0.0) -> None:
        if role not in self.roles or any(rank.alive for rank in self._ranks(role)):
            return
        self._runs[role] += 1
        number, wall = self._runs[role], wall + self._runs[role] * 1e-3
        arguments = self.simulation, self.setup, role
        if role in PREFILLS:
            ranks = range(self.setup.prefill)
            self.prefills[role] = [PrefillRank(*arguments, rank, number, self._world, wall) for rank in ranks]
        else:
            ranks = range(self.setup.decode)
            self.decodes[role] = [DecodeRank(*arguments, rank, number, self._world, wall) for rank in ranks]

    def _ranks(self, role: str) -> list[AnyRank]:
        return [*self.prefills.get(role, ()), *self.decodes.get(role, ())]

    def _end_engine(self, role: str, fault: Fault) -> None:
        """End an engine, and start it again later."""
        far = self.simulation.draw("far", fault.at, fault.number) < 0.4 and fault.kind != "restart"
        for rank in [rank for rank in self._ranks(role) if rank.alive]:
            self._unproven = self._unproven or self._unprovable(rank)
            if fault.kind == "leave":
                rank.call(rank.leave)
            if rank.alive:  # it is to be killed, or is stopped and cannot leave
                self._kill(rank, _FAR if far and fault.kind != "leave" else 0.0)
        wrong = {"clock back": -3600.0, "clock ahead": 3e7}.get(fault.kind, 0.0)
        pause = min(fault.seconds, 45.0)
        self.simulation.after(pause, lambda: self._start(role, wrong))
        if wrong:
            self.simulation.after(
                pause + 20.0, lambda: self._end_engine(role, attrs.evolve(fault, kind="kill", seconds=0.0))
            )

    def _kill(self, rank: AnyRank, seconds: float) -> None:
        self.network.lose(rank, seconds)
        rank.kill()

    def _unprovable(self, rank: AnyRank) -> bool:
        """Whether the end of this rank proves nothing about its writes."""
        return (rank.role in PREFILLS) != self.setup.pull and self.setup.way == "remote"

    # requests and faults

    def _ask(self, ask: Ask) -> None:
        if self.router is not None:
            self.router.lengths(tokens_of(ask))
        told = [(PREFILLS[ask.of], ask.lags[0], ask.again), (DECODES[ask.to], ask.lags[1], ask.again)]
        if self.setup.engines > 1:
            told.append((DECODES[(ask.to + 1) % self.setup.engines], ask.both, -1.0))
        for role, *delays in told:
            for rank in range(len(self._ranks(role))):
                skew = self.simulation.draw("skew", role, rank, ask.id) * 2e-3
                for delay in delays:
                    if delay >= 0:
                        self.simulation.after(delay + skew, partial(self._tell, role, rank, ask))

    def _tell(self, role: str, rank: int, ask: Ask) -> None:
        for process in self._ranks(role)[rank : rank + 1]:
            process.call(partial(process.hear_of, ask))

    def _fault(self, fault: Fault) -> None:
        simulation = self.simulation
        simulation.say("fault", f"{fault}")
        simulation.reached[f"fault: {fault.kind}"] += 1
        decode = DECODES[fault.engine]
        prefill = PREFILLS[fault.source]
        role = decode if fault.at_decode else prefill
        pair = f"{decode}{fault.decode}", f"{prefill}{fault.prefill}"
        if self.router is not None and fault.number % 3 == 0:
            decode, pair = ROUTER, (f"{ROUTER}0", pair[1])
        rank = self._ranks(role)[fault.decode if fault.at_decode else fault.prefill]
        match fault.kind:
            case "break" | "half open" | "cut":
                self._disturb(pair, fault)
            case "stop":
                rank.stop(fault.seconds)
            case "slow":
                rank.gap = 0.05
                self.simulation.after(fault.seconds, lambda: setattr(rank, "gap", 1e-4))
            case "jump":
                rank.jump(fault.seconds * 3)
            case "drift" | "stand still":
                rate = 0.0 if fault.kind == "stand still" else 0.9 + 0.2 * simulation.draw("drift", fault.number)
                rank.run_clock(rate)
                usual = self.setup.rates[role not in PREFILLS]
                simulation.after(min(fault.seconds, 60.0), lambda: rank.run_clock(usual))
            case "power loss":
                self.store.lose_power()
            case "copies fail":
                for each in self.prefill:
                    if each.tiers is not None:
                        each.tiers.pager.fails_until = simulation.now + fault.seconds
            case kind if kind in ILLS:
                self.store.fall_ill(kind, min(max(fault.seconds, 3.0), 30.0))
            case "fork":
                rank.call(rank.fork)
            case "shortage":
                rank.run_short(min(fault.seconds, 60.0))
            case "restart":
                self._end_engine(prefill, attrs.evolve(fault, seconds=min(fault.seconds, 1.0)))
            case "kill" | "leave" | "clock back" | "clock ahead":
                self._end_engine(role, fault)
            case "sleep":
                for each in self._ranks(role):
                    each.call(partial(each.sleep, min(fault.seconds, 10.0)))
            case "move":
                for mover in self.decodes[DECODES[fault.engine]]:
                    mover.call(mover.move)
            case "drain":
                for each in self._ranks(role):
                    each.call(partial(each.try_, each.door.drain))
                leave = attrs.evolve(fault, kind="leave", seconds=0.1)
                self.simulation.after(min(fault.seconds, 20.0), lambda: self._end_engine(role, leave))
            case "change frame" | "repeat frame":
                if fault.kind == "change frame":
                    self.simulation.misled.add(decode)
                    if decode != ROUTER:
                        self._doubted.add(prefill)
                sender, receiver = pair if fault.at_decode else pair[::-1]
                number = self.network.counted(pair, receiver) + fault.number
                self.network.changes[sender, receiver, number] = change(fault, self.simulation)

    def _delivered(self, kind: str) -> None:
        """Bring about the faults that are aimed at a frame which has come."""
        self._kinds[kind] += 1
        for fault in self.story.faults:
            if (fault.on, fault.number) == (kind, self._kinds[kind]) and self.simulation.now <= fault.at:
                self.simulation.reached["fault at its moment"] += 1
                delay = self.simulation.draw("moment", kind, fault.number) ** 2 * 4 * self.setup.pace
                self.simulation.after(delay, partial(self._fault, fault))

    def _disturb(self, pair: tuple[str, str], fault: Fault) -> None:
        """Disturb the connections of two ranks."""
        if fault.kind == "cut":
            self.network.cut(pair, fault.seconds)
        for line in self.network.lines_between(pair):
            if fault.kind == "break":
                line.broken()
            elif fault.kind == "half open":
                line.forget(min(fault.seconds, 40.0))
            elif fault.seconds > 15:  # TCP gives up
                self.simulation.after(15.0, line.broken)

    # a hostile engine

    def _let_lie(self, role: str) -> None:
        """Have an engine lie; those that it lies to may go wrong in what they share with it."""
        if role in self.roles:
            for rank in self._ranks(role):
                self.network.liars[rank.name] = Liar(self.simulation, rank.name, self._world.places)
            self.simulation.misled |= {role} if role in DECODES else {role, *self.decodes}

    def _be_rid_of(self, role: str) -> None:
        """Let a liar end for good; all others have to be well from now on."""
        if role not in self.roles:
            return
        for rank in self._ranks(role):
            if rank.alive:
                self._unproven = self._unproven or self._unprovable(rank)
                self._kill(rank, 0.0)
        self.prefills.pop(role, None)
        self.decodes.pop(role, None)
        if role in PREFILLS:
            for rank in self.decode:
                for ghost in (*rank.ghosts.values(), *rank.retired):
                    ghost.settle_all()
            self.simulation.misled -= {*self.decodes}
            self._haunted |= {*self.decodes}

    # a run

    def whole(self) -> None:
        """Play the story; raises Violation."""
        simulation, story = self.simulation, self.story
        for role in self.roles:
            self._start(role)
        if self.setup.router and self.setup.host:
            sources = {address(role, 0): role for role in self.prefills}
            self.router = Router(simulation, self.network, sources, 1e-3)
        self._let_lie(self.setup.hostile)
        for ask in story.asks:
            simulation.at(ask.at, partial(self._ask, ask))
        for fault in story.faults:
            if not fault.on:
                simulation.at(fault.at, partial(self._fault, fault))
        self.network.delivered = self._delivered
        twice = 20.0 + _FAR  # an engine with a wrong clock ends a second time
        ends = [f.at + min(f.seconds, 110.0) + 25.0 + twice * f.kind.startswith("clock") for f in story.faults]
        last = max(ends, default=0.0)
        asked = max((ask.at + max(*ask.lags, ask.again, 0.0) + ask.compute + 1 for ask in story.asks), default=0.0)
        simulation.run(max(last, asked))
        calm = simulation.now
        self._be_rid_of(self.setup.hostile)
        for role in self.roles:
            if not all(rank.alive and not rank.draining for rank in self._ranks(role)):
                self._end_engine(role, Fault(calm, "leave", seconds=0.0))
        longest = max((ask.deadline for ask in story.asks), default=0.0)
        simulation.run(calm + 1.05 * longest + QUIET, self._over)
        self._check_over()
        self._check_arrived()
        self._check_ready()
        self._probe()
        self._check_router()
        for each in self.everyone:
            each.check()
            with simulation.running(each):
                each.leave()

    def _over(self) -> bool:
        """Whether everything has ended."""
        return all(rank.over for rank in self.everyone)

    def _excused(self, rank: AnyRank) -> bool:
        """Whether pages may stay in quarantine: a writer is gone without proof, or this engine was misled."""
        return self._unproven or rank.role in self.simulation.misled | self._doubted

    def _check_over(self) -> None:
        """Raise Violation for what has not ended."""
        for rank in self.everyone:
            for text, lost in rank.waiting():
                if not (lost and self._excused(rank)) and not (lost and rank.role in self._haunted):
                    raise Violation("hang", text)
            if rank.role in self._haunted:
                continue
            if rank.door.quarantined and not self._excused(rank):
                raise Violation("hang", f"{rank} keeps {rank.door.quarantined} in quarantine")
            if len(rank.ghosts) > 1 and not self._excused(rank):
                raise Violation("hang", f"{rank} does not get a pool back")

    def _check_arrived(self) -> None:
        """Raise Violation for a request that has not arrived, although nothing hindered it for long."""
        story, setup = self.story, self.setup
        for ask in story.asks:
            both = [role for role, ranks in self.decodes.items() if all(ask.id in rank.arrived for rank in ranks)]
            if len(both) > 1:
                raise Violation("counted twice", f"request {ask.id} arrived at engines {both}")
        mild = all(fault.kind in _MILD for fault in story.faults) and sum(f.seconds for f in story.faults) < 15
        kept = not story.faults or (
            mild and not setup.pull and setup.way != "inline"
        )  # no lease ends, no stream breaks
        plenty = setup.pace < 0.1 and setup.lease >= 10 and not self.simulation.reached["decode out of pages"]
        for ask in story.asks if kept and plenty and len(story.asks) <= 3 else ():
            usual = max(ask.abort, ask.fail, ask.again, ask.both) < 0 and not ask.other_prompt
            usual = usual and self.setup.hostile not in (PREFILLS[ask.of], DECODES[ask.to])
            if usual and ask.deadline >= (60 if story.faults else 10) and min(ask.lags) >= 0 and max(ask.lags) < 4:
                self.simulation.reached["request that has to arrive"] += 1
                for rank in self.decodes[DECODES[ask.to]]:
                    if ask.id not in rank.arrived:
                        why = rank.outcomes.get(ask.id, "no answer")
                        raise Violation("lost", f"{rank}: request {ask.id}, which nothing hindered for long: {why}")

    def _check_ready(self) -> None:
        """Raise Violation unless every sink greets its source again by itself."""
        ranks = [rank for rank in self.decode if self.setup.eager and not self._excused(rank)]
        every = {(role, 0) for role in self.prefills if role not in self._doubted}
        self.simulation.run(self.simulation.now + QUIET, lambda: all(rank.door.ready >= every for rank in ranks))
        for rank in ranks:
            if not rank.door.ready >= every:
                raise Violation("hang", f"{rank} is not ready: {rank.door.sources}")

    def _probe(self) -> None:
        """Let each pair of engines complete a new request."""
        probes: list[Ask] = []
        short = self.setup.pull and self.setup.lease < 10  # a slow copy may outlast it
        for source, sink in product(self.prefills, self.decodes):
            of, to = PREFILLS.index(source), DECODES.index(sink)
            pair = (*self.prefills[source], *self.decodes[sink])
            if not short and not any(self._excused(rank) for rank in pair):
                probes.append(Ask(_PROBE + len(probes), 0.0, 9, of=of, to=to))
                self._ask(probes[-1])
        asked = [(rank, ask.id) for ask in probes for rank in self.decodes[DECODES[ask.to]]]
        end = self.simulation.now + limits.PATIENCE + limits.TICKET_WAIT
        self.simulation.run(end, lambda: all(id in rank.arrived for rank, id in asked))
        for rank, id in asked:
            if id not in rank.arrived:
                why = rank.outcomes.get(id, "no answer")
                raise Violation(
                    "hang", f"{rank}: a request after all faults does not arrive: {why}, {rank.door.sources}"
                )
        self.simulation.run(self.simulation.now + limits.PATIENCE, self._over)
        self._check_over()

    def _check_router(self) -> None:
        """Raise Violation unless a router knows what tiers keep, and tiers have all pages back."""
        for rank in self.prefill:
            if rank.tiers is not None:
                rank.tiers.check_over()
        router = self.router
        if router is None:
            return
        if ROUTER not in self.simulation.misled:
            self.simulation.run(self.simulation.now + QUIET, lambda: not router.lacks_any(self.prefills))
            if unknown := router.lacks_any(self.prefills):
                raise Violation("hang", f"{router} does not know {unknown}")
            self.simulation.run(self.simulation.now + 1.0)
            for ask in self.story.asks[:3]:
                for role, ranks in self.prefills.items():
                    router.check(role, [rank.tiers for rank in ranks if rank.tiers is not None], tokens_of(ask))
        router.leave()

    def clean(self) -> None:
        """Release what is left after a violation."""
        for rank in self.everyone:
            if rank.alive:
                with contextlib.suppress(Exception):
                    self._kill(rank, 0.0)
        if self.router is not None and self.router.alive:
            with contextlib.suppress(Exception):
                self.router.kill()


def play(story: Story, traced: bool = False) -> Result:
    """Play a story; an exception of kvproto is a violation too."""
    if not spare():  # the first memory of a process takes descriptors that stay
        first = Simulation(0)
        GhostPool(first, "", 1, 0, 4, 0).close()
        first.after_all[0]()
    before, run = _descriptors(), Run(story, traced)
    found: Violation | None = None
    with run.simulation.installed(run.network.listener, run.network.dialer, serving(run.simulation, run.store)):
        try:
            run.whole()
        except Violation as violation:
            found = violation
        except Exception as error:
            found = Violation("crash", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        if found is not None:
            run.clean()
    simulation = run.simulation
    for release in simulation.after_all:
        release()
    if found is None and _descriptors() > before:
        gc.collect()
        if _descriptors() > before:
            found = Violation("leak", f"{_descriptors() - before} descriptors")
    return Result(found, simulation.digest, simulation.lines, simulation.reached, simulation.now, simulation.events)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - spare()
