"""The suite's own deal of tokens and merge: dcp.md word by word, slow; `answer` answers as a right testee would."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

Json = dict[str, Any]


@attrs.frozen
class Deal:
    """The deal of a group's tokens; all numbers are in tokens, except `page`, which is in rows."""

    ranks: int
    interleave: int
    origin: int
    step: int
    page: int
    order: list[int]
    """The cp rank of each run of one period."""

    @classmethod
    def of(cls, group: Json) -> Deal:
        """The deal of a Group in JSON form."""
        ranks, interleave, origin, step, page = (
            int(group[name]) for name in ("cp_size", "interleave", "origin", "tokens_per_row", "rows")
        )
        return cls(ranks, interleave, origin, step, page, [int(rank) for rank in group.get("order", range(ranks))])

    def owner(self, token: int) -> tuple[int, int] | None:
        """The cp rank and local row of a token; None before the origin."""
        if self.ranks == 1:
            return 0, token // self.step
        past = token - self.origin
        if past < 0:
            return None
        turns, run = divmod(past // self.interleave, len(self.order))
        rank = self.order[run]
        runs = turns * self.order.count(rank) + self.order[:run].count(rank)
        return rank, (runs * self.interleave + past % self.interleave) // self.step

    def length(self, cp_rank: int, tokens: int) -> int:
        """The number of complete rows that a cp rank has below a token; the last turn is counted token by token."""
        if self.ranks == 1:
            return tokens // self.step
        turns, rest = divmod(max(tokens - self.origin, 0), self.interleave * len(self.order))
        last = range(tokens - rest, tokens)
        held = turns * self.order.count(cp_rank) * self.interleave
        held += sum(self.owner(token)[0] == cp_rank for token in last)  # type: ignore[index]
        return held // self.step

    def pages(self, tokens: int) -> int:
        """Pages of the longest share."""
        return -(-max(self.length(rank, tokens) for rank in range(self.ranks)) // self.page)

    def slot(self, cp_rank: int, items: list[str], token: int) -> int | None:
        """The place at which a rank holds a token; None if it does not hold it."""
        found = self.owner(token)
        if found is None or found[0] != cp_rank:
            return None
        return int(items[found[1] // self.page]) * self.page + found[1] % self.page


def merge(parts: list[Json]) -> Json:
    """`lse` in natural logarithms and `out` of the union of parts, row by row."""
    merged = [_merged([_row(part, i) for part in parts]) for i in range(len(parts[0]["lse"]))]
    return {"lse": [lse for lse, _ in merged], "out": [out for _, out in merged]}


def _row(part: Json, i: int) -> tuple[float, list[float]]:
    out = [float(x) for x in part["out"][i]]
    if int(part["tokens"][i]) == 0:
        return -math.inf, [0.0] * len(out)
    return float(part["lse"][i]) * (math.log(2) if part["base"] == "2" else 1), out


def _merged(parts: list[tuple[float, list[float]]]) -> tuple[float, list[float]]:
    live = [(lse, out) for lse, out in parts if lse > -math.inf]
    if not live:
        return -math.inf, [0.0] * len(parts[0][1])
    most = max(lse for lse, _ in live)
    total = most + math.log(math.fsum(math.exp(lse - most) for lse, _ in live))
    weighted = [[math.exp(lse - total) * x for x in out] for lse, out in live]
    return total, [math.fsum(column) for column in zip(*weighted, strict=True)]


def _owner(question: Json) -> Json:
    found = [Deal.of(question["group"]).owner(int(token)) for token in question["tokens"]]
    return {"cp_rank": [_text(f and f[0]) for f in found], "row": [_text(f and f[1]) for f in found]}


def _length(question: Json) -> Json:
    deal = Deal.of(question["group"])
    return {"rows": [[str(deal.length(r, int(t))) for r in range(deal.ranks)] for t in question["tokens"]]}


def _pages(question: Json) -> Json:
    deal = Deal.of(question["group"])
    return {"pages": [str(deal.pages(int(tokens))) for tokens in question["tokens"]]}


def _slots(question: Json) -> Json:
    deal, rank = Deal.of(question["group"]), int(question["cp_rank"])
    return {"slots": [_text(deal.slot(rank, question["items"], int(token))) for token in question["tokens"]]}


def _merge(question: Json) -> Json:
    found = merge(question["parts"])
    return {"lse": [f"{x:.9g}" for x in found["lse"]], "out": [[f"{x:.9g}" for x in row] for row in found["out"]]}


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


_ANSWERS: dict[str, Callable[[Json], Json]] = {
    "owner": _owner, "length": _length, "pages": _pages, "slots": _slots, "merge": _merge,
}  # fmt: skip


def answer(question: Json) -> Json:
    """The right answer to a question of the levels `deal` and `merge`."""
    return _ANSWERS[question["op"]](question)
