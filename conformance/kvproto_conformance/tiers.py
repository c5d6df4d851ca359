"""The suite's own cached pages: tiers.md word by word, over JSON forms and integers; it shares no code with kvproto."""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any

from kvproto_conformance.codec import Refusal, read_struct, write_struct
from kvproto_conformance.dcp import Deal

Json = dict[str, Any]


def namespace(entries: dict[str, str]) -> bytes:
    """The digest of a table of names and values."""
    record = b"kvproto namespace 1\x00"
    for name in sorted(entries, key=lambda text: text.encode("utf-8")):
        for text in (name, entries[name]):
            record += struct.pack("<I", len(text.encode("utf-8"))) + text.encode("utf-8")
    return sha256(record).digest()


def page_ids(space: bytes, page: int, tokens: list[int]) -> dict[str, list[bytes]]:
    """The ids, in both forms, of all pages whose tokens are known."""
    found: dict[str, list[bytes]] = {"OWN": [], "AHEAD": []}
    previous = space
    for begin in range(0, len(tokens), page):
        for number, form in ((1, "OWN"), (2, "AHEAD")):
            covered = tokens[begin : begin + page + number - 1]
            if len(covered) == page + number - 1:
                head = b"kvproto page 1\x00" + previous + struct.pack("<IB", page, number)
                found[form].append(sha256(head + b"".join(struct.pack("<Q", t) for t in covered)).digest())
        if begin + page <= len(tokens):
            previous = found["OWN"][-1]
    return found


def whole_pages(meaning: Json, tokens: list[int]) -> list[str]:
    """Ids in hex of the whole pages of these tokens, by what a Watched says of ids: `namespace`, `page` and `form`."""
    page = int(meaning["page"])
    found = page_ids(bytes.fromhex(meaning["namespace"]), page, tokens)[meaning["form"]]
    return [id.hex() for id in found[: len(tokens) // page]]


def _alone(geometry: Json, rank: int) -> tuple[Json, Json]:
    """Groups of components by id, and the rank's shares of them by group id."""
    (own,) = (r for r in geometry["ranks"] if int(r["rank"]) == rank)
    shares = {share["group"]: share for share in own["owns"]}
    groups = {g["id"]: g for g in geometry["groups"] if g["kind"] != "HANDOFF" and g["id"] in shares}
    return groups, {id: shares[id] for id in groups}


def geometry_digest(geometry: Json, rank: int) -> bytes:
    """The digest of the Geometry of what one rank owns, as if it were alone."""
    groups, shares = _alone(geometry, rank)
    alone = {
        "replica": "0", "facts": [], "groups": [*groups.values()], "ranks": [{"rank": "0", "owns": [*shares.values()]}],
    }  # fmt: skip
    return sha256(write_struct("Geometry", alone)).digest()


def length_of(geometry: Json, rank: int, page: int) -> dict[str, int]:
    """Bytes of each component of a page, by group id, counted row by row and lane by lane."""
    groups, shares = _alone(geometry, rank)
    found = {}
    for id, group in groups.items():
        step = int(group["tokens_per_row"])
        if group["kind"] != "PAGE":
            rows = int(group.get("live_rows", group["rows"]))
        elif group["cp_size"] == "1":
            rows = page // step
        else:
            owners = [Deal.of(group).owner(token) for token in range(0, page, step)]
            rows = sum(o is not None and str(o[0]) == shares[id]["cp_rank"] for o in owners)
        size = 0
        for lane in shares[id]["lanes"]:
            for _ in range(int(lane["lo"]), int(lane["hi"])):
                size += int(group["parts"][int(lane["part"])]["lane_bytes"])
        found[id] = rows * len(shares[id]["layers"]) * size
    return found


def manifest(asked: Json, stored: dict[str, bytes]) -> bytes:
    """Canonical bytes of the manifest of a page, of which a reader asks this, with these objects by group."""
    listed = [
        {**part, "digest": sha256(stored[part["group"]]).hexdigest()}
        for part in asked["components"]
        if part["group"] in stored
    ]
    return write_struct("Manifest", {**asked, "components": listed})


def absent(asked: Json, data: bytes) -> bool:
    """Whether this manifest makes a reader that wants the page treat it as absent."""
    try:
        found = read_struct("Manifest", data)
    except Refusal:
        return True
    known = {part["group"]: part for part in asked["components"]}
    for part in found["components"]:
        if known.get(part["group"]) != {key: value for key, value in part.items() if key != "digest"}:
            return True
    there = {part["group"] for part in found["components"]}
    if any(part["rule"] == "PREFIX" and part["group"] not in there for part in known.values()):
        return True
    return any(found[key] != asked[key] for key in asked if key != "components")


def lengths(page: int, parts: list[Json], ranks: list[dict[str, list[int]]]) -> int:
    """The greatest number of pages that every rank can use, tried from above; `ranks` have 0 or 1 by group and page."""

    def fits(part: Json, has: list[int], n: int) -> bool:
        tokens = n * page
        first = {"PREFIX": 0, "STATE": tokens - 1, "WINDOW": max(tokens - int(part.get("reach", 0)), 0)}[part["rule"]]
        return all(has[token // page] for token in range(first, tokens))

    most = min(len(has) for rank in ranks for has in rank.values())
    return next(
        n
        for n in range(most, -1, -1)
        if n == 0 or all(fits(part, rank[part["group"]], n) for rank in ranks for part in parts)
    )
