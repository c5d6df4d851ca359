"""Pages in files and in other back ends: killed writers, full disks, changed bytes, two writers, little room."""

import os
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import attrs
import pytest

from kvproto.errors import LocalError
from kvproto.tiers.file_store import FileStore
from kvproto.tiers.fsck import check_store
from kvproto.tiers.manifest import make_manifest, manifest_key, object_key
from kvproto.tiers.pack_store import PackStore
from kvproto.tiers.page_store import BufferPool, PageStore
from kvproto.tiers.store import LONGEST
from kvproto.wire import encode_struct
from tests.processes import FORKED, imported
from tests.tiers.schedules import LAYOUT, Kind, Memory, page, prompt, schedule, stored, sweep
from tests.tiers.stores import opened

imported(__name__)

PROMPT = prompt(1, 2, 3, 4, 5)
PAGE_BYTES = sum(part.length for part in LAYOUT.components)


class Recording(Memory):
    """A back end that tells what was done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def put(self, key: str, data: Any) -> None:
        self.calls.append(("put", key[0]))
        super().put(key, data)

    def delete(self, key: str) -> None:
        self.calls.append(("delete", key[0]))
        super().delete(key)


def length(page_store: PageStore) -> int:
    return stored(page_store, PROMPT)


def in_process(work: Callable[..., None], *given: Any) -> int | None:
    """How a process ends that does this work: 0, or minus a signal.

    It is forked from the server of all tests, which is smaller than this process: some tests need a hundred.
    """
    process = FORKED.Process(target=work, args=given)
    process.start()
    process.join()
    return process.exitcode


def in_child(work: Callable[[], None]) -> int:
    """The wait status of a fork of this process that does this work."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def die_at(step: int, before: bool) -> None:
    """Kill this process at its nth system call that changes files; `before`: a write has written half by then."""
    done = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal done
            with one:
                done += 1
                if done == step and before:
                    if real is write:
                        real(args[0], args[1][: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                made = real(*args, **named)
                if done == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return made

        return call

    one, write, opened = Lock(), os.write, counted(os.open)

    def open_(path: str, flags: int, *args: Any, **named: Any) -> int:
        return (opened if flags & os.O_CREAT else real_open)(path, flags, *args, **named)

    real_open, os.open = os.open, open_  # type: ignore[assignment]
    for name in ("write", "pwrite", "mkdir", "replace", "fsync", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def write_until(step: int, before: bool, root: Path) -> None:
    """A page, unless it is killed at this call."""
    page_store = PageStore(FileStore(root, durable=True), LAYOUT)
    die_at(step, before)
    page_store.write(PROMPT, 1, page(PROMPT, 1, 1))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_writer_that_is_killed_leaves_a_page_or_none(tmp_path: Path, before: bool) -> None:
    """KVP-TIER-LAST: at every system call of a write, and a page that is there comes whole."""
    kept = []
    for step in range(1, 100):
        root = tmp_path / f"{step}"
        page_store = PageStore(FileStore(root), LAYOUT)
        assert page_store.write(PROMPT, 0, page(PROMPT, 0))
        status = in_process(write_until, step, before, root)
        assert status in (0, -signal.SIGKILL)
        after = PageStore(FileStore(root), LAYOUT)
        kept.append(length(after))
        assert after.read(PROMPT, 0) == page(PROMPT, 0)
        assert after.read(PROMPT, 1) == (page(PROMPT, 1, 1) if kept[-1] == 2 else None)
        assert after.write(PROMPT, 1, page(PROMPT, 1))
        assert after.read(PROMPT, 1) == page(PROMPT, 1)
        sweep(after.store, -1.0)
        assert len([*after.store.keys("o"), *after.store.keys("t")]) == 6
        if not status:
            break
    calls = 4 * 3 + (1 + 3 + 2) + (1 + 1 + 2)
    assert len(kept) == calls + 1, (
        "open, write and fsync four files; make a folder, name files, fsync it and its parent"
    )
    assert kept == sorted(kept)
    assert {*kept} == {1, 2}


@pytest.mark.parametrize("name", ["m", "o"])
def test_every_changed_byte_is_a_miss_and_is_mended(tmp_path: Path, name: str) -> None:
    """KVP-TIER-CHECK, KVP-TIER-REWRITE."""
    page_store = PageStore(FileStore(tmp_path), LAYOUT)
    assert page_store.write(PROMPT, 0, page(PROMPT, 0))
    for file in [path for path in (tmp_path / name).rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        changes = [
            whole[:at] + bytes((whole[at] ^ 1 << at % 8,)) + whole[at + 1 :]
            for at in range(0, len(whole), 1 if name == "o" else 3)
        ]
        for changed in [*changes, *(whole[:at] for at in range(0, len(whole), 32)), whole + b"\0"]:
            file.write_bytes(changed)
            assert page_store.read(PROMPT, 0) is None
            assert length(page_store) == 0
            assert page_store.write(PROMPT, 0, page(PROMPT, 0))
            assert page_store.read(PROMPT, 0) == page(PROMPT, 0)


def test_an_object_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    page_store, other = (PageStore(FileStore(tmp_path), LAYOUT) for _ in range(2))
    assert page_store.write(PROMPT, 0, page(PROMPT, 0))
    assert other.read(PROMPT, 0) == page(PROMPT, 0)
    next(path for path in (tmp_path / "o").rglob("*") if path.is_file()).unlink()
    assert other.read(PROMPT, 0) is None
    assert PageStore(FileStore(tmp_path), LAYOUT).counts["missed"] == 0
    assert length(other) == 0


@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_a_disk_that_is_full_keeps_what_it_has(tmp_path: Path, kind: Kind) -> None:
    """The kernel lets files grow to ten bytes, which tears a write in the middle."""
    assert PageStore(kind(tmp_path), LAYOUT).write(PROMPT, 0, page(PROMPT, 0))

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        page_store = PageStore(kind(tmp_path), LAYOUT)
        assert not page_store.write(PROMPT, 1, page(PROMPT, 1))
        assert page_store.counts["failed"] == 1
        assert page_store.read(PROMPT, 0) == page(PROMPT, 0)

    assert in_child(write) == 0
    assert not [*(tmp_path / "t").iterdir()]
    assert length(PageStore(kind(tmp_path), LAYOUT)) == 1


@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_a_folder_that_takes_nothing_costs_hits_and_nothing_else(tmp_path: Path, kind: Kind) -> None:
    page_store = PageStore(kind(tmp_path), LAYOUT)
    assert page_store.write(PROMPT, 0, page(PROMPT, 0))
    (tmp_path / "t").rmdir()
    (tmp_path / "t").write_bytes(b"")
    assert not page_store.write(PROMPT, 1, page(PROMPT, 1))
    assert page_store.read(PROMPT, 0) == page(PROMPT, 0)


@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_two_writers_and_a_reader_of_one_folder(tmp_path: Path, kind: Kind) -> None:
    """Each page that comes is all one writer's, while both write and give up the same pages."""
    pids = []
    for writer in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            page_store = PageStore(kind(tmp_path), LAYOUT, PAGE_BYTES, PAGE_BYTES + writer)
            for turn in range(150):
                page_store.write(PROMPT, turn % 2, page(PROMPT, turn % 2, writer))
            os._exit(0)
    reader, came, left = PageStore(kind(tmp_path), LAYOUT), 0, [*pids]
    while left:
        for i in range(2):
            got = reader.read(PROMPT, i)
            assert got is None or got in [page(PROMPT, i, writer) for writer in range(2)]
            came += got is not None
        left = [pid for pid in left if not os.waitpid(pid, os.WNOHANG)[0]]
    assert came
    last = PageStore(kind(tmp_path), LAYOUT)
    assert all(last.write(PROMPT, i, page(PROMPT, i)) for i in range(2))
    assert [last.read(PROMPT, i) for i in range(2)] == [page(PROMPT, i) for i in range(2)]


def test_manifests_are_written_last_and_deleted_first() -> None:
    """KVP-TIER-LAST, KVP-TIER-GONE."""
    store = Recording()
    page_store = PageStore(store, LAYOUT, 0, PAGE_BYTES)
    page_store.write(PROMPT, 0, page(PROMPT, 0))
    assert store.calls == [("put", "o")] * 3 + [("put", "m")]
    page_store.write(PROMPT, 1, page(PROMPT, 1))
    assert store.calls[8:] == [("delete", "m"), *[("delete", "o")] * 3] * 2


@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_pages_that_were_not_used_for_longest_are_evicted(tmp_path: Path, kind: Kind) -> None:
    others = [prompt(n, n, n) for n in range(10, 14)]
    page_store = PageStore(kind(tmp_path), LAYOUT, 2 * PAGE_BYTES, 3 * PAGE_BYTES)
    for other in others[:3]:
        page_store.write(other, 0, page(other, 0))
    assert page_store.read(others[1], 0)
    page_store.write(others[3], 0, page(others[3], 0))
    assert [stored(page_store, other) for other in others] == [0, 1, 0, 1]
    assert page_store.bytes == 2 * PAGE_BYTES
    assert page_store.counts["evicted"] == 2
    assert PageStore(kind(tmp_path), LAYOUT).bytes == page_store.bytes


def test_some_components_of_a_page() -> None:
    page_store = PageStore(Memory(), LAYOUT)
    data = page(PROMPT, 0)
    page_store.write(PROMPT, 0, {0: data[0], 1: data[1]})
    assert page_store.read(PROMPT, 0) == {0: data[0], 1: data[1]}


def test_pages_of_another_geometry_are_beside_ours() -> None:
    store = Memory()
    other = PageStore(store, type(LAYOUT)(LAYOUT.page, b"\1" * 32, LAYOUT.components))
    ours = PageStore(store, LAYOUT)
    assert other.write(PROMPT, 0, page(PROMPT, 0, 1))
    assert ours.read(PROMPT, 0) is None
    assert ours.write(PROMPT, 0, page(PROMPT, 0))
    assert other.read(PROMPT, 0) == page(PROMPT, 0, 1)


def test_what_no_manifest_names_is_swept_once_it_is_old(tmp_path: Path) -> None:
    files = FileStore(tmp_path)
    page_store = PageStore(files, LAYOUT)
    page_store.write(PROMPT, 0, page(PROMPT, 0))
    files.delete(manifest_key(PROMPT.ahead[0], LAYOUT.geometry))
    page_store.write(PROMPT, 1, page(PROMPT, 1))
    assert sweep(page_store.store) == 0
    for path in (tmp_path / "o").rglob("*"):
        os.utime(path, (0, 0))
    assert sweep(page_store.store) == 3
    assert page_store.read(PROMPT, 1) == page(PROMPT, 1)


def test_marks_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(LocalError, match="low"):
        PageStore(Memory(), LAYOUT, 2, 1)


@pytest.mark.parametrize(("kind", "count"), [("memory", 100), ("files", 50), ("packs", 50), ("objects", 50), ("s3", 2)])
def test_schedules_of_faults(kind: str, count: int, tmp_path: Path) -> None:
    met = Counter[str]()
    with opened(kind, tmp_path) as store:
        for seed in range(count):
            met += schedule(seed, store)
    assert met["pages read"]
    assert met["groups written"]
    assert any(name.startswith("put") for name in met)


@pytest.mark.parametrize("kind", [FileStore, PackStore])
def test_threads_share_a_page_store(tmp_path: Path, kind: Kind) -> None:
    """They write, read and give up the same pages; what comes is whole, and every byte is counted once."""
    page_store = PageStore(kind(tmp_path), LAYOUT, PAGE_BYTES, 3 * PAGE_BYTES)
    prompts = [prompt(n, n, n) for n in range(5)]

    def turn(n: int) -> bool:
        chain = prompts[n % 5]
        written, read = page_store.write(chain, 0, page(chain, 0, n % 2)), page_store.read(chain, 0)
        assert read in [None, page(chain, 0), page(chain, 0, 1)]
        return written

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(turn, range(200)))
    assert page_store.counts["written"] == 200
    left = sum(stored(page_store, chain) for chain in prompts)  # a page that was written while it was evicted is a miss
    assert page_store.bytes == PAGE_BYTES * left <= 3 * PAGE_BYTES


def test_manifests_that_cannot_be_listed_make_no_object_nobodys(tmp_path: Path) -> None:
    page_store = PageStore(FileStore(tmp_path), LAYOUT)
    assert page_store.write(PROMPT, 0, page(PROMPT, 0))
    (tmp_path / "m").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        check_store(page_store.store)
    assert sweep(page_store.store, -1.0) == 0
    (tmp_path / "away").rename(tmp_path / "m")
    assert page_store.read(PROMPT, 0) == page(PROMPT, 0)


def test_an_object_that_became_longer_is_not_read(tmp_path: Path) -> None:
    """KVP-TIER-CHECK: a file of a terabyte without a block is a miss, and costs no memory."""
    page_store = PageStore(FileStore(tmp_path), LAYOUT)
    assert page_store.write(PROMPT, 0, page(PROMPT, 0))
    for path in (tmp_path / "o").rglob("*.*"):
        os.truncate(path, 1 << 40)
    for buffers in (BufferPool(LAYOUT).take(), None):
        assert page_store.read(PROMPT, 0, buffers) is None
    manifest = make_manifest(LAYOUT, PROMPT, 1, page(PROMPT, 1))
    long = attrs.evolve(manifest, components=tuple(attrs.evolve(c, length=1 << 40) for c in manifest.components))
    page_store.store.put(manifest_key(long.id, long.geometry), encode_struct(long))
    for component in long.components:
        page_store.store.put(object_key(long, component), b"")
        os.truncate(page_store.store._path(object_key(long, component)), 1 << 40)  # type: ignore[attr-defined]
    assert "more than any page" in check_store(page_store.store, verify=True).damaged[-1].why


def test_what_is_too_long_for_a_manifest_is_not_read() -> None:
    """KVP-TIER-MISS: neither by whoever lists pages nor by whoever looks for one; the page is written anew."""

    class Watched(Memory):
        def get(self, key: str) -> bytes | None:
            data = super().get(key)
            assert data is None or len(data) <= LONGEST
            return data

    store, key = Watched(), manifest_key(PROMPT.ahead[0], LAYOUT.geometry)
    store.put(key, bytes(LONGEST + 1))
    page_store = PageStore(store, LAYOUT)
    assert page_store.read(PROMPT, 0) is None
    assert length(page_store) == 0
    assert [each.key for each in check_store(store).damaged] == [key]
    assert page_store.write(PROMPT, 0, page(PROMPT, 0))
    assert page_store.read(PROMPT, 0) == page(PROMPT, 0)
