"""Pages that requests leave behind in decode for later prompts that begin alike, so that they are not fetched again.

A unit is the number of tokens that fill whole pages of the target and of the draft on all ranks. All ranks find the
same units, as these depend only on tokens and salts. Prompts with another adapter or other images share nothing, as
their tokens are equal and their rows are not, nor do tenants that are to share nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from ..cache import PageAllocator, Shard
from .sequence import TokenSequence

__all__ = ["PrefixCache", "tokens_a_unit"]

Key = tuple[object, tuple[int, ...]]
"""The unit before, or the salts of the prompt, and the tokens of this one, with those that its rows look ahead to."""


@attrs.define(eq=False)
class _Unit:
    before: _Unit | None
    pages: tuple[list[int], ...]
    """Pages of each model's pool."""
    users: int = 0
    """Sequences that read it, and units that follow it."""


class PrefixCache:
    """Gives sequences their pages, some of them with rows already, and keeps what they leave while there is room."""

    def __init__(
        self, pages: Sequence[PageAllocator], shards: Sequence[Shard], ahead: int = 0, hybrid: bool = False
    ) -> None:
        """Both are of each model: target and draft. If pages do not hold whole runs of a deal, no prefix is kept.

        A unit is found for as many further tokens as rows are `ahead`, as its last ones were computed with these. Of a
        `hybrid` target none is found that has the last token of a prompt, so that the page in which its state arrives
        is the sequence's own, and none for a sequence that is computed again, as its states and windows are gone. Pages
        of further pools are never kept.
        """
        self._pages, self._ahead, self._hybrid = pages, ahead, hybrid
        self.unit, self._each = tokens_a_unit(shards)
        """Tokens of a unit, 0 if nothing is kept; and its pages in each pool."""
        self._each += [0] * (len(pages) - len(shards))
        self._units: dict[Key, _Unit] = {}
        """Units, the least recently used first."""
        self._held: dict[TokenSequence, list[_Unit]] = {}

    def allocate(
        self, sequence: TokenSequence, need: Sequence[int], spare: Sequence[int] = (), most: int | None = None
    ) -> int | None:
        """Give a sequence `need` pages of each pool, or all that are kept of its beginning if these are more.

        Returns how many of its tokens they hold already, at most `most`; None, taking nothing, while too few pages are
        free, or would be if `spare` pages of each pool were taken too.
        """
        found = self._find(self._sought(sequence), sequence.salts)
        found = found if most is None or not self.unit else found[: most // self.unit]
        for unit in found:
            unit.users += 1
        fresh = [max(n - len(found) * each, 0) for n, each in zip(need, self._each, strict=True)]
        if not self._free_some([n + more for n, more in zip(fresh, spare or [0] * len(fresh), strict=True)]):
            for unit in found:
                unit.users -= 1
            return None
        tables = [[page for unit in found for page in unit.pages[model]] for model in range(len(self._pages))]
        sequence.tables = [held + pages.allocate(n) for held, pages, n in zip(tables, self._pages, fresh, strict=True)]
        self._held[sequence] = found
        return len(found) * self.unit

    def extend(self, sequence: TokenSequence, fresh: Sequence[int], spare: Sequence[int] = ()) -> bool:
        """Give a sequence `fresh` additional pages of each pool; False, giving none, while too few are free.

        `spare` are as in `allocate`.
        """
        if not self._free_some([n + more for n, more in zip(fresh, spare or [0] * len(fresh), strict=True)]):
            return False
        for table, pages, n in zip(sequence.tables, self._pages, fresh, strict=True):
            table.extend(pages.allocate(n))
        return True

    def _free_some(self, need: Sequence[int]) -> bool:
        """Whether `need` pages are free, after evicting units that are not in use as needed; none of them in vain."""
        if any(n > pages for n, pages in zip(need, self.available, strict=True)):
            return False
        while any(pages.available < n for pages, n in zip(self._pages, need, strict=True)):
            if not self._evict():
                return False
        return True

    def free(self, sequence: TokenSequence, valid: int) -> None:
        """Take a sequence's pages back, and keep those of its first `valid` tokens in whole units."""
        held, tokens = self._held.pop(sequence), (sequence.prompt + sequence.generated)[: valid + self._ahead]
        kept = max(valid // self.unit if self.unit else 0, len(held))
        before: _Unit | None = None
        for i in range(kept):
            pages = tuple(sequence.tables[m][i * each : (i + 1) * each] for m, each in enumerate(self._each))
            if i < len(held):
                held[i].users -= 1
                before = held[i]
                continue
            key = self._key(before or sequence.salts, tokens, i * self.unit)
            if key in self._units:  # another sequence has left the same unit
                self._free_pages(pages)
                before = self._units[key]
                continue
            before = self._units[key] = _Unit(before, pages)
            if before.before is not None:
                before.before.users += 1
        self._free_pages([sequence.tables[m][kept * each :] for m, each in enumerate(self._each)])

    def keep(self, sequence: TokenSequence, valid: int) -> None:
        """Let others find the first `valid` rows of a sequence, in whole units, while it goes on with its pages."""
        held, tokens = self._held[sequence], sequence.text(0, sequence.length)
        for i in range(len(held), valid // self.unit if self.unit else 0):
            key = self._key(held[-1] if held else sequence.salts, tokens, i * self.unit)
            if key in self._units:  # another sequence has left the same unit, in other pages
                return
            pages = tuple(sequence.tables[m][i * each : (i + 1) * each] for m, each in enumerate(self._each))
            if held:
                held[-1].users += 1
            held.append(_Unit(held[-1] if held else None, pages, users=1))
            self._units[key] = held[-1]

    def clear(self) -> None:
        """Forget all rows that no sequence uses."""
        while self._evict():
            pass

    @property
    def available(self) -> list[int]:
        """Pages of each pool that no sequence holds."""
        idle = len(self._units) - len({id(unit) for held in self._held.values() for unit in held})
        return [pages.available + idle * each for pages, each in zip(self._pages, self._each, strict=True)]

    def _sought(self, sequence: TokenSequence) -> list[int]:
        """The tokens whose units a sequence may use."""
        if not self._hybrid:
            return sequence.text(0, sequence.due)
        return [] if sequence.generated else sequence.prompt[:-1]

    def _find(self, tokens: Sequence[int], salts: tuple[bytes, ...]) -> list[_Unit]:
        found: list[_Unit] = []
        for lo in range(0, len(tokens) - self.unit - self._ahead + 1, self.unit) if self.unit else ():
            key = self._key(found[-1] if found else salts, tokens, lo)
            if key not in self._units:
                break
            found.append(self._units[key])
            self._units[key] = self._units.pop(key)
        return found

    def _key(self, before: _Unit | tuple[bytes, ...], tokens: Sequence[int], lo: int) -> Key:
        return before, tuple(tokens[lo : lo + self.unit + self._ahead])

    def _evict(self) -> bool:
        """Free the pages of the least recently used unit; False if all are in use."""
        key = next((key for key, unit in self._units.items() if not unit.users), None)
        if key is None:
            return False
        unit = self._units.pop(key)
        if unit.before is not None:
            unit.before.users -= 1
        self._free_pages(unit.pages)
        return True

    def _free_pages(self, tables: Sequence[list[int]]) -> None:
        for pages, table in zip(self._pages, tables, strict=True):
            pages.free(table)


def tokens_a_unit(shards: Sequence[Shard]) -> tuple[int, list[int]]:
    """Tokens that fill whole pages of all pools on all ranks, or 0 if no number does, and the pages of each pool."""
    spans = [_tokens_a_page(shard) for shard in shards]
    unit = math.lcm(*spans)
    return unit, [unit // span if span else 0 for span in spans]


def _tokens_a_page(shard: Shard) -> int:
    """Tokens over all ranks that fill a page of each; 0 if a run of the deal continues in the next page."""
    group = shard.group
    order = [*range(group.cp_size)] if group.order is None else group.order.tolist()
    share = len(order) // group.cp_size  # runs of each rank until the deal repeats
    equal = all(order.count(rank) == share for rank in range(group.cp_size))
    whole = group.cp_size == 1 or (equal and group.rows % (group.interleave * share) == 0 and group.origin == 0)
    return group.rows * group.cp_size if whole else 0
