"""Checked page tables: from an engine's tables by group name to the items of a request by group id."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.columns import scaling
from kvproto.copying.grants import begins_inside_item, distinct, items_before, items_needed, rows_of
from kvproto.copying.program import RankLayout
from kvproto.errors import LocalError, check_type, check_whole, type_name, wrong_type
from kvproto.planning.geometry import Group
from kvproto.planning.kinds import KINDS, NO_AXES, TOKENS, axis_of, length_of, lengths_of
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

_ANY = 1 << 62
IntArray = npt.NDArray[np.int64]
PageTables = Mapping[str, Sequence[int] | npt.NDArray[Any] | int]
"""A request's page table from token 0 on, or its slot, by group name."""
Since = int | Mapping[str, int]
"""The first token whose rows are still held: for all groups of tokens in pages or rings, or by group name."""


class PagesInUse:
    """Pages of one pool that a fetch may still write: a fetch under way, or one lost without proof of its end."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout, self._lock = layout, threading.Lock()
        self._taken = {id: set[int]() for id in layout.columns}

    def take(self, grants: Mapping[int, Grants], pages: PageTables) -> None:
        """Mark the pages of a fetch as in use; raises LocalError(ITEM_ALIAS), and marks none, if one is already."""
        items_of = _with_items(grants)
        with self._lock:
            for id, items in items_of:
                if not self._taken[id].isdisjoint(items):
                    self._refuse(id, next(page for page in items if page in self._taken[id]), pages)
            for id, items in items_of:
                self._taken[id].update(items)

    def free(self, grants: Mapping[int, Grants]) -> None:
        """Mark the pages of a fetch as free, as nothing writes them any more."""
        with self._lock:
            for id, items in _with_items(grants):
                self._taken[id].difference_update(items)

    def _refuse(self, id: int, page: int, pages: PageTables) -> None:
        name = self._layout.groups[id].name
        entry = np.flatnonzero(np.atleast_1d(np.asarray(pages[name])) == page)[0]
        raise LocalError(
            ErrorCode.ITEM_ALIAS,
            f'pages["{name}"][{entry}]',
            "pages that no other fetch writes",
            f"page {page} is being written by another fetch",
            "reuse its pages once it is done and, if it was lost, pages_free",
        )


def _with_items(grants: Mapping[int, Grants]) -> list[tuple[int, list[int]]]:
    return [(id, grant.items.tolist()) for id, grant in grants.items() if grant.items is not None and len(grant.items)]


def check_names(pages: PageTables, groups: Mapping[str, Group]) -> None:
    """Raise LocalError for page tables of other names than these groups have."""
    if not isinstance(pages, Mapping):
        raise wrong_type("pages", pages, "a mapping of group name to page ids", 'such as {"kv": [3, 1, 2]}')
    if not pages.keys() <= groups.keys():
        unknown = next(name for name in pages if name not in groups)
        raise _bad("pages", f"groups of {sorted(groups)}", repr(unknown))


def table_of(layout: RankLayout, pages: PageTables, group: Group, skip: int, need: int, purpose: str) -> IntArray:
    """The table of a group, checked to have `need` pages from `skip` on; raises as `RequestTables.check`."""
    if group.name not in pages:
        owned = sorted(group.name for group in layout.geometry.groups if group.id in layout.columns)
        raise _bad("pages", f"the groups {owned}", f"none of {group.name!r}")
    path, most = f'pages["{group.name}"]', layout.columns[group.id].items
    table = _table(pages[group.name], path)
    held = table[skip:] if skip else table
    if held.size and not 0 <= int(held.min()) <= int(held.max()) < most:
        outside = skip + np.flatnonzero((held < 0) | (held >= most))
        advice = "name pages of the pool; exclude pages that are gone with `since`, or `cached` at a sink"
        raise LocalError(
            ErrorCode.OUT_OF_REGION, f"{path}[{outside[0]}]", f"0 to {most - 1}", str(table[outside[0]]), advice
        )
    if table.size < need:
        advice = f"name the pages from position 0 of {axis_of(group)} on"
        raise _bad(path, f"{need} pages for {purpose}", f"{table.size}", advice)
    return table


@attrs.frozen(eq=False)
class _OwnedGroup:
    """A group of this rank that has pages, and the facts by which its page tables are checked."""

    group: Group
    cp_rank: int
    axis: str
    paged: bool
    wraps: bool
    plain: bool
    """Whether pages hold `rows` tokens each, all of them of this rank."""

    def needed(self, end: int) -> int:
        """The number of pages for positions [0, end)."""
        return -(-end // self.group.rows) if self.plain else items_needed(self.group, self.cp_rank, 0, end)

    def before(self, first: int) -> int:
        """The number of pages before the one that holds position `first`."""
        return items_before(self.group, self.cp_rank, first) if first else 0


class PageRules:
    """Rules for the page tables of every request of one pool."""

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        groups = [group for group in layout.geometry.groups if KINDS[group.kind].has_memory]
        self.names = {group.name: group for group in groups}
        self.owned = [_owned(layout, group) for group in groups if group.id in layout.columns]
        self.movable = {group.name: group for group in groups if KINDS[group.kind].paged or KINDS[group.kind].wraps}
        """Groups whose first rows a request may give up."""
        self.rings = [group for group in self.movable.values() if KINDS[group.kind].wraps]
        self.scaling = scaling([group for group in layout.geometry.groups if group.id in layout.columns], layout.shares)
        """Groups whose rows are scales of several tokens, each with the group that they scale."""
        self.handoffs = {group.name: group for group in layout.geometry.groups if not KINDS[group.kind].has_memory}
        shares = {share.group for rank in layout.geometry.ranks if rank.rank == layout.rank for share in rank.owns}
        self.owned_handoffs = {name: group for name, group in self.handoffs.items() if group.id in shares}


def _owned(layout: RankLayout, group: Group) -> _OwnedGroup:
    kind, cp_rank = KINDS[group.kind], layout.shares[group.id].cp_rank
    plain = kind.paged and group.cp_size == 1 and group.tokens_per_row == 1
    return _OwnedGroup(group, cp_rank, axis_of(group), kind.paged, kind.wraps, plain)


@attrs.frozen
class StatedTables:
    """The page tables of one call of an engine, checked by themselves."""

    items: dict[int, IntArray]
    """Page tables by group id, from the page of token 0 on."""
    since: dict[int, int]
    """The first token whose rows are still held, by group id, unless it is token 0."""
    spans: dict[int, tuple[int, int]]
    """The pages [first, end) of a table that are held and needed, by group id."""


class RequestTables:
    """The page tables of one request, as its engine has stated them so far."""

    def __init__(self, rules: PageRules) -> None:
        self._rules = rules
        self._tables: dict[int, IntArray] = {}
        self._since: dict[int, int] = {}

    def check(self, pages: PageTables, tokens: int, axes: Mapping[str, int], since: Since | None) -> StatedTables:
        """Check the page tables of one call, up to `tokens` tokens, or the positions in `axes`.

        Tables of groups that only other ranks own are ignored, so that all ranks can make the same call. Entries of
        pages before `since` may be anything: engines put a null page there, or -1. Raises LocalError: OUT_OF_RANGE for
        a token beyond `tokens`, BAD_GRANT for a group that is missing, unknown or short of pages, for a token below an
        earlier one, or rows without their scales, OUT_OF_REGION for a page that the pool does not have.
        """
        rules = self._rules
        begins = self._held(since, tokens, axes)
        check_names(pages, rules.names)
        items, spans = {}, {}
        for owned in rules.owned:
            id = owned.group.id
            end = tokens if owned.axis == TOKENS else axes.get(owned.axis, 0)
            skip, need = owned.before(begins.get(id, 0)), owned.needed(end)
            items[id] = table_of(rules.layout, pages, owned.group, skip, need, f"{end} {owned.axis}")
            spans[id] = skip, need
        return StatedTables(items, begins, spans)

    def record(self, stated: StatedTables) -> None:
        """Add the tables of one call; raises BAD_GRANT if earlier ones differ, ITEM_ALIAS for a page named twice."""
        tables = dict(self._tables)
        for id, table in stated.items.items():
            (skip, need), before = stated.spans[id], tables.get(id)
            named, group = table[:need], self._rules.layout.groups[id]
            if before is not None:
                common = slice(skip, min(before.size, named.size))
                differ = np.flatnonzero(before[common] != named[common])
                if differ.size:
                    entry = skip + int(differ[0])
                    advice = "the rows of an earlier call of computed are in the page it named; name the same one"
                    path, mine = f'pages["{group.name}"][{entry}]', f"page {before[entry]}, as before"
                    raise LocalError(ErrorCode.BAD_GRANT, path, mine, f"page {named[entry]}", advice)
            if before is None or named.size > before.size:
                check_distinct(group, named[skip:], skip)
                tables[id] = named
        self._tables, self._since = tables, stated.since

    def _held(self, since: Since | None, tokens: int, axes: Mapping[str, int]) -> dict[int, int]:
        """First tokens held, by group id, unless 0: as before if not stated; of a ring, those of its last rows."""
        rules, begins = self._rules, dict(self._since)
        if since is None:
            since = {}
        elif not isinstance(since, Mapping):
            first = check_whole("since", since, 0, tokens, f"0 to {tokens}, the tokens computed")
            since = {name: first for name, group in rules.movable.items() if axis_of(group) == TOKENS}
        for name, first in since.items():
            path = f'since["{name}"]'
            if name not in rules.movable:
                wanted = f"groups in pages or rings, {sorted(rules.movable)}, by name and not by axis"
                raise _bad(path, wanted, repr(name))
            group = rules.movable[name]
            end = length_of(group, tokens, axes)
            first = check_whole(path, first, 0, end, f"0 to {end}, the {axis_of(group)} computed")
            if first < begins.get(group.id, 0) and KINDS[group.kind].paged:
                mine = f"{begins[group.id]} or more, as before"
                raise _bad(path, mine, str(first), "pages that are gone do not come back: `since` only rises")
            if group.partial:  # its row covers later tokens too
                first -= first % group.tokens_per_row
            if first:
                begins[group.id] = first
        for scales, values in rules.scaling:
            if begins.get(scales.id, 0) > (most := begins.get(values.id, 0)):
                wanted, advice = f"at most {most}, as of {values.name!r}", "keep the scales of all rows that are held"
                raise _bad(f'since["{scales.name}"]', wanted, str(begins[scales.id]), advice)
        for group in rules.rings:
            first = _ring_begins(group, tokens)
            if first > begins.get(group.id, 0):
                begins[group.id] = first
        return begins


def _ring_begins(group: Group, tokens: int) -> int:
    """The first token whose row a ring still holds after `tokens` tokens; 0 for pages."""
    return (rows_of(group, 0, tokens)[1] - group.rows) * group.tokens_per_row if KINDS[group.kind].wraps else 0


def grants_of(
    rules: PageRules,
    pages: PageTables | None,
    cached: int | Mapping[str, int],
    tokens: int,
    axes: Mapping[str, int] = NO_AXES,
    late: bool | Collection[str] = False,
) -> dict[int, Grants]:
    """The grants of a sink rank by group id: tokens [cached, tokens) of each group, and the pages that hold them.

    Groups on other axes get all positions that `axes` states. Without `pages` the items are left out.

    Tables begin with the page of token 0 and may be longer than needed. `cached`: the token with which the fetch
    begins, for all groups of tokens or by name; `late`: whether it may begin later, for all groups or by name.
    Raises LocalError as `RequestTables.check` does, ITEM_ALIAS for a page that is named twice, and BAD_GRANT for a
    `cached` beyond the prompt, for one that parts values from the scales of their pages, or a `late` that names no
    group.
    """
    layout, tables = rules.layout, dict[int, IntArray]()
    ends = lengths_of(layout.geometry.groups, tokens, axes)
    held, may_begin_late = _held(layout, cached, ends), _late(rules, late)
    if pages is not None:
        check_names(pages, rules.names)
        for owned in rules.owned:
            end = ends[owned.group.id]
            skip, need = owned.before(held.get(owned.group.id, 0)), owned.needed(end)
            tables[owned.group.id] = table_of(layout, pages, owned.group, skip, need, f"{end} {owned.axis}")
    grants = {}
    for group in layout.geometry.groups:
        if not KINDS[group.kind].has_memory:
            grants[group.id] = Grants(group=group.id, first=0, count=0, valid=0, items=np.empty(0, np.uint32))
        elif group.id in layout.columns:
            cp_rank = layout.shares[group.id].cp_rank
            grant = _grant(group, cp_rank, tables.get(group.id), held[group.id], ends[group.id])
            grants[group.id] = attrs.evolve(grant, late=True) if group.id in may_begin_late else grant
    for scales, values in rules.scaling:
        names = scales.name, values.name
        if held[scales.id] != held[values.id]:
            wanted = f"the same token as for {names[1]!r}, whose rows it scales"
            first = min(held[scales.id], held[values.id]) // scales.tokens_per_row * scales.tokens_per_row
            yours, advice = f"{held[scales.id]}, and {held[values.id]}", f"fetch both from token {first} on"
            raise _bad(f'cached["{names[0]}"]', wanted, yours, advice)
        if (scales.id in may_begin_late) != (values.id in may_begin_late):
            advice = "values and their scales begin late together"
            raise _bad("late", f"both of {names[0]!r} and {names[1]!r}, or neither", "one of them", advice)
    return grants


def _late(rules: PageRules, late: bool | Collection[str]) -> set[int]:
    """The ids of groups whose windows may begin late."""
    groups = rules.movable
    if isinstance(late, bool):
        return {group.id for group in groups.values()} if late else set()
    check_type("late", late, (list, tuple, set, frozenset), "True, False, or names of groups")
    if unknown := [name for name in late if name not in groups]:
        raise _bad("late", f"groups in pages or rings, {sorted(groups)}, by name and not by axis", repr(unknown[0]))
    return {groups[name].id for name in late}


def _held(layout: RankLayout, cached: int | Mapping[str, int], ends: Mapping[int, int]) -> dict[int, int]:
    """The first token of a fetch, by group id; `ends` are the positions on each group's axis."""
    held, names = {}, [group.name for group in layout.geometry.groups]
    if not isinstance(cached, Mapping):
        cached = check_whole("cached", cached, -_ANY, _ANY, "a whole number of tokens")
    elif unknown := [name for name in cached if name not in names]:
        raise _bad("cached", f"groups of {names}", repr(unknown[0]))
    for group in layout.geometry.groups:
        if group.id in layout.columns:
            end = ends[group.id]
            if isinstance(cached, int):
                first = cached if group.axis in (None, TOKENS) else 0
            else:
                path = f'cached["{group.name}"]'
                first = check_whole(path, cached.get(group.name, 0), -_ANY, _ANY, "a whole number of tokens")
            if not 0 <= first <= end:
                raise LocalError(
                    ErrorCode.BAD_GRANT,
                    f'cached["{group.name}"]',
                    f"0 to {end}, the {axis_of(group)} of this fetch",
                    str(first),
                    f"pass the number of {axis_of(group)} that the pages already hold",
                )
            held[group.id] = first
    return held


def _grant(group: Group, cp_rank: int, table: IntArray | None, first: int, tokens: int) -> Grants:
    if group.cp_size > 1:
        first = min(max(first, group.origin), tokens)
    first = max(first, _ring_begins(group, tokens))
    rows = KINDS[group.kind].paged or KINDS[group.kind].wraps
    if rows and first < tokens and first % group.tokens_per_row:  # (KVP-GRANT-ROW)
        wanted = f"a multiple of {group.tokens_per_row}, where a row begins, or {tokens}"
        raise _bad(f'cached["{group.name}"]', wanted, str(first), "a row that covers several tokens is fetched whole")
    if begins_inside_item(group, cp_rank, first, tokens - first):
        wanted = f"where an item of {group.rows} rows begins, or {tokens}"
        raise _bad(
            f'cached["{group.name}"]', wanted, str(first), "an item whose bytes have an encoding is fetched whole"
        )
    items = None
    if table is not None:
        skip = items_before(group, cp_rank, first) if first else 0
        named = table[skip : skip + items_needed(group, cp_rank, first, tokens - first)]
        check_distinct(group, named, skip)
        items = named.astype(np.uint32)
    return Grants(
        group=group.id,
        first=first,
        count=tokens - first,
        valid=tokens,
        items=items,
        state_after=tokens if KINDS[group.kind].is_state else None,
    )


def check_distinct(group: Group, items: IntArray, skip: int) -> None:
    """Raise LocalError(ITEM_ALIAS) for a page named twice; `items` begins at entry `skip` of the table."""
    if not distinct(items):
        order = np.argsort(items, kind="stable")
        again = order[1:][items[order][1:] == items[order][:-1]].min()
        raise LocalError(
            ErrorCode.ITEM_ALIAS,
            f'pages["{group.name}"]',
            "each page once",
            f"page {items[again]} twice, at [{skip + np.flatnonzero(items == items[again])[0]}] and [{skip + again}]",
            "no two entries share a page; exclude pages that are gone with `since`, or `cached` at a sink",
        )


def _table(pages: Any, path: str) -> IntArray:
    try:
        table = np.atleast_1d(np.asarray(pages))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _bad(path, "page ids, integers in one dimension in host memory", type_name(pages)) from error
    if not table.size:
        return np.empty(0, np.int64)
    if table.ndim != 1 or table.dtype.kind not in "iu":
        raise _bad(path, "page ids, integers in one dimension", f"{table.dtype} of shape {table.shape}")
    return table.astype(np.int64)


def _bad(path: str, mine: str, yours: str, advice: str = "") -> LocalError:
    return LocalError(ErrorCode.BAD_GRANT, path, mine, yours, advice)
