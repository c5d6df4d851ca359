"""vLLM hands prompts over to vLLM through `kvproto_vllm`: `ENGINE/python -m tools.engines.vllm_pd FOLDER [MODEL ...]`.

ENGINE is the environment of install.sh, FOLDER is for models of random weights, by default all of them. Each engine is
a process on the CPU with both roles; what it computes alone is the baseline of what it decodes for another. Prints a
line for each case.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from kvproto import new_ticket, write_ticket

__all__ = ["main"]

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}  # fmt: skip

_DEADLINE = 20
"""Seconds of a ticket."""
ASK = {"do_remote_decode": True}
_PATIENCE = 300.0
"""Seconds for an engine to start or to answer."""


@attrs.define
class Engine:
    """A vLLM in a process of its own."""

    name: str
    pipe: Any
    process: Any
    blocks: int = 0
    done: dict[str, Any] = attrs.Factory(dict)

    @classmethod
    def start(cls, name: str, folder: str, others: list[str], policy: str, **settings: Any) -> Engine:
        from tools.engines.vllm_child import serve

        extra = {
            "name": name, "listen": f"ipc://{folder}/{name}-{{rank}}", "deadline": _DEADLINE,
            "sources": {other: f"ipc://{folder}/{other}-0" for other in others},
        }  # fmt: skip
        transfer = {
            "kv_connector": "CorruptingConnector", "kv_connector_module_path": "tools.engines.vllm_corrupting",
            "kv_role": "kv_both", "kv_load_failure_policy": policy, "kv_connector_extra_config": extra,
        }  # fmt: skip
        context = multiprocessing.get_context("fork")  # its packages are imported once
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, {"kv": transfer, **settings}), daemon=False)
        process.start()
        theirs.close()
        return cls(name, pipe, process)

    def ready(self) -> None:
        """Wait until it has started."""
        self._hear("ready")
        self.blocks = self.free()[0]

    def add(self, request: str, tokens: list[int], most: int, params: Any = None) -> None:
        self.pipe.send(("add", request, tokens, most, params))

    def abort(self, request: str) -> None:
        self.pipe.send(("abort", request))

    def result(self, request: str) -> tuple[list[int], str, Any, int]:
        """Tokens, reason of the end, params and cached tokens of a request."""
        until = time.monotonic() + _PATIENCE
        while request not in self.done and time.monotonic() < until:
            self._hear("done")
        found: tuple[list[int], str, Any, int] = self.done.pop(request)
        return found

    def run(self, request: str, tokens: list[int], most: int, params: Any = None) -> tuple[list[int], str, Any, int]:
        self.add(request, tokens, most, params)
        return self.result(request)

    def free(self) -> tuple[int, int]:
        """Free blocks, and requests that it has."""
        self.pipe.send(("free",))
        free, requests = self._hear("free")
        return free, requests

    def idle(self, seconds: float = 40) -> bool:
        """Whether all blocks are free and no request is left, at most so many seconds later."""
        until = time.monotonic() + seconds
        while self.free() != (self.blocks, 0) and time.monotonic() < until:
            time.sleep(0.05)
        return self.free() == (self.blocks, 0)

    def _hear(self, kind: str) -> Any:
        while self.pipe.poll(_PATIENCE):
            name, *said = self.pipe.recv()
            if name == "died":
                raise RuntimeError(f"{self.name}: {said[0]}")
            if name == "done":
                self.done[said[0]] = tuple(said[1:])
            if name == kind:
                return said[0] if kind == "ready" else said
        raise TimeoutError(f"{self.name} says nothing")

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(("stop",))
        self.process.join(20)
        self.process.kill()


_names = iter(range(1 << 30))


def _name() -> str:
    return f"r{next(_names)}"


def _prompts(number: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 512) for _ in range(dice.randrange(low, high))] for _ in range(number)]


def _over(prefill: Engine, decode: Engine, prompt: list[int], most: int = 16, name: str = "") -> Any:
    """A prompt through both, prefill first, as an ordinary proxy does it."""
    params = prefill.run(_name(), prompt, 1, ASK)[2]
    return decode.run(name or _name(), prompt, most, params)


def same_tokens(one: Engine, two: Engine) -> Iterator[str]:
    """Several prompts at once, each way: the tokens are those of the decode engine alone."""
    prompts = _prompts(4, 40, 200)
    for prefill, decode in ((one, two), (two, one)):
        alone = [decode.run(_name(), prompt, 16)[0] for prompt in prompts]
        first = [_name() for _ in prompts]
        for request, prompt in zip(first, prompts, strict=True):
            prefill.add(request, prompt, 1, ASK)
        params = [prefill.result(request)[2] for request in first]
        if prefill.free()[1] != len(prompts):
            yield f"{prefill.name} does not hold its requests' blocks"
        second = [_name() for _ in prompts]
        for request, prompt, ticket in zip(second, prompts, params, strict=True):
            decode.add(request, prompt, 16, ticket)
        for i, request in enumerate(second):
            tokens, reason, _, _ = decode.result(request)
            if (tokens, reason) != (alone[i], "length"):
                yield f"{prefill.name} to {decode.name}, prompt {i}: {tokens}, {reason}, not {alone[i]}"


def one_bit(one: Engine, two: Engine) -> Iterator[str]:
    """A bit of a page that arrived is flipped: other tokens."""
    (prompt,) = _prompts(1, 100, 101, 1)
    good, bad = _over(one, two, prompt)[0], _over(one, two, prompt, name=f"corrupt-{_name()}")[0]
    if good == bad:
        yield "the same tokens: the pages were not used"


def ticket_beforehand(one: Engine, two: Engine) -> Iterator[str]:
    """Both engines are asked at once, with a ticket that a router made; and decode before prefill."""
    (prompt,) = _prompts(1, 300, 301, 2)
    alone = two.run(_name(), prompt, 16)[0]
    for order in ((one, two), (two, one)):
        ticket, names = write_ticket(new_ticket(one.name, deadline=30)), {}
        for engine in order:
            names[engine.name] = _name()
            params = {"do_remote_decode": True} if engine is one else {"do_remote_prefill": True}
            engine.add(names[engine.name], prompt, 1 if engine is one else 16, params | {"ticket": ticket})
        tokens = two.result(names[two.name])[0]
        one.result(names[one.name])
        if tokens != alone:
            yield f"{[engine.name for engine in order]}: {tokens}, not {alone}"


def aborts(one: Engine, two: Engine) -> Iterator[str]:
    """Requests are aborted at each engine, before and after the other was asked; the next is served."""
    (prompt,) = _prompts(1, 200, 201, 3)
    prefill = _name()
    one.add(prefill, prompt, 1, ASK)
    one.abort(prefill)  # before it is scheduled, or while it is computed
    params = one.run(_name(), prompt, 1, ASK)[2]
    for _ in range(2):  # the second time the ticket was used
        decode = _name()
        two.add(decode, prompt, 16, params)
        two.abort(decode)
    ticket = {"ticket": write_ticket(new_ticket(one.name, deadline=30))}
    waiting = _name()
    two.add(waiting, prompt, 16, {"do_remote_prefill": True} | ticket)  # its prefill never comes
    two.free()
    two.abort(waiting)
    if not one.idle():
        yield f"{one.name} has {one.free()}, not {one.blocks} free blocks"
    if not two.idle():
        yield f"{two.name} has {two.free()}, not {two.blocks} free blocks"
    if _over(one, two, prompt)[0] != two.run(_name(), prompt, 16)[0]:
        yield "other tokens afterwards"


def bad_input(one: Engine, two: Engine) -> Iterator[str]:
    """What cannot be fetched fails that request (`fail`), or is computed here (`recompute`)."""
    (prompt,) = _prompts(1, 80, 81, 4)
    good = write_ticket(new_ticket(one.name, deadline=2))
    for ticket in (None, "nonsense", {"key": "00"}, good | {"engine": "nobody"}, good):
        params = {"do_remote_prefill": True, "ticket": ticket}
        if (reason := one.run(_name(), prompt, 16, params)[1]) != "error":
            yield f"{one.name}, ticket {ticket}: {reason}"
        if two.run(_name(), prompt, 16, params)[0] != two.run(_name(), prompt, 16)[0]:
            yield f"{two.name}, ticket {ticket}: other tokens"
    other = list(reversed(prompt))
    params = one.run(_name(), prompt, 1, ASK)[2]
    if two.run(_name(), other, 16, params)[0] != two.run(_name(), other, 16)[0]:
        yield "pages of another prompt were used"
    if one.run(_name(), prompt, 16, {"do_remote_prefill": True, "do_remote_decode": True})[1] != "length":
        yield "parameters that contradict each other failed a request that this engine can compute"


def prefix_hits(one: Engine, two: Engine) -> Iterator[str]:
    """What the decode engine has is not fetched again; a prompt that it has whole is not fetched at all."""
    (prompt,) = _prompts(1, 193, 194, 5)
    alone = one.run(_name(), prompt, 16)[0]
    for case in (prompt, prompt, prompt[:129], [*prompt[:64], *_prompts(1, 60, 61, 6)[0]]):
        tokens, _, _, cached = _over(one, two, case)
        if tokens != one.run(_name(), case, 16)[0]:
            yield f"prompt of {len(case)}, {cached} cached: {tokens}"
    if _over(one, two, prompt)[0] != alone or not one.idle(_DEADLINE / 2):
        yield "other tokens after a full hit, or its source was not told"


def left_idle(one: Engine, two: Engine) -> Iterator[str]:
    """All blocks are free at the end."""
    for engine in (one, two):
        if not engine.idle():
            yield f"{engine.name} has {engine.free()}, not {engine.blocks} free blocks"


def killed(one: Engine, two: Engine) -> Iterator[str]:
    """A prefill engine dies with requests that nobody has fetched: the decode engine computes them itself."""
    (prompt,) = _prompts(1, 150, 151, 7)
    params = one.run(_name(), prompt, 1, ASK)[2]
    one.process.kill()
    one.process.join()
    tokens, reason, _, _ = two.run(_name(), prompt, 16, params)
    if tokens != two.run(_name(), prompt, 16)[0] or reason != "length":
        yield f"{tokens}, {reason}"
    if not two.idle():
        yield f"{two.name} has {two.free()}, not {two.blocks} free blocks"


Case = Callable[[Engine, Engine], Iterator[str]]
PAIRS: list[tuple[str, dict[str, Any], dict[str, Any], list[Case]]] = [
    (
        "Llama, block 64 in chunks of 96 tokens, and block 32",
        {"model": "llama", "block_size": 64, "max_num_batched_tokens": 96, "enable_prefix_caching": False},
        {"model": "llama", "enable_prefix_caching": True},
        [same_tokens, one_bit, ticket_beforehand, prefix_hits, aborts, bad_input, left_idle, killed],
    ),
    (
        "MLA, block 16",
        {"model": "mla", "block_size": 16, "compilation_config": {"custom_ops": ["-rotary_embedding"]}},
        {"model": "mla", "block_size": 16, "compilation_config": {"custom_ops": ["-rotary_embedding"]}},
        [same_tokens, one_bit, left_idle],
    ),
]
"""Two engines, the first with policy `fail` and the second with `recompute`, and what is tried with them."""


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    models, chosen = Path(argv[0]), argv[1:]
    import vllm
    import vllm.v1.worker.cpu_worker

    from tools.engines.vllm_models import make

    wrong, begun = 0, time.monotonic()
    for title, first, second, cases in PAIRS:
        if chosen and first["model"] not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            engines = []
            for name, other, policy, given in (("one", "two", "fail", first), ("two", "one", "recompute", second)):
                model = str(make(models, given["model"]))
                engines.append(Engine.start(name, folder, [other], policy, **given | {"model": model}))
            try:
                for engine in engines:
                    engine.ready()
                for case in cases:
                    found = list(case(*engines))
                    wrong += bool(found)
                    head = "DIFFERS" if found else "same   "
                    print(f"{head} vllm {vllm.__version__}, {title}: {case.__name__.replace('_', ' ')}", flush=True)
                    for line in found:
                        print(f"        {line}", flush=True)
            finally:
                for engine in engines:
                    engine.stop()
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
