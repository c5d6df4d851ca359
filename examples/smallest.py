"""Both roles in one program, as short as possible: `python examples/smallest.py`."""

import tempfile

from kvproto import Cache, Pool, Prompt, Sink, Source, lay_out, new_ticket

cache, facts = Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=16), {"weights.target": "example, revision 1"}
geometry = lay_out([cache], facts=facts)  # two engines whose weights differ refuse each other
address = f"ipc://{tempfile.mkdtemp()}/prefill"
prefill, decode = Pool.allocate(geometry, pages=8), Pool.allocate(geometry, pages=8)
prefill.array("kv", layer=0, part="k")[:3] = 7
with Source("prefill", prefill, address) as source, Sink("decode", decode, {"prefill": address}) as sink:
    ticket, prompt = new_ticket("prefill"), Prompt(range(40))
    request = source.request(ticket, prompt)
    fetch = sink.fetch(ticket, prompt, {"kv": [5, 1, 6]})
    request.finish({"kv": [0, 1, 2]})
    print(fetch.wait(10))
    request.wait(10)
assert decode.array("kv", layer=0, part="k")[[5, 1]].min() == 7
