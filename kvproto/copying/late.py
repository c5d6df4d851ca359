"""Windows that begin late: from which token on a source holds what a sink asks for, and windows cut down to that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from kvproto.copying.grants import items_needed, rows_of
from kvproto.copying.program import RankLayout
from kvproto.planning.deals import deal, owned_before, runs
from kvproto.planning.kinds import kind_of
from kvproto.planning.plan import Route
from kvproto.wire.messages import Begin, Grants, Group

__all__ = ["begins_of", "begun", "held_from", "items_before"]


def items_before(group: Group, cp_rank: int, first: int) -> int:
    """Number of a cp rank's items before the first one of a window that begins with token `first`."""
    return owned_before(group, cp_rank, rows_of(group, first, 0)[0]) // group.rows if kind_of(group).paged else 0


def held_from(routes: Iterable[Route], groups: Mapping[int, Group], since: Mapping[int, int]) -> dict[int, int]:
    """By the sink's group id: the first token of which the source has the rows of every layer (KVP-GRANT-HELD).

    `groups` are the sink's, `since` is by the source's group id; what is held from token 0 on is left out. Rows, and
    opaque items, are held from their first token on or not at all.
    """
    found = {}
    for route in routes:
        first = max((since.get(box.source_group, 0) for box in route.boxes), default=0)
        if first:
            found[route.group] = _whole(groups[route.group], first)
    return found


def _whole(group: Group, first: int) -> int:
    """The next token with which a row begins; of opaque items, a turn of the deal and an item of every cp rank."""
    step, origin = group.tokens_per_row, 0
    if any(part.encoding for part in group.parts):
        run, begin = deal(group)
        turn = run * runs(group)
        shares = (owned_before(group, cp_rank, begin + turn) for cp_rank in range(group.cp_size))
        turns = math.lcm(*(group.rows // math.gcd(group.rows, share) for share in shares))
        step, origin = step * turn * turns, step * begin
    return origin + -(-max(first - origin, 0) // step) * step


def begins_of(held: Mapping[int, int], grants: Iterable[Grants]) -> tuple[Begin, ...]:
    """What Done says of late windows that begin below what `held_from` found (KVP-GRANT-LATE)."""
    return tuple(
        Begin(group=g.group, first=min(held[g.group], g.first + g.count))
        for g in grants
        if g.late and g.first < min(held.get(g.group, 0), g.first + g.count)
    )


def begun(layout: RankLayout, grants: Sequence[Grants], begins: Mapping[int, int]) -> tuple[Grants, ...]:
    """Grants of a rank's items, those of groups in `begins` from that token on."""
    return tuple(_from(layout, g, begins[g.group]) if g.group in begins else g for g in grants)


def _from(layout: RankLayout, grant: Grants, first: int) -> Grants:
    group, cp_rank = layout.group(grant.group), layout.owns(grant.group).cp_rank
    count, items = grant.first + grant.count - first, grant.items
    if items is not None:
        skip = items_before(group, cp_rank, first) - items_before(group, cp_rank, grant.first)
        items = items[skip : skip + items_needed(group, cp_rank, first, count)]
    return attrs.evolve(grant, first=first, count=count, items=items)
