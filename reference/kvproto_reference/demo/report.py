"""The report of the demo: who sent what, and the proof that nothing was lost."""

import time
from collections import defaultdict
from itertools import combinations
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from ..engine.logprobs import LogProbs
from ..engine.sequence import SpeculationStats
from ..tokenizer import Tokenizer
from .router import Request, Router

TIED = 6.0
"""Errors of rounding by which two logits may differ and still count as tied: each of four has its own error."""
NEAR = 0.1
"""Acceptances this close, as a share, are the same where arithmetic rounds to 16 bits: a proposal may be tied, too."""
SLACK = 1e-3
"""Log probabilities may differ so much in 32 bits, as sums over ranks do."""


@attrs.frozen
class Compared:
    """One request as the pair of engines served it, beside the tokens of one undivided engine."""

    request: Request
    tokens: list[int]
    stats: SpeculationStats
    rounded: bool = False
    """Whether both compute in 16 bits, so that logits depend on what else is in the batch."""
    lag: float | None = None
    """`Undivided.lag` of the request's tokens; measured if rounded, greedy tokens differ."""
    logprobs: list[LogProbs] = attrs.Factory(list)
    """Of each token, if the request asked for log probabilities."""

    @property
    def agrees(self) -> bool:
        """Whether all tokens are equal or, where arithmetic rounds, sampled or tied with one engine's best."""
        return self.same_tokens or (self.rounded and self.request.error is None and (self.lag or 0.0) <= TIED)

    @property
    def same_tokens(self) -> bool:
        """Whether all tokens are equal, end of sequence included."""
        return self.request.error is None and self.request.tokens == self.tokens

    @property
    def same_acceptance(self) -> bool:
        """Whether steps, proposals and acceptances are equal or, with equal tokens where arithmetic rounds, close."""
        stats = self.request.stats or {}
        mine = [stats.get(k) for k in ("steps", "decoded", "proposed", "accepted")]
        if self.rounded:
            return not self.same_tokens or abs(_length(stats) - self.stats.mean_acceptance) <= NEAR * _length(stats)
        return mine == [self.stats.steps, self.stats.tokens, self.stats.proposed, self.stats.accepted]

    @property
    def same_logprobs(self) -> bool:
        """Whether all log probabilities are equal to SLACK in 32 bits, those of the likeliest tokens in their order."""
        mine, theirs = ([[p for _, p in each] for each in found] for found in (self.request.logprobs, self.logprobs))
        if self.rounded or [*map(len, mine)] != [*map(len, theirs)]:
            return self.rounded
        return all(abs(a - b) <= SLACK for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))

    @property
    def checksums(self) -> int:
        """Checksums found equal: one for each group from each source rank, at each decode rank."""
        return sum(len(rank["checksums"]) for rank in self.request.arrived or [])

    @property
    def due(self) -> int:
        """Checksums expected: one for each route and group with copied bytes.

        A DCP rank may own no token of a short prompt, and hand-off data is in Done and not copied. If prefill went away
        before it said what it copied, at least those that were found were expected.
        """
        said: int = sum(count > 0 for word in self.request.sent for count in word["bytes"].values())
        return max(said, self.checksums) if self.request.orphan else said


class Notes:
    """Notes of what happened to the engines, each with the seconds since the first note."""

    def __init__(self, console: Console | None) -> None:
        """Show each note at `console` as it comes; None shows none."""
        self._console = console
        self._first = 0.0
        self.told: list[tuple[float, str]] = []

    def add(self, text: str) -> None:
        """Keep a note, and show it."""
        now = time.monotonic()
        self._first = self._first or now
        self.told.append((now - self._first, text))
        if self._console is not None:
            self._console.print(f"{now - self._first:7.2f} s  {text}", highlight=False, markup=False)


def verdict(router: Router, compared: list[Compared], verify: bool) -> dict[str, bool]:
    """Whether each claim holds, by name; "tokens" and "acceptance" are about the requests that were served."""
    served = [c for c in compared if c.request.error is None]
    unverified = any("VERIFY_FAILED" in (c.request.error or "") for c in compared)
    complete = all(c.checksums == c.due for c in served)
    return {
        "requests": len(served) == len(compared),
        "checksums": not verify or (complete and bool(served) and not unverified),
        "tokens": bool(served) and all(c.agrees for c in served),
        "acceptance": bool(served) and all(c.same_acceptance for c in served),
    } | ({"logprobs": all(c.same_logprobs for c in served)} if any(c.logprobs for c in served) else {})


def other_tokens(router: Router) -> bool:
    """Whether some prompts differ in nothing but their images, and any two of these were answered differently."""
    some = [r for r in router.requests if r.prompt.images and r.error is None]
    alike = [(a, b) for a, b in combinations(some, 2) if a.prompt.tokens == b.prompt.tokens]
    return bool(alike) and all(a.tokens != b.tokens for a, b in alike)


def other_adapters(router: Router) -> bool:
    """Whether any two adapters, or one and none, answered some prompt differently."""
    answers = defaultdict(list)
    for request in router.requests:
        answers[request.prompt.adapter].append(request.tokens)
    return len(answers) > 1 and all(a != b for a, b in combinations(answers.values(), 2))


def as_json(
    router: Router, compared: list[Compared], verdicts: dict[str, bool], tokenizer: Tokenizer, notes: Notes
) -> dict[str, Any]:
    """The results as a JSON object."""
    rows = []
    for c in compared:
        r = c.request
        rows.append({
            "name": r.prompt.name, "engines": r.engines, "error": r.error,
            "prompt_tokens": len(r.prompt.tokens), "tokens": r.tokens, "undivided_tokens": c.tokens,
            "text": tokenizer.decode(r.tokens).decode("utf-8", "replace"),
            "arrived": r.arrived, "cached": r.cached, "lost": r.lost, "gave_way": (r.stats or {}).get("gave_way", 0),
            "acceptance": _length(r.stats), "undivided_acceptance": c.stats.mean_acceptance,
            **{name: (r.stats or {}).get(name, 0) for name in ("steps", "decoded", "proposed", "accepted")},
            "logprobs": r.logprobs, "undivided_logprobs": c.logprobs,
            "same_tokens": c.same_tokens, "lag": c.lag, "same_acceptance": c.same_acceptance,
        })  # fmt: skip
    moved = [
        {"source_replica": here, "source": s, "sink_replica": there, "sink": d, "group": g, "bytes": n}
        for ((here, s), (there, d), g), n in sorted(matrix(router).items())
    ]
    return {
        "plan": router.plan,
        "matrix": moved,
        "left": _left(router),
        "rows": [{"source": s, "sink": d, "rows": n, "bytes": b} for (s, d), (n, b) in _rows(router).items()],
        "requests": rows,
        "notes": notes.told,
        "verdicts": verdicts,
        "identical": all(verdicts.values()),
    }


NOTHING = "[red]nothing compared"
_AGREE = {True: "[green]agree", False: "[red]DIFFER"}
WORDS = {
    "requests": {True: "[green]all served", False: "[red]FAILED"},
    "kill": {True: "[green]what was lost was asked again", False: "[red]nothing was under way, or nothing was lost"},
    "drain": {True: "[green]nothing was lost, and it ended well", False: "[red]something was lost"},
    "sleep": {True: "[green]what was lost had its memory moved", False: "[red]something was lost"},
    "images": {
        True: "[green]another image, other tokens",
        False: "[red]another image, THE SAME TOKENS: if one engine has them too, raise --max-new",
    },
    "adapters": {
        True: "[green]another adapter, other tokens",
        False: "[red]another adapter, THE SAME TOKENS: if one engine has them too, raise --max-new",
    },
    "pause": {True: "[green]nothing was lost", False: "[red]nothing was under way, or something was lost"},
}
"""Words for a verdict, by its name; those not listed here say whether both sides agree."""


def words_of(name: str, good: bool, compared: list[Compared]) -> str:
    """The words for a verdict: what it says, or that there was nothing to compare because no request was served."""
    served = any(c.request.error is None for c in compared)
    refused = name == "checksums" and any("VERIFY_FAILED" in (c.request.error or "") for c in compared)
    if name in ("checksums", "tokens", "acceptance") and not served and not refused:
        return NOTHING
    return WORDS.get(name, _AGREE)[good]


def show(
    console: Console, router: Router, compared: list[Compared], verdicts: dict[str, bool], verify: bool, cold: bool
) -> None:
    """Print the results as tables; `cold`: the draft of the undivided engine began with zero rows too."""
    console.print(_routes(router))
    if rows := _rows(router):
        console.print(_encoded(rows))
    console.print(f"required responses: {_required(router)}", highlight=False)
    stored = ", ".join(
        f"{name} {dealt:,.0f}" + (f" ({whole:,.0f} without DCP)" if dealt != whole else "")
        for name, (dealt, whole) in router.plan["stored"].items()
    )
    console.print(f"KV bytes of a token on a decode rank: {stored}", highlight=False)
    if states := ", ".join(f"{name} {count:,.0f}" for name, count in router.plan["states"].items()):
        console.print(f"bytes of a request's states on a decode rank: {states}", highlight=False)
    if router.sent:
        console.print(_copied(router) + "\n")
    console.print(_requests(router, compared, cold))
    equal, due = (sum(counts) for counts in zip(*((c.checksums, c.due) for c in compared), strict=True))
    if ways := sum((c.request.stats or {}).get("gave_way", 0) for c in compared):
        console.print(f"requests gave way to older ones {ways} times, and were computed again by decode")
    console.print(f"verify checksums: {equal} of {due} equal" if verify else "verify: off")
    if tied := sum(c.request.error is None and not c.same_tokens and c.agrees for c in compared):
        console.print(f"acceptance of {tied} requests is not compared, as rounding made their tokens differ")
    for name, good in verdicts.items():
        if name != "checksums" or verify:
            console.print(f"  {name:<11} {words_of(name, good, compared)}")
    good = all(verdicts.values())
    console.print("[bold green]nothing was lost" if good else "[bold red]NOT as one undivided engine: see above")


def _copied(router: Router) -> str:
    """Line of what was copied; its time is that of the rows that were left when prefill was over."""
    total, left = sum(sum(s["bytes"].values()) for s in router.sent), _left(router)
    spent = f"{1000 * sum(s['seconds'] for s in router.sent):.1f} ms in all"
    if left == total:
        return f"copied {total:,} bytes in {len(router.sent)} programs, {spent}"
    return f"copied {total:,} bytes, {total - left:,} of them while prefill still computed; the others took {spent}"


def _left(router: Router) -> int:
    """Bytes that were still to be copied when prefill was over."""
    return sum(word["left"] for word in router.sent)


Place = tuple[int, int]
"""Replica and rank."""


def matrix(router: Router) -> dict[tuple[Place, Place, str], int]:
    """Bytes copied, by source rank, decode rank and group."""
    found: dict[tuple[Place, Place, str], int] = defaultdict(int)
    for request in router.requests:
        for word in request.sent:
            here, there = request.replicas
            for group, count in word["bytes"].items():
                found[(here, word["source"]), (there, word["sink"]), group] += count
    return found


def _rows(router: Router) -> dict[tuple[int, int], tuple[int, int]]:
    """Rows of images, and their bytes, by encoder rank and rank of prefill."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for word in (word for request in router.requests for word in request.rows):
        rows, count = found.get((word["source"], word["sink"]), (0, 0))
        found[word["source"], word["sink"]] = rows + word["rows"], count + word["bytes"]
    return dict(sorted(found.items()))


def _encoded(rows: dict[tuple[int, int], tuple[int, int]]) -> Table:
    table = Table(title="rows of images, by rank", title_justify="left")
    for name in ("from -> to", "rows", "bytes"):
        table.add_column(name, justify="left" if name == "from -> to" else "right")
    for (source, sink), (count, size) in rows.items():
        table.add_row(f"E{source} -> P{sink}", f"{count:,}", f"{size:,}")
    return table


def _required(router: Router) -> str:
    """Whom each decode rank awaits; of several prefill replicas, ranks of the one that the ticket names."""
    if not router.several:
        required = router.plan["required"].items()
        return ", ".join(f"decode rank {d} awaits {len(p)} ({', '.join(f'P{r}' for r in p)})" for d, p in required)
    return ", ".join(
        f"D{replica}.{rank} awaits {len(sources)} (rank{'s' * (len(sources) > 1)} {', '.join(map(str, sources))})"
        for replica, plan in sorted(router.plans.items())
        for rank, sources in plan["required"].items()
    )


def _routes(router: Router) -> Table:
    groups: list[str] = router.plan["groups"]
    pairs = {request.replicas for request in router.requests if request.engines}
    routes = {
        ((here, r["source"]), (there, r["sink"]), r["group"])
        for here, there in pairs
        for r in router.plans[there]["routes"]
    }
    moved = matrix(router)
    carried = {g for _, _, g in moved}
    arrived = {request.replicas for request in router.requests if request.arrived}
    caption = "P1.0: rank 0 of prefill replica 1" if router.several else None
    table = Table(title="routes: who sends which group, bytes in all, to whom", title_justify="left", caption=caption)
    table.add_column("from -> to")
    for group in groups:
        table.add_column(group, justify="right")
    table.add_column("send flags", justify="right")
    for s, d in sorted({(s, d) for s, d, _ in routes}):
        cells = []
        for g in groups:
            copied = g in carried or (s[0], d[0]) not in arrived
            shown = f"{moved.get((s, d, g), 0):,}" if copied else "in Done"
            cells.append(shown if (s, d, g) in routes else "-")
        flags = " ".join(str(int((s, d, g) in routes)) for g in groups)
        names = (".".join(map(str, place[not router.several :])) for place in (s, d))
        table.add_row("P{} -> D{}".format(*names), *cells, flags)
    return table


def _requests(router: Router, compared: list[Compared], cold: bool) -> Table:
    caption = "wait: Transfer to last Done, prefill included; accept: tokens per target step, PD and one engine"
    if cold:
        caption += " whose draft begins with zero rows too"
    if any(c.rounded for c in compared):
        caption += f"; tied: each token is within {TIED:g} errors of rounding of the best logit"
    table = Table(title="requests", title_justify="left", caption=caption)
    table.add_column("prompt", no_wrap=True)
    for name in (
        "tokens",
        "out",
        "wait\nms",
        "from\nto" if router.several else "copy\nms",
        "accept\nPD",
        "accept\none",
        "same\ntokens",
    ):
        table.add_column(name, justify="right")
    for c in compared:
        r = c.request
        undivided = _shown(c.stats.mean_acceptance)
        if r.error is not None:
            table.add_row(r.prompt.name, str(len(r.prompt.tokens)), *"----", undivided, "[red]failed")
            continue
        seconds = max((rank["seconds"] for rank in r.arrived or []), default=0.0)
        copied = f"{1000 * sum(word['seconds'] for word in r.sent):.1f}"
        table.add_row(
            r.prompt.name,
            str(len(r.prompt.tokens)),
            str(len(r.tokens)),
            f"{1000 * seconds:.{0 if router.several else 1}f}",
            "P{} D{}".format(*r.replicas) if router.several else copied,
            _shown(_length(r.stats)),
            undivided,
            _same(c),
        )
    return table


def _same(c: Compared) -> str:
    if c.same_tokens or not c.agrees:
        return "yes" if c.same_tokens else "[red]NO"
    return "sampled" if c.lag is None else "tied"


def _shown(acceptance: float) -> str:
    return f"{acceptance:.2f}" if acceptance else "-"


def _length(stats: dict[str, Any] | None) -> float:
    return stats["decoded"] / stats["steps"] if stats and stats["steps"] else 0.0
