"""From an engine's page tables, by group name, to the items of a request, checked and by group id."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.grants import distinct, items_needed, rows_of
from kvproto.copying.program import RankLayout
from kvproto.copying.scaling import Scaling, scaling
from kvproto.copying.window_start import items_before
from kvproto.errors import LocalError, check_type, check_whole, type_name
from kvproto.planning.axes import NO_AXES, TOKENS, axis_of, length_of
from kvproto.planning.geometry import Group
from kvproto.planning.kinds import kind_of
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

__all__ = [
    "IntArray", "PageTables", "Since", "check_distinct", "check_pages", "grants_of", "since_of", "table_of",
    "tables_of",
]  # fmt: skip

_ANY = 1 << 62
IntArray = npt.NDArray[np.int64]
PageTables = Mapping[str, Sequence[int] | npt.NDArray[Any] | int]
"""A request's page table from token 0 on, or its slot, by group name."""
Since = int | Mapping[str, int]
"""The first token whose rows are still held: for all groups of tokens in pages or rings, or by group name."""


class PagesInUse:
    """Pages of one pool that a fetch may still write: one under way, or one that was lost without proof of its end."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout, self._lock = layout, threading.Lock()
        self._taken = {id: set[int]() for id in layout.columns}

    def take(self, grants: Mapping[int, Grants], pages: PageTables) -> None:
        """Mark the pages of a fetch as in use; raises LocalError(ITEM_ALIAS), and marks none, if one is already."""
        wanted = _with_items(grants)
        with self._lock:
            for id, items in wanted:
                if not self._taken[id].isdisjoint(items):
                    self._refuse(id, next(page for page in items if page in self._taken[id]), pages)
            for id, items in wanted:
                self._taken[id].update(items)

    def free(self, grants: Mapping[int, Grants]) -> None:
        """Mark the pages of a fetch as free, as nothing writes them any more."""
        with self._lock:
            for id, items in _with_items(grants):
                self._taken[id].difference_update(items)

    def _refuse(self, id: int, page: int, pages: PageTables) -> None:
        name = self._layout.group(id).name
        at = np.flatnonzero(np.atleast_1d(np.asarray(pages[name])) == page)[0]
        raise LocalError(
            ErrorCode.ITEM_ALIAS, f'pages["{name}"][{at}]', "pages that no other fetch writes",
            f"page {page} is being written by another fetch",
            "reuse its pages once it is done and, if it was lost, pages_free",
        )  # fmt: skip


def _with_items(grants: Mapping[int, Grants]) -> list[tuple[int, list[int]]]:
    return [(id, grant.items.tolist()) for id, grant in grants.items() if grant.items is not None and len(grant.items)]


def tables_of(
    layout: RankLayout, pages: PageTables, tokens: int, axes: Mapping[str, int], since: Mapping[int, int]
) -> dict[int, IntArray]:  # fmt: skip
    """The page tables of this rank's groups by group id, checked to hold `tokens`, or the positions in `axes`.

    Entries of pages before `since`, by group id, may be anything: engines put a null page there, or -1. Tables of
    groups that only other ranks own are ignored, so that all ranks can make the same call. Raises LocalError: BAD_GRANT
    for a group that is missing, unknown or short of pages, OUT_OF_REGION for a page that the pool does not have.
    """
    groups = check_pages(layout, pages)
    found = {}
    for name, group in groups.items():
        if group.id not in layout.columns:
            continue
        cp_rank, end = layout.owns(group.id).cp_rank, length_of(group, tokens, axes)
        skip, need = items_before(group, cp_rank, since.get(group.id, 0)), items_needed(group, cp_rank, 0, end)
        found[group.id] = table_of(layout, pages, name, skip, need, f"{end} {axis_of(group)}")
    return found


def check_pages(layout: RankLayout, pages: PageTables) -> dict[str, Group]:
    """The groups that have pages, by name; raises LocalError for page tables of other names."""
    check_type("pages", pages, Mapping, "a mapping of group name to page ids", 'such as {"kv": [3, 1, 2]}')
    groups = {g.name: g for g in layout.geometry.groups if kind_of(g).has_memory}
    if unknown := [name for name in pages if name not in groups]:
        raise _bad("pages", f"groups of {sorted(groups)}", repr(unknown[0]))
    return groups


def table_of(layout: RankLayout, pages: PageTables, name: str, skip: int, need: int, what: str) -> IntArray:
    """The page table of a group of this rank, checked to have `need` pages for `what`, of which `skip` may be anything.

    Raises LocalError as `tables_of` does.
    """
    group = next(g for g in layout.geometry.groups if g.name == name)
    if name not in pages:
        owned = sorted(g.name for g in layout.geometry.groups if g.id in layout.columns)
        raise _bad("pages", f"the groups {owned}", f"none of {name!r}")
    path, most = f'pages["{name}"]', layout.columns[group.id].items
    table = _table(pages[name], path)
    if table[skip:].size and not 0 <= int(table[skip:].min()) <= int(table[skip:].max()) < most:
        wrong = skip + np.flatnonzero((table[skip:] < 0) | (table[skip:] >= most))
        raise LocalError(
            ErrorCode.OUT_OF_REGION, f"{path}[{wrong[0]}]", f"0 to {most - 1}", str(table[wrong[0]]),
            "name pages of the pool; exclude pages that are gone with `since`, or `cached` at a sink",
        )  # fmt: skip
    if table.size < need:
        advice = f"name the pages from position 0 of {axis_of(group)} on"
        raise _bad(path, f"{need} pages for {what}", f"{table.size}", advice)
    return table


def since_of(
    layout: RankLayout, given: Since | None, before: Mapping[int, int], tokens: int, axes: Mapping[str, int]
) -> dict[int, int]:  # fmt: skip
    """The first token whose rows are still held, by group id, unless it is token 0; groups not `given` are as `before`.

    A ring holds the last of its rows below `tokens`, whatever is given. Raises LocalError: OUT_OF_RANGE for a token
    beyond `tokens`, BAD_GRANT for a group that is neither in pages nor in a ring, a token below an earlier one, or rows
    without their scales.
    """
    groups = {g.name: g for g in layout.geometry.groups if kind_of(g).paged or kind_of(g).wraps}
    if given is None:
        given = {}
    elif not isinstance(given, Mapping):
        first = check_whole("since", given, 0, tokens, f"0 to {tokens}, the tokens computed")
        given = {name: first for name, group in groups.items() if axis_of(group) == TOKENS}
    found = dict(before)
    for name, first in given.items():
        path = f'since["{name}"]'
        if name not in groups:
            raise _bad(path, f"groups in pages or rings, {sorted(groups)}, by name and not by axis", repr(name))
        end = length_of(groups[name], tokens, axes)
        first = check_whole(path, first, 0, end, f"0 to {end}, the {axis_of(groups[name])} computed")
        if first < found.get(groups[name].id, 0) and kind_of(groups[name]).paged:
            mine = f"{found[groups[name].id]} or more, as before"
            raise _bad(path, mine, str(first), "pages that are gone do not come back: `since` only rises")
        if groups[name].partial:  # its row covers later tokens too
            first -= first % groups[name].tokens_per_row
        if first:
            found[groups[name].id] = first
    for scales, values in _scaling(layout, set(layout.columns)):
        if found.get(scales.id, 0) > (most := found.get(values.id, 0)):
            wanted, advice = f"at most {most}, as of {values.name!r}", "keep the scales of all rows that are held"
            raise _bad(f'since["{scales.name}"]', wanted, str(found[scales.id]), advice)
    for group in groups.values():
        first = _ring_begins(group, tokens)
        if first > found.get(group.id, 0):
            found[group.id] = first
    return found


def _ring_begins(group: Group, tokens: int) -> int:
    """The first token whose row a ring still holds after `tokens` tokens; 0 for pages."""
    return (rows_of(group, 0, tokens)[1] - group.rows) * group.tokens_per_row if kind_of(group).wraps else 0


def grants_of(
    layout: RankLayout, pages: PageTables | None, cached: int | Mapping[str, int], tokens: int,
    axes: Mapping[str, int] = NO_AXES, late: bool | Collection[str] = False,
) -> dict[int, Grants]:  # fmt: skip
    """What a sink rank asks for, by group id: tokens [cached, tokens) of each group, and the pages that hold them; of
    groups on other axes their positions, as far as `axes` says. Without `pages` the items are left out.

    Tables begin with the page of token 0 and may be longer than needed. `cached`: the token with which the fetch
    begins, for all groups of tokens or by name; `late`: whether it may begin later, for all groups or those named.
    Raises what `tables_of` raises, ITEM_ALIAS for a page that is named twice, and BAD_GRANT for a `cached` beyond the
    prompt, for one that parts values from the scales of their pages, or a `late` of no group.
    """
    held, may = _held(layout, cached, tokens, axes), _late(layout, late)
    tables = tables_of(layout, pages, tokens, axes, held) if pages is not None else {}
    found = {}
    for group in layout.geometry.groups:
        if not kind_of(group).has_memory:
            found[group.id] = Grants(group=group.id, first=0, count=0, valid=0, items=np.empty(0, np.uint32))
        elif group.id in layout.columns:
            end = length_of(group, tokens, axes)
            made = _grant(group, layout.owns(group.id).cp_rank, tables.get(group.id), held[group.id], end)
            found[group.id] = attrs.evolve(made, late=True) if group.id in may else made
    for scales, values in _scaling(layout, set(layout.columns)):
        names = scales.name, values.name
        if held[scales.id] != held[values.id]:
            wanted = f"the same token as for {names[1]!r}, whose rows it scales"
            first = min(held[scales.id], held[values.id]) // scales.tokens_per_row * scales.tokens_per_row
            yours, advice = f"{held[scales.id]}, and {held[values.id]}", f"fetch both from token {first} on"
            raise _bad(f'cached["{names[0]}"]', wanted, yours, advice)
        if (scales.id in may) != (values.id in may):
            advice = "values and their scales begin late together"
            raise _bad("late", f"both of {names[0]!r} and {names[1]!r}, or neither", "one of them", advice)
    return found


def _scaling(layout: RankLayout, among: Collection[int]) -> Scaling:
    """Groups whose rows are scales of several tokens, each with the group that they scale."""
    return scaling((g for g in layout.geometry.groups if g.id in among), layout.owns)


def _late(layout: RankLayout, given: bool | Collection[str]) -> set[int]:
    """The ids of groups whose windows may begin late."""
    groups = {g.name: g.id for g in layout.geometry.groups if kind_of(g).paged or kind_of(g).wraps}
    if isinstance(given, bool):
        return set(groups.values()) if given else set()
    check_type("late", given, (list, tuple, set, frozenset), "True, False, or names of groups")
    if unknown := [name for name in given if name not in groups]:
        raise _bad("late", f"groups in pages or rings, {sorted(groups)}, by name and not by axis", repr(unknown[0]))
    return {groups[name] for name in given}


def _held(
    layout: RankLayout, cached: int | Mapping[str, int], tokens: int, axes: Mapping[str, int]
) -> dict[int, int]:  # fmt: skip
    """The first token of a fetch, by group id."""
    found, names = {}, [group.name for group in layout.geometry.groups]
    if not isinstance(cached, Mapping):
        cached = check_whole("cached", cached, -_ANY, _ANY, "a whole number of tokens")
    elif unknown := [name for name in cached if name not in names]:
        raise _bad("cached", f"groups of {names}", repr(unknown[0]))
    for group in layout.geometry.groups:
        if group.id in layout.columns:
            end = length_of(group, tokens, axes)
            held = (cached if axis_of(group) == TOKENS else 0) if isinstance(cached, int) else cached.get(group.name, 0)
            held = check_whole(f'cached["{group.name}"]', held, -_ANY, _ANY, "a whole number of tokens")
            if not 0 <= held <= end:
                raise LocalError(
                    ErrorCode.BAD_GRANT, f'cached["{group.name}"]', f"0 to {end}, the {axis_of(group)} of this fetch",
                    str(held), f"pass the number of {axis_of(group)} that the pages already hold",
                )  # fmt: skip
            found[group.id] = held
    return found


def _grant(group: Group, cp_rank: int, table: IntArray | None, first: int, tokens: int) -> Grants:
    if group.cp_size > 1:
        first = min(max(first, group.origin), tokens)
    first = max(first, _ring_begins(group, tokens))
    if group.partial and first < tokens and first % group.tokens_per_row:  # (KVP-GRANT-PARTIAL)
        wanted = f"a multiple of {group.tokens_per_row}, where a row begins, or {tokens}"
        raise _bad(f'cached["{group.name}"]', wanted, str(first), "a row that covers several tokens is fetched whole")
    items = None
    if table is not None:
        skip = items_before(group, cp_rank, first)
        named = table[skip : skip + items_needed(group, cp_rank, first, tokens - first)]
        check_distinct(group, named, skip)
        items = named.astype(np.uint32)
    return Grants(
        group=group.id, first=first, count=tokens - first, valid=tokens, items=items,
        state_after=tokens if kind_of(group).is_state else None,
    )  # fmt: skip


def check_distinct(group: Group, items: IntArray, skip: int) -> None:
    """Raise LocalError(ITEM_ALIAS) for a page named twice; `items` begins at entry `skip` of the table."""
    if not distinct(items):
        order = np.argsort(items, kind="stable")
        again = order[1:][items[order][1:] == items[order][:-1]].min()
        raise LocalError(
            ErrorCode.ITEM_ALIAS, f'pages["{group.name}"]', "each page once",
            f"page {items[again]} twice, at [{skip + np.flatnonzero(items == items[again])[0]}] and [{skip + again}]",
            "no two entries share a page; exclude pages that are gone with `since`, or `cached` at a sink",
        )  # fmt: skip


def _table(pages: Any, path: str) -> IntArray:
    try:
        given = np.atleast_1d(np.asarray(pages))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _bad(path, "page ids, integers in one dimension in host memory", type_name(pages)) from error
    if not given.size:
        return np.empty(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise _bad(path, "page ids, integers in one dimension", f"{given.dtype} of shape {given.shape}")
    return given.astype(np.int64)


def _bad(path: str, mine: str, yours: str, advice: str = "") -> LocalError:
    return LocalError(ErrorCode.BAD_GRANT, path, mine, yours, advice)
