"""The slices of a plan as text and as data: `kvproto plan --slices`, its JSON, and the tables of its page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs

from kvproto.planning.slices import PartLanes, Range, Slice

__all__ = ["HEAD", "aligned", "as_json", "row", "table"]

_RUNS = 16
"""The most entries of a deal's table that are shown."""
HEAD = ("local rank", "cache", "remote rank", "global range", "local range", "remote range")


def as_json(slices: Iterable[Slice]) -> list[dict[str, Any]]:
    """One object per slice; intervals are [lo, hi), lanes in bytes."""
    return [attrs.asdict(one) | {"text": dict(zip(HEAD, row(one), strict=True))} for one in slices]


def table(slices: Iterable[Slice]) -> Iterator[str]:
    """One line per slice, in columns; the sink's ranks are local, the source's remote."""
    return aligned([HEAD, *map(row, slices)])


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def row(one: Slice) -> tuple[str, ...]:
    """The cells of a slice for the columns in HEAD."""
    return f"D{one.sink}", one.cache, f"P{one.source}", *(_text(r) for r in (one.whole, one.local, one.remote))


def _text(range_: Range) -> str:
    one = len(range_.columns) == 1 and "[" not in range_.columns[0].name
    lanes = ", ".join(("" if one else f"{column.name} ") + _lanes(column) for column in range_.columns)
    return f"layers {_numbers(range_.layers)}; {lanes}{_tokens(range_)}"


def _lanes(column: PartLanes) -> str:
    size = column.lane_bytes
    if any(x % size for interval in column.lanes for x in interval):
        return f"bytes {_numbers(column.lanes)}"
    return f"lanes {_numbers((lo // size, hi // size) for lo, hi in column.lanes)}"


def _tokens(range_: Range) -> str:
    """Which tokens a rank has, if ranks deal them."""
    if range_.cp_size == 1:
        return ""
    begin = f" from token {range_.origin}" if range_.origin else ""
    deal = ""
    if range_.order is not None:
        deal = f", dealt {', '.join(map(str, range_.order[:_RUNS]))}" + ", ..." * (len(range_.order) > _RUNS)
    return f"; token share {range_.cp_rank} of {range_.cp_size}, runs of {range_.interleave}{begin}{deal}"


def _numbers(intervals: Iterable[tuple[int, int]]) -> str:
    """Intervals as text: `0-3, 5`, or `0-60 by 4` for every fourth number."""
    spans = list(intervals)
    starts = [lo for lo, _ in spans]
    steps = {b - a for a, b in pairwise(starts)}
    if len(spans) > 2 and len(steps) == 1 and all(hi - lo == 1 for lo, hi in spans):
        return f"{starts[0]}-{starts[-1]} by {steps.pop()}"
    return ", ".join(str(lo) if hi - lo == 1 else f"{lo}-{hi - 1}" for lo, hi in spans)
