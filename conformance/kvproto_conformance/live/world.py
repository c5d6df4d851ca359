"""The suite as an engine's peer: a Description that fits the engine's, and differs from it wherever it may.

Group ids, page sizes, strides, padding and the number of ranks differ, which exposes an engine that uses its own in
place of its peer's.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from kvproto_conformance.codec import write_struct
from kvproto_conformance.dcp import Deal
from kvproto_conformance.sections import whole

Json = dict[str, Any]
GAP = 64
"""Bytes before, between and after columns that nobody may write."""
MORE_RING = 3
"""By how many rows a ring of the suite is longer than the engine's."""


def mirror(geometry: Json, ranks: int = 1, replica: int = 0) -> Json:
    """A Description (JSON form) with the same facts, layers and parts, over so many ranks, in pages of another size."""
    groups, owns = [], [[] for _ in range(ranks)]  # type: list[Json], list[list[Json]]
    for i, theirs in enumerate(geometry["groups"]):
        group = {k: v for k, v in copy.deepcopy(theirs).items() if k != "order"}
        group |= {"id": str(3 * i + 1), "cp_size": "1", "interleave": "1", "origin": "0"}
        group["parts"] = whole(group["parts"])
        if "live_rows" in group:
            group["rows"] = group["live_rows"]
        elif not any("encoding" in part for part in group["parts"]):
            group["rows"] = str(other_rows(group))
        groups.append(group)
        layers = {
            int(x) for r in geometry["ranks"] for s in r["owns"] if s["group"] == theirs["id"] for x in s["layers"]
        }
        for rank in range(ranks):
            lanes = []
            for p, part in enumerate(group["parts"]):
                count = int(part["lanes"])
                lo, hi = (count * rank // ranks, count * (rank + 1) // ranks) if count >= ranks else (0, count)
                lanes.append({"part": str(p), "lo": str(lo), "hi": str(hi)})
            share = {"group": group["id"], "layers": [str(n) for n in sorted(layers)], "cp_rank": "0", "lanes": lanes}
            owns[rank].append(share)
    stated = [{"rank": str(rank), "owns": shares} for rank, shares in enumerate(owns)]
    return {"replica": str(replica), "facts": geometry["facts"], "groups": groups, "ranks": stated}


def dealt(geometry: Json, ranks: int, interleave: int, origin: int) -> Json:
    """A mirror whose ranks deal the tokens of all pages among themselves; each has all lanes, and hand-off data too."""
    made = mirror(geometry)
    pages = {g["id"]: g for g in made["groups"] if g["kind"] == "PAGE"}
    for group in pages.values():
        group |= {"cp_size": str(ranks), "interleave": str(interleave), "origin": str(origin)}
    (alone,) = made["ranks"]
    stated = [
        {"rank": str(r), "owns": [s | {"cp_rank": str(r * (s["group"] in pages))} for s in alone["owns"]]}
        for r in range(ranks)
    ]
    return made | {"ranks": stated}


def other_rows(group: Json) -> int:
    """Rows of an item of the suite, where the engine's has those of `group`: another number, if there may be one."""
    rows = int(group["rows"])
    if group["kind"] == "RING":
        return rows + MORE_RING
    if group["kind"] == "PAGE" and not group.get("partial"):
        return rows // 4 if rows >= 8 else rows * 3
    return rows


def has_memory(group: Json) -> bool:
    """Whether a group is in registered memory."""
    return bool(group["kind"] != "HANDOFF")


def lay_out(geometry: Json, rank: int, items: int = 64, heads_first: bool = False) -> tuple[list[Json], int]:
    """Columns (JSON form) of one rank's pools in one region, with padding everywhere, and the bytes that they need."""
    groups = {group["id"]: group for group in geometry["groups"]}
    owns = next(r["owns"] for r in geometry["ranks"] if r["rank"] == str(rank))
    found, at = [], GAP
    for share in owns:
        group = groups[share["group"]]
        if not has_memory(group):
            continue
        rows = int(group["rows"])
        made: dict[str, list[str]] = {k: [] for k in ("region", "offset", "item_stride", "row_stride", "lane_stride")}
        for _ in share["layers"]:
            for p, part in enumerate(group["parts"]):
                lanes = sum(int(s["hi"]) - int(s["lo"]) for s in share["lanes"] if int(s["part"]) == p)
                size = int(part["lane_bytes"])
                lane, row = (rows * size + 5, size) if heads_first else (size, lanes * size + 3)
                item = (lanes * lane if heads_first else rows * row) + 7
                for name, number in zip(made, (0, at, item, row, lane), strict=True):
                    made[name].append(str(number))
                at += items * item + GAP
        found.append({"group": group["id"], "items": str(items), **made})
    return found, at


def window(group: Json, tokens: int, axes: Mapping[str, int], first: int = 0) -> tuple[int, int]:
    """The first token and the count of a whole request, as far as a group has it."""
    if not has_memory(group):
        return 0, 0
    length = axes.get(group["axis"], 0) if "axis" in group else tokens
    first = min(first, length)
    if group["kind"] == "RING":
        first = max(first, length - int(group["rows"]) + MORE_RING)
    return first, length - first


def items_of(group: Json, first: int, count: int, cp_rank: str = "0") -> int:
    """The number of items of a cp rank that a window needs (lowering.md)."""
    if group["kind"] in ("SLOT", "RING"):
        return 1
    step, rows = int(group["tokens_per_row"]), int(group["rows"])
    begin, end = -(-first // step), (first + count) // step
    if group.get("partial"):
        begin, end = first // step, -(-(first + count) // step)
    deal = Deal.of(group)
    if deal.ranks > 1:
        begin, end = (deal.length(int(cp_rank), row * step) for row in (begin, end))
    return 0 if end <= begin or not has_memory(group) else (end - 1) // rows - begin // rows + 1


def content(tokens: list[int], axes: Mapping[str, int]) -> str:
    """The content digest of a prompt, in hex."""
    stated: Json = {"tokens": [str(t) for t in tokens], "adapter": "", "salts": []}
    if axes:
        stated["axes"] = [{"name": name, "length": str(axes[name])} for name in sorted(axes, key=str.encode)]
    return hashlib.sha256(write_struct("Content", stated)).hexdigest()


def known(value: Any) -> Any:
    """The same without fields that may be ignored, of which each side may send its own."""
    if isinstance(value, list):
        return [known(each) for each in value]
    return {k: known(v) for k, v in value.items() if not k.startswith("x_")} if isinstance(value, dict) else value


def digest_as_stated(geometry: str) -> str:
    """The digest, in hex, of a Geometry as its owner wrote it, which may have fields of a later version."""
    return hashlib.sha256(bytes.fromhex(geometry)).hexdigest()


def digest_of(geometry: Json) -> tuple[str, str]:
    """Canonical bytes of a Geometry and their digest, in hex."""
    data = write_struct("Geometry", geometry)
    return data.hex(), hashlib.sha256(data).hexdigest()
