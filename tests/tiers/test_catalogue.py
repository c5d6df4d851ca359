"""What a cache tells of its pages is what its requests find."""

import random
from typing import Any

import pytest

from kvproto.tiers.page_cache import WritePolicy
from kvproto.wire.enums import Tier
from tests.tiers.engine import PAGE, Engine
from tests.tiers.schedules import Memory


def found(engine: Engine, chain: Any) -> dict[bytes, Tier | None]:
    """By asking for each length: where a request could go on."""
    said: dict[bytes, Tier | None] = {}
    for n, id in enumerate(chain.ids(engine.layout.form), 1):
        said[id] = None
        for tier, index in ((Tier.HOST, engine.cache.host), (Tier.DEVICE, engine.cache.device)):
            with index.find(chain, n) as hit:
                said[id] = tier if len(hit.pages) == n else said[id]
    return said


@pytest.mark.parametrize("seed", range(12))
def test_what_is_told_is_what_is_found(seed: int) -> None:
    """KVP-CAT-TELL: from the beginning or later, with windows that pages lack, whatever is copied or given up."""
    rng = random.Random(seed)
    reach = rng.choice((0, PAGE, PAGE + 1, 2 * PAGE))
    engine = Engine(
        rng.choice((5, 9)), rng.choice((3, 7, 40)), policy=rng.choice([*WritePolicy]), store=Memory(), reach=reach
    )
    told: dict[bytes, Tier | None] = {}
    chains: dict[tuple[int, ...], Any] = {}
    for turn in range(40):
        if turn == seed:
            engine.cache.subscribe(told.update)
        tokens = tuple(rng.randrange(3) // 2 for _ in range(rng.choice((5, 9, 13, 17))))
        chain = chains.setdefault(tokens, engine.chain(*tokens))
        if reach and rng.random() < 0.5:  # another engine keeps no windows but some
            for i in range(len(chain.ahead)):
                right = engine.right(chain, i)
                engine.cache.page_store.write(chain, i, right if rng.random() < 0.6 else {0: right[0]})  # type: ignore[union-attr]
            engine.fetched(chain)
        lease = engine.cache.open(chain, len(chain.own))
        if lease is not None:
            engine.cache.step()
            engine.compute(chain, lease, lease.pages)
            lease.leave(rng.randrange(4 * len(chain.own) + 1))
        if rng.random() < 0.2:
            engine.cache.device.evict(rng.randrange(5))
        engine.cache.step()
        if turn >= seed:
            right = {id: tier for chain in chains.values() for id, tier in found(engine, chain).items()}
            assert {id: told.get(id) for id in right} == right
            assert {id for id, tier in told.items() if tier is not None} <= right.keys()
    engine.cache.close()
