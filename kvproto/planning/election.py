"""The election: which candidate each needy rank reads from (spec/v1/planning.md, step 4).

The rules look at all pieces of a plan at once, because they bound a source's load over all layers and groups that the
same candidates own. Pieces, layers and ranks are columns of tables here, so that a plan with many costs little more
than one with few. As in the specification, c is a number of candidates and m one of needy ranks.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.planning.arrays import IntArray, Intervals, distinct_rows, repeated_index, stretch_bounds
from kvproto.wire.enums import Feature

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
    """Shares of a piece that one source rank sends to one sink rank, in layers [layer_lo, layer_hi): columns [n]."""

    piece: IntArray
    source: IntArray
    sink: IntArray
    layer_lo: IntArray
    layer_hi: IntArray

    @property
    def columns(self) -> tuple[IntArray, ...]:
        return self.piece, self.source, self.sink, self.layer_lo, self.layer_hi


@attrs.frozen(eq=False)
class _RaggedRows:
    """Rows of unequal length."""

    values: IntArray
    begin: IntArray
    size: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "_RaggedRows":
        size = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.fromiter(chain.from_iterable(rows), np.int64), np.cumsum(size) - size, size)

    def at(self, row: IntArray, nth: IntArray) -> IntArray:
        values: IntArray = self.values[self.begin[row] + nth]
        return values


def elect(
    pieces: PieceTable, layers: Sequence[Layers], sets: Sequence[Ranks], ordinal: int, features: Collection[int]
) -> ShareTable:
    """Elect senders of pieces to their needy ranks, by layers, for sink replica `ordinal` (KVP-PLAN-TURN, -SPREAD)."""
    ranks = _RaggedRows.of(sets)
    bounds = _RaggedRows.of([[*chain.from_iterable(intervals)] for intervals in layers])
    c, m = ranks.size[pieces.candidates], ranks.size[pieces.needy]
    dealt = np.zeros(c.size, np.bool_) if Feature.SPREAD_ONE in features else m < c
    piece, nth = repeated_index(np.where(dealt, 0, m))
    source = ranks.at(pieces.candidates[piece], nth * c[piece] // m[piece])
    sink = ranks.at(pieces.needy[piece], nth)
    share, lo, hi = _expanded(bounds, pieces.layers[piece])
    fixed = ShareTable(piece[share], source[share], sink[share], lo, hi)
    if not dealt.any():
        return fixed
    few = Feature.FEW_SOURCES in features
    awaited = set(zip(fixed.sink.tolist(), fixed.source.tolist(), strict=True)) if few else None
    units = _dealt(pieces, np.flatnonzero(dealt), bounds, ranks, sets, ordinal, awaited)
    return ShareTable(*(np.concatenate(both) for both in zip(fixed.columns, units.columns, strict=True)))


def _expanded(bounds: _RaggedRows, layers: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The intervals of layers that each row [n] has: index of the row, first layer, layer after the last."""
    row, nth = repeated_index(bounds.size[layers] // 2)
    return row, bounds.at(layers[row], 2 * nth), bounds.at(layers[row], 2 * nth + 1)


def _dealt(
    pieces: PieceTable,
    dealt: IntArray,
    bounds: _RaggedRows,
    ranks: _RaggedRows,
    sets: Sequence[Ranks],
    ordinal: int,
    awaited: set[tuple[int, int]] | None,
) -> ShareTable:
    """Shares of pieces with fewer needy ranks than candidates; with FEW_SOURCES `awaited` has (sink, source) ranks."""
    alike = (column[dealt] for column in (pieces.candidates, pieces.group, pieces.needy, pieces.layers))
    kinds, kind = distinct_rows(*alike)
    kinds = dealt[kinds]
    # all layers of each kind of piece
    row, lo, hi = _expanded(bounds, pieces.layers[kinds])
    at, nth = repeated_index(hi - lo)
    of, layer = row[at], lo[at] + nth
    candidates, needy = pieces.candidates[kinds][of], pieces.needy[kinds][of]
    # entries: the same layer, group and needy ranks of the same candidates, counted in the order of the specification
    by_list = np.empty(len(sets), np.int64)
    by_list[sorted(range(len(sets)), key=sets.__getitem__)] = np.arange(len(sets))
    order = ranks.size[candidates], by_list[candidates], pieces.group[kinds][of], layer, by_list[needy]
    first, entry = distinct_rows(*order)
    m, c, owners = ranks.size[needy[first]], ranks.size[candidates[first]], candidates[first]
    unit = np.cumsum(m) - m
    new = np.flatnonzero(np.diff(owners, prepend=-1))
    base = np.repeat(unit[new], np.diff(new, append=owners.size))
    at, nth = repeated_index(m)
    if awaited is None:
        place = (unit[at] - base[at] + nth + ordinal) % c[at]
    else:
        place = few_places(owners[at], ranks.at(needy[first][at], nth), sets, ordinal, awaited)
    at, nth = repeated_index(ranks.size[needy])
    source = ranks.at(candidates[at], place[unit[entry[at]] + nth])
    by_kind = _joined_layers(ShareTable(of[at], source, ranks.at(needy[at], nth), layer[at], layer[at] + 1))
    # every piece has the shares of its kind
    counts = np.bincount(by_kind.piece, minlength=kinds.size)
    at, nth = repeated_index(counts[kind])
    row = (np.cumsum(counts) - counts)[kind[at]] + nth
    return ShareTable(dealt[at], *(column[row] for column in by_kind.columns[1:]))


def _joined_layers(shares: ShareTable) -> ShareTable:
    """The shares in order, with consecutive layers of the same piece and ranks joined."""
    order = np.lexsort((shares.layer_lo, shares.sink, shares.source, shares.piece))
    piece, source, sink, lo, hi = (column[order] for column in shares.columns)
    same = (piece[1:] == piece[:-1]) & (source[1:] == source[:-1]) & (sink[1:] == sink[:-1])
    begin, end = stretch_bounds(same & (lo[1:] == hi[:-1]))
    return ShareTable(piece[begin], source[begin], sink[begin], lo[begin], hi[end])


def few_places(
    owners: IntArray, ranks: IntArray, sets: Sequence[Ranks], ordinal: int, awaited: set[tuple[int, int]]
) -> IntArray:
    """The place [n] among its candidates of each unit of the needy `ranks` [n]: as few for a rank as FACTOR allows."""
    known: dict[int, int] = defaultdict(int)
    """By needy rank: the sources that it awaits, as bits."""
    bit = {rank: i for i, rank in enumerate(sorted({rank for owner in set(owners.tolist()) for rank in sets[owner]}))}
    for rank, source in awaited:
        if source in bit:
            known[rank] |= 1 << bit[source]
    new = np.flatnonzero(np.diff(owners, prepend=-1))
    turn = np.repeat(np.arange(new.size), np.diff(new, append=owners.size))
    first, whose = distinct_rows(turn, ranks)
    units = np.bincount(whose)
    order = np.argsort(whose, kind="stable")
    nth = np.empty(ranks.size, np.int64)
    nth[order] = repeated_index(units)[1]
    places: list[int] = []
    runs: list[int] = []
    needs = np.split(np.stack([ranks[first], units], axis=1), np.flatnonzero(np.diff(turn[first])) + 1)
    for owner, need in zip(owners[new].tolist(), needs, strict=True):
        for of_rank in _run_places(sets[owner], need.tolist(), ordinal, bit, known):
            places += of_rank
            runs.append(len(of_rank))
    a = np.array(runs)
    place: IntArray = np.array(places)[(np.cumsum(a) - a)[whose] + nth * a[whose] // units[whose]]
    return place


def _run_places(
    candidates: Ranks, needs: list[list[int]], ordinal: int, bit: dict[int, int], known: dict[int, int]
) -> list[list[int]]:
    """The places of the runs of each (needy rank, number of units) among one set of candidates; adds to `known`."""
    c = len(candidates)
    most = FACTOR * -(-sum(x for _, x in needs) // c)
    runs = []
    for j, (_, x) in enumerate(needs):
        a = -(-x // most)
        runs += [(-(-(i + 1) * x // a) - -(-i * x // a), j, i) for i in range(a)]
    places = [[0] * -(-x // most) for _, x in needs]
    bits = [bit[rank] for rank in candidates]
    place = {b: k for k, b in enumerate(bits)}
    load, levels = [0] * c, {0: sum(1 << b for b in bits)}
    for size, j, i in sorted(runs, key=lambda run: (-run[0], run[1], run[2])):
        rank, begin = needs[j][0], bits[(j * c // len(needs) + ordinal) % c]
        able = 0
        for level in sorted(levels):
            able = levels[level] & known[rank] if level + size <= most else 0
            if able or level + size > most:
                break
        b = _next_bit(able or levels[min(levels)], begin)
        k = place[b]
        levels[load[k]] ^= 1 << b
        if not levels[load[k]]:
            del levels[load[k]]
        load[k] += size
        levels[load[k]] = levels.get(load[k], 0) | 1 << b
        known[rank] |= 1 << b
        places[j][i] = k
    return places


def _next_bit(bits: int, begin: int) -> int:
    """The first set bit from `begin` on, going round."""
    above = bits >> begin << begin or bits
    return (above & -above).bit_length() - 1
