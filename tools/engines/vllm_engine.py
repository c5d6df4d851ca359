"""A vLLM in its own process, on the CPU, as a test sees it: requests go in by name, and results come out."""

from __future__ import annotations

import copy
import importlib
import os
from typing import Any

import attrs

from tools.engines.child import PATIENCE, Child, new_name, prompts

__all__ = [
    "ASK",
    "DEADLINE",
    "PATIENCE",
    "ROUNDED",
    "UNZEROED",
    "WIPED",
    "Engine",
    "Result",
    "new_name",
    "over",
    "prompts",
]

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}.items():  # fmt: skip
    os.environ.setdefault(_name, _value)  # vLLM imports this in processes of benchmarks, which say otherwise

DEADLINE = 20
"""Seconds of a ticket."""
ASK = {"do_remote_decode": True}

ROUNDED = "rounded"
"""The beginning of the names of requests whose pages are rounded to bfloat16 when they have arrived."""
WIPED = "wiped"
"""The beginning of the names of requests, followed by the number of a block table, whose blocks of that table are zero once
they have arrived.
"""
UNZEROED = "unzeroed"
"""The beginning of the names of requests whose blocks are not zeroed before they are loaded."""

Result = tuple[list[int], str, Any, int]
"""Tokens, reason of the end, params and cached tokens."""

Values = list[dict[int, float]]
"""Of each token of an answer: log probabilities by token, its own and the highest."""


@attrs.define
class Engine(Child):
    """A vLLM in its own process."""

    policy: str
    settings: dict[str, Any]
    kind: str = "vllm_child"
    """The module that serves it."""
    fetched: dict[str, float] = attrs.Factory(dict)
    """Requests whose prompts have arrived from another engine, and how many seconds that took, where it was measured."""
    values: dict[str, Values] = attrs.Factory(dict)
    """Of requests that asked for them."""

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
        return cls(policy, {"kv": transfer, **settings}, kind, name=name)

    def like(self, name: str, policy: str = "fail", **settings: Any) -> Engine:
        """Another one, of the same settings but for these, that fetches from the same prefill engines."""
        extra = settings.pop("extra", {})
        made = copy.deepcopy(self.settings) | settings
        transfer = made["kv"]
        if transfer is not None:
            about = transfer["kv_connector_extra_config"]
            about |= extra
            about["listen"] = about["listen"].replace(f"/{about['name']}-", f"/{name}-")
            about["name"], transfer["kv_load_failure_policy"] = name, policy
        return Engine(policy, made, name=name)

    def start(self) -> None:
        """Start again after a stop, without waiting."""
        self.fork(importlib.import_module(f"tools.engines.{self.kind}").serve, dict(self.settings))

    def kill(self) -> None:
        """Kill it, as a crash would."""
        self.process.kill()
        self.process.join()

    def add(
        self, request: str, tokens: list[int], most: int, params: Any = None, values: int = 0, **more: Any
    ) -> None:  # fmt: skip
        """`values` is how many log probabilities of each place come in `self.values`.

        `more` are `salt`, a tenant, `lora`, the name and the folder of an adapter, and `hints`, a router's envelope.
        """
        self.pipe.send(("add", request, tokens, most, params, *([values, more] if values or more else [])))

    def ended(self, request: str, *result: Any) -> None:
        *answer, fetched, values = result
        super().ended(request, *answer)
        self.values |= {request: values} if values else {}
        self.fetched |= {request: fetched} if fetched else {}

    def run(self, request: str, tokens: list[int], most: int, params: Any = None, **more: Any) -> Result:
        self.add(request, tokens, most, params, **more)
        found: Result = self.result(request)
        return found

    def forget(self) -> None:
        """Empty its prefix cache, once it is idle; raises RuntimeError where it does not become so."""
        idle = self.idle()
        self.pipe.send(("forget",))
        if not self.hear("forgot")[0] or not idle:
            raise RuntimeError(f"{self.name} keeps its prefix cache")

    def preempted(self) -> int:
        """The number of times that it has preempted a request."""
        self.pipe.send(("preempted",))
        return int(self.hear("preempted")[0])

    def rounds(self, request: str) -> int:
        """The steps that gave a request its tokens."""
        self.pipe.send(("rounds", request))
        return int(self.hear("rounds")[0])

    def said(self) -> str:
        """The log of its connector."""
        self.pipe.send(("said",))
        return "\n".join(self.hear("said")[0])

    def spoil(self) -> None:
        """Fill its free blocks with what is no number."""
        self.pipe.send(("spoil",))
        self.hear("spoilt")

    def steps(self) -> list[tuple[float, float]]:
        """Seconds of each of its steps since the last call, and seconds of processor that its thread took."""
        self.pipe.send(("steps",))
        return list(self.hear("steps")[0])

    def stop(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.pipe.send(("stop",))
            self.process.join(60)
            self.process.kill()


def over(prefill: Engine, decode: Engine, prompt: list[int], most: int = 16, name: str = "", **more: Any) -> Any:
    """A prompt through both, prefill first, as an ordinary proxy does it."""
    params = prefill.run(new_name(), prompt, 1, ASK, **more)[2]
    return decode.run(name or new_name(), prompt, most, params, **more)
