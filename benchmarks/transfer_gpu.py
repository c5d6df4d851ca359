"""Scattered bytes between two GPUs: the copy kernel, the copy engine's ceiling, and what users would pick instead.

`python benchmarks/transfer_gpu.py [--write] [--pool GB] [--rounds N]` on a machine with two GPUs that are peers. About 1 GB
is moved from random places of a pool to random places of another, in runs of one length, all contenders in turn in each
round; medians, by device events from the upload of item ids to the last byte: the GPU is held back until the host has said
everything (what the host takes is in transfer_shapes.py). Every byte is compared before anything is timed. --write keeps raw samples in benchmarks/results/transfer_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import peers
import torch
from cuda.bindings import driver
from cuda.core import Device, EventOptions
from facts import facts

from kvproto.copying.program import CopyProgram
from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier, CopyJob
from kvproto.transport.cuda.driver import call, current, enable_peer
from kvproto.transport.cuda.memory import DeviceMemory

RESULTS = Path(__file__).parent / "results/transfer_gpu.json"
TOTAL = 1 << 30
RUNS = (256, 512, 1152, 2048, 4096, 8192, 32768, 131072, 1 << 20, 1 << 24, 1 << 26)
WARM_UP = 1.0
HELD = 1_000_000
"""Cycles, about half a millisecond."""
Timed = Callable[[], float]
"""Runs once; GB/s by device events."""


def shape(run: int) -> tuple[int, int, int, int]:
    """(layers, runs of a layer, rows of a run, bytes of a row) for about 1 GB, as many layers as a model has."""
    layers = max(1, min(64, TOTAL // run))
    width = min(run, 4096)
    return layers, max(TOTAL // run // layers, 1), run // width, width


def hold(device: int, stream: int) -> None:
    """What is enqueued now begins later."""
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=f"cuda:{device}")):
        torch.cuda._sleep(HELD)


def random_bytes(memory: DeviceMemory, seed: int) -> torch.Tensor:
    seen = torch.from_dlpack(memory).view(torch.int64)
    generator = torch.Generator(device=seen.device).manual_seed(seed)
    for part in seen.split(1 << 28):
        part.random_(generator=generator)
    return torch.from_dlpack(memory).view(torch.uint8)


def places(program: CopyProgram, width: int, side: str) -> Iterator[np.ndarray]:
    """Row numbers in the pool, layer by layer."""
    m = program.maps[0]
    first = m.source_row if side == "source" else m.sink_row
    rows = (first[:, None] + np.arange(int(m.rows[0]))).reshape(-1)
    for op in program.ops:
        yield rows + int(op[f"{side}_offset"]) // width


def compare(program: CopyProgram, width: int, source: torch.Tensor, sink: torch.Tensor) -> None:
    """Check that every row is in its place and nothing else was written; the pool was 0xEE before."""
    total = 0
    source, sink = (t[: t.numel() // width * width] for t in (source, sink))
    for a, b in zip(places(program, width, "source"), places(program, width, "sink"), strict=True):
        here = source.view(-1, width)[torch.from_numpy(a).to(source.device)]
        there = sink.view(-1, width)[torch.from_numpy(b).to(sink.device)]
        if not torch.equal(here.to(sink.device), there):
            raise SystemExit("bytes differ")
        total += len(b)
    words = sink.view(torch.int64).view(-1, width // 8)
    untouched = torch.tensor(0xEEEEEEEEEEEEEEEE - (1 << 64), device=sink.device)
    changed = sum(int((part != untouched).any(dim=1).sum()) for part in words.split((1 << 31) // width))
    if changed != total:
        raise SystemExit(f"{changed} rows were written, {total} should be")


class Bench:
    def __init__(self, pool: int, blocks: int | None) -> None:
        enable_peer(0, 1)
        enable_peer(1, 0)
        self.memory = [DeviceMemory(pool, d) for d in (0, 1)]
        self.source, self.sink = random_bytes(self.memory[0], 1), torch.from_dlpack(self.memory[1]).view(torch.uint8)
        self.copiers = {"kernel, pull": Copier(1, blocks, timed=True), "kernel, push": Copier(0, blocks, timed=True)}
        current(1)
        self.stream = Device(1).create_stream()
        self.pool = pool

    def close(self) -> None:
        """Free the memory for others."""
        del self.source, self.sink
        for memory in self.memory:
            memory.close()
        torch.cuda.empty_cache()

    def peer_copy(self) -> float:
        """The copy engine's ceiling: 1 GB of contiguous memory."""
        return self._between(
            lambda: driver.cuMemcpyDtoDAsync(self.memory[1].address, self.memory[0].address, TOTAL, self.stream.handle),
            TOTAL,
        )

    def _between(self, work: Callable[[], Any], size: int) -> float:
        current(1)
        hold(1, int(self.stream.handle))
        timing = EventOptions(timing_enabled=True)
        began = self.stream.record(options=timing)
        call(work()[:1], "copy")
        ended = self.stream.record(options=timing)
        ended.sync()
        return size / float(ended - began) / 1e6

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
            return driver.cuMemcpyBatchAsync(
                sinks, sources, [run] * count, count, [attributes], [0], 1, self.stream.handle
            )

        return lambda: self._between(go, count * run)

    def torch_pack(self, program: CopyProgram, width: int, dtype: torch.dtype) -> Timed:
        """What a careful user of torch writes: index_select, one peer copy, index_copy, in elements of some width."""
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


def measure(contenders: dict[str, Timed], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    until = time.monotonic() + WARM_UP
    while time.monotonic() < until:
        for run in contenders.values():
            run()
    for _ in range(rounds):
        for name, run in contenders.items():
            samples[name].append(run())
    return samples


def of_nixl(samples: dict[str, list[float]], longest: dict[str, list[float]]) -> float | None:
    """What is packed as a share of NIXL with descriptors of 64 MB: by our agent in the same rounds, or by its own, whichever is faster."""
    if "NIXL, packed" not in samples:
        return None
    by_its_own = longest.get("NIXL, descriptors", [0.0])
    return median(samples["NIXL, packed"]) / max(median(samples["NIXL, writes of 64 MB"]), median(by_its_own))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true")
    options.add_argument("--pool", type=float, default=60, metavar="GB")
    options.add_argument("--rounds", type=int, default=21)
    options.add_argument("--blocks", type=int, help="thread blocks of the kernel; by default one a multiprocessor")
    options.add_argument("--runs", type=int, nargs="*", default=list(RUNS))
    options.add_argument("--only-kernel", action="store_true")
    options.add_argument("--out", type=Path, default=RESULTS)
    args = options.parse_args()
    bench = Bench(int(args.pool * 1e9) // (1 << 27) * (1 << 27), args.blocks)
    table: dict[int, dict[str, list[float]]] = {}
    for run in args.runs:
        print(f"\r{run} bytes ...      ", end="", file=sys.stderr, flush=True)
        layers, number, rows, width = shape(run)
        program = scattered(width, number, layers, bench.pool // layers // width, seed=run, run=rows)
        contenders: dict[str, Timed] = {"peer copy": bench.peer_copy}
        for name in bench.copiers:
            bench.sink.fill_(0xEE)
            torch.cuda.synchronize(1)
            contenders[name] = bench.kernel(name, program)
            contenders[name]()
            compare(program, width, bench.source, bench.sink)
        if not args.only_kernel:
            if run <= 131072:
                for dtype in (torch.bfloat16, torch.float64):
                    contenders[f"torch, {str(dtype)[6:]}"] = bench.torch_pack(program, width, dtype)
            contenders["cuMemcpyBatchAsync"] = bench.batch(program, run)
        table[run] = measure(contenders, args.rounds)
    left_out = {}
    if not args.only_kernel:
        print("\rNIXL and Mooncake ...     ", end="", file=sys.stderr, flush=True)
        bench.close()
        import nixl_packed  # it needs this module

        many = nixl_packed.measure(args.runs, args.rounds, blocks=args.blocks)
        if isinstance(many, str):
            left_out[nixl_packed.PACKED] = many
            many = {}
        for library, found in (many | peers.measure(args.runs, 3)).items():
            if isinstance(found, str):
                left_out[library] = found
            else:
                for run, samples in found.items():
                    table[run][library] = samples
    print(file=sys.stderr)
    names = list(dict.fromkeys(n for samples in table.values() for n in samples))
    print(
        f"{'run, bytes':>12}"
        + "".join(f"{n:>23}" for n in names)
        + "   pull / ceiling   push / ceiling   packed / NIXL 64 MB"
    )
    for run, samples in table.items():
        middle = {n: median(samples[n]) for n in names if n in samples}
        ratios = [middle[n] / middle["peer copy"] for n in bench.copiers]
        print(
            f"{run:12,}"
            + "".join(f"{middle[n]:23.1f}" if n in middle else f"{'':23}" for n in names)
            + "".join(f"{r:17.3f}" for r in ratios)
            + (f"{share:22.3f}" if (share := of_nixl(samples, table.get(1 << 26, {}))) else "")
        )
    for library, why in left_out.items():
        print(f"{library}: left out: {why}")
    if args.write:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({
            **facts(), "unit": "GB/s", "pool_bytes": bench.pool, "rounds": args.rounds,
            "samples": {str(run): {n: [round(x, 2) for x in s] for n, s in samples.items()} for run, samples in table.items()},
        }, indent=1) + "\n")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
