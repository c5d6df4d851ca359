"""The picture of a plan as one self-contained HTML page: the rank matrix, with layers, lanes and tokens on a click."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files

import numpy as np

from kvproto.cli.slices import HEAD, row
from kvproto.planning.deals import owner
from kvproto.planning.geometry import Geometry, Group, lane_bytes
from kvproto.planning.plan import Plan
from kvproto.planning.slices import slices

__all__ = ["page"]

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
