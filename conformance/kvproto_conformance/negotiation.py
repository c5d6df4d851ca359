"""The suite's own negotiation: negotiation.md word by word, over what each side says about itself."""

from __future__ import annotations

from typing import Any

from kvproto_conformance.codec import Refusal

Json = dict[str, Any]


def negotiated(sink: Json, source: Json) -> Json:
    """The version and features of a session; raises Refusal."""
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
    """The version to speak if two ranges, such as `1.0-7`, have the same major version and overlap."""
    (major, mine), (other, yours) = mine.split("."), yours.split(".")
    (low, high), (other_low, other_high) = (map(int, minors.split("-")) for minors in (mine, yours))
    return [f"{major}.{min(high, other_high)}"] if major == other and low <= other_high and other_low <= high else []
