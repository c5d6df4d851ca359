"""The whole cache, call by call, against a brute-force model of what its tiers may hold and what must be found."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvproto.tiers.page_cache import PageLease, WritePolicy
from kvproto.wire.enums import Tier
from tests.tiers.engine import PAGE, Engine

PAGES, HOST = 6, 40
"""A device on which prompts compete, and a host with room for all pages that they have."""
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(
    lambda blocks: (*(each for each in blocks for _ in range(PAGE)), 0)
)


class WholeCache(RuleBasedStateMachine):
    """Requests of overlapping prompts; the model knows each page by its tokens, and never forgets one."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(PAGES, HOST, policy=WritePolicy.WRITE_THROUGH)
        self.open: list[tuple[tuple[int, ...], Any, PageLease]] = []
        self.kept: set[tuple[int, ...]] = set()
        """Pages that were left, by the tokens up to their end and the one that follows (a draft's rows look ahead)."""
        self.settled: set[tuple[int, ...]] = set()
        """Those that a drain has seen: the host has them, whatever becomes of the device."""
        self.told: dict[bytes, Tier | None] = {}
        self.engine.cache.subscribe(self.told.update)

    def pages(self, tokens: tuple[int, ...], of: set[tuple[int, ...]]) -> int:
        """How many of a prompt's first pages are in a set."""
        n = 0
        while (n + 1) * PAGE < len(tokens) and tokens[: (n + 1) * PAGE + 1] in of:
            n += 1
        return n

    @rule(tokens=PROMPTS)
    def begin(self, tokens: tuple[int, ...]) -> None:
        """What is found was left before; all that a drain has seen is found; and no room is no lease."""
        chain, cache = self.engine.chain(*tokens), self.engine.cache
        room = -(-len(tokens) // PAGE)
        taken = {slot for *_, lease in self.open for slot in lease.slots}
        lease = cache.open(chain, room)
        if lease is None:
            assert len(taken) + room > PAGES or cache.busy
            return
        near = lease.pages
        promised = near + len(lease.coming)
        assert self.pages(tokens, self.settled) <= promised <= self.pages(tokens, self.kept)
        assert not taken.intersection(lease.slots[near:]), "room is nobody else's"
        self.open.append((tokens, chain, lease))

    @rule()
    def step(self) -> None:
        self.engine.cache.step()

    @rule()
    def drain(self) -> None:
        """The host has all that was left, and what is told of each page is where it is."""
        cache = self.engine.cache
        cache.drain()
        cache.step()
        self.settled = {*self.kept}
        for page in self.settled:
            id = self.engine.chain(*page).ahead[-1]
            assert self.told.get(id) is (Tier.HOST if cache.device.slot(id) is None else Tier.DEVICE)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), whole=st.booleans())
    def leave(self, which: int, whole: bool) -> None:
        """Right bytes are there; the rest is computed, and all or half of it is left."""
        tokens, chain, lease = self.open.pop(which % len(self.open))
        rows = len(tokens) - 1 if whole else len(tokens) // 2
        if lease.ready:
            self.engine.check(chain, lease)
            self.engine.compute(chain, lease, lease.pages)
            self.kept |= {tokens[: end + 1] for end in range(PAGE, rows + 1, PAGE)}
        lease.leave(rows)

    @rule(count=st.integers(1, PAGES))
    def evict(self, count: int) -> None:
        """The device gives pages up that nobody has."""
        self.engine.cache.device.evict(count)

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        for index in (self.engine.cache.device, self.engine.cache.host):
            assert sum(index.slots.counts().values()) == index.slots.count
        known = {self.engine.chain(*page).ahead[-1] for page in self.kept}
        assert {id for id, tier in self.told.items() if tier is not None} <= known

    def teardown(self) -> None:
        for *_, lease in self.open:
            lease.leave()
        self.engine.cache.drain()
        assert list(self.engine.free()) == [PAGES, HOST]
        self.engine.cache.close()


TestWholeCache = WholeCache.TestCase
TestWholeCache.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
