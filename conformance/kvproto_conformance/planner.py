"""The suite's own planner: planning.md word by word, over the JSON form of two Geometries; slow.

It shares no code with kvproto: it goes layer by layer and cut by cut and joins at the end, where kvproto works with
intervals of layers. Both must find the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from math import lcm
from typing import Any

from kvproto_conformance.checking import check
from kvproto_conformance.codec import Refusal
from kvproto_conformance.codec.facts import LIMITS, OPTIONAL, PART_NAMES
from kvproto_conformance.conversion import converted, same_scales
from kvproto_conformance.electing import Piece, elect
from kvproto_conformance.sections import lane, place

Json = dict[str, Any]
Row = tuple[int, ...]
_STRICTNESS = {"EQUAL": 0, "WARN": 1, "IGNORE": 2}


def plan(source: Json, sink: Json, features: Iterable[str] = ()) -> Json:
    """Digests, routes and required responses; raises Refusal with the code and path of what does not fit."""
    rows, cold = _planned(source, sink, features)
    routes: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        routes[row[0], row[1], row[2]].append(row)
    required = {int(r["rank"]): sorted({a for a, b, _ in routes if b == int(r["rank"])}) for r in sink["ranks"]}
    return {
        "plan": _digest(rows),
        "routes": [
            {"source": str(a), "sink": str(b), "group": str(g), "digest": _digest(routes[a, b, g])}
            for a, b, g in sorted(routes)
        ],
        "required": {str(rank): [str(a) for a in ranks] for rank, ranks in required.items()},
        "cold": sorted(cold),
    }  # fmt: skip


def boxes(source: Json, sink: Json, features: Iterable[str] = ()) -> list[Row]:
    """All boxes, as rows of the digest; raises Refusal."""
    return sorted(_planned(source, sink, features)[0])


def _planned(source: Json, sink: Json, features: Iterable[str]) -> tuple[list[Row], set[str]]:
    """All boxes, as rows of the digest, and the models that start cold."""
    for side in (source, sink):
        check(side)
    _facts(source, sink)
    if "CONVERT" in features:
        source = converted(source, sink)
    cold: set[str] = set()
    if "COLD_DRAFT" in features:
        cold = _models(sink) - _models(source) - {"0"}
    pieces: list[Piece] = []
    spent = _Spent(set(), 0, 0)
    for group in sink["groups"]:
        if group["model"] not in cold:
            names = [p["name"] for p in group["parts"]]
            for index in [i for i, name in enumerate(names) if name not in names[:i]]:
                pieces += _part(source, sink, group, index, spent)
    for group in sink["groups"]:
        if group["model"] not in cold:
            _left(source, sink, group)
    return _rows(pieces, elect(pieces, int(sink["replica"]), features), sink), cold


def _facts(source: Json, sink: Json) -> None:
    mine, yours = ({f["name"]: f for f in side["facts"]} for side in (source, sink))
    for name in sorted(mine.keys() | yours.keys(), key=str.encode):
        both = [f for f in (mine.get(name), yours.get(name)) if f is not None]
        rule = min((f["rule"] for f in both), key=_STRICTNESS.__getitem__)
        if rule == "EQUAL" and len({f["value"] for f in both}) + (2 - len(both)) > 1:
            raise Refusal("IDENTITY_MISMATCH", f"facts[{name}]")


def _owners(
    side: Json, model: str, part: str, layer: int, group_id: str | None = None
) -> list[tuple[int, Json, int, int, int]]:
    """(rank, group, first byte, byte after the last, cp rank) of every interval of a layer and part."""
    groups = {g["id"]: g for g in side["groups"]}
    found = []
    for rank in side["ranks"]:
        for share in rank["owns"]:
            group = groups[share["group"]]
            if group["model"] != model or str(layer) not in share["layers"] or (group_id or group["id"]) != group["id"]:
                continue
            for span in share["lanes"]:
                stated = group["parts"][int(span["part"])]
                if stated["name"] == part:
                    for first, end in _bytes(stated, int(span["lo"]), int(span["hi"])):
                        found.append((int(rank["rank"]), group, first, end, int(share["cp_rank"])))
    return found


def _left(source: Json, sink: Json, group: Json) -> None:
    """KVP-PLAN-LEFT: of each layer of which the sink takes something, it takes all that the source has."""
    if group["kind"] == "HANDOFF":
        return
    optional = {word for name in OPTIONAL for word in (name, *PART_NAMES[name])}
    names = {p["name"] for g in source["groups"] if g["model"] == group["model"] for p in g["parts"]}
    names -= optional | {*sink.get("without", ())}

    def is_left(name: str, layer: int) -> bool:
        owners = _owners(source, group["model"], name, layer)
        held = any(owner[1]["kind"] != "HANDOFF" for owner in owners)
        return held and not _owners(sink, group["model"], name, layer)

    layers = {int(x) for r in sink["ranks"] for s in r["owns"] if s["group"] == group["id"] for x in s["layers"]}
    layers = {layer for layer in layers if any(is_left(name, layer) for name in names)}
    for part in (p["name"] for p in group["parts"] if p["name"] not in optional):
        if any(_owners(sink, group["model"], part, layer, group["id"]) for layer in layers):
            raise Refusal("PART_MISSING", f"groups[{group['name']}].parts[{part}]")


def _models(side: Json) -> set[str]:
    """Models of which some rank owns something."""
    return {g["model"] for g in side["groups"] if _held(side, g)}


def _bytes(part: Json, lo: int, hi: int) -> list[tuple[int, int]]:
    """The place of lanes [lo, hi) on the lane axis: side by side, or, of a section, a bit of each lane."""
    size = int(part["lane_bytes"])
    return [(lo * size, hi * size)] if lane(part) == size else [place(part, number) for number in range(lo, hi)]


def _part(source: Json, sink: Json, group: Json, index: int, spent: _Spent) -> list[Piece]:
    """The pieces of one part of one group of the sink, each of one layer; `spent` counts what was looked at."""
    part, model = group["parts"][index]["name"], group["model"]
    at = f"groups[{group['name']}]"
    layers = sorted(
        {int(x) for r in sink["ranks"] for s in r["owns"] if s["group"] == group["id"] for x in s["layers"]}
    )
    known = any(
        g["model"] == model and p["name"] == part and _held(source, g) for g in source["groups"] for p in g["parts"]
    )
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for layer in layers:
        owners = _owners(source, model, part, layer), _owners(sink, model, part, layer, group["id"])
        alike[tuple(tuple((o[0], o[1]["id"], *o[2:]) for o in side) for side in owners)].append(layer)
    families: list[tuple[list[int], list[Owner], list[Owner]]] = []
    for some_layers in alike.values():
        first = some_layers[0]
        have, want = _owners(source, model, part, first), _owners(sink, model, part, first, group["id"])
        if not have:
            raise Refusal("LAYER_MISSING" if known else "PART_MISSING", f"{at}.parts[{part}]")
        theirs = next(p for p in have[0][1]["parts"] if p["name"] == part)
        _compare(have[0][1], group, part, at)
        if not same_scales(theirs, group["parts"][index], some_layers):
            raise Refusal("DTYPE_MISMATCH", f"{at}.parts[{part}].x_scales")
        _meet(have[0][1], group, f"{at}.parts[{part}]", at, spent)
        made = _families(have, want, group["parts"][index].get("encoding"), at, part)
        families += [(some_layers, *family) for family in made]
    for some_layers, have, want in families:
        spent.pieces += _size(have, want, group["parts"][index], at) * len(some_layers)
    if spent.pieces > LIMITS["max_pieces"]:
        raise Refusal("TOO_LARGE", f"{at}.parts[{part}]")
    return [p for some, have, want in families for layer in some for p in _cut(have, want, layer, group, index, at)]


Owner = tuple[int, Json, int, int, int]


def _rows(pieces: list[Piece], elected: list[dict[int, int]], sink: Json) -> list[Row]:
    """The boxes of all pieces, as rows of the digest."""
    models = {int(g["id"]): int(g["model"]) for g in sink["groups"]}
    cells: dict[Row, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for piece, sources in zip(pieces, elected, strict=True):
        for rank, chosen in sources.items():
            key = chosen, rank, piece.group, models[piece.group], piece.part, piece.c, piece.d
            cells[key][piece.layer].append((piece.lo, piece.hi))
    rows: list[Row] = []
    for (a, b, group, model, index, c, d), spans in cells.items():
        for first, last, lo, hi in _join(spans):
            rows.append((a, b, group, model, first, last, index, lo, hi, c, d, int(sink["replica"])))
    return rows


def _families(
    have: list[Owner], want: list[Owner], encoding: str | None, at: str, part: str
) -> list[tuple[list[Owner], list[Owner]]]:
    """Owners who may read from each other: all, or, if the bytes are opaque, those with the very same intervals."""
    if not encoding:
        return [(have, want)]

    def spans(owners: list[Owner], rank: int) -> tuple[tuple[int, int], ...]:
        return tuple((o[2], o[3]) for o in owners if o[0] == rank)

    found = []
    for kind in sorted({spans(want, o[0]) for o in want}):
        some = [o for o in have if spans(have, o[0]) == kind]
        if not some:
            raise Refusal("LAYOUT_OPAQUE", f"{at}.parts[{part}]")
        found.append((some, [o for o in want if spans(want, o[0]) == kind]))
    return found


@dataclasses.dataclass
class _Spent:
    """Counts of KVP-PLAN-RUNS and KVP-PLAN-SIZE so far."""

    met: set[tuple[str, str]]
    """Pairs of groups whose runs are counted."""
    runs: int
    pieces: int


def _meet(src: Json, dst: Json, part: str, at: str, spent: _Spent) -> None:
    """The runs of both deals, once for a pair of groups."""
    if int(src["cp_size"]) * int(dst["cp_size"]) > LIMITS["max_class_pairs"]:
        raise Refusal("ROW_MISMATCH", f"{at}.cp_size")
    if (src["id"], dst["id"]) not in spent.met:
        spent.met.add((src["id"], dst["id"]))
        spent.runs += sum(len(_order(g)) for g in (src, dst) if g["cp_size"] != "1")
    if spent.runs > LIMITS["max_runs"]:
        raise Refusal("TOO_LARGE", part)


def _size(have: list[Owner], want: list[Owner], part: Json, at: str) -> int:
    """Number of pieces of the intervals of both sides in one layer."""
    src, dst = have[0][1], want[0][1]
    theirs = next(p for p in src["parts"] if p["name"] == part["name"])
    sizes = sorted((lane(theirs), lane(part)))
    cuts = sorted({x for o in have + want for x in o[2:4]})
    classes, number = _classes(src, dst, at), 0
    for side, owners in enumerate((have, want)):
        met = Counter(pair[side] for pair in classes)
        for _, _, lo, hi, cp_rank in owners:
            lanes = len(range(lo - lo % sizes[0], hi, sizes[0])) if sizes[0] < sizes[1] else 0
            number += (bisect_left(cuts, hi) - bisect_left(cuts, lo) + lanes) * met[cp_rank]
    return number


def _cut(have: list[Owner], want: list[Owner], layer: int, group: Json, index: int, at: str) -> list[Piece]:
    """One layer cut wherever an interval of either side begins or ends, for each pair of token classes."""
    cuts = sorted({x for o in have + want for x in o[2:4]})
    pieces = []
    for lo, hi in zip(cuts, cuts[1:], strict=False):
        for c, d in _classes(have[0][1], group, at):
            candidates = tuple(sorted({o[0] for o in have if o[2] <= lo and hi <= o[3] and o[4] == c}))
            needy = tuple(sorted({o[0] for o in want if o[2] <= lo and hi <= o[3] and o[4] == d}))
            if needy and not candidates:
                raise Refusal("COVERAGE", f"{at}.parts[{group['parts'][index]['name']}]")
            if needy:
                pieces.append(Piece(int(group["id"]), layer, index, lo, hi, c, d, candidates, needy))
    return pieces


def _held(side: Json, group: Json) -> bool:
    return any(s["group"] == group["id"] for r in side["ranks"] for s in r["owns"])


def _compare(src: Json, dst: Json, part: str, at: str) -> None:
    a, b = (next(p for p in g["parts"] if p["name"] == part) for g in (src, dst))
    live = [(g.get("live_rows") or g["rows"]) if g["kind"] == "SLOT" else None for g in (src, dst)]
    sizes = lane(a), lane(b)
    whole = [
        (g["rows"], p["lane_bytes"] if a.get("encoding") else None, g["cp_size"])
        + ((g["interleave"], g["origin"], _order(g)) if g["cp_size"] != "1" else ())
        for g, p in ((src, a), (dst, b))
    ]
    both = set() if any(p.get("encoding") for p in dst["parts"]) else {"PAGE", "RING"}
    for code, path, same in (
        ("KIND_MISMATCH", f"{at}.kind", src["kind"] == dst["kind"] or {src["kind"], dst["kind"]} == both),
        ("AXIS_MISMATCH", f"{at}.axis", src.get("axis", "tokens") == dst.get("axis", "tokens")),
        ("DTYPE_MISMATCH", f"{at}.parts[{part}].dtype", a["dtype"] == b["dtype"]),
        ("LANE_MISMATCH", f"{at}.parts[{part}].lanes", int(a["lanes"]) * sizes[0] == int(b["lanes"]) * sizes[1]),
        ("ROW_MISMATCH", f"{at}.tokens_per_row", src["tokens_per_row"] == dst["tokens_per_row"]),
        ("ROW_MISMATCH", f"{at}.live_rows", live[0] == live[1]),
        ("ROW_MISMATCH", f"{at}.partial", src.get("partial", False) == dst.get("partial", False)),
        ("LAYOUT_OPAQUE", f"{at}.parts[{part}].encoding", a.get("encoding") == b.get("encoding")),
        ("LANE_MISMATCH", f"{at}.parts[{part}].lane_bytes", max(sizes) % min(sizes) == 0),
        ("LAYOUT_OPAQUE", f"{at}.rows", not any(p.get("encoding") for p in dst["parts"]) or whole[0] == whole[1]),
    ):
        if not same:
            raise Refusal(code, path)


def _classes(src: Json, dst: Json, at: str) -> list[tuple[int, int]]:
    """Pairs of cp ranks that share a row, found row by row over one period of both deals."""
    if src["cp_size"] == dst["cp_size"] == "1":
        return [(0, 0)]
    step = int(src["tokens_per_row"])
    deals = []
    for g in (src, dst):
        dealt = g["cp_size"] != "1"
        deals.append((int(g["cp_size"]), int(g["interleave"]) // step if dealt else 1, int(g["origin"]) // step))
    orders = [_order(g) for g in (src, dst)]
    period = lcm(*(len(order) * run for order, (_, run, _) in zip(orders, deals, strict=True)))
    start = max(origin for _, _, origin in deals)
    (a, b), ((_, run, origin), (_, other_run, other_origin)) = orders, deals
    return sorted(
        {
            (a[(row - origin) // run % len(a)], b[(row - other_origin) // other_run % len(b)])
            for row in range(start, start + period)
        }
    )


def _order(group: Json) -> list[int]:
    """cp rank of each run of a deal, until they repeat."""
    if group["cp_size"] == "1":
        return [0]
    return [int(rank) for rank in group.get("order", range(int(group["cp_size"])))]


def _join(spans: dict[int, list[tuple[int, int]]]) -> list[tuple[int, int, int, int]]:
    """Per layer the longest lane intervals, then the longest runs of layers of one interval."""
    layers_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for layer in sorted(spans):
        joined: list[list[int]] = []
        for lo, hi in sorted(spans[layer]):
            if joined and joined[-1][1] == lo:
                joined[-1][1] = hi
            else:
                joined.append([lo, hi])
        for lo, hi in joined:
            layers_of[lo, hi].append(layer)
    found = []
    for (lo, hi), layers in layers_of.items():
        for layer in layers:
            if layer - 1 not in layers:
                last = layer
                while last + 1 in layers:
                    last += 1
                found.append((layer, last + 1, lo, hi))
    return found


def _digest(rows: list[Row]) -> str:
    return hashlib.sha256(b"".join(n.to_bytes(8, "little") for row in sorted(rows) for n in row)).hexdigest()
