"""Copies of a request's pages on one GPU by the copy kernel as they are, and by the conversion kernel: GB/s of what is in BF16.

`python benchmarks/convert_gpu.py [--out]` on a machine with a GPU. Shapes, pages and conversions are those of
convert_host.py, of 32 layers; seconds are the device's, from the upload to the last byte, and ways take turns in each
round. *Sum* is the source's pass for VERIFY, by the host's clock. Before it is timed, each way is compared byte for byte with
the host's executor over a short request, and by the checksums of both sides over the whole one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import convert_host
import torch
from convert_host import FORMS, engine, moved, program_of
from gpu import bytes_of, gpu_facts, poison, warm_in_turn
from harness import arguments, keep

from kvproto import DType
from kvproto.copying.execute import execute
from kvproto.copying.program import CopyProgram
from kvproto.planning.geometry import Geometry
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory

LAYERS, SHORT = 32, 100
"""Layers, and tokens of the request that is compared with the host's executor."""
Timed = Callable[[], float]


def pair(form: str, widens: bool) -> tuple[Geometry, Geometry]:
    """A conversion's two engines, or with no form two in BF16."""
    name = form.partition(",")[0] or "e4m3_block"
    wide, narrow = DType.BF16, DType.F8E4M3 if form else DType.BF16
    dtypes = (narrow, wide) if widens else (wide, narrow)
    source, sink = (engine(page, dtype, name, FORMS.get(form)) for page, dtype in zip((16, 64), dtypes, strict=True))
    return source, sink


def copied(copier: Copier, program: CopyProgram, here: DeviceMemory, there: DeviceMemory) -> Timed:
    """A copy of a program between two memories, which returns the device's seconds."""
    prepared = copier.prepare(program, {0: here.address}, {0: there.address})

    def run() -> float:
        copy = copier.submit([CopyJob(prepared, program.maps)])
        copy.wait()
        return copy.seconds

    return run


def check(copier: Copier, source: Geometry, sink: Geometry) -> None:
    """Compare a short request with the host's executor; raises SystemExit if a byte differs."""
    program, here, there = moved(source, sink, SHORT)
    memory = [DeviceMemory(len(side), 0) for side in (here, there)]
    for on_device, side in zip(memory, (here, there), strict=True):
        bytes_of(on_device).copy_(torch.frombuffer(side, dtype=torch.uint8))
    torch.cuda.synchronize()
    copied(copier, program, *memory)()
    execute(program, {0: memoryview(here)}, {0: memoryview(there)})
    if not torch.equal(bytes_of(memory[1]).cpu(), torch.frombuffer(there, dtype=torch.uint8)):
        raise SystemExit("other bytes than the host's")


def large(source: Geometry, sink: Geometry, tokens: int) -> tuple[CopyProgram, DeviceMemory, DeviceMemory]:
    """The program of a request, and memory of both sides on the GPU: normal numbers at the source."""
    program, *lengths = program_of(source, sink, tokens)
    memory = [DeviceMemory(-(-length // 4) * 4, 0) for length in lengths]
    dtype = torch.bfloat16 if source.groups[0].parts[0].dtype == DType.BF16 else torch.float32
    values = torch.from_dlpack(memory[0])
    values.view(dtype).normal_(std=0.01)
    if dtype == torch.float32:
        values.view(torch.int32).bitwise_and_(0x77777777)  # scales, whose bytes as codes are no NaN
    poison(memory[1])
    return program, *memory


def way(copier: Copier, form: str, widens: bool, tokens: int) -> tuple[Timed, Timed]:
    """A copy, and the source's checksums of it, both compared."""
    source, sink = pair(form, widens)
    check(copier, source, sink)
    program, here, there = large(source, sink, tokens)
    run = copied(copier, program, here, there)
    run()
    sums = [copier.begin_checksums(program, {0: side.address}, sink=n > 0)() for n, side in enumerate((here, there))]
    if sums[0] != sums[1]:
        raise SystemExit(f"{form or 'as it is'}: checksums differ, {sums}")

    def summed() -> float:
        begin = time.perf_counter()
        copier.begin_checksums(program, {0: here.address}, sink=False)()
        return time.perf_counter() - begin

    return run, summed


def main() -> int:
    """Measure, print, keep."""
    parser = arguments(__doc__, "convert_gpu", rounds=20)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the request (%(default)s)")
    args = parser.parse_args()
    convert_host.LAYERS = LAYERS
    copier = Copier(0, timed=True)
    cases = {"BF16 as it is": ("", False)}
    for form in FORMS:
        cases |= {f"to FP8 by {form}": (form, False), f"from FP8 by {form}": (form, True)}
    ways: dict[str, Timed] = {}
    size = 2 * LAYERS * convert_host.HEADS * convert_host.DIM * args.tokens * 2
    for name, (form, widens) in cases.items():
        ways[name], ways[f"{name}, sum"] = run, _ = way(copier, form, widens, args.tokens)
        print(f"{name}: every byte as the host's, {size / run() / 1e9:.0f} GB/s the first time", flush=True)
    samples = warm_in_turn(ways, args.rounds)
    for name, seconds in samples.items():
        plain = median(samples["BF16 as it is, sum" if name.endswith("sum") else "BF16 as it is"])
        rate, share = size / median(seconds) / 1e9, plain / median(seconds)
        print(f"{name:52}{rate:10.0f} GB/s{share:8.2f} of BF16 as it is", flush=True)
    keep(args.out, {"benchmark": "convert_gpu", "unit": "s", "bytes": size} | gpu_facts() | {"samples": samples})
    return 0


if __name__ == "__main__":
    sys.exit(main())
