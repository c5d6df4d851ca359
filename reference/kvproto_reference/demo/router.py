"""A small router: makes tickets, hands each prompt to both engines, and collects what they say."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import zmq

from kvproto import new_ticket, write_ticket

from ..engine.launch import end_with
from ..errors import EngineError
from .control import Line
from .network import enter
from .prompts import Prompt

Main = Callable[[list[str]], int]
"""Entry point of an engine: takes its options, returns the exit status."""
DEADLINE = 60.0
"""Seconds that a ticket is good for."""
START = 60.0
"""Seconds that an engine may take to answer when it runs already ..."""
LOAD = 900.0
"""... and when it was started here and has to load its models."""


@attrs.define
class Request:
    """One prompt, and what the engines have said of it."""

    id: str
    """Names it between router and engines, unlike any other router's; to kvproto its ticket does."""
    prompt: Prompt
    tokens: list[int] = attrs.Factory(list)
    arrived: list[dict[str, Any]] | None = None
    """Of each decode rank: seconds, bytes by source rank, checksums by source rank and group."""
    cached: int = 0
    """Tokens of the prompt that decode had already."""
    stats: dict[str, Any] | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
        """Whether it has finished or failed."""
        return self.stats is not None or self.error is not None


class Engines:
    """The engine processes that the demo itself started."""

    def __init__(self, fork: bool = True) -> None:
        """Forked engines have torch at once; `fork` is not for a process that has asked CUDA for its GPUs."""
        self._context = ForkContext() if fork else SpawnContext()
        self._processes: dict[str, BaseProcess] = {}

    def start(self, name: str, main: Main, options: list[str], namespace: str | None = None) -> None:
        """Start one by its entry point, in this network namespace or ours; it shares our stderr."""
        process = self._context.Process(target=_engine, args=(main, options, os.getpid(), namespace))
        process.start()
        self._processes[name] = process

    def check(self) -> None:
        """Raise EngineError if one has ended."""
        for name, process in self._processes.items():
            if process.exitcode is not None:
                raise EngineError(f"the {name} engine ended with exit status {process.exitcode}")

    def __enter__(self) -> "Engines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if kind is not None:
                process.terminate()
        for process in self._processes.values():
            process.join(5)
            process.kill()
            process.join()


def _engine(main: Main, options: list[str], parent: int, namespace: str | None) -> None:
    if namespace is not None:
        enter(namespace)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    end_with(parent)
    sys.exit(main(options))


class Router:
    """Sends each prompt to one replica of prefill and one of decode, in turn."""

    def __init__(self, folder: Path, prefill_name: str, engines: Engines, prefill: int = 1, decode: int = 1) -> None:
        self._replicas = {"prefill": prefill, "decode": decode}
        names = [f"{role}-{replica}" for role, count in self._replicas.items() for replica in range(count)]
        self._lines = {name: Line(folder, name) for name in names}
        self._poller = zmq.Poller()
        for line in self._lines.values():
            self._poller.register(line.socket, zmq.POLLIN)
        self._prefill_name, self._engines = prefill_name, engines
        self.requests: dict[str, Request] = {}
        self.sent: list[dict[str, Any]] = []
        self.freed: set[str] = set()
        self.plan: dict[str, Any] = {}

    def wait_ready(self, patience: float) -> None:
        """Wait until both engines are ready; raises EngineError after `patience` seconds."""
        missing = set(self._lines)
        for line in self._lines.values():
            line.send("hello")
        until = time.monotonic() + patience
        while missing:
            for name, word in self._listen():
                if word["op"] == "ready":
                    missing.discard(name)
                    if name.startswith("decode"):
                        self.plan = {k: v for k, v in word.items() if k != "op"}
                elif word["op"] == "fatal":
                    raise EngineError(word["error"])
            self._engines.check()
            if time.monotonic() > until:
                raise EngineError(f"no sign of the {' and '.join(sorted(missing))} engine in {patience:.0f} s")

    def submit(self, prompts: list[Prompt], max_new: int) -> None:
        """Make a ticket for each prompt and send both to both engines."""
        for number, prompt in enumerate(prompts, len(self.requests)):
            here, there = (number % count for count in self._replicas.values())
            ticket = new_ticket(self._prefill_name, replica=here, deadline=DEADLINE)
            request = Request(secrets.token_hex(8), prompt)
            self.requests[request.id] = request
            body = {"id": request.id, "ticket": write_ticket(ticket), "prompt": prompt.tokens, "max_new": max_new,
                    "temperature": prompt.temperature, "seed": prompt.seed}  # fmt: skip
            self._lines[f"prefill-{here}"].send("prefill", **body)
            self._lines[f"decode-{there}"].send("decode", **body)

    def collect(self, on_news: Callable[[Request], None]) -> None:
        """Wait until every request is over and prefill has freed its pages."""
        until = time.monotonic() + DEADLINE + 30
        while not all(r.over and (r.id in self.freed or r.error) for r in self.requests.values()):
            for _, word in self._listen():
                self._take(word, on_news)
            self._engines.check()
            if time.monotonic() > until:
                raise EngineError("the engines did not finish in time")

    def _take(self, word: dict[str, Any], on_news: Callable[[Request], None]) -> None:
        match word["op"]:
            case "fatal":
                raise EngineError(word["error"])
            case "sent":
                self.sent.append(word)
                return
            case "freed":
                self.freed.add(word["id"])
                return
            case "refused" | "failed" | "arrived" | "tokens" | "finished":
                request = self.requests[word["id"]]
                if word["op"] in ("refused", "failed"):
                    request.error = request.error or word["error"]
                elif word["op"] == "finished":
                    request.stats = word
                else:
                    request.tokens += word["tokens"]
                    request.arrived = word.get("ranks", request.arrived)
                    request.cached = word.get("cached", request.cached)
            case _:
                return
        on_news(request)

    def _listen(self) -> list[tuple[str, dict[str, Any]]]:
        self._poller.poll(50)
        return [(name, word) for name, line in self._lines.items() for word in line.receive()]

    def stop(self) -> None:
        """Stop all engines: decode first, or it would take prefill's Goodbye for a failure."""
        running = {name for name in self._lines if name.startswith("decode")}
        for name in running:
            self._lines[name].send("stop")
        until = time.monotonic() + 5
        while running and time.monotonic() < until:
            running -= {name for name, word in self._listen() if word["op"] == "stopped"}
        for name, line in self._lines.items():
            if name.startswith("prefill"):
                line.send("stop")

    def close(self) -> None:
        """Close the lines."""
        for line in self._lines.values():
            line.close()
