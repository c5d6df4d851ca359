"""An engine that reuses what it computed, from the device, the host or a folder: `python examples/tiers.py`.

Its pool has 32 pages. Three conversations of 17 pages do not fit; the host holds two of them, and the folder all three.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine import BYTES, PAGE, Engine

from kvproto import Cache, DType, Pool, Tiers, allocate, lay_out


def serve(engine: Engine, tiers: Tiers, tokens: Sequence[int]) -> str:
    """Compute what is missing of a prompt, and keep all of it."""
    chain = tiers.chain(tokens)
    fetch = tiers.fetch(chain, deadline=time.monotonic() + 10)  # from the folder to the host
    while not fetch.over(time.monotonic()):
        time.sleep(0.001)  # an engine would run a step of its other requests
    fetched = fetch.take()
    lease = tiers.open(chain, room=-(-len(tokens) // PAGE))
    if lease is None:
        raise MemoryError("other requests have the pages: let this one wait")
    tiers.step()  # once a step of the engine, for all requests: one copy to the host, and one from it
    engine.compute(tokens, lease.slots, lease.pages * PAGE, len(tokens))
    right = engine.holds(tokens, lease.slots)
    lease.leave(rows=len(tokens))
    tiers.step()
    return f"{lease.found['device']} device, {lease.found['host']} host ({fetched} fetched), {right}"


def main() -> None:
    """Three conversations, two turns each."""
    geometry = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=PAGE, dtype=DType.F32)])
    engine = Engine(allocate(BYTES))
    pool = Pool(geometry, {"kv": engine.layers}, axes="part page token head dim")
    names = {"weights.target": "example 1", "rope.target": "none", "dtype.target": "F32"}
    with tempfile.TemporaryDirectory() as folder:
        tiers = Tiers(pool, names, page=PAGE, host=32, storage=Path(folder))
        for turn in (256, 272):
            for who in (1, 2, 3):
                print(serve(engine, tiers, [who + n % 7 for n in range(turn)]))
                tiers.drain()
        tiers.close()


if __name__ == "__main__":
    main()
