"""The suite's own answer to windows that begin late: lowering.md word by word, row by row, in JSON form; slow."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvproto_conformance.codec import Refusal
from kvproto_conformance.dcp import Deal

Json = dict[str, Any]


def held(group: Json, since: list[int]) -> int:
    """The first token of which a source has the rows: `since` of each of its groups, rounded up as the sink's asks."""
    step, deal = int(group["tokens_per_row"]), Deal.of(group)
    first = max(since, default=0)
    if not first or not any("encoding" in part for part in group["parts"]):
        return -(-first // step) * step
    turn = deal.interleave * len(deal.order) if deal.ranks > 1 else step
    for token in count(deal.origin if deal.ranks > 1 else 0, turn):
        if token >= first and not any(before % int(group["rows"]) for before in _before(group, token)):
            return token
    raise AssertionError


def _before(group: Json, token: int) -> list[int]:
    """The number of rows below a token that each cp rank has."""
    found = [0] * int(group["cp_size"])
    for row in range(token // int(group["tokens_per_row"])):
        owner = _owner(group, row)
        if owner is not None:
            found[owner[0]] += 1
    return found


def _owner(group: Json, row: int) -> tuple[int, int] | None:
    return (0, row) if group["cp_size"] == "1" else Deal.of(group).owner(row * int(group["tokens_per_row"]))


def served(group: Json, cp_rank: str, grant: Json, since: list[int]) -> Json:
    """The grant as it is served, and where it begins if that is later; raises Refusal BAD_GRANT or NOT_HELD."""
    first, end = int(grant["first"]), int(grant["first"]) + int(grant["count"])
    if group["kind"] in ("PAGE", "RING") and first < end and first % int(group["tokens_per_row"]):
        raise Refusal("BAD_GRANT", "grants[0].first")
    if inside_item(group, cp_rank, first, end):
        raise Refusal("BAD_GRANT", "grants[0].first")
    begin = min(held(group, since), end)
    if begin <= first:
        return {"window": grant}
    if not grant.get("late"):
        raise Refusal("NOT_HELD", "grants[0].first")
    names = dict(zip(items_of(group, cp_rank, first, end), grant["items"], strict=True))
    left = [names[item] for item in items_of(group, cp_rank, begin, end)]
    return {"begins": str(begin), "window": {**grant, "first": str(begin), "count": str(end - begin), "items": left}}


def inside_item(group: Json, cp_rank: str, first: int, end: int) -> bool:
    """Whether a window of pages that move whole begins inside one of a rank's items."""
    if group["kind"] != "PAGE" or not any("encoding" in part for part in group["parts"]):
        return False
    begin, past = (_before(group, token)[int(cp_rank)] for token in (first, end))
    return begin < past and begin % int(group["rows"]) != 0


def items_of(group: Json, cp_rank: str, first: int, end: int) -> list[int]:
    """The items of its own that a rank needs for tokens [first, end)."""
    if group["kind"] in ("RING", "SLOT"):
        return [0]
    step = int(group["tokens_per_row"])
    last = -(-end // step) if group.get("partial") else end // step
    owners = [_owner(group, row) for row in range(-(-first // step), last)]
    return sorted({each[1] // int(group["rows"]) for each in owners if each is not None and str(each[0]) == cp_rank})
