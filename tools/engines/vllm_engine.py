"""A vLLM in a process of its own, on the CPU, as a test sees it: requests go in by name, results come out."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import time
from typing import Any

import attrs

__all__ = ["ASK", "DEADLINE", "PATIENCE", "Engine", "Result", "new_name", "over", "prompts"]

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}  # fmt: skip

DEADLINE = 20
"""Seconds of a ticket."""
ASK = {"do_remote_decode": True}
PATIENCE = 600.0
"""Seconds for an engine to start or to answer."""

Result = tuple[list[int], str, Any, int]
"""Tokens, reason of the end, params and cached tokens."""


@attrs.define
class Engine:
    """A vLLM in a process of its own."""

    name: str
    policy: str
    settings: dict[str, Any]
    kind: str = "vllm_child"
    """The module that serves it."""
    pipe: Any = None
    process: Any = None
    blocks: int = 0
    done: dict[str, Any] = attrs.Factory(dict)
    fetched: set[str] = attrs.Factory(set)
    """Requests whose prompts have arrived from another engine."""

    @classmethod
    def of(
        cls, name: str, folder: str, others: list[str], policy: str, *, kind: str = "vllm_child",
        extra: dict[str, Any] | None = None, beside: str = "", **settings: Any,
    ) -> Engine:  # fmt: skip
        """One that prefills for `others` and decodes what they prefill; `policy` is what follows a load that fails.

        `extra` are settings of the connector, and `beside` is another that stores in this folder, by MultiConnector.
        """
        about = {
            "name": name, "listen": f"ipc://{folder}/{name}-{{rank}}", "deadline": DEADLINE,
            "sources": {other: f"ipc://{folder}/{other}-0" for other in others}, **(extra or {}),
        }  # fmt: skip
        transfer = {
            "kv_connector": "CorruptingConnector", "kv_connector_module_path": "tools.engines.vllm_corrupting",
            "kv_role": "kv_both", "kv_load_failure_policy": policy, "kv_connector_extra_config": about,
        }  # fmt: skip
        if beside:
            stores = {"shared_storage_path": f"{folder}/{name}-stored"}
            other = {"kv_connector": beside, "kv_role": "kv_both", "kv_connector_extra_config": stores}
            transfer = {
                "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"connectors": [transfer, other]},
            }  # fmt: skip
        return cls(name, policy, {"kv": transfer, **settings}, kind)

    def start(self) -> None:
        """Begin to start, as often as it was stopped."""
        serve = importlib.import_module(f"tools.engines.{self.kind}").serve
        context = multiprocessing.get_context("fork")  # its packages are imported once
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, dict(self.settings)), daemon=False)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has started."""
        self._hear("ready")
        self.blocks = self.free()[0]

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.join()

    def add(self, request: str, tokens: list[int], most: int, params: Any = None) -> None:
        self.pipe.send(("add", request, tokens, most, params))

    def abort(self, request: str) -> None:
        self.pipe.send(("abort", request))

    def result(self, request: str) -> Result:
        """Of a request, once it is over."""
        until = time.monotonic() + PATIENCE
        while request not in self.done and time.monotonic() < until:
            self._hear("done")
        found: Result = self.done.pop(request)
        return found

    def run(self, request: str, tokens: list[int], most: int, params: Any = None) -> Result:
        self.add(request, tokens, most, params)
        return self.result(request)

    def finished(self) -> list[tuple[str, Result]]:
        """Requests that are over since the last call, with their results; waits a moment where there are none."""
        while self.pipe.poll(0 if self.done else 0.002):
            self._hear("done")
        found, self.done = list(self.done.items()), {}
        return found

    def preempted(self) -> int:
        """How often it took a request's blocks away."""
        self.pipe.send(("preempted",))
        return int(self._hear("preempted")[0])

    def free(self) -> tuple[int, int]:
        """Free blocks, and requests that it has."""
        self.pipe.send(("free",))
        free, requests = self._hear("free")
        return free, requests

    def idle(self, seconds: float = 120) -> bool:
        """Whether all blocks are free and no request is left, at most so many seconds later."""
        until = time.monotonic() + seconds
        while self.free() != (self.blocks, 0) and time.monotonic() < until:
            time.sleep(0.05)
        return self.free() == (self.blocks, 0)

    def _hear(self, kind: str) -> Any:
        while self.pipe.poll(PATIENCE):
            name, *said = self.pipe.recv()
            if name == "died":
                raise RuntimeError(f"{self.name}: {said[0]}")
            if name == "done":
                self.done[said[0]] = tuple(said[1:5])
                self.fetched |= {said[0]} if said[5] else set()
            if name == kind:
                return said[0] if kind == "ready" else said
        raise TimeoutError(f"{self.name} says nothing")

    def stop(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.pipe.send(("stop",))
            self.process.join(60)
            self.process.kill()


_names = iter(range(1 << 30))


def new_name() -> str:
    return f"r{next(_names)}"


def prompts(number: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 512) for _ in range(dice.randrange(low, high))] for _ in range(number)]


def over(prefill: Engine, decode: Engine, prompt: list[int], most: int = 16, name: str = "") -> Any:
    """A prompt through both, prefill first, as an ordinary proxy does it."""
    params = prefill.run(new_name(), prompt, 1, ASK)[2]
    return decode.run(name or new_name(), prompt, most, params)
