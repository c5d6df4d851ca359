"""vLLM on the CPU with `kvproto_vllm`: a decode step beside one without connector, and a crowd of requests.

`PYTHONPATH=.:integrations .engines/venv/bin/python benchmarks/vllm_cpu.py [--write]` after `make engines`; --write keeps all
in benchmarks/results/vllm_cpu.json.

* idle: steps of 8 requests of a Llama of 135 M parameters, float32, in two engines that take turns, one with the connector
  in both roles and one without any; nothing is handed over. Times are of single steps, on one thread.
* crowd: 200 requests at random, 16 at a time, through two engines that have blocks for three of them
  (tools/engines/vllm_random.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs

from tools.engines.vllm_engine import Engine, new_name, prompts
from tools.engines.vllm_models import make
from tools.engines.vllm_pd import CROWDED
from tools.engines.vllm_random import crowd

RESULT = Path(__file__).parent / "results/vllm_cpu.json"
ROUNDS, STEPS = 12, 60


def idle(folder: Path) -> dict[str, Any]:
    """Milliseconds of steps with and without the connector."""
    settings = {
        "model": str(make(folder, "small")), "load_format": "dummy", "kv_cache_memory_bytes": 256 << 20,
    }  # fmt: skip
    engines = {
        "with": Engine.of("one", str(folder), ["one"], "fail", **settings),
        "without": Engine("none", "", settings),
    }
    samples: dict[str, list[list[float]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.start()
        engine.ready()
    try:
        for n in range(ROUNDS + 1):
            for name, engine in list(engines.items())[:: 1 if n % 2 else -1]:
                names = [new_name() for _ in range(8)]
                for request, prompt in zip(names, prompts(8, 30, 60, n), strict=True):
                    engine.add(request, prompt, STEPS)
                for request in names:
                    engine.result(request)
                steps = engine.steps()[-(STEPS - 10) :]  # of all eight
                if n:  # the first round warms up
                    samples[name].append([round(1e3 * seconds, 4) for seconds in steps])
    finally:
        for engine in engines.values():
            engine.stop()
    medians = {name: statistics.median(x for each in some for x in each) for name, some in samples.items()}
    fastest = {name: min(x for each in some for x in each) for name, some in samples.items()}
    pairs = zip(samples["with"], samples["without"], strict=True)
    ratios = [round(statistics.median(one) / statistics.median(two), 4) for one, two in pairs]
    print(f"idle: {medians['with']:.2f} ms a step, {medians['without']:.2f} without the connector", flush=True)
    print(f"      median of {ROUNDS} rounds' ratios {statistics.median(ratios):.4f}, of the fastest steps "
          f"{fastest['with'] / fastest['without']:.4f}", flush=True)  # fmt: skip
    return {"medians_ms": medians, "fastest_ms": fastest, "ratios": ratios, "samples_ms": samples}


def crowded(folder: Path) -> dict[str, Any]:
    """What became of the requests of three crowds."""
    engines = []
    for (name, other), given in zip((("one", "two"), ("two", "one")), (CROWDED.one, CROWDED.two), strict=True):
        model = str(make(folder, given["model"]))
        engines.append(Engine.of(name, str(folder), [other], "recompute", **given | {"model": model}))
    one, two = engines
    for engine in engines:
        engine.start()
    try:
        for engine in engines:
            engine.ready()
        found = [attrs.asdict(crowd(one, two, seed=seed)) for seed in range(3)]
    finally:
        for engine in engines:
            engine.stop()
    for each in found:
        print(f"crowd: {each}", flush=True)
    return {"crowds": found}


def main() -> None:
    """Run both, and print or write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=["idle", "crowd"])
    args = parser.parse_args()
    import vllm
    import vllm.v1.worker.cpu_worker

    found: dict[str, Any] = {"vllm": vllm.__version__, "cores": os.cpu_count(), "when": time.strftime("%Y-%m-%d")}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in (("crowd", crowded), ("idle", idle)):
            if args.only in (None, name):
                found[name] = measure(Path(folder))
    if args.write:
        RESULT.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
