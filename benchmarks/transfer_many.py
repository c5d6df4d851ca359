"""Half of a host's GPUs hand over to the other half, all rank pairs at once.

`python benchmarks/transfer_many.py [--write]` on a machine with 4 or 8 GPUs that are peers. Each sink rank pulls from all its
source ranks in one launch; the ceiling is a peer copy of 1 GB on every (source, sink) pair of GPUs at once, in the same
rounds. Wall clock of one thread that submits to all GPUs and waits. --write keeps samples in
benchmarks/results/transfer_many.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device
from facts import facts
from transfer_shapes import half

from kvproto.catalog.models import PRESETS, Parallel, describe
from kvproto.copying.lowering import Pair
from kvproto.planning.plan import plan
from kvproto.transport.cuda.copier import Copier, CopyJob
from kvproto.transport.cuda.driver import call, current, enable_peer
from kvproto.transport.cuda.memory import DeviceMemory

RESULTS = Path(__file__).parent / "results/transfer_many.json"
GB = 1 << 30


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true")
    options.add_argument("--rounds", type=int, default=21)
    options.add_argument("--tokens", type=int, default=32768)
    options.add_argument("--out", type=Path, default=RESULTS)
    args = options.parse_args()
    count = torch.cuda.device_count() // 2
    if not count:
        raise SystemExit("needs two GPUs at least")
    for a in range(count):
        for b in range(count):
            enable_peer(count + b, a)
    buffers = [DeviceMemory(GB, d) for d in range(2 * count)]
    streams = []
    for b in range(count):
        current(count + b)
        streams.append(Device(count + b).create_stream())

    def ceiling() -> float:
        """Bytes a second of one copy to each sink GPU."""
        began = time.perf_counter()
        for b, stream in enumerate(streams):
            current(count + b)
            call(driver.cuMemcpyDtoDAsync(buffers[count + b].address, buffers[b].address, GB, stream.handle), "copy")
        for stream in streams:
            stream.sync()
        return count * GB / (time.perf_counter() - began)

    copiers = [Copier(count + b) for b in range(count)]
    found: list[dict[str, Any]] = []
    for preset in ("llama-3-70b", "deepseek-v3-eagle3"):
        configs = PRESETS[preset]
        source, sink = (describe(configs[0], configs[1:], Parallel(tp=count)) for _ in range(2))
        made = plan(source, sink)
        here = {r: half(source, r, args.tokens, False, r) for r in range(count)}
        there = {r: half(sink, r, args.tokens, True, count + r) for r in range(count)}
        for *_, memory in here.values():
            torch.from_dlpack(memory).view(torch.uint8).random_(256)
        jobs, checks = [], []
        for b in range(count):
            some = []
            for a in made.required(b):
                (from_side, from_, mine), (to_side, to, theirs) = here[a], there[b]
                program = Pair(made.between(a, b), from_side, to_side).lower(from_, to)
                some.append(CopyJob(copiers[b].prepare(program, {0: mine.address}, {0: theirs.address}), program.maps))
                checks.append((a, b, program))
            jobs.append(some)
        total = sum(p.bytes for _, _, p in checks)

        def go(jobs: list[list[CopyJob]] = jobs) -> None:
            for copy in [copier.submit(some) for copier, some in zip(copiers, jobs, strict=True)]:
                copy.wait()

        for _ in range(20):
            go(), ceiling()
        for a, b, program in checks:
            sent = Copier(a).checksums(program, {0: here[a][2].address}, sink=False)
            if sent != copiers[b].checksums(program, {0: there[b][2].address}, sink=True):
                raise SystemExit(f"{preset}: checksums differ from {a} to {b}")
        samples, ceilings = [], []
        for _ in range(args.rounds):
            ceilings.append(ceiling())
            began = time.perf_counter()
            go()
            samples.append(time.perf_counter() - began)
        rate = total / median(samples)
        found.append(
            {
                "shape": preset,
                "gpus": [count, count],
                "tokens": args.tokens,
                "bytes": total,
                "seconds": samples,
                "ceiling": ceilings,
            }
        )
        print(f"{preset:22} {count} to {count} GPUs, {args.tokens:,} tokens, {len(checks)} rank pairs, {total / 1e6:9.1f} MB  {median(samples) * 1e6:8.0f} us "
              f"{rate / 1e9:7.1f} GB/s in all, {rate / median(ceilings):.3f} of the ceiling {median(ceilings) / 1e9:.1f}", flush=True)  # fmt: skip
        for side in (here, there):
            for *_, memory in side.values():
                memory.close()
    if args.write:
        args.out.write_text(json.dumps(facts() | {"shapes": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
