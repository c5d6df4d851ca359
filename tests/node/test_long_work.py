"""A copy and its checksums are as long as a prompt, and turns are not: peers are heard, and answered, in between."""

import select
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvproto import Cache, DType, Options, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto.transport.shm import transport as shm
from tests.door.doors import Two, address_in

PAGE, PAGES, LAYERS = 4, 130, 256
GEOMETRY = lay_out([Cache.gqa("kv", LAYERS, kv_heads=1, head_dim=16, page=PAGE, dtype=DType.U8)])
LONG, SHORT = Prompt(range(512)), Prompt(range(4))


@pytest.mark.parametrize("pull", [False, True])
def test_a_short_request_ends_while_a_long_one_is_copied_and_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pull: bool
) -> None:
    """KVP-VERIFY-SOURCE, KVP-VERIFY-SINK: 4 MiB in 256 looks, of which the short one needs a handful."""
    monkeypatch.setattr(shm, "_PART", 16 << 10)
    monkeypatch.setattr(shm, "_POLL", 0.0)
    part = attrs.evolve(shm.ShmTransport.capabilities, summed_at_once=16 << 10)
    monkeypatch.setattr(shm.ShmTransport, "capabilities", part)
    options, address = Options(thread=False, pull=pull), address_in(tmp_path)
    pool = Pool.allocate(GEOMETRY, PAGES)
    for layer in range(LAYERS):
        pool.array("kv", layer, "k")[:] = np.random.default_rng(layer).integers(
            1, 256, pool.array("kv", layer, "k").shape
        )
    with (
        Source("prefill", pool, address, options) as source,
        Sink("long", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, options) as one,
        Sink("short", Pool.allocate(GEOMETRY, 1), {"prefill": address}, options) as other,
    ):
        both, beside = Two(source, one), Two(source, other)

        def asked(by: Sink, prompt: Prompt, table: list[int]):  # type: ignore[no-untyped-def]
            ticket = new_ticket("prefill")
            source.request(ticket, prompt).finish({"kv": table})
            return by.fetch(ticket, prompt, {"kv": list(range(len(table)))})

        warm = asked(other, SHORT, [129])
        beside.until(lambda: warm.done)
        long = asked(one, LONG, list(range(128)))
        both.until(
            lambda: source._node._copies.under_way if not pull else one._node._links["prefill", 0]._puller._pulls
        )
        short = asked(other, SHORT, [129])
        while not short.done:
            # A door is ready while it has work; its sockets only when a message has come: so none waits for a part.
            select.select([*source._node.filenos(), *other._node.filenos()], [], [], 0.1)
            beside.turn()
            one.step(0)
        assert not long.done
        both.until(lambda: long.done)
        assert long.wait(0).checksums
        for layer in range(LAYERS):
            assert (one.pool.array("kv", layer, "k")[:128] == pool.array("kv", layer, "k")[:128]).all()
