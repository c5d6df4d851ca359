"""Pages under a tenant's salt, and another tenant who knows all but the salt: found, timed, fetched."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto import Cache, DType, Options, Pool, Prompt, Tiers, lay_out, new_ticket, tenant_digest
from kvproto.errors import RemoteError
from kvproto.tiers import Chain, StoredPages, WritePolicy
from kvproto.wire.enums import ErrorCode, Tier
from tests.door.doors import GEOMETRY, PAGES, Two, filled, rows, two
from tests.tiers.schedules import Memory

PAGE, LENGTH = 4, 6
NAMES = {"weights.target": "w", "rope.target": "r", "dtype.target": "U8"}
TOKENS = [*range(1, PAGE * LENGTH + 2)]
"""The prompt of tenant blue, which others know."""
UNSEEN = [token + 1000 for token in TOKENS]
BLUE = {"salt": "blue"}
GUESSES: dict[str, dict[str, str]] = {
    "no salt": {},
    "an empty salt": {"salt": ""},
    "a salt of their own": {"salt": "green"},
    "a salt that continues": {"salt": "blue\0"},
    "the salt as an adapter": {"adapter": "blue"},
    "the entry in the value before": {"adapter": "\4\0\0\0salt\4\0\0\0blue"},
    "the entry in the salt": {"salt": "salt\4\0\0\0blue"},
    "another case": {"salt": "Blue"},
}


def pool(pages: int = 4 * LENGTH) -> Pool:
    made = Pool.allocate(lay_out([Cache.gqa("kv", 1, kv_heads=1, head_dim=4, page=PAGE, dtype=DType.U8)]), pages)
    for name in ("k", "v"):
        made.array("kv", 0, name)[:] = 7
    return made


@contextmanager
def engine(storage: Any, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> Iterator[Tiers]:
    """An engine of which blue has filled all tiers."""
    with closing(Tiers(pool(), NAMES, page=PAGE, host=4 * LENGTH, storage=storage, policy=policy)) as tiers:
        lease = tiers.open(tiers.chain(TOKENS, **BLUE), LENGTH + 1)
        assert lease is not None
        lease.leave(len(TOKENS))
        tiers.step()
        tiers.drain()
        yield tiers


def lengths(tiers: Tiers, chain: Chain) -> tuple[int, int, int]:
    """Pages that a request finds on the device, on the host and in storage."""
    on_device, on_host = tiers.device.find(chain), tiers.host.find(chain)
    with closing(on_device), closing(on_host):
        assert tiers.page_store is not None
        stored = sum(tiers.page_store.read(chain, i) is not None for i in range(len(chain.own)))
        return len(on_device.pages), len(on_host.pages), stored


@pytest.mark.parametrize("guess", GUESSES)
def test_pages_of_a_tenant_are_not_found(guess: str, tmp_path: Path) -> None:
    """KVP-TIER-NAMESPACE: on no tier, in no page length, and not by whoever watches the engine."""
    told: dict[bytes, Tier | None] = {}
    with engine(tmp_path) as tiers:
        tiers.subscribe(told.update)
        assert lengths(tiers, tiers.chain(TOKENS, **BLUE)) == (LENGTH, LENGTH, LENGTH)
        theirs = tiers.chain(TOKENS, **GUESSES[guess])
        assert lengths(tiers, theirs) == (0, 0, 0)
        for length in (PAGE, 2 * PAGE):
            stored = StoredPages(pool(), NAMES, page=length, storage=tmp_path)
            with closing(stored):
                for names, found in ((BLUE, LENGTH * PAGE // length), (GUESSES[guess], 0)):
                    chain = Chain(stored.space_of(names), length, TOKENS)
                    assert stored.count(chain, 0, len(chain.own)) == found
        assert not told.keys() & {*theirs.own, *theirs.ahead}
        assert len(told) == LENGTH


def calls(work: Callable[[], object]) -> Counter[str]:
    """Functions of Python and of C that are called, by name: what a lookup costs, and no clock."""
    made = Counter[str]()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            made[frame.f_code.co_qualname if event == "call" else argument.__qualname__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made


class Recording(Memory):
    """A back end that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Counter[str]()

    def get(self, key: str) -> bytes | None:
        self.asked[f"get {key[0]}"] += 1
        return super().get(key)

    def size(self, key: str) -> int | None:
        self.asked[f"size {key[0]}"] += 1
        return super().size(key)


def costs(tiers: Tiers, tokens: list[int], names: dict[str, str]) -> tuple[Counter[str], Counter[str]]:
    """The calls of a request that looks for a prompt, and those of storage behind it."""
    store = tiers.page_store.store if tiers.page_store else None
    assert isinstance(store, Recording)
    store.asked.clear()

    def ask() -> None:
        chain = tiers.chain(tokens, **names)
        lease = tiers.open(chain, LENGTH + 1)
        assert lease is not None
        assert tiers.page_store is not None
        for i in range(LENGTH):
            assert not tiers.page_store.holds(chain, i)
        lease.leave(0)

    return calls(ask), Counter(store.asked)


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_page_of_another_tenant_costs_what_a_miss_costs(policy: WritePolicy) -> None:
    """As many calls, of the same functions, here and in storage: no clock can tell whether blue has been there."""
    with engine(Recording(), policy) as tiers:
        for _ in range(2):  # what is computed once is known by then
            warm = costs(tiers, UNSEEN, {"salt": "green"})
        seen, unseen = (costs(tiers, tokens, {"salt": "green"}) for tokens in (TOKENS, UNSEEN))
        assert seen == unseen == warm
        assert seen[1] == {"size m": LENGTH}
        own = calls(lambda: tiers.chain(TOKENS, **BLUE) and tiers.open(tiers.chain(TOKENS, **BLUE), LENGTH))
        assert own != seen[0]


def test_a_lookup_of_another_tenant_leaves_no_trace() -> None:
    """Neither does it keep pages from being evicted, nor count as a second finder that has them written."""
    store = Recording()
    with engine(store, WritePolicy.SELECTIVE) as tiers:
        for _ in range(3):
            costs(tiers, TOKENS, {"salt": "green"})
            tiers.step()
            tiers.drain()
        assert not [*store.keys("m")]
        assert not tiers.host.ids()


@pytest.mark.parametrize("pull", [False, True])
def test_pages_of_a_tenant_are_not_fetched(tmp_path: Path, pull: bool) -> None:
    """KVP-TKT-CONTENT: a ticket that came into wrong hands moves no byte, and still serves its owner."""

    def prompt(*salts: bytes) -> Prompt:
        return Prompt(range(10), salts=salts)

    options = Options(thread=False, pull=pull)
    blue, table = prompt(tenant_digest("blue")), [3, 1, 2]
    with two(tmp_path, options) as both:
        ticket = new_ticket("prefill")
        request = both.source.request(ticket, blue)
        request.finish({"kv": table})
        for guess in (prompt(), prompt(tenant_digest("green")), prompt(tenant_digest("")), prompt(b"blue".ljust(32))):
            both.sink.pool.array("kv", 0, "k")[:] = 0
            fetch = both.sink.fetch(ticket, guess, {"kv": [9, 0, 5]})
            with pytest.raises(RemoteError) as refused:
                both.ends(fetch)
            assert refused.value.code is ErrorCode.CONTENT_MISMATCH
            assert not both.sink.pool.array("kv", 0, "k").any()
        _arrives(both, ticket, blue, table)


def _arrives(both: Two, ticket: Any, prompt: Prompt, table: list[int]) -> None:
    fetch = both.sink.fetch(ticket, prompt, {"kv": [9, 0, 5]})
    both.ends(fetch)
    there, here = (rows(pool, pages) for pool, pages in ((filled(PAGES, GEOMETRY), table), (both.sink.pool, [9, 0, 5])))
    assert np.array_equal(there, here)
