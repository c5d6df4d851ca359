"""A router with a real Finder, which asks how much of each prompt the prefill engines hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvproto import Finder, Options
from tests.simulation.network import Network
from tests.simulation.simulated import Process, Simulation, Violation
from tests.simulation.tiering import NAMES, RankTiers

ROUTER = "r"
_POLL = 1.0


class Router(Process):
    """A process with a Finder."""

    def __init__(self, simulation: Simulation, network: Network, sources: dict[str, str], wall: float) -> None:
        """`sources` are the roles of the engines that it watches, by the address of one of their ranks."""
        super().__init__(simulation, f"{ROUTER}0", 1, 1.0, wall)
        simulation.processes[self.number] = self
        self._network, self._sources = network, sources
        with simulation.running(self):
            self.finder = Finder([*sources], "router", Options(insecure=True, thread=False))
        self.wake()

    def turn(self) -> float | None:
        self.finder.step(0.0)
        return 0.0 if self._network.dialers[self.number].pending else _POLL

    def lacks_any(self, roles: Collection[str]) -> dict[str, str]:
        """The reasons why it does not know some of these engines, by address."""
        with self.simulation.running(self):
            return {address: why for address, why in self.finder.why().items() if self._sources[address] in roles}

    def lengths(self, tokens: Sequence[int]) -> dict[str, int]:
        """The tokens of a prompt that each engine holds."""
        with self.simulation.running(self):
            found = self.finder.find(tokens, NAMES)
        self.simulation.reached["prompt found by a router"] += any(held.tokens for held in found)
        if any(not 0 <= held.device <= held.tokens <= len(tokens) for held in found):
            raise Violation("wrong state", f"{self}: {found} of a prompt of {len(tokens)} tokens")
        return {self._sources[held.address]: held.tokens for held in found}

    def check(self, role: str, ranks: Sequence[RankTiers], tokens: Sequence[int]) -> None:
        """Raise Violation unless it knows what all ranks of an engine have announced of a prompt."""
        with self.simulation.running(self):
            ids = [rank.cache.chain(tokens).ids(rank.cache.device.layout.form) for rank in ranks]
            page = ranks[0].cache.device.layout.page
        kept = [[rank.kept.get(id) is not None for id in ids] for rank, ids in zip(ranks, ids, strict=True)]
        wanted = max((n for n, here in enumerate(zip(*kept, strict=True), 1) if all(here)), default=0) * page
        if (known := self.lengths(tokens).get(role)) != wanted:
            raise Violation("stale", f"{self}: {role} holds {wanted} tokens of a prompt, and it knows of {known}")

    def leave(self) -> None:
        """Close in good order."""
        with self.simulation.running(self):
            self.finder.close()
        self.alive = False

    def kill(self) -> None:
        """End at once."""
        self.die()
        with self.simulation.running(self):
            self.finder.close()
