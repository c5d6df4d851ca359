"""vLLM on the CPU with `kvproto_vllm`: decode steps beside an idle connector, and what a hand-over takes.

`PYTHONPATH=.:integrations .engines/venv/bin/python benchmarks/vllm_cpu.py [--out] [--only NAME ...]` after `make engines`;
--out keeps all samples. Caches are as large as those of SmolLM2-135M in float32; an engine
computes on one core.

* idle: decode steps of 8 requests of a model of that size in three engines that take turns: one with the connector, connected to a prefill engine,
  and two without any, whose difference is that of the machine. Nothing is handed over meanwhile. Of each step the time by
  the clock, and the processor time of the thread that steps, which other work on the machine does not change.
* hand_over: a prompt that was computed moves to the decode engine. From the step in which the engine orders it until it
  knows that all has arrived, beside a copy of the same pages from one piece of shared memory to another; also without checksums.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import arguments, facts, keep
from torch.utils.dlpack import from_dlpack

import kvproto
from tools.engines.child import new_name, prompts
from tools.engines.vllm_engine import ASK, Engine
from tools.engines.vllm_models import make

ROUNDS, STEPS = 10, 40
HANDED, WARM = 15, 6
"""Hand-overs of a prompt, and how many before them, in which each block of the pools is used once."""
BLOCK, TOKENS = 32, (64, 256, 1024)
LAYERS, ROW = 30, 2 * 3 * 64 * 4
"""Of the model: its layers, and bytes of a token in one of them."""
SETTINGS = {"load_format": "dummy", "kv_cache_memory_bytes": 128 << 20, "max_model_len": 2048, "block_size": BLOCK}


@contextlib.contextmanager
def started(folder: Path, given: dict[str, Any], options: dict[str, Any], alone: int = 0) -> Iterator[list[Engine]]:
    """A prefill and a decode engine that are connected, and so many without a connector."""
    extra = {"extra": {"options": options}}
    engines = [Engine.of("one", str(folder), ["two"], "fail", **given | {"enable_prefix_caching": True} | extra)]
    engines += [Engine.of("two", str(folder), ["one"], "fail", **given | {"enable_prefix_caching": False} | extra)]
    engines += [Engine("", given | {"enable_prefix_caching": False}, name=f"none {i}") for i in range(alone)]
    try:
        for engine in engines:
            engine.start()
            engine.ready()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def idle(folder: Path) -> dict[str, Any]:
    """Milliseconds of steps with and without the connector, by the clock and of processor."""
    given = {"model": str(make(folder, "small"))} | SETTINGS
    with started(folder, given, {}, alone=2) as (one, two, *none):
        _through(one, two, prompts(1, 64, 65)[0])  # the two have met
        engines = dict(zip(("with", "without", "without again"), (two, *none), strict=True))
        samples: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in engines}
        for n in range(ROUNDS + 1):
            for name in random.Random(n).sample(list(engines), len(engines)):
                measured = _steps(engines[name], n)
                if n:  # the first round warms up
                    samples[name].append(measured)
    figures: dict[str, Any] = {"steps_ms": samples}
    for kind, of in (("clock", 0), ("processor", 1)):
        rounds = {name: [statistics.median(x[of] for x in each) for each in some] for name, some in samples.items()}
        ratios = {
            name: statistics.median(mine / plain for mine, plain in zip(rounds[name], rounds["without"], strict=True))
            for name in ("with", "without again")
        }
        medians = {name: round(statistics.median(some), 3) for name, some in rounds.items()}
        figures[kind] = {"medians_ms": medians, "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()}}
        print(f"idle, by the {kind}: {figures[kind]}", flush=True)
    return figures


def _steps(engine: Engine, seed: int) -> list[tuple[float, float]]:
    """Decode steps of eight requests: milliseconds by the clock and of processor."""
    engine.steps()
    names = [new_name() for _ in range(8)]
    for request, prompt in zip(names, prompts(8, 30, 60, seed), strict=True):
        engine.add(request, prompt, STEPS)
    for request in names:
        engine.result(request)
    return [(round(1e3 * wall, 3), round(1e3 * cpu, 3)) for wall, cpu in engine.steps()[10:STEPS]]


def hand_over(folder: Path) -> dict[str, Any]:
    """Milliseconds of hand-overs of one prompt at a time, and of copies of the same pages."""
    given = {"model": str(make(folder, "thin"))} | SETTINGS
    figures: dict[str, Any] = {}
    for title, options in (("checked", {}), ("without checksums", {"verify": False})):
        with started(folder, given, options) as (one, two):
            for tokens in TOKENS:
                (prompt,) = prompts(1, tokens, tokens + 1)
                samples = [(round(1e3 * _through(one, two, prompt), 3)) for _ in range(WARM + HANDED)][WARM:]
                figures.setdefault(str(tokens), {})[title] = samples
    for tokens in TOKENS:
        of = figures[str(tokens)] | {"copy": _copies(-(-tokens // BLOCK))}
        figures[str(tokens)] = of
        medians = {name: f"{statistics.median(samples):.2f} ms" for name, samples in of.items()}
        print(f"{tokens} tokens, {tokens * LAYERS * ROW / 1e6:.1f} MB: {medians}", flush=True)
    return {"samples_ms": figures, "bytes_of_a_token": LAYERS * ROW}


def _through(prefill: Engine, decode: Engine, prompt: list[int]) -> float:
    """Seconds of a hand-over, from the decode engine's order until it knows that all is there."""
    params, name = prefill.run(new_name(), prompt, 1, ASK)[2], new_name()
    if decode.run(name, prompt, 2, params)[1] != "length":
        raise RuntimeError("it was not handed over")
    return decode.fetched[name]


def _copies(blocks: int) -> list[float]:
    """Milliseconds of copies of so many blocks of each layer, side by side, between two pieces of shared memory."""
    torch.set_num_threads(1)
    size = BLOCK * ROW
    total = SETTINGS["kv_cache_memory_bytes"] // (LAYERS * size)
    source, sink = (from_dlpack(kvproto.allocate(LAYERS * total * size)).view(LAYERS, total, size) for _ in range(2))
    source.random_(0, 100)
    sink.zero_()
    samples = []
    for seed in range(WARM + HANDED):
        here, there = random.Random(seed).choices(range(total - blocks + 1), k=2)
        began = time.perf_counter()
        for mine, theirs in zip(source, sink, strict=True):
            theirs[there : there + blocks] = mine[here : here + blocks]
        samples.append(round(1e3 * (time.perf_counter() - began), 3))
    return samples[WARM:]


MEASURES = {"idle": idle, "hand_over": hand_over}


def main() -> None:
    """Run all, or those that are named, print what they found, and keep it beside earlier results of the others."""
    parser = arguments(__doc__, "vllm_cpu")
    parser.add_argument("--only", choices=MEASURES, nargs="+", default=MEASURES)
    args = parser.parse_args()
    figures = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = facts("vllm") | MEASURES[name](Path(folder))
    keep(args.out, figures)


if __name__ == "__main__":
    main()
