"""Checks of the grants of a Transfer or an Offer, and the number of items that a window of tokens needs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvproto.copying.aliasing import Overlaps
from kvproto.copying.scaling import check_scales
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Geometry, Group, owned_before
from kvproto.planning.kinds import KINDS
from kvproto.planning.limits import MAX_ITEMS
from kvproto.wire.enums import ErrorCode, ItemKind
from kvproto.wire.messages import Columns, Grants, UIntArray

__all__ = ["check_grants", "distinct", "items_by_now", "items_needed", "rows_of", "size_of"]


def items_needed(group: Group, cp_rank: int, first: int, count: int) -> int:
    """Number of items that a cp rank needs for tokens [first, first + count); 1 for state, 0 for hand-off data."""
    if not KINDS[group.kind].paged:
        return 0 if not KINDS[group.kind].has_memory else 1
    lo, hi = rows_of(group, first, count)
    if group.cp_size > 1:
        lo, hi = owned_before(group, cp_rank, lo), owned_before(group, cp_rank, hi)
    return (hi - 1) // group.rows - lo // group.rows + 1 if hi > lo else 0


def rows_of(group: Group, first: int, count: int) -> tuple[int, int]:
    """Global rows [lo, hi) that tokens [first, first + count) cover wholly; in a partial group the last one in part."""
    step = group.tokens_per_row
    lo, end = -(-first // step), first + count
    return lo, max(lo, -(-end // step) if group.partial else end // step)


def items_by_now(group: Group, cp_rank: int, grant: Grants, asked: Grants) -> int:
    """Number of items of a grant whose window may still be shorter than the Transfer's, `asked` (feature SPANS)."""
    if not KINDS[group.kind].paged and grant.count < asked.count and not (KINDS[group.kind].wraps and grant.count):
        return 0
    return items_needed(group, cp_rank, grant.first, grant.count)


def check_grants(
    geometry: Geometry,
    rank: int,
    columns: Mapping[int, Columns],
    wanted: tuple[int, ...],
    grants: tuple[Grants, ...],
    overlaps: Overlaps | None = None,
    written: bool = True,
    left_out: bool = False,
    asked: tuple[Grants, ...] | None = None,
    before: tuple[Grants, ...] | None = None,
) -> None:
    """Check grants of a rank's items against the routes of the pair, in the order of clause KVP-TRN-CHECKS.

    `columns` are the rank's, by group id, and passed `check_columns`; `wanted` are the ids of the routed groups,
    ascending. `overlaps` are those of the columns, for callers that check many transfers. Items that are only read, not
    `written`, may overlap. With `left_out` they name no items yet (feature INTENT). `asked` are the Transfer's windows
    if `grants` are what was granted of them so far, and `before` the part of `grants` that was checked already.

    Raises BAD_GRANT, OUT_OF_REGION or ITEM_ALIAS (KVP-GRANT-GROUPS, -PARTIAL, -RING, -COUNT, -POOL, -SCALES, -ALIAS).
    """
    groups = {g.id: g for g in geometry.groups}
    shares = {o.group: o for r in geometry.ranks if r.rank == rank for o in r.owns}
    if tuple(g.group for g in grants) != wanted:
        yours = f"groups {tuple(g.group for g in grants)}"
        advice = "send one grant for each routed group, hand-off groups included, by ascending id"
        raise RemoteError(ErrorCode.BAD_GRANT, "grants", f"groups {wanted}", yours, advice)
    left = MAX_ITEMS
    for i, grant in enumerate(grants):
        group = groups[grant.group]
        need = items_by_now(group, shares[grant.group].cp_rank, grant, grant if asked is None else asked[i])
        left -= need if left_out else 0 if grant.items is None else grant.items.size
        if left < 0:
            mine, advice = f"at most {MAX_ITEMS} items of one transfer", "use larger pages for prompts of this length"
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].items", mine, str(MAX_ITEMS - left), advice)
        if KINDS[group.kind].has_memory:
            _check_window(f"grants[{i}]", group, grant)
        if not left_out:
            had = 0 if before is None else size_of(before[i])
            _check_items(f"grants[{i}].items", group, grant, need, columns, written, had)
    if not written:
        return
    judged = Overlaps.of(geometry, rank, columns) if overlaps is None else overlaps
    if judged.scales:
        check_scales(judged.scales, grants if asked is None else asked)
    if judged.clusters and not left_out:
        judged.check(grants)


def _check_window(at: str, group: Group, grant: Grants) -> None:
    if group.partial and grant.count and grant.first % group.tokens_per_row:
        mine, advice = f"a multiple of {group.tokens_per_row}, where a row begins", "fetch the row whole, or not at all"
        raise RemoteError(ErrorCode.BAD_GRANT, f"{at}.first", mine, str(grant.first), advice)
    if KINDS[group.kind].wraps:
        lo, hi = rows_of(group, grant.first, grant.count)
        if hi - lo > group.rows:
            mine, yours = f"at most {group.rows} rows", f"{hi - lo} rows"
            raise RemoteError(ErrorCode.BAD_GRANT, f"{at}.count", mine, yours, "request only what a ring still holds")
    if group.cp_size > 1 and grant.count and grant.first < group.origin:
        mine, yours = f"at least {group.origin}", str(grant.first)
        raise RemoteError(ErrorCode.BAD_GRANT, f"{at}.first", mine, yours, "tokens before the origin are not dealt")


def _check_items(
    at: str, group: Group, grant: Grants, need: int, columns: Mapping[int, Columns], written: bool, had: int
) -> None:
    """Check the items of a grant from number `had` on; the earlier ones were checked before."""
    items = grant.items
    came = 0 if items is None else items.size
    if came != need:
        tokens = f"tokens {grant.first}..{grant.first + grant.count} in items of {group.rows} rows"
        what = f"for {tokens}" if KINDS[group.kind].paged else f"of a {ItemKind(group.kind).name}"
        advice = "trim the list to the window" if came > need else "name every item of the window"
        raise RemoteError(
            ErrorCode.BAD_GRANT, at, f"{need} items {what}", f"{came} items" if came else "no items", advice
        )
    if items is None or need == had:
        return
    pool, new = columns[grant.group].items, items[had:]
    most = max(new.tolist()) if new.size <= _FEW else int(new.max())
    if most >= pool:
        raise RemoteError(ErrorCode.OUT_OF_REGION, at, f"below {pool}", str(most), "name items of the pool")
    if written and not (distinct(new) and not (had and np.isin(items[:had], new).any())):
        raise RemoteError(ErrorCode.ITEM_ALIAS, at, "each item once", "an item twice", "give each block its own item")


def size_of(grant: Grants) -> int:
    """The number of items that a grant names."""
    return 0 if grant.items is None else grant.items.size


_FEW = 256
"""Items up to which Python's integers are faster than numpy calls."""


def distinct(items: UIntArray | npt.NDArray[np.int64]) -> bool:
    """Whether no item occurs twice."""
    if items.size <= _FEW:
        return len(set(items.tolist())) == items.size
    ordered = np.sort(items)
    return bool((ordered[1:] != ordered[:-1]).all())
