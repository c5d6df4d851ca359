"""Which pages of which prompts are there: a tree of readable pages over the slots, found by their ids.

Pages that are being written belong to a `Reservation` and are in no tree; pages that are read are pinned by a `Hit`.
Each gives back what it has exactly once, when it is closed. One thread at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from kvproto.errors import LocalError
from kvproto.tiers.lengths import Found, lengths_of, usable
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout
from kvproto.tiers.slots import Slots, SlotState
from kvproto.wire.enums import ErrorCode, LengthRule

__all__ = ["Hit", "Index", "Reservation", "SlotRef", "filling", "seal"]

_NONE = -1


class SlotRef(NamedTuple):
    """A slot as somebody got it."""

    slot: int
    generation: int


class Index:
    """The pages of one rank in one memory of `count` slots."""

    def __init__(self, layout: PageLayout, count: int) -> None:
        """Raises LocalError for a layout of more than 64 components."""
        if len(layout.parts) > 64:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "layout", "at most 64 components", str(len(layout.parts)))
        self.layout, self.slots = layout, Slots(count)
        self.on_gone: Callable[[Sequence[tuple[bytes, int]]], None] = lambda pages: None
        """Told of pages, each with its slot, just before they can be found no more; each after the page before it."""
        self.news: dict[bytes, None] | None = None
        """Ids of pages that have come or gone since somebody emptied it; None: nobody wants to know."""
        self._form = layout.form
        self._bit = {part.group: 1 << i for i, part in enumerate(layout.parts)}
        self._must = sum(self._bit[group] for group in layout.must)
        self._needs = [
            (self._bit[p.group], 1 if p.reach is None else -(-p.reach // layout.page))
            for p in layout.parts
            if p.rule is not LengthRule.PREFIX
        ]
        self._some = [(p, self._bit[p.group]) for p in layout.parts if p.rule is not LengthRule.PREFIX]
        self._by_id: dict[bytes, int] = {}
        self._ids: list[bytes | None] = [None] * count
        self._held = array("Q", bytes(8 * count))
        self._parent, self._child, self._next, self._before = (array("i", [_NONE]) * count for _ in range(4))

    def __len__(self) -> int:
        """Pages that can be found."""
        return len(self._by_id)

    def place(self, page: SlotRef, group: int) -> int:
        """Where in the memory of a component the page begins, in bytes; raises LocalError."""
        self.check(page)
        return page.slot * self.layout.part(group).length

    def check(self, page: SlotRef) -> None:
        """Raise LocalError if the slot has been given to somebody else since (KVP-TIER-GENERATION)."""
        now = self.slots.generation(page.slot)
        if now != page.generation or self.slots.state(page.slot) is SlotState.FREE:
            raise LocalError(ErrorCode.STALE_TRANSFER, f"slots[{page.slot}]", f"generation {now}", str(page.generation))

    def find(self, chain: Chain, most: int | None = None) -> Hit:
        """The longest prefix that can be used, of `most` pages at most, pinned; it may be of no pages."""
        get, slots = self._by_id.get, []
        for id in islice(chain.ids(self._form), most):
            slot = get(id)
            if slot is None:
                break
            slots.append(slot)
        if not self._some:
            return Hit(self, (len(slots), []), slots)
        held, page = [self._held[slot] for slot in slots], self.layout.page
        said = len(slots), [lengths_of(part, page, [bits & bit for bits in held]) for part, bit in self._some]
        return Hit(self, said, slots[: usable(said)])

    def hold(self, chain: Chain, groups: Sequence[Collection[int]]) -> Hit:
        """The leading pages that have at least these components, pinned, also where no request can go on after them."""
        slots = []
        for id, some in zip(chain.ids(self._form), groups, strict=False):
            slot = self._by_id.get(id)
            if slot is None or self.bits(some) & ~self._held[slot]:
                break
            slots.append(slot)
        return Hit(self, (len(slots), []), slots)

    def claim(self, chain: Chain, first: int, count: int) -> Reservation | None:
        """Slots for pages [first, first + count) of a prompt, all or none; others are given up for them."""
        ids = chain.ids(self.layout.form)
        if not 0 <= first <= first + count <= len(ids):
            raise LocalError(ErrorCode.OUT_OF_RANGE, "count", f"pages within {len(ids)}", f"{first} + {count}")
        claim = self.reserve(count)
        if claim is not None:
            claim.name(chain, first)
        return claim

    def reserve(self, count: int) -> Reservation | None:
        """Slots for pages that get their names later, all or none; others are given up for them."""
        if self.slots.free + self.slots.idle < count:
            return None
        self.evict(count)
        return Reservation(self, [self.slots.reserve() for _ in range(count)])

    def bits(self, groups: Iterable[int]) -> int:
        """A bit for each component; raises LocalError for one that the layout lacks."""
        return sum(self._bit[self.layout.part(group).group] for group in {*groups})

    def groups(self, slot: int) -> list[int]:
        """Components that the page has which can be found there."""
        return [group for group, bit in self._bit.items() if self._held[slot] & bit]

    def held(self) -> dict[int, int]:
        """How many pages that can be found have each component; from any thread."""
        held = np.frombuffer(self._held, np.uint64)
        return {group: int(np.count_nonzero(held & np.uint64(bit))) for group, bit in self._bit.items()}

    def ends(self, id: bytes) -> bool:
        """Whether a request can go on after this page: it is there, and so is what components need before it."""
        slot = self._by_id.get(id)
        return slot is not None and all(self._reaches(slot, *each) for each in self._needs)

    def _reaches(self, slot: int, bit: int, pages: int) -> bool:
        """Whether a page and those before it, so many in all, have a component, back to the first of the prompt."""
        while pages and slot != _NONE:
            if not self._held[slot] & bit:
                return False
            slot, pages = self._parent[slot], pages - 1
        return True

    def ids(self) -> list[bytes]:
        """Pages that can be found."""
        return [*self._by_id]

    def slot(self, id: bytes) -> int | None:
        """Where a page is that can be found."""
        return self._by_id.get(id)

    def retire(self, id: bytes) -> int:
        """Let a page and all that follow it be found no more; how many there were. Readers keep what they have."""
        slot = self._by_id.get(id)
        return 0 if slot is None else self._cascade(slot)

    def evict(self, count: int) -> int:
        """Give up the pages that were not used for longest, with all that follow them, until `count` slots are FREE."""
        before = self.slots.free
        while self.slots.free < count and self._give_up():
            continue
        return self.slots.free - before

    def _give_up(self) -> bool:
        slot = self.slots.oldest()
        return slot is not None and self._cascade(slot) > 0

    def _cascade(self, slot: int) -> int:
        gone = list(self._below(slot))
        self.on_gone([(id, each) for each in gone if (id := self._ids[each]) is not None])
        self._unlink(slot)
        for each in gone:
            id = self._ids[each]
            assert id is not None
            del self._by_id[id]
            if self.news is not None:
                self.news[id] = None
            self._clear(each)
        return len(gone)

    def _replace(self, old: int, new: int, bits: int) -> None:
        """Let a page be found in place of one that lacks some of its components; readers keep what they have."""
        id = self._ids[old]
        assert id is not None
        self.slots.move(new, SlotState.READABLE)
        self._by_id[id], self._ids[new], self._held[new] = new, id, bits
        parent, child = self._parent[old], self._child[old]
        self._unlink(old)
        self._link(new, parent)
        self._child[new] = child
        while child != _NONE:
            self._parent[child], child = new, self._next[child]
        self._clear(old)
        if self.news is not None:  # a request may go on after those that follow, too
            self.news.update(dict.fromkeys(id for slot in self._below(new) if (id := self._ids[slot]) is not None))

    def _clear(self, slot: int) -> None:
        self._ids[slot], self._held[slot] = None, 0
        self._parent[slot] = self._child[slot] = self._next[slot] = self._before[slot] = _NONE
        self.slots.move(slot, SlotState.RETIRING if self.slots.pins(slot) else SlotState.FREE)

    def _below(self, slot: int) -> Iterator[int]:
        todo = [slot]
        while todo:
            slot = todo.pop()
            child = self._child[slot]
            while child != _NONE:
                todo.append(child)
                child = self._next[child]
            yield slot

    def _link(self, slot: int, parent: int) -> None:
        self._parent[slot] = parent
        if parent != _NONE:
            child = self._child[parent]
            self._next[slot], self._child[parent] = child, slot
            if child != _NONE:
                self._before[child] = slot

    def _unlink(self, slot: int) -> None:
        before, after, parent = self._before[slot], self._next[slot], self._parent[slot]
        if after != _NONE:
            self._before[after] = before
        if before != _NONE:
            self._next[before] = after
        elif parent != _NONE:
            self._child[parent] = after

    def _publish(self, parent_id: bytes | None, ids: Sequence[bytes], slots: Sequence[int], held: Sequence[int]) -> int:
        """Let sealed pages be found, from the first on, as long as the page before each is (KVP-TIER-PARENT)."""
        parent = _NONE if parent_id is None else self._by_id.get(parent_id)
        done = 0
        for id, slot, bits in zip(ids, slots, held, strict=False):
            if parent is None or self.slots.state(slot) is not SlotState.SEALED:
                break
            known = self._by_id.get(id)
            if known is None:
                self.slots.move(slot, SlotState.READABLE)
                self._by_id[id], self._ids[slot], self._held[slot], known = slot, id, bits, slot
                self._link(slot, parent)
                if self.news is not None:
                    self.news[id] = None
            elif bits & ~self._held[known] and not self._held[known] & ~bits:
                self._replace(known, slot, bits)
                known = slot
            parent, done = known, done + 1
        while parent is not None and parent != _NONE:  # the leaf first, so that no page is older than what follows it
            self.slots.touch(parent)
            parent = self._parent[parent]
        return done


class _SlotHolder:
    """Something that gives back what it has when it is closed, once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is left; nothing if that has been done."""
        raise NotImplementedError


class Hit(_SlotHolder):
    """A prefix that is there, pinned until it is closed."""

    def __init__(self, index: Index, said: Found, slots: Sequence[int]) -> None:
        self._index, self.found = index, said
        generation = index.slots.generation
        self.pages = [SlotRef(slot, generation(slot)) for slot in slots]
        """As many as can be used by this rank."""
        index.slots.pin(slots)

    def cut(self, length: int) -> None:
        """Keep only so many pages: what all ranks can use (KVP-TIER-LENGTH)."""
        if gone := self.pages[length:]:
            del self.pages[length:]
            self._index.slots.unpin([page.slot for page in reversed(gone)])

    def close(self) -> None:
        """Let go of all pages; of those that stay, the first is the newest."""
        self.cut(0)


class Reservation(_SlotHolder):
    """Slots that one owner fills, and publishes or gives back."""

    def __init__(self, index: Index, slots: list[int]) -> None:
        self._index, self._slots = index, slots
        self._held = [0] * len(slots)
        self._parent: bytes | None = None
        self._ids: list[bytes] = []

    def name(self, chain: Chain, first: int) -> None:
        """They are for the pages of a prompt from `first` on, as many as have ids; the others are never published."""
        ids = chain.ids(self._index.layout.form)
        self._parent, self._ids = ids[first - 1] if first else None, ids[first : first + len(self._slots)]

    def split(self, count: int) -> Reservation:
        """The first `count` slots, as a claim of their own, before they have names or anything in them."""
        other = Reservation(self._index, self._slots[:count])
        del self._slots[:count], self._held[:count]
        return other

    def join(self, other: Reservation) -> None:
        """Take another claim's slots over, before the own ones."""
        self._slots[:0], self._held[:0] = other._slots, other._held
        other._slots, other._held = [], []

    @property
    def pages(self) -> list[SlotRef]:
        """In the order of the prompt; none once it is closed."""
        return [SlotRef(slot, self._index.slots.generation(slot)) for slot in self._slots]

    def fill(self, i: int) -> None:
        """Copies into page i begin."""
        self._index.slots.move(self._slots[i], SlotState.FILLING)

    def seal(self, i: int, groups: Sequence[int]) -> None:
        """All copies into page i are over, of these groups; raises LocalError if they lack a PREFIX component."""
        held = self._index.bits(groups)
        if self._index._must & ~held:
            must = sorted(self._index.layout.must)
            raise LocalError(ErrorCode.OUT_OF_RANGE, "groups", f"{must} at least", str(sorted(groups)))
        self._index.slots.move(self._slots[i], SlotState.SEALED)
        self._held[i] = held

    def publish(self) -> int:
        """Let the sealed pages be found, and close; how many of its first pages can be found now (KVP-TIER-VISIBLE).

        A page that somebody else has published first is theirs, unless ours has all of its components and more.
        """
        try:
            return self._index._publish(self._parent, self._ids, self._slots, self._held)
        finally:
            self.close()

    def close(self) -> None:
        """Free all slots that were not published."""
        slots, self._slots = self._slots, []
        for slot in slots:
            if self._index.slots.state(slot) in (SlotState.RESERVED, SlotState.FILLING, SlotState.SEALED):
                self._index.slots.move(slot, SlotState.FREE)


def filling(claims: Iterable[Reservation]) -> list[int]:
    """The slots of claims, which are FILLING from now on."""
    slots = []
    for claim in claims:
        for i, page in enumerate(claim.pages):
            claim.fill(i)
            slots.append(page.slot)
    return slots


def seal(claim: Reservation, groups: Sequence[Sequence[int]]) -> None:
    """The copies into all pages of a claim are over, of these groups of each."""
    for i, some in enumerate(groups):
        claim.seal(i, some)
