"""`make demo ARGS="--tiers"`: plays conversations that do not fit on the device, and compares three engines."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from ..data import load_text
from ..engine.description import Layout
from ..engine.tiered_engine import Answer, TieredEngine
from ..errors import EngineError
from . import turns as two
from .arguments import DemoOptions

HEADS = (
    "turn", "prompt", "on the\ndevice", "on the\nhost", "stored", "new", "first\ntoken", "all\nnew", "a step\ngives",
    "never\nevicted", "tokens",
)  # fmt: skip
"""Column heads. Tokens of a prompt by where they were found; milliseconds to the first token, and if all is new."""
CONVERSATIONS, TURNS = 4, 3
OPENS, GOES_ON = 10, 3
"""Pages of text that a conversation opens with, and that each further turn adds."""


@attrs.frozen
class Turn:
    """One turn of one conversation, as three engines answered it."""

    conversation: int
    number: int
    prompt: list[int]
    kept: Answer
    """By an engine that keeps pages on the device, on the host and in a folder."""
    never: Answer
    """By an engine whose device has room for everything."""
    anew: Answer
    """By an engine that keeps nothing and computes everything."""

    @property
    def same_tokens(self) -> bool:
        """Whether all three generated the same tokens."""
        return self.kept.tokens == self.never.tokens == self.anew.tokens

    @property
    def same_acceptance(self) -> bool:
        """Whether as many of the draft's tokens were accepted as where nothing was evicted."""
        return self.kept.stats == self.never.stats


def order() -> Iterator[int]:
    """The conversations in turn, up and down: some then find their pages on the device, others further down."""
    for turn in range(TURNS):
        yield from range(CONVERSATIONS) if turn % 2 == 0 else reversed(range(CONVERSATIONS))


def play(
    folders: Sequence[Path],
    page_size: int,
    max_new: int,
    chunk: int,
    k: int,
    told: Callable[[Turn], None] = lambda turn: None,
    use: Callable[[TieredEngine], None] = lambda engine: None,
    **how: Any,
) -> tuple[list[Turn], TieredEngine]:
    """Play all turns; returns them and the engine that keeps pages, which is closed.

    `told` is called with each turn, and `use` with that engine before it begins, which is made with `how`. Raises
    EngineError.
    """
    longest = TURNS * max_new + (OPENS + (TURNS - 1) * GOES_ON) * page_size
    each = -(-longest // page_size) + 1
    made = partial(TieredEngine, *folders, page_size=page_size, chunk=chunk, k=k)
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="kvproto-") as name:
        engine = made(pages=each + each // 2, host=2 * each, storage=Path(name), **how)
        never = made(pages=(CONVERSATIONS + 1) * each, host=1)
        anew = made(pages=each, host=1, keep=False)
        use(engine)
        said, so_far = _texts(engine, page_size), [list[int]() for _ in range(CONVERSATIONS)]
        numbers = Counter[int]()
        try:
            for which in order():
                numbers[which] += 1
                prompt = so_far[which] + said[which][numbers[which] - 1]
                engine.drain()  # storage has as much time in practice, while other requests are served
                found = [each.answer(prompt, max_new) for each in (engine, never, anew)]
                so_far[which] = prompt + found[0].tokens
                turns.append(Turn(which, numbers[which], prompt, *found))
                told(turns[-1])
        finally:
            for one in (engine, never, anew):
                one.close()
    return turns, engine


def verdict(turns: list[Turn]) -> dict[str, bool]:
    """Whether each claim holds, by name."""
    return {
        "tokens": all(turn.same_tokens for turn in turns),
        "acceptance": all(turn.same_acceptance for turn in turns),
        "tiers": all(any(getattr(turn.kept, name) for turn in turns) for name in ("device", "host", "storage")),
    }


def run(
    folders: Sequence[Path],
    page_size: int,
    max_new: int,
    chunk: int,
    k: int,
    console: Console | None,
    options: DemoOptions | None = None,
) -> int:
    """Play and print all turns, as JSON without a console; returns the exit status.

    With `options`, a prefill and a decode engine serve the same turns too. Raises EngineError.
    """
    table = Table(title="turns", title_justify="left")
    for head in HEADS:
        table.add_column(head, justify="right")

    def tell(turn: Turn) -> None:
        if console is not None:
            console.print(f"conversation {turn.conversation + 1}, turn {turn.number}: {len(turn.prompt)} tokens")
        table.add_row(*_row(turn))

    jax = options is not None and options.prefill_framework != "torch"
    how = _in_jax(options.prefill_tp) if options is not None and jax else {}
    turns, engine = play(folders, page_size, max_new, chunk, k, tell, **how)
    served = by_two(turns, options) if options else []
    verdicts = verdict(turns) | (two.verdict(served) if served else {})
    if console is None:
        print(json.dumps({**as_json(turns, engine, verdicts), "served": two.as_json(served)}))
    else:
        console.print(table)
        console.print(summary(turns, engine, not jax))
        if served:
            console.print(two.table(served))
        says = {
            "tokens": "all tokens are those of an engine that computes everything anew",
            "acceptance": "the draft's proposals were accepted as often as where nothing is evicted",
            "tiers": "pages were found on the device, on the host and in storage",
            **two.SAYS,
        }
        for name, good in verdicts.items():
            console.print(f"{'[green]✓' if good else '[red]✗'}[/] {says[name]}")
    return 0 if all(verdicts.values()) else 1


def _in_jax(tp: int) -> dict[str, Any]:
    """Arguments by which `TieredEngine` computes in JAX, on so many ranks of this process."""
    from ..jax_engine.build import jax_hosted  # imports JAX, which torch engines do without

    return {"layout": Layout(tp=tp), "hosted": jax_hosted}


def by_two(turns: list[Turn], options: DemoOptions) -> list[two.Served]:
    """Serve the same turns with a prefill and a decode engine whose pools hold a conversation and a half."""
    asked, last = [], dict[int, Turn]()
    units = options.page_size_of("decode") * options.dcp, options.page_size_of("prefill") * options.prefill_cp
    for turn in turns:
        before = last.get(turn.conversation)
        prompt = len(before.prompt) if before else 0
        rows = prompt + len(before.never.tokens) - 1 if before else 0  # the last token has no row
        for unit in units:
            rows -= rows % unit
        name = f"{turn.conversation + 1}.{turn.number}"
        asked.append(two.Asked(name, turn.prompt, turn.never, prompt, rows))
        last[turn.conversation] = turn
    most = max(len(turn.prompt) + len(turn.never.tokens) for turn in turns)
    pages = [-(-most // options.page_size_of(role)) + 1 for role in ("prefill", "decode")]
    return two.serve(options, asked, max(pages) * 3 // 2, 2 * min(pages))


def summary(turns: list[Turn], engine: TieredEngine, timed: bool = True) -> str:
    """The figures of a run, in two sentences; without `timed`, no times of engines in different frameworks."""
    later = [turn for turn in turns if turn.number > 1]
    with_, without = (sum(getattr(t, name).first for t in later) / len(later) for name in ("kept", "anew"))
    counts, copies = engine.tiers.counts, engine.tiers.copies
    said = (
        f"Of a page {sum(engine.tiers.device.layout.lengths.values()):,} bytes are kept, target and draft;"
        f" {copies.bytes / 1e6:.1f} MB went between device and host in {copies.programs} copies, and {counts['stored']}"
        f" pages to storage, {counts['fetched']} back."
    )
    first = (
        f" The first token of a later turn took {1e3 * with_:.0f} ms, and {1e3 * without:.0f} ms where all is computed."
    )
    return said + first if timed else said


def as_json(turns: list[Turn], engine: TieredEngine, verdicts: dict[str, bool]) -> dict[str, Any]:
    """The results as a JSON object."""
    rows = [
        {
            "conversation": turn.conversation,
            "turn": turn.number,
            "prompt_tokens": len(turn.prompt),
            **{name: getattr(turn.kept, name) for name in ("device", "host", "storage", "tokens")},
            "first_ms": round(1e3 * turn.kept.first, 2),
            "computed_first_ms": round(1e3 * turn.anew.first, 2),
            "acceptance": turn.kept.stats.mean_acceptance,
            "never_evicted_acceptance": turn.never.stats.mean_acceptance,
            "same_tokens": turn.same_tokens,
            "same_acceptance": turn.same_acceptance,
        }
        for turn in turns
    ]
    copies = {"programs": engine.tiers.copies.programs, "bytes": engine.tiers.copies.bytes}
    return {"turns": rows, "copies": copies, "pages": dict(engine.tiers.counts), "verdicts": verdicts}


def _row(turn: Turn) -> list[str]:
    kept = turn.kept
    there = kept.device + kept.host + kept.storage
    return [
        f"{turn.conversation + 1}.{turn.number}", str(len(turn.prompt)), str(kept.device), str(kept.host),
        str(kept.storage), str(len(turn.prompt) - there), f"{1e3 * kept.first:.0f}", f"{1e3 * turn.anew.first:.0f}",
        f"{kept.stats.mean_acceptance:.2f}", f"{turn.never.stats.mean_acceptance:.2f}",
        "[green]same" if turn.same_tokens else "[red]others",
    ]  # fmt: skip


def _texts(engine: TieredEngine, page_size: int) -> list[list[list[int]]]:
    """The tokens said in each turn of each conversation, cut from one text; raises EngineError if it is too short."""
    sizes = [pages * page_size for pages in (OPENS, *[GOES_ON] * (TURNS - 1))]
    text, at, found = engine.tokenizer.encode(load_text().encode()), 0, []
    if len(text) < CONVERSATIONS * sum(sizes):
        raise EngineError(f"--page-size {page_size} takes more text than there is: {len(text)} tokens")
    for _ in range(CONVERSATIONS):
        ends = [at + sum(sizes[: n + 1]) for n in range(TURNS)]
        found.append([text[end - size : end] for end, size in zip(ends, sizes, strict=True)])
        at = ends[-1]
    return found
