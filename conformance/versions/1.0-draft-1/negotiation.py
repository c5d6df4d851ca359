"""The suite's own negotiation: negotiation.md word by word, over what each side says of itself."""

from __future__ import annotations

from typing import Any

from codec import Refusal

__all__ = ["negotiated"]

Json = dict[str, Any]


def negotiated(sink: Json, source: Json) -> Json:
    """Version and features of a session; raises Refusal."""
    versions = [shared for mine in sink["versions"] for yours in source["versions"] for shared in _shared(mine, yours)]
    if not versions:
        raise Refusal("NO_VERSION", "versions")
    offered = [feature for feature in sink["offered"] if feature in source["offered"]]
    if not set(sink["needed"]) <= set(source["offered"]):
        raise Refusal("FEATURE_MISSING", "needed")
    if not set(source["needed"]) <= set(sink["offered"]):
        raise Refusal("FEATURE_MISSING", "offered")
    return {"version": versions[0], "features": sorted(offered, key=int)}


def _shared(mine: str, yours: str) -> list[str]:
    """The version to speak where two ranges, as `1.0-7`, are of one major and overlap."""
    (major, mine), (other, yours) = mine.split("."), yours.split(".")
    (low, high), (other_low, other_high) = (map(int, minors.split("-")) for minors in (mine, yours))
    return [f"{major}.{min(high, other_high)}"] if major == other and low <= other_high and other_low <= high else []
