"""Requests at random through two engines with few blocks: handed over either way, aborted at any stage, preempted."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import attrs

from kvproto import new_ticket, write_ticket
from tools.engines.vllm_engine import ASK, DEADLINE, PATIENCE, Engine, Result, new_name, prompts

MOST = 24
"""Tokens that a decode engine makes of a prompt."""
_WAYS = ("prefill first", "both at once", "decode first", "one engine")
_ABORTS = ("prefill", "between", "decode")
_ABORTED = 0.3
"""Share of requests that are aborted."""


@attrs.define
class Figures:
    """The outcomes of the requests."""

    requests: int = 0
    right: int = 0
    fetched: int = 0
    aborted: int = 0
    preempted: int = 0
    lost: list[str] = attrs.Factory(list)
    seconds: float = 0.0


@attrs.define
class _Request:
    """A request of a user, on its way through the engines.

    Fields:
        abort: Where it is aborted, and so many seconds after it came there.
        at: By stage, "prefill" or "decode": the engine, the name there, and when it came.
    """

    prompt: int
    way: str
    prefill: Engine
    decode: Engine
    abort: tuple[str, float]
    at: dict[str, tuple[Engine, str, float]] = attrs.Factory(dict)
    over: bool = False
    aborted: bool = False


class _Crowd:
    """Requests under way; no more than `most` at a time."""

    def __init__(self, engines: tuple[Engine, Engine], number: int, most: int, seed: int) -> None:
        self.engines, self.most, self.dice = engines, most, random.Random(seed)
        self.left, self.under = number, list[_Request]()
        self.by_name: dict[str, tuple[_Request, str]] = {}
        self.figures = Figures(requests=number)
        self.texts = prompts(24, 20, 220, seed)
        for i in range(0, len(self.texts), 3):  # some begin alike
            self.texts[i] = self.texts[0][:64] + self.texts[i][64:]
        self.alone = [engines[1].run(new_name(), text, MOST)[0] for text in self.texts]

    def run(self) -> Figures:
        began = time.monotonic()
        while (self.left or self.under) and time.monotonic() - began < PATIENCE:
            while self.left and len(self.under) < self.most:
                self.left -= 1
                self._begin()
            for engine in self.engines:
                for name, result in engine.finished():
                    self._finished(name, result)
            for request in self.under:
                self._abort(request, time.monotonic())
            self.under = [request for request in self.under if not request.over]
        self.figures.lost += [f"{request.way}, {request.abort}: never ended" for request in self.under]
        self.figures.seconds = time.monotonic() - began
        return self.figures

    def _begin(self) -> None:
        prefill, decode = self.dice.sample(self.engines, 2)
        aborts = (self.dice.choice(_ABORTS), self.dice.random() ** 3) if self.dice.random() < _ABORTED else ("", 0.0)
        made = _Request(self.dice.randrange(len(self.texts)), self.dice.choice(_WAYS), prefill, decode, aborts)
        self.under.append(made)
        if made.way == "one engine":
            self._add(made, "decode", None)
        elif made.way == "prefill first":
            self._add(made, "prefill", ASK)
        else:
            ticket = {"ticket": write_ticket(new_ticket(prefill.name, deadline=2 * DEADLINE))}
            stages = [("prefill", ASK | ticket), ("decode", {"do_remote_prefill": True} | ticket)]
            for stage, params in stages if made.way == "both at once" else reversed(stages):
                self._add(made, stage, params)

    def _add(self, request: _Request, stage: str, params: Any) -> None:
        engine, name = getattr(request, stage), new_name()
        request.at[stage] = engine, name, time.monotonic()
        self.by_name[name] = request, stage
        engine.add(name, self.texts[request.prompt], 1 if stage == "prefill" else MOST, params)

    def _abort(self, request: _Request, now: float) -> None:
        stage, after = request.abort
        if request.aborted or stage not in request.at or now - request.at[stage][2] < after:
            return
        request.aborted = request.over = True
        self.figures.aborted += 1
        for engine, name, _ in request.at.values():  # as a client that goes away
            engine.abort(name)

    def _finished(self, name: str, result: Result) -> None:
        request, stage = self.by_name.pop(name)
        tokens, reason, params, _ = result
        if request.over:
            return
        if stage == "prefill":
            if request.way == "prefill first":
                if request.abort[0] == "between":
                    request.over = request.aborted = True  # its blocks wait until the ticket is void
                    self.figures.aborted += 1
                else:
                    self._add(request, "decode", params)
            return
        request.over = True
        if (tokens, reason) == (self.alone[request.prompt], "length"):
            self.figures.right += 1
            self.figures.fetched += name in request.decode.fetched
        else:
            self.figures.lost.append(f"{request.way}, prompt {request.prompt}: {tokens}, {reason}")


def crowd(one: Engine, two: Engine, number: int = 200, most: int = 16, seed: int = 0) -> Figures:
    """Send so many requests, so many of them at a time, and wait until both engines have all their blocks again."""
    figures = _Crowd((one, two), number, most, seed).run()
    for engine in (one, two):
        if not engine.idle(2 * DEADLINE + 20):
            figures.lost.append(f"{engine.name} has {engine.free()}, not {engine.blocks} free blocks")
        figures.preempted += engine.preempted()
    return figures


def at_random(one: Engine, two: Engine) -> Iterator[str]:
    """None of 200 requests is lost, and no block leaks."""
    figures = crowd(one, two)
    yield from figures.lost
    if not figures.preempted or not figures.fetched or not figures.aborted:
        yield f"it was too easy: {figures}"
