"""Faults of storage one by one, which have no test elsewhere; and faults planted in kvproto, which tests must notice."""

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout
from kvproto.planning.plan import Route
from kvproto.tiers import copies, embedded
from kvproto.tiers.embedded import Lmdb
from kvproto.tiers.identity import Chain
from kvproto.tiers.manifest import Data, describe, encode, manifest_key, object_key
from kvproto.tiers.shelf import Shelf
from kvproto.tiers.store import Files, Store
from tests.tiers import test_cache, test_groups, test_storage
from tests.tiers.schedules import LAYOUT, page, schedule
from tests.tiers.stores import opened
from tests.tiers.test_storage import PROMPT, in_child, length

NOBODY = 65534


@pytest.fixture(params=["memory", "files", "nixl", "lmdb", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, tmp_path) as one:
        yield one


def test_a_page_that_goes_between_find_and_read_is_a_miss(store: Store) -> None:
    """Another process gives it up after we have found it; the page before it still comes, and it is written anew."""
    ours = Shelf(store, LAYOUT)
    assert all(ours.write(PROMPT, i, page(PROMPT, i)) for i in range(2))
    assert length(ours) == 2
    for key in [key for key in (*store.keys("m"), *store.keys("o")) if PROMPT.ahead[1].hex() in key]:
        store.delete(key)
    assert ours.read(PROMPT, 0) == page(PROMPT, 0)
    assert ours.read(PROMPT, 1) is None
    assert (ours.counts["missed"], ours.counts["failed"]) == (1, 0)
    assert length(ours) == 1
    assert ours.write(PROMPT, 1, page(PROMPT, 1))
    assert ours.read(PROMPT, 1) == page(PROMPT, 1)


def test_pages_go_while_their_objects_are_read(store: Store) -> None:
    """KVP-TIER-GONE: between the manifest and an object of it."""
    ours = Shelf(store, LAYOUT)
    assert ours.write(PROMPT, 0, page(PROMPT, 0))
    manifest = manifest_key(PROMPT.ahead[0], LAYOUT.geometry)
    real, asked = store.get, list[str]()

    class Evicting:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def get(self, key: str) -> bytes | None:
            asked.append(key)
            if len(asked) == 2:
                for gone in [manifest, *store.keys("o")]:
                    store.delete(gone)
            return real(key)

    ours.store = Evicting()  # type: ignore[assignment]
    assert ours.read(PROMPT, 0) is None
    assert len(asked) == 2
    assert asked[0] == manifest
    assert length(ours) == 0


def test_a_folder_that_can_only_be_read_serves_what_it_has(tmp_path: Path) -> None:
    """The kernel refuses each write; whoever is root becomes nobody first."""
    assert Shelf(Files(tmp_path), LAYOUT).write(PROMPT, 0, page(PROMPT, 0))
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def use() -> None:
        os.chdir(tmp_path)
        if os.getuid() == 0:
            os.setuid(NOBODY)
        shelf = Shelf(Files(Path()), LAYOUT, 1, 1)
        assert shelf.counts["failed"] == 1, "it cannot give up what is above the mark"
        assert shelf.read(PROMPT, 0) == page(PROMPT, 0)
        assert not shelf.write(PROMPT, 1, page(PROMPT, 1))
        assert not shelf.write(PROMPT, 0, page(PROMPT, 0, 1))
        assert shelf.sweep(-1.0) == 0
        assert shelf.read(PROMPT, 0) == page(PROMPT, 0)

    status = in_child(use)
    for path in paths:
        path.chmod(stat.S_IRWXU)
    assert status == 0
    assert Shelf(Files(tmp_path), LAYOUT).read(PROMPT, 0) == page(PROMPT, 0)


@pytest.mark.parametrize("jump", [-1e9, 1e9], ids=["back", "ahead"])
def test_a_clock_that_jumps_never_costs_a_whole_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """What is swept is what no manifest names, too soon or too late, and the page of that writer is a miss at worst."""
    store = Lmdb(tmp_path)
    shelf = Shelf(store, LAYOUT)
    assert shelf.write(PROMPT, 0, page(PROMPT, 0))
    manifest = describe(LAYOUT, PROMPT, 1, page(PROMPT, 1))
    for component in manifest.components:  # a writer that is not done yet
        store.put(object_key(manifest, component), page(PROMPT, 1)[component.group])
    now = time.time()
    monkeypatch.setattr(embedded.time, "time", lambda: now + jump)
    assert shelf.sweep() == (3 if jump > 0 else 0)
    store.put(manifest_key(manifest.id, manifest.geometry), encode(manifest))
    assert shelf.read(PROMPT, 0) == page(PROMPT, 0)
    assert shelf.read(PROMPT, 1) == (None if jump > 0 else page(PROMPT, 1))
    assert shelf.write(PROMPT, 1, page(PROMPT, 1))
    assert shelf.read(PROMPT, 1) == page(PROMPT, 1)


def manifest_first(shelf: Shelf, pages: Sequence[tuple[Chain, int, Mapping[int, Data]]]) -> bool:
    """`Shelf._write` in the wrong order."""
    with shelf._failing():
        for chain, i, data in pages:
            manifest = describe(shelf.layout, chain, i, data)
            shelf.store.put(manifest_key(manifest.id, manifest.geometry), encode(manifest))
            shelf._note(manifest)
            for component in manifest.components:
                shelf.store.put(object_key(manifest, component), data[component.group])
        return True
    return False


def test_a_manifest_that_is_written_first_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shelf, "_write", manifest_first)
    with pytest.raises(AssertionError):
        test_storage.test_manifests_are_written_last_and_deleted_first()
    with pytest.raises(AssertionError):
        test_storage.test_a_writer_that_is_killed_leaves_a_page_or_none(tmp_path / "one", before=True)
    with pytest.raises(AssertionError):
        test_groups.test_a_writer_of_several_pages_that_is_killed_leaves_whole_ones(tmp_path / "some", before=True)


def test_digests_that_are_not_checked_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules find the wrong bytes."""

    def unchecked(shelf: Shelf, chain: Chain, i: int, groups: object = None) -> dict[int, bytes] | None:
        with shelf._failing():
            if known := shelf._take(chain, i):
                held = known.manifest.components
                return {c.group: shelf.store.get(object_key(known.manifest, c)) or b"" for c in held}
        return None

    monkeypatch.setattr(Shelf, "read", unchecked)
    with opened("memory") as store, pytest.raises(AssertionError, match="a wrong byte"):
        deque((schedule(seed, store) for seed in range(100)), 0)


def without_draft(routes: tuple[Route, ...], source: RankLayout, sink: RankLayout) -> Pair:
    """A copy that leaves the draft's group out."""
    return Pair(tuple(route for route in routes if route.group != 1), source, sink)


def shifted(routes: tuple[Route, ...], source: RankLayout, sink: RankLayout) -> Pair:
    """A copy that takes each column of the sink's draft for the next one."""
    columns = attrs.evolve(sink.columns[1], offset=np.roll(sink.columns[1].offset, 1))
    return Pair(routes, source, attrs.evolve(sink, columns={**sink.columns, 1: columns}))


@pytest.mark.parametrize(
    "to_host_and_back",
    [(without_draft, Pair), (Pair, without_draft), (without_draft, without_draft), (shifted, Pair), (Pair, shifted)],
)
def test_a_copy_that_is_wrong_about_the_draft_is_noticed(
    monkeypatch: pytest.MonkeyPatch, to_host_and_back: tuple[Callable[..., Pair], ...]
) -> None:
    made = iter(to_host_and_back)
    monkeypatch.setattr(copies, "Pair", lambda *given: next(made)(*given))
    with pytest.raises(AssertionError):
        test_cache.test_pages_come_back_from_the_host_as_they_were({})
