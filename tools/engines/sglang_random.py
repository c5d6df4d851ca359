"""Requests at random through a prefill and a decode engine of SGLang with few pages, aborted at any stage at either of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import attrs

from tools.engines.child import PATIENCE, new_name, prompts
from tools.engines.sglang_engine import Alone, Engine, room, where

_ABORTED = 0.3
"""Share of requests that are aborted."""
_LATE = 0.5
"""Seconds by which one engine hears of a request after the other, at most."""


@attrs.define
class _Request:
    """A request on its way through both engines.

    Fields:
        due: What is still to be done, each at its time: add or abort it, at which engine (0: prefill).
        names: Of those engines that have it.
        ended: Of those that are done with it: tokens and what SGLang says.
    """

    prompt: list[int]
    body: dict[str, Any]
    due: list[tuple[float, str, int]]
    aborted: bool
    names: dict[int, str] = attrs.Factory(dict)
    ended: dict[int, Any] = attrs.Factory(dict)


@attrs.define
class _Crowd:
    """Requests under way, no more than `most` at a time."""

    engines: tuple[Engine, Engine]
    left: int
    most: int
    dice: random.Random = attrs.Factory(lambda: random.Random(0))
    under: list[_Request] = attrs.Factory(list)
    over: list[_Request] = attrs.Factory(list)

    def run(self) -> None:
        """Until all are over, or none has been for long."""
        texts = prompts(24, 20, 220)
        texts = [texts[0][:64] + text[64:] if i % 3 == 0 else text for i, text in enumerate(texts)]  # some begin alike
        by_name: dict[str, tuple[_Request, int]] = {}
        until = time.monotonic() + PATIENCE
        while (self.left or self.under) and time.monotonic() < until:
            while self.left and len(self.under) < self.most:
                self.left -= 1
                self.under.append(self._made(self.dice.choice(texts)))
            for request in self.under:
                self._do(request, by_name)
            for which, engine in enumerate(self.engines):
                for name, result in engine.finished():
                    request, _ = by_name.pop(name)
                    request.ended[which] = result
            self.over += [request for request in self.under if len(request.ended) == 2]
            self.under = [request for request in self.under if len(request.ended) < 2]

    def _made(self, prompt: list[int]) -> _Request:
        now, dice = time.monotonic(), self.dice
        times = [now, now + dice.choice((0, _LATE * dice.random()))]
        dice.shuffle(times)
        due = [(at, "add", which) for which, at in enumerate(times)]
        aborted = dice.random() < _ABORTED
        if aborted:
            at = max(times) + dice.random() ** 3
            due += [(at, "abort", which) for which in dice.choice(((0,), (1,), (0, 1)))]
        return _Request(prompt, where(self.engines[0], room()), sorted(due), aborted)

    def _do(self, request: _Request, by_name: dict[str, tuple[_Request, int]]) -> None:
        while request.due and request.due[0][0] <= time.monotonic():
            _, what, which = request.due.pop(0)
            if what == "abort":
                self.engines[which].abort(request.names[which])
                continue
            name = request.names[which] = new_name()
            by_name[name] = request, which
            self.engines[which].add(name, request.prompt, **request.body)


def at_random(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """None of 200 requests is lost, and both allocators have all their pages again."""
    crowd = _Crowd((one, two), 200, 16)
    crowd.run()
    for request in crowd.under:
        yield f"never ended: {request.names}, aborted: {request.aborted}"
    whole = 0
    for request in crowd.over:
        tokens, said = request.ended[1]
        reason, right = said["finish_reason"]["type"], tokens == alone.run(request.prompt)[0]
        whole += right
        if (reason == "length" or not request.aborted) and not right:
            yield f"prompt of {len(request.prompt)}, aborted: {request.aborted}: {tokens}, {said['finish_reason']}"
    stopped = sum(request.aborted for request in crowd.over)
    if whole < 100 or not stopped:
        yield f"it was too easy: {whole} of {len(crowd.over)} are whole, {stopped} were aborted"
    for engine in (one, two):
        if not engine.idle():
            yield f"{engine.name} has {engine.free()}, not {engine.blocks} free tokens"
