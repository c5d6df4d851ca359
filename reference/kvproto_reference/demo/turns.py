"""The turns of `make demo ARGS="--tiers"` again, by a prefill engine that keeps pages and a decode engine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.table import Table

from ..engine.kept import Answer
from ..engine.sequence import SpeculationStats
from .arguments import DemoOptions
from .engines import Engines
from .prompts import Prompt
from .router import LOAD, Request, Router
from .start import start

HEADS = (
    "turn", "prompt", "on the\ndevice", "on the\nhost", "stored", "computed", "decode\nhad", "a step\ngives", "tokens"
)  # fmt: skip
"""Tokens of a prompt by where prefill found them; tokens a step."""
PLACES = "device", "host", "storage"


@attrs.frozen
class Asked:
    """A turn of a conversation, and what an engine that never evicts answered."""

    name: str
    prompt: list[int]
    right: Answer


@attrs.frozen
class Served:
    """The same turn, as both engines have served it."""

    asked: Asked
    request: Request

    @property
    def same_tokens(self) -> bool:
        """Whether they wrote the same."""
        return self.request.tokens == self.asked.right.tokens

    @property
    def stats(self) -> SpeculationStats:
        """What became of the draft's tokens."""
        said = self.request.stats or {}
        names = {"steps": "steps", "tokens": "decoded", "proposed": "proposed", "accepted": "accepted"}
        return SpeculationStats(**{name: said.get(theirs, 0) for name, theirs in names.items()})

    def found(self, *places: str) -> int:
        """Tokens of the prompt that prefill found there."""
        return sum(self.request.found.get(place, 0) for place in places)

    @property
    def handed_over(self) -> int:
        """Tokens that decode had not, and that prefill took from the host or from storage to send them."""
        return max(min(self.found(*PLACES) - self.request.cached, self.found("host", "storage")), 0)


def serve(options: DemoOptions, asked: Sequence[Asked], pages: int, host: int) -> list[Served]:
    """Each turn, by engines with pools of `pages` pages; prefill has `host` pages on the host, and a folder."""
    with contextlib.ExitStack() as stack:
        folder, storage = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvproto-", ignore_cleanup_errors=True)))
            for _ in range(2)
        )
        outside = stack.enter_context(contextlib.ExitStack())  # ends after the engines
        engines = stack.enter_context(Engines())
        kept = {"prefill": ["--host-pages", str(host), "--storage", str(storage)]}
        start(engines, attrs.evolve(options, pages=pages), folder, outside, kept)
        router = Router(folder, "prefill", engines, options.prefill_dp, options.decode_dp)
        stack.callback(router.close)
        router.wait_ready(LOAD, LOAD)
        ranks = options.prefill_tp * options.prefill_cp * options.prefill_pp
        for turn in asked:
            router.submit([Prompt(name=turn.name, tokens=turn.prompt)], len(turn.right.tokens))
            router.collect(lambda request: None, lambda: _settled(router, ranks))
        router.stop()
    return [Served(turn, request) for turn, request in zip(asked, router.requests, strict=True)]


def _settled(router: Router, ranks: int) -> bool:
    """Whether all that requests have left is stored, as each rank of all replicas says."""
    done = [0] * ranks
    for (_, rank), left in router.settled.items():
        done[rank] += left
    return min(done) >= len(router.requests)


def verdict(served: Sequence[Served]) -> dict[str, bool]:
    """What was proved, by name."""
    return {
        "served_tokens": all(one.same_tokens for one in served),
        "served_acceptance": all(one.stats == one.asked.right.stats for one in served),
        "served_from_tiers": any(one.handed_over > 0 for one in served),
    }


SAYS = {
    "served_tokens": "a decode engine, served by a prefill engine that keeps pages, wrote the same tokens",
    "served_acceptance": "and the draft's proposals were accepted as often",
    "served_from_tiers": "prefill handed over pages from the host and from storage, without computing them",
}
"""What is said of each."""


def table(served: Sequence[Served]) -> Table:
    """A row a turn, for people."""
    made = Table(title="served by two engines", title_justify="left")
    for head in HEADS:
        made.add_column(head, justify="right")
    for one in served:
        prompt, places = len(one.asked.prompt), [one.found(place) for place in PLACES]
        figures = prompt, *places, prompt - sum(places), one.request.cached
        same = "[green]same" if one.same_tokens else "[red]others"
        made.add_row(one.asked.name, *map(str, figures), f"{one.stats.mean_acceptance:.2f}", same)
    return made


def as_json(served: Sequence[Served]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {
            "turn": one.asked.name, "prompt_tokens": len(one.asked.prompt),
            "found": one.request.found, "cached": one.request.cached, "handed_over": one.handed_over,
            "tokens": one.request.tokens, "error": one.request.error,
            "acceptance": one.stats.mean_acceptance, "same_tokens": one.same_tokens,
        }
        for one in served
    ]  # fmt: skip
