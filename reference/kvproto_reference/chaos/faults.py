"""Faults of the engines of a seed and of frames on their way, at a time or when a message passes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from .forgery import Forgery
from .plan import DECODES, PREFILLS, Fault
from .proxy import Pair, Passing

if TYPE_CHECKING:
    from .world import World

__all__ = ["Faults"]


class Faults:
    """The faults of one plan, and the watcher of frames."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting = [fault for fault in world.plan.faults if fault.kind == "kill at"]
        self._seen: dict[str, int] = {}
        self._forgeries: dict[Pair, Forgery] = {}

    def happen(self, fault: Fault) -> None:
        """Cause a fault whose time has come."""
        if self._world.calm:
            return
        self._world.judge.count(f"fault {fault.kind}")
        names = fault.whom.split()
        engine = self._world.engines[names[0]]
        match fault.kind:
            case "kill":
                self._world.kill(names[0], fault.seconds)
            case "old clock":
                self._world.kill(names[0], fault.seconds, behind=fault.amount)
            case "full shm":
                self._world.kill(names[0], fault.seconds, full_shm=True)
            case "stop":
                engine.signal(signal.SIGSTOP)
                self._world.at(fault.seconds, lambda: engine.signal(signal.SIGCONT))
            case "cut":
                for router in (False, True):
                    self._world.proxy.lanes[Pair(names[0], names[1], router)].cut()
            case "reconnect":
                engine.tell("reconnect", PREFILLS[self._world.plan.seed % 2])
            case "unsealed":
                pair = Pair(names[0], names[1])
                self._forgeries.setdefault(pair, Forgery())
                self._world.engines[names[1]].tell("reconnect", names[0])
            case "jump":
                engine.tell("jump", fault.amount)
            case "descriptors" | "memory":
                engine.tell(fault.kind, fault.amount, fault.seconds)
                engine.short = engine.short or fault.kind == "memory"
            case "fork":
                engine.tell("fork", fault.seconds)
            case "abort all":
                if names[0] in DECODES:
                    engine.tell("abort_all")
            case "sleep" | "caches":
                engine.tell(fault.kind, fault.seconds)
            case "shorten" | "drain" | "move":
                engine.tell(fault.kind)

    def lied(self, one: Passing, said: Any, made: Any) -> None:
        """Note a frame that the proxy changed and that can be read."""
        self._world.judge.lied(one, said, made)

    def forged(self, one: Passing) -> bytes:
        """The frame as the proxy passes it on, with other memory in a Register if an attacker puts it there."""
        forgery = self._forgeries.get(one.pair)
        return one.frame if forgery is None else forgery.frame(one)

    def before(self, one: Passing) -> None:
        """Note a frame that is about to pass."""
        self._world.judge.passing(one)
        self._seen[one.name] = self._seen.get(one.name, 0) + 1
        self._at_boundary(one, "before")

    def after(self, one: Passing) -> None:
        """Note a frame that has passed."""
        self._at_boundary(one, "after")

    def _at_boundary(self, one: Passing, moment: str) -> None:
        """Kill the engine that is to be killed here, if any."""
        waiting = [] if self._world.calm else self._waiting
        for fault in [f for f in waiting if f.message == one.name and f.nth == self._seen[one.name]]:
            if fault.moment == moment or (fault.moment, moment) == ("later", "after"):
                self._waiting.remove(fault)
                victim = one.pair.prefill if fault.whom == "prefill" else one.pair.decode
                self._world.judge.count("fault kill at")
                self._world.judge.boundary(fault.boundary)
                if fault.moment == "later":
                    self._world.at(0.001 * (1 + fault.nth), lambda v=victim, f=fault: self._kill_later(v, f))  # type: ignore[misc]
                else:
                    self._world.kill(victim, fault.seconds)

    def _kill_later(self, victim: str, fault: Fault) -> None:
        if not self._world.calm:
            self._world.kill(victim, fault.seconds)

    def close(self) -> None:
        """Release forged memory."""
        for forgery in self._forgeries.values():
            forgery.close()
