"""Decode steps of the reference engine on one GPU, beside reading weights and cache once.

`python benchmarks/decode_engine.py [--out]`: a decoder of Llama-3-8B's shapes with random bf16 weights, FlashInfer, a step
captured in a CUDA graph; batches at one context, their rows random. A step is what the scheduler calls: plan, replay, and
the most likely tokens on the host. The floor is the bytes of weights and rows over the bandwidth that a sum of 4 GB reads
at in the same run. --out keeps all samples.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from dcp_case import Shape, shard_of
from gpu import gpu_facts
from harness import arguments, keep

from kvproto_reference.cache import KVPool
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.captured import CapturedRunner
from kvproto_reference.engine.runner import Chunk, TorchRunner
from kvproto_reference.models import Decoder, ModelConfig

LLAMA = ModelConfig(
    kind="gqa",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128256,
    tied=False,
    qk_norm=False,
    rope_theta=500000.0,
    dtype="bfloat16",
)
PAGE, STEPS = 16, 60


def seconds(runner: TorchRunner, batch: int, context: int) -> list[float]:
    """Of one step after the other; each adds a token."""
    shard = runner.shard
    tables = np.split(np.random.default_rng(0).permutation(batch * shard.pages(context + 2 * STEPS)), batch)
    figures, tokens = [], [1] * batch
    for step in range(STEPS):
        began = time.perf_counter()
        chunks = [Chunk([t], context + step, table) for t, table in zip(tokens, tables, strict=True)]
        tokens = runner.run(chunks).best().tolist()
        figures.append(time.perf_counter() - began)
    return figures[10:]


def bandwidth() -> float:
    big = torch.randn(2 << 30, device="cuda", dtype=torch.bfloat16)
    big.sum()
    samples = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        big.sum()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1000)
    return big.nbytes / median(samples)


@torch.inference_mode()
def main() -> int:
    parser = arguments(__doc__, "decode_engine")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args()
    rate = bandwidth()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Decoder(LLAMA)
    torch.set_default_dtype(torch.float32)
    model.rates = torch.tensor(LLAMA.rates, device="cuda")
    model.join()
    weights = sum(p.nbytes for p in model.parameters()) - model.embed.nbytes
    group = Shape("Llama-3-8B", {}, 32, PAGE)
    figures: list[dict[str, Any]] = []
    for batch in args.batches:
        pages = batch * -(-(args.context + 2 * STEPS) // PAGE)
        pool = KVPool.allocate(LLAMA, pages, PAGE, device="cuda")
        for tensor in pool.tensors.values():
            tensor.normal_()
        rows = batch * (args.context + STEPS // 2) * LLAMA.layers * 2 * 8 * 128 * 2
        floor = (weights + rows) / rate
        for name, captured in (("captured", True), ("launched", False)):
            runner = torch_runner(model, pool, shard_of(group, 1, 0), back_end="flashinfer", captured=captured)
            assert isinstance(runner, CapturedRunner) == captured
            took = seconds(runner, batch, args.context)
            figures.append({"batch": batch, "context": args.context, "way": name, "seconds": took, "floor": floor})
            step = median(took)
            print(
                f"batch {batch} {name}: {step * 1e3:.2f} ms, {batch / step:.0f} tokens/s, {floor / step:.2f} of the floor",
                flush=True,
            )
            del runner
        del pool
    keep(args.out, gpu_facts() | {"read": rate, "weights": weights, "steps": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
