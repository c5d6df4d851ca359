"""Gains of an engine by DCP: requests that fit and tokens a second at equal memory, beside TP alone and DP attention.

`python benchmarks/dcp_serving_gpu.py [--out]` on a machine with two or four GPUs that are peers; FlashInfer must be installed.
Decoders with random bf16 weights, each GPU with LAYERS times BUDGET bytes of KV: attention as in Kimi K2 (MLA, 64 heads over
512 + 64) and as in GLM-4-9B (GQA, 32 heads over 2 KV heads of 128), dense feed-forwards, pages in no order. A step is the
engine's own: one token of every request, from the scheduler's call to the tokens on the host, captured in a CUDA graph
with its collectives; the graph's own time is kept beside it. All ways take turns in each round, and a sample is a mean of
STEPS steps on the slowest rank.

Ways: TP; TP with DCP groups, merging through NCCL or peer memory, in the latter with queries projected on all ranks too; DP attention, where each GPU has all heads of its own
requests, and all GPUs share the feed-forwards: tokens are gathered before, and sums scattered after them. On four GPUs two
engines of two run at once. Loads: `full`, as many requests as fit; `same`, as many as fit with TP alone, whatever else would;
`one`, a single request (with DP attention one on each GPU).

`--device cpu` runs the same code on back end torch at a small size, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dcp_case import Shape, shard_of
from harness import arguments, keep
from torch import Tensor, nn

from kvproto_reference.cache import KVPool, Shard
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.captured import CapturedRunner
from kvproto_reference.engine.runner import Chunk, TorchRunner
from kvproto_reference.gather import gather, scatter_sum
from kvproto_reference.models import Decoder, ModelConfig, TensorParallel
from kvproto_reference.models.common import SwiGLU
from kvproto_reference.models.parallel import kv_head_range

LAYERS, BUDGET = 24, 512 << 20
"""Layers of a model, and bytes of KV that a GPU has for each: 61 layers would have 31 GB."""
ROUNDS, STEPS = 5, 3
CONTEXTS = (4 << 10, 16 << 10, 64 << 10, 128 << 10, 512 << 10)
VOCAB = 4096
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "MLA": (
        {"kind": "mla", "hidden": 7168, "heads": 64, "latent": 512, "rope_dim": 64, "nope_dim": 128, "v_dim": 128,
         "q_rank": 1536, "ffn": 8192}, 64,
    ),
    "GQA": ({"kind": "gqa", "hidden": 4096, "heads": 32, "kv_heads": 2, "head_dim": 128, "ffn": 8192}, 16),
}  # fmt: skip
"""Sizes of a model, and rows of a page."""
SMALL: dict[str, dict[str, Any]] = {
    "MLA": {"hidden": 32, "heads": 8, "latent": 16, "rope_dim": 8, "nope_dim": 8, "v_dim": 8, "q_rank": 16, "ffn": 32},
    "GQA": {"hidden": 32, "heads": 8, "head_dim": 8, "ffn": 32},
}
"""Sizes that differ on the CPU."""


WAYS = ("a2a_packed", False), ("peer", False), ("peer", True)
"""Exchanges on GPUs, and whether queries are on all."""


@attrs.frozen
class Way:
    """The division of work in an engine of so many GPUs."""

    gpus: int
    dcp: int = 1
    exchange: str = ""
    replicated: bool = False
    """Whether each rank projects the queries of its DCP group, so that none have to be gathered."""
    dp: bool = False

    @property
    def name(self) -> str:
        if self.dp:
            return f"DP attention {self.gpus}"
        over = {"": "", "a2a_packed": ", NCCL", "a2a": ", NCCL", "peer": ", peer memory"}[self.exchange]
        every = ", q on all" if self.replicated else ""
        return f"TP {self.gpus}" + (f" DCP {self.dcp}{over}{every}" if self.dcp > 1 else "")


class SharedFFN(nn.Module):
    """Feed-forward that the GPUs of DP attention share: each has a part of its width, for the tokens of all."""

    def __init__(self, config: ModelConfig, place: TensorParallel) -> None:
        super().__init__()
        self.part, self.place = SwiGLU(config.hidden, config.ffn, place), place

    def forward(self, x: Tensor) -> Tensor:
        """x [own tokens, hidden] -> [own tokens, hidden], summed over the GPUs."""
        everyone = gather(x, self.place.size, self.place.group)
        return scatter_sum(self.part.forward(everyone.flatten(0, 1)).view_as(everyone), self.place.group)


class Engine:
    """One rank of one way, over pools in memory that all ways share."""

    def __init__(self, way: Way, config: ModelConfig, page: int, memory: Tensor, groups: Groups) -> None:
        self.way, self.page, cuda = way, page, memory.is_cuda
        rank, group = groups.rank % way.gpus, groups.of(way.gpus)
        place = TensorParallel() if way.dp else TensorParallel(rank, way.gpus, group, way.dcp, way.replicated)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(memory.device):
            self.model = Decoder(config, place)
            for block in self.model.blocks.values() if way.dp else ():
                block.ffn = SharedFFN(config, TensorParallel(rank, way.gpus, group))  # type: ignore[assignment]
        torch.set_default_dtype(torch.float32)
        self.model.rates = torch.tensor(config.rates, device=memory.device)
        self.model.requires_grad_(False).join()
        lo, hi = kv_head_range(config, place)
        tensors, each = config.layers * len(config.parts), page * (hi - lo) * config.row_dim
        self.pages = len(memory) // tensors // each - 1
        whole = memory[: tensors * (self.pages + 1) * each].view(tensors, self.pages + 1, page, hi - lo, config.row_dim)
        keys = [(layer, part) for layer in range(config.layers) for part in config.parts]
        pool = KVPool.wrap(config, dict(zip(keys, whole, strict=True)), place)
        self.shard: Shard = shard_of(Shape("", {}, 1, page), way.dcp, place.cp_rank)
        among = groups.of(way.dcp) if way.dcp > 1 else None
        back_end = "flashinfer" if cuda else "torch"
        made = torch_runner(self.model, pool, self.shard, among, way.exchange, back_end=back_end, captured=cuda)
        assert isinstance(made, CapturedRunner if cuda else TorchRunner)
        self.runner = made
        self.weights = sum(weight.nbytes for weight in self.model.parameters())

    def fits(self, context: int) -> int:
        """Requests of so many tokens that an engine has pages for."""
        return self.pages // self.shard.pages(context) * (self.way.gpus if self.way.dp else 1)

    def begin(self, requests: int, context: int) -> None:
        """Take the place of the last load by so many requests, which are as long as the context at the last step."""
        here = -(-requests // self.way.gpus) if self.way.dp else requests
        held = self.shard.pages(context)
        order = np.random.default_rng(here + context).permutation(here * held).astype(np.int32)
        self._tables, self._at, self._tokens = (
            np.split(order, here),
            context - (ROUNDS + 1) * (STEPS + 1) - 1,
            [1] * here,
        )

    def step(self) -> None:
        """One token of each request."""
        chunks = [Chunk([t], self._at, table) for t, table in zip(self._tokens, self._tables, strict=True)]
        self._tokens = self.runner.run(chunks).best().tolist()
        self._at += 1

    def replay(self) -> Callable[[], object]:
        """The graph of the last step."""
        if not isinstance(self.runner, CapturedRunner):
            return lambda: None
        return next(step.graph for (n, _), step in self.runner._steps.items() if n == len(self._tokens)).replay

    def finite(self) -> bool:
        """Whether all logits of another step are numbers."""
        chunks = [Chunk([t], self._at, table) for t, table in zip(self._tokens, self._tables, strict=True)]
        return bool(self.runner.run(chunks).values.isfinite().all())


class Groups:
    """The process groups of this machine's ranks: of each size, the one that this rank is in."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._made: dict[int, dist.ProcessGroup] = {}
        size = 2
        while size <= self.size:
            made = [dist.new_group(list(range(n, n + size))) for n in range(0, self.size, size)]
            self._made[size], size = made[self.rank // size], 2 * size

    def of(self, size: int) -> dist.ProcessGroup:
        return self._made[size]


def ways_of(shape: str, gpus: int, cuda: bool) -> Iterator[Way]:
    """All that a model allows: FlashInfer wants the heads of a rank to read all KV heads of the pool."""
    yield Way(gpus)
    dcp = 2
    while dcp <= gpus // (1 if shape == "MLA" else SHAPES[shape][0]["kv_heads"]):
        for exchange, replicated in WAYS if cuda else (("a2a", False), ("a2a", True)):
            yield Way(gpus, dcp, exchange, replicated)
        dcp *= 2
    yield Way(gpus, dp=True)


def together(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def sample(engine: Engine, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and of its graph alone; the first of each is not counted."""
    engine.step()
    together(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    whole = (time.perf_counter() - began) / STEPS
    if device.type != "cuda":
        return whole, whole
    replay, (begin, end) = engine.replay(), (torch.cuda.Event(enable_timing=True) for _ in range(2))
    together(device)
    replay()
    begin.record()
    for _ in range(STEPS):
        replay()
    end.record()
    end.synchronize()
    return whole, begin.elapsed_time(end) / STEPS / 1000


def measured(loads: Mapping[str, tuple[Engine, int]], context: int, device: torch.device) -> dict[str, Any]:
    """Samples of all ways, each with its number of requests, on the slowest rank."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loads}
    for engine, requests in loads.values():
        engine.begin(requests, context)
    dice = np.random.default_rng(context)
    for turn in range(-1, ROUNDS):
        for k in dice.permutation(len(loads)).tolist():
            name = list(loads)[k]
            took = sample(loads[name][0], device)
            if turn >= 0:
                found[name].append(took)
    samples = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    if not all(engine.finite() for engine, _ in loads.values()):
        raise SystemExit("logits are no numbers")
    return {
        name: {"requests": loads[name][1], "seconds": steps, "graph": graph}
        for name, (steps, graph) in zip(found, samples.transpose(1, 2).tolist(), strict=True)
    }


def point(engines: Sequence[Engine], context: int, device: torch.device) -> dict[str, Any]:
    """All loads of one engine size at one context."""
    fits = {engine.way.name: engine.fits(context) for engine in engines}
    alone = fits[engines[0].way.name]
    have = [engine for engine in engines if fits[engine.way.name]]
    load = {
        "full": {e.way.name: (e, fits[e.way.name]) for e in have},
        "same": {e.way.name: (e, min(alone, fits[e.way.name])) for e in have if alone},
        "one": {e.way.name: (e, 1) for e in have},
    }
    found = {"fits": fits, **{name: measured(of, context, device) for name, of in load.items() if of}}
    for engine in engines:
        engine.runner.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def sizes_of(
    shape: str, gpus: int, layers: int, contexts: Sequence[int], memory: Tensor, groups: Groups
) -> Iterator[dict[str, Any]]:
    """Every context of engines of one size."""
    sizes, page = SHAPES[shape]
    given = sizes | ({} if memory.is_cuda else SMALL[shape])
    config = ModelConfig(layers=layers, vocab=VOCAB, tied=False, dtype="bfloat16", **given)
    engines = [Engine(way, config, page, memory, groups) for way in ways_of(shape, gpus, memory.is_cuda)]
    gc.freeze()  # as the engines do: to look through all of it takes 0.1 s
    weights = {engine.way.name: engine.weights for engine in engines}
    for context in contexts:
        at = {"shape": shape, "gpus": gpus, "context": context, "weights": weights}
        yield at | point(engines, context, memory.device)


def work(rank: int, port: int, args: argparse.Namespace) -> None:
    size = args.gpus
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    cuda = args.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=size, device_id=device if cuda else None)
    layers, contexts = (args.layers, args.contexts) if cuda else (2, [256])
    head = facts(cuda) | {"layers": layers, "kv_bytes": layers * BUDGET, "shapes": SHAPES, "steps": STEPS}
    points: list[dict[str, Any]] = []
    with torch.no_grad():
        groups = Groups()
        memory = torch.empty((layers * BUDGET if cuda else 1 << 20) // 2, dtype=torch.bfloat16, device=device)
        for piece in memory.split(1 << 28):
            piece.normal_()
        for shape, gpus in itertools.product(SHAPES, (n for n in (2, 4) if n <= size)):
            for found in sizes_of(shape, gpus, layers, contexts, memory, groups):
                points.append(found)
                if rank == 0:
                    told(found)
                    keep(args.out, head | {"points": points})
            gc.unfreeze()
            gc.collect()
    together(device)
    os._exit(0)  # kernels of FlashInfer and NCCL need no tidy end


def facts(cuda: bool) -> dict[str, Any]:
    """The head of a file of results; there is none of the CPU's."""
    if not cuda:
        return {}
    from gpu import gpu_facts  # needs CUDA's libraries

    return gpu_facts()


def told(of: dict[str, Any]) -> None:
    for load in (name for name in ("full", "same", "one") if name in of):
        steps = (
            f"{name}: {x['requests']} in {1e3 * np.median(x['seconds']):.2f} ms"
            f" (graph {1e3 * np.median(x['graph']):.2f}), {x['requests'] / np.median(x['seconds']):,.0f}/s"
            for name, x in of[load].items()
        )
        print(of["shape"], of["gpus"], of["context"], load, *steps, sep="; ", flush=True)


def main() -> int:
    parser = arguments(__doc__, "dcp_serving_gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--gpus", type=int, choices=(2, 4), default=4)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(work, (port, args), nprocs=args.gpus, start_method="forkserver")
    return 0


if __name__ == "__main__":
    sys.exit(main())
