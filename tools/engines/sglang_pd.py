"""SGLang hands prompts over to SGLang through `kvproto_sglang`: `ENGINE/python -m tools.engines.sglang_pd FOLDER [MODEL ...]`.

ENGINE is the environment of install.sh, FOLDER is for models of random weights, by default all of them. Each engine is
a group of processes on the CPU; what transformers computes with the same weights is the baseline, in float32. Prints a
line for each case.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from tools.engines.sglang_bench import CORRUPT

__all__ = ["Engine", "main"]

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

_DEADLINE = 20
"""Seconds of a ticket."""
_PATIENCE = 600.0
"""Seconds for an engine to start or to answer."""
_MOST = 16
"""Tokens of an answer."""


@attrs.define
class Engine:
    """An SGLang: a group of processes."""

    name: str
    pipe: Any
    process: Any
    done: dict[str, Any] = attrs.Factory(dict)

    @classmethod
    def start(cls, name: str, settings: dict[str, Any], kvproto: dict[str, Any]) -> Engine:
        """`kvproto` is what KVPROTO_SGLANG says."""
        from tools.engines.sglang_child import serve

        context = multiprocessing.get_context("fork")  # its packages are imported once
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, settings, kvproto), daemon=False)
        process.start()
        theirs.close()
        return cls(name, pipe, process)

    @classmethod
    def prefill(cls, name: str, folder: str, **settings: Any) -> Engine:
        """One that prefills, called NAME:1."""
        own = {"name": f"{name}:1", "listen": f"ipc://{folder}/{name}-{{rank}}", "deadline": _DEADLINE}
        return cls.start(name, settings | {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 1}, own)

    @classmethod
    def decode(cls, name: str, folder: str, sources: list[str], **settings: Any) -> Engine:
        """One that decodes what these prefill."""
        own = {
            "name": name, "deadline": _DEADLINE,
            "sources": {f"{source}:1": f"ipc://{folder}/{source}-0" for source in sources},
        }  # fmt: skip
        return cls.start(name, settings | {"disaggregation_mode": "decode"}, own)

    def ready(self) -> float:
        """Wait until it has started: seconds that it took."""
        (found,) = self._hear("ready")
        return float(found)

    def add(self, request: str, tokens: list[int], most: int = _MOST, **more: Any) -> None:
        self.pipe.send(("add", request, tokens, most, more))

    def abort(self, request: str) -> None:
        self.pipe.send(("abort", request))

    def result(self, request: str) -> tuple[list[int], dict[str, Any]]:
        """Tokens of a request, and what SGLang says of it."""
        until = time.monotonic() + _PATIENCE
        while request not in self.done and time.monotonic() < until:
            self._hear("done")
        tokens, said = self.done.pop(request)
        return tokens, said

    def _hear(self, kind: str) -> Any:
        while self.pipe.poll(_PATIENCE):
            got, *said = self.pipe.recv()
            if got == "died":
                raise RuntimeError(f"{self.name}: {said[0]}")
            if got == "done":
                self.done[said[0]] = tuple(said[1:])
            if got == kind:
                return said
        raise TimeoutError(f"{self.name} says nothing")

    def kill(self) -> None:
        """All of its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def alive(self) -> bool:
        return bool(self.process.is_alive())


class Alone:
    """The model as transformers computes it."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
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
        made, values, past, given = [], [], None, [tokens]
        for _ in range(_MOST):
            out = self._model(input_ids=self._torch.tensor(given), past_key_values=past, use_cache=True)
            best = out.logits[0, -1].log_softmax(-1).max(-1)
            made.append(int(best.indices))
            values.append(float(best.values))
            past, given = out.past_key_values, [made[-1:]]
        return made, values


_numbers = itertools.count()
_dice = random.Random(time.monotonic_ns())


def name() -> str:
    return f"r{next(_numbers)}"


def room() -> int:
    """As a load balancer makes them, but for one bit."""
    return _dice.getrandbits(62)


def prompts(number: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 512) for _ in range(dice.randrange(low, high))] for _ in range(number)]


def where(engine: Engine, number: int) -> dict[str, Any]:
    """What a load balancer adds to a request that this engine prefills."""
    return {"bootstrap_host": engine.name, "bootstrap_port": 1, "bootstrap_room": number}


def begin(one: Engine, two: Engine, prompt: list[int], number: int | None = None, **more: Any) -> tuple[str, str]:
    """Both engines get one body, as the load balancer does it; the names of the request at both."""
    body = where(one, room() if number is None else number)
    names = name(), name()
    for engine, request in zip((one, two), names, strict=True):
        engine.add(request, prompt, **body, **more)
    return names


def over(one: Engine, two: Engine, prompt: list[int], number: int | None = None, **more: Any) -> Any:
    """A prompt through both: tokens of the decode engine, and what SGLang says of the request at each."""
    first, second = begin(one, two, prompt, number, **more)
    tokens, said = two.result(second)
    return tokens, said, one.result(first)[1]


def same_tokens(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Several prompts at once: the tokens are those of the model alone, and so are their log probabilities."""
    asked = prompts(4, 40, 200)
    begun = [begin(one, two, prompt, return_logprob=True) for prompt in asked]
    for prompt, (first, second) in zip(asked, begun, strict=True):
        (wanted, values), (tokens, said) = alone.run(prompt), two.result(second)
        if tokens != wanted:
            yield f"prompt of {len(prompt)}: {tokens}, not {wanted}: {said['finish_reason']}"
            continue
        found = [value for value, *_ in said["output_token_logprobs"]]
        if max(abs(a - b) for a, b in zip(found, values, strict=True)) > 1e-3:
            yield f"log probabilities {found}, not {values}"
        if (reason := one.result(first)[1]["finish_reason"]["type"]) != "length":
            yield f"{one.name}: {reason}"


def one_bit(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """A bit of a page that arrived is flipped: other tokens."""
    (prompt,) = prompts(1, 100, 101, 1)
    if over(one, two, prompt)[0] == over(one, two, prompt, room() | CORRUPT)[0]:
        yield "the same tokens: the pages were not used"


def one_after_the_other(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Decode is asked before prefill, and prefill before decode."""
    (prompt,) = prompts(1, 300, 301, 2)
    wanted = alone.run(prompt)[0]
    for order in ((one, two), (two, one)):
        body, names = where(one, room()), {}
        for engine in order:
            names[engine.name] = name()
            engine.add(names[engine.name], prompt, **body)
            time.sleep(0.5)
        tokens = two.result(names[two.name])[0]
        one.result(names[one.name])
        if tokens != wanted:
            yield f"{[engine.name for engine in order]}: {tokens}, not {wanted}"


def aborts(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Requests are aborted at each engine, alone and with the other; the next is served."""
    (prompt,) = prompts(1, 200, 201, 3)
    for aborted in ((one,), (two,), (one, two)):
        first, second = begin(one, two, prompt)
        names = {one.name: first, two.name: second}
        for engine in aborted:
            engine.abort(names[engine.name])
        for engine in (one, two):
            engine.result(names[engine.name])
    lonely = name()
    two.add(lonely, prompt, **where(one, room()))  # prefill never comes
    two.abort(lonely)
    two.result(lonely)
    if over(one, two, prompt)[0] != alone.run(prompt)[0]:
        yield "other tokens afterwards"


def bad_input(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """What cannot be handed over fails that request, with the reason; the next is served."""
    (prompt,) = prompts(1, 80, 81, 4)
    for wrong, says in (
        ({"bootstrap_host": "nobody"}, "nobody"),
        ({"sampling": {"custom_params": {"kvproto": {"ticket": "{}"}}}}, "MISSING_FIELD"),
        ({"sampling": {"custom_params": {"kvproto": 7}}}, "kvproto"),
        ({}, "UNKNOWN_TICKET"),
    ):
        request = name()
        two.add(request, prompt, **where(one, room()) | wrong)
        reason = two.result(request)[1]["finish_reason"]
        if reason["type"] == "length" or says not in reason["message"]:
            yield f"{wrong}: {reason}"
    first, second, number = name(), name(), room()
    one.add(first, prompt, **where(one, number))
    two.add(second, list(reversed(prompt)), **where(one, number))
    if "CONTENT_MISMATCH" not in str(two.result(second)[1]["finish_reason"]):
        yield "pages of another prompt were used"
    one.abort(first)  # whoever has its room may still come
    one.result(first)
    if over(one, two, prompt)[0] != alone.run(prompt)[0]:
        yield "other tokens afterwards"


def prefix_hits(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """What the decode engine has is not fetched again."""
    (prompt,) = prompts(1, 193, 194, 5)
    for case in (prompt, prompt, prompt[:129], [*prompt[:64], *prompts(1, 60, 61, 6)[0]]):
        tokens = over(one, two, case)[0]
        if tokens != alone.run(case)[0]:
            yield f"prompt of {len(case)}: {tokens}"


def still_there(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """Neither engine has found a page missing: SGLang counts its pool when it is idle, and ends where some are lost."""
    (prompt,) = prompts(1, 50, 51, 8)
    if over(one, two, prompt)[0] != alone.run(prompt)[0] or not (one.alive() and two.alive()):
        yield "an engine has ended"


def killed(alone: Alone, one: Engine, two: Engine) -> Iterator[str]:
    """The prefill engine dies with a request that decode waits for: that request fails, the decode engine lives."""
    (prompt,) = prompts(1, 150, 151, 7)
    request = name()
    two.add(request, prompt, **where(one, room()))
    one.kill()
    begun = time.monotonic()
    reason = two.result(request)[1]["finish_reason"]
    if reason["type"] == "length" or not two.alive():
        yield f"{reason}"
    if (took := time.monotonic() - begun) > 15:
        yield f"after {took:.0f} s"


Case = Callable[[Alone, Engine, Engine], Iterator[str]]
MODELS: dict[str, list[tuple[str, dict[str, Any], dict[str, Any], list[Case]]]] = {
    "llama": [
        (
            "Llama, page 64 in chunks of 128 tokens to page 16",
            {"page_size": 64, "chunked_prefill_size": 128},
            {"page_size": 16, "disaggregation_decode_enable_radix_cache": True},
            [same_tokens, one_bit, one_after_the_other, prefix_hits, aborts, bad_input, still_there],
        ),
        (
            "Llama, page 64 to page 1",
            {"page_size": 64, "chunked_prefill_size": 128},
            {"page_size": 1},
            [same_tokens, one_bit, still_there, killed],
        ),
    ],
    "mla": [
        ("MLA, page 64 to page 16", {"page_size": 64}, {"page_size": 16}, [same_tokens, one_bit, still_there]),
    ],
}
"""By model: what two engines differ in, and what is tried with them. Engines of equal settings are one."""


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


def tried(models: Path, chosen: str, folder: str) -> int:
    """Try the pairs of one model, or "MODEL:n" its nth pair; how many cases differ."""
    model, _, nth = chosen.partition(":")
    from tools.engines.vllm_models import make

    path = make(models, model)
    shared, wrong = {"model_path": str(path)}, 0
    engines: dict[str, Engine] = {}
    try:
        pairs = []
        for title, first, second, cases in MODELS[model][int(nth) :][:1] if nth else MODELS[model]:
            names = f"p{first['page_size']}", f"d{second['page_size']}"
            if names[0] not in engines:
                engines[names[0]] = Engine.prefill(names[0], folder, **shared | first)
            engines[names[1]] = Engine.decode(names[1], folder, [names[0]], **shared | second)
            pairs.append((title, engines[names[0]], engines[names[1]], cases))
        alone = Alone(path)
        for engine in engines.values():
            engine.ready()
        for title, one, two, cases in pairs:
            for case in cases:
                found = list(case(alone, one, two))
                wrong += bool(found)
                print(
                    f"{'DIFFERS' if found else 'same   '} sglang, {title}: {case.__name__.replace('_', ' ')}",
                    flush=True,
                )
                for line in found:
                    print(f"        {line}", flush=True)
    finally:
        for engine in engines.values():
            engine.kill()
    return wrong


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    models, chosen = Path(argv[0]), argv[1:] or list(MODELS)
    begun, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        plug_in(folder)
        import sglang  # noqa: F401

        for model in chosen:
            wrong += tried(models, model, folder)
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
