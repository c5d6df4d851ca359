"""The cost to a sink of each source that it awaits, beside the bytes.

`python benchmarks/spread.py [--out]`: a cache of 64 layers and 16 KB in all, which 16 source ranks hold, is fetched by one rank from one to 16 of
them, by shm, in one process and thread. Time of the sink's own turns alone, CPU time, median of fetches; --out keeps the medians.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from harness import arguments, facts, keep

from kvproto import Cache, DType, Options, Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket

LAYERS, PAGE, FETCHES = 64, 16, 60


def seconds(folder: Path, ranks: int) -> list[float]:
    """CPU seconds of the sink for each fetch from so many source ranks, all of which have the whole cache."""
    cache = [Cache.mla("kv", LAYERS, latent=12, rope=4, page=PAGE, dtype=DType.U8)]
    geometry, options, prompt = (
        lay_out(cache, Parallel(tp=ranks)),
        Options(thread=False, verify=False),
        Prompt(range(PAGE)),
    )
    addresses = {rank: f"ipc://{folder}/{ranks}-{rank}" for rank in range(ranks)}
    found = []
    with ExitStack() as stack:
        pools = [Pool.allocate(geometry, 2, rank=rank) for rank in range(ranks)]
        doors = [stack.enter_context(Source("prefill", pool, addresses, options)) for pool in pools]
        decode = stack.enter_context(
            Sink("decode", Pool.allocate(lay_out(cache), 2), {"prefill": addresses[0]}, options)
        )
        for _ in range(FETCHES):
            ticket, spent = new_ticket("prefill"), 0.0
            began = time.process_time()
            fetch = decode.fetch(ticket, prompt, {"kv": [1]})
            spent += time.process_time() - began
            requests = [door.request(ticket, prompt) for door in doors]
            for request in requests:
                request.finish({"kv": [0]})
            while not (fetch.done and all(request.done for request in requests)):
                for door in doors:
                    door.step(0)
                began = time.process_time()
                decode.step(0)
                spent += time.process_time() - began
            found.append(spent)
    return found[FETCHES // 3 :]


def main() -> int:
    """Measure, print, keep."""
    args = arguments(__doc__, "spread").parse_args()
    numbers = [1, 2, 4, 8, 16]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        medians = [median(seconds(Path(folder), n)) for n in numbers]
    for n, value in zip(numbers, medians, strict=True):
        print(f"{n:3} sources awaited: {value * 1e6:8.0f} us of the sink")
    slope = float(np.polyfit(numbers, medians, 1)[0])
    print(f"each of them: {slope * 1e6:.0f} us")
    keep(args.out, {"benchmark": "spread"} | facts() | {"awaited": numbers, "seconds": medians, "each_s": slope})
    return 0


if __name__ == "__main__":
    sys.exit(main())
