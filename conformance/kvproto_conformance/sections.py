"""Places of a section's bytes on the lane axis of its part, over JSON forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def lane(part: Json) -> int:
    """Bytes of a lane of the part that this is, or is a section of."""
    return int(part["whole"] if "whole" in part else part["lane_bytes"])


def place(part: Json, number: int) -> tuple[int, int]:
    """Bytes [lo, hi) of the lane axis that one lane holds, of a section its own."""
    first = number * lane(part) + int(part.get("at", 0))
    return first, first + int(part["lane_bytes"])


def whole(parts: Sequence[Json]) -> list[Json]:
    """The parts of a group, those in sections as if each were in one piece: the first section stands for all."""
    return [
        {key: value for key, value in part.items() if key not in ("at", "whole")} | {"lane_bytes": str(lane(part))}
        for part in parts
        if int(part.get("at", 0)) == 0
    ]
