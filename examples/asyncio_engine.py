"""Both roles in one asyncio loop, many requests at a time, without threads: `python examples/asyncio_engine.py`."""

from __future__ import annotations

import asyncio
import tempfile

from engine import BYTES, Engine

from kvproto import Cache, DType, Options, Pool, Prompt, Sink, Source, Ticket, allocate, lay_out, new_ticket
from kvproto.asyncio import drive, wait

GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=16, dtype=DType.F32)])
AXES = "part page token head dim"


async def prefill(source: Source, engine: Engine, ticket: Ticket, tokens: list[int]) -> None:
    """One request at the source, until its pages are free."""
    request = source.request(ticket, Prompt(tokens))
    pages = engine.prefill(tokens)
    request.finish({"kv": pages})
    await wait(request)
    engine.release(pages)


async def decode(sink: Sink, engine: Engine, ticket: Ticket, tokens: list[int]) -> bool:
    """One request at the sink; return whether the right bytes have arrived."""
    pages = engine.take(len(tokens))
    await wait(sink.fetch(ticket, Prompt(tokens), {"kv": pages}))
    right = engine.holds(tokens, pages)
    engine.release(pages)
    return right


async def main() -> None:
    """Eight requests at once."""
    mine, theirs = Engine(allocate(BYTES)), Engine(allocate(BYTES))
    ours, options = f"ipc://{tempfile.mkdtemp()}/prefill", Options(thread=False)
    pools = [Pool(GEOMETRY, {"kv": engine.layers}, axes=AXES) for engine in (mine, theirs)]
    async with (
        drive(Source("prefill", pools[0], ours, options)) as source,
        drive(Sink("decode", pools[1], {"prefill": ours}, options)) as sink,
        asyncio.TaskGroup() as both,
    ):
        found = []
        for n in range(8):
            ticket, tokens = new_ticket("prefill"), list(range(n, n + 40))
            both.create_task(prefill(source, mine, ticket, tokens))
            found.append(both.create_task(decode(sink, theirs, ticket, tokens)))
    assert all(task.result() for task in found)
    print(f"{len(found)} requests, all equal")


if __name__ == "__main__":
    asyncio.run(main())
