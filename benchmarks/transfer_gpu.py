"""Scattered bytes between two GPUs: the copy kernel, the copy engine's ceiling, and what users would pick instead.

`python benchmarks/transfer_gpu.py [--out] [--pool GB] [--rounds N]` on a machine with two GPUs that are peers. About 1 GB
is moved from random places of a pool to random places of another, in runs of one length, all contenders in turn in each
round; medians, by device events from the upload of item ids to the last byte: the GPU is held back until the host has said
everything (what the host takes is in transfer_shapes.py). Every byte is compared before anything is timed. --out keeps all samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import nixl_packed
import numpy as np
import peers
import torch
from cuda.bindings import driver
from gpu import GB, PeerCopy, compare, gpu_facts, places, poison, random_bytes, scattered_shape, warm_in_turn
from harness import arguments, keep, rounded

from kvproto.copying.program import CopyProgram
from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import current, enable_peer
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory

RUNS = (256, 512, 1152, 2048, 4096, 8192, 32768, 131072, 1 << 20, 1 << 24, 1 << 26)
HELD = 1_000_000
"""Cycles, about half a millisecond."""
Timed = Callable[[], float]
"""Runs once; GB/s by device events."""


def hold(device: int, stream: int) -> None:
    """Delay what is enqueued from now on."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=f"cuda:{device}")):
        torch.cuda._sleep(HELD)


class Bench:
    def __init__(self, pool: int, blocks: int | None) -> None:
        enable_peer(0, 1)
        enable_peer(1, 0)
        self.memory = [DeviceMemory(pool, d) for d in (0, 1)]
        self.source, self.sink = random_bytes(self.memory[0], 1), poison(self.memory[1])
        self.copiers = {"kernel, pull": Copier(1, blocks, timed=True), "kernel, push": Copier(0, blocks, timed=True)}
        self.peer, self.pool = PeerCopy(*self.memory), pool

    def close(self) -> None:
        """Free the memory for others."""
        del self.source, self.sink
        for memory in self.memory:
            memory.close()
        torch.cuda.empty_cache()

    def peer_copy(self) -> float:
        hold(1, int(self.peer.stream.handle))
        return GB / self.peer.seconds() / 1e9

    def kernel(self, name: str, program: CopyProgram) -> Timed:
        copier = self.copiers[name]
        prepared = copier.prepare(program, {0: self.memory[0].address}, {0: self.memory[1].address})

        def run() -> float:
            hold(copier.device, int(copier.stream.handle))
            current(copier.device)
            held = copier.stream.record()
            for stream in copier.streams:  # what is expanded ahead is of the copy, too
                stream.wait(held)
            copy = copier.submit([CopyJob(prepared, program.maps)])
            copy.wait()
            return copy.bytes / copy.seconds / 1e9

        return run

    def batch(self, program: CopyProgram, run: int) -> Timed:
        """cuMemcpyBatchAsync: a descriptor a run; at most 16,384 of them, so that a round stays short."""
        a, b = (
            np.concatenate([p[:: max(run // 4096, 1)] for p in places(program, min(run, 4096), s)])[:16384]
            for s in ("source", "sink")
        )
        width = min(run, 4096)
        sources = [driver.CUdeviceptr(self.memory[0].address + int(x) * width) for x in a]
        sinks = [driver.CUdeviceptr(self.memory[1].address + int(x) * width) for x in b]
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        count = len(sinks)

        def go() -> Any:
            stream = self.peer.stream.handle
            return driver.cuMemcpyBatchAsync(sinks, sources, [run] * count, count, [attributes], [0], 1, stream)

        def timed() -> float:
            hold(1, int(self.peer.stream.handle))
            return count * run / self.peer.between(go) / 1e9

        return timed

    def torch_pack(self, program: CopyProgram, width: int, dtype: torch.dtype) -> Timed:
        """Pack as a careful user of torch would: index_select, one peer copy, index_copy, in elements of some width."""
        a, b = (torch.from_numpy(np.concatenate(list(places(program, width, s)))) for s in ("source", "sink"))
        a, b = a.to("cuda:0"), b.to("cuda:1")
        rows = [
            t[: t.numel() // width * width].view(dtype).view(-1, width // dtype.itemsize)
            for t in (self.source, self.sink)
        ]
        packed = torch.empty(len(a), width // dtype.itemsize, dtype=dtype, device="cuda:0")
        landed = torch.empty_like(packed, device="cuda:1")

        def run() -> float:
            for d in (0, 1):
                torch.cuda.synchronize(d)
            streams = [torch.cuda.current_stream(d) for d in (0, 1)]
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            ready = torch.cuda.Event()
            with torch.cuda.device(1):
                torch.cuda._sleep(HELD)
                events[0].record(streams[1])
            streams[0].wait_event(events[0])
            with torch.cuda.device(0):
                torch.index_select(rows[0], 0, a, out=packed)
                landed.copy_(packed, non_blocking=True)
                ready.record(streams[0])
            with torch.cuda.device(1):
                streams[1].wait_event(ready)
                rows[1].index_copy_(0, b, landed)
                events[1].record(streams[1])
            events[1].synchronize()
            return packed.numel() * dtype.itemsize / events[0].elapsed_time(events[1]) / 1e6

        return run


def of_nixl(samples: dict[str, list[float]], longest: dict[str, list[float]]) -> float | None:
    """Packed copies as a share of NIXL with descriptors of 64 MB: by our agent in the same rounds, or by its own, whichever is faster."""
    if "NIXL, packed" not in samples:
        return None
    by_its_own = longest.get("NIXL, descriptors", [0.0])
    return median(samples["NIXL, packed"]) / max(median(samples["NIXL, writes of 64 MB"]), median(by_its_own))


def shown(table: dict[int, dict[str, list[float]]], ours: list[str]) -> None:
    """Print medians in GB/s, and shares of ceilings."""
    names = list(dict.fromkeys(name for samples in table.values() for name in samples))
    shares = "   pull / ceiling   push / ceiling   packed / NIXL 64 MB"
    print(f"{'run, bytes':>12}" + "".join(f"{name:>23}" for name in names) + shares)
    for run, samples in table.items():
        middle = {name: median(rates) for name, rates in samples.items()}
        row = "".join(f"{middle[name]:23.1f}" if name in middle else f"{'':23}" for name in names)
        row += "".join(f"{middle[name] / middle['peer copy']:17.3f}" for name in ours)
        packed = of_nixl(samples, table.get(1 << 26, {}))
        print(f"{run:12,}" + row + (f"{packed:22.3f}" if packed else ""))


def main() -> int:
    parser = arguments(__doc__, "transfer_gpu", rounds=21)
    parser.add_argument("--pool", type=float, default=60, metavar="GB")
    parser.add_argument("--blocks", type=int, help="thread blocks of the kernel; by default one a multiprocessor")
    parser.add_argument("--runs", type=int, nargs="*", default=list(RUNS))
    parser.add_argument("--only-kernel", action="store_true")
    args = parser.parse_args()
    bench = Bench(int(args.pool * 1e9) // (1 << 27) * (1 << 27), args.blocks)
    table: dict[int, dict[str, list[float]]] = {}
    for run in args.runs:
        print(f"\r{run} bytes ...      ", end="", file=sys.stderr, flush=True)
        layers, number, rows, width = scattered_shape(run)
        program = scattered(width, number, layers, bench.pool // layers // width, seed=run, run=rows)
        contenders: dict[str, Timed] = {"peer copy": bench.peer_copy}
        for name in bench.copiers:
            poison(bench.memory[1])
            contenders[name] = bench.kernel(name, program)
            contenders[name]()
            compare(program, width, bench.source, bench.sink)
        if not args.only_kernel:
            if run <= 131072:
                for dtype in (torch.bfloat16, torch.float64):
                    contenders[f"torch, {str(dtype)[6:]}"] = bench.torch_pack(program, width, dtype)
            contenders["cuMemcpyBatchAsync"] = bench.batch(program, run)
        table[run] = warm_in_turn(contenders, args.rounds)
    ours, left_out = list(bench.copiers), {}
    if not args.only_kernel:
        print("\rNIXL and Mooncake ...     ", end="", file=sys.stderr, flush=True)
        bench.close()
        packed = nixl_packed.measure(args.runs, args.rounds, blocks=args.blocks)
        others = {nixl_packed.PACKED: packed} if isinstance(packed, str) else packed
        for library, rates in (others | peers.measure(args.runs, 3)).items():
            if isinstance(rates, str):
                left_out[library] = rates
            else:
                for run, samples in rates.items():
                    table[run][library] = samples
    print(file=sys.stderr)
    shown(table, ours)
    for library, why in left_out.items():
        print(f"{library}: left out: {why}")
    head = gpu_facts() | {"unit": "GB/s", "pool_bytes": bench.pool, "rounds": args.rounds}
    keep(args.out, head | {"samples": rounded({str(run): samples for run, samples in table.items()}, 2)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
