"""Testee: the planner of the core, for one cp rank and plain bytes, in plain Python (spec/v1/model.md, planning.md).

    kvproto-conformance run -- python planner.py

What needs Token deals, or Sections and encodings, is refused by LAYOUT_UNSUPPORTED. The codec is the suite's: bring
your own in its place. Descriptions are in their JSON form, in which numbers are text.
"""

import hashlib
import json
import sys
from collections import defaultdict
from itertools import pairwise
from typing import Any

from kvproto_conformance.codec import Refusal, read_struct, write_struct
from kvproto_conformance.codec.facts import LIMITS, OPTIONAL, PART_NAMES

Json = dict[str, Any]
HELLO = {"driver": 1, "name": "planner.py", "version": "1", "language": "python", "role": "planner", "level": "L2"}
REGISTERED = {alias: name for name, aliases in PART_NAMES.items() for alias in (name, *aliases)}


def need(good: bool, path: str, code: str = "BAD_GEOMETRY") -> None:
    if not good:
        raise Refusal(code, path)


# ---- a Description: the table of model.md ----


def check(side: Json) -> None:
    """Refuse what is wrong with a Description, or not supported."""
    need(len(write_struct("Geometry", side)) <= LIMITS["max_geometry"], "geometry")
    for i, group in enumerate(side["groups"]):
        need(group["cp_size"] == "1", f"groups[{i}].cp_size", "LAYOUT_UNSUPPORTED")
        for j, part in enumerate(group["parts"]):
            for field in ("encoding", "at", "whole"):
                need(field not in part, f"groups[{i}].parts[{j}].{field}", "LAYOUT_UNSUPPORTED")
    claims = [sum(len(share["layers"]) * len(share["lanes"]) for share in rank["owns"]) for rank in side["ranks"]]
    need(sum(len(group["parts"]) for group in side["groups"]) <= LIMITS["max_parts"], "groups")
    need(sum(len(group.get("order", ())) for group in side["groups"]) <= LIMITS["max_runs"], "groups")
    need(len(claims) <= LIMITS["max_ranks"] and sum(claims) <= LIMITS["max_claims"], "ranks")
    need(max(claims) <= LIMITS["max_rank_claims"], "ranks")
    for i, group in enumerate(side["groups"]):
        check_group(group, f"groups[{i}]")
    groups, homes = {group["id"]: group for group in side["groups"]}, dict[tuple[str, str, str], str]()
    for i, rank in enumerate(side["ranks"]):
        for j, share in enumerate(rank["owns"]):
            at = f"ranks[{i}].owns[{j}]"
            need(share["group"] in groups, f"{at}.group")
            group = groups[share["group"]]
            check_share(group, share, at)
            for key in [(group["model"], part["name"], layer) for part in group["parts"] for layer in share["layers"]]:
                need(homes.setdefault(key, group["id"]) == group["id"], f"{at}.layers")
            need(len(homes) <= LIMITS["max_layers"], f"{at}.layers")


def check_group(group: Json, at: str) -> None:
    parts, handoff = group["parts"], group["kind"] == "HANDOFF"
    for j, part in enumerate(parts):
        first = next(other for other in parts if other["name"] == part["name"])
        for field, key in (("dtype", "dtype"), ("lanes", "lanes"), ("whole", "lane_bytes")):
            need(part[key] == first[key], f"{at}.parts[{j}].{field}")
        need(part is first, f"{at}.parts[{j}].at")
    plain = group["model"] == "0" and group["rows"] == group["tokens_per_row"] == "1"
    need(not handoff or (plain and all(part["lanes"] == "1" for part in parts)), f"{at}.kind")
    need(not group.get("partial") or group["kind"] in ("PAGE", "RING"), f"{at}.partial")
    need(len({REGISTERED.get(part["name"], part["name"]) for part in parts}) == len(parts), f"{at}.parts")


def check_share(group: Json, share: Json, at: str) -> None:
    need(group["kind"] != "HANDOFF" or share["layers"] == ["0"], f"{at}.layers")
    need(share["cp_rank"] == "0", f"{at}.cp_rank")
    spans = [[int(span[field]) for field in ("part", "lo", "hi")] for span in share["lanes"]]
    for k, (part, _, hi) in enumerate(spans):
        need(part < len(group["parts"]), f"{at}.lanes[{k}].part")
        need(hi <= int(group["parts"][part]["lanes"]), f"{at}.lanes[{k}].hi")
    apart = all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(sorted(spans)))
    need(apart and len({span[0] for span in spans}) == len(group["parts"]), f"{at}.lanes")


# ---- a plan: the steps of planning.md ----

Owners = list[tuple[int, int, int]]
"""Rank, first byte and byte after the last, of each interval of a part in one layer."""
Piece = tuple[Json, int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""Sink group, layer, index of the part, bytes [lo, hi), candidates and needy ranks."""


def plan(source: Json, sink: Json) -> Json:
    """The answer to a question about two Descriptions."""
    for side in (source, sink):
        check(side)
    compare_facts(source, sink)
    theirs, ours, pieces, counted = owned(source), owned(sink), list[Piece](), 0
    for group in sink["groups"]:
        for index, part in enumerate(group["parts"]):
            at, layers, held = f"groups[{group['name']}].parts[{part['name']}]", [], theirs.get(key_of(group, part), {})
            for layer, (home, needy) in sorted(ours.get(key_of(group, part), {}).items()):
                if home is group:
                    need(bool(held), at, "PART_MISSING")
                    need(layer in held, at, "LAYER_MISSING")
                    size = compare(held[layer][0], group, part, at)
                    layers.append((layer, held[layer][1], needy))
                    counted += count(held[layer][1] + needy, size)
            need(counted <= LIMITS["max_pieces"], at, "TOO_LARGE")
            for layer, owners, needy in layers:
                pieces += [(group, layer, index, *piece) for piece in cut(owners, needy, at)]
    for group in sink["groups"]:
        for part in group["parts"]:
            for layer in [n for n, (home, _) in ours.get(key_of(group, part), {}).items() if home is group]:
                at = f"groups[{group['name']}].parts[{part['name']}]"
                need(not left(theirs, ours, group, part, layer, sink.get("without", ())), at, "PART_MISSING")
    return answer(join(pieces, elect(pieces, int(sink["replica"])), int(sink["replica"])), sink)


def compare_facts(source: Json, sink: Json) -> None:
    mine, yours = ({fact["name"]: fact for fact in side["facts"]} for side in (source, sink))
    for name in sorted(mine | yours, key=str.encode):
        rules = {side[name]["rule"] for side in (mine, yours) if name in side}
        same = name in mine and name in yours and mine[name]["value"] == yours[name]["value"]
        need(same or "EQUAL" not in rules, f"facts[{name}]", "IDENTITY_MISMATCH")


def key_of(group: Json, part: Json) -> tuple[str, str]:
    return group["model"], part["name"]


def owned(side: Json) -> dict[tuple[str, str], dict[int, tuple[Json, Owners]]]:
    """By model and part name, and by layer: its group, and who owns which bytes."""
    groups = {group["id"]: group for group in side["groups"]}
    found: Any = defaultdict(dict)
    for rank in side["ranks"]:
        for share in rank["owns"]:
            group = groups[share["group"]]
            for span in share["lanes"]:
                part = group["parts"][int(span["part"])]
                lo, hi = (int(span[end]) * int(part["lane_bytes"]) for end in ("lo", "hi"))
                for layer in map(int, share["layers"]):
                    found[key_of(group, part)].setdefault(layer, (group, []))[1].append((int(rank["rank"]), lo, hi))
    return found


def compare(src: Json, dst: Json, part: Json, at: str) -> int:
    """Refuse a pair that does not fit; else the bytes of the smaller lanes, or 0 where lanes are alike."""
    other, group = next(p for p in src["parts"] if p["name"] == part["name"]), f"groups[{dst['name']}]"
    sizes = sorted(int(p["lane_bytes"]) for p in (other, part))
    wholes = {int(p["lane_bytes"]) * int(p["lanes"]) for p in (other, part)}
    live = [g["kind"] == "SLOT" and g.get("live_rows", g["rows"]) for g in (src, dst)]
    need(src["kind"] == dst["kind"] or {src["kind"], dst["kind"]} == {"PAGE", "RING"}, f"{group}.kind", "KIND_MISMATCH")
    need(src.get("axis", "tokens") == dst.get("axis", "tokens"), f"{group}.axis", "AXIS_MISMATCH")
    need(other["dtype"] == part["dtype"], f"{at}.dtype", "DTYPE_MISMATCH")
    need(len(wholes) == 1, f"{at}.lanes", "LANE_MISMATCH")
    need(src["tokens_per_row"] == dst["tokens_per_row"], f"{group}.tokens_per_row", "ROW_MISMATCH")
    need(live[0] == live[1], f"{group}.live_rows", "ROW_MISMATCH")
    need(src.get("partial", False) == dst.get("partial", False), f"{group}.partial", "ROW_MISMATCH")
    need(sizes[1] % sizes[0] == 0, f"{at}.lane_bytes", "LANE_MISMATCH")
    return sizes[0] if sizes[0] < sizes[1] else 0


def bounds(owners: Owners) -> dict[int, int]:
    """Bounds of intervals, ascending, each with its place."""
    return {byte: i for i, byte in enumerate(sorted({byte for _, lo, hi in owners for byte in (lo, hi)}))}


def count(owners: Owners, size: int) -> int:
    """The pieces of all intervals of one layer, and the smaller lanes in them (KVP-PLAN-SIZE)."""
    place = bounds(owners)
    return sum(place[hi] - place[lo] + (size and (hi - lo) // size) for _, lo, hi in owners)


def cut(owners: Owners, needy: Owners, at: str) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    place = bounds(owners + needy)
    have, want = ([set[int]() for _ in place] for _ in range(2))
    for ranks, side in ((have, owners), (want, needy)):
        for rank, lo, hi in side:
            for i in range(place[lo], place[hi]):
                ranks[i].add(rank)
    need(all(have[i] for i, ranks in enumerate(want) if ranks), at, "COVERAGE")
    spans = pairwise(place)
    return [(*span, tuple(sorted(a)), tuple(sorted(b))) for span, a, b in zip(spans, have, want, strict=False) if b]


def left(theirs: Json, ours: Json, group: Json, part: Json, layer: int, without: Any) -> bool:
    """Whether the sink leaves out a part of a layer of which it takes this one (KVP-PLAN-LEFT)."""
    if group["kind"] == "HANDOFF" or REGISTERED.get(part["name"]) in OPTIONAL:
        return False
    return any(
        model == group["model"]
        and layer in layers
        and layers[layer][0]["kind"] != "HANDOFF"
        and layer not in ours.get((model, name), {})
        and REGISTERED.get(name) not in OPTIONAL
        and name not in without
        for (model, name), layers in theirs.items()
    )


def elect(pieces: list[Piece], ordinal: int) -> list[list[int]]:
    """For each piece the source of each of its needy ranks."""
    entries: Any = defaultdict(set)
    for group, layer, _, _, _, candidates, needy in pieces:
        if len(needy) < len(candidates):
            entries[candidates].add((int(group["id"]), layer, needy))
    first = {}
    for candidates, some in entries.items():
        units = 0
        for entry in sorted(some):
            first[candidates, entry] = units
            units += len(entry[2])
    found = []
    for group, layer, _, _, _, candidates, needy in pieces:
        c, m, unit = len(candidates), len(needy), first.get((candidates, (int(group["id"]), layer, needy)))
        places = [j * c // m if unit is None else (unit + j + ordinal) % c for j in range(m)]
        found.append([candidates[place] for place in places])
    return found


def join(pieces: list[Piece], elected: list[list[int]], ordinal: int) -> list[tuple[int, ...]]:
    """The boxes, as rows of the digest, ascending: first bytes that touch are joined, then layers."""
    cells: Any = defaultdict(lambda: defaultdict(list))
    for (group, layer, index, lo, hi, _, needy), sources in zip(pieces, elected, strict=True):
        for source, sink in zip(sources, needy, strict=True):
            cells[source, sink, int(group["id"]), int(group["model"]), index][layer].append((lo, hi))
    rows: list[list[int]] = []
    for (*who, index), layers in cells.items():
        open_: dict[tuple[int, int], list[int]] = {}
        for layer in sorted(layers):
            spans: list[list[int]] = []
            for lo, hi in sorted(layers[layer]):
                if spans and spans[-1][1] == lo:
                    spans[-1][1] = hi
                else:
                    spans.append([lo, hi])
            for lo, hi in spans:
                if (row := open_.get((lo, hi))) and row[5] == layer:
                    row[5] = layer + 1
                else:
                    open_[lo, hi] = [*who, layer, layer + 1, index, lo, hi, 0, 0, ordinal]
                    rows.append(open_[lo, hi])
    return sorted(map(tuple, rows))


# ---- the testee ----


def digest(rows: list[tuple[int, ...]]) -> str:
    return hashlib.sha256(b"".join(number.to_bytes(8, "little") for row in rows for number in row)).hexdigest()


def answer(rows: list[tuple[int, ...]], sink: Json) -> Json:
    routes: Any = defaultdict(list)
    for row in rows:
        routes[row[:3]].append(row)
    return {
        "plan": digest(rows),
        "routes": [
            {"source": str(a), "sink": str(b), "group": str(g), "digest": digest(some)}
            for (a, b, g), some in routes.items()
        ],
        "required": {
            rank["rank"]: [str(a) for a in sorted({a for a, b, _ in routes if str(b) == rank["rank"]})]
            for rank in sink["ranks"]
        },
        "cold": [],
    }


OPS = {
    "hello": lambda q: HELLO,
    "decode_struct": lambda q: {"fields": read_struct(q["struct"], bytes.fromhex(q["bytes"]))},
    "encode_struct": lambda q: {"bytes": write_struct(q["struct"], q["fields"]).hex()},
    "plan": lambda q: plan(q["source"], q["sink"]),
}


def answered(question: Json) -> Json:
    if question["op"] not in OPS or question.get("struct", "Geometry") != "Geometry" or "message" in question:
        return {"unsupported": True}
    try:
        return OPS[question["op"]](question)
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}


for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "stop":
        break
    print(json.dumps({"seq": asked["seq"], **answered(asked)}), flush=True)
