"""Copies of a request's pages on the host as they are, and with each conversion: seconds, and GB/s of what is in BF16.

`python benchmarks/convert_host.py [--out]`. One rank pair in one process, by the executor of the transport `shm`: pages of 16
tokens in no order, to pages of 64. Ways take turns in each round, and `checksum` is the source's pass for VERIFY; rates are medians.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
from harness import arguments, facts, in_turn, keep

from kvproto import Cache, DType, lay_out
from kvproto.copying.execute import checksums, execute
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import Feature

HEADS, DIM, LAYERS = 8, 128, 4
FORMS = {"e4m3_tensor": None, "e4m3_block, per token and head": DIM, "e4m3_block, blocks of 32": 32}
Timed = Callable[[], float]


def engine(page: int, dtype: DType, name: str, block: int | None) -> Geometry:
    """One rank that states a conversion."""
    fp8 = dtype == DType.F8E4M3
    cache = Cache.gqa(
        "kv", LAYERS, kv_heads=HEADS, head_dim=DIM, page=page, dtype=dtype, scale_block=block if fp8 else None
    )
    stated = {"k": 0.02, "v": 0.02} if fp8 and block is None else None
    return lay_out([cache.converts(name, scales=stated)])


def program_of(source: Geometry, sink: Geometry, tokens: int) -> tuple[CopyProgram, int, int]:
    """The program of a request, and the bytes of both sides' pools."""
    layouts, windows, lengths = [], [], []
    for geometry in (source, sink):
        need = items_needed(geometry.groups[0], 0, 0, tokens)
        columns, length = columns_without_gaps(geometry, 0, {0: need})
        layouts.append(RankLayout(geometry, 0, columns))
        windows.append({0: Window(0, tokens, np.random.default_rng(need).permutation(need))})
        lengths.append(length)
    made = plan(source, sink, (Feature.CONVERT,))
    return Pair(made.between(0, 0), *layouts).lower(*windows), lengths[0], lengths[1]


def moved(source: Geometry, sink: Geometry, tokens: int) -> tuple[CopyProgram, bytearray, bytearray]:
    """The program of a request, and memory of both sides."""
    program, *lengths = program_of(source, sink, tokens)
    memory = [bytearray(length) for length in lengths]
    values = np.random.default_rng(0).standard_normal(len(memory[0]) // 2, np.float32).view(np.uint32) >> 16
    held = values.astype("<u2").view(np.uint8)
    np.frombuffer(memory[0], np.uint8)[: held.size] = (
        held if source.groups[0].parts[0].dtype == DType.BF16 else held & 0x77
    )
    return program, *memory


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> int:
    """Measure, print, keep."""
    parser = arguments(__doc__, "convert_host", rounds=7)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the request (%(default)s)")
    args = parser.parse_args()
    ways: dict[str, Timed] = {}
    bf16 = engine(16, DType.BF16, "e4m3_block", None), engine(64, DType.BF16, "e4m3_block", None)
    cases = {"BF16 as it is": bf16}
    for form, block in FORMS.items():
        name = form.partition(",")[0]
        wide, narrow = (
            lambda page, d=dtype, n=name, b=block: engine(page, d, n, b) for dtype in (DType.BF16, DType.F8E4M3)
        )
        cases[f"to FP8 by {form}"], cases[f"from FP8 by {form}"] = (wide(16), narrow(64)), (narrow(16), wide(64))
    for case, (source, sink) in cases.items():
        program, here, there = moved(source, sink, args.tokens)
        sides = {0: memoryview(here)}, {0: memoryview(there)}
        ways[case] = partial(timed, partial(execute, program, *sides))
        ways[f"{case}, checksum"] = partial(timed, partial(checksums, program, sides[0], sink=False))
    samples = in_turn(ways, args.rounds)
    size = 2 * LAYERS * HEADS * DIM * args.tokens * 2
    for case in ways:
        seconds = median(samples[case])
        print(f"{case:58}{seconds * 1e3:10.1f} ms{size / seconds / 1e9:10.2f} GB/s")
    head = {"benchmark": "convert_host", "unit": "s", "bytes": size, "tokens": args.tokens} | facts()
    keep(args.out, head | {"samples": samples})
    return 0


if __name__ == "__main__":
    sys.exit(main())
