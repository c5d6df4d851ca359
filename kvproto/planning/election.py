"""Which candidate each needy rank reads from (spec/v1/planning.md, step 4).

The rules look at all pieces of a plan at once, because they bound a source's load over all layers and groups that the
same candidates own. PieceTable, layers and ranks are columns of tables here, so that a plan with many costs little more
than one with few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.planning.arrays import IntArray, Intervals, distinct_rows, repeated_index, stretch_bounds
from kvproto.wire.enums import Feature

__all__ = ["Layers", "PieceTable", "Ranks", "ShareTable", "elect"]

Layers = Intervals
"""Ascending intervals [lo, hi) of layers."""
Ranks = tuple[int, ...]
"""Ascending ranks."""
FACTOR = 2
"""With FEW_SOURCES a candidate serves at most this many times as many units as the busiest one does when dealt."""


@attrs.frozen(eq=False)
class PieceTable:
    """Bytes [lo, hi) of a part and rows of one token class, in layers in which the same ranks own them: columns [n]."""

    group: IntArray
    """The sink's group id."""
    part: IntArray
    """Index into the parts of that group."""
    lo: npt.NDArray[np.uint64]
    hi: npt.NDArray[np.uint64]
    source_class: IntArray
    sink_class: IntArray
    layers: IntArray
    """Index of a tuple of intervals of layers."""
    candidates: IntArray
    """Index of the set of source ranks that own it."""
    needy: IntArray
    """Index of the set of sink ranks that own it."""


@attrs.frozen(eq=False)
class ShareTable:
    """What one source rank sends to one sink rank of a piece, in layers [layer_lo, layer_hi): columns [n]."""

    piece: IntArray
    source: IntArray
    sink: IntArray
    layer_lo: IntArray
    layer_hi: IntArray


def elect(
    pieces: PieceTable, layers: Sequence[Layers], sets: Sequence[Ranks], ordinal: int, features: Collection[int]
) -> ShareTable:
    """Who sends each piece to its needy ranks, in which layers (KVP-PLAN-TURN, KVP-PLAN-SPREAD).

    `layers` and `sets` are what `PieceTable` has indices into; `ordinal` is the sink's replica.
    """
    ranks = _Rows.of(sets)
    c, m = (ranks.size[some] for some in (pieces.candidates, pieces.needy))
    dealt = np.zeros(c.size, np.bool_) if Feature.SPREAD_ONE in features else m < c
    runs = _Rows.of([[x for interval in some for x in interval] for some in layers])
    piece, nth = repeated_index(np.where(dealt, 0, m))
    source = ranks.at(pieces.candidates[piece], nth * c[piece] // m[piece])
    sink = ranks.at(pieces.needy[piece], nth)
    share, nth = repeated_index(runs.size[pieces.layers[piece]] // 2)
    piece, source, sink = piece[share], source[share], sink[share]
    lo, hi = (runs.at(pieces.layers[piece], 2 * nth + end) for end in (0, 1))
    found = ShareTable(piece, source, sink, lo, hi)
    if not dealt.any():
        return found
    few = Feature.FEW_SOURCES in features
    awaited = set(zip(sink.tolist(), source.tolist(), strict=True)) if few else None
    more = _deal(pieces, np.flatnonzero(dealt), runs, ranks, sets, ordinal, awaited)
    return ShareTable(*(np.concatenate(both) for both in zip(_columns(found), _columns(more), strict=True)))


def _columns(shares: ShareTable) -> tuple[IntArray, ...]:
    return shares.piece, shares.source, shares.sink, shares.layer_lo, shares.layer_hi


@attrs.frozen(eq=False)
class _Rows:
    """Rows of unequal length."""

    values: IntArray
    begin: IntArray
    size: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> _Rows:
        size = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.fromiter(chain.from_iterable(rows), np.int64), np.cumsum(size) - size, size)

    def at(self, row: IntArray, nth: IntArray) -> IntArray:
        found: IntArray = self.values[self.begin[row] + nth]
        return found


def _deal(
    pieces: PieceTable, dealt: IntArray, runs: _Rows, ranks: _Rows, sets: Sequence[Ranks], ordinal: int,
    awaited: set[tuple[int, int]] | None,
) -> ShareTable:  # fmt: skip
    """Shares of pieces with fewer needy ranks than candidates; with FEW_SOURCES `awaited` has (sink, source) ranks."""
    kinds, kind = distinct_rows(
        *(some[dealt] for some in (pieces.candidates, pieces.group, pieces.needy, pieces.layers))
    )
    kinds = dealt[kinds]
    # all layers of each kind
    of, nth = repeated_index(runs.size[pieces.layers[kinds]] // 2)
    lo, hi = (runs.at(pieces.layers[kinds][of], 2 * nth + end) for end in (0, 1))
    at, nth = repeated_index(hi - lo)
    of, layer = of[at], lo[at] + nth
    candidates, needy = pieces.candidates[kinds][of], pieces.needy[kinds][of]
    # entries: the same layer, group and needy ranks of the same candidates, counted in the order of the specification
    by_list = np.empty(len(sets), np.int64)
    by_list[sorted(range(len(sets)), key=sets.__getitem__)] = np.arange(len(sets))
    first, entry = distinct_rows(
        ranks.size[candidates], by_list[candidates], pieces.group[kinds][of], layer, by_list[needy]
    )
    m, c, owners = ranks.size[needy[first]], ranks.size[candidates[first]], candidates[first]
    unit = np.cumsum(m) - m
    new = np.flatnonzero(np.diff(owners, prepend=-1))
    base = np.repeat(unit[new], np.diff(new, append=owners.size))
    at, nth = repeated_index(m)
    if awaited is None:
        place = (unit[at] - base[at] + nth + ordinal) % c[at]
    else:
        place = _few(owners[at], ranks.at(needy[first][at], nth), sets, ordinal, awaited)
    at, nth = repeated_index(ranks.size[needy])
    source = ranks.at(candidates[at], place[unit[entry[at]] + nth])
    found = ShareTable(of[at], source, ranks.at(needy[at], nth), layer[at], layer[at] + 1)
    order = np.lexsort((found.layer_lo, found.sink, found.source, found.piece))
    of, source, sink, lo, hi = (column[order] for column in _columns(found))
    same = (of[1:] == of[:-1]) & (source[1:] == source[:-1]) & (sink[1:] == sink[:-1])
    begin, end = stretch_bounds(same & (lo[1:] == hi[:-1]))
    of, source, sink, lo, hi = of[begin], source[begin], sink[begin], lo[begin], hi[end]
    counts = np.bincount(of, minlength=kinds.size)
    at, nth = repeated_index(counts[kind])
    row = (np.cumsum(counts) - counts)[kind[at]] + nth
    return ShareTable(dealt[at], source[row], sink[row], lo[row], hi[row])


def _few(
    owners: IntArray, ranks: IntArray, sets: Sequence[Ranks], ordinal: int, awaited: set[tuple[int, int]]
) -> IntArray:
    """The place [n] among its candidates of each unit of the needy `ranks` [n]: as few for a rank as FACTOR allows."""
    known: dict[int, int] = defaultdict(int)
    """By needy rank: the sources that it awaits, as bits."""
    bit = {rank: i for i, rank in enumerate(sorted({rank for some in set(owners.tolist()) for rank in sets[some]}))}
    for rank, source in awaited:
        if source in bit:
            known[rank] |= 1 << bit[source]
    new = np.flatnonzero(np.diff(owners, prepend=-1))
    turn = np.repeat(np.arange(new.size), np.diff(new, append=owners.size))
    first, whose = distinct_rows(turn, ranks)
    x = np.bincount(whose)
    order = np.argsort(whose, kind="stable")
    nth = np.empty(ranks.size, np.int64)
    nth[order] = repeated_index(x)[1]
    chosen: list[int] = []
    number: list[int] = []
    needs = np.split(np.stack([ranks[first], x], axis=1), np.flatnonzero(np.diff(turn[first])) + 1)
    for some, need in zip(owners[new].tolist(), needs, strict=True):
        for places in _runs(sets[some], need.tolist(), ordinal, bit, known):
            chosen += places
            number.append(len(places))
    a = np.array(number)
    found: IntArray = np.array(chosen)[(np.cumsum(a) - a)[whose] + nth * a[whose] // x[whose]]
    return found


def _runs(
    candidates: Ranks, needs: list[list[int]], ordinal: int, bit: dict[int, int], known: dict[int, int]
) -> list[list[int]]:
    """The places of the runs of each (needy rank, number of units) among one set of candidates; adds to `known`."""
    few = len(candidates)
    most = FACTOR * -(-sum(x for _, x in needs) // few)
    runs = []
    for j, (_, x) in enumerate(needs):
        a = -(-x // most)
        runs += [(-(-(i + 1) * x // a) - -(-i * x // a), j, i) for i in range(a)]
    made = [[0] * -(-x // most) for _, x in needs]
    bits = [bit[rank] for rank in candidates]
    place = {b: k for k, b in enumerate(bits)}
    load, levels = [0] * few, {0: sum(1 << b for b in bits)}
    for size, j, i in sorted(runs, key=lambda run: (-run[0], run[1], run[2])):
        rank, begin = needs[j][0], bits[(j * few // len(needs) + ordinal) % few]
        able = 0
        for level in sorted(levels):
            able = levels[level] & known[rank] if level + size <= most else 0
            if able or level + size > most:
                break
        b = _next(able or levels[min(levels)], begin)
        k = place[b]
        levels[load[k]] ^= 1 << b
        if not levels[load[k]]:
            del levels[load[k]]
        load[k] += size
        levels[load[k]] = levels.get(load[k], 0) | 1 << b
        known[rank] |= 1 << b
        made[j][i] = k
    return made


def _next(bits: int, begin: int) -> int:
    """The first set bit from `begin` on, going round."""
    above = bits >> begin << begin or bits
    return (above & -above).bit_length() - 1
