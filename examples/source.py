"""A prefill engine that hands its requests over: `python examples/source.py | python examples/sink.py`.

Lines marked `own` belong to the engine, or to the router that would carry the ticket and the prompt between the two.
"""

import json  # own
import tempfile  # own

from engine import BYTES, Engine  # own

from kvproto import Cache, DType, Pool, Prompt, Source, allocate, lay_out, new_ticket, write_ticket

address = f"ipc://{tempfile.mkdtemp()}/prefill"  # own
tokens = list(range(100, 150))  # own
cache = Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=16, dtype=DType.F32)
geometry = lay_out([cache], facts={"weights.target": "example, revision 1"})
engine = Engine(allocate(BYTES))
pool = Pool(geometry, {"kv": engine.layers}, axes="part page token head dim")
with Source("prefill", pool, address) as source:
    ticket = new_ticket("prefill")
    request = source.request(ticket, Prompt(tokens))
    print(json.dumps({"ticket": write_ticket(ticket), "tokens": tokens, "source": address}), flush=True)  # own
    pages = engine.prefill(tokens)  # own
    request.finish({"kv": pages})
    request.wait(60)  # until the sink has everything
    engine.release(pages)  # own
