"""Requests whose pages grow with their answers all end, in whatever order their prompts arrive."""

import random

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto_reference.cache import PageAllocator
from kvproto_reference.engine.admission import Admission
from kvproto_reference.engine.claims import Claim, claimed
from kvproto_reference.engine.prefix import PrefixCache
from kvproto_reference.engine.sequence import TokenSequence
from tests.reference.test_reference_prefix import shards

PAGES, TOKENS = 10, 4
"""Pages of a pool, and tokens of a page."""
WINDOW, MOVING = 3, 7
"""Pages in which the sliding windows of a request move, and those of their pool."""
SHARDS = shards(1, 1, TOKENS)


@attrs.define(eq=False)
class Engine:
    """A decode engine without models: prompts arrive by dice, and each step gives as many tokens as they say."""

    proposed: int
    later: bool
    dice: random.Random
    hybrid: bool = False
    """Whether there is a pool of sliding windows too, of which each request takes the same number of pages."""
    fetching: dict[TokenSequence, Claim | None] = attrs.Factory(dict)
    came: list[TokenSequence] = attrs.Factory(list)
    """The requests that are not over, the oldest first."""
    ways: dict[TokenSequence, list[int]] = attrs.Factory(dict)
    """How many tokens each had whenever it gave way."""

    grown: set[int] = attrs.Factory(set)
    """Pages of the target that running requests got."""
    pools: list[int] = attrs.field(init=False)
    pages: PrefixCache = attrs.field(init=False)
    admission: Admission = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pools = [PAGES, PAGES, MOVING] if self.hybrid else [PAGES, PAGES]
        self.pages = PrefixCache([PageAllocator(n, 1) for n in self.pools], SHARDS, hybrid=self.hybrid)
        self.admission = Admission(self.pages, self.need, self.proposed, self.grown.update)

    def need(self, rows: int) -> tuple[int, ...]:
        windows = (WINDOW if rows else 0,) if self.hybrid else ()
        return (*(shard.pages(rows) for shard in SHARDS), *windows)

    def add(self, prompt: int, max_new: int) -> TokenSequence:
        sequence = TokenSequence(prompt=[1 + len(self.came)] * prompt, max_new=max_new)
        self.came.append(sequence)
        self.admission.add(sequence)
        return sequence

    def turn(self) -> None:
        self.begin()
        for sequence in self.dice.sample([*self.fetching], len(self.fetching)):
            if self.arrives(sequence):
                del self.fetching[sequence]
                sequence.append([7])
                self.admission.run(sequence)
        held = {sequence: {*sequence.tables[0]} for sequence in self.admission.running}
        self.grown.clear()
        self.admission.grow(self.give_way)
        assert {page for s in self.admission.running for page in {*s.tables[0]} - held[s]} <= self.grown
        for sequence in [*self.admission.running]:
            step = self.admission.step(sequence)
            assert all(len(table) >= n for table, n in zip(sequence.tables, step, strict=True))
            sequence.append([7] * self.dice.randint(1, 1 + self.proposed))
            if sequence.finished:
                self.end(sequence)

    def begin(self) -> None:
        """Give pages to those that wait, as far as there are some."""
        while self.admission.waiting:
            sequence = self.admission.waiting[0]
            later = self.later and not sequence.generated
            taken = self.pages.allocate(sequence, self.need(0)) if later else self.admission.take(sequence)
            if taken is None:
                return
            assert self.admission.begin() is sequence
            assert not any(self.came.index(each) < self.came.index(sequence) for each in self.admission.waiting)
            if sequence.generated:
                self.admission.run(sequence)
            else:
                self.fetching[sequence] = Claim(sequence, self.admission.step(sequence)) if later else None

    def arrives(self, sequence: TokenSequence) -> bool:
        claim = self.fetching[sequence]
        if claim is None:
            return self.dice.random() < 0.4
        more = tuple(min(n, held + self.dice.randint(1, 4)) for n, held in zip(claim.whole, claim.held, strict=True))
        running = [sum(len(s.tables[m]) for s in self.admission.running) for m in range(len(self.pools))]
        claims = [each for each in self.fetching.values() if each is not None]
        claimed(claim, more, claims, running, self.pages, self.admission.spare)
        return all(held >= n for held, n in zip(claim.held, claim.whole, strict=True))

    def give_way(self, sequence: TokenSequence) -> None:
        assert all(self.came.index(each) <= self.came.index(sequence) for each in self.admission.running)
        ways = self.ways.setdefault(sequence, [])
        if sequence is self.came[0]:  # the oldest has gained a token since the last time
            assert not ways or len(sequence.generated) > ways[-1]
        ways.append(len(sequence.generated))
        self.pages.free(sequence, sequence.shared)
        sequence.tables = []

    def end(self, sequence: TokenSequence) -> None:
        self.pages.free(sequence, sequence.shared)
        self.admission.forget(sequence)
        self.came.remove(sequence)


Requests = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 21)), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(Requests, st.integers(0, 3), st.booleans(), st.integers(0, 999), st.booleans())
def test_all_end_the_youngest_gives_way_and_the_oldest_gains_a_token_by_each_return(
    requests: list[tuple[int, int]], proposed: int, later: bool, seed: int, hybrid: bool
) -> None:
    engine = Engine(proposed, later, random.Random(seed), hybrid)
    for prompt, max_new in requests:
        engine.add(prompt, max_new)
    for _ in range(40 * sum(max_new for _, max_new in requests)):
        engine.turn()
        if not engine.came:
            break
    assert not engine.came
    assert engine.pages.available == engine.pools


def test_two_requests_that_need_all_pages_do_not_take_them_from_each_other() -> None:
    """The older one never gives way; the younger one begins once, and comes back once there is room."""
    engine = Engine(0, False, random.Random(3))
    older, younger = engine.add(4, 37), engine.add(4, 37)
    while engine.came:
        engine.turn()
    assert older not in engine.ways
    assert len(engine.ways[younger]) == 1


def test_a_page_of_each_pool_stays_free_for_each_running_request_that_may_need_more() -> None:
    engine = Engine(0, False, random.Random(3))
    growing, whole = engine.add(4, 9), engine.add(5, 2)
    for sequence in (growing, whole):
        assert engine.admission.take(sequence) == 0
        engine.admission.run(engine.admission.begin())
    assert engine.admission.spare == [1, 1]
    assert engine.pages.available == [6, 6]
    engine.add(21, 2)  # six pages, and one is to stay
    assert engine.admission.take(engine.admission.waiting[0]) is None
    engine.end(growing)
    assert engine.admission.take(engine.admission.waiting[0]) == 0


def test_pages_of_sliding_windows_are_taken_once_and_none_stays_free_for_those_that_run() -> None:
    engine = Engine(0, False, random.Random(3), hybrid=True)
    for _ in range(2):
        assert engine.admission.take(engine.add(4, 9)) == 0
        engine.admission.run(engine.admission.begin())
    assert engine.admission.spare == [2, 2, 0]
    engine.add(4, 9)
    assert engine.admission.take(engine.admission.waiting[0]) is None
    windows = [[*sequence.tables[2]] for sequence in engine.admission.running]
    for sequence in engine.admission.running:
        sequence.append([7] * 6)
    engine.admission.grow(engine.give_way)
    assert [sequence.tables[2] for sequence in engine.admission.running] == windows
    assert engine.grown
