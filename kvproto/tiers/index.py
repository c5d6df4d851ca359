"""The pages in one memory: slots with their states, and a tree of the readable pages over them, found by page id.

Component c of slot s lies at place s of the memory of c, so no component has an allocator of its own. Pages that are
being written belong to a `Reservation` and are in no tree; pages that are being read are pinned by a `Hit`. Each
returns its slots exactly once, when it is closed. One thread at a time may call this module.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvproto.closing import Closing
from kvproto.errors import U32, LocalError, bad, check_whole
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout, usable_lengths
from kvproto.wire.enums import ErrorCode, LengthRule

_NONE = -1


class SlotState(IntEnum):
    """The state of a slot (tiers.md, States)."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    SEALED = 3
    READABLE = 4
    RETIRING = 5


MOVES: dict[SlotState, tuple[SlotState, ...]] = {
    SlotState.FREE: (SlotState.RESERVED,),
    SlotState.RESERVED: (SlotState.FILLING, SlotState.FREE),
    SlotState.FILLING: (SlotState.SEALED, SlotState.FREE),
    SlotState.SEALED: (SlotState.READABLE, SlotState.FREE),
    SlotState.READABLE: (SlotState.RETIRING, SlotState.FREE),
    SlotState.RETIRING: (SlotState.FREE,),
}
"""The states that may follow each state."""

_RETIRING = int(SlotState.RETIRING)
_MAY = [sum(1 << after for after in MOVES[before]) for before in SlotState]
"""MOVES as bits, for a million slots."""


class Slots:
    """The states of `count` slots, and a queue of the readable slots without pins, least recently used first."""

    def __init__(self, count: int) -> None:
        self.count = check_whole("count", count, 1, U32 >> 1)
        self._state = bytearray(count)
        self.generation = array("I", bytes(4 * count))
        """The number of times that each slot has become FREE, modulo 2^32 (KVP-TIER-GENERATION)."""
        self.pins = array("I", bytes(4 * count))
        """The number of readers that have pinned each slot."""
        self._free = array("i", range(count - 1, -1, -1))
        self._older = array("i", [-1]) * (count + 1)
        self._newer = array("i", [-1]) * (count + 1)
        self.idle = 0
        """The number of READABLE slots without pins."""
        self._older[count] = self._newer[count] = count  # the queue is a ring through this place, which is no slot

    @property
    def free(self) -> int:
        return len(self._free)

    def counts(self) -> dict[SlotState, int]:
        return {state: self._state.count(state) for state in SlotState}

    def state(self, slot: int) -> SlotState:
        return SlotState(self._state[slot])

    def reserve(self) -> int:
        """Move a FREE slot to RESERVED and return it; the caller has checked that there is one."""
        slot = self._free.pop()
        self._state[slot] = SlotState.RESERVED
        return slot

    def move(self, slot: int, state: SlotState) -> None:
        """Change a state; raises LocalError for a move that MOVES lacks, or a slot that is pinned (KVP-TIER-PIN)."""
        before = self._state[slot]
        if not _MAY[before] >> state & 1 or (state is SlotState.FREE and self.pins[slot]):
            allowed = " or ".join(after.name for after in MOVES[SlotState(before)])
            wants = f"{SlotState(before).name} to {allowed}, FREE without pins"
            raise bad(f"slots[{slot}]", wants, f"{state.name}, {self.pins[slot]} pins")
        self._state[slot] = state
        if before == SlotState.READABLE and not self.pins[slot]:
            self._dequeue(slot)
        if state is SlotState.FREE:
            self.generation[slot] = (self.generation[slot] + 1) & U32
            self._free.append(slot)
        elif state is SlotState.READABLE:
            self._enqueue(slot)

    def pin(self, slots: Iterable[int]) -> None:
        """Add one reader to each of these READABLE slots."""
        pins = self.pins
        for slot in slots:
            if not pins[slot]:
                self._dequeue(slot)
            pins[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Remove one reader from each slot; after the last, a RETIRING slot is freed and a READABLE one queued last."""
        pins, state = self.pins, self._state
        for slot in slots:
            pins[slot] -= 1
            if not pins[slot]:
                if state[slot] == _RETIRING:
                    self.move(slot, SlotState.FREE)
                else:
                    self._enqueue(slot)

    def touch(self, slot: int) -> None:
        """Queue a READABLE slot last, unless it is pinned."""
        if not self.pins[slot]:
            self._dequeue(slot)
            self._enqueue(slot)

    def oldest(self) -> int | None:
        """The least recently used READABLE slot without pins."""
        slot = self._newer[self.count]
        return None if slot == self.count else slot

    def _enqueue(self, slot: int) -> None:
        end, self.idle = self.count, self.idle + 1
        last = self._older[end]
        self._older[slot], self._newer[slot] = last, end
        self._newer[last] = self._older[end] = slot

    def _dequeue(self, slot: int) -> None:
        self.idle -= 1
        older, newer = self._older[slot], self._newer[slot]
        self._newer[older], self._older[newer] = newer, older


class SlotRef(NamedTuple):
    """A slot, and the generation in which it was handed out."""

    slot: int
    generation: int


class Index:
    """The pages of one rank in a memory of `count` slots."""

    def __init__(self, layout: PageLayout, count: int) -> None:
        """Raises LocalError for a layout of more than 64 components."""
        if len(layout.components) > 64:
            raise bad("layout", "at most 64 components", len(layout.components))
        self.layout, self.slots = layout, Slots(count)
        self.on_evict: Callable[[Sequence[tuple[bytes, int]]], None] = lambda pages: None
        """Called with the (id, slot) of pages that are about to leave the tree, parents first."""
        self.changes: dict[bytes, None] | None = None
        """Ids of pages that came or went since a listener emptied it; None: not recorded."""
        self._form = layout.form
        self._bit = {component.group: 1 << i for i, component in enumerate(layout.components)}
        self._required = sum(self._bit[group] for group in layout.required)
        self._partial = [(c, self._bit[c.group]) for c in layout.components if c.rule is not LengthRule.PREFIX]
        self._reaches = [(bit, 1 if c.reach is None else -(-c.reach // layout.page)) for c, bit in self._partial]
        """The bit of each component that a page may lack, and how many pages up to a length it needs."""
        self._by_id: dict[bytes, int] = {}
        self._ids: list[bytes | None] = [None] * count
        self._held = array("Q", bytes(8 * count))
        self._parent, self._child, self._next, self._before = (array("i", [_NONE]) * count for _ in range(4))

    def check(self, page: SlotRef) -> None:
        """Raise LocalError if the slot has been handed out again since (KVP-TIER-GENERATION)."""
        now = self.slots.generation[page.slot]
        if now != page.generation or self.slots.state(page.slot) is SlotState.FREE:
            raise LocalError(ErrorCode.STALE_TRANSFER, f"slots[{page.slot}]", f"generation {now}", str(page.generation))

    def find(self, chain: Chain, most: int | None = None) -> Hit:
        """Pin and return the longest prefix of at most `most` pages after which a request can continue."""
        get, slots = self._by_id.get, []
        for id in islice(chain.ids(self._form), most):
            slot = get(id)
            if slot is None:
                break
            slots.append(slot)
        lengths = (2 << len(slots)) - 1
        if self._partial:
            held = [self._held[slot] for slot in slots]
            for component, bit in self._partial:
                lengths &= usable_lengths(component, self.layout.page, [bits & bit for bits in held])
        return Hit(self, lengths, slots[: lengths.bit_length() - 1])

    def find_with(self, chain: Chain, groups: Sequence[Collection[int]]) -> Hit:
        """Pin and return the leading pages that have at least these components; a request may not continue there."""
        slots = []
        for id, wanted in zip(chain.ids(self._form), groups, strict=False):
            slot = self._by_id.get(id)
            if slot is None or self._bits(wanted) & ~self._held[slot]:
                break
            slots.append(slot)
        return Hit(self, (2 << len(slots)) - 1, slots)

    def reserve_pages(self, chain: Chain, first: int, count: int) -> Reservation | None:
        """Reserve slots for pages [first, first + count) of a prompt, all or none; evicts other pages for them."""
        ids = chain.ids(self.layout.form)
        if not 0 <= first <= first + count <= len(ids):
            raise bad("count", f"pages within {len(ids)}", f"{first} + {count}")
        reservation = self.reserve(count)
        if reservation is not None:
            reservation.assign(chain, first)
        return reservation

    def reserve(self, count: int) -> Reservation | None:
        """Reserve slots for pages that are assigned later, all or none; evicts other pages for them."""
        if self.slots.free + self.slots.idle < count:
            return None
        self.evict(count)
        return Reservation(self, [self.slots.reserve() for _ in range(count)])

    def _bits(self, groups: Iterable[int]) -> int:
        """One bit for each component; raises LocalError for a group that the layout lacks."""
        return sum(self._bit[self.layout.component(group).group] for group in {*groups})

    def groups(self, slot: int) -> list[int]:
        """The components of the readable page in a slot."""
        return [group for group, bit in self._bit.items() if self._held[slot] & bit]

    def page_counts(self) -> dict[int, int]:
        """The number of readable pages that have each component; thread-safe."""
        held = np.frombuffer(self._held, np.uint64)
        return {group: int(np.count_nonzero(held & np.uint64(bit))) for group, bit in self._bit.items()}

    def can_continue_after(self, id: bytes) -> bool:
        """Whether this page is here, and with it everything before it that a request needs to continue."""
        slot = self._by_id.get(id)
        return slot is not None and all(self._holds(slot, bit, pages) for bit, pages in self._reaches)

    def _holds(self, slot: int, bit: int, pages: int) -> bool:
        """Whether the last `pages` pages up to this one have a component, or all pages if there are fewer."""
        while pages and slot != _NONE:
            if not self._held[slot] & bit:
                return False
            slot, pages = self._parent[slot], pages - 1
        return True

    def ids(self) -> list[bytes]:
        """The ids of all readable pages."""
        return [*self._by_id]

    def slot(self, id: bytes) -> int | None:
        return self._by_id.get(id)

    def evict(self, count: int) -> None:
        """Remove least recently used pages, and their descendants, until `count` slots are FREE."""
        while self.slots.free < count and (slot := self.slots.oldest()) is not None:
            self._remove(slot)

    def _remove(self, slot: int) -> None:
        """Remove a page and its descendants; readers keep their slots."""
        removed = [(id, below) for below in self._subtree(slot) if (id := self._ids[below]) is not None]
        self.on_evict(removed)
        self._unlink(slot)
        for id, below in removed:
            del self._by_id[id]
            if self.changes is not None:
                self.changes[id] = None
            self._clear(below)

    def _replace(self, old: int, new: int, bits: int) -> None:
        """Put a page in place of one that lacks some of its components; readers of the old one keep its slot."""
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
        if self.changes is not None:  # a request may now be able to continue after descendants, too
            self.changes.update(dict.fromkeys(id for slot in self._subtree(new) if (id := self._ids[slot]) is not None))

    def _clear(self, slot: int) -> None:
        self._ids[slot], self._held[slot] = None, 0
        self._parent[slot] = self._child[slot] = self._next[slot] = self._before[slot] = _NONE
        self.slots.move(slot, SlotState.RETIRING if self.slots.pins[slot] else SlotState.FREE)

    def _subtree(self, slot: int) -> Iterator[int]:
        """A page and its descendants, parents first."""
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
        """Add sealed pages to the tree in order, as long as the parent of each is in it (KVP-TIER-PARENT)."""
        parent = _NONE if parent_id is None else self._by_id.get(parent_id)
        published = 0
        for id, slot, bits in zip(ids, slots, held, strict=False):
            if parent is None or self.slots.state(slot) is not SlotState.SEALED:
                break
            known = self._by_id.get(id)
            if known is None:
                self.slots.move(slot, SlotState.READABLE)
                self._by_id[id], self._ids[slot], self._held[slot], known = slot, id, bits, slot
                self._link(slot, parent)
                if self.changes is not None:
                    self.changes[id] = None
            elif bits & ~self._held[known] and not self._held[known] & ~bits:
                self._replace(known, slot, bits)
                known = slot
            parent, published = known, published + 1
        while parent is not None and parent != _NONE:
            self.slots.touch(parent)  # from the leaf up, so that no page is evicted before its children
            parent = self._parent[parent]
        return published


class Hit(Closing):
    """A prefix of a prompt, pinned until it is closed."""

    def __init__(self, index: Index, lengths: int, slots: Sequence[int]) -> None:
        self._index, self.lengths = index, lengths
        """A bitmap: bit n is set if a request can continue after n pages (KVP-TIER-LENGTH)."""
        generation = index.slots.generation
        self.pages = [SlotRef(slot, generation[slot]) for slot in slots]
        """The pages that this rank can use."""
        index.slots.pin(slots)

    def cut(self, length: int) -> None:
        """Keep only the first `length` pages: what all ranks can use (KVP-TIER-LENGTH)."""
        if dropped := self.pages[length:]:
            del self.pages[length:]
            self._index.slots.unpin([page.slot for page in reversed(dropped)])

    def close(self) -> None:
        """Unpin all pages; the first of them becomes the most recently used."""
        self.cut(0)


class Reservation(Closing):
    """Slots that one owner fills, and then publishes or returns."""

    def __init__(self, index: Index, slots: list[int]) -> None:
        self._index, self._slots = index, slots
        self._held = [0] * len(slots)
        self._parent: bytes | None = None
        self._ids: list[bytes] = []

    def assign(self, chain: Chain, first: int) -> None:
        """Assign the slots to the pages of a prompt from `first` on; slots beyond its last id are never published."""
        ids = chain.ids(self._index.layout.form)
        self._parent, self._ids = ids[first - 1] if first else None, ids[first : first + len(self._slots)]

    def split(self, count: int) -> Reservation:
        """Move the first `count` slots into a reservation of their own, before any is assigned or filled."""
        other = Reservation(self._index, self._slots[:count])
        del self._slots[:count], self._held[:count]
        return other

    def prepend(self, other: Reservation) -> None:
        """Take over the slots of another reservation, in front of our own."""
        self._slots[:0], self._held[:0] = other._slots, other._held
        other._slots, other._held = [], []

    @property
    def pages(self) -> list[SlotRef]:
        """The slots in the order of the prompt; none once it is closed."""
        return [SlotRef(slot, self._index.slots.generation[slot]) for slot in self._slots]

    def fill(self, i: int) -> int:
        """Mark that copies into page i begin, and return its slot."""
        self._index.slots.move(self._slots[i], SlotState.FILLING)
        return self._slots[i]

    def fill_all(self) -> list[int]:
        """Mark that copies into all pages begin, and return their slots."""
        return [self.fill(i) for i in range(len(self._slots))]

    def seal(self, i: int, groups: Sequence[int]) -> None:
        """Mark that copies of these groups into page i are over; raises LocalError if a PREFIX component is missing."""
        held = self._index._bits(groups)
        if self._index._required & ~held:
            raise bad("groups", f"{sorted(self._index.layout.required)} at least", sorted(groups))
        self._index.slots.move(self._slots[i], SlotState.SEALED)
        self._held[i] = held

    def seal_all(self, groups: Sequence[Sequence[int]]) -> None:
        """Mark that copies into the first pages are over, of these groups of each."""
        for i, held in enumerate(groups):
            self.seal(i, held)

    def publish(self) -> int:
        """Make sealed pages readable, unless whole ones of others are; returns how many are (KVP-TIER-VISIBLE)."""
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
