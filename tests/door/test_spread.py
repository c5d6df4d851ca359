"""Options.spread: which source ranks a sink rank reads replicated bytes from."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvproto import Cache, DType, Options, Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto.options import Spread

from .doors import address_in

LAYERS, PAGE = 8, 4
MLA = [Cache.mla("kv", LAYERS, latent=4, rope=4, page=PAGE, dtype=DType.U8)]


@pytest.mark.parametrize(
    ("source", "sink", "number"), [("even", "even", 4), ("few", "few", 2), ("one", "one", 1), ("few", "even", 4), ("one", "few", 4)]
)  # fmt: skip
def test_as_many_sources_as_both_sides_said(source: Spread, sink: Spread, number: int, tmp_path: Path) -> None:
    """KVP-PLAN-FEW and KVP-PLAN-SPREAD at the door: four ranks have the whole cache, and one rank fetches it."""
    geometry, prompt, ticket = lay_out(MLA, Parallel(tp=4)), Prompt(range(PAGE)), new_ticket("prefill")
    addresses = {rank: address_in(tmp_path, f"prefill-{rank}") for rank in range(4)}
    here, there = Options(thread=False, spread=source), Options(thread=False, spread=sink)
    pool = Pool.allocate(lay_out(MLA), 2)
    with ExitStack() as stack:
        doors = [
            stack.enter_context(Source("prefill", Pool.allocate(geometry, 2, rank=r), addresses, here))
            for r in range(4)
        ]
        decode = stack.enter_context(Sink("decode", pool, {"prefill": addresses[0]}, there))
        fetch = decode.fetch(ticket, prompt, {"kv": [1]})
        for door in doors:
            for layer in range(LAYERS):
                door.pool.array("kv", layer, "latent")[:] = layer + 1
            door.request(ticket, prompt).finish({"kv": [0]})
        while not fetch.done:
            for each in (decode, *doors):
                each.step(0.001)
        assert len(fetch.wait(0).bytes) == number
        assert all((pool.array("kv", layer, "latent")[1] == layer + 1).all() for layer in range(LAYERS))
