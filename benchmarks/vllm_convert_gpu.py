"""Two vLLM of which one keeps its cache in BF16 and the other in FP8: `python benchmarks/vllm_convert_gpu.py [--out] [--only NAME ...]`.

On one GPU or two, where vLLM runs, with the setting `convert` in both. Of each pair, with blocks scattered and decode's caches
poisoned: is every byte that arrived the rounding by torch of what prefill holds; how many tokens equal those of the decode
engine alone, beside those of both engines alone, which round at other places; and does one flipped bit show? With --cpu, both
have one type and nothing is converted, to try the script.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from harness import arguments, keep
from vllm_engine import Engine, Got, make_model
from vllm_gpu import ASK, TRITON, log_of, ours, over, started, tokens_of

from tests.conversions import made_scale, narrow, wide

LENGTHS, MOST = [33, 97, 193, 353, 513, 1025, 2017, 4097], 48
DIM = 128
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
HEADS_OWN = {"kv_cache_dtype": "fp8_per_token_head"}


@attrs.frozen
class Pair:
    """Settings of two engines."""

    prefill: dict[str, Any]
    decode: dict[str, Any]


PAIRS = {
    "BF16 to FP8 per tensor": Pair({}, FP8),
    "FP8 per tensor to BF16": Pair(FP8, {}),
    "BF16 to FP8 per token and head": Pair({}, HEADS_OWN),
    "FP8 per token and head to BF16": Pair(HEADS_OWN, {}),
    "BF16 to FP8 per tensor, TP 2 to 1, blocks of 16 to 32": Pair(
        {"tensor_parallel_size": 2, "block_size": 16}, FP8 | {"block_size": 32}
    ),
}


def engines(name: str, model: Path, logs: Path, folder: str, gpus: int, small: bool) -> list[Engine]:
    """Prefill and decode of a pair, starting."""
    made = []
    for at, role in enumerate(("prefill", "decode")):
        given = attrs.astuple(PAIRS[name], recurse=False)[at]
        settings = {"model": str(model), "worker_extension_cls": "vllm_connectors.Worker"}
        if not small:
            settings |= {"dtype": "bfloat16", "max_model_len": 9216, "kv_cache_memory_bytes": 2 << 30}
            settings |= {"gpu_memory_utilization": 0.25, "disable_custom_all_reduce": True, **TRITON, **given}
        if at == 1:
            settings["enable_prefix_caching"] = True
        options = {"transports": ["shm" if small else "cuda"], "verify": True}
        settings["kv"] = ours(at, f"ipc://{folder}/{list(PAIRS).index(name)}-", options)
        settings["kv"]["kv_connector_extra_config"]["convert"] = not small
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(min(gpus, 2))))}
        if small:
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        made.append(started(role, settings, environment, log_of(logs, name, role), 32 if small else 0))
    return made


def rows(engine: Engine, blocks: list[int]) -> torch.Tensor:
    """Bytes of these blocks: [layer, head, token, byte], heads of all ranks."""
    ranks = [
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape) for shape, data in engine.call("rows", blocks)
    ]
    return torch.cat(ranks, 1)


def differing(sent: torch.Tensor, came: torch.Tensor) -> int:
    """Bytes that arrived and are not the rounding of what was sent, by torch."""
    wrong = 0
    for here, there in zip(sent.chunk(2, -1), came.chunk(2, -1), strict=True):  # K and V
        here, there = here.contiguous(), there.contiguous()
        wide_here, wide_there = here.shape[-1] == 2 * DIM, there.shape[-1] == 2 * DIM
        if wide_here == wide_there:
            wrong += int((here != there).sum())
        elif wide_here:
            own = there.shape[-1] > DIM
            plain = here.view(torch.bfloat16)
            scale = made_scale(plain) if own else torch.ones(1)
            wrong += int((narrow(plain, scale) != there[..., :DIM]).sum())
            if own:
                wrong += int((there[..., DIM:].contiguous().view(torch.float32) != scale).sum())
        else:
            scale = here[..., DIM:].contiguous().view(torch.float32) if here.shape[-1] > DIM else torch.ones(1)
            found = there.view(torch.int16).numpy().view(np.uint16)
            wrong += int((wide(here[..., :DIM].contiguous(), scale) != found).sum())
    return wrong


def arrived(prefill: Engine, decode: Engine, lengths: list[int]) -> dict[str, Any]:
    """Bytes of pages compared, and how many differ; blocks scattered, caches poisoned."""
    prompts = tokens_of(lengths, 11)
    prefill.order(3)
    decode.forget()
    decode.order(4)
    decode.call("poison")
    here = prefill.run(prompts, params=ASK | {"tell": True})[0]
    blocks = [one.params.pop("blocks") for one in here]
    sent = [rows(prefill, some) for some in blocks]
    there = decode.run(prompts, 1, [one.params | {"tell": True} for one in here])[0]
    count = wrong = 0
    for length, mine, one in zip(lengths, sent, there, strict=True):
        came = rows(decode, one.params["blocks"])
        upto = length - 1  # decode computes the last token
        wrong += differing(mine[:, :, :upto], came[:, :, :upto])
        count += came[:, :, :upto].numel()
    prefill.order(0)
    decode.order(0)
    return {"bytes": count, "differing": wrong}


def alike(some: list[Got], others: list[Got], most: int) -> list[int]:
    """Equal tokens from the first one on, by prompt."""
    both = [list(zip(a.tokens, b.tokens, strict=True)) for a, b in zip(some, others, strict=True)]
    return [next((i for i, (a, b) in enumerate(pairs) if a != b), most) for pairs in both]


def tokens(
    prefill: Engine, decode: Engine, lengths: list[int], most: int, seed: int, prefix: str = "r"
) -> dict[str, Any]:
    """Equal tokens of a hand-over and of the decode engine alone, beside those of both engines alone."""
    prompts = tokens_of(lengths, seed)
    decode.forget()
    decode.run(prompts, most)
    alone = decode.run(prompts, most)[0]
    other = prefill.run(prompts, most)[0]
    decode.forget()
    got = over(prefill, decode, prompts, most, prefix)[0]
    return {"equal tokens": alike(got, alone, most), "of both engines alone": alike(other, alone, most)}


def measured(prefill: Engine, decode: Engine, small: bool) -> dict[str, Any]:
    lengths, most = (LENGTHS[:3], 16) if small else (LENGTHS, MOST)
    figures: dict[str, Any] = {"pages": arrived(prefill, decode, lengths)}
    figures["tokens"] = tokens(prefill, decode, lengths, most, 1)
    figures["one bit"] = tokens(prefill, decode, [193], most, 6, "corrupt")
    return figures


def wrong(told: dict[str, Any]) -> list[str]:
    """The parts that are not as they should be; equal tokens prove little where two engines round differently."""
    same = told["one bit"]["equal tokens"][0] >= max(told["tokens"]["equal tokens"])
    return ["pages"] * (told["pages"]["differing"] > 0) + ["one bit"] * same


def main(argv: list[str] | None = None) -> int:
    """Run the pairs; the exit status says whether all is as it should be."""
    parser = arguments(__doc__, "vllm_convert_gpu")
    parser.add_argument("--only", nargs="*", default=list(PAIRS))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    if not args.cpu:
        from gpu import gpu_facts

        figures["machine"] = gpu_facts()
    gpus = figures.get("machine", {}).get("gpus", 1)
    names = [name for name in args.only if gpus > 1 or "TP 2" not in name]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", args.cpu)
        for name in names:
            running: list[Engine] = []
            try:
                running = engines(name, model, args.logs, folder, gpus, args.cpu)
                for engine in running:
                    figures["vllm"] = engine.wait(240)
                figures[name] = {"told": measured(*running, args.cpu)}
                figures[name]["wrong"] = wrong(figures[name]["told"])
            except Exception:
                figures[name] = {"wrong": [traceback.format_exc()[-2000:]]}
            finally:
                for engine in running:
                    engine.stop()
            print(name, json.dumps(figures[name]), flush=True)
            keep(args.out, figures)
    return int(any(figures[name]["wrong"] for name in names))


if __name__ == "__main__":
    sys.exit(main())
