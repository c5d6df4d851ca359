"""Grants of items: their checks, items that are granted after their Transfer, and windows that begin late.

With feature INTENT items are granted at once, with SPANS piece by piece. The grants so far have windows that begin with
the Transfer's and end where the last Grant said. They are complete when they end with the Transfer's and no item is
missing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.columns import Overlaps, check_scales
from kvproto.copying.program import RankLayout
from kvproto.errors import RemoteError
from kvproto.planning.deals import deal, owned_before, runs
from kvproto.planning.geometry import Geometry, Group
from kvproto.planning.kinds import KINDS, TOKENS, axis_of
from kvproto.planning.limits import MAX_ITEMS
from kvproto.planning.plan import Route
from kvproto.wire.enums import ErrorCode, ItemKind
from kvproto.wire.messages import Begin, Columns, Grants, UIntArray


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
    if `grants` are what was granted of them so far, and `before` the part of `grants` that was checked already. Raises
    BAD_GRANT, OUT_OF_REGION or ITEM_ALIAS (KVP-GRANT-*).
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
            _check_window(f"grants[{i}]", group, shares[grant.group].cp_rank, grant)
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


def begins_inside_item(group: Group, cp_rank: int, first: int, count: int) -> bool:
    """Whether a window begins inside an item of a group whose items move whole (KVP-GRANT-WHOLE)."""
    if not KINDS[group.kind].paged or not any(part.encoding for part in group.parts):
        return False
    begin, end = (owned_before(group, cp_rank, row) for row in rows_of(group, first, count))
    return begin < end and begin % group.rows != 0


def _check_window(at: str, group: Group, cp_rank: int, grant: Grants) -> None:
    rows = KINDS[group.kind].paged or KINDS[group.kind].wraps
    if rows and grant.count and grant.first % group.tokens_per_row:
        mine, advice = f"a multiple of {group.tokens_per_row}, where a row begins", "fetch the row whole"
        raise RemoteError(ErrorCode.BAD_GRANT, f"{at}.first", mine, str(grant.first), advice)
    if begins_inside_item(group, cp_rank, grant.first, grant.count):
        mine, advice = f"where an item of {group.rows} rows begins", "fetch the item whole: its bytes have an encoding"
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
    if items.size <= _FEW:
        return len(set(items.tolist())) == items.size
    ordered = np.sort(items)
    return bool((ordered[1:] != ordered[:-1]).all())


_NO_ITEMS = np.empty(0, np.uint32)


def lacks_items(side: RankLayout, grants: Sequence[Grants]) -> bool:
    """Whether grants of a rank leave out all the items that they need, and need some (KVP-INT-ITEMS)."""
    lacking = [g.items is None for g in grants if _need(side, g, g)]
    return bool(lacking) and all(lacking)


def no_items(side: RankLayout, asked: Sequence[Grants]) -> tuple[Grants, ...]:
    """The grants of a Transfer's windows before its first Grant: no tokens and no items."""
    return tuple(
        attrs.evolve(g, count=0, items=_NO_ITEMS) if KINDS[side.groups[g.group].kind].has_memory else g for g in asked
    )


def placeholder_items(side: RankLayout, grants: Sequence[Grants]) -> tuple[Grants, ...]:
    """The grants with placeholder items, for callers that need only their number."""
    return tuple(attrs.evolve(g, items=np.arange(_need(side, g, g), dtype=np.uint32)) for g in grants)


def all_granted(side: RankLayout, granted: Sequence[Grants], asked: Sequence[Grants]) -> bool:
    return all(g.count == a.count and size_of(g) == _need(side, a, a) for g, a in zip(granted, asked, strict=True))


def with_grant(
    side: RankLayout, granted: Sequence[Grants], asked: Sequence[Grants], more: Sequence[Grants], spans: bool
) -> tuple[Grants, ...]:
    """The grants of `asked` after a Grant with `more`; raises BAD_GRANT (KVP-INT-WINDOW, KVP-SPN-GROW)."""
    if tuple(g.group for g in more) != tuple(g.group for g in asked):
        mine, yours = (f"groups {tuple(g.group for g in grants)}" for grants in (asked, more))
        advice = "name the groups of the Transfer, by ascending id"
        raise RemoteError(ErrorCode.BAD_GRANT, "grants", mine, yours, advice)
    granted_now = []
    for i, (before, all_, new) in enumerate(zip(granted, asked, more, strict=True)):
        if not KINDS[side.groups[all_.group].kind].has_memory:  # its window says nothing (KVP-HND-WINDOW)
            granted_now.append(all_)
            continue
        least = before.count if spans else all_.count
        same = all(getattr(new, name) == getattr(all_, name) for name in ("first", "valid", "state_after"))
        if not (same and bool(new.late) == bool(all_.late) and least <= new.count <= all_.count):
            ends = f"{least} to {all_.count}" if least < all_.count else str(all_.count)
            mine = f"first {all_.first}, count {ends}, valid {all_.valid}"
            yours = f"first {new.first}, count {new.count}, valid {new.valid}"
            advice = "keep the windows of the Transfer" + ", each as long as before at least" * spans
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}]", mine, yours, advice)
        items = [grant.items for grant in (before, new) if grant.items is not None and grant.items.size]
        joined = np.concatenate(items) if items else _NO_ITEMS
        granted_now.append(attrs.evolve(all_, count=new.count, items=joined))
    return tuple(granted_now)


def newly_granted(before: Sequence[Grants], now: Sequence[Grants]) -> tuple[Grants, ...]:
    """The contents of a Grant after `before`: the windows of `now`, and the items that are new."""
    return tuple(
        attrs.evolve(g, items=None if g.items is None else g.items[size_of(old) :])
        for old, g in zip(before, now, strict=True)
    )


def granted_below(side: RankLayout, asked: Sequence[Grants], tokens: int, end: int) -> tuple[Grants, ...]:
    """The part of grants that tokens below `tokens` need; those that move last only if `tokens` reaches `end`."""
    if tokens >= end:
        return tuple(asked)
    below = []
    for grant in asked:
        group = side.groups[grant.group]
        if KINDS[group.kind].has_memory:
            count = min(max(tokens - grant.first, 0), grant.count) if _moves_early(group) else 0
            part = attrs.evolve(grant, count=count)
            items = None if grant.items is None else grant.items[: _need(side, part, grant)]
            grant = attrs.evolve(part, items=items)
        below.append(grant)
    return tuple(below)


def granted_until(side: RankLayout, granted: Sequence[Grants], asked: Sequence[Grants]) -> int | None:
    """The token below which every row that may move before prefill is over has its item; None if all of them do."""
    ends = [
        g.first + g.count
        for g, a in zip(granted, asked, strict=True)
        if g.count < a.count and _moves_early(side.groups[g.group])
    ]
    return min(ends, default=None)


def _moves_early(group: Group) -> bool:
    """Whether rows of a group may move before prefill is over."""
    kind, whole = KINDS[group.kind], any(part.encoding for part in group.parts)
    return kind.has_memory and not kind.is_state and not whole and axis_of(group) == TOKENS


def _need(side: RankLayout, grant: Grants, asked: Grants) -> int:
    return items_by_now(side.groups[grant.group], side.shares[grant.group].cp_rank, grant, asked)


def items_before(group: Group, cp_rank: int, first: int) -> int:
    """Number of a cp rank's items before the first one of a window that begins with token `first`."""
    return owned_before(group, cp_rank, rows_of(group, first, 0)[0]) // group.rows if KINDS[group.kind].paged else 0


def held_from(routes: Iterable[Route], groups: Mapping[int, Group], since: Mapping[int, int]) -> dict[int, int]:
    """By the sink's group id: the first token, if not 0, from which the source holds every layer (KVP-GRANT-HELD)."""
    firsts = ((route.group, max((since.get(b.source_group, 0) for b in route.boxes), default=0)) for route in routes)
    return {id: _next_start(groups[id], first) for id, first in firsts if first}


def _next_start(group: Group, first: int) -> int:
    """The next token at which a row begins; with opaque items, a turn of the deal and an item of every cp rank."""
    step, origin = group.tokens_per_row, 0
    if any(part.encoding for part in group.parts):
        run, begin = deal(group)
        turn = run * runs(group)
        shares = (owned_before(group, cp_rank, begin + turn) for cp_rank in range(group.cp_size))
        turns = math.lcm(*(group.rows // math.gcd(group.rows, share) for share in shares))
        step, origin = step * turn * turns, step * begin
    return origin + -(-max(first - origin, 0) // step) * step


def begins_of(held: Mapping[int, int], grants: Iterable[Grants]) -> tuple[Begin, ...]:
    """The Begins of Done, for late windows that begin before the token that `held_from` found (KVP-GRANT-LATE)."""
    return tuple(
        Begin(group=g.group, first=min(held[g.group], g.first + g.count))
        for g in grants
        if g.late and g.first < min(held.get(g.group, 0), g.first + g.count)
    )


def cut_to_begins(layout: RankLayout, grants: Sequence[Grants], begins: Mapping[int, int]) -> tuple[Grants, ...]:
    """A rank's grants, cut to begin at the token that `begins` has for their group, if any."""
    return tuple(_from(layout, g, begins[g.group]) if g.group in begins else g for g in grants)


def _from(layout: RankLayout, grant: Grants, first: int) -> Grants:
    group, cp_rank = layout.groups[grant.group], layout.shares[grant.group].cp_rank
    count, items = grant.first + grant.count - first, grant.items
    if items is not None:
        skip = items_before(group, cp_rank, first) - items_before(group, cp_rank, grant.first)
        items = items[skip : skip + items_needed(group, cp_rank, first, count)]
    return attrs.evolve(grant, first=first, count=count, items=items)
