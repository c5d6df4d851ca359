"""SGLang hands prompts over to an SGLang whose ranks deal the tokens (DCP), on GPUs: are the tokens those of one engine?

`python benchmarks/sglang_dcp_gpu.py [--out FILE] [--only NAME ...] [--cpu]`, where SGLang runs, on as many GPUs as decode has
ranks. For each pair a model of random weights is served three times, all at once: prefill, decode, and one engine alone
that has no DCP. GQA decodes with SGLang's kernels of Triton, MLA with FlashInfer's, whose kernel is compiled at its first
use. Engines that compute in another order differ at near ties of bfloat16, so the answers of the one engine are compared
with themselves, too: asked at once, and one by one. Then 8 prompts of 8,192 tokens at once, to their first tokens. With
--cpu, Triton interprets its kernels: TRITON_INTERPRET=1 has to be set.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

import attrs
from harness import arguments, facts, keep
from sglang_engine import Engine, of_pair, plug_in
from vllm_engine import make_mla, make_model
from vllm_gpu import tokens_of

ROLES = ("prefill", "decode", "alone")
TRITON = {"attention_backend": "triton", "page_size": 64}


@attrs.frozen
class Pair:
    """A model, the tensor-parallel sizes of prefill and decode, and settings of decode."""

    model: str
    sizes: tuple[int, int]
    decode: dict[str, Any]


PAIRS = {
    "GQA, TP 2 to TP 2 with DCP 2": Pair("one head", (2, 2), TRITON | {"page_size": 16}),
    "MLA, TP 2 to TP 2 with DCP 2": Pair("mla", (2, 2), {"attention_backend": "flashinfer", "page_size": 32}),
    "GQA, TP 2 to TP 4 with DCP 2": Pair("two heads", (2, 4), TRITON | {"page_size": 16}),
}
BASE: dict[str, Any] = {
    "skip_tokenizer_init": True, "random_seed": 0, "disable_cuda_graph": True, "disable_custom_all_reduce": True,
    "log_level": "warning", "grammar_backend": "none", "sampling_backend": "pytorch", "dtype": "bfloat16",
    "max_total_tokens": 98_304, "mem_fraction_static": 0.85, "context_length": 16_384, "chunked_prefill_size": 16_384,
    "skip_server_warmup": True, "disable_prefill_cuda_graph": True,
}  # fmt: skip
SMALL = {
    "device": "cpu", "dtype": "float32", "max_total_tokens": 4096, "mem_fraction_static": 0.5, "context_length": 512,
    "disable_overlap_schedule": True, "chunked_prefill_size": 128,
}  # fmt: skip
HAND_OVER = {"disaggregation_transfer_backend": "kvproto", "disaggregation_decode_retraction_backup": "cpu_tensor"}


def engines(
    name: str, model: Path, folder: str, logs: Path, gpus: int, small: bool, flashinfer: str = ""
) -> list[Engine]:
    """Prefill, decode and the one alone, starting; pairs that do not need all GPUs have two of them in turn."""
    pair, number = PAIRS[name], list(PAIRS).index(name)
    ranks, place = max(pair.sizes), f"ipc://{folder}/{number}-"
    first = 0 if ranks > 2 or gpus < 4 else 2 * (number % 2)
    seen = {} if small else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + ranks)))}
    made = []
    for at, role in enumerate(ROLES):
        settings = BASE | TRITON | {"model_path": str(model), "tp_size": pair.sizes[at % 2]}
        settings |= {"port": 32_000 + 1000 * number + 100 * at}
        if role == "decode":
            settings |= pair.decode | {"dcp_size": 2}
        if role != "alone":
            settings |= HAND_OVER | {"disaggregation_mode": role, "disaggregation_bootstrap_port": 1}
        if small:
            settings |= SMALL | ({"attention_backend": "torch_native"} if role != "decode" else {})
            settings |= {"tp_size": 1} if role == "alone" else {}
        options = {"transports": ["shm" if small else "cuda"], "verify": True}
        environment = seen | of_pair(at % 2, place, options) | {"SGLANG_CPU_OMP_THREADS_BIND": "0|0|0|0"}
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # others start on the same GPUs
        if flashinfer and settings["attention_backend"] == "flashinfer":
            environment["PYTHONPATH"] = flashinfer
        made.append(Engine(role, settings, environment, logs / f"{name} {role}.log"))
    return made


def over(prefill: Engine, decode: Engine, prompts: list[list[int]], most: int) -> tuple[list[list[int]], float]:
    """Prompts through both, which get the same requests at the same time, and seconds."""
    rooms = [random.getrandbits(61) for _ in prompts]
    ways = {"bootstrap_host": ["prefill"] * len(rooms), "bootstrap_port": [1] * len(rooms), "bootstrap_room": rooms}
    began = time.perf_counter()
    for engine in (prefill, decode):
        engine.send(prompts, most, **ways)
    got, _ = decode.result()
    seconds = time.perf_counter() - began
    prefill.result()
    return [each.tokens for each in got], seconds


def told(running: list[Engine], small: bool) -> dict[str, Any]:
    """Counts of equal tokens of each answer, and seconds."""
    lengths, most = ([41, 44], 6) if small else ([40, 100, 200, 333, 512, 513, 1000, 2000], 48)
    prefill, decode, alone = running
    figures: dict[str, Any] = {"equal tokens": [], "of one engine asked in another way": [], "of": most}
    for seed in range(1 if small else 2):
        prompts = tokens_of(lengths, seed)
        wanted = [each.tokens for each in alone.run(prompts, most)[0]]
        singly = [alone.run([prompt], most)[0][0].tokens for prompt in prompts]
        figures["equal tokens"] += alike(over(prefill, decode, prompts, most)[0], wanted)
        figures["of one engine asked in another way"] += alike(singly, wanted)
        figures["different tokens"] = [len({*each}) for each in wanted]
    if not small:
        long = [tokens_of([8192] * 8, 100 + n) for n in range(4)]
        figures["through the pair"] = [over(prefill, decode, prompts, 1)[1] for prompts in long][1:]
        figures["one engine"] = [alone.run(prompts, 1)[1] for prompts in long][1:]
    return figures


def alike(some: list[list[int]], others: list[list[int]]) -> list[int]:
    """Tokens before the first that differs."""
    both = [list(zip(a, b, strict=True)) for a, b in zip(some, others, strict=True)]
    return [next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)) for pairs in both]


def wrong(figures: dict[str, Any]) -> bool:
    """Whether a pair agrees less long with the one engine than that does with itself, within a tenth."""
    least = 0.9 * sum(figures["of one engine asked in another way"])
    return sum(figures["equal tokens"]) < least or max(figures["different tokens"]) < 3


def main(argv: list[str] | None = None) -> int:
    """Run the pairs; the exit status says whether tokens were as they should be."""
    parser = arguments(__doc__, "sglang_dcp_gpu")
    parser.add_argument("--only", nargs="*", default=list(PAIRS))
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument(
        "--flashinfer", default="", help="the folder of that package, for engines that compute with it alone"
    )
    parser.add_argument("--cpu", action="store_true", help="try the script with small engines on the CPU")
    args = parser.parse_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # its engines end, too
    figures, gpus, names, bad = dict[str, Any](facts("sglang")), 0, args.only, False
    if args.cpu:
        names = names[:1]
    else:
        from gpu import gpu_facts

        figures |= gpu_facts()
        gpus = figures["gpus"]
        names = [name for name in names if max(PAIRS[name].sizes) <= gpus]
    running: dict[str, list[Engine]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plug_in(folder, args.cpu)
        models = {"mla": make_mla(Path(folder) / "mla")} if not args.cpu else {}
        for number, title in enumerate(("one head", "two heads"), 1):
            models[title] = make_model(Path(folder) / title, args.cpu, heads=number)
        try:
            for name in names:
                model = models[PAIRS[name].model]
                running[name] = engines(name, model, folder, args.logs, gpus, args.cpu, args.flashinfer)
            for name in names:
                try:
                    for engine in running[name]:
                        figures["sglang"] = engine.wait(1200 if args.cpu else 300)
                    figures[name] = told(running[name], args.cpu)
                    bad = bad or wrong(figures[name])
                except Exception:
                    bad, figures[name] = True, {"error": traceback.format_exc()[-2500:]}
                print(name, json.dumps(figures[name]), flush=True)
                seconds = {k: median(v) for k, v in figures[name].items() if k in ("through the pair", "one engine")}
                print(name, seconds, flush=True)
                keep(args.out, figures)
                for engine in running[name]:
                    engine.stop()
        finally:
            for engine in [each for found in running.values() for each in found]:
                engine.stop()
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
