"""Tables as columns: equal rows, stretches of rows, rows repeated by a count, and merged intervals."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Intervals = tuple[tuple[int, int], ...]
"""Ascending intervals [lo, hi)."""


def merged_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ascending intervals, with neighbours that touch merged into one."""
    merged: list[tuple[int, int]] = []
    for lo, hi in intervals:
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    return merged


def repeated_index(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Each index repeated by its count, and the number of each repetition from 0 on: both [sum of counts]."""
    index = np.repeat(np.arange(counts.size), counts)
    return index, np.arange(index.size) - np.repeat(np.cumsum(counts) - counts, counts)


def distinct_rows(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """The first place of each distinct row of a table [n], in ascending order, and the index of each row in these."""
    order = np.lexsort(columns[::-1])
    new = np.ones(order.size, np.bool_)
    new[1:] = np.any([column[order[1:]] != column[order[:-1]] for column in columns], axis=0)
    number = np.empty(order.size, np.int64)
    number[order] = np.cumsum(new) - 1
    return order[new], number


def stretch_bounds(continues: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """The first and the last row of each stretch; `continues` [n - 1] says which rows continue the one before."""
    breaks = np.flatnonzero(~continues)
    return np.append(0, breaks + 1), np.append(breaks, continues.size)
