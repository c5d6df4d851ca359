"""Several processes over one folder, a disk that is full at every write of a group, and manifests that lie."""

import errno
import os
from pathlib import Path

import attrs
import pytest

from kvproto.tiers.file_store import FileStore
from kvproto.tiers.fsck import GRACE, check_store, prune
from kvproto.tiers.manifest import make_manifest, manifest_key
from kvproto.tiers.pack_store import PackStore
from kvproto.tiers.page_store import PageStore
from kvproto.wire import encode_struct
from tests.processes import imported
from tests.tiers.schedules import LAYOUT, Kind, Memory, page, prompt
from tests.tiers.test_storage import PAGE_BYTES, PROMPT, in_process, length

imported(__name__)


@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_pages_are_pruned_while_two_processes_write_and_evict(tmp_path: Path, kind: Kind) -> None:
    """What comes is right throughout; nothing that the writers still need is deleted, and at the end all is whole."""
    chain = prompt(*range(9))
    pids = []
    for writer in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            page_store = PageStore(kind(tmp_path, durable=bool(writer)), LAYOUT, 2 * PAGE_BYTES, 3 * PAGE_BYTES)
            kept = [
                page_store.write_all([(chain, i, page(chain, i, writer)) for i in range(turn % 3, 4)])
                for turn in range(40)
            ]
            os._exit(0 if all(map(all, kept)) and not page_store.counts["failed"] else 1)
    store, left = kind(tmp_path), {*pids}
    while left:
        for pid in [pid for pid in left if (ended := os.waitpid(pid, os.WNOHANG))[0]]:
            assert ended[1] == 0, "no write failed"
            left.remove(pid)
        found = check_store(store, verify=True)
        prune(store, found, GRACE, verify=True)
        for i in range(4):
            got = PageStore(store, LAYOUT, scan=False).read(chain, i)
            assert got is None or got in [page(chain, i, writer) for writer in range(2)]
    prune(store, check_store(store, verify=True), -10.0, verify=True)
    last = check_store(store, verify=True)
    assert (last.damaged, last.orphans, last.unfinished) == ([], {}, {})
    page_store = PageStore(store, LAYOUT)
    assert page_store.write_all([(chain, i, page(chain, i)) for i in range(4)]) == [True] * 4
    assert [page_store.read(chain, i) for i in range(4)] == [page(chain, i) for i in range(4)]


def test_a_page_that_is_evicted_while_it_is_looked_at_is_not_damaged() -> None:
    """Before its manifest is read, and before each of its objects is."""
    for at in range(len(LAYOUT.components) + 1):
        store = Leaving(at)
        assert PageStore(store, LAYOUT).write(PROMPT, 0, page(PROMPT, 0))
        found = check_store(store)
        assert store.data == {}
        assert (found.pages, found.damaged) == ([], [])


class Leaving(Memory):
    """A back end whose only page is evicted when so many sizes have been asked for."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def size(self, key: str) -> int | None:
        self.left -= 1
        if self.left < 0:
            self.data.clear()
        return super().size(key)


def room_for(files: int) -> None:
    """From now on the disk of this process has room for so many files, and half of one more."""
    used, write, unlink = 0, os.write, os.unlink

    def written(file: int, data: memoryview) -> int:
        nonlocal used
        if used > files:
            raise OSError(errno.ENOSPC, "a fault")
        used += 1
        return write(file, data if used <= files else data[: len(data) // 2])

    def deleted(path: str) -> None:
        nonlocal used
        unlink(path)
        used -= 1

    os.write, os.unlink = written, deleted  # type: ignore[assignment]


def fill(root: Path, durable: bool, room: int) -> None:
    """Four pages, on a disk that has room for so many files."""
    chain, files = prompt(*range(9)), 1 + len(LAYOUT.components)
    page_store = PageStore(FileStore(root, durable), LAYOUT)
    room_for(room)
    kept = page_store.write_all([(chain, i, page(chain, i)) for i in range(4)])
    assert kept == [i < room // files for i in range(4)]
    assert [page_store.read(chain, i) for i in range(4)] == [page(chain, i) if kept[i] else None for i in range(4)]
    assert bool(page_store.counts["failed"]) == (not all(kept))


@pytest.mark.parametrize("durable", [False, True])
def test_a_disk_that_is_full_in_the_middle_of_a_group(tmp_path: Path, durable: bool) -> None:
    """At each write of four pages: half files are deleted, and the pages that there is room for are kept."""
    files = 1 + len(LAYOUT.components)

    for room in range(4 * files + 1):
        root = tmp_path / f"{room}"
        assert in_process(fill, root, durable, room) == 0, f"room for {room} files"
        found = check_store(FileStore(root), verify=True)
        assert (len(found.pages), found.damaged, found.orphans, found.unfinished) == (room // files, [], {}, {})


@pytest.mark.parametrize("ours", [True, False], ids=["our geometry", "another geometry"])
def test_a_manifest_whose_lengths_are_wrong_costs_no_other_page(tmp_path: Path, ours: bool) -> None:
    """It names as many bytes as a store never has; nothing is evicted for it."""
    page_store, store = PageStore(FileStore(tmp_path), LAYOUT), FileStore(tmp_path)
    assert all(page_store.write(PROMPT, i, page(PROMPT, i)) for i in range(2))
    other = prompt(7, 7, 7)
    right = make_manifest(LAYOUT if ours else attrs.evolve(LAYOUT, geometry=b"\1" * 32), other, 0, page(other, 0))
    wrong = attrs.evolve(right, components=tuple(attrs.evolve(c, length=1 << 50) for c in right.components))
    store.put(manifest_key(wrong.id, wrong.geometry), encode_struct(wrong))
    later = PageStore(store, LAYOUT, 2 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert (later.bytes, later.counts["evicted"]) == (2 * PAGE_BYTES, 0)
    assert length(later) == 2
