"""A slow index in plain lists, which knows pages by their tokens: what `kvproto.tiers.index` is held against."""

from collections import Counter
from typing import Any

from kvproto_conformance import tiers

Tokens = tuple[int, ...]
PARTS = [
    {"group": "0", "form": "OWN", "rule": "PREFIX"},
    {"group": "1", "form": "OWN", "rule": "PREFIX"},
    {"group": "2", "form": "OWN", "rule": "STATE"},
]


class Model:
    """Pages of one token each; a slot is told by whoever holds the real one."""

    def __init__(self, count: int) -> None:
        self.count, self.free = count, count
        self.tree: dict[Tokens, int] = {}
        self.state: set[int] = set()
        """Slots that have group 2."""
        self.pins: Counter[int] = Counter()
        self.retiring: set[int] = set()
        self.order: list[Tokens] = []
        """Pages that nobody has pinned, the oldest first."""

    def find(self, tokens: Tokens) -> list[int]:
        slots = []
        for n in range(1, len(tokens) + 1):
            if tokens[:n] not in self.tree:
                break
            slots.append(self.tree[tokens[:n]])
        has = {"0": [1] * len(slots), "1": [1] * len(slots), "2": [int(s in self.state) for s in slots]}
        slots = slots[: tiers.lengths(1, PARTS, [has])]
        for n, slot in enumerate(slots):
            self.pins[slot] += 1
            if tokens[: n + 1] in self.order:
                self.order.remove(tokens[: n + 1])
        return slots

    def unpin(self, slots: list[int]) -> None:
        for slot in reversed(slots):
            self.pins[slot] -= 1
            if not self.pins[slot]:
                if slot in self.retiring:
                    self.retiring.remove(slot)
                    self.free += 1
                else:
                    self.order += [page for page, its in self.tree.items() if its == slot]

    def claim(self, count: int) -> bool:
        if self.free + len(self.order) < count:
            return False
        self.evict(count)
        self.free -= count
        return True

    def evict(self, count: int) -> None:
        while self.free < count and self.order:
            self.retire(self.order[0])

    def retire(self, tokens: Tokens) -> None:
        for page in [page for page in self.tree if page[: len(tokens)] == tokens]:
            slot = self.tree.pop(page)
            self.state.discard(slot)
            if self.pins[slot]:
                self.retiring.add(slot)
            else:
                self.order.remove(page)
                self.free += 1

    def publish(self, tokens: Tokens, first: int, slots: list[int], sealed: list[Any]) -> int:
        done = 0
        for n, (slot, groups) in enumerate(zip(slots, sealed, strict=True), first + 1):
            if groups is None or (n > 1 and tokens[: n - 1] not in self.tree):
                break
            done += 1
            if tokens[:n] not in self.tree:
                self.tree[tokens[:n]] = slot
                self.state |= {slot} if 2 in groups else set()
                self.order.append(tokens[:n])
                self.free -= 1
            elif 2 in groups and (old := self.tree[tokens[:n]]) not in self.state:
                self.tree[tokens[:n]] = slot
                self.state.add(slot)
                if self.pins[old]:
                    self.retiring.add(old)
                else:
                    self.order.remove(tokens[:n])
                    self.free += 1
                self.order.append(tokens[:n])
                self.free -= 1
        self.free += len(slots)
        if done or (first and tokens[:first] in self.tree):
            for n in range(first + done, 0, -1):
                if tokens[:n] in self.order:
                    self.order.remove(tokens[:n])
                    self.order.append(tokens[:n])
        return done
