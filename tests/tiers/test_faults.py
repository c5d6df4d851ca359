"""Faults of storage one by one, which have no test elsewhere; and faults planted in kvproto, which tests must notice."""

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvproto import Cache as Group
from kvproto import DType, Parallel, lay_out
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout
from kvproto.planning.plan import Route
from kvproto.tiers import host_copies, pack_store
from kvproto.tiers.file_store import FileStore
from kvproto.tiers.manifest import Data, make_manifest, manifest_key, object_key
from kvproto.tiers.pack_store import PackStore
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import page_layout
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.relayout import RelayoutReader
from kvproto.tiers.store import Store
from kvproto.wire import encode_struct
from tests.tiers import test_cache, test_groups, test_storage
from tests.tiers.schedules import LAYOUT, Kind, Memory, page, prompt, schedule, stored, sweep
from tests.tiers.stores import opened
from tests.tiers.test_storage import PROMPT, in_child, length

NOBODY = 65534


@pytest.fixture(params=["memory", "files", "packs", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, tmp_path) as one:
        yield one


def test_a_page_that_goes_between_find_and_read_is_a_miss(store: Store) -> None:
    """Another process gives it up after we have found it; the page before it still comes, and it is written anew."""
    ours = PageStore(store, LAYOUT)
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
    ours = PageStore(store, LAYOUT)
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


@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_a_folder_that_can_only_be_read_serves_what_it_has(tmp_path: Path, kind: Kind) -> None:
    """The kernel refuses each write; whoever is root becomes nobody first."""
    assert PageStore(kind(tmp_path), LAYOUT).write(PROMPT, 0, page(PROMPT, 0))
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def use() -> None:
        os.chdir(tmp_path)
        if os.getuid() == 0:
            os.setuid(NOBODY)
        page_store = PageStore(kind(Path()), LAYOUT, 1, 1)
        assert page_store.counts["failed"] == 1, "it cannot give up what is above the mark"
        assert page_store.read(PROMPT, 0) == page(PROMPT, 0)
        assert not page_store.write(PROMPT, 1, page(PROMPT, 1))
        assert not page_store.write(PROMPT, 0, page(PROMPT, 0, 1))
        assert sweep(page_store.store, -1.0) == 0
        assert page_store.read(PROMPT, 0) == page(PROMPT, 0)

    status = in_child(use)
    for path in paths:
        path.chmod(stat.S_IRWXU)
    assert status == 0
    assert PageStore(kind(tmp_path), LAYOUT).read(PROMPT, 0) == page(PROMPT, 0)


@pytest.mark.parametrize("jump", [-1e9, 1e9], ids=["back", "ahead"])
@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_a_clock_that_jumps_never_costs_a_whole_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float, kind: Kind
) -> None:
    """What is swept is what no manifest names, too soon or too late, and the page of that writer is a miss at worst."""
    store = kind(tmp_path)
    page_store = PageStore(store, LAYOUT)
    assert page_store.write(PROMPT, 0, page(PROMPT, 0))
    manifest = make_manifest(LAYOUT, PROMPT, 1, page(PROMPT, 1))
    for component in manifest.components:  # a writer that is not done yet
        store.put(object_key(manifest, component), page(PROMPT, 1)[component.group])
    now = time.time()
    if kind is not FileStore:
        monkeypatch.setattr(pack_store.time, "time", lambda: now + jump)
    else:  # the file system's clock is another now than when these were written
        for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
            os.utime(path, (now - jump, now - jump))
    assert sweep(page_store.store) == (3 if jump > 0 else 0)
    store.put(manifest_key(manifest.id, manifest.geometry), encode_struct(manifest))
    assert page_store.read(PROMPT, 0) == page(PROMPT, 0)
    assert page_store.read(PROMPT, 1) == (None if jump > 0 else page(PROMPT, 1))
    assert page_store.write(PROMPT, 1, page(PROMPT, 1))
    assert page_store.read(PROMPT, 1) == page(PROMPT, 1)


def test_what_is_given_up_does_not_depend_on_the_times_of_files(tmp_path: Path) -> None:
    """The order is that of use in this process, whatever the clock of the file system says of writing and reading."""
    chains = [prompt(n, n, n) for n in range(4)]
    size = sum(part.length for part in LAYOUT.components)
    page_store = PageStore(FileStore(tmp_path), LAYOUT, 2 * size, 3 * size)
    for n, chain in enumerate(chains[:3]):
        assert page_store.write(chain, 0, page(chain, 0))
        for path in [path for path in tmp_path.rglob(f"{chain.ahead[0].hex()}*") if path.is_file()]:
            os.utime(path, (1e9 * (3 - n), 1e9 * (3 - n)))
    assert page_store.read(chains[0], 0)
    assert page_store.write(chains[3], 0, page(chains[3], 0))
    assert [page_store.read(chain, 0) is not None for chain in chains] == [True, False, False, True]


OLDER = {
    "wider heads": ([Group.gqa("target", 4, kv_heads=4, head_dim=4, page=4)], 4),
    "fewer layers": ([Group.gqa("target", 3, kv_heads=4, head_dim=3, page=4)], 4),
    "another type": ([Group.gqa("target", 4, kv_heads=4, head_dim=3, page=4, dtype=DType.F32)], 4),
    "another kind": ([Group.mla("target", 4, latent=20, rope=4, page=4)], 4),
    "without its draft": ([Group.gqa("target", 4, kv_heads=4, head_dim=3, page=4)], 8),
}
"""What wrote an engine before it was changed, and tokens of its pages; a draft is added to all but the last."""


@pytest.mark.parametrize("name", OLDER)
def test_pages_of_an_older_geometry_are_never_taken_for_ours(name: str) -> None:
    """By digest, nor as those of an engine of another size; and both go on to write and read their own."""
    draft = Group.gqa("draft", 1, kv_heads=2, head_dim=2, page=4, model=1)
    caches, size = OLDER[name]
    older = lay_out(caches if name == "without its draft" else [*caches, draft], Parallel())
    newer = lay_out([Group.gqa("target", 4, kv_heads=4, head_dim=3, page=4), draft], Parallel())
    store, chain = Memory(), Chain(bytes(32), size)
    chain.extend(range(33))
    layouts = [page_layout(older, 0, size), page_layout(newer, 0, size)]
    assert layouts[0].geometry != layouts[1].geometry
    old, new = (PageStore(store, layout) for layout in layouts)
    data = [{p.group: bytes((k + 1,)) * p.length for p in layout.components} for k, layout in enumerate(layouts)]
    for geometry, layout in zip((older, newer), layouts, strict=True):
        RelayoutReader(store, geometry, 0, layout).publish_geometry()
    assert all(old.write(chain, i, data[0]) for i in range(2))
    assert new.read(chain, 0) is None
    assert length_of(new, chain) == 0
    assert RelayoutReader(store, newer, 0, layouts[1]).read(chain, 0) == []
    assert new.write(chain, 0, data[1])
    assert (new.read(chain, 0), old.read(chain, 0), old.read(chain, 1)) == (data[1], data[0], data[0])
    key = manifest_key(chain.own[1], layouts[1].geometry)  # one that says to be ours
    store.put(key, store.get(manifest_key(chain.own[1], layouts[0].geometry)) or b"")
    assert new.read(chain, 1) is None
    assert length_of(new, chain) == 1


def length_of(page_store: PageStore, chain: Chain) -> int:
    return stored(page_store, chain)


def manifest_first(page_store: PageStore, pages: Sequence[tuple[Chain, int, Mapping[int, Data]]]) -> bool:
    """`PageStore._write` in the wrong order."""
    with page_store._counting_failures():
        for chain, i, data in pages:
            manifest = make_manifest(page_store.layout, chain, i, data)
            page_store.store.put(manifest_key(manifest.id, manifest.geometry), encode_struct(manifest))
            page_store._note(manifest)
            for component in manifest.components:
                page_store.store.put(object_key(manifest, component), data[component.group])
        return True
    return False


def forked(work: Callable[..., None], *given: object) -> int:
    return os.waitstatus_to_exitcode(in_child(partial(work, *given)))


def test_a_manifest_that_is_written_first_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageStore, "_write", manifest_first)
    for module in (test_storage, test_groups):  # forks of this process, which has the fault
        monkeypatch.setattr(module, "in_process", forked)
    with pytest.raises(AssertionError):
        test_storage.test_manifests_are_written_last_and_deleted_first()
    with pytest.raises(AssertionError):
        test_storage.test_a_writer_that_is_killed_leaves_a_page_or_none(tmp_path / "one", before=True)
    with pytest.raises(AssertionError):
        test_groups.test_a_writer_of_several_pages_that_is_killed_leaves_whole_ones(tmp_path / "some", before=True)


def test_digests_that_are_not_checked_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules find the wrong bytes."""

    def unchecked(page_store: PageStore, chain: Chain, i: int, buffers: object = None) -> dict[int, bytes] | None:
        with page_store._counting_failures():
            if manifest := page_store._manifest(chain, i):
                held = manifest.components
                return {c.group: page_store.store.get(object_key(manifest, c)) or b"" for c in held}
        return None

    monkeypatch.setattr(PageStore, "read", unchecked)
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
    monkeypatch.setattr(host_copies, "Pair", lambda *given: next(made)(*given))
    with pytest.raises(AssertionError):
        test_cache.test_pages_come_back_from_the_host_as_they_were({})
