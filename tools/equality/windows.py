"""Memory and windows of a rank pair in JSON form, for a world whose plan stands: odd strides, items in no order, windows that begin and end anywhere."""

from __future__ import annotations

import random
from typing import Any

from kvproto.copying.grants import items_needed
from kvproto.wire import from_json
from kvproto.wire.messages import Group

Json = dict[str, Any]
_TOKENS = 72
"""Of a request, if no ring is shorter."""
_ROW = 12
"""Tokens of which every row has a divisor."""
_REGION = 1 << 16
"""Bytes of a region in the memory of kvproto's testee."""


def lowering(rng: random.Random, world: Json) -> Json | None:
    """A question of op `lower`, `stream` or `checksums` about a world that is planned without features; None if it does not fit."""
    rings = [
        int(g["rows"]) * int(g["tokens_per_row"])
        for side in ("source", "sink")
        for g in world[side]["groups"]
        if g["kind"] == "RING"
    ]
    tokens = min([rng.randint(1, _TOKENS), *rings])
    sides = {}
    for name in ("source", "sink"):
        groups = {group["id"]: group for group in world[name]["groups"]}
        rank = rng.choice(world[name]["ranks"])
        shares = [share for share in rank["owns"] if groups[share["group"]]["kind"] != "HANDOFF"]
        if any("encoding" in part for share in shares for part in groups[share["group"]]["parts"]):
            return None  # whole items begin and end together at both sides, which random windows do not
        sides[name] = {"geometry": world[name], "rank": rank["rank"], "columns": [], "windows": []}
        used = [0, 0]
        for share in shares:
            group = groups[share["group"]]
            first, count = (0, tokens) if name == "source" else _window(rng, world, tokens)
            need = items_needed(from_json(Group, group), int(share["cp_rank"]), first, count)
            items = need + rng.randint(0, 2) or 1
            sides[name]["columns"].append(_columns(rng, group, share, items, used))
            chosen = [str(n) for n in rng.sample(range(items), need)]
            sides[name]["windows"].append(
                {"group": group["id"], "first": str(first), "count": str(count), "valid": str(tokens), "items": chosen}
            )
        if max(used) > _REGION:
            return None
    return {"op": rng.choice(["lower", "stream", "checksums"]), **sides}


def _window(rng: random.Random, world: Json, tokens: int) -> tuple[int, int]:
    """First token and count: from a row of all groups on, and behind the origin of every deal."""
    origins = [int(g["origin"]) for side in ("source", "sink") for g in world[side]["groups"] if int(g["cp_size"]) > 1]
    least = -(-max([0, *origins]) // _ROW) * _ROW
    first = least + _ROW * rng.randint(0, 2)
    return (first, rng.randint(0, tokens - first)) if first < tokens else (tokens, 0)


def _columns(rng: random.Random, group: Json, share: Json, items: int, used: list[int]) -> Json:
    """Places behind those that are used, of each layer and part by strides in any order, with or without gaps."""
    columns: Json = {"group": group["id"], "items": str(items), "region": [], "offset": []}
    columns |= {"item_stride": [], "row_stride": [], "lane_stride": []}
    lanes = [
        sum(int(span["hi"]) - int(span["lo"]) for span in share["lanes"] if span["part"] == str(p))
        for p in range(len(group["parts"]))
    ]
    for _ in share["layers"]:
        for part, count in zip(group["parts"], lanes, strict=True):
            region = rng.randrange(2)
            reach, strides = int(part["lane_bytes"]), {}
            for axis, extent in rng.sample([("item", items), ("row", int(group["rows"])), ("lane", count)], 3):
                strides[axis] = reach + rng.choice([0, 0, 0, 1, 5])
                reach += strides[axis] * (extent - 1)
            columns["region"].append(str(region))
            columns["offset"].append(str(used[region]))
            for axis, stride in strides.items():
                columns[f"{axis}_stride"].append(str(stride))
            used[region] += reach + rng.choice([0, 0, 3])
    return columns
