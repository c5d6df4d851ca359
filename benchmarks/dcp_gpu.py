"""Decode context parallelism on GPUs: one rank of a group, local attention, exchange and merge, in microseconds a layer.

`python benchmarks/dcp_gpu.py [--out]` on a machine with two GPUs that are peers; FlashInfer must be installed. Qwen3-235B
at TP 8 (8 query heads a rank over one KV head of 128) and DeepSeek-V3 at TP 8 (16 heads over latents of 512 + 64), bfloat16,
pages in no order, tokens dealt one by one. "One rank" is the same rank without DCP: its own heads, all tokens. A step is
gathering queries (unless every rank projects all), attention over the rank's tokens, exchange and merge. So many layers are
captured in one graph that their pools do not stay in the cache; the figure is the graph's time by layer, and a sample is of
replays back to back, on the slower of the two GPUs: ranks of an engine go at the pace of the slowest. All ways of a batch and context take turns, as a GPU at its power limit is faster for a while after a
rest. --out keeps all samples; tables.py and plots.py make the tables and the picture.

`--device cpu` runs the same code on back end torch at a small size, to see that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dcp_case import SHAPES, Shape, bare, batch_for, shard_of
from harness import arguments, keep
from torch import Tensor

from kvproto_reference.attention.base import Exchange, Kernel
from kvproto_reference.attention.batch import Batch
from kvproto_reference.attention.exchange import AllGather, AllToAll
from kvproto_reference.attention.flashinfer_kernel import kernel_of
from kvproto_reference.attention.torch_kernel import TorchKernel
from kvproto_reference.cache import KVPool

ROUNDS, WARM = 9, 2
SAMPLE = 4e-3
"""About how many seconds a sample takes."""
BATCHES, CONTEXTS = (1, 8, 64), (8 << 10, 32 << 10, 128 << 10, 512 << 10)
CACHED = 200 << 20
"""Bytes of pools that are read before one is read again: several times the L2 cache."""
VERIFIED = [(8, 32 << 10, 4), (8, 128 << 10, 4), (1, 128 << 10, 8), (64, 8 << 10, 4)]
"""Batch, context and tokens of a sequence in steps that verify a draft."""
Samples = dict[str, list[float]]
Way = tuple[Callable[[], object], int]
"""The work of a graph, and the layers that it does it for."""


class Bench:
    """One rank of a group of two, and what it measures with the other."""

    def __init__(self, device: torch.device, memory: int) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.memory = torch.empty(memory // 2, dtype=torch.bfloat16, device=device)
        for piece in self.memory.split(1 << 28):
            piece.normal_()
        self.exchanges: dict[str, Exchange] = {}
        if self.cuda and self.size > 1:
            from kvproto_reference.attention.cuda_exchange import PackedAllToAll, PeerMapped

            self.exchanges = {
                "NCCL all-to-all": PackedAllToAll(self.size, self.group),
                "NCCL all-to-all, q on all": PackedAllToAll(self.size, self.group, True),
                "NCCL all-gather and reduce-scatter": AllGather(self.size, self.group),
                "peer memory": PeerMapped(self.size, self.group),
                "peer memory, q on all": PeerMapped(self.size, self.group, True),
            }
        elif self.size > 1:
            self.exchanges = {
                "all-to-all": AllToAll(self.size, self.group),
                "q on all": AllGather(self.size, self.group, True),
            }

    def pools(self, shape: Shape, pages: int, layers: int) -> KVPool:
        """Pools of random rows, the same memory each time."""
        model = shape.model(layers)
        each = (pages + 1) * shape.page * model.row_dim
        keys = [(layer, part) for layer in range(layers) for part in model.parts]
        tensors = {
            key: self.memory[i * each : (i + 1) * each].view(pages + 1, shape.page, 1, model.row_dim)
            for i, key in enumerate(keys)
        }
        return KVPool.wrap(model, tensors)

    def timed(self, ways: dict[str, Way]) -> Samples:
        """Microseconds a layer, in rounds in which each way has its turn; all ranks call this alike."""
        graphs = {name: self.captured(way) for name, (way, _) in ways.items()}
        times: dict[str, int] = {}
        for name, graph in graphs.items():
            self.together()
            times[name] = max(1, min(int(SAMPLE / self.span(graph, 3)), 200)) if self.cuda else 1
        agreed = torch.tensor(list(times.values()), device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        times = dict(zip(times, agreed.tolist(), strict=True))
        figures: Samples = {name: [] for name in ways}
        dice = np.random.default_rng(1)
        for turn in range(-WARM, ROUNDS) if self.cuda else range(2):
            for k in dice.permutation(len(ways)).tolist():
                name = list(ways)[k]
                self.together()
                took = self.span(graphs[name], times[name]) / ways[name][1] * 1e6
                if turn >= 0:
                    figures[name].append(took)
        samples = torch.tensor(list(figures.values()), device=self.device)
        dist.all_reduce(samples, op=dist.ReduceOp.MAX)
        return dict(zip(figures, samples.tolist(), strict=True))

    def span(self, graph: Callable[[], object], times: int) -> float:
        """Seconds of one of so many replays."""
        if not self.cuda:
            began = time.perf_counter()
            graph()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph()
        begin.record()
        for _ in range(times):
            graph()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times / 1000

    def captured(self, way: Callable[[], object]) -> Callable[[], object]:
        if not self.cuda:
            return way
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            way()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            way()
        return graph.replay

    def together(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier(device_ids=[self.device.index] if self.cuda else None)

    def kernel(self, pool: KVPool, heads: int) -> Kernel:
        name = "flashinfer" if self.cuda else "torch"
        made = kernel_of(name, pool, [0] * heads, [0] * heads, fixed=True)
        if self.cuda and isinstance(made, TorchKernel):
            raise SystemExit("FlashInfer does not run here")
        return made


def steps(bench: Bench, shape: Shape, batch: int, context: int) -> dict[str, Any]:
    """One rank against a group of all, at one batch and context."""
    figures: dict[str, Any] = {
        "shape": shape.name,
        "batch": batch,
        "context": context,
        "kv_bytes": {},
        "plan": {},
        "us": {},
    }
    ways: dict[str, Way] = {}
    for size in sorted({1, bench.size}):
        shard, heads = shard_of(shape, size, bench.rank % size), shape.heads * size
        step, pages = batch_for(shape, shard, [context] * batch, 1, batch + context)
        layers = max(1, min(24 if bench.cuda else 2, CACHED // (int(step.bounds.sum()) * shape.row)))
        pool = bench.pools(shape, pages, layers)
        kernel = bench.kernel(pool, heads)
        figures["kv_bytes"][size] = int(step.bounds.sum()) * shape.row
        figures["plan"][size] = planned(bench, kernel, step)
        own, every = (
            torch.randn(layers, batch, n, pool.config.row_dim, dtype=torch.bfloat16, device=bench.device)
            for n in (shape.heads, heads)
        )
        ways[f"attention, N={size}"] = repeat(layers, lambda q, i, kernel=kernel: kernel.pool(i, q), every)
        if bench.cuda:
            by_hand = bare(kernel, pool, step, heads)
            ways[f"attention, N={size}, FlashInfer bare"] = repeat(layers, by_hand, every)
        for name, exchange in bench.exchanges.items() if size > 1 else ():
            q = every if getattr(exchange, "replicated", False) else own
            ways[f"step, {name}"] = repeat(layers, whole(kernel, exchange), q)
    figures["us"] = bench.timed(ways)
    for exchange in bench.exchanges.values():
        exchange.check()
    return figures


def planned(bench: Bench, kernel: Kernel, step: Batch) -> list[float]:
    """Microseconds of the host, until the arrays are on the device."""
    samples = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        kernel.plan(step)
        torch.cuda.synchronize() if bench.cuda else None
        samples.append((time.perf_counter() - began) * 1e6)
    return samples


def whole(kernel: Kernel, exchange: Exchange) -> Callable[[Tensor, int], object]:
    return lambda q, layer: exchange.merge(kernel.pool(layer, exchange.queries(q)))


def repeat(layers: int, act: Callable[[Tensor, int], object], q: Tensor) -> Way:
    """All layers of a step; q [layers, ...]."""
    return lambda: [act(q[layer], layer) for layer in range(layers)], layers


def verify(bench: Bench, shape: Shape, batch: int, context: int, count: int) -> dict[str, Any]:
    """The pass of several tokens a sequence over what was committed before, for the heads of the whole group."""
    shard, heads = shard_of(shape, bench.size, bench.rank), shape.heads * bench.size
    step, pages = batch_for(shape, shard, [context + count] * batch, count, 7)
    pool = bench.pools(shape, pages, 1)
    kernel = bench.kernel(pool, heads)
    kernel.plan(step)
    q = torch.randn(batch * count, heads, pool.config.row_dim, dtype=torch.bfloat16, device=bench.device)
    rows, config = int(step.bounds.sum()), pool.config
    us = bench.timed({"verify": (lambda: kernel.pool(0, q), 1)})["verify"]
    return {
        "shape": shape.name, "batch": batch, "context": context, "tokens": count, "bytes": rows * shape.row, "us": us,
        "flops": 2 * rows * count * heads * (config.row_dim + config.value_dim),
    }  # fmt: skip


def exchanges(bench: Bench, shape: Shape, batch: int) -> dict[str, Any]:
    """Exchange and merge without attention, and gathering queries without either."""
    from kvproto_reference.attention.lse import Base2, Found, Partial

    config, heads, layers = shape.model(1), shape.heads * bench.size, 16
    out = torch.randn(batch, heads, config.value_dim, dtype=torch.bfloat16, device=bench.device)
    log2 = torch.randn(batch, heads, device=bench.device)
    read = torch.ones(batch, dtype=torch.int32, device=bench.device)
    q = torch.randn(layers, batch, shape.heads, config.row_dim, dtype=torch.bfloat16, device=bench.device)
    figures: Found = Base2(out, log2, read) if bench.cuda else Partial(out, log2)
    ways: dict[str, Way] = {}
    for name, exchange in bench.exchanges.items():
        acts = {"merge": lambda q, _, x=exchange: x.merge(figures)}
        if not getattr(exchange, "replicated", False):
            acts["queries"] = lambda q, _, x=exchange: x.queries(q)
            acts["both"] = lambda q, _, x=exchange: (x.queries(q), x.merge(figures))
        ways |= {f"{what}, {name}": repeat(layers, act, q) for what, act in acts.items()}
    return {"shape": shape.name, "batch": batch, "us": bench.timed(ways)}


def ceilings(bench: Bench) -> dict[str, float]:
    """Bytes a second that are read, and bf16 operations a second, on random data."""
    if not bench.cuda:
        return {}
    big = bench.memory[: 2 << 30]
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    us = {
        name: float(np.median(s))
        for name, s in bench.timed({"read": (lambda: big.sum(), 1), "multiply": (lambda: a @ b, 1)}).items()
    }
    return {"read": big.nbytes / us["read"] * 1e6, "multiply": 2 * 8192**3 / us["multiply"] * 1e6}


def work(rank: int, size: int, port: int, args: argparse.Namespace, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    cuda = args.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=size, device_id=device if cuda else None)
    batches, contexts = (args.batches, args.contexts) if cuda else ([1, 3], [40, 9])
    most = max(batches) * max(contexts)
    with torch.inference_mode():
        bench = Bench(device, int(most * 1152 * 1.02) + (64 << 20) if cuda else 64 << 20)
        figures: dict[str, Any] = {"ceilings": ceilings(bench), "steps": [], "verify": [], "exchanges": []}
        if size > 1:
            for shape, batch in itertools.product(SHAPES, batches):
                figures["exchanges"].append(exchanges(bench, shape, batch))
                told(rank, figures["exchanges"][-1])
        for shape, batch, context in itertools.product(SHAPES, batches, contexts):
            figures["steps"].append(steps(bench, shape, batch, context))
            told(rank, figures["steps"][-1])
        for shape, (batch, context, count) in itertools.product(SHAPES, VERIFIED if cuda else [(2, 30, 3)]):
            if batch * context <= most:
                figures["verify"].append(verify(bench, shape, batch, context, count))
                told(rank, figures["verify"][-1])
    if rank == 0:
        out.write_text(json.dumps({"size": size} | figures))
    dist.barrier()
    os._exit(0)  # graphs hold NCCL's communicator, whose teardown waits for them


def told(rank: int, of: dict[str, Any]) -> None:
    if rank == 0:
        us = of["us"] if isinstance(of["us"], dict) else {"": of["us"]}
        head = " ".join(str(of[key]) for key in ("shape", "batch", "context", "tokens") if key in of)
        print(head, "; ".join(f"{name} {np.median(s):.1f}" for name, s in us.items()), flush=True)


def main() -> int:
    parser = arguments(__doc__, "dcp_gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--gpus", type=int, default=2)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank0.json"
        mp.start_processes(work, (args.gpus, port, args, out), nprocs=args.gpus, start_method="forkserver")
        figures = json.loads(out.read_text())
    if args.device == "cuda":
        from gpu import gpu_facts  # needs CUDA's libraries

        figures = gpu_facts() | figures
    keep(args.out, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
