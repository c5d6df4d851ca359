"""Hand-over times between two vLLM engines: ours, vLLM's own NIXL connector, and one that moves nothing, in one run.

`python benchmarks/vllm_handover.py [--out] [--only NAME ...] [--connectors NAME ...] [--models NAME ...] [--cpu]`, where
vLLM runs: on four GPUs all of `WORLDS`, prefill on the first two and decode on the others; on two GPUs, or one, TP 1 to 1.
For each connector and size one prefill and one decode engine run side by side for all of the run, and take turns; a decode
engine fetches from prefill engines of both sizes. Prompts are prefilled, then the decode engine is asked for the first
token of each, and the time from that call until it has the last of these tokens is a sample:

* 8 prompts of 8,192 tokens at once, with blocks in order, and scattered in both engines;
* one prompt of 1,024 tokens, and one of 32,768;
* the steps of 8 other requests, which decode meanwhile, while the 8 prompts arrive.

Before that, in each world, decode's caches are poisoned, and what arrives is compared with what prefill has, all bytes of
all layers, by sums of each block and head; and its tokens with those of the decode engine alone. `--trace` also has single
hand-overs through ours noted by process and thread, and says what each part takes (vllm_marks.py); the file has the marks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from harness import arguments, keep
from vllm_engine import Ask, Engine, Got, make_mla, make_model
from vllm_gpu import ASK, ENVIRONMENT, FLASH, SETTINGS, tokens_of
from vllm_marks import budgets, table

HERE = Path(__file__).parent
WORLDS = {"TP 1 to 1": (1, 1), "TP 2 to 2": (2, 2), "TP 1 to 2": (1, 2), "TP 2 to 1": (2, 1)}
CONNECTORS = {
    "ours": "Ours", "nixl": "Nixl", "nothing": "Nothing", "ours, no checksums": "Ours", "ours, pull": "Ours",
}  # fmt: skip
"""Classes of vllm_connectors.py; variants of ours are measured where both engines have the same size."""


@attrs.frozen
class Sizes:
    """Prompts and rounds."""

    number: int = 8
    length: int = 8192
    alone: tuple[int, ...] = (1024, 32_768)
    turns: int = 6
    """Rounds of each kind; the first warms up."""
    singles: int = 9
    local: int = 200
    """Steps of the requests that decode meanwhile before the prompts come."""


@attrs.frozen
class Model:
    """Settings of the engines of a model, on GPUs and, smaller, on the CPU, and whether its ranks divide heads."""

    make: Any
    gpu: dict[str, Any]
    cpu: dict[str, Any]
    divided: bool
    sizes: Sizes


_IN_TORCH = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
MODELS = {
    "GQA": Model(make_model, {**FLASH, "kv_cache_memory_bytes": 3 << 30}, {"block_size": 32}, True, Sizes()),
    "MLA": Model(
        make_mla,
        {
            "attention_backend": "FLASHMLA", "block_size": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2 << 30,
        },
        {"block_size": 16, "attention_backend": "CPU_MLA", **_IN_TORCH},
        False,
        Sizes(turns=4, singles=6),
    ),
}  # fmt: skip
SMALL: dict[str, Any] = {
    "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32", "enforce_eager": True,
    "max_num_batched_tokens": 1024,
}  # fmt: skip
"""On the CPU, to try this script."""


LITTLE = Sizes(number=3, length=192, alone=(96, 384), turns=3, singles=3, local=20)


class Side:
    """The engines of a model, by connector, role (0 prefill, 1 decode) and tensor parallel size."""

    def __init__(
        self, model: str, folder: Path, logs: Path, gpus: int, connectors: list[str], worlds: list[str]
    ) -> None:
        self.model, self.folder, self.logs, self.gpus = model, folder, logs, gpus
        small = not gpus
        self._weights = MODELS[model].make(folder / f"model-{model}", small)
        self._wanted = sorted({(role, WORLDS[world][role]) for world in worlds for role in (0, 1)})
        keys = [(name, role, tp) for name in connectors for role, tp in self._wanted]
        self.engines = {key: self._start(number, *key) for number, key in enumerate(keys)}
        self.dead: dict[str, str] = {}
        """Connectors that cannot be measured any more, and why."""

    def _start(self, number: int, name: str, role: int, tp: int) -> Engine:
        given, first = MODELS[self.model], 21_000 + 1_000 * list(MODELS).index(self.model)
        settings: dict[str, Any] = SETTINGS | {
            "model": str(self._weights), "tensor_parallel_size": tp, "disable_custom_all_reduce": True,
            "worker_extension_cls": "vllm_connectors.Worker", "gpu_memory_utilization": 0.03, "dtype": "bfloat16",
        }  # fmt: skip
        environment = ENVIRONMENT | {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(first + 20 * number), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
        }  # fmt: skip
        if self.gpus:
            settings |= given.gpu
            own = self._devices(role, tp)
            others = [gpu for gpu in range(self.gpus) if gpu not in own and name != "nixl"]  # ours maps their memory
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, own + others))
        else:
            settings |= SMALL | given.cpu
            del settings["gpu_memory_utilization"]
            settings |= {"distributed_executor_backend": "mp"} if tp > 1 else {}
            environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        settings["kv"] = self._kv(name, role, tp)
        title = f"{name}-{('prefill', 'decode')[role]}-{tp}".replace(",", "").replace(" ", "-")
        return Engine(title, settings, environment, self.logs / f"{self.model}-{title}.log", fork=not self.gpus)

    def _devices(self, role: int, tp: int) -> list[int]:
        """The GPUs of an engine: prefill's are the first ones, decode's the last."""
        first = self.gpus // 2 if role else 0
        return [min(first + i, self.gpus - 1) for i in range(tp)]

    def _kv(self, name: str, role: int, tp: int) -> dict[str, Any]:
        kv: dict[str, Any] = {
            "kv_connector": CONNECTORS[name], "kv_connector_module_path": "vllm_connectors",
            "kv_role": ("kv_producer", "kv_consumer")[role],
        }  # fmt: skip
        if name == "nixl":
            return kv | {"kv_buffer_device": "cuda" if self.gpus else "cpu"}
        options = {
            "transports": ["cuda" if self.gpus else "shm"], "verify": "no checksums" not in name, "pull": "pull" in name,
        }  # fmt: skip
        extra: dict[str, Any] = {"name": f"prefill{tp}" if role == 0 else f"decode{tp}", "options": options}
        place = f"ipc://{self.folder}/{self.model}{list(CONNECTORS).index(name)}-"
        if role == 0:
            extra["listen"] = f"{place}{tp}-{{rank}}"
        else:
            extra["sources"] = {f"prefill{n}": f"{place}{n}-0" for r, n in self._wanted if r == 0}
        return kv | {"kv_connector_extra_config": extra}

    def ready(self, seconds: float) -> str:
        """Wait until all have started, and say the release; what does not start is left out from now on."""
        until, release = time.monotonic() + seconds, ""
        for (name, _, _), engine in self.engines.items():
            try:
                release = engine.wait(max(until - time.monotonic(), 1.0))
            except Exception as error:
                self.drop(name, f"{engine.name} has not started: {error!r}")
        return release

    def drop(self, name: str, why: str) -> None:
        """Leave a connector out from now on."""
        self.dead.setdefault(name, why)
        print(f"{self.model}, {name}: {why}", flush=True)

    def pair(self, name: str, world: str) -> tuple[Engine, Engine]:
        """Prefill and decode."""
        prefill, decode = WORLDS[world]
        return self.engines[name, 0, prefill], self.engines[name, 1, decode]

    def alive(self, names: tuple[str, ...] | list[str]) -> list[str]:
        """Names of connectors that have engines which can be measured."""
        return [name for name in names if (name, *self._wanted[0]) in self.engines and name not in self.dead]

    def stop(self) -> None:
        with ThreadPoolExecutor(len(self.engines)) as threads:
            list(threads.map(Engine.stop, self.engines.values()))


def over(prefill: Engine, decode: Engine, prompts: list[list[int]], most: int = 1) -> tuple[list[Got], float]:
    """Prompts through both, prefill first; the decode engine's answers, and seconds until it has the last."""
    params = [got.params for got in prefill.run(prompts, params=ASK)[0]]
    got, seconds = decode.run(prompts, most, params)
    if bad := [one.reason for one in got if one.reason != "length"]:
        raise RuntimeError(f"{len(bad)} requests ended by {bad[0]!r}: see the logs")
    return got, seconds


def checked(prefill: Engine, decode: Engine, sizes: Sizes, divided: bool) -> dict[str, Any]:
    """Whether all bytes arrived where they belong, in poisoned caches, blocks scattered; and whether tokens are those of the
    decode engine alone.

    Of each prompt all but the last token is handed over, so that its blocks are full.
    """
    prompts, most = tokens_of([sizes.length + 1] * sizes.number, 5), 16
    alone = decode.run(prompts, most)[0]
    prefill.order(3)
    decode.order(4)
    decode.call("poison")
    here = prefill.run(prompts, params=ASK | {"tell": True})[0]
    blocks = [one.params.pop("blocks") for one in here]
    sent = [_digests(prefill, some[:-1], divided) for some in blocks]
    there = decode.run(prompts, most, [one.params | {"tell": True} for one in here])[0]
    came = [
        _digests(decode, one.params["blocks"][: len(some) - 1], divided)
        for one, some in zip(there, blocks, strict=True)
    ]
    first = [
        next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), most)
        for one, other in zip(there, alone, strict=True)
    ]
    return {
        "bytes equal": [bool(np.array_equal(a, b)) for a, b in zip(sent, came, strict=True)],
        "sums compared": sum(a.size for a in sent), "equal tokens": first, "of": most,
        "different tokens": [len({*one.tokens}) for one in alone],
    }  # fmt: skip


def _digests(engine: Engine, blocks: list[int], divided: bool) -> npt.NDArray[np.int64]:
    """Sums of all bytes of these blocks: [layer, block, head of all ranks]."""
    ranks = [np.frombuffer(data, np.int64).reshape(shape) for shape, data in engine.call("digests", blocks)]
    if divided:
        return np.concatenate(ranks, axis=2)
    if not all(np.array_equal(ranks[0], rank) for rank in ranks):
        raise RuntimeError(f"ranks of {engine.name} differ")
    return ranks[0]


def measure(side: Side, world: str, names: list[str], sizes: Sizes, figures: dict[str, Any]) -> None:
    """The samples of a world, into `figures`: connectors take turns, each turn in another order."""
    for name in side.alive(names):
        figures[name] = {"ordered": [], "scattered": [], "alone": {str(size): [] for size in sizes.alone}}
        if name != "nothing":
            with _Guarded(side, name):
                figures[name]["checked"] = checked(*side.pair(name, world), sizes, MODELS[side.model].divided)
                print(f"{side.model}, {world}, {name}: {json.dumps(figures[name]['checked'])}", flush=True)
    turns = [(turn, kind) for turn in range(sizes.turns) for kind in ("ordered", "scattered")]
    for at, (turn, kind) in enumerate(turns):
        for name in _rotated(side.alive(names), at):
            with _Guarded(side, name):
                prefill, decode = side.pair(name, world)
                prefill.order(7 + turn if kind == "scattered" else 0)
                decode.order(107 + turn if kind == "scattered" else 0)
                seconds = over(prefill, decode, tokens_of([sizes.length] * sizes.number, 20 + turn))[1]
                figures[name][kind] += [seconds] * (turn > 0)
    for turn in range(sizes.singles):
        for size in sizes.alone:
            for name in _rotated(side.alive(names), turn):
                with _Guarded(side, name):
                    seconds = over(*side.pair(name, world), tokens_of([size], 50 + turn))[1]
                    figures[name]["alone"][str(size)] += [seconds] * (turn > 0)
    for name in side.alive(names):
        with _Guarded(side, name):
            figures[name] |= meanwhile(*side.pair(name, world), sizes)
    for name in side.alive(names):
        told = {kind: _ms(figures[name][kind]) for kind in ("ordered", "scattered", "steps during")}
        told |= {size: _ms(samples) for size, samples in figures[name]["alone"].items()}
        print(f"{side.model}, {world}, {name}, ms median (best) [longest]: {told}", flush=True)


def _ms(samples: list[float]) -> str:
    if not samples:
        return "none"
    return f"{median(samples) * 1e3:.2f} ({min(samples) * 1e3:.2f}) [{max(samples) * 1e3:.1f}]"


def _rotated(names: list[str], by: int) -> list[str]:
    cut = by % max(len(names), 1)
    return names[cut:] + names[:cut]


class _Guarded:
    """Leave a connector out when one of its engines fails, and go on with the others."""

    def __init__(self, side: Side, name: str) -> None:
        self._side, self._name = side, name

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        self._side.drop(self._name, repr(error))
        return True


def meanwhile(prefill: Engine, decode: Engine, sizes: Sizes) -> dict[str, Any]:
    """Seconds of steps of requests that decode, before prompts come and while they arrive, and when the last has."""
    prompts = tokens_of([sizes.length] * sizes.number, 60)
    params = [one.params for one in prefill.run(prompts, params=ASK)[0]]
    batch = [Ask(f"l{i}", tokens, 2 * sizes.local) for i, tokens in enumerate(tokens_of([64] * 8, 61))]
    batch += [
        Ask(f"h{i}", tokens, 1, one, sizes.local) for i, (tokens, one) in enumerate(zip(prompts, params, strict=True))
    ]
    decode.give(batch)
    got, _, steps = decode.wait()
    first = max(one.first for name, one in got.items() if name[0] == "h")
    during: list[float] = []
    for step in steps[sizes.local :]:
        if sum(during) < first:
            during.append(step)
    return {"steps before": steps[sizes.local // 10 : sizes.local], "steps during": during, "arrived after": first}


def traced(side: Side, world: str, sizes: Sizes, folder: Path) -> list[dict[str, Any]]:
    """The marks of hand-overs of one prompt, and of all at once, one after the other."""
    prefill, decode = side.pair("ours", world)
    for engine in (prefill, decode):
        engine.call("begin_marks")
        engine.run([[5, 6, 7]], params={"marks": "begin"})
    found = []
    shapes = [[size] for size in sizes.alone for _ in range(8)] + [[sizes.length] * sizes.number] * 3
    for turn, lengths in enumerate(shapes):
        prompts = tokens_of(lengths, 70 + turn)
        for engine in (prefill, decode):
            engine.call("marks")
            engine.run([[5, 6, 7]], params={"marks": str(folder / "dropped")})
        computed = prefill.run(prompts, params=ASK)[0]
        params = [one.params for one in computed]
        got = decode.run(prompts, 1, params)[0]
        marks = []
        for engine, role in ((prefill, "prefill"), (decode, "decode")):
            place = folder / f"marks-{role}"
            engine.run([[5, 6, 7]], params={"marks": str(place)})
            of = [tuple(mark) for worker in engine.call("marks") for mark in worker]
            of += [tuple(mark) for mark in json.loads(place.read_text())]
            marks += [(role, *mark) for mark in sorted(set(of))]
        sample = {"lengths": lengths, "prefilled": max(one.came + one.first for one in computed)}
        sample |= {"asked": min(one.came for one in got), "answered": max(one.came + one.first for one in got)}
        found.append(sample | {"marks": marks})
    for engine in (prefill, decode):
        engine.call("stop_marks")
        engine.run([[5, 6, 7]], params={"marks": "stop"})
    return found


def trace(side: Side, world: str, sizes: Sizes, traces: dict[str, Any], figures: dict[str, Any]) -> None:
    """Trace a world, and say what each part takes; what fails is printed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            marks = traces[f"{side.model}, {world}"] = traced(side, world, sizes, Path(folder))
            figures["budget"] = budgets(marks)
        except Exception:
            traceback.print_exc()
            return
    for size, parts in figures["budget"].items():
        print(f"{side.model}, {world}, {size} tokens, ms\n{table(parts)}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run all, or what is named; the exit status says whether anything was wrong."""
    parser = arguments(__doc__, "vllm_handover")
    parser.add_argument("--only", nargs="*", default=list(WORLDS), help="of the worlds")
    parser.add_argument("--connectors", nargs="*", default=list(CONNECTORS)[:3], help=f"of {', '.join(CONNECTORS)}")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--trace", type=Path, help="write the marks of hand-overs into this file")
    parser.add_argument("--cpu", action="store_true", help="try the script with small engines on the CPU")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    some = args.out and args.out.exists() and set(args.models) < set(MODELS)
    figures: dict[str, Any] = json.loads(args.out.read_text()) if some else {}
    gpus = 0
    if args.cpu:
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        from vllm import LLM  # noqa: F401 - once for all engines

        torch.set_num_threads(1)
    else:
        from gpu import gpu_facts

        figures["machine"] = gpu_facts()
        gpus = figures["machine"]["gpus"]
    worlds = [world for world in args.only if args.cpu or gpus >= 2 * max(WORLDS[world]) or world == "TP 1 to 1"]
    wrong, traces = 0, dict[str, Any]()
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            sizes = LITTLE if args.cpu else MODELS[model].sizes
            side = Side(model, Path(folder), args.logs, gpus, args.connectors, worlds)
            try:
                figures["vllm"] = side.ready(200 if gpus else 1200)
                for world in worlds:
                    names = [name for name in args.connectors if "," not in name or len({*WORLDS[world]}) == 1]
                    measure(side, world, names, sizes, figures.setdefault(f"{model}, {world}", {}))
                    keep(args.out, figures)
                    if args.trace and side.alive(["ours"]):
                        trace(side, world, sizes, traces, figures[f"{model}, {world}"])
                        args.trace.write_text(json.dumps(traces))
                        keep(args.out, figures)
            finally:
                side.stop()
            wrong += len(side.dead)
    return int(wrong > 0 or _unequal(figures))


def _unequal(figures: dict[str, Any]) -> bool:
    """Whether bytes of any hand-over differ."""
    told = [one for world in figures.values() if isinstance(world, dict) for one in world.values()]
    return any(not all(one["checked"]["bytes equal"]) for one in told if isinstance(one, dict) and "checked" in one)


if __name__ == "__main__":
    sys.exit(main())
