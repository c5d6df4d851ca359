"""The suite's own checks of a Description in JSON form, row by row of model.md's table, without the codec's rules."""

from __future__ import annotations

import json
from typing import Any

from kvproto_conformance.codec import Refusal, write_struct
from kvproto_conformance.codec.facts import LIMITS, PART_NAMES
from kvproto_conformance.conversion import check_parts, check_share
from kvproto_conformance.sections import lane

Json = dict[str, Any]


def check(side: Json) -> None:
    """Raise Refusal with the path that the table gives."""
    most = LIMITS["max_geometry"]
    # Text has five characters for a number of an array of u32, which is four bytes at most, and so on: it is longer.
    _need(len(json.dumps(side)) <= most or len(write_struct("Geometry", side)) <= most, "geometry")
    groups = {group["id"]: group for group in side["groups"]}
    _sizes(side, groups)
    for i, group in enumerate(side["groups"]):
        _group(group, f"groups[{i}]")
    homes: dict[tuple[str, str, str], str] = {}
    for i, rank in enumerate(side["ranks"]):
        for j, share in enumerate(rank["owns"]):
            at = f"ranks[{i}].owns[{j}]"
            _need(share["group"] in groups, f"{at}.group")
            group = groups[share["group"]]
            _share(group, share, at)
            held = {(group["model"], part["name"], layer) for part in group["parts"] for layer in share["layers"]}
            _need(all(homes.get(key, group["id"]) == group["id"] for key in held), f"{at}.layers")
            homes |= dict.fromkeys(held, group["id"])
            _need(len(homes) <= LIMITS["max_layers"], f"{at}.layers")


def beyond(*sides: Json) -> Json:
    """Extensions that a row of vectors needs, and where a planner without one refuses them (KVP-GEO-UNSUPPORTED)."""
    found: dict[str, str] = {}
    for side in sides:
        for i, group in enumerate(side["groups"]):
            if group["cp_size"] != "1":
                found.setdefault("deals", f"groups[{i}].cp_size")
            for j, part in enumerate(group["parts"]):
                for field in (name for name in ("encoding", "at", "whole") if name in part):
                    found.setdefault("sections", f"groups[{i}].parts[{j}].{field}")
    rows = [{"extension": name, "path": path} for name, path in found.items()]
    return {"beyond": rows} if rows else {}


def extensions(*sides: Json) -> Json:
    """The same for rows that are not put to whoever lacks one of these extensions."""
    names = [row["extension"] for row in beyond(*sides).get("beyond", ())]
    return {"extensions": names} if names else {}


def _sizes(side: Json, groups: dict[str, Json]) -> None:
    claims = [sum(_claims(groups.get(share["group"]), share) for share in rank["owns"]) for rank in side["ranks"]]
    _need(sum(len(group["parts"]) for group in side["groups"]) <= LIMITS["max_parts"], "groups")
    _need(sum(len(group.get("order", ())) for group in side["groups"]) <= LIMITS["max_runs"], "groups")
    _need(len(side["ranks"]) <= LIMITS["max_ranks"], "ranks")
    _need(sum(claims) <= LIMITS["max_claims"], "ranks")
    _need(max(claims) <= LIMITS["max_rank_claims"], "ranks")


def _claims(group: Json | None, share: Json) -> int:
    """Layers times intervals; each lane of a section counts as an interval."""
    parts = dict(enumerate(group["parts"])) if group else {}
    found = 0
    for span in share["lanes"]:
        part = parts.get(int(span["part"]))
        section = part is not None and lane(part) != int(part["lane_bytes"])
        found += int(span["hi"]) - int(span["lo"]) if section else 1
    return found * len(share["layers"])


def _group(group: Json, at: str) -> None:
    parts, step = group["parts"], int(group["tokens_per_row"])
    _sections(parts, at)
    if group["kind"] == "HANDOFF":
        _need(all(lane(part) == int(part["lane_bytes"]) and part["lanes"] == "1" for part in parts), f"{at}.kind")
        _need((group["model"], group["rows"], step) == ("0", "1", 1), f"{at}.kind")
    _need(not group.get("partial") or group["kind"] in ("PAGE", "RING"), f"{at}.partial")
    check_parts(group, at)
    names = {part["name"] for part in parts}
    _need(all(len(names & {row, *aliases}) < 2 for row, aliases in PART_NAMES.items()), f"{at}.parts")
    if group["cp_size"] == "1":
        return
    whole = int(group["interleave"]) % step == int(group["origin"]) % step == 0
    _need(group["kind"] == "PAGE" and whole, f"{at}.interleave")
    order, ranks = group.get("order"), int(group["cp_size"])
    _need(order is None or {int(rank) for rank in order} == set(range(ranks)), f"{at}.order")
    turn = (ranks if order is None else len(order)) * int(group["interleave"])
    _need(turn <= LIMITS["max_deal"], f"{at}.cp_size" if order is None else f"{at}.order")


def _sections(parts: list[Json], at: str) -> None:
    """Check that the parts of one name tile a lane in order."""
    ends: dict[str, tuple[int, Json, int]] = {}
    for j, part in enumerate(parts):
        _, first, end = ends.get(part["name"], (j, part, 0))
        for field, good in (
            ("dtype", part["dtype"] == first["dtype"]),
            ("lanes", part["lanes"] == first["lanes"]),
            ("whole", lane(part) == lane(first)),
            ("at", int(part.get("at", 0)) == end),
            ("encoding", "encoding" not in part or lane(part) == int(part["lane_bytes"])),
        ):
            _need(good, f"{at}.parts[{j}].{field}")
        ends[part["name"]] = j, first, end + int(part["lane_bytes"])
    for j, first, end in ends.values():
        _need(end == lane(first), f"{at}.parts[{j}].whole")


def _share(group: Json, share: Json, at: str) -> None:
    _need(group["kind"] != "HANDOFF" or share["layers"] == ["0"], f"{at}.layers")
    _need(int(share["cp_rank"]) < int(group["cp_size"]), f"{at}.cp_rank")
    taken: dict[int, list[tuple[int, int]]] = {part: [] for part in range(len(group["parts"]))}
    for k, span in enumerate(share["lanes"]):
        part, lo, hi = (int(span[name]) for name in ("part", "lo", "hi"))
        _need(part in taken, f"{at}.lanes[{k}].part")
        _need(hi <= int(group["parts"][part]["lanes"]), f"{at}.lanes[{k}].hi")
        taken[part].append((lo, hi))
    for spans in map(sorted, taken.values()):
        apart = all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        _need(bool(spans) and apart, f"{at}.lanes")
    check_share(group, share, at)


def _need(good: bool, path: str) -> None:
    if not good:
        raise Refusal("BAD_GEOMETRY", path)
