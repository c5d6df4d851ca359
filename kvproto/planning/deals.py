"""Deals of rows over cp ranks, in closed forms: who owns a row, and where it lies (spec/v1/dcp.md).

A deal hands out runs of `interleave` tokens, in turn or in the group's `order`. Rows here are global rows of the group,
each of `tokens_per_row` tokens; a rank numbers its own rows from 0.
"""

from functools import lru_cache
from math import gcd
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.planning.arrays import IntArray
from kvproto.wire.messages import Group

Count = TypeVar("Count", int, IntArray)


@attrs.frozen(eq=False)
class _Turn:
    """One turn of a deal by a table: consecutive runs, each of which one cp rank takes."""

    order: IntArray
    """cp rank of each run [runs]."""
    nth: IntArray
    """For each run, how many earlier runs of the turn its rank takes [runs]."""
    taken: IntArray
    """The number of runs that each cp rank takes [cp_size]."""
    runs: IntArray
    """The runs of cp rank 0, ascending, then those of cp rank 1, and so on [runs]."""
    ends: IntArray
    """Ends of each cp rank's runs in `runs` [cp_size]."""

    def of(self, cp_rank: int) -> IntArray:
        """The runs of a cp rank, ascending."""
        return self.runs[self.ends[cp_rank] - self.taken[cp_rank] : self.ends[cp_rank]]


@lru_cache(maxsize=32)
def _turn(group: Group) -> _Turn:
    order = _order(group)
    runs = np.argsort(order, kind="stable")
    taken = np.bincount(order, minlength=group.cp_size)
    ends = np.cumsum(taken)
    nth = np.empty_like(order)
    nth[runs] = np.arange(order.size) - np.repeat(ends - taken, taken)
    return _Turn(order, nth, taken, runs, ends)


def _in_turn(group: Group) -> bool:
    """Whether cp ranks take one run each in turn; a single rank always does."""
    return group.order is None or group.cp_size == 1


def _order(group: Group) -> IntArray:
    """cp rank of each run until they repeat [runs]."""
    return np.arange(group.cp_size) if _in_turn(group) else np.asarray(group.order, np.int64)


def deal(group: Group) -> tuple[int, int]:
    """Rows of a run, and the row with which the deal begins."""
    if group.cp_size == 1:
        return 1, 0
    return group.interleave // group.tokens_per_row, group.origin // group.tokens_per_row


def runs(group: Group) -> int:
    """The number of runs after which a deal repeats."""
    return group.cp_size if group.order is None or group.cp_size == 1 else group.order.size


def same_deal(a: Group, b: Group) -> bool:
    """Whether two groups state the same deal."""
    if a.cp_size == b.cp_size == 1:
        return True
    if (a.cp_size, a.interleave, a.origin, runs(a)) != (b.cp_size, b.interleave, b.origin, runs(b)):
        return False
    return np.array_equal(_order(a), _order(b))


def deal_text(group: Group) -> str:
    """The deal in words, with the first runs of a long order; nothing for one cp rank."""
    if group.cp_size == 1:
        return ""
    said = f", dealt {group.cp_size} x {group.interleave} from {group.origin}"
    if group.order is None or same_deal(group, attrs.evolve(group, order=None)):
        return said
    more = f" .. ({group.order.size} runs)" if group.order.size > _SHOWN else ""
    return said + f" in the order {' '.join(str(r) for r in group.order[:_SHOWN])}{more}"


_SHOWN = 16


def owner(group: Group, rows: IntArray) -> IntArray:
    """The cp rank that owns each of the global rows; both arrays are [n]."""
    run, origin = deal(group)
    nth = ((rows - origin) // run) % runs(group)
    return nth if _in_turn(group) else _turn(group).order[nth]


def local_row(group: Group, rows: IntArray) -> IntArray:
    """The row within its owner's share for each of the global rows; both arrays are [n]."""
    run, origin = deal(group)
    turn, rest = np.divmod(rows - origin, run * runs(group))
    if _in_turn(group):
        local: IntArray = turn * run + rest % run
    else:
        table, nth = _turn(group), rest // run
        local = (turn * table.taken[table.order[nth]] + table.nth[nth]) * run + rest % run
    return local


def owned_before(group: Group, cp_rank: int, row: Count) -> Count:
    """Number of global rows below `row` that the cp rank owns; for one row or an array of any shape."""
    owned: Count
    at_least, at_most = (max, min) if isinstance(row, int) else (np.maximum, np.minimum)
    run, origin = deal(group)
    whole, rest = divmod(at_least(row - origin, 0), run * runs(group))
    if _in_turn(group):
        owned = whole * run + at_most(at_least(rest - cp_rank * run, 0), run)
        return owned
    table, (nth, inside) = _turn(group), divmod(rest, run)
    before: Any = np.searchsorted(table.of(cp_rank), nth)
    mine: Any = table.order[nth] == cp_rank
    if isinstance(row, int):
        before, mine = int(before), bool(mine)
    owned = (whole * int(table.taken[cp_rank]) + before) * run + mine * inside
    return owned


def most_before(group: Group, row: Count) -> Count:
    """The most global rows below `row` that any one cp rank owns; for one row or an array of any shape."""
    if group.order is None:
        return owned_before(group, 0, row)
    shares = [owned_before(group, cp_rank, row) for cp_rank in range(group.cp_size)]
    most: Count = max(shares) if isinstance(row, int) else np.max(shares, axis=0)
    return most


def owned_within(group: Group, cp_rank: int, lo: int, hi: int) -> tuple[IntArray, IntArray]:
    """Intervals of global rows in [lo, hi), above the origin, that a cp rank owns: first rows [n] and lengths [n]."""
    if hi <= lo:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if group.cp_size == 1:
        return np.array([lo]), np.array([hi - lo])
    run, origin = deal(group)
    turn = run * runs(group)
    a = np.arange((lo - origin) // turn, -(-(hi - origin) // turn), dtype=np.int64) * turn + origin
    a = a + cp_rank * run if _in_turn(group) else np.add.outer(a, _turn(group).of(cp_rank) * run).ravel()
    b = np.minimum(a + run, hi)
    a = np.maximum(a, lo)
    kept = b > a
    return a[kept], (b - a)[kept]


def global_rows(group: Group, cp_rank: int, lo: int, hi: int) -> tuple[IntArray, IntArray]:
    """Local rows [lo, hi) of a cp rank as intervals of global rows: first rows [n] and lengths [n]."""
    if hi <= lo:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if group.cp_size == 1:
        return np.array([lo]), np.array([hi - lo])
    run, origin = deal(group)
    nth = np.arange(lo // run, -(-hi // run), dtype=np.int64)
    a, b = np.maximum(nth * run, lo), np.minimum(nth * run + run, hi)
    if group.order is None:
        return origin + (nth * group.cp_size + cp_rank) * run + a - nth * run, b - a
    table = _turn(group)
    turn, of_turn = np.divmod(nth, table.taken[cp_rank])
    return origin + (turn * table.order.size + table.of(cp_rank)[of_turn]) * run + a - nth * run, b - a


def shared_classes(source: Group, sink: Group) -> tuple[tuple[int, int], ...]:
    """Ascending pairs (source, sink cp rank) that share a row, whose runs meet modulo the gcd of both turns."""
    if source.cp_size == sink.cp_size == 1:
        return ((0, 0),)
    both = gcd(*(deal(g)[0] * runs(g) for g in (source, sink)))
    if source.cp_size * runs(sink) <= sink.cp_size * runs(source):
        meets = _meeting(source, sink, both)
    else:
        meets = _meeting(sink, source, both).T
    ours, theirs = np.nonzero(meets)
    return tuple(zip(ours.tolist(), theirs.tolist(), strict=True))


def _meeting(one: Group, other: Group, both: int) -> npt.NDArray[np.bool_]:
    """Whether runs of a cp rank of each group meet on a circle of `both` rows [cp_size of one, cp_size of other]."""
    (run, starts), (other_run, others) = ((deal(g)[0], _starts(g, both)) for g in (one, other))
    at = np.argsort(others, kind="stable")
    places = np.concatenate([others[at], others[at] + both])  # twice round, so that no interval is cut
    low = (starts - min(other_run, both) + 1) % both
    high = low + min(min(run, both) + min(other_run, both) - 1, both)
    first, after = np.searchsorted(places, low), np.searchsorted(places, high)
    meets = after - first  # how many runs of the other side each run meets
    if meets.sum() <= one.cp_size * places.size:
        shared: npt.NDArray[np.bool_] = np.zeros((one.cp_size, other.cp_size), np.bool_)
        nth = np.arange(meets.sum()) + np.repeat(first - np.cumsum(meets) + meets, meets)
        shared[np.repeat(_order(one), meets), _order(other)[at][nth % at.size]] = True
        return shared
    # how many runs of each cp rank meet each run of the other side: a running sum of where they begin and end
    wide = places.size + 1
    begin, end = (np.bincount(_order(one) * wide + where, minlength=one.cp_size * wide) for where in (first, after))
    met = np.cumsum((begin - end).reshape(-1, wide), axis=1)[:, :-1] > 0
    met = met[:, : at.size] | met[:, at.size :]
    by_rank = _order(other)[at]
    columns = np.argsort(by_rank, kind="stable")
    begins = np.searchsorted(by_rank[columns], np.arange(other.cp_size))
    every: npt.NDArray[np.bool_] = np.logical_or.reduceat(met[:, columns], begins, axis=1)
    return every


def _starts(group: Group, both: int) -> IntArray:
    """First row of each run of a turn, on a circle of `both` rows."""
    run, origin = deal(group)
    return (np.arange(runs(group), dtype=np.int64) * (run % both) + origin % both) % both
