"""An SGLang as a group of processes on the CPU, as a test sees it; and the same model as transformers computes it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from tools.engines.child import Child, new_name, prompts

__all__ = [
    "DEADLINE",
    "MOST",
    "Alone",
    "Engine",
    "new_name",
    "plug_in",
    "prompts",
    "replicas",
    "room",
    "run",
    "settings_of",
    "told",
    "where",
]

os.environ |= {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0|0|0",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # states as exact as the rest
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

DEADLINE = 120
"""Seconds of a ticket."""
PATIENT = {"ticket_wait": 20}
"""Options of kvproto: a fetch whose prompt never comes is given up sooner than an engine would, which is three times this."""
STATEFUL = ("convolutions", "deltas", "qwen35", "granite", "falcon-h1", "falcon-mamba")
"""Models with states."""
_OVERRIDDEN: dict[str, dict[str, Any]] = {
    "mla": {"moe_layer_freq": 1}, "deltas": {"full_attention_interval": 2}, "qwen35": {"full_attention_interval": 2},
    "falcon-mamba": {"num_attention_heads": 4, "num_key_value_heads": 4},
}  # fmt: skip
"""Fields that SGLang reads of models, and that later releases of transformers write in another way."""
MOST = 16
"""Tokens of an answer."""


@attrs.define
class Engine(Child):
    """An SGLang: a group of processes."""

    @classmethod
    def start(cls, name: str, settings: dict[str, Any], kvproto: dict[str, Any]) -> Engine:
        """`kvproto` is what KVPROTO_SGLANG says."""
        from tools.engines.sglang_child import serve

        made = cls(name=name)
        made.fork(serve, settings, kvproto)
        return made

    @classmethod
    def prefill(cls, name: str, folder: str, about: dict[str, Any] | None = None, **settings: Any) -> Engine:
        """One that prefills, called NAME:1; `about` are more settings of the back end."""
        replica = "-{replica}" * (replicas(settings) > 1)
        listen = f"ipc://{folder}/{name}{replica}-{{rank}}"
        own = {"name": f"{name}:1", "listen": listen, "deadline": DEADLINE, "options": PATIENT, **(about or {})}
        return cls.start(name, settings | {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 1}, own)

    @classmethod
    def decode(
        cls, name: str, folder: str, sources: list[str], about: dict[str, Any] | None = None, **settings: Any
    ) -> Engine:  # fmt: skip
        """One that decodes what these prefill, each called NAME:1 or, where it is no SGLang, NAME; then "/" and a replica."""
        where = {each: f"ipc://{folder}/{each.replace(':1', '').replace('/', '-')}-0" for each in sources}
        own = {"name": name, "deadline": DEADLINE, "sources": where, "options": PATIENT, **(about or {})}
        return cls.start(name, settings | {"disaggregation_mode": "decode"}, own)

    def add(self, request: str, tokens: list[int], most: int = MOST, **more: Any) -> None:
        self.pipe.send(("add", request, tokens, most, more))

    def kill(self) -> None:
        """All of its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def alive(self) -> bool:
        return bool(self.process.is_alive())


def replicas(settings: dict[str, Any]) -> int:
    """Of an engine of these settings."""
    return int(settings.get("dp_size", 1) * settings.get("attn_dp_size", 1))


class Alone:
    """The model as transformers computes it."""

    def __init__(self, folder: Path | str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self.folder = torch, Path(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def run(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """Greedy tokens and their log probabilities."""
        key = tuple(tokens)
        if key not in self._known:
            with self._torch.inference_mode():
                self._known[key] = self._run(tokens)
        return self._known[key]

    def _run(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        made: list[int] = []
        values: list[float] = []
        past: dict[str, Any] = {}
        given = [tokens]
        for _ in range(MOST):
            out = self._model(input_ids=self._torch.tensor(given), use_cache=True, **past)
            best = out.logits[0, -1].log_softmax(-1).max(-1)
            made.append(int(best.indices))
            values.append(float(best.values))
            kept = "past_key_values" if hasattr(out, "past_key_values") else "cache_params"
            past, given = {kept: out[kept]}, [made[-1:]]
        return made, values


_dice = random.Random(time.monotonic_ns())


def room() -> int:
    """As a load balancer makes them, but for two bits."""
    return _dice.getrandbits(61)


def where(engine: Engine, number: int) -> dict[str, Any]:
    """Fields that a load balancer adds to a request that this engine prefills."""
    return {"bootstrap_host": engine.name, "bootstrap_port": 1, "bootstrap_room": number}


def settings_of(models: Path, model: str) -> dict[str, Any]:
    """Settings that an engine of this model is started with; the folder is made if it is not there yet."""
    from tools.engines.vllm_models import make

    found: dict[str, Any] = {"model_path": str(make(models, model))}
    if model in STATEFUL:  # prefixes of states are found again by kernels of a GPU
        found |= {"disable_radix_cache": True, "max_mamba_cache_size": 64, "mem_fraction_static": 0.9}
    if model in _OVERRIDDEN:
        found["json_model_override_args"] = json.dumps(_OVERRIDDEN[model])
    return found


def told(what: str, found: list[str]) -> bool:
    """Print a line, or what differs; whether it does."""
    print(f"{'DIFFERS' if found else 'same   '} {what}", *found, sep="\n        ", flush=True)
    return bool(found)


def run(models: Path, names: Iterable[str], tried: Callable[[Path, str, str], int]) -> int:
    """Try each of these names; the exit status.

    `tried` takes the folder of models, a name, and a folder for sockets; it prints each case and says how many differ.
    """
    begun, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        plug_in(folder)
        for name in names:
            wrong += tried(models, name, folder)
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


def plug_in(folder: str) -> None:
    """Have SGLang find the plug-in of the tests."""
    place = Path(folder) / "kvproto_bench-0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: kvproto-bench\nVersion: 0\n")
    (place / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nkvproto_bench = tools.engines.sglang_bench:register\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, folder)
