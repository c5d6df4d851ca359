"""Copies of a request's pages on one GPU by the copy kernel as they are, and by the conversion kernel: GB/s of what is in BF16.

`python benchmarks/convert_gpu.py [--out]` on a machine with a GPU. Shapes, pages and conversions are those of
convert_host.py, of 32 layers; seconds are the device's, from the upload to the last byte, and ways take turns in each
round. What each way wrote is compared with the host's executor first. No result is kept yet: no GPU has run it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import convert_host
import torch
from convert_host import FORMS, engine, moved
from gpu import bytes_of, gpu_facts, warm_in_turn
from harness import arguments, keep

from kvproto import DType
from kvproto.copying.execute import execute
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory

LAYERS = 32


def way(copier: Copier, form: str, widens: bool, tokens: int) -> Callable[[], float]:
    """A conversion, or with no form the copy as it is, after a comparison of its bytes; seconds of the device."""
    name = form.partition(",")[0] or "e4m3_block"
    wide, narrow = DType.BF16, DType.F8E4M3 if form else DType.BF16
    dtypes = (narrow, wide) if widens else (wide, narrow)
    source, sink = (engine(page, dtype, name, FORMS.get(form)) for page, dtype in zip((16, 64), dtypes, strict=True))
    program, here, there = moved(source, sink, tokens)
    memory = [DeviceMemory(len(side), 0) for side in (here, there)]
    for on_device, side in zip(memory, (here, there), strict=True):
        bytes_of(on_device).copy_(torch.frombuffer(side, dtype=torch.uint8))
    torch.cuda.synchronize()
    prepared = None if form else copier.prepare(program, {0: memory[0].address}, {0: memory[1].address})

    def run() -> float:
        if prepared is not None:
            copy = copier.submit([CopyJob(prepared, program.maps)])
        else:
            copy = copier.convert(program, {0: memory[0].address}, {0: memory[1].address})
        copy.wait()
        return copy.seconds

    run()
    execute(program, {0: memoryview(here)}, {0: memoryview(there)})
    if not torch.equal(bytes_of(memory[1]).cpu(), torch.frombuffer(there, dtype=torch.uint8)):
        raise SystemExit(f"{form or 'as it is'}: other bytes than the host's")
    return run


def main() -> int:
    """Measure, print, keep."""
    parser = arguments(__doc__, "convert_gpu", rounds=20)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the request (%(default)s)")
    args = parser.parse_args()
    convert_host.LAYERS = LAYERS
    copier = Copier(0, timed=True)
    ways = {"BF16 as it is": way(copier, "", False, args.tokens)}
    for form in FORMS:
        ways[f"to FP8 by {form}"] = way(copier, form, False, args.tokens)
        ways[f"from FP8 by {form}"] = way(copier, form, True, args.tokens)
    samples = warm_in_turn(ways, args.rounds)
    size = 2 * LAYERS * convert_host.HEADS * convert_host.DIM * args.tokens * 2
    plain = median(samples["BF16 as it is"])
    for name, seconds in samples.items():
        rate = size / median(seconds) / 1e9
        print(f"{name:44}{rate:10.0f} GB/s{plain / median(seconds):8.2f} of the copy as it is")
    keep(args.out, {"benchmark": "convert_gpu", "unit": "s", "bytes": size} | gpu_facts() | {"samples": samples})
    return 0


if __name__ == "__main__":
    sys.exit(main())
