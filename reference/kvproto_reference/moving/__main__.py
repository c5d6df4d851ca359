"""`make moving`: three engines that can do both copy pages, move a running request, and change roles under load.

Each answer is compared with that of one undivided engine; the exit status is 1 if one differs or is lost.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from kvproto.errors import KvprotoError

from ..checkpoint import shared_tokenizer
from ..data import load_text
from ..demo.engines import Engines
from ..demo.options import checkpoint_folder, draft_folder
from ..demo.prompts import Prompt
from ..demo.router import Request
from ..engine.undivided import Undivided
from ..errors import EngineError
from . import engine
from .router import Copy, Move, PeerRouter

_START, _LONG = 120.0, 120.0
"""Seconds in which engines start, and in which a part of the demo is over."""
_ENGINES: tuple[tuple[str, list[str]], ...] = (
    ("prefill", []),
    ("decode", []),
    ("decode", ["--page-size", "32", "--tp", "2"]),
)
"""The first role of each engine, and what sets it apart."""


@attrs.frozen
class Plan:
    """The sizes of a run."""

    target: str
    draft: str
    tokens: int
    max_new: int
    moves: int
    requests: int
    json: bool


class Stage:
    """The engines, their router, and one undivided engine to compare them with."""

    def __init__(self, plan: Plan, folder: Path, engines: Engines) -> None:
        for replica, (role, more) in enumerate(_ENGINES):
            given = ["--dir", str(folder), "--target", plan.target, "--draft", plan.draft, "--role", role, "--quiet"]
            given += ["--replica", str(replica), "--sources", str(len(_ENGINES)), "--pages", "512", *more]
            engines.start(f"engine-{replica}", engine.main, given)
        self.router = PeerRouter(folder, len(_ENGINES))
        self._engines, self._plan = engines, plan
        target, draft = checkpoint_folder("target", plan.target), draft_folder(plan.draft, 4, plan.target)
        self._tokenizer, text = shared_tokenizer(target), load_text()
        self._text = text[text.index("Alice was beginning") :]
        self._undivided = Undivided(target, *([] if draft is None else [draft]), pages=512)
        self.wrong = self.lost = 0
        self.told: dict[Request, list[float]] = {}
        """The times at which tokens of each request came."""

    def prompt(self, tokens: int, start: int = 0) -> list[int]:
        """So many tokens of the book, from a character on."""
        return self._tokenizer.encode(self._text[start : start + 8 * tokens].encode())[:tokens]

    def words(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self._tokenizer.encode(text.encode())

    def ask(self, tokens: list[int], max_new: int | None = None) -> Request:
        """Have a prompt answered."""
        request = Request(len(self.told), Prompt(name="", tokens=tokens), max_new or self._plan.max_new)
        self.told[request] = []
        self.router.add(request)
        return request

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve until something holds; raises EngineError if it takes too long."""
        end = time.monotonic() + _LONG
        while not condition():
            self.router.turn(lambda request: self.told[request].append(time.monotonic()), 50)
            self._engines.check()
            if time.monotonic() > end:
                raise EngineError(f"not over after {_LONG:.0f} s")

    def has(self, things: Sized, count: int) -> None:
        """Serve until there are so many."""
        self.until(lambda: len(things) >= count)

    def over(self, *requests: Request) -> None:
        """Wait for answers, and compare them."""
        self.until(lambda: all(request.over for request in requests))
        for request in requests:
            self.lost += request.error is not None
            expected = self._undivided.generate(request.prompt.tokens, max_new=request.max_new).tokens
            self.wrong += request.error is None and request.tokens != expected
            self.router.forget(request)


def copy(stage: Stage) -> dict[str, Any]:
    """The second turn of a conversation: decode hands the pages of the first one back to prefill."""
    first = stage.ask(stage.prompt(200))
    stage.over(first)
    copies: list[Copy] = []
    text = Prompt(name="", tokens=first.prompt.tokens + first.tokens)
    stage.router.copy(text, first.engines[1], "engine-0", copies.append)
    stage.has(copies, 1)
    if copies[0].error:
        raise EngineError(copies[0].error)
    second = stage.ask(text.tokens + stage.words(" And then"))
    stage.over(second)
    found = second.found.get("prefill", {}).get("device", 0)
    return {"tokens": len(second.prompt.tokens), "copied": copies[0].tokens - copies[0].cached, "found": found,
            "bytes": copies[0].bytes, "seconds": copies[0].seconds}  # fmt: skip


def move(stage: Stage, plan: Plan) -> dict[str, Any]:
    """A request with a long prompt goes to and fro between two decode engines of unequal pages and ranks."""
    moves: list[Move] = []
    request = stage.ask(stage.prompt(plan.tokens, 20_000), 8 * plan.moves + plan.max_new)
    for number in range(plan.moves):
        stage.until(partial(_has_written, request, 8 * number + 8))
        if request.over:
            raise EngineError(f"the request was over before it had moved {plan.moves} times: {request.error}")
        there = {"engine-1": "engine-2", "engine-2": "engine-1"}[request.engines[1]]
        stage.router.move(request, there, moves.append, ahead=number > 0)
        stage.has(moves, number + 1)
        if moves[-1].error:
            raise EngineError(moves[-1].error)
    stage.over(request)
    times = stage.told[request]
    steps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return {"moves": plan.moves, "rows": moves[0].rows, "step": statistics.median(steps), **_gaps(moves)}


def _gaps(moves: Sequence[Move]) -> dict[str, Any]:
    """Of the first move, whose rows all came after the stop, and of the others, medians."""
    gaps, fetches = [m.gap for m in moves], [m.seconds for m in moves]
    over = [gap - fetch for gap, fetch in zip(gaps, fetches, strict=True)]
    return {
        "whole": {"fetched": moves[0].fetched, "gap": gaps[0], "fetch": fetches[0], "over": over[0]},
        "ahead": {
            "fetched": statistics.median([m.fetched for m in moves[1:]] or [0]),
            "gap": statistics.median(gaps[1:] or [0.0]),
            "fetch": statistics.median(fetches[1:] or [0.0]),
            "over": statistics.median(over[1:] or [0.0]),
        },
    }


def _has_written(request: Request, tokens: int) -> bool:
    return len(request.tokens) >= tokens or request.over


def _since(told: list[float], began: float) -> None:
    told.append(time.monotonic() - began)


def switch(stage: Stage, plan: Plan) -> dict[str, Any]:
    """An engine that decodes is to prefill while requests come, and then to decode again; it keeps what it has."""
    texts = [stage.prompt(120, 400 * number) for number in range(plan.requests)]
    requests, told = [], list[float]()
    for number, text in enumerate(texts):
        requests.append(stage.ask(text))
        if number in (plan.requests // 3, 2 * plan.requests // 3):
            count, ended = len(told) + 1, partial(_since, told, time.monotonic())
            stage.router.switch("engine-2", "decode" if told else "prefill", ended)
            stage.has(told, count)
        stage.until(lambda: sum(not request.over for request in requests) < 8)
    stage.over(*requests)
    had = next(r for r in requests if r.engines[1] == "engine-2")
    for name, role in (("engine-2", "prefill"), ("engine-0", "decode")):
        stage.router.switch(name, role, partial(_since, told, time.monotonic()))
    stage.has(told, 4)
    again = stage.ask(had.prompt.tokens)
    stage.over(again)
    found = again.found.get("prefill", {}).get("device", 0)
    return {"requests": len(requests) + 1, "seconds": told[:2], "found": found, "prompt": len(had.prompt.tokens),
            "tries": max(request.tries for request in requests)}  # fmt: skip


def run(plan: Plan) -> tuple[dict[str, Any], bool]:
    """Run the plan; returns what was measured, and whether all is well. Raises EngineError."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="kvproto-moving-"))
    folder.chmod(0o700)
    try:
        with Engines() as engines:
            stage = Stage(plan, folder, engines)
            stage.router.wait_ready(_START, _START)
            told = {"copy": copy(stage), "move": move(stage, plan), "switch": switch(stage, plan)}
            stage.router.stop()
            stage.router.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    told |= {"answers": {"asked": len(stage.told), "lost": stage.lost, "wrong": stage.wrong}}
    return told, not stage.lost and not stage.wrong and told["copy"]["found"] > 0 and told["switch"]["found"] > 0


def show(told: dict[str, Any]) -> str:
    """The measurements in a few lines."""
    one, two, three, all_ = (told[name] for name in ("copy", "move", "switch", "answers"))
    lines = [
        f"copy: decode gave prefill the pages of {one['copied']} tokens in {1e3 * one['seconds']:.1f} ms; of the next"
        f" turn's {one['tokens']} tokens prefill found {one['found']}"
    ]
    for name, how in (("whole", "all after the stop"), ("ahead", "the rest copied before")):
        each = two[name]
        lines.append(
            f"move: {two['rows']} rows, {each['fetched']:.0f} of them fetched {how}: no token for"
            f" {1e3 * each['gap']:.1f} ms, {1e3 * each['over']:.1f} more than the fetch; a step takes"
            f" {1e3 * two['step']:.1f} ms"
        )
    there, back = three["seconds"]
    lines += [
        f"switch: decode to prefill in {1e3 * there:.1f} ms and back in {1e3 * back:.1f} ms, under load; of a prompt of"
        f" {three['prompt']} tokens that it had decoded, it found {three['found']} when it prefilled",
        f"answers: {all_['asked']}, lost {all_['lost']}, other than one undivided engine's {all_['wrong']}",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m kvproto_reference.moving", description=__doc__)
    for name, kind, usual, text in (
        ("target", str, "gqa", "target of the engines"), ("draft", str, "none", "their draft"),
        ("tokens", int, 2048, "tokens of the prompt that moves"), ("max-new", int, 32, "tokens of an answer"),
        ("moves", int, 11, "how often it moves"), ("requests", int, 24, "requests while roles change"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=usual, help=f"{text} (default {usual})")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    plan = Plan(**vars(parser.parse_args(argv)))
    try:
        told, well = run(plan)
    except (EngineError, KvprotoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(told) if plan.json else show(told))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
