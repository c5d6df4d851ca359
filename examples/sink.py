"""A decode engine that fetches a request: `python examples/source.py | python examples/sink.py`.

Lines marked `own` belong to the engine, or to the router that would carry the ticket and the prompt between the two.
"""

import json  # own
import sys  # own

from engine import BYTES, Engine  # own

from kvproto import Cache, DType, Pool, Prompt, Sink, allocate, lay_out, read_ticket

order = json.loads(sys.stdin.readline())  # own
cache = Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=16, dtype=DType.F32)
geometry = lay_out([cache], facts={"weights.target": "example, revision 1"})
engine = Engine(allocate(BYTES))
pool = Pool(geometry, {"kv": engine.layers}, axes="part page token head dim")
with Sink("decode", pool, {"prefill": order["source"]}) as sink:
    pages = engine.take(len(order["tokens"]))  # own
    fetch = sink.fetch(read_ticket(order["ticket"]), Prompt(order["tokens"]), {"kv": pages})
    arrived = fetch.wait(60)
    print(f"{sum(arrived.bytes.values())} bytes in {arrived.seconds * 1e3:.1f} ms")  # own
    assert engine.holds(order["tokens"], pages)  # own
