"""SGLang's HiCache and vLLM on GPUs over their own tiers and over kvproto's: what a fresh engine finds, and when.

`python benchmarks/tiers_engines_gpu.py sglang|vllm [--store DIR] [--out FILE] [--only NAME ...] [--cpu]`, where that engine
runs; one GPU is enough, with more each contender has its own. Of each contender two engines start, and all start at once;
then one after the other is measured, in `--rounds`. One engine computes prompts and stores them, the other has never seen
them: of prompts one by one, and of as many at once, the seconds to the first token, and how many tokens were found. Beside
that: computed, from the device, and, in vLLM, from the host once the device has forgotten. Answers of 16 tokens are those
of the engine that computed the prompts, with its device's pages: it computes what the other does. `stored` is the time
from asking until all bytes are in files. In DIR stay the pages of `kvproto, files` and the answers to some prompts more,
which the engine of the other name finds there when it is run next: `the other's pages`. Files are in the page cache.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import sglang_engine
from harness import arguments, facts, keep
from vllm_engine import make_model
from vllm_gpu import FLASH, started, tokens_of

WEIGHTS, MOST = "of this benchmark", 16
PAGE = 64
"""Tokens of a page of SGLang, and of a block of vLLM; on the CPU vLLM has 32."""
OWN = {"sglang": "HiCache's files", "vllm": "vLLM's files"}
OTHER = "the other's pages"
STORES = {"kvproto, files": "", "kvproto, packs": "packs:", OTHER: ""}


class Sizes:
    """Lengths and counts of what is asked.

    Fields:
        length: Tokens of a prompt, of which the last one is always computed.
        row: Bytes of a token.
    """

    def __init__(self, small: bool) -> None:
        self.number, self.length = (2, 257) if small else (8, 4097)
        self.row = 4 * 2 * 2 * 32 * 4 if small else 8 * 2 * 8 * 128 * 2

    @property
    def whole(self) -> int:
        """Bytes of the whole pages of a prompt."""
        return (self.length - 1) * self.row


def sglang_of(contender: str, folder: Path, model: Path, at: int, gpu: int, log: Path, small: bool) -> Any:
    """An SGLang, starting."""
    settings: dict[str, Any] = {
        "model_path": str(model), "skip_tokenizer_init": True, "page_size": PAGE, "random_seed": 0,
        "disable_cuda_graph": True, "log_level": "warning", "port": 31000 + 100 * at, "enable_hierarchical_cache": True,
        "hicache_ratio": 1.2, "hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_backend": "file",
    }  # fmt: skip
    if small:
        settings |= {
            "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "max_total_tokens": 4096,
            "context_length": 1024, "disable_overlap_schedule": True, "hicache_io_backend": "direct", "hicache_mem_layout": "layer_first",
        }  # fmt: skip
    else:
        settings |= {
            "attention_backend": "fa3", "dtype": "bfloat16", "max_total_tokens": 98_304, "mem_fraction_static": 0.85,
            "context_length": 16_384, "chunked_prefill_size": 16_384, "sampling_backend": "pytorch",
            "grammar_backend": "none", "skip_server_warmup": True, "disable_prefill_cuda_graph": True,
        }  # fmt: skip
    if contender in STORES:
        given = {
            "backend_name": "kvproto", "module_path": "kvproto_sglang.tiers", "class_name": "KvprotoTiers",
            "interface_v1": 1, "storage": f"{STORES[contender]}{folder}", "weights": WEIGHTS,
        }  # fmt: skip
        more = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(given)}
        settings |= more
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
    environment |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"} if small else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return sglang_engine.Engine(f"{contender} {at}", settings, environment, log)


def vllm_of(contender: str, folder: Path, model: Path, at: int, gpu: int, log: Path, small: bool) -> Any:
    """A vLLM, starting."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": 6 << 30, "block_size": PAGE}
    if contender == OWN["vllm"]:
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}]}
    transfer: dict[str, Any] = {"kv_connector": "OffloadingConnector"}
    if contender in STORES:
        transfer = {"kv_connector": "KvprotoTiers", "kv_connector_module_path": "kvproto_vllm.tiers"}
        extra = {
            "storage": f"{STORES[contender]}{folder}", "host_bytes": 64 << 20 if small else 6 << 30,
            "prefetch_policy": "wait_complete", "weights": WEIGHTS,
        }  # fmt: skip
    transfer |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
    settings = {"model": str(model), "enable_prefix_caching": True, "kv": transfer}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if small else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    if not small:
        settings |= {"dtype": "bfloat16", **FLASH, "block_size": PAGE, "max_model_len": 16_384}
        settings |= {"kv_cache_memory_bytes": 3 << 30, "gpu_memory_utilization": 0.1, "max_num_batched_tokens": 16_384}
    return started(f"{contender} {at}", settings, environment, log, 32 if small else 0)


def ask(engine: Any, prompts: list[list[int]], most: int = 1) -> tuple[list[list[int]], list[int], float]:
    """A batch: its answers, the tokens of each prompt that did not have to be computed, and its seconds."""
    got, seconds = engine.run(prompts, most)
    found = [each.held + each.stored if isinstance(each, sglang_engine.Got) else each.found for each in got]
    return [each.tokens for each in got], found, seconds


class Measured:
    """Samples of one contender, by what was measured."""

    def __init__(self) -> None:
        self.samples: dict[str, list[Any]] = {}

    def add(self, name: str, value: Any) -> None:
        self.samples.setdefault(name, []).append(value)

    def both(self, name: str, engine: Any, alone: list[list[int]], together: list[list[int]]) -> None:
        """Seconds to the first token of prompts one by one and at once, and the share of their tokens that was found."""
        share = (len(alone[0]) - 1) * len(together)
        for prompt in alone:
            _, found, seconds = ask(engine, [prompt])
            self.add(f"{name}, one", seconds)
        _, found, seconds = ask(engine, together)
        self.add(f"{name}, all", seconds)
        self.add(f"{name}, found", round(sum(found) / share, 4))


def stored(folder: Path) -> int:
    """Bytes of the files below."""
    found = 0
    for each in folder.rglob("*"):
        with suppress(FileNotFoundError):  # written under another name until it was whole
            found += each.stat().st_size if each.is_file() else 0
    return found


def stored_within(folder: Path, size: int, seconds: float = 15) -> bool:
    """Whether so many bytes are stored within these seconds."""
    until = time.monotonic() + seconds
    while (found := stored(folder)) < size and time.monotonic() < until:
        time.sleep(0.02)
    return found >= size


def once(writer: Any, reader: Any | None, folder: Path, sizes: Sizes, seed: int, into: Measured) -> None:
    """One round: prompts that nobody has seen."""
    alone, together = (tokens_of([sizes.length] * sizes.number, seed + n) for n in (0, 500))
    before = stored(folder)
    for prompt in alone:
        into.add("computed, one", ask(writer, [prompt])[2])
    begun = time.monotonic()
    into.add("computed, all", ask(writer, together)[2])
    if reader is not None:
        wanted = before + 2 * sizes.number * sizes.whole
        into.add("stored", time.monotonic() - begun if stored_within(folder, wanted) else None)
    into.both("device", writer, alone, together)
    answers = ask(writer, together, MOST)[0]
    if hasattr(writer, "forget"):
        writer.forget()
        into.both("host", writer, alone, together)
        into.add("host, equal answers", _equal(answers, ask(writer, together, MOST)[0]))
    if reader is not None:
        into.both("storage", reader, alone, together)
        into.both("device again", reader, alone, together)
        into.add("storage, equal answers", _equal(answers, ask(reader, together, MOST)[0]))


def _equal(some: list[list[int]], others: list[list[int]]) -> float:
    return round(sum(a == b for a, b in zip(some, others, strict=True)) / len(some), 4)


def crossed(engine: Any, answers: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Tokens found of the prompts that the other engine has computed, and how much of its answers is equal."""
    time.sleep(6)  # until it looks again who has stored
    prompts = tokens_of([sizes.length] * 4, answers["seed"])
    tokens, found, seconds = ask(engine, prompts, MOST)
    same = [
        next((i for i in range(MOST) if a[i] != b[i]), MOST) for a, b in zip(tokens, answers["tokens"], strict=True)
    ]
    return {"found": [n / (sizes.length - 1) for n in found], "equal tokens": same, "of": MOST, "seconds": seconds}


def medians(samples: dict[str, list[Any]]) -> dict[str, float]:
    """Of those that have no sample that is missing."""
    return {name: round(median(found), 5) for name, found in samples.items() if None not in found}


def contenders(engine: str, small: bool) -> list[str]:
    """By name: the engine's own first."""
    own = {"sglang": [OWN["sglang"]], "vllm": [] if small else ["vLLM's host", OWN["vllm"]]}[engine]
    return [*own, "kvproto, files", "kvproto, packs"]


class Bench:
    """Engines of one kind, and what is measured of them."""

    def __init__(self, engine: str, store: Path, logs: Path, model: Path, gpus: int, small: bool) -> None:
        self.engine, self.store, self.logs, self.model, self.gpus = engine, store, logs, model, gpus
        self.small, self.sizes = small, Sizes(small)
        self._running: dict[str, list[Any]] = {}
        self._count = 0

    @property
    def answers(self) -> Path:
        """File of the answers of the engine of the other name."""
        return self._answers("vllm" if self.engine == "sglang" else "sglang")

    def _answers(self, engine: str) -> Path:
        return self.store / f"{engine}.json"

    def folder(self, contender: str) -> Path:
        """Folder of the pages of a contender."""
        engine = self.answers.stem if contender == OTHER else self.engine
        return self.store / engine / ("kvproto, files" if contender == OTHER else contender)

    def start(self, contender: str) -> None:
        """Start what a contender needs: an engine that computes, and one that finds."""
        folder, gpu = self.folder(contender), len(self._running) % self.gpus
        folder.mkdir(parents=True, exist_ok=True)
        make = sglang_of if self.engine == "sglang" else vllm_of
        roles = [""] if contender in (OTHER, "vLLM's host") else ["computes", "finds"]
        self._running[contender] = []
        for role in roles:
            log = self.logs / f"{self.engine} {contender} {role}.log"
            made = make(contender, folder, self.model, self._count, gpu, log, self.small)
            self._running[contender].append(made)
            self._count += 1

    def measure(self, contender: str, rounds: int) -> dict[str, Any]:
        """Its samples; its engines have ended afterwards, and of its pages those are left that the other engine finds."""
        running, folder = self._running[contender], self.folder(contender)
        try:
            for engine in running:
                engine.wait(1200 if self.small else 300)
            if contender == OTHER:
                return crossed(running[0], json.loads(self.answers.read_text()), self.sizes)
            made = self._rounds(running[0], running[1] if len(running) > 1 else None, folder, rounds)
            if contender == "kvproto, files":
                self._leave(running[0], folder)
            return made.samples
        finally:
            self.stop(contender)
            if contender not in (OTHER, "kvproto, files"):
                shutil.rmtree(folder, ignore_errors=True)

    def _rounds(self, writer: Any, reader: Any | None, folder: Path, rounds: int) -> Measured:
        once(writer, reader, folder, self.sizes, 10_000, Measured())  # what is compiled or loaded at its first use
        time.sleep(6)  # until a reader looks again who has stored
        made = Measured()
        for n in range(rounds):
            once(writer, reader, folder, self.sizes, n, made)
        return made

    def _leave(self, writer: Any, folder: Path) -> None:
        """Pages and answers for the engine of the other name."""
        seed, before = 20_000, stored(folder)
        prompts = tokens_of([self.sizes.length] * 4, seed)
        ask(writer, prompts)
        whole = stored_within(folder, before + 4 * self.sizes.whole)
        tokens = ask(writer, prompts, MOST)[0]
        self._answers(self.engine).write_text(json.dumps({"seed": seed, "tokens": tokens, "stored": whole}))

    def stop(self, contender: str) -> None:
        for engine in self._running.pop(contender, ()):
            engine.stop()


def main(argv: list[str] | None = None) -> int:
    """Run the contenders; the exit status says whether all of them were measured."""
    parser = arguments(__doc__, "tiers_engines_gpu", rounds=3)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--store", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--cpu", action="store_true", help="try the script with small engines on the CPU")
    args = parser.parse_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # its engines end, too
    figures, gpus, wrong = dict[str, Any](facts(args.engine)), 1, 0
    if not args.cpu:
        from gpu import gpu_facts

        figures |= gpu_facts()
        gpus = figures["gpus"]
    with tempfile.TemporaryDirectory() as folder:
        if args.engine == "sglang":
            sglang_engine.plug_in(folder, small=args.cpu)
        bench = Bench(args.engine, args.store, args.logs, make_model(Path(folder) / "model", args.cpu), gpus, args.cpu)
        names = args.only or [*contenders(args.engine, args.cpu), *([OTHER] if bench.answers.exists() else [])]
        try:
            for name in () if args.cpu else names:  # all at once
                bench.start(name)
            for name in names:
                try:
                    if args.cpu:
                        bench.start(name)
                    figures[name] = bench.measure(name, args.rounds)
                    said = figures[name] if name == OTHER else medians(figures[name])
                    print(name, said, flush=True)
                except Exception:
                    wrong, figures[name] = 1, {"error": traceback.format_exc()[-2000:]}
                    print(name, figures[name]["error"], flush=True)
                keep(args.out, figures)
        finally:
            with ThreadPoolExecutor(len(names)) as threads:
                list(threads.map(bench.stop, names))
    return wrong


if __name__ == "__main__":
    sys.exit(main())
