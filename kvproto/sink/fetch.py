"""Fetches whose pages are named late, when they are of use: how many are needed, and the grants that name them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from kvproto.copying.deferred_grants import granted_below
from kvproto.copying.grants import items_by_now
from kvproto.copying.program import RankLayout
from kvproto.copying.window_start import items_before
from kvproto.errors import LocalError
from kvproto.planning.kinds import kind_of
from kvproto.rank.page_tables import PageTables, check_distinct, check_pages, table_of
from kvproto.session.events import Offered
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

__all__ = ["Claim", "Claimed"]

_NO_ITEMS = np.empty(0, np.uint32)


@attrs.define(eq=False)
class Claimed:
    """A link's record of a transfer whose items are named late."""

    spans: bool
    """Whether items are wanted piece by piece."""
    grants: Mapping[int, Grants] = {}
    """Everything granted so far, by group id."""
    whole: bool = False
    """Whether `grants` is everything that the transfer asks for."""
    reported: tuple[int | None, ...] = ()
    """The `tokens` of the last PagesNeeded, if there was one."""
    offers: list[Offered] = attrs.Factory(list)
    """Offers that wait for items to be read into."""


@attrs.define(eq=False)
class Claim:
    """What one fetch asks for and how much of it is granted."""

    layout: RankLayout
    asked: Mapping[int, Grants]
    """Windows without items, by group id."""
    end: int
    """The end of the fetch in tokens; with it, everything is granted."""
    granted: Mapping[int, Grants] = {}
    """What is granted so far, by group id."""

    @property
    def whole(self) -> bool:
        """Whether everything is granted."""
        return bool(self.granted) and all(self.granted[g].count == a.count for g, a in self.asked.items())

    def lengths(self, tokens: int) -> dict[str, int]:
        """How many entries page tables need for tokens below `tokens`, by group name."""
        found = {}
        for grant in granted_below(self.layout, tuple(self.asked.values()), tokens, self.end):
            group = self.layout.group(grant.group)
            if kind_of(group).has_memory:
                skip, need = self._span(grant)
                found[group.name] = skip + need if need else 0
        return found

    def _span(self, grant: Grants) -> tuple[int, int]:
        """The number of pages in a table before the first of a grant, and the number that the grant needs."""
        group, cp_rank = self.layout.group(grant.group), self.layout.owns(grant.group).cp_rank
        need = items_by_now(group, cp_rank, grant, self.asked[grant.group])
        return items_before(group, cp_rank, grant.first), need

    def named(self, pages: PageTables, tokens: int) -> dict[int, Grants]:
        """The grants by these page tables, for tokens below `tokens` and everything that was granted before.

        Raises LocalError: BAD_GRANT for a group that is missing, unknown or short of pages, or whose pages differ from
        those granted before, OUT_OF_REGION for a page that the pool does not have, ITEM_ALIAS for a page named twice.
        """
        groups, found = check_pages(self.layout, pages), {}
        for grant in granted_below(self.layout, tuple(self.asked.values()), tokens, self.end):
            group, before = self.layout.group(grant.group), self.granted.get(grant.group)
            if before is not None and before.count >= grant.count:
                grant = attrs.evolve(grant, count=before.count)
            skip, need = self._span(grant)
            if group.name not in groups or not need:
                found[group.id] = attrs.evolve(grant, items=_NO_ITEMS)
                continue
            table = table_of(self.layout, pages, group.name, skip, skip + need, f"{grant.first + grant.count} tokens")
            items = table[skip : skip + need]
            check_distinct(group, items, skip)
            known = before.items if before is not None and before.items is not None else _NO_ITEMS
            if differ := np.flatnonzero(items[: known.size] != known).tolist():
                i = differ[0]
                path, advice = f'pages["{group.name}"][{skip + i}]', "granted pages stay: only add pages after them"
                raise LocalError(ErrorCode.BAD_GRANT, path, f"page {known[i]}, as granted", f"page {items[i]}", advice)
            found[group.id] = attrs.evolve(grant, items=items.astype(np.uint32))
        return found

    def more(self, grants: Mapping[int, Grants]) -> dict[int, Grants]:
        """These grants with only the items that were not granted before."""
        return {
            id: attrs.evolve(some, items=items[self._count(id) :])
            for id, some in grants.items()
            if (items := some.items) is not None
        }

    def _count(self, group: int) -> int:
        """The number of items of a group granted so far."""
        before = self.granted.get(group)
        return 0 if before is None or before.items is None else before.items.size
