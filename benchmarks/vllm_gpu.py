"""Two vLLM engines hand prompts over on GPUs: are the tokens those of the decode engine alone?

`python benchmarks/vllm_gpu.py [--out] [--only NAME ...] [--cpu]`, where vLLM runs: one GPU for both engines, or one each.
For each pair of engines a model of random weights is served twice. `exact`: float32, HND to NHD; the tokens are those of the
decode engine alone with all but one token in its prefix cache, also with prefix hits and scattered blocks, and not where a bit
of a page is flipped. `unlike`: other block sizes and chunks too, which alone make two engines differ at near ties. Quantized
caches, as `exact`. How long hand-overs take is `vllm_handover.py`'s.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from harness import arguments, keep
from vllm_engine import Engine, Got, make_model

HERE = Path(__file__).parent
ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""The parameters that a proxy sends to a prefill engine, for either connector."""
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "", "VLLM_HOST_IP": "127.0.0.1", "NO_COLOR": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_model_len": 33_024, "max_num_seqs": 64, "enable_prefix_caching": False, "seed": 0,
    "kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.35,
}  # fmt: skip
TRITON = {"attention_backend": "TRITON_ATTN", "enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}
FLASH = {"attention_backend": "FLASH_ATTN", "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
EXACT = {"dtype": "float32", **TRITON}
Pair = tuple[dict[str, Any], dict[str, Any], dict[str, str]]


PAIRS: dict[str, Pair] = {
    "exact": (EXACT, EXACT | {"enable_prefix_caching": True}, {"VLLM_KV_CACHE_LAYOUT": "HND"}),
    "unlike": (
        EXACT | {"block_size": 32, "max_num_batched_tokens": 1024},
        EXACT | {"block_size": 16, "enable_prefix_caching": True},
        {"VLLM_KV_CACHE_LAYOUT": "HND"},
    ),
} | {
    dtype: (EXACT | {"kv_cache_dtype": dtype}, EXACT | {"kv_cache_dtype": dtype, "enable_prefix_caching": True}, {})
    for dtype in ("fp8_e4m3", "int8_per_token_head")
}
"""Settings of the prefill engine, of the decode engine, and of the prefill engine's environment."""
SMALL: dict[str, Any] = {
    "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32", "enforce_eager": True,
}  # fmt: skip
"""On the CPU, to try this script."""


TIE = 0.2
"""Logits of two tokens that are closer than this are a tie between engines that compute in another order."""


def tokens_of(lengths: list[int], seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 500) for _ in range(length)] for length in lengths]


def over(
    prefill: Engine, decode: Engine, prompts: list[list[int]], most: int, prefix: str = "r"
) -> tuple[list[Got], float]:
    """Prompts through both, prefill first; seconds of the decode engine."""
    params = [got.params for got in prefill.run(prompts, params=ASK)[0]]
    got, seconds = decode.run(prompts, most, params, prefix=prefix)
    if bad := [one.reason for one in got if one.reason != "length"]:
        raise RuntimeError(f"{len(bad)} requests ended by {bad[0]!r}: see the logs")
    return got, seconds


def exact(prefill: Engine, decode: Engine, small: bool) -> dict[str, Any]:
    """Whether tokens are those of the decode engine alone, which has all but the last token of each prompt in its prefix
    cache: so it computes what it does after a hand-over. Its first answers, and the other engine's, stand beside.
    """
    lengths, most = ([33, 65, 97, 193], 16) if small else ([33, 97, 193, 353, 513, 1025, 2017, 8193], 48)

    def same(prompts: list[list[int]], prefix: str = "r", known: int = 0) -> dict[str, list[Any]]:
        decode.forget()
        fresh = decode.run(prompts, most)[0]
        alone = decode.run(prompts, most)[0]
        other = prefill.run(prompts, most)[0]
        decode.forget()
        if known:
            decode.run([tokens[: len(tokens) // known] for tokens in prompts])
        got = over(prefill, decode, prompts, most, prefix)[0]
        first = alike(got, alone)
        figures: dict[str, list[Any]] = {"equal": [n == most for n in first], "equal tokens": first}
        figures |= {"of both engines alone": alike(other, fresh), "of one without its cache": alike(fresh, alone)}
        figures["equal logits"] = [a.gaps == b.gaps for a, b in zip(got, alone, strict=True)]
        figures["gap"] = [one.gaps[n] if n < most else None for n, one in zip(first, alone, strict=True)]
        return figures | {"different tokens": [len({*one.tokens}) for one in alone]}

    def alike(some: list[Got], others: list[Got]) -> list[int]:
        both = [list(zip(a.tokens, b.tokens, strict=True)) for a, b in zip(some, others, strict=True)]
        return [next((i for i, (a, b) in enumerate(pairs) if a != b), most) for pairs in both]

    def order(*seeds: int) -> None:
        for engine, seed in zip((prefill, decode), seeds, strict=True):
            engine.order(seed)

    figures = {"tokens": same(tokens_of(lengths, 1)), "prefix": same(tokens_of(lengths, 2), known=2)}
    order(3, 4)
    figures["scattered"] = same(tokens_of(lengths, 5))
    figures["one bit"] = same(tokens_of(lengths[2:3], 6), "corrupt")
    order(0, 0)
    figures["afterwards"] = same(tokens_of(lengths, 7))
    return figures


def log_of(logs: Path, name: str, role: str) -> Path:
    """The file to which an engine of a pair writes."""
    return logs / f"{name.replace(',', '').replace(' ', '-')}.{role}.log"


def started(role: str, settings: dict[str, Any], environment: dict[str, str], log: Path, block: int = 0) -> Engine:
    """An engine, starting; with blocks of so many tokens, if any, it is a small one on the CPU, to try a script."""
    settings, environment = SETTINGS | settings, ENVIRONMENT | environment
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    if block:
        settings |= SMALL | {"block_size": block, "max_num_batched_tokens": 1024}
        settings.pop("gpu_memory_utilization", None)
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return Engine(role, settings, environment, log)


def ours(at: int, place: str, options: dict[str, Any]) -> dict[str, Any]:
    """Settings of our connector, of the first engine of a pair that meets at this place, or of the second."""
    role, kind = (("prefill", "kv_producer"), ("decode", "kv_consumer"))[at]
    extra: dict[str, Any] = {"name": role, "options": options}
    extra |= {"listen": f"{place}{{rank}}"} if at == 0 else {"sources": {"prefill": f"{place}0"}}
    return {
        "kv_connector": "Ours", "kv_connector_module_path": "vllm_connectors", "kv_role": kind,
        "kv_connector_extra_config": extra,
    }  # fmt: skip


def pair(
    name: str, model: Path, logs: Path, folder: str, devices: tuple[int, int], small: bool
) -> tuple[Engine, Engine]:
    """A prefill and a decode engine, starting."""
    given = PAIRS[name]
    engines = []
    for at, role in enumerate(("prefill", "decode")):
        settings = {"model": str(model)} | ({} if small else given[at])
        environment = dict(given[2] if at == 0 else {})
        if small:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            environment.pop("VLLM_KV_CACHE_LAYOUT", None)
        else:
            seen = dict.fromkeys(devices[at:] + devices[:at])  # the other's GPU too, which it writes
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, seen))
        options = {"transports": ["shm" if small else "cuda"]}
        settings["kv"] = ours(at, f"ipc://{folder}/{list(PAIRS).index(name)}-", options)
        block = given[at].get("block_size", 16) * 2 if small else 0
        engines.append(started(role, settings, environment, log_of(logs, name, role), block))
    return engines


def measure(name: str, figures: dict[str, Any], engines: list[Engine], small: bool) -> bool:
    """Measure a pair, into `figures`; return whether tokens are not as they should be."""
    try:
        for engine in engines:
            figures["vllm"] = engine.wait(600)
        told = figures[name] = exact(*engines, small)
        print(name, json.dumps(told), flush=True)
        bad = [gap for k, v in told.items() for gap in v["gap"] if k != "one bit" and gap is not None and gap > TIE]
        return bool(bad) or all(told["one bit"][same][0] for same in ("equal", "equal logits"))
    finally:
        for engine in engines:
            engine.stop()


def main(argv: list[str] | None = None) -> int:
    """Run the pairs; the exit status says whether tokens were as they should be."""
    parser = arguments(__doc__, "vllm_gpu")
    parser.add_argument("--only", nargs="*", default=list(PAIRS))
    parser.add_argument("--cpu", action="store_true", help="try the script with small engines on the CPU")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    machine: dict[str, Any] = {}
    if not args.cpu:
        from gpu import gpu_facts

        machine = gpu_facts()
    gpus = machine.get("gpus", 0)
    devices = (0, 1) if gpus > 1 else (0, 0)
    some = args.out and args.only != list(PAIRS) and args.out.exists()
    figures: dict[str, Any] = json.loads(args.out.read_text()) if some else {}
    figures["engines on"] = "one GPU" if gpus < 2 else "two GPUs"
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", args.cpu)
        for name in args.only:
            try:
                engines = pair(name, model, args.logs, folder, devices, args.cpu)
                wrong += measure(name, figures, engines, args.cpu)
                figures[name]["machine"] = machine
            except Exception:
                wrong += 1
                traceback.print_exc()
            keep(args.out, figures)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
