"""Pages that are written together: one sync for all of them, and still a page or none wherever the writer dies."""

import os
import signal
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from threading import Event

import pytest

from kvproto.errors import LocalError
from kvproto.tiers import page_store
from kvproto.tiers.file_store import FileStore
from kvproto.tiers.manifest import Data
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.workers import Workers
from kvproto.wire.messages import Manifest
from tests.processes import imported
from tests.tiers.schedules import LAYOUT, Memory, page, prompt
from tests.tiers.test_storage import die_at, in_process

imported(__name__)


def write_until(step: int, before: bool, root: Path, chain: Chain) -> None:
    """Three pages, unless it is killed at this call."""
    page_store = PageStore(FileStore(root, durable=True), LAYOUT)
    die_at(step, before)
    assert page_store.write_all([(chain, i, page(chain, i, 1)) for i in range(3)]) == [True] * 3


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_writer_of_several_pages_that_is_killed_leaves_whole_ones(tmp_path: Path, before: bool) -> None:
    """KVP-TIER-LAST: at every system call of a group, whose manifests come after all objects."""
    chain, kept, objects = prompt(*range(9)), [], []
    for step in range(1, 200):
        root = tmp_path / f"{step}"
        FileStore(root)
        status = in_process(write_until, step, before, root, chain)
        assert status in (0, -signal.SIGKILL)
        after = PageStore(FileStore(root), LAYOUT)
        there = [after.read(chain, i) for i in range(3)]
        assert all(each in (None, page(chain, i, 1)) for i, each in enumerate(there))
        assert after.counts["damaged"] == 0
        kept.append(3 - there.count(None))
        objects.append(len([*after.store.keys("o")]))
        assert after.write_all([(chain, i, page(chain, i)) for i in range(3)]) == [True] * 3
        assert [after.read(chain, i) for i in range(3)] == [page(chain, i) for i in range(3)]
        if not status:
            break
    assert kept == sorted(kept)
    assert {*kept} == {0, 1, 2, 3}
    assert all(count == 9 for count, pages in zip(objects, kept, strict=True) if pages), "no manifest before an object"


def test_a_group_shares_what_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync for each file, and one for each folder: of objects once all have their names, then of manifests."""
    store, synced, chain = FileStore(tmp_path, durable=True), list[str](), prompt(*range(9))
    for folder in ((tmp_path / kind / f"{n:02x}") for kind in "om" for n in range(256)):
        folder.mkdir()
        store._folders.add(str(folder))
    real = os.fsync

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append("file" if path.parent.name == "t" else path.parent.name)
        if synced[-1] != "file":
            assert not [*(tmp_path / "t").iterdir()] or synced[-1] == "o", "objects have their names before manifests"
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert PageStore(store, LAYOUT).write_all([(chain, i, page(chain, i)) for i in range(3)]) == [True] * 3
    folders = len({id.hex()[:2] for id in chain.ahead[:3]})
    assert synced == ["file"] * 12 + ["o"] * folders + ["m"] * folders


def test_a_page_that_cannot_be_written_costs_no_other_of_its_group(tmp_path: Path) -> None:
    """The folder of one page's manifest takes nothing."""
    chain = prompt(*range(9))
    page_store = PageStore(FileStore(tmp_path, durable=True), LAYOUT)
    (tmp_path / "m" / chain.ahead[1].hex()[:2]).write_bytes(b"")
    assert page_store.write_all([(chain, i, page(chain, i)) for i in range(3)]) == [True, False, True]
    assert [page_store.read(chain, i) for i in (0, 2)] == [page(chain, i) for i in (0, 2)]
    assert page_store.counts["failed"] == 2, "the group, and the page by itself"
    assert not [*(tmp_path / "t").iterdir()]


def test_the_disk_works_while_the_next_page_of_a_group_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of a page are computed once the page before it has been written, and its syncs have been asked for."""
    chain, order, real = prompt(*range(9)), list[str](), os.write
    described = page_store.make_manifest

    def make_manifest(
        layout: PageLayout, of: Chain, i: int, data: Mapping[int, Data], key: bytes | None = None
    ) -> Manifest:
        order.append(f"digests of {i}")
        return described(layout, of, i, data, key)

    def write(file: int, data: memoryview) -> int:
        order.append("written")
        return real(file, data)

    monkeypatch.setattr(page_store, "make_manifest", make_manifest)
    monkeypatch.setattr(os, "write", write)
    store = PageStore(FileStore(tmp_path, durable=True), LAYOUT)
    assert store.write_all([(chain, i, page(chain, i)) for i in range(3)]) == [True] * 3
    each = [step for i in range(3) for step in (f"digests of {i}", *["written"] * len(LAYOUT.components))]
    assert order == [*each, *["written"] * 3], "manifests are the last"


def test_a_page_of_the_wrong_size_leaves_nothing_of_its_group(tmp_path: Path) -> None:
    """It is noticed when the pages before it are on their way."""
    chain = prompt(*range(9))
    with pytest.raises(LocalError, match=r"data\[1\]"):
        PageStore(FileStore(tmp_path, durable=True), LAYOUT).write_all(
            [(chain, 0, page(chain, 0)), (chain, 1, page(chain, 1) | {1: b""})]
        )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class Waiting(Memory):
    """A back end that keeps groups; the first waits until it is told to go on."""

    batch = 4

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.begun, self.go_on = Event(), Event()

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        pairs = [*pairs]
        self.sizes.append(sum(key.startswith("m") for key, _ in pairs))
        self.begun.set()
        self.go_on.wait()
        for key, data in pairs:
            self.put(key, data)


def test_pages_that_wait_are_written_together_whatever_their_prompts() -> None:
    """Four at most; a page that nothing waits behind is written at once."""
    store, chains = Waiting(), [prompt(n, n, n, n, n) for n in range(3)]
    page_store = PageStore(store, LAYOUT)
    workers = Workers(1, inf, 100)
    first = workers.gather(page_store.write_all, (chains[0], 0, page(chains[0], 0)), store.batch)
    store.begun.wait()
    rest = [workers.gather(page_store.write_all, (c, i, page(c, i)), store.batch) for c in chains for i in range(2)]
    store.go_on.set()
    assert first.result()
    assert all(each.result() for each in rest)
    assert store.sizes == [1, 4, 2]
    assert all(page_store.read(c, i) == page(c, i) for c in chains for i in range(2))
    workers.close(1.0)
