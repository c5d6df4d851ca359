"""The one index space: slots, their states, generations and pins, and the order in which they are given up.

Component c of slot s lies at place s of the memory of c, so no component has an allocator of its own. Nothing here
knows what a page is. One thread at a time, and no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import IntEnum

from kvproto.errors import U32, LocalError, check_whole
from kvproto.wire.enums import ErrorCode

__all__ = ["MOVES", "SlotState", "Slots"]


class SlotState(IntEnum):
    """What a slot is (tiers.md, States)."""

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
"""What each state may become; nothing else is done to a slot."""

_RETIRING = int(SlotState.RETIRING)
_MAY = [sum(1 << after for after in MOVES[before]) for before in SlotState]
"""The same as bits, for a million slots."""


class Slots:
    """States of `count` slots. The readable ones that nobody has pinned stand in a row, the oldest first to go."""

    def __init__(self, count: int) -> None:
        self.count = check_whole("count", count, 1, U32 >> 1)
        self._state = bytearray(count)
        self._generation = array("I", bytes(4 * count))
        self._pins = array("I", bytes(4 * count))
        self._free = array("i", range(count - 1, -1, -1))
        self._older = array("i", [-1]) * (count + 1)
        self._newer = array("i", [-1]) * (count + 1)
        self._row = 0
        self._older[count] = self._newer[count] = count  # the row is a ring through this place, which is no slot

    @property
    def free(self) -> int:
        """How many slots are FREE."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """How many slots are READABLE, and nobody has pinned them."""
        return self._row

    def counts(self) -> dict[SlotState, int]:
        """How many slots are in each state."""
        return {state: self._state.count(state) for state in SlotState}

    def state(self, slot: int) -> SlotState:
        """Of one slot."""
        return SlotState(self._state[slot])

    def generation(self, slot: int) -> int:
        """How often a slot has become FREE, modulo 2^32 (KVP-TIER-GENERATION)."""
        return self._generation[slot]

    def pins(self, slot: int) -> int:
        """How many readers have pinned it."""
        return self._pins[slot]

    def reserve(self) -> int:
        """A FREE slot, RESERVED from now on; there has to be one."""
        slot = self._free.pop()
        self._state[slot] = SlotState.RESERVED
        return slot

    def move(self, slot: int, state: SlotState) -> None:
        """Change a state; raises LocalError for what is not in the table, or a slot that is pinned (KVP-TIER-PIN)."""
        before = self._state[slot]
        if not _MAY[before] >> state & 1 or (state is SlotState.FREE and self._pins[slot]):
            allowed = " or ".join(after.name for after in MOVES[SlotState(before)])
            wants = f"{SlotState(before).name} to {allowed}, FREE without pins"
            raise LocalError(ErrorCode.OUT_OF_RANGE, f"slots[{slot}]", wants, f"{state.name}, {self._pins[slot]} pins")
        self._state[slot] = state
        if before == SlotState.READABLE and not self._pins[slot]:
            self._leave(slot)
        if state is SlotState.FREE:
            self._generation[slot] = (self._generation[slot] + 1) & U32
            self._free.append(slot)
        elif state is SlotState.READABLE:
            self._join(slot)

    def pin(self, slots: Iterable[int]) -> None:
        """One reader more of each of these READABLE slots."""
        pins = self._pins
        for slot in slots:
            if not pins[slot]:
                self._leave(slot)
            pins[slot] += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """One reader less of each; after the last a RETIRING slot is FREE, and a READABLE one the newest of the row."""
        pins, state = self._pins, self._state
        for slot in slots:
            pins[slot] -= 1
            if not pins[slot]:
                if state[slot] == _RETIRING:
                    self.move(slot, SlotState.FREE)
                else:
                    self._join(slot)

    def touch(self, slot: int) -> None:
        """Make a READABLE slot the newest of the row, unless it is pinned."""
        if not self._pins[slot]:
            self._leave(slot)
            self._join(slot)

    def oldest(self) -> int | None:
        """The READABLE slot without pins that was used least recently."""
        slot = self._newer[self.count]
        return None if slot == self.count else slot

    def _join(self, slot: int) -> None:
        end, self._row = self.count, self._row + 1
        last = self._older[end]
        self._older[slot], self._newer[slot] = last, end
        self._newer[last] = self._older[end] = slot

    def _leave(self, slot: int) -> None:
        self._row -= 1
        older, newer = self._older[slot], self._newer[slot]
        self._newer[older], self._older[newer] = newer, older
