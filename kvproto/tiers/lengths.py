"""How many leading pages of a prompt can be used: what one rank finds, and what all ranks can agree on.

A set of lengths is a bitmap, an int with bit n set where n pages can be used. Length 0 is in every set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import and_

from kvproto.tiers.page_layout import PageComponent, PageLayout
from kvproto.wire.enums import LengthRule

__all__ = ["Found", "allowed", "found", "join", "lengths_of", "usable"]

Found = tuple[int, list[int]]
"""Leading pages with all PREFIX components, and a set for each WINDOW and STATE component by ascending group."""


def found(layout: PageLayout, has: Mapping[int, Sequence[bool]]) -> Found:
    """What a rank finds; `has` tells of each group which pages there are, as many for each."""
    prefix = min((_leading(has[p.group]) for p in layout.parts if p.rule is LengthRule.PREFIX), default=None)
    prefix = min(map(len, has.values())) if prefix is None else prefix
    rest = (p for p in layout.parts if p.rule is not LengthRule.PREFIX)
    return prefix, [lengths_of(p, layout.page, has[p.group][:prefix]) for p in rest]


def join(ranks: Iterable[Found]) -> Found:
    """MIN of the prefixes and AND of the sets; ranks may be joined in any order, and any number at a time."""
    prefixes, sets = zip(*ranks, strict=True)
    return min(prefixes), [reduce(and_, same) for same in zip(*sets, strict=True)]


def usable(found: Found) -> int:
    """The greatest length that is at most the prefix and in all sets (KVP-TIER-LENGTH)."""
    return allowed(found).bit_length() - 1


def allowed(found: Found) -> int:
    """The set of lengths that are at most the prefix and in all sets."""
    prefix, sets = found
    bits = (2 << prefix) - 1
    for each in sets:
        bits &= each
    return bits | 1


def lengths_of(part: PageComponent, page: int, has: Sequence[bool | int]) -> int:
    """The set of lengths for which the pages that a WINDOW or STATE component needs are there."""
    bits, run = 1, 0
    for n in range(1, len(has) + 1):
        run = run + 1 if has[n - 1] else 0
        first = n - 1 if part.reach is None else max(n * page - part.reach, 0) // page
        bits |= (run >= n - first) << n
    return bits


def _leading(has: Sequence[bool]) -> int:
    return next((i for i, one in enumerate(has) if not one), len(has))
