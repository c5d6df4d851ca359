"""Half of a host's GPUs hand over to the other half, all rank pairs at once.

`python benchmarks/transfer_many.py [--out]` on a machine with 4 or 8 GPUs that are peers. Each sink rank pulls from all its
source ranks in one launch; the ceiling is a peer copy of 1 GB on every (source, sink) pair of GPUs at once, in the same
rounds. Wall clock of one thread that submits to all GPUs and waits. --out keeps all samples.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device
from gpu import GB, Half, bytes_of, gpu_facts, half
from harness import arguments, keep

from kvproto.copying.lowering import Pair
from kvproto.planning.layout import Parallel
from kvproto.planning.plan import plan
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import call, current, enable_peer
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto_catalog.models import PRESETS, describe


class Ceiling:
    """A peer copy of 1 GB from each source GPU to its sink GPU, all at once."""

    def __init__(self, count: int) -> None:
        self._count, self._buffers = count, [DeviceMemory(GB, device) for device in range(2 * count)]
        self._streams = []
        for sink in range(count, 2 * count):
            current(sink)
            self._streams.append(Device(sink).create_stream())

    def rate(self) -> float:
        """Bytes a second of all."""
        began, count = time.perf_counter(), self._count
        for source, stream in enumerate(self._streams):
            current(count + source)
            addresses = self._buffers[count + source].address, self._buffers[source].address
            call(driver.cuMemcpyDtoDAsync(*addresses, GB, stream.handle), "copy")
        for stream in self._streams:
            stream.sync()
        return count * GB / (time.perf_counter() - began)


class Preset:
    """All rank pairs of one model, from half of the GPUs to the other."""

    def __init__(self, name: str, count: int, tokens: int) -> None:
        configs = PRESETS[name]
        source, sink = (describe(configs[0], configs[1:], Parallel(tp=count)) for _ in range(2))
        routes = plan(source, sink)
        self._copiers = [Copier(count + b) for b in range(count)]
        self._here: list[Half] = [half(source, r, tokens, False, r) for r in range(count)]
        self._there: list[Half] = [half(sink, r, tokens, True, count + r) for r in range(count)]
        for *_, memory in self._here:
            bytes_of(memory).random_(256)
        self._jobs: list[list[CopyJob]] = []
        self.programs = []
        for b in range(count):
            jobs = []
            for a in routes.required(b):
                (from_side, from_, mine), (to_side, to, theirs) = self._here[a], self._there[b]
                program = Pair(routes.between(a, b), from_side, to_side).lower(from_, to)
                prepared = self._copiers[b].prepare(program, {0: mine.address}, {0: theirs.address})
                jobs.append(CopyJob(prepared, program.maps))
                self.programs.append((a, b, program))
            self._jobs.append(jobs)
        self.bytes = sum(program.bytes for *_, program in self.programs)

    def copy(self) -> float:
        """Seconds of all copies at once."""
        began = time.perf_counter()
        for copy in [copier.submit(jobs) for copier, jobs in zip(self._copiers, self._jobs, strict=True)]:
            copy.wait()
        return time.perf_counter() - began

    def check(self) -> None:
        for a, b, program in self.programs:
            sent = Copier(a).begin_checksums(program, {0: self._here[a][2].address}, sink=False)
            came = self._copiers[b].begin_checksums(program, {0: self._there[b][2].address}, sink=True)
            if sent() != came():
                raise SystemExit(f"checksums differ from {a} to {b}")

    def close(self) -> None:
        for *_, memory in (*self._here, *self._there):
            memory.close()


def main() -> int:
    parser = arguments(__doc__, "transfer_many", rounds=21)
    parser.add_argument("--tokens", type=int, default=32768)
    args = parser.parse_args()
    count = torch.cuda.device_count() // 2
    if not count:
        raise SystemExit("needs two GPUs at least")
    for a in range(count):
        for b in range(count):
            enable_peer(count + b, a)
    ceiling = Ceiling(count)
    shapes: list[dict[str, Any]] = []
    for name in ("llama-3-70b", "deepseek-v3-eagle3"):
        preset = Preset(name, count, args.tokens)
        for _ in range(20):
            preset.copy(), ceiling.rate()
        preset.check()
        ceilings, seconds = zip(*((ceiling.rate(), preset.copy()) for _ in range(args.rounds)), strict=True)
        sizes = {"gpus": [count, count], "tokens": args.tokens, "bytes": preset.bytes}
        shapes.append({"shape": name, **sizes, "seconds": seconds, "ceiling": ceilings})
        rate, most = preset.bytes / median(seconds), median(ceilings)
        what = f"{args.tokens:,} tokens, {len(preset.programs)} rank pairs, {preset.bytes / 1e6:9.1f} MB"
        took = f"{1e6 * median(seconds):8.0f} us {rate / 1e9:7.1f} GB/s in all"
        print(
            f"{name:22} {count} to {count} GPUs, {what}  {took}, {rate / most:.3f} of the ceiling {most / 1e9:.1f}",
            flush=True,
        )
        preset.close()
    keep(args.out, gpu_facts() | {"shapes": shapes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
