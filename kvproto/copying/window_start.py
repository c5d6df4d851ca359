"""Windows that begin late: the token from which a source holds what a sink requests, and windows cut to begin there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from kvproto.copying.grants import items_needed, rows_of
from kvproto.copying.program import RankLayout
from kvproto.planning.deals import deal, owned_before, runs
from kvproto.planning.kinds import KINDS
from kvproto.planning.plan import Route
from kvproto.wire.messages import Begin, Grants, Group

__all__ = ["begins_of", "cut_to_begins", "held_from", "items_before"]


def items_before(group: Group, cp_rank: int, first: int) -> int:
    """Number of a cp rank's items before the first one of a window that begins with token `first`."""
    return owned_before(group, cp_rank, rows_of(group, first, 0)[0]) // group.rows if KINDS[group.kind].paged else 0


def held_from(routes: Iterable[Route], groups: Mapping[int, Group], since: Mapping[int, int]) -> dict[int, int]:
    """By the sink's group id: the first token from which the source holds the rows of every layer (KVP-GRANT-HELD).

    `groups` are the sink's by id, and `since` has the first token held by the source's group id. Groups held from token
    0 on are left out. A row, or an opaque item, is held whole or not at all.
    """
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
