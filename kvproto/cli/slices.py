"""The slices of a plan as text and as data: `kvproto plan --slices`, its JSON, and the tables of its page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from kvproto.planning.deals import owner
from kvproto.planning.geometry import Geometry, Group, lane_bytes
from kvproto.planning.plan import Plan
from kvproto.planning.slices import PartLanes, Range, Slice, slices

__all__ = ["HEAD", "aligned", "as_json", "page", "row", "table"]

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


_TOKENS = 48
"""The number of tokens that are drawn of a deal."""


def page(
    source: Geometry,
    sink: Geometry,
    agreed: Plan,
    moved: Mapping[tuple[int, int], int],
    letters: Mapping[int, str],
    tokens: int,
) -> str:
    """The page as HTML; `moved` holds the bytes of each (source, sink) rank pair for `tokens` tokens."""
    theirs = {g.id: g for g in source.groups}
    home = {r.group: theirs[b.source_group] for r in agreed.routes for b in r.boxes}
    whole = {g.id: [i for i, p in enumerate(g.parts) if not p.at] for g in sink.groups}  # not each section
    groups = []
    for g in sink.groups:
        parts = [{"name": p.name, "lanes": p.lanes, "lane_bytes": lane_bytes(p)} for p in g.parts if not p.at]
        classes = {"source_cp": home.get(g.id, g).cp_size, "sink_cp": g.cp_size}
        named = {"id": g.id, "name": g.name, "letter": letters[g.id], "parts": parts}
        groups.append(named | classes | {"owners": _owners(home.get(g.id, g), g)})
    fields = ("layer_lo", "layer_hi", "part", "lo", "hi", "source_class", "sink_class")
    boxes = [
        {"source": r.source, "sink": r.sink, "group": r.group}
        | {f: getattr(b, f) for f in fields}
        | {"part": whole[r.group].index(b.part)}
        for r in agreed.routes
        for b in r.boxes
    ]
    data = {
        "digest": agreed.digest.hex(),
        "tokens": tokens,
        "groups": groups,
        "sources": [r.rank for r in source.ranks],
        "sinks": [r.rank for r in sink.ranks],
        "boxes": boxes,
        "bytes": {f"{a},{b}": n for (a, b), n in moved.items()},
        "ranges": HEAD,
        "slices": [{"sink": s.sink, "source": s.source, "row": row(s)} for s in slices(source, sink, agreed)],
    }
    text = json.dumps(data).replace("<", "\\u003c")  # so that no name of the user can end the script
    return files("kvproto.cli").joinpath("page.html").read_text().replace("/*data*/null", text)


def _owners(source: Group, sink: Group) -> list[tuple[int, int]]:
    """The cp ranks of the source and the sink that own the first tokens which both have dealt."""
    dealt = [g for g in (source, sink) if g.cp_size > 1]
    first = max((g.origin // g.tokens_per_row for g in dealt), default=0)
    rows = first + np.arange(_TOKENS if dealt else 0, dtype=np.int64) // sink.tokens_per_row
    return list(zip(owner(source, rows).tolist(), owner(sink, rows).tolist(), strict=True))
