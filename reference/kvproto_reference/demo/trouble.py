"""What the demo does to a prefill engine in the middle of its work: kill, drain or stop it, or put it to sleep."""

import signal
import time
from collections.abc import Callable

import attrs

from .engines import Engines
from .router import Router

VICTIM = "prefill-0"
_HEARD = 0.3
"""Seconds in which decode has heard what was on its way."""


@attrs.frozen
class Kind:
    """A way to trouble it."""

    name: str
    """Of the demo's option."""
    number: signal.Signals
    says: str
    ends: bool = True
    """Whether the engine ends by it, and is started again."""
    later: bool = False
    """Whether half of the requests are asked for only then."""
    seconds: float = 0.0
    """Until it is started again, or goes on."""


KINDS = (
    Kind("kill", signal.SIGKILL, "killed (SIGKILL)"),
    Kind("drain", signal.SIGTERM, "told to drain (SIGTERM)", later=True),
    Kind("sleep", signal.SIGUSR1, "told to sleep, and to wake with other memory (SIGUSR1)", ends=False),
    Kind("pause", signal.SIGSTOP, "stopped (SIGSTOP)", ends=False, seconds=12.0),
)
"""A pause is longer than two heartbeats of 5 s."""


@attrs.define(eq=False)
class Trouble:
    """One of them, and its course."""

    kind: Kind
    engines: Engines
    router: Router
    note: Callable[[str], None]
    down: float
    """Seconds from the end of the engine to its next start, or from SIGSTOP to SIGCONT."""
    later: Callable[[], None]
    """Asks for the rest of the prompts, where it is asked for only then."""
    under_way: int = 0
    """Requests that had begun and not arrived when it struck."""
    status: int | None = None
    """With which the engine ended."""
    _held_at: float | None = None
    """When it was stopped, so that what is under way stays so until it is killed."""
    _struck: bool = False
    _back_at: float | None = None
    _back: bool = False

    def turn(self) -> bool:
        """Go on with it; whether it is over, and the engine takes requests again."""
        if not self._struck:
            if self._held_at is not None or any(VICTIM in r.engines and r.sent for r in self.router.requests):
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
        """Strike where requests are under way once all that it has said is heard, and else a little later."""
        if self._held_at is None:
            self._held_at = time.monotonic()
            self.engines.signal(VICTIM, signal.SIGSTOP)
        elif time.monotonic() - self._held_at >= _HEARD:
            if self._under_way():
                self._strike()
            else:
                self.engines.signal(VICTIM, signal.SIGCONT)
            self._held_at = None

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
        """Whether all went as it should: requests are lost with an engine that is killed, and with no other."""
        lost = sum(len(request.lost) for request in self.router.requests)
        refused = sum("DRAINING" in why for request in self.router.requests for why in request.lost)
        if self.kind.number == signal.SIGTERM:
            return self.status == 0 and lost == refused
        if self.kind.number == signal.SIGUSR1:
            return lost == sum("POOL_MOVED" in why for request in self.router.requests for why in request.lost)
        return self.under_way > 0 and (lost > 0) == self.kind.ends
