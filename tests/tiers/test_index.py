"""The index against a model in plain lists, and each of its rules by itself."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import LocalError
from kvproto.tiers.index import MOVES, Hit, Index, Reservation, Slots, SlotState
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageComponent, PageLayout
from kvproto.wire.enums import KeyForm, LengthRule
from tests.tiers.model import Model

LAYOUT = PageLayout(
    1,
    bytes(32),
    tuple(
        PageComponent(g, KeyForm.OWN, rule, 4)
        for g, rule in enumerate((LengthRule.PREFIX, LengthRule.PREFIX, LengthRule.STATE))
    ),
)
ALL, NO_STATE = (0, 1, 2), (0, 1)


def chain(*tokens: int, page: int = 1) -> Chain:
    made = Chain(bytes(32), page)
    made.extend(tokens)
    return made


def written(index: Index, *tokens: int, groups: tuple[int, ...] = ALL) -> int:
    """Pages of a prompt that are found already, and the rest written."""
    with index.find(chain(*tokens)) as hit:
        first = len(hit.pages)
        claim = index.reserve_pages(chain(*tokens), first, len(tokens) - first)
        assert claim is not None
        for i in range(len(claim.pages)):
            claim.fill(i)
            claim.seal(i, groups)
        return first + claim.publish()


def found(index: Index, *tokens: int) -> int:
    with index.find(chain(*tokens)) as hit:
        return len(hit.pages)


def retire(index: Index, id: bytes) -> int:
    """A page and its descendants go, as if they were the oldest; returns how many."""
    slot, before = index.slot(id), len(index.ids())
    if slot is not None:
        index._remove(slot)
    return before - len(index.ids())


def row(slots: Slots) -> list[int]:
    """The slots that may be given up, the oldest first."""
    slot, there = slots._newer[slots.count], []
    while slot != slots.count:
        there.append(slot)
        slot = slots._newer[slot]
    return there


class Pair:
    """The index and the model, driven alike."""

    def __init__(self, count: int) -> None:
        self.index, self.model = Index(LAYOUT, count), Model(count)
        self.hits: list[tuple[Hit, list[int]]] = []
        self.claims: list[tuple[Reservation, tuple[int, ...], int, list[Any]]] = []
        self.closed: list[Hit | Reservation] = []
        """Closed again at every step, whoever has their slots by then."""

    def find(self, tokens: tuple[int, ...], n: int) -> None:
        hit = self.index.find(chain(*tokens))
        self.hits.append((hit, self.model.find(tokens)))
        assert [page.slot for page in hit.pages] == self.hits[-1][1]

    def cut(self, tokens: tuple[int, ...], n: int) -> None:
        if self.hits:
            hit, slots = self.hits[n % len(self.hits)]
            keep = min(len(tokens), len(slots))
            hit.cut(keep)
            self.model.unpin(slots[keep:])
            del slots[keep:]

    def let_go(self, tokens: tuple[int, ...], n: int) -> None:
        if self.hits:
            hit, slots = self.hits.pop(n % len(self.hits))
            hit.close()
            self.closed.append(hit)
            self.model.unpin(slots)

    def claim(self, tokens: tuple[int, ...], n: int) -> None:
        first = n % (len(tokens) + 1)
        claim = self.index.reserve_pages(chain(*tokens), first, len(tokens) - first)
        assert (claim is not None) == self.model.claim(len(tokens) - first)
        if claim is not None:
            self.claims.append((claim, tokens, first, [None] * (len(tokens) - first)))

    def seal(self, tokens: tuple[int, ...], n: int) -> None:
        if self.claims:
            claim, _, _, sealed = self.claims[n % len(self.claims)]
            groups = ALL if n % 2 else NO_STATE
            for i in range(min(len(sealed), len(tokens))):
                if sealed[i] is None:
                    claim.fill(i)
                    claim.seal(i, groups)
                    sealed[i] = groups

    def fail(self, tokens: tuple[int, ...], n: int) -> None:
        """A copy fails: its page stays as it is, whatever is asked of it."""
        if self.claims:
            claim, _, _, sealed = self.claims[n % len(self.claims)]
            for i in range(len(sealed)):
                with pytest.raises(LocalError):
                    claim.seal(i, (0,))

    def publish(self, tokens: tuple[int, ...], n: int) -> None:
        if self.claims:
            claim, its, first, sealed = self.claims.pop(n % len(self.claims))
            slots = [page.slot for page in claim.pages]
            assert claim.publish() == self.model.publish(its, first, slots, sealed)
            self.closed.append(claim)

    def drop(self, tokens: tuple[int, ...], n: int) -> None:
        if self.claims:
            claim, _, _, sealed = self.claims.pop(n % len(self.claims))
            with pytest.raises(ZeroDivisionError), claim:
                1 / 0  # noqa: B018
            self.closed.append(claim)
            self.model.free += len(sealed)

    def retire(self, tokens: tuple[int, ...], n: int) -> None:
        retire(self.index, chain(*tokens).own[-1])
        self.model.retire(tokens)

    def evict(self, tokens: tuple[int, ...], n: int) -> None:
        self.index.evict(n)
        self.model.evict(n)

    def check(self) -> None:
        """Every slot is in one place, and the row of those that may be given up is in order."""
        index, model, slots = self.index, self.model, self.index.slots
        for owner in self.closed:
            owner.close()
        claimed = [page.slot for claim, *_ in self.claims for page in claim.pages]
        there = [*claimed, *model.tree.values(), *model.retiring]
        assert len(there) == len({*there}) == model.count - model.free
        assert slots.free == model.free
        assert slots.idle == len(model.order)
        assert row(slots) == [model.tree[page] for page in model.order]
        assert len(index.ids()) == len(model.tree)
        states = Counter({state: n for state, n in slots.counts().items() if n})
        assert states[SlotState.READABLE] == len(model.tree)
        assert states[SlotState.RETIRING] == len(model.retiring)
        assert [slots.pins[s] for s in range(model.count)] == [model.pins[s] for s in range(model.count)]


MOVES_OF_A_PAIR = (
    Pair.find, Pair.cut, Pair.let_go, Pair.claim, Pair.seal, Pair.fail, Pair.publish, Pair.drop, Pair.retire, Pair.evict,
)  # fmt: skip
FULL = (Pair.claim, Pair.seal, Pair.publish)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
STEPS = st.lists(
    st.tuples(st.sampled_from([(move,) for move in MOVES_OF_A_PAIR] + [FULL] * 4), TOKENS, st.integers(0, 7)),
    max_size=30,
)


@settings(max_examples=200)
@given(STEPS, st.integers(1, 7))
def test_every_slot_is_freed_once_whatever_fails_when(steps: Any, count: int) -> None:
    pair = Pair(count)
    for moves, tokens, n in steps:
        for move in moves:
            move(pair, tokens, -1 if moves is FULL and move is not Pair.claim else 0 if moves is FULL else n)
            pair.check()
    for _ in range(len(pair.hits)):
        pair.let_go((), 0)
    for _ in range(len(pair.claims)):
        pair.drop((), 0)
    pair.check()
    pair.index.evict(count)
    assert pair.index.slots.counts()[SlotState.FREE] == count


def test_a_page_is_found_once_all_of_it_is_written() -> None:
    """KVP-TIER-VISIBLE."""
    index, prompt = Index(LAYOUT, 4), chain(1, 2)
    claim = index.reserve_pages(prompt, 0, 2)
    assert claim is not None
    claim.fill(0)
    with pytest.raises(LocalError, match="groups"):
        claim.seal(0, [0])
    assert found(index, 1, 2) == 0
    claim.seal(0, ALL)
    assert found(index, 1, 2) == 0
    assert claim.publish() == 1
    assert found(index, 1, 2) == 1
    assert index.slots.free == 3


def test_a_page_is_not_found_before_the_one_before_it() -> None:
    """KVP-TIER-PARENT."""
    index = Index(LAYOUT, 8)
    written(index, 1, 2)
    claim = index.reserve_pages(chain(1, 2, 3), 2, 1)
    assert claim is not None
    claim.fill(0)
    claim.seal(0, ALL)
    assert retire(index, chain(1, 2).own[1]) == 1
    assert claim.publish() == 0
    assert index.slots.counts()[SlotState.READABLE] == 1
    assert index.slots.free == 7


def test_a_slot_that_is_read_is_not_used_again() -> None:
    """KVP-TIER-PIN."""
    index = Index(LAYOUT, 2)
    written(index, 1, 2)
    with index.find(chain(1, 2)) as hit:
        assert index.reserve_pages(chain(3), 0, 1) is None
        assert retire(index, chain(1).own[0]) == 2
        assert found(index, 1, 2) == 0
        assert index.slots.counts()[SlotState.RETIRING] == 2
        assert index.reserve_pages(chain(3), 0, 1) is None
        for page in hit.pages:
            index.check(page)
    assert index.slots.free == 2


def test_a_slot_of_another_generation_is_refused() -> None:
    """KVP-TIER-GENERATION."""
    index = Index(LAYOUT, 1)
    written(index, 1)
    with index.find(chain(1)) as hit:
        (page,) = hit.pages
    index.check(page)
    written(index, 2)
    with pytest.raises(LocalError, match="generation 1"):
        index.check(page)


def test_what_was_not_used_for_longest_goes_first_and_leaves_before_what_they_hang_on() -> None:
    index = Index(LAYOUT, 4)
    written(index, 1, 2)
    written(index, 5, 6)
    assert found(index, 1, 2) == 2
    index.evict(1)
    assert index.slots.free == 1
    assert [found(index, 1, 2), found(index, 5, 6)] == [2, 1]


def test_what_follows_a_page_goes_with_it() -> None:
    index = Index(LAYOUT, 6)
    written(index, 1, 2, 3)
    written(index, 1, 2, 4)
    assert retire(index, chain(1, 2).own[1]) == 3
    assert found(index, 1, 2, 3) == 1
    assert index.slots.free == 5


def test_the_second_writer_of_a_page_gives_its_slot_back() -> None:
    index = Index(LAYOUT, 4)
    first, second = index.reserve_pages(chain(1), 0, 1), index.reserve_pages(chain(1, 2), 0, 2)
    assert first is not None
    assert second is not None
    for claim in (first, second):
        for i in range(len(claim.pages)):
            claim.fill(i)
            claim.seal(i, ALL)
    assert first.publish() == 1
    assert second.publish() == 2
    assert found(index, 1, 2) == 2
    assert index.slots.free == 2


def test_a_draft_computed_for_another_next_token_is_not_found() -> None:
    parts = (PageComponent(0, KeyForm.OWN, LengthRule.PREFIX, 4), PageComponent(1, KeyForm.AHEAD, LengthRule.PREFIX, 4))
    index = Index(PageLayout(2, bytes(32), parts), 4)
    claim = index.reserve_pages(chain(1, 2, 3, page=2), 0, 1)
    assert claim is not None
    claim.fill(0)
    claim.seal(0, (0, 1))
    claim.publish()
    lengths = [len(index.find(chain(*tokens, page=2)).pages) for tokens in ((1, 2, 3), (1, 2, 4), (1, 2))]
    assert lengths == [1, 0, 0]


def test_pages_that_are_not_of_the_prompt_cannot_be_claimed() -> None:
    index = Index(LAYOUT, 4)
    for first, count in ((0, 3), (3, 0), (-1, 1), (1, -1)):
        with pytest.raises(LocalError, match="pages within 2"):
            index.reserve_pages(chain(1, 2), first, count)


@pytest.mark.parametrize("before", SlotState)
@pytest.mark.parametrize("after", SlotState)
def test_states_change_by_the_table(before: SlotState, after: SlotState) -> None:
    path = {
        SlotState.FREE: [], SlotState.RESERVED: [1], SlotState.FILLING: [1, 2], SlotState.SEALED: [1, 2, 3], SlotState.READABLE: [1, 2, 3, 4],
        SlotState.RETIRING: [1, 2, 3, 4, 5],
    }[before]  # fmt: skip
    slots = Slots(1)
    for state in path:
        slots.move(0, SlotState(state)) if state > 1 else slots.reserve()
    assert slots.state(0) is before
    if after in MOVES[before] and before is not SlotState.FREE:
        slots.move(0, after)
        assert slots.state(0) is after
    elif after not in MOVES[before]:
        with pytest.raises(LocalError, match="slots"):
            slots.move(0, after)
        assert slots.state(0) is before


def test_a_prefix_that_is_cut_is_one_that_can_be_used() -> None:
    """KVP-TIER-LENGTH: of four pages the first and the last have the state after them."""
    index, prompt = Index(LAYOUT, 4), chain(1, 2, 3, 4)
    claim = index.reserve_pages(prompt, 0, 4)
    assert claim is not None
    for i in range(4):
        claim.fill(i)
        claim.seal(i, ALL if i in (0, 3) else NO_STATE)
    claim.publish()
    lengths = []
    for most in (None, 4, 3, 2, 1, 0):
        with index.find(prompt, most) as hit:
            lengths.append(len(hit.pages))
    assert lengths == [4, 4, 1, 1, 1, 0]
