"""`python -m kvproto_reference.router.rolling`: restarts every engine under load, kills some, and sums up.

Engines drain and start again one after the other, for as many minutes as told; once a minute one is ended by kill -9.
Clients ask a `kvproto-router` for streams all the while. Each answer is compared with that of one undivided engine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import attrs
import torch

from ..checkpoint import shared_tokenizer
from ..data import load_text
from ..demo import decode, prefill
from ..demo.engines import Engines
from ..demo.network import free_address
from ..demo.options import checkpoint_folder
from ..engine.undivided import Undivided
from ..errors import EngineError
from . import server

_START = 120.0
"""Seconds that an engine may take to start or to end."""
_ENTRY = {"prefill": prefill.main, "decode": decode.main}


@attrs.frozen
class Plan:
    """The engines, the load and the time of a run."""

    prefill: int
    decode: int
    clients: int
    minutes: float
    target: str
    max_new: int
    kills: float
    """Kills a minute."""


@attrs.define
class Summary:
    """The counts of a run."""

    served: int = 0
    lost: int = 0
    wrong: int = 0
    retried: int = 0
    restarts: int = 0
    kills: int = 0
    seconds: list[float] = attrs.field(factory=list, repr=False)
    reasons: Counter[str] = attrs.Factory(Counter)

    def show(self) -> str:
        """One line with the counts, and what went wrong."""
        times = sorted(self.seconds) or [0.0]
        half, most = times[len(times) // 2], times[int(0.99 * (len(times) - 1))]
        wrong = "".join(f"\n  {count} x {reason}" for reason, count in self.reasons.most_common(5))
        return (
            f"served {self.served}, lost {self.lost}, wrong {self.wrong}; restarts {self.restarts}, kills {self.kills}"
            f", retries {self.retried}; seconds a request: median {half:.2f}, 99 % {most:.2f}{wrong}"
        )


def run(plan: Plan) -> Summary:
    """Run the plan; raises EngineError if engines do not start."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="kvproto-rolling-"))
    folder.chmod(0o700)
    address = free_address(1, 1).removeprefix("tcp://")
    context, summary = multiprocessing.get_context("fork"), Summary()
    ended, (here, there) = context.Event(), context.Pipe(False)
    http = ["--dir", str(folder), "--http", address, "--target", plan.target]
    http += ["--prefill", str(plan.prefill), "--decode", str(plan.decode)]
    router = context.Process(target=server.main, args=(http,))
    load = context.Process(target=_load, args=(plan, address, _expected(plan), ended, there))
    try:
        with Engines() as engines:  # all forks come from this thread, which has no other beside it
            router.start()
            for role, main in _ENTRY.items():
                for replica in range(getattr(plan, role)):
                    engines.start(f"{role}-{replica}", main, _options(plan, folder, role, replica))
            _until(lambda: all(not why for why in _ready(address)["engines"].values()), engines, "engines start")
            load.start()
            _trouble(plan, engines, address, summary)
            ended.set()
            while not here.poll(1.0):
                if not load.is_alive():
                    raise EngineError("the clients have ended by an error")
            for field, value in here.recv().items():
                setattr(summary, field, value)
            summary.retried = _ready(address)["retried"]
            load.join()
            for name in _names(plan):
                engines.signal(name, signal.SIGTERM)
    finally:
        for process in (load, router):
            if process.pid is not None and process.is_alive():
                process.terminate()
                process.join(10)
        shutil.rmtree(folder, ignore_errors=True)
    return summary


def _names(plan: Plan) -> list[str]:
    return [f"{role}-{replica}" for role in _ENTRY for replica in range(getattr(plan, role))]


def _options(plan: Plan, folder: Path, role: str, replica: int) -> list[str]:
    made = ["--dir", str(folder), "--target", plan.target, "--draft", "none", "--replica", str(replica)]
    made += ["--sources", str(plan.prefill), "--quiet"] if role == "decode" else []
    return [*made, "--pages", "1024", "--drain-for", "60"]


def _trouble(plan: Plan, engines: Engines, address: str, summary: Summary) -> None:
    """Restart one engine after the other, and kill one at random when it is time."""
    end, names, random_ = time.monotonic() + 60 * plan.minutes, _names(plan), random.Random(1)
    interval = 60 / plan.kills if plan.kills else float("inf")
    kill, turn = time.monotonic() + interval / 2, 0
    while time.monotonic() < end:
        if time.monotonic() >= kill:
            name, number, kill = random_.choice(names), signal.SIGKILL, kill + interval
            summary.kills += 1
        else:
            name, number, turn = names[turn % len(names)], signal.SIGTERM, turn + 1
            summary.restarts += 1
        engines.signal(name, number)
        _until(lambda name=name: engines.exit_status(name) is not None, engines, f"{name} ends")
        engines.restart(name)
        _until(lambda name=name: not _ready(address)["engines"][name], engines, f"{name} starts again")


def _until(condition: Any, engines: Engines, what: str) -> None:
    end, pause = time.monotonic() + _START, threading.Event()
    while True:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            if condition():
                return
        engines.check()
        if time.monotonic() > end:
            raise EngineError(f"waited {_START:.0f} s until {what}")
        pause.wait(0.1)


def _ready(address: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(address, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/ready")
        said: dict[str, Any] = json.loads(connection.getresponse().read())
    return said


def _expected(plan: Plan) -> dict[str, str]:
    """Prompts, some with a beginning in common, and the answer of one undivided engine to each."""
    folder, text = checkpoint_folder("target", plan.target), load_text()
    start, tokenizer = text.index("Alice was beginning"), shared_tokenizer(folder)
    prompts = [text[start : start + 100] + text[at : at + 80] for at in range(start + 500, start + 4500, 500)]
    prompts += [text[at : at + 60] for at in range(start + 5000, start + 9000, 500)]
    engine, expected = Undivided(folder), dict[str, str]()
    for prompt in prompts:
        answer = engine.generate(tokenizer.encode(prompt.encode()), max_new=plan.max_new)
        expected[prompt] = answer.text.decode(errors="replace")
    return expected


def _load(plan: Plan, address: str, expected: dict[str, str], ended: Event, told: Connection) -> None:
    """The clients, each with one request at a time."""
    summary, lock = Summary(), threading.Lock()

    def client(seed: int) -> None:
        random_ = random.Random(seed)
        while not ended.is_set():
            prompt, began = random_.choice(list(expected)), time.monotonic()
            try:
                text = _ask(address, prompt, plan.max_new)
            except (OSError, ValueError, http.client.HTTPException) as error:
                with lock:
                    summary.lost += 1
                    summary.reasons[f"{type(error).__name__}: {error}"] += 1
                continue
            with lock:
                summary.served += 1
                summary.seconds.append(time.monotonic() - began)
                if text != expected[prompt]:
                    summary.wrong += 1
                    summary.reasons[f"{text!r} in place of {expected[prompt]!r}"] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(plan.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = ("served", "lost", "wrong", "seconds", "reasons")
    told.send({name: getattr(summary, name) for name in names})


def _ask(address: str, prompt: str, most: int) -> str:
    """The text of one streamed answer; raises ValueError for one that is lost or not whole."""
    connection = http.client.HTTPConnection(address, timeout=180)
    with contextlib.closing(connection):
        body = json.dumps({"prompt": prompt, "max_tokens": most, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer, text = connection.getresponse(), ""
        for line in answer if answer.status == 200 else [answer.read()]:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return text
            if data:
                said = json.loads(data)
                if "error" in said:
                    raise ValueError(said["error"]["message"])
                text += said["choices"][0]["text"]
    raise ValueError("the stream has no end")


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 if a request was lost or answered wrongly."""
    parser = argparse.ArgumentParser(prog="python -m kvproto_reference.router.rolling", description=__doc__)
    for name, kind, usual, text in (
        ("prefill", int, 4, "prefill engines"), ("decode", int, 4, "decode engines"),
        ("clients", int, 64, "requests at once"), ("minutes", float, 10.0, "how long"),
        ("target", str, "gqa", "target of the engines"), ("max-new", int, 24, "tokens of each answer"),
        ("kills", float, 1.0, "engines that are ended by kill -9, a minute"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=usual, help=f"{text} (default {usual})")
    try:
        summary = run(Plan(**vars(parser.parse_args(argv))))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary.show())
    return 0 if summary.served and not summary.lost and not summary.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
