"""Which candidate each needy rank reads from (spec/v1/planning.md, step 4).

The rules look at all pieces of a plan at once, because what they promise of a source's load holds over all layers and
groups that the same candidates own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvproto.wire.enums import Feature

__all__ = ["Layers", "Piece", "Ranks", "elect", "joined"]

Layers = tuple[tuple[int, int], ...]
"""Ascending intervals [lo, hi) of layers."""
Ranks = tuple[int, ...]
"""Ascending ranks."""
IntArray = npt.NDArray[np.int64]
Entry = tuple[Ranks, int, Ranks]
"""Candidates, the sink's group, and the needy ranks."""
Places = dict[Entry, tuple[IntArray, IntArray]]
"""By entry: its layers [n], ascending, and where each needy rank reads each, as places among the candidates [m, n]."""
FACTOR = 2
"""By FEW_SOURCES a candidate serves at most so many times what the busiest one serves by dealing."""


class Piece(NamedTuple):
    """Bytes [lo, hi) of a part and rows of one token class, in layers in which the same ranks own them."""

    group: int
    """The sink's group id."""
    part: int
    """Index into the parts of that group."""
    lo: int
    hi: int
    source_class: int
    sink_class: int
    layers: Layers
    candidates: Ranks
    needy: Ranks


def elect(
    pieces: list[Piece], ordinal: int, features: Collection[int]
) -> Iterator[tuple[Piece, list[tuple[int, int, Layers]]]]:
    """For each piece: (source rank, sink rank, layers) for all of its needy ranks; `ordinal` is the sink's replica."""
    places = {} if Feature.SPREAD_ONE in features else _spread(pieces, ordinal, Feature.FEW_SOURCES in features)

    @cache
    def shares(candidates: Ranks, group: int, needy: Ranks, layers: Layers) -> list[tuple[int, int, Layers]]:
        spread = places.get((candidates, group, needy))
        if spread is None:
            return [(source, rank, layers) for source, rank in _in_order(candidates, needy)]
        held, chosen = spread
        numbers = np.concatenate([np.arange(lo, hi) for lo, hi in layers])
        key = chosen[:, np.searchsorted(held, numbers)] + np.arange(len(needy))[:, None] * len(candidates)
        found = _intervals(key.ravel(), np.tile(numbers, len(needy)))
        return [(candidates[k % len(candidates)], needy[k // len(candidates)], some) for k, some in found]

    for piece in pieces:
        yield piece, shares(piece.candidates, piece.group, piece.needy, piece.layers)


def joined(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending intervals, with those that touch made one."""
    made: list[tuple[int, int]] = []
    for lo, hi in intervals:
        if made and made[-1][1] == lo:
            made[-1] = (made[-1][0], hi)
        else:
            made.append((lo, hi))
    return made


def _in_order(candidates: Ranks, needy: Ranks) -> Iterator[tuple[int, int]]:
    """(source rank, sink rank): needy ranks in order over candidates in order."""
    for j, rank in enumerate(needy):
        yield candidates[j * len(candidates) // len(needy)], rank


def _spread(pieces: list[Piece], ordinal: int, few: bool) -> Places:
    """Places for all entries with fewer needy ranks than candidates, chosen for one set of candidates after another."""
    shared: dict[Ranks, dict[tuple[int, Ranks], set[tuple[int, int]]]] = defaultdict(dict)
    awaited: dict[int, set[int]] = defaultdict(set)
    for piece in pieces:
        if len(piece.needy) < len(piece.candidates):
            shared[piece.candidates].setdefault((piece.group, piece.needy), set()).update(piece.layers)
        elif few:
            for source, rank in _in_order(piece.candidates, piece.needy):
                awaited[rank].add(source)
    places: Places = {}
    for candidates in sorted(shared, key=lambda ranks: (len(ranks), ranks)):
        keys = sorted(shared[candidates])
        layers = [np.unique(np.concatenate([np.arange(*i) for i in shared[candidates][key]])) for key in keys]
        units = _units(keys, layers)
        ranks = np.empty(sum(some.size for some in units), np.int64)
        for (_, needy), some in zip(keys, units, strict=True):
            ranks[some] = np.array(needy)[:, None]
        chosen = (
            _few(candidates, ranks, ordinal, awaited) if few else (np.arange(ranks.size) + ordinal) % len(candidates)
        )
        for (group, needy), held, some in zip(keys, layers, units, strict=True):
            places[candidates, group, needy] = held, chosen[some]
    return places


def _units(keys: list[tuple[int, Ranks]], layers: list[IntArray]) -> list[IntArray]:
    """Numbers [m, n] of the units of each (group, m needy ranks) with its n layers.

    Units are counted by ascending group, layer, needy ranks, and place among these. The keys are ascending.
    """
    key = np.repeat(np.arange(len(keys)), [some.size for some in layers])
    group = np.array([group for group, _ in keys])[key]
    sizes = np.array([len(needy) for _, needy in keys])[key]
    order = np.lexsort((key, np.concatenate(layers), group))
    first = np.empty(key.size, np.int64)
    first[order] = np.cumsum(sizes[order]) - sizes[order]
    ends = np.cumsum([some.size for some in layers])[:-1]
    return [some + np.arange(len(needy))[:, None] for (_, needy), some in zip(keys, np.split(first, ends), strict=True)]


def _few(candidates: Ranks, ranks: IntArray, ordinal: int, awaited: dict[int, set[int]]) -> IntArray:
    """Places [n] of units of the needy `ranks` [n], as few for each rank as FACTOR allows; adds to `awaited`."""
    few = len(candidates)
    most = FACTOR * -(-ranks.size // few)
    order = np.argsort(ranks, kind="stable")
    needy, counts = np.unique(ranks, return_counts=True)
    shares = []
    for j, (end, count) in enumerate(zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True)):
        number = -(-count // most)
        cuts = [end - count - -i * count // number for i in range(number + 1)]
        shares += [(lo - hi, j, lo, hi) for lo, hi in pairwise(cuts)]
    load, chosen = [0] * few, np.empty(ranks.size, np.int64)
    place = {rank: k for k, rank in enumerate(candidates)}
    by_load, loads = {0: list(range(few))}, [0]  # the places of each load, ascending, and the loads as a heap
    for size, j, lo, hi in sorted(shares):
        begin = (j * few // needy.size + ordinal) % few
        theirs = awaited[int(needy[j])]
        known = [k for k in map(place.__getitem__, theirs & place.keys()) if load[k] - size <= most]
        if known:
            k = min(known, key=lambda k: (load[k], (k - begin) % few))
        else:
            while not by_load[loads[0]]:
                del by_load[heappop(loads)]
            least = by_load[loads[0]]
            k = least[bisect_left(least, begin) % len(least)]
        same = by_load[load[k]]
        del same[bisect_left(same, k)]
        load[k] -= size
        if load[k] not in by_load:
            by_load[load[k]] = []
            heappush(loads, load[k])
        insort(by_load[load[k]], k)
        chosen[order[lo:hi]] = k
        theirs.add(candidates[k])
    return chosen


def _intervals(keys: IntArray, numbers: IntArray) -> Iterator[tuple[int, Layers]]:
    """Numbers [n] by key [n], as intervals; the numbers of each key are ascending."""
    order = np.argsort(keys, kind="stable")
    keys, numbers = keys[order], numbers[order]
    breaks = np.flatnonzero((np.diff(keys) != 0) | (np.diff(numbers) != 1)) + 1
    starts, ends = np.append(0, breaks), np.append(breaks, keys.size) - 1
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for key, lo, hi in zip(keys[starts].tolist(), numbers[starts].tolist(), numbers[ends].tolist(), strict=True):
        found[key].append((lo, hi + 1))
    for key, some in found.items():
        yield key, tuple(some)
