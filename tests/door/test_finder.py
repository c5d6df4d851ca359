"""A Finder: who has the longest prefix of a prompt, as sources tell it of pages that come, go, and are gone with their engine."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvproto import Cache, DType, Finder, KvprotoError, Options, Parallel, Pool, Source, Tiers, lay_out
from kvproto.cli.main import main
from kvproto.finder import Held
from kvproto.session.catalogue import SourceCatalogue
from kvproto.session.limits import PING_SILENCE
from kvproto.wire.enums import ErrorCode
from tests.commands import Ran

from .doors import STEPPED, address_in
from .keyed import allow, entry, host

PAGE = 4
NAMES = {"weights.target": "w", "rope.target": "r", "dtype.target": "U8"}
PROMPT = [*range(1, 4 * PAGE + 2)]
"""Four pages and a token."""


class Keeper:
    """A source engine that keeps pages; rank r holds the heads of one of `tp` ranks."""

    def __init__(self, folder: str, name: str = "prefill", tp: int = 1, host: int = 8, **options: Any) -> None:
        """`folder`: the address without the rank."""
        groups = [Cache.gqa("kv", 1, kv_heads=tp, head_dim=4, page=PAGE, dtype=DType.U8)]
        self.tiers, self.sources = [], []
        for rank in range(tp):
            pool = Pool.allocate(lay_out(groups, Parallel(tp=tp)), 6, rank=rank)
            self.tiers.append(Tiers(pool, NAMES, page=PAGE, host=host))
            self.sources.append(Source(name, pool, folder, Options(**(options or {"thread": False}))))
            self.sources[-1].tell(self.tiers[-1])

    def keep(self, tokens: list[int], ranks: tuple[int, ...] = (0,)) -> None:
        """A request that leaves its whole pages on these ranks."""
        for rank in ranks:
            tiers = self.tiers[rank]
            lease = tiers.open(tiers.chain(tokens), -(-len(tokens) // PAGE))
            assert lease is not None
            tiers.step()
            lease.leave(len(tokens))
            tiers.step()
            tiers.drain()
            tiers.step()

    def close(self) -> None:
        for door in (*self.sources, *self.tiers):
            door.close()


class World:
    """Keepers and a Finder without threads."""

    def __init__(self) -> None:
        self.keepers: list[Keeper] = []
        self.finder: Finder | None = None

    def until(self, condition: Any) -> Any:
        assert self.finder is not None
        for _ in range(4000):
            for keeper in self.keepers:
                for source in keeper.sources:
                    source.step(0.0)
            self.finder.step(0.001)
            if found := condition():
                return found
        raise AssertionError("it never came")

    def says(self, *lengths: tuple[str, int, int]) -> list[Held]:
        """Turns until the Finder says so: engine, tokens, and those on the device."""
        assert self.finder is not None
        found: list[Held] = []

        def right() -> bool:
            assert self.finder is not None
            found[:] = self.finder.find(PROMPT)
            return [(held.engine, held.tokens, held.device) for held in found] == [*lengths]

        self.until(right)
        return found


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with ExitStack() as stack:
        yield made
        for keeper in made.keepers:
            stack.callback(keeper.close)
        if made.finder is not None:  # the first to close, while there is somebody to take its Goodbye
            stack.callback(made.finder.close)


def test_the_longest_prefix_comes_first(tmp_path: Path, world: World) -> None:
    """Pages that were there before, pages that come, pages that go to the host, and pages of another prompt."""
    addresses = [address_in(tmp_path, name) for name in ("a", "b")]
    world.keepers = [Keeper(at, at[-1]) for at in addresses]
    world.keepers[0].keep(PROMPT[: 2 * PAGE])
    world.finder = Finder(addresses, options=STEPPED)
    assert world.finder.find(PROMPT) == []
    assert [*world.finder.why()] == addresses
    world.until(lambda: not world.finder.why())  # type: ignore[union-attr]
    world.says(("a", 8, 8), ("b", 0, 0))
    world.keepers[1].keep(PROMPT)
    held = world.says(("b", 16, 16), ("a", 8, 8))
    assert [(each.address, each.replica, each.pages) for each in held] == [(addresses[1], 0, 4), (addresses[0], 0, 2)]
    world.keepers[1].keep([90 + n for n in range(4 * PAGE)])  # six pages on the device: two of the prompt's stay
    world.says(("b", 16, 8), ("a", 8, 8))
    assert [held.tokens for held in world.finder.find(PROMPT[: PAGE - 1])] == [0, 0]
    assert [held.tokens for held in world.finder.find(PROMPT, NAMES | {"dtype.target": "F32"})] == [0, 0]
    assert [held.tokens for held in world.finder.find(PROMPT, NAMES)] == [16, 8]


def test_an_engine_with_tiny_pages_does_not_hold_up_a_router(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long a page is, and how many ranks there are, is what a source says."""
    world.keepers = [Keeper(address_in(tmp_path, "a-{rank}"), "a", tp=2)]
    world.finder = Finder([address_in(tmp_path, "a-0")], options=STEPPED)
    world.keepers[0].keep(PROMPT, ranks=(0, 1))
    world.says(("a", 16, 16))
    monkeypatch.setattr("kvproto.finder._MOST_PAGES", 3)
    assert [held.tokens for held in world.finder.find(PROMPT)] == [12]
    monkeypatch.setattr("kvproto.finder._MOST_LOOKS", 4)
    assert [held.tokens for held in world.finder.find(PROMPT)] == [8]


def test_what_all_ranks_have(tmp_path: Path, world: World) -> None:
    """An engine goes on with the greatest length that all of its ranks have told; one address is enough to find them."""
    world.keepers = [Keeper(address_in(tmp_path, "a-{rank}"), "a", tp=2)]
    world.finder = Finder([address_in(tmp_path, "a-1")], options=STEPPED)
    world.keepers[0].keep(PROMPT[: 3 * PAGE], ranks=(0,))
    world.keepers[0].keep(PROMPT[:PAGE], ranks=(1,))
    assert world.says(("a", 4, 4))[0].pages == 4
    world.keepers[0].keep(PROMPT[: 2 * PAGE], ranks=(1,))
    world.says(("a", 8, 8))


def test_a_kept_that_is_lost_is_noticed(tmp_path: Path, world: World) -> None:
    """KVP-CAT-GAP: the Finder asks for the list again, and knows what it has not heard."""
    world.keepers = [Keeper(address_in(tmp_path, "a"), "a")]
    world.finder = Finder([address_in(tmp_path, "a")], options=STEPPED)
    world.says(("a", 0, 0))
    (session,) = world.keepers[0].sources[0]._node.endpoint.sessions.values()
    part = session.part(SourceCatalogue)
    part._watched = False  # what is told now goes nowhere
    world.keepers[0].keep(PROMPT[: 2 * PAGE])
    world.keepers[0].sources[0].step(0.0)
    part._watched = True
    world.keepers[0].keep([7] * PAGE)
    assert world.says(("a", 8, 8))[0].pages == 3


def test_an_engine_that_starts_again_has_nothing(tmp_path: Path, world: World) -> None:
    at = address_in(tmp_path, "a")
    world.keepers = [Keeper(at, "a")]
    world.finder = Finder([at], options=STEPPED)
    world.keepers[0].keep(PROMPT)
    world.says(("a", 16, 16))
    world.keepers.pop().close()
    world.says()
    assert [*world.finder.why()] == [at]
    world.keepers = [Keeper(at, "a")]
    world.keepers[0].keep(PROMPT[:PAGE])
    (endpoint,) = world.finder._node.endpoints.values()
    endpoint.on_time(time.monotonic() + PING_SILENCE)  # when it greets again
    world.says(("a", 4, 4))


def test_two_listeners_hear_the_same() -> None:
    """One that comes between a change and its step takes nothing from the one before."""
    pool = Pool.allocate(lay_out([Cache.gqa("kv", 1, kv_heads=1, head_dim=4, page=PAGE, dtype=DType.U8)]), 6)
    tiers, first, second = Tiers(pool, NAMES, page=PAGE, host=8), dict[bytes, Any](), dict[bytes, Any]()
    tiers.subscribe(first.update)
    lease = tiers.open(tiers.chain(PROMPT), 5)
    assert lease is not None
    tiers.step()
    lease.leave(len(PROMPT))
    tiers.subscribe(second.update)
    tiers.step()
    assert first == second
    assert len(first) == 4
    tiers.close()


def test_a_source_that_keeps_nothing_is_said_to(tmp_path: Path, world: World) -> None:
    pool = Pool.allocate(lay_out([Cache.gqa("kv", 1, kv_heads=1, head_dim=4, page=PAGE, dtype=DType.U8)]), 6)
    with Source("a", pool, address_in(tmp_path, "a"), STEPPED) as source:
        world.finder = Finder([address_in(tmp_path, "a")], options=STEPPED)

        def refused() -> bool:
            source.step(0.0)
            return "CATALOGUE" in str(world.finder.why())  # type: ignore[union-attr]

        world.until(refused)


def test_addresses_and_use_after_close(tmp_path: Path) -> None:
    with pytest.raises(KvprotoError) as refused:
        Finder(["tcp://127.0.0.1:7000"])
    assert refused.value.path == "sources"
    finder = Finder([address_in(tmp_path, "nobody")], options=STEPPED)
    assert not finder.wait(0.0)
    finder.close()
    with pytest.raises(KvprotoError) as closed:
        finder.find(PROMPT)
    assert closed.value.code is ErrorCode.UNEXPECTED_MESSAGE


def test_the_command_with_keys(tmp_path: Path, ran: Ran) -> None:
    """Over TCP with CURVE, by a router that the allow-list names, and not by another."""
    prefill, router, other = (host(tmp_path, name) for name in ("prefill", "router", "other"))
    allow(prefill, [entry(router, "router")])
    keeper = Keeper("tcp://127.0.0.1:*", "a", keys=prefill.folder)
    keeper.keep(PROMPT)
    at = f"{keeper.sources[0]._node._listener.address}={prefill.public}"
    tokens = tmp_path / "tokens"
    tokens.write_text(",".join(map(str, PROMPT)))
    shared = ["find", at, "--tokens", str(tokens), "--name", "router", "--keys"]
    (held,) = json.loads(ran(*shared, router.folder, "--wait", "20", "--json"))["found"]
    assert (held["engine"], held["tokens"], held["device"], held["pages"]) == ("a", 16, 16, 4)
    assert "a replica 0" in (said := ran(*shared, router.folder, "--wait", "20"))
    assert "16 of 17 tokens, 16 on the device; 4 pages in all" in said
    assert main([*shared, str(other.folder), "--wait", "0.2"]) == 3
    assert "error: " in ran("find", "tcp://127.0.0.1:7000", status=1)
    keeper.close()


def test_an_engine_that_is_reached_by_another_address_is_greeted_once(world: World) -> None:
    """What Welcome says of a rank that is known already may be an address that cannot be reached from here."""
    world.keepers = [Keeper("tcp://127.0.0.1:*", "a", thread=False, insecure=True)]
    address = world.keepers[0].sources[0]._node._listener.address.replace("127.0.0.1", "localhost")
    world.finder = Finder([address], options=Options(thread=False, insecure=True))
    world.keepers[0].keep(PROMPT)
    world.says(("a", 16, 16))
    (endpoint,) = world.finder._node.endpoints.values()
    assert [*endpoint.sessions] == [address]
