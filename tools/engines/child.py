"""An engine in its own process, as a test sees it: orders go in over a pipe, and their results come out."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs

PATIENCE = 600.0
"""Seconds for an engine to start or to answer."""

os.environ["OMP_NUM_THREADS"] = "1"


def _one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


_one_thread()  # torch may have read the environment before
os.register_at_fork(after_in_child=_one_thread)
"""A forked process makes torch's pool of threads anew, at its first use. Two threads that load weights may use it first at
once, and one of them then finds none; here no other thread runs yet.
"""


@attrs.define(kw_only=True)
class Child:
    """One process, or the first of a group.

    Fields:
        done: The results of requests that are over, by name, until they are collected.
        blocks: The free pages, or tokens, of an engine that has just started.
    """

    name: str
    pipe: Any = None
    process: Any = None
    done: dict[str, Any] = attrs.Factory(dict)
    blocks: int = 0

    def fork(self, serve: Callable[..., None], *given: Any) -> None:
        """Run `serve(pipe, *given)` in a forked process, with the packages that this one has imported.

        Raises RuntimeError where torch computes with several threads here: OpenMP in the child would wait for those
        threads, which are not forked.
        """
        torch = sys.modules.get("torch")
        if torch is not None and torch.get_num_threads() != 1:
            raise RuntimeError(f"{self.name} cannot be forked: torch has {torch.get_num_threads()} threads here")
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *given), daemon=False)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has started."""
        self.hear("ready")
        self.blocks = self.free()[0]

    def hear(self, kind: str) -> list[Any]:
        """Its next message of this kind; raises RuntimeError if it has ended, or TimeoutError."""
        while self.pipe.poll(PATIENCE):
            try:
                got, *said = list[Any](self.pipe.recv())
            except EOFError:
                self.process.join(10)
                status = self.process.exitcode
                raise RuntimeError(f"{self.name} has ended, exit status {status}; its log says why") from None
            if got == "died":
                raise RuntimeError(f"{self.name}: {said[0]}")
            if got == "done":
                self.ended(*said)
            if got == kind:
                return said
        raise TimeoutError(f"{self.name} says nothing")

    def ended(self, request: str, *result: Any) -> None:
        """Note that a request is over."""
        self.done[request] = result

    def result(self, request: str) -> Any:
        """Of a request, once it is over."""
        until = time.monotonic() + PATIENCE
        while request not in self.done and time.monotonic() < until:
            self.hear("done")
        return self.done.pop(request)

    def finished(self) -> list[tuple[str, Any]]:
        """The requests that have ended since the last call, with their results; waits a moment if there are none."""
        while self.pipe.poll(0 if self.done else 0.002):
            self.hear("done")
        found, self.done = list(self.done.items()), {}
        return found

    def abort(self, request: str) -> None:
        self.pipe.send(("abort", request))

    def free(self) -> tuple[int, int]:
        """Its free pages or tokens, and its requests."""
        self.pipe.send(("free",))
        free, requests = self.hear("free")
        return free, requests

    def idle(self, seconds: float = 120) -> bool:
        """Whether all blocks are free and no request is left within this many seconds."""
        until = time.monotonic() + seconds
        while (found := self.free()) != (self.blocks, 0) and time.monotonic() < until:
            time.sleep(0.05)
        return found == (self.blocks, 0)


_numbers = itertools.count()


def new_name() -> str:
    """Of a request."""
    return f"r{next(_numbers)}"


def prompts(number: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """This many prompts, of at least `low` tokens and fewer than `high`."""
    dice = random.Random(seed)
    return [[dice.randrange(3, 512) for _ in range(dice.randrange(low, high))] for _ in range(number)]
