"""Two vLLM engines whose ranks hold caches in other ways, on GPUs: are the tokens those of the decode engine alone?

`python benchmarks/vllm_ranks_gpu.py [--out] [--only NAME ...] [--cpu]`, where vLLM runs, on four GPUs: decode has as many of
them as it has ranks, and prefill the first ones too. For each pair a model of random weights is served twice, with decode
context parallel (DCP), which deals the tokens of each request among ranks, in one of both. Answers are compared as `exact` of
vllm_gpu.py does: with those of the decode engine with all but one token in its prefix cache; also with prefix hits, with
blocks scattered, and with one bit of a page flipped.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import attrs
from harness import arguments, keep
from vllm_engine import Engine, make_mla, make_model
from vllm_gpu import exact, log_of, ours, started

BASE: dict[str, Any] = {
    "dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "enforce_eager": True, "disable_custom_all_reduce": True,
    "max_model_len": 9216,
}  # fmt: skip
MLA = BASE | {"attention_backend": "FLASHMLA", "block_size": 64}
DCP = {"decode_context_parallel_size": 2}
A2A = DCP | {"dcp_comm_backend": "a2a"}
"""By vLLM's other way, all-gather, decode engines alone answer prompts by one token again and again here."""
CACHED = {"enable_prefix_caching": True}


def sizes(tp: int) -> dict[str, Any]:
    return {"tensor_parallel_size": tp}


@attrs.frozen
class Pair:
    """Settings of two engines of a model."""

    model: str
    prefill: dict[str, Any]
    decode: dict[str, Any]

    def devices(self, at: int) -> int:
        """The number of GPUs of one engine."""
        return int((self.prefill, self.decode)[at]["tensor_parallel_size"])


PAIRS = {
    "MLA, TP 2 to TP 2 with DCP 2": Pair("mla", MLA | sizes(2), MLA | sizes(2) | A2A | CACHED),
    "MLA, TP 2 with DCP 2 to TP 2": Pair("mla", MLA | sizes(2) | DCP, MLA | sizes(2) | CACHED),
    "GQA, TP 2 to TP 4 with DCP 2": Pair("gqa", BASE | sizes(2), BASE | sizes(4) | A2A | CACHED),
    "GQA, TP 4 to TP 4 with DCP 2": Pair("gqa", BASE | sizes(4), BASE | sizes(4) | A2A | CACHED),
}
ON_GPUS = {*A2A, "attention_backend", "cp_kv_cache_interleave_size", "gpu_memory_utilization"}
"""Settings that an engine on the CPU does not have."""


def engines(name: str, models: dict[str, Path], logs: Path, folder: str, small: bool) -> list[Engine]:
    """Prefill and decode of a pair, starting."""
    pair, made = PAIRS[name], []
    for at, role in enumerate(("prefill", "decode")):
        settings = {"model": str(models[pair.model])} | (pair.prefill, pair.decode)[at]
        settings |= {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 2 << 30}
        seen = range(max(pair.devices(0), pair.devices(1)))
        if small:
            settings = {k: v for k, v in settings.items() if k not in ON_GPUS} | {"distributed_executor_backend": "mp"}
        options = {"transports": ["shm" if small else "cuda"], "verify": True}
        settings["kv"] = ours(at, f"ipc://{folder}/{list(PAIRS).index(name)}-", options)
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seen))}
        made.append(started(role, settings, environment, log_of(logs, name, role), 32 if small else 0))
    return made


def wrong(told: dict[str, Any]) -> list[str]:
    """Parts of `exact` that are not as they should be.

    Engines whose ranks hold other heads and tokens round in other places, and with bfloat16 that decides ties: an engine
    also differs from itself without its cache. So a hand-over has to agree for as long as the two engines do, or the one.
    """
    found = [k for k, v in told.items() if max(v["different tokens"]) < 3]  # no numbers: an engine that is broken
    parts = [part for name, part in told.items() if name != "one bit"]
    long, alone, itself = (
        sum(sum(part[of]) for part in parts)
        for of in ("equal tokens", "of both engines alone", "of one without its cache")
    )
    found += ["tokens"] * (long < 0.9 * min(alone, itself))
    return found + ["one bit"] * all(told["one bit"][of][0] for of in ("equal", "equal logits"))


def main(argv: list[str] | None = None) -> int:
    """Run the pairs; the exit status says whether tokens were as they should be."""
    parser = arguments(__doc__, "vllm_ranks_gpu")
    parser.add_argument("--only", nargs="*", default=list(PAIRS))
    parser.add_argument("--cpu", action="store_true", help="try the script with small engines on the CPU, without DCP")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    if not args.cpu:
        from gpu import gpu_facts

        figures["machine"] = gpu_facts()
    with tempfile.TemporaryDirectory() as folder:
        models = {"gqa": make_model(Path(folder) / "gqa", args.cpu, heads=2)}
        models["mla"] = make_mla(Path(folder) / "mla") if not args.cpu else models["gqa"]
        for name in args.only:
            running: list[Engine] = []
            try:
                running = engines(name, models, args.logs, folder, args.cpu)
                for engine in running:
                    figures["vllm"] = engine.wait(240)
                figures[name] = {"told": exact(*running, args.cpu)}
                figures[name]["wrong"] = wrong(figures[name]["told"])
            except Exception:
                figures[name] = {"wrong": [traceback.format_exc()[-2000:]]}
            finally:
                for engine in running:
                    engine.stop()
            print(name, json.dumps(figures[name]), flush=True)
            keep(args.out, figures)
    return int(any(figures[name]["wrong"] for name in args.only))


if __name__ == "__main__":
    sys.exit(main())
