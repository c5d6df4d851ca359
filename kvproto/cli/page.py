"""The picture of a plan: one self-contained page, the rank matrix, and layers, lanes and tokens on click."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files

from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan

__all__ = ["page"]


def page(
    source: Geometry,
    sink: Geometry,
    made: Plan,
    moved: Mapping[tuple[int, int], int],
    letters: Mapping[int, str],
    tokens: int,
) -> str:
    """HTML; `moved` is bytes by rank pair, for `tokens` tokens."""
    theirs = {g.id: g for g in source.groups}
    home = {r.group: theirs[b.source_group] for r in made.routes for b in r.boxes}
    groups = [
        {
            "id": g.id, "name": g.name, "letter": letters[g.id],
            "parts": [{"name": p.name, "lanes": p.lanes, "lane_bytes": p.lane_bytes} for p in g.parts],
            "sink_cp": g.cp_size, "sink_run": g.interleave, "source_cp": home[g.id].cp_size if g.id in home else 1,
            "source_run": home[g.id].interleave if g.id in home else 1,
        }
        for g in sink.groups
    ]  # fmt: skip
    fields = ("layer_lo", "layer_hi", "part", "lo", "hi", "source_class", "sink_class")
    boxes = [
        {"source": r.source, "sink": r.sink, "group": r.group} | {f: getattr(b, f) for f in fields}
        for r in made.routes
        for b in r.boxes
    ]
    data = {
        "digest": made.digest.hex(), "tokens": tokens, "groups": groups, "sources": [r.rank for r in source.ranks],
        "sinks": [r.rank for r in sink.ranks], "boxes": boxes, "bytes": {f"{a},{b}": n for (a, b), n in moved.items()},
    }  # fmt: skip
    text = json.dumps(data).replace("<", "\\u003c")  # names are the user's: nothing of them ends the script
    return files("kvproto.cli").joinpath("page.html").read_text().replace("/*data*/null", text)
