"""Serves the turns of `make demo ARGS="--tiers"` again, with a prefill and a decode engine that keep pages.

First only prefill keeps them, then both do in one storage: decode writes what it generated, and prefill finds it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Group
from rich.table import Table

from kvproto import Finder

from ..engine.sequence import SpeculationStats
from ..engine.tiered_engine import Answer
from .arguments import DemoOptions
from .engines import Engines
from .options import rank_address
from .prompts import Prompt
from .router import LOAD, Request, Router
from .start import start

KEEPERS = (("prefill",), ("prefill", "decode"))
"""Engines that keep pages, one run after the other."""
HEADS = ("turn", "prompt", "a router\nwas told", "prefill\nfound", "computed", "decode\nhad", "a step\ngives", "tokens")
"""Column heads. What was found counts tokens of the prompt: on the device, on the host and in storage."""
PLACES = "device", "host", "storage"


@attrs.frozen
class Asked:
    """A turn of a conversation, with the answer of an engine that never evicts."""

    name: str
    prompt: list[int]
    right: Answer
    before: int
    """Tokens of the previous turn's prompt."""
    kept: int
    """Tokens that prefill can find: those of the previous prompt and answer that fill whole pages of both engines."""


@attrs.frozen
class Served:
    """A turn as the two engines served it."""

    asked: Asked
    keepers: tuple[str, ...]
    request: Request
    told: int
    """Tokens of the prompt that prefill had before, according to a Finder."""

    @property
    def same_tokens(self) -> bool:
        """Whether they generated the tokens of the engine that never evicts."""
        return self.request.tokens == self.asked.right.tokens

    @property
    def stats(self) -> SpeculationStats:
        """The counts of proposed and accepted draft tokens."""
        said = self.request.stats or {}
        names = {"steps": "steps", "tokens": "decoded", "proposed": "proposed", "accepted": "accepted"}
        return SpeculationStats(**{name: said.get(theirs, 0) for name, theirs in names.items()})

    def found(self, role: str, *places: str) -> int:
        """Tokens of the prompt that an engine found in these places, or in all PLACES if none is given."""
        said = self.request.found.get(role, {})
        return sum(said.get(place, 0) for place in places or PLACES)

    def split(self, role: str) -> str:
        """Tokens of the prompt that an engine found in each of PLACES, with "+" between."""
        return "+".join(str(self.found(role, place)) for place in PLACES)

    @property
    def handed_over(self) -> int:
        """Tokens that decode lacked and prefill read from the host or from storage, to send them."""
        there = self.found("prefill")
        return min(there - self.request.cached, self.found("prefill", "host", "storage"))


def serve(options: DemoOptions, asked: Sequence[Asked], pages: int, host: int) -> list[Served]:
    """Serve each turn with each set of KEEPERS, by engines with `pages` pages in a pool and `host` on the host."""
    return [served for keepers in KEEPERS for served in _serve(options, asked, pages, host, keepers)]


def _serve(
    options: DemoOptions, asked: Sequence[Asked], pages: int, host: int, keepers: tuple[str, ...]
) -> Iterable[Served]:
    with contextlib.ExitStack() as stack:
        folder, storage = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvproto-", ignore_cleanup_errors=True)))
            for _ in range(2)
        )
        outside = stack.enter_context(contextlib.ExitStack())  # ends after the engines
        engines = stack.enter_context(Engines(fork=options.prefill_framework == "torch"))  # else JAX runs here
        kept = ["--host-pages", str(host), "--storage", str(storage)]
        start(engines, attrs.evolve(options, pages=pages), folder, outside, dict.fromkeys(keepers, kept))
        router = Router(folder, "prefill", engines, options.prefill_dp, options.decode_dp)
        stack.callback(router.close)
        router.wait_ready(LOAD, LOAD)
        sizes = {"prefill": options.prefill_tp * options.prefill_cp * options.prefill_pp,
                 "decode": options.decode_tp * options.decode_pp}  # fmt: skip
        ranks = [(role, rank) for role in keepers for rank in range(sizes[role])]
        seeds = [rank_address(f"ipc://{folder / 'kv'}", replica, 0) for replica in range(options.prefill_dp)]
        finder = stack.enter_context(Finder([] if options.tcp or options.namespaces else seeds))
        finder.wait(LOAD)
        told: list[int] = []
        for turn in asked:
            told.append(max((held.tokens for held in finder.find(turn.prompt[:-1])), default=0))
            router.submit([Prompt(name=turn.name, tokens=turn.prompt)], len(turn.right.tokens))
            router.collect(lambda request: None, lambda: _settled(router, ranks))
        router.stop()
    return [
        Served(turn, keepers, request, had) for turn, request, had in zip(asked, router.requests, told, strict=True)
    ]


def _settled(router: Router, ranks: Sequence[tuple[str, int]]) -> bool:
    """Whether every rank has stored the pages of all requests that are over."""
    done = dict.fromkeys(ranks, 0)
    for (name, rank), word in router.settled.items():
        done[name.partition("-")[0], rank] += word["left"]
    return all(count >= sum(r.tries for r in router.requests) for count in done.values())


def verdict(served: Sequence[Served]) -> dict[str, bool]:
    """Whether each claim of SAYS holds, for those that apply."""
    found = {
        "served_tokens": all(one.same_tokens for one in served),
        "served_acceptance": all(one.stats == one.asked.right.stats for one in served),
        "served_from_tiers": any(one.handed_over > 0 for one in served),
    }
    if any(one.told for one in served):  # over ipc
        found["served_told"] = all(one.told <= one.found("prefill") for one in served)
    # prefill never had what decode generated, but from storage
    grown = [one for one in served if "decode" in one.keepers and one.asked.kept > one.asked.before]
    return found | ({"served_generated": all(one.found("prefill") >= one.asked.kept for one in grown)} if grown else {})


SAYS = {
    "served_tokens": "a prefill and a decode engine that keep pages wrote the same tokens",
    "served_acceptance": "and the draft's proposals were accepted as often",
    "served_generated": "prefill found in storage what decode had generated",
    "served_told": "prefill found all that a router was told it has",
    "served_from_tiers": "prefill handed over pages from the host and from storage, without computing them",
}
"""The claims of `verdict`, as printed."""


def table(served: Sequence[Served]) -> Group:
    """A table for each set of KEEPERS, with a row for each turn."""
    tables = []
    for keepers in KEEPERS:
        who = " and ".join(keepers) + (" keeps" if len(keepers) == 1 else " keep")
        made = Table(title=f"served by two engines: {who} pages (device + host + storage)", title_justify="left")
        for head in HEADS:
            made.add_column(head, justify="right", no_wrap=True)
        for one in (each for each in served if each.keepers == keepers):
            prompt, found = len(one.asked.prompt), one.split("prefill")
            had = one.split("decode") if "decode" in keepers else str(one.request.cached)
            same = "[green]same" if one.same_tokens else "[red]others"
            computed, gives = prompt - one.found("prefill"), f"{one.stats.mean_acceptance:.2f}"
            made.add_row(one.asked.name, str(prompt), str(one.told), found, str(computed), had, gives, same)
        tables.append(made)
    return Group(*tables)


def as_json(served: Sequence[Served]) -> list[dict[str, Any]]:
    """The turns as JSON objects, in tokens."""
    return [
        {
            "turn": one.asked.name,
            "keepers": [*one.keepers],
            "prompt_tokens": len(one.asked.prompt),
            "told": one.told,
            "found": one.request.found,
            "cached": one.request.cached,
            "handed_over": max(one.handed_over, 0),
            "tokens": one.request.tokens,
            "error": one.request.error,
            "acceptance": one.stats.mean_acceptance,
            "same_tokens": one.same_tokens,
        }
        for one in served
    ]
