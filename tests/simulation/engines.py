"""Engines without a model around the real Source and Sink: they compute, name, write and free labelled pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvproto import Fetch, KvprotoError, LocalError, Options, Prompt, Request, Sink, Source, Ticket
from kvproto.events import Arrived, Event, Expired, Freed, Lost, PagesFree, PagesWanted, PoolFree, Undelivered
from kvproto.tiers.page_cache import WritePolicy
from kvproto.transport.inline.transport import InlineTransport
from kvproto.wire.enums import ErrorCode
from tests.simulation.memory import GROUP, PAGES, WAYS, GhostPool, Place, SimulatedTransport
from tests.simulation.simulated import Process, Simulation, Violation
from tests.simulation.storage import SimulatedStore
from tests.simulation.story import PREFILLS, Ask, Setup
from tests.simulation.tiering import Held, RankTiers

RAISED = {
    ErrorCode.POOL_MOVED, ErrorCode.DRAINING, ErrorCode.TICKET_USED, ErrorCode.BUSY, ErrorCode.UNEXPECTED_MESSAGE,
}  # fmt: skip
"""Codes with which kvproto may answer a right call."""
NEVER = {
    ErrorCode.VERIFY_FAILED, ErrorCode.BAD_TYPE, ErrorCode.UNEXPECTED_MESSAGE, ErrorCode.BAD_GRANT, ErrorCode.STALE_TRANSFER,
    ErrorCode.OUT_OF_REGION, ErrorCode.ITEM_ALIAS, ErrorCode.UNKNOWN_SESSION, ErrorCode.INTERNAL,
}  # fmt: skip
"""Codes with which nothing may be lost: nobody damages memory, and both sides are right."""


_FEW = 16
"""Pages of a pool with tiers: as many as the longest request needs."""
_STEP = 0.05
"""Seconds between steps of tiers that wait."""
_CHILDS = 8000
"""The number of a request that a forked child tries to make."""


def address(role: str, rank: int) -> str:
    """The address of a prefill rank."""
    return f"tcp://10.0.{PREFILLS.index(role)}.{rank + 1}:7000"


def ticket_of(seed: int, ask: Ask) -> Ticket:
    key = bytes([*seed.to_bytes(8, "little"), *ask.id.to_bytes(8, "little")])
    return Ticket(key=key, engine=PREFILLS[ask.of], replica=0, deadline=max(int(ask.deadline * 1000), 1))


def tokens_of(ask: Ask, other: bool = False) -> list[int]:
    return [ask.content + 1000 * other, *range(1, ask.tokens)]


def prompt_of(ask: Ask, other: bool = False) -> Prompt:
    return Prompt(tokens_of(ask, other))


@attrs.frozen
class World:
    """What all engines reach."""

    places: dict[bytes, Place]
    store: SimulatedStore


class Rank(Process):
    """One rank of an engine, in a process of its own."""

    door: Source | Sink
    ghost: GhostPool
    asks: Mapping[Any, Any]
    tiers: RankTiers | None = None

    def __init__(
        self,
        simulation: Simulation,
        setup: Setup,
        role: str,
        rank: int,
        run: int,
        world: World,
        wall: float,
    ) -> None:
        super().__init__(simulation, f"{role}{rank}", run, setup.rates[role not in PREFILLS], wall)
        simulation.processes[self.number] = self
        self.setup, self.rank = setup, rank
        self._world, self._pools = world, 0
        self.ghosts: dict[int, GhostPool] = {}
        """Pools that are not free yet, by the id of each."""
        self.retired: list[GhostPool] = []
        """Pools that nobody may touch any more."""
        self.ghost = self._new_pool()
        with simulation.running(self):
            self.door = self._opened()
        self.wake()

    def _new_pool(self) -> GhostPool:
        decode = self.role not in PREFILLS
        tp = self.setup.decode if decode else self.setup.prefill
        self._pools += 1
        whose = self.number << 4 | self._pools & 15
        pages = _FEW if self.setup.host and not decode else PAGES  # so that tiers evict some
        ghost = GhostPool(self.simulation, self.role, tp, self.rank, self.setup.pages[decode], whose, pages)
        self.ghosts[id(ghost.pool)] = ghost
        return ghost

    def _opened(self) -> Source | Sink:
        raise NotImplementedError

    def options(self) -> Options:
        setup = self.setup
        if setup.way == "inline":
            transport: Any = InlineTransport(4096)
        else:
            transport = SimulatedTransport(self, WAYS[setup.way], setup.part, setup.pace, self._world.places)
            transport.landed = lambda process: process.check()
        return Options(
            transports=[transport],
            verify=setup.verify,
            eager=setup.eager,
            pull=setup.pull,
            insecure=True,
            thread=False,
            part_bytes=setup.part_bytes,
            lease=setup.lease,
        )

    def check(self) -> None:
        """Check all pools of this rank."""
        for ghost in (*self.ghosts.values(), *self.retired):
            ghost.check()

    def turn(self) -> float | None:
        events = self.door.step(0.0)
        self.check()
        for event in events:
            self.hear(event)
        for event in events:
            if isinstance(event, PoolFree):
                self._retire(self.ghosts.pop(id(event.withdrawal.pool)))
        return self.door.next_timer()

    def hear(self, event: Event) -> None:
        """Handle an event of kvproto."""
        if isinstance(event, PoolFree):
            self.simulation.reached["pool given back"] += 1
            self.simulation.say(self, "PoolFree")

    def _retire(self, ghost: GhostPool) -> None:
        """Overwrite a pool that nobody may touch any more, and go on watching it."""
        held = [ask for ask, holder in self.held() if holder is ghost]
        if held:
            raise Violation("freed too early", f"{self}: a pool is free in which request {held[0]} has pages")
        for place in self._world.places.values():
            place.free = place.free or place.memory is ghost.memory
        ghost.give(list(ghost.owner))
        self.retired.append(ghost)

    def held(self) -> list[tuple[int, GhostPool]]:
        """Requests whose pages peers may still touch, and the pools of these."""
        return []

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.door.unready == "it drains"

    @property
    def over(self) -> bool:
        """Whether nothing of its requests and pools is under way."""
        return not self.asks and len(self.ghosts) <= 1 and not self.door.quarantined

    def waiting(self) -> list[tuple[str, bool]]:
        """Requests that have not ended, for people, each with whether it was lost and only its pages are not free."""
        raise NotImplementedError

    def hear_of(self, ask: Ask) -> None:
        """Begin with a request."""
        raise NotImplementedError

    def _begin(self, ask: Ask) -> object:
        """The handle of a request, from kvproto."""
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        """Give the memory up for a while."""
        if not self.door.asleep and self.try_(self.door.sleep):
            self.simulation.after(seconds, lambda: self.call(self._wake))

    def fork(self) -> None:
        """Have a child of this process use what its parent has opened: it can do nothing with it."""
        attempts: tuple[Callable[[], object], ...] = (
            self.door.step,
            self.door.next_timer,
            lambda: self._begin(Ask(_CHILDS, 0.0, 1)),
        )
        self.forked = True
        try:
            for attempt in attempts:
                try:
                    attempt()
                except LocalError as error:
                    if error.code != ErrorCode.UNEXPECTED_MESSAGE:
                        raise Violation("wrong error", f"a fork of {self}: {error}") from error
                else:
                    raise Violation("wrong state", f"a fork of {self} uses what its parent has opened")
        finally:
            self.forked = False

    def _wake(self) -> None:
        if self.lacks("memory to allocate"):
            self.simulation.after(0.5, lambda: self.call(self._wake))
            return
        self.ghost = self._new_pool()
        self.door.wake(self.ghost.pool)

    def leave(self) -> None:
        """Close in good order."""
        self.simulation.say(self, "closes")
        self.door.close()
        self.alive = False
        if self.tiers is not None:
            self.tiers.close()
        self.end()

    def kill(self) -> None:
        """End at once; what is released here is only what the simulation itself holds."""
        self.simulation.say(self, "dies")
        self.die()
        with self.simulation.running(self):
            self.door.close()
            if self.tiers is not None:
                self.tiers.die()
                self.tiers, self.asks = None, {}  # what storage was to write views memory of the host
                self.threads.clear()
        self.end()

    def end(self) -> None:
        """Free the pools."""
        for ghost in (*self.ghosts.values(), *self.retired):
            ghost.close()
        self.ghosts.clear()
        self.retired.clear()

    def try_(self, work: Callable[[], object]) -> bool:
        """Call kvproto; a typed error is an answer."""
        try:
            work()
        except KvprotoError as error:
            self.simulation.say(self, f"raises {error.code.name}")
            short = self.ever_short and error.code == ErrorCode.INTERNAL
            if error.code not in RAISED and not short and self.role not in self.simulation.misled:
                raise Violation("wrong error", f"{self}: a right call raises {error}") from error
            self.simulation.reached[f"raises {error.code.name}"] += 1
            return False
        return True


@attrs.define(eq=False)
class Prefilling:
    """A request at a prefill rank."""

    ask: Ask
    request: Request
    ghost: GhostPool
    pages: list[int] | None = None
    computed: int = 0
    found: int = 0
    """Tokens that tiers have found."""
    held: Held | None = None


class PrefillRank(Rank):
    """A prefill rank."""

    door: Source
    tiers: RankTiers | None

    def _opened(self) -> Source:
        self.asks: dict[Request, Prefilling] = {}
        listen = {rank: address(self.role, rank) for rank in range(self.setup.prefill)}
        door, setup = Source(self.role, self.ghost.pool, listen, self.options()), self.setup
        self.tiers = None
        if setup.host:
            store = self._world.store if setup.store else None
            self.tiers = RankTiers(self, self.ghost, store, setup.host, [*WritePolicy][setup.policy], setup.pace)
            self.tiers.tell(door.tell)
        return door

    def hear_of(self, ask: Ask) -> None:
        """Accept a request, and begin to compute it."""

        def accept() -> None:
            request = self._begin(ask)
            self.asks[request] = Prefilling(ask, request, self.ghost)
            step = ask.compute / ask.chunks
            self.simulation.after(step, lambda: self.call(lambda: self._compute(self.asks.get(request), step)))
            if ask.fail >= 0:
                self.simulation.after(ask.fail, lambda: self.call(lambda: self._give_up(request)))

        self.try_(accept)

    def _begin(self, ask: Ask) -> Request:
        return self.door.request(ticket_of(self.simulation.seed, ask), prompt_of(ask))

    def _give_up(self, request: Request) -> None:
        if request in self.asks:
            self.simulation.reached["request failed"] += 1
            self.try_(lambda: request.fail("given up"))

    def _compute(self, prefilling: Prefilling | None, step: float) -> None:
        if prefilling is None or prefilling.ghost is not self.ghost:
            return
        ask, request, ghost = prefilling.ask, prefilling.request, prefilling.ghost
        if prefilling.pages is None:
            prefilling.pages = self._pages(prefilling)
            if prefilling.pages is None:
                self.simulation.reached["prefill out of pages"] += 1
                later = 0.05 if prefilling.held is not None and prefilling.held.read is not None else 0.3
                self.simulation.after(later, lambda: self.call(lambda: self._compute(self.asks.get(request), step)))
                return
        prefilling.computed += 1
        end = ask.tokens * prefilling.computed // ask.chunks
        begin = max(prefilling.found, ask.tokens * (prefilling.computed - 1) // ask.chunks)
        if begin < end:
            ghost.write(ask.content, prefilling.pages, begin, end)
        table = {GROUP: prefilling.pages[: -(-end // ghost.page)]}
        if prefilling.computed == ask.chunks:
            self.try_(lambda: request.finish({GROUP: prefilling.pages or ()}))
            return
        self.try_(lambda: request.computed(table, end))
        self.simulation.after(step, lambda: self.call(lambda: self._compute(self.asks.get(request), step)))

    def _pages(self, prefilling: Prefilling) -> list[int] | None:
        """The pages of a request; None while there are too few, or storage is read."""
        ask = prefilling.ask
        if self.tiers is None:
            return prefilling.ghost.take(ask.id, ask.tokens, granted=False)
        if prefilling.held is None:
            prefilling.held = self.tiers.begin(ask.content, tokens_of(ask))
        pages = self.tiers.pages(prefilling.held, ask.tokens, self.simulation.draw("hold", ask.id) < 0.5)
        if pages is not None:
            prefilling.found = self.tiers.found(prefilling.held, ask.id, ask.tokens)
        return pages

    def turn(self) -> float | None:
        seconds = super().turn()
        if self.tiers is not None and self.alive:
            soon, seconds = _STEP if self.tiers.step() else None, self.door.next_timer()
            seconds = soon if seconds is None else seconds if soon is None else min(soon, seconds)
        return seconds

    def hear(self, event: Event) -> None:
        super().hear(event)
        if isinstance(event, Freed | Undelivered | Expired):
            prefilling = self.asks.pop(event.request, None)
            if prefilling is None or not event.request.done:
                raise Violation("counted twice", f"{self}: {type(event).__name__} of a request that is over")
            name = type(event).__name__
            self.simulation.say(self, f"{name} {prefilling.ask.id}")
            self.simulation.reached[name] += 1
            if self.tiers is not None and prefilling.held is not None:
                self.tiers.leave(prefilling.held, prefilling.ask.tokens * prefilling.computed // prefilling.ask.chunks)
            elif prefilling.pages is not None and prefilling.ghost in self.ghosts.values():
                prefilling.ghost.give(prefilling.pages)

    @property
    def over(self) -> bool:
        return super().over and not (self.tiers is not None and self.tiers.cache.busy)

    def sleep(self, seconds: float) -> None:
        if self.tiers is None:  # which belong to one pool
            super().sleep(seconds)

    def waiting(self) -> list[tuple[str, bool]]:
        return [(f"{self}: request {p.ask.id}, {p.request!r}", False) for p in self.asks.values()]


@attrs.define(eq=False)
class Fetching:
    """A request at a decode rank, until its pages are free."""

    ask: Ask
    fetch: Fetch
    ghost: GhostPool
    pages: list[int] | None
    lost: bool = False


class DecodeRank(Rank):
    """A decode rank."""

    door: Sink

    def _opened(self) -> Sink:
        self.asks: dict[Fetch, Fetching] = {}
        self.arrived: set[int] = set()
        self.outcomes: dict[int, str] = {}
        seeds = {role: address(role, self.rank % self.setup.prefill) for role in PREFILLS[: self.setup.sources]}
        return Sink(f"decode-{self.role}", self.ghost.pool, seeds, self.options())

    def hear_of(self, ask: Ask) -> None:
        """Fetch a request, with pages or without."""
        ghost = self.ghost
        pages = None if ask.late_pages else ghost.take(ask.id, ask.tokens, granted=True)
        if pages is None and not ask.late_pages:
            self.simulation.reached["decode out of pages"] += 1
            return
        if pages is not None and ask.cached:
            ghost.write(ask.content, pages, 0, ask.cached)

        def fetch() -> None:
            fetch = self._begin(ask, pages)
            self.asks[fetch] = Fetching(ask, fetch, ghost, pages)
            if ask.abort >= 0:
                self.simulation.after(ask.abort, lambda: self.call(lambda: self._abort(fetch)))

        if not self.try_(fetch) and pages is not None:
            ghost.give(pages)

    def _begin(self, ask: Ask, pages: list[int] | None = None) -> Fetch:
        ticket, prompt = ticket_of(self.simulation.seed, ask), prompt_of(ask, ask.other_prompt)
        table = None if pages is None else {GROUP: pages}
        return self.door.fetch(ticket, prompt, table, cached=ask.cached, spans=ask.spans)

    def _abort(self, fetch: Fetch) -> None:
        if fetch in self.asks:
            self.simulation.reached["fetch aborted"] += 1
            self.try_(fetch.abort)

    def _grant(self, fetching: Fetching, event: PagesWanted) -> None:
        if fetching.fetch.done or fetching.ghost is not self.ghost:
            return
        need = event.pages[GROUP] - len(fetching.pages or ())
        if need > 0:
            more = fetching.ghost.take(fetching.ask.id, need * fetching.ghost.page, granted=True)
            if more is None:
                self.simulation.reached["decode out of pages"] += 1
                self.simulation.after(0.3, lambda: self.call(lambda: self._grant(fetching, event)))
                return
            fetching.pages = [*(fetching.pages or ()), *more]
        tables: Mapping[str, Any] = {GROUP: fetching.pages or []}
        self.try_(lambda: fetching.fetch.grant(tables, event.tokens))
        self.simulation.reached["pages granted late"] += 1

    def hear(self, event: Event) -> None:
        super().hear(event)
        if isinstance(event, PagesWanted):
            fetching = self.asks.get(event.fetch)
            if fetching is not None:
                self._grant(fetching, event)
        elif isinstance(event, Arrived | Lost | PagesFree):
            self._end(event)

    def _end(self, event: Arrived | Lost | PagesFree) -> None:
        fetching = self.asks.get(event.fetch)
        name = type(event).__name__
        if fetching is None or fetching.lost != isinstance(event, PagesFree) or not event.fetch.done:
            raise Violation("counted twice", f"{self}: {name} of a fetch that is over")
        ask, pages = fetching.ask, fetching.pages or []
        self.simulation.say(self, f"{name} {ask.id}{f': {event.error.code.name}' if isinstance(event, Lost) else ''}")
        self.simulation.reached[f"{name} {event.error.code.name}" if isinstance(event, Lost) else name] += 1
        if isinstance(event, Arrived):
            if ask.other_prompt:
                raise Violation("wrong byte", f"request {ask.id} arrived for another prompt")
            fetching.ghost.check_arrived(ask.content, pages, 0, ask.tokens)
            self.arrived.add(ask.id)
        if isinstance(event, Lost):
            self.outcomes[ask.id] = event.error.code.name
            # Data is lost with its connection, and then Done comes too early (KVP-STG-EARLY)
            cut = self.setup.way == "inline" and event.error.code == ErrorCode.UNEXPECTED_MESSAGE
            short = self.ever_short and event.error.code == ErrorCode.INTERNAL
            if event.error.code in NEVER and not cut and not short and self.role not in self.simulation.misled:
                raise Violation("wrong error", f"request {ask.id} was lost: {event.error}")
            fetching.lost = True
            if not event.pages_free:
                self.simulation.reached["quarantine"] += 1
                return
        if not event.fetch.pages_free:
            raise Violation("wrong state", f"{self}: {name} of request {ask.id}, but its pages are not free")
        del self.asks[event.fetch]
        if fetching.ghost in self.ghosts.values():
            fetching.ghost.give(pages)

    def waiting(self) -> list[tuple[str, bool]]:
        return [(f"{self}: request {f.ask.id}, {f.fetch!r}", f.lost) for f in self.asks.values()]

    def held(self) -> list[tuple[int, GhostPool]]:
        return [(fetching.ask.id, fetching.ghost) for fetching in self.asks.values() if fetching.pages]

    def move(self) -> None:
        """Go on with another pool at once."""
        if not self.door.asleep and not self.lacks("memory to allocate"):
            before, self.ghost = self.ghost, self._new_pool()
            if not self.try_(lambda: self.door.move(self.ghost.pool)):
                self.ghosts.pop(id(self.ghost.pool)).close()
                self.ghost = before
