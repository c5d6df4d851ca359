"""A loss of power before any call of a writer, with any part of what was not synced."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproto.tiers.file_store import FileStore
from kvproto.tiers.fsck import check_store, prune
from kvproto.tiers.pack_store import PackStore
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.store import Store
from tests.tiers.power import Disk
from tests.tiers.schedules import LAYOUT, Kind, page, prompt

PAGES = 4
CHAIN = prompt(*range(9))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "disk").mkdir()
    made = Disk(tmp_path / "disk")
    yield made
    made.close()


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "not durable"])
@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_power_is_lost_at_any_time(tmp_path: Path, disk: Disk, kind: Kind, durable: bool) -> None:
    """What comes is right, with `durable` all that was stored comes, and the folder can be used and cleaned."""
    rng, root, after = random.Random(1), tmp_path / "disk" / "new" / "folder", tmp_path / "after"
    stored: dict[int, set[int]] = {}
    """Versions of a page that may come, by page; of those in `must` one has to come."""
    must: set[int] = set()
    lost = came = 0

    def lose() -> None:
        nonlocal lost, came
        shutil.rmtree(after, ignore_errors=True)
        disk.lost(rng, after)
        page_store = PageStore(kind(after / "new" / "folder"), LAYOUT)
        for i in range(PAGES):
            got = page_store.read(CHAIN, i)
            assert got is None or got in [page(CHAIN, i, version) for version in stored.get(i, ())], "a wrong byte"
            lost, came = lost + (got is None), came + (got is not None)
            assert not (durable and i in must and got is None), f"page {i} was stored, and is lost"
        assert page_store.write(CHAIN, 0, page(CHAIN, 0, 9))
        assert page_store.read(CHAIN, 0) == page(CHAIN, 0, 9)
        prune(page_store.store, check_store(page_store.store, verify=True), -10.0, verify=True)
        left = check_store(page_store.store, verify=True)
        assert (left.damaged, left.orphans, left.unfinished) == ([], {}, {})

    with disk.watched(lose):
        page_store = PageStore(kind(root, durable), LAYOUT)
        for turn in range(8):
            some = sorted(rng.sample(range(PAGES), rng.randrange(1, PAGES)))
            for i in some:
                stored.setdefault(i, set()).add(turn // 3)
            assert page_store.write_all([(CHAIN, i, page(CHAIN, i, turn // 3)) for i in some]) == [True] * len(some)
            must.update(some)
            if turn % 3 == 2:
                must.discard(some[0])
                give_up(page_store.store, some[0])
    assert lost
    assert came


def give_up(store: Store, i: int) -> None:
    """As eviction does."""
    for key in [key for kind in ("m", "o") for key in store.keys(kind)]:
        if CHAIN.own[i].hex() in key or CHAIN.ahead[i].hex() in key:
            store.delete(key)
