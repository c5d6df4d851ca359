"""The suite's own checks of sections and partial rows: KVP-GEO-PARTS, KVP-GEO-SECTIONS, KVP-GEO-PARTIAL of model.md."""

from __future__ import annotations

from typing import Any

from kvproto_conformance.codec import Refusal

__all__ = ["check", "lane", "place"]

Json = dict[str, Any]


def lane(part: Json) -> int:
    """Bytes of a lane of the part that this is, or is a section of."""
    return int(part["whole"] if "whole" in part else part["lane_bytes"])


def place(part: Json, number: int) -> tuple[int, int]:
    """Bytes [lo, hi) of the lane axis that one lane holds, of a section its own."""
    first = number * lane(part) + int(part.get("at", 0))
    return first, first + int(part["lane_bytes"])


def check(side: Json) -> None:
    """Raise Refusal for the first group whose parts of one name do not tile a lane, or that is wrongly partial."""
    for i, group in enumerate(side["groups"]):
        for name in dict.fromkeys(p["name"] for p in group["parts"]):
            _tiles([(f"groups[{i}].parts[{j}]", p) for j, p in enumerate(group["parts"]) if p["name"] == name])
        if group["kind"] == "HANDOFF" and any(lane(p) != int(p["lane_bytes"]) for p in group["parts"]):
            raise Refusal("BAD_GEOMETRY", f"groups[{i}].kind")
        if group.get("partial") and group["kind"] not in ("PAGE", "RING"):
            raise Refusal("BAD_GEOMETRY", f"groups[{i}].partial")


def _tiles(sections: list[tuple[str, Json]]) -> None:
    (at, first), end = sections[0], 0
    for at, part in sections:
        for field, good in (
            ("dtype", part["dtype"] == first["dtype"]),
            ("lanes", part["lanes"] == first["lanes"]),
            ("whole", lane(part) == lane(first)),
            ("at", int(part.get("at", 0)) == end),
            ("encoding", "encoding" not in part or lane(part) == int(part["lane_bytes"])),
        ):
            if not good:
                raise Refusal("BAD_GEOMETRY", f"{at}.{field}")
        end += int(part["lane_bytes"])
    if end != lane(first):
        raise Refusal("BAD_GEOMETRY", f"{at}.whole")
