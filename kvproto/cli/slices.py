"""A plan as slices, as text and data: which range of each global cache a rank gets, and where both sides hold it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from kvproto.copying.program import RankLayout
from kvproto.planning.arrays import Intervals, merged_intervals
from kvproto.planning.deals import owner
from kvproto.planning.geometry import Geometry, Group, column_names, lane_bytes
from kvproto.planning.plan import Box, Plan

_RUNS = 16
"""The most entries of a deal's table that are shown."""
HEAD = ("local rank", "cache", "remote rank", "global range", "local range", "remote range")


def as_json(of_plan: Iterable[Slice]) -> list[dict[str, Any]]:
    """One object per slice; intervals are [lo, hi), lanes in bytes."""
    return [attrs.asdict(one) | {"text": dict(zip(HEAD, row(one), strict=True))} for one in of_plan]


def table(of_plan: Iterable[Slice]) -> Iterator[str]:
    """One line per slice, in columns; the sink's ranks are local, the source's remote."""
    return aligned([HEAD, *map(row, of_plan)])


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
    """The tokens that a rank has, if ranks deal them."""
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


@attrs.frozen
class PartLanes:
    """Lanes of a part, or of one of its sections."""

    name: str
    """The part's name; for a section with its bytes, such as `latent[0:1024]`."""
    lanes: Intervals
    """In bytes along the column's lane axis; on a rank, along its own lanes in the order in which it states them."""
    lane_bytes: int
    """Bytes of one lane on the side that the range belongs to."""


@attrs.frozen
class Range:
    """Intervals, lanes and tokens; layers and lanes as intervals [lo, hi)."""

    layers: Intervals
    columns: tuple[PartLanes, ...]
    """One; several if sections of a part hold the bytes."""
    cp_rank: int = 0
    cp_size: int = 1
    interleave: int = 1
    origin: int = 0
    order: tuple[int, ...] | None = None
    """The cp rank of each run until they repeat; None: in turn."""


@attrs.frozen
class Slice:
    """A range of one part that a sink rank gets from a source rank, with the same lanes in all of its layers."""

    sink: int
    source: int
    cache: str
    """The sink's group and the part, such as `target.latent`."""
    whole: Range
    """The range in the cache of all ranks, in lanes of the sink; of its tokens, those in both sides' shares move."""
    local: Range
    """The range at the sink."""
    remote: Range
    """The range at the source."""


def slices(source: Geometry, sink: Geometry, plan: Plan) -> Iterator[Slice]:
    """The slices of a plan between two Descriptions, by sink rank, cache and source rank."""
    by_range: dict[tuple[int, int, int, int, tuple[int, ...]], list[Box]] = defaultdict(list)
    for route in plan.routes:
        for box in route.boxes:
            alike = box.lo, box.hi, box.source_class, box.sink_class, box.source_group
            by_range[route.sink, route.group, box.part, route.source, alike].append(box)
    sides = [{r.rank: RankLayout(g, r.rank, {}) for r in g.ranks} for g in (source, sink)]
    for (to, group, part, from_, (lo, hi, c, d, home)), boxes in sorted(by_range.items()):
        dst = sides[1][to].groups[group]
        name = dst.parts[part].name
        layers = tuple(merged_intervals(sorted((box.layer_lo, box.layer_hi) for box in boxes)))
        whole = Range(layers, (PartLanes(name, ((lo, hi),), lane_bytes(dst.parts[part])),))
        local = _range(sides[1][to], group, name, layers, lo, hi, d)
        remote = _range(sides[0][from_], home, name, layers, lo, hi, c)
        yield Slice(to, from_, f"{dst.name}.{name}", whole, local, remote)


def _range(rank: RankLayout, group: int, part: str, layers: Intervals, lo: int, hi: int, cp_rank: int) -> Range:
    """The place of bytes [lo, hi) of global layers on a rank, by its own layers and lanes, counted from 0."""
    share, stated = rank.shares[group], rank.groups[group]
    columns = [
        PartLanes(name, lanes, p.lane_bytes)
        for i, (name, p) in enumerate(zip(column_names(stated), stated.parts, strict=True))
        if p.name == part and (lanes := _own(rank, group, i, lo, hi))
    ]
    ends = ((int(np.searchsorted(share.layers, a)), b - a) for a, b in layers)
    order = None if stated.order is None else tuple(stated.order.tolist())
    local = tuple(merged_intervals((a, a + n) for a, n in ends))
    return Range(local, tuple(columns), cp_rank, stated.cp_size, stated.interleave, stated.origin, order)


def _own(rank: RankLayout, group: int, index: int, lo: int, hi: int) -> Intervals:
    """The part of bytes [lo, hi) of a lane axis that a column holds, in bytes along the rank's own lanes of it."""
    part = rank.groups[group].parts[index]
    whole, size, at = lane_bytes(part), part.lane_bytes, part.at or 0
    held = []
    for begin, end, local in rank.spans(group, index, lo // whole, -(-hi // whole)):
        first, last = max(begin, lo // whole), min(end, -(-hi // whole))
        # adjacent lanes of a whole part are one interval; those of a section are not
        pieces = [(first, last)] if size == whole else [(lane, lane + 1) for lane in range(first, last)]
        for a, b in pieces:
            x, y = max(lo, a * whole + at), min(hi, (b - 1) * whole + at + size)
            if x < y:
                skip = (local + a - begin) * size - a * whole - at
                held.append((x + skip, y + skip))
    return tuple(merged_intervals(sorted(held)))
