"""Disturbs a prefill engine in the middle of its work: kills, drains or stops it, or puts it to sleep."""

import signal
import time
from collections.abc import Callable

import attrs

from ..errors import EngineError
from .engines import Engines
from .router import Router

VICTIM = "prefill-0"
_HEARD = 1.0
"""Seconds after which decode has received whatever the stopped engine had sent."""

_TRIES = 10
"""The number of times that all prompts are asked once more if all requests were over too soon."""


@attrs.frozen
class Kind:
    """A way to disturb the engine."""

    name: str
    """The name of the demo's option, without "--"."""
    number: signal.Signals
    says: str
    ends: bool = True
    """Whether this ends the engine, so that it has to be restarted."""
    later: bool = False
    """Whether half of the requests are submitted only afterwards."""
    seconds: float = 0.0
    """The time that the engine stays away, unless --down says otherwise."""


KINDS = (
    Kind("kill", signal.SIGKILL, "killed (SIGKILL)"),
    Kind("drain", signal.SIGTERM, "told to drain (SIGTERM)", later=True),
    Kind("sleep", signal.SIGUSR1, "told to sleep, and to wake with other memory (SIGUSR1)", ends=False),
    Kind("pause", signal.SIGSTOP, "stopped (SIGSTOP)", ends=False, seconds=12.0),
)
"""All ways to disturb the engine. A pause lasts longer than two heartbeats of 5 s, so that it is noticed."""


@attrs.define(eq=False)
class Trouble:
    """One disturbance, from the moment before it to the engine's return."""

    kind: Kind
    engines: Engines
    router: Router
    note: Callable[[str], None]
    down: float
    """Seconds from the end of the engine to its next start, or from SIGSTOP to SIGCONT."""
    later: Callable[[], None]
    """Submits the rest of the prompts, if there is a rest."""
    again: Callable[[], None]
    """Submits all prompts once more."""
    under_way: int = 0
    """Requests that had begun and not arrived at decode when the engine was disturbed."""
    status: int | None = None
    """The exit status with which the engine ended."""
    _held_at: float | None = None
    """The time at which the engine was stopped, which keeps requests under way until it is killed."""
    _struck: bool = False
    _tries: int = 0
    _back_at: float | None = None
    _back: bool = False

    def turn(self) -> bool:
        """Take the next step that is due; returns whether all is over and the engine takes requests again."""
        if not self._struck:
            if self._held_at is None and all(request.stats is not None for request in self.router.requests):
                self._missed()
            elif self._held_at is not None or any(VICTIM in r.engines and r.sent for r in self.router.requests):
                self._hold() if self.kind.number == signal.SIGKILL else self._strike()
        elif self._back_at is None:
            self.status = self.engines.exit_status(VICTIM)
            if self.status is not None:
                self.note(f"{VICTIM} has ended with status {self.status}")
                self._back_at = time.monotonic() + self.down
        elif not self._back and time.monotonic() >= self._back_at:
            self._bring_back()
        return self._back and self.router.takes(VICTIM)

    def _hold(self) -> None:
        """Stop the engine, wait until all its messages are heard, and strike; if nothing is under way, try later."""
        if self._held_at is None:
            self._held_at = time.monotonic()
            self.engines.signal(VICTIM, signal.SIGSTOP)
        elif time.monotonic() - self._held_at >= _HEARD:
            if self._under_way():
                self._strike()
            else:
                self.engines.signal(VICTIM, signal.SIGCONT)
            self._held_at = None

    def _missed(self) -> None:
        """All requests are over: ask them once more; raises EngineError if that has not helped before."""
        self._tries += 1
        why = f"all requests were over before {VICTIM} could be {self.kind.says}"
        if self._tries > _TRIES:
            raise EngineError(f"{why}: give longer prompts")
        self.note(f"{why}: they are asked once more")
        self.again()

    def _under_way(self) -> int:
        return sum(VICTIM in r.engines and r.under_way for r in self.router.requests)

    def _strike(self) -> None:
        self._struck = True
        self.under_way = self._under_way()
        self.engines.signal(VICTIM, self.kind.number)
        self.note(f"{VICTIM} is {self.kind.says} with {self.under_way} requests under way")
        if not self.kind.ends:
            self._back_at = time.monotonic() + self.down
        self.later()

    def _bring_back(self) -> None:
        self._back = True
        if self.kind.ends:
            self.note(f"{VICTIM} is started again, by the same command")
            self.engines.restart(VICTIM)
        else:
            self.note(f"{VICTIM} goes on")
            self.engines.signal(VICTIM, signal.SIGCONT)

    @property
    def verdict(self) -> bool:
        """Whether all went as it should: only a killed engine loses requests; draining and moving may refuse some."""
        lost = sum(len(request.lost) for request in self.router.requests)
        refused = sum("DRAINING" in why for request in self.router.requests for why in request.lost)
        if self.kind.number == signal.SIGTERM:
            return self.status == 0 and lost == refused
        if self.kind.number == signal.SIGUSR1:
            return lost == sum("POOL_MOVED" in why for request in self.router.requests for why in request.lost)
        return self.under_way > 0 and (lost > 0) == self.kind.ends
