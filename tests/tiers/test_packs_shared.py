"""Packs while others write, delete and replace them, and packs that are not to be read for a moment."""

import errno
import itertools
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvproto.tiers.pack_store
from kvproto.tiers.fsck import check_store, prune
from kvproto.tiers.manifest import manifest_key
from kvproto.tiers.pack_store import PackFile, PackStore
from kvproto.tiers.page_store import PageStore
from tests.tiers.schedules import LAYOUT, page, sweep
from tests.tiers.test_packs import packs
from tests.tiers.test_storage import PROMPT, in_child

MANIFEST = manifest_key(PROMPT.ahead[0], LAYOUT.geometry)


def test_objects_that_are_written_again_while_they_are_swept_stay(tmp_path: Path) -> None:
    """A page was half deleted long ago; its writer stores it again after we have seen its objects, and did not know."""
    half = PageStore(PackStore(tmp_path), LAYOUT)
    assert half.write(PROMPT, 0, page(PROMPT, 0))
    half.store.delete(MANIFEST)
    writer, sweeper = PageStore(PackStore(tmp_path), LAYOUT, scan=False), PackStore(tmp_path)
    found, real = check_store(sweeper), sweeper.age

    def age(key: str) -> float:
        if not writer.counts["written"]:
            assert writer.write(PROMPT, 0, page(PROMPT, 0))
        return real(key)

    sweeper.age = age  # type: ignore[method-assign]
    assert prune(sweeper, found, -10.0) == (0, len(LAYOUT.components))
    assert PageStore(PackStore(tmp_path), LAYOUT).read(PROMPT, 0) == page(PROMPT, 0)


@pytest.mark.parametrize("knows", [False, True], ids=["unseen", "seen"])
def test_a_page_that_is_mended_while_its_damage_is_found_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    """KVP-TIER-REWRITE: the reader has seen the old pack, and the new one has its name when the old one is deleted."""
    assert PageStore(PackStore(tmp_path), LAYOUT).write(PROMPT, 0, page(PROMPT, 0))
    (one,) = packs(tmp_path)
    whole = one.read_bytes()
    one.write_bytes(bytes((whole[0] ^ 1,)) + whole[1:])
    reader, writer = (
        PageStore(PackStore(tmp_path), LAYOUT),
        PageStore(PackStore(tmp_path, durable=True), LAYOUT, scan=False),
    )
    real, reads = PackFile.read_into, 0

    def read_into(self: PackFile, *args: Any) -> int:
        nonlocal reads
        reads += 1
        if reads == 2:  # the first object
            monkeypatch.setattr(kvproto.tiers.pack_store, "sync_folder", lambda folder: None)
            assert writer.write(PROMPT, 0, page(PROMPT, 0))
            if knows:
                assert reader.store.get("o/another") is None
        return real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(PackFile, "read_into", read_into)
        reader.read(PROMPT, 0)
    assert PageStore(PackStore(tmp_path), LAYOUT).read(PROMPT, 0) == page(PROMPT, 0)
    assert reader.read(PROMPT, 0) == page(PROMPT, 0)


def test_eviction_finds_a_page_that_another_has_written_again(tmp_path: Path) -> None:
    """We knew only a pack that has gone since."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    ours.put("o/a", b"1")
    assert theirs.get("o/a") == b"1"
    theirs.put("o/a", b"2")
    ours.delete("o/a")
    assert packs(tmp_path) == []


def test_keys_that_move_to_another_pack_while_they_are_listed_are_listed(tmp_path: Path) -> None:
    """Else a whole page would look like objects of nobody."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    for n in range(4):
        theirs.put(f"m/{n}", b"1")

    def listed() -> Iterator[str]:
        for key in ours.keys("m"):
            yield key
            for n in range(4):
                theirs.put(f"m/{n}", b"2")

    assert sorted(listed()) == ["m/0", "m/1", "m/2", "m/3"]


def test_the_last_writer_counts_whatever_it_knew_of_others(tmp_path: Path) -> None:
    """The last writer of a page decides which components it has."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    for n in range(5):
        theirs.put(f"o/{n}", b"theirs")
    ours.put("o/4", b"ours")
    assert [each.get("o/4") for each in (ours, PackStore(tmp_path))] == [b"ours"] * 2
    assert sorted(theirs.keys("o")) == [f"o/{n}" for n in range(5)]
    assert theirs.get("o/4") == b"ours"


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_pack_that_is_not_to_be_read_for_a_moment_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A disk or a network file system may fail once: that costs nobody the pack for as long as the process lives."""
    PackStore(tmp_path).put("o/a", b"1")
    ours, real = PackStore(tmp_path), os.pread

    def fails(*args: Any) -> bytes:
        raise OSError(code, "a fault")

    with monkeypatch.context() as failing:
        failing.setattr(os, "pread", fails)
        assert ours.get("o/a") is None
    assert os.pread is real
    monkeypatch.setattr(kvproto.tiers.pack_store, "_RELIST", 0.0)
    assert ours.get("o/a") == b"1"
    assert [*ours.keys("o")] == ["o/a"]


@pytest.mark.parametrize(
    "keys", [["o/" + "x" * 5000], ["o/a", *("o/" + f"{n}" * 4090 for n in range(10))], ["o/a"] * (1 << 13)]
)
def test_keys_that_no_reader_would_take_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """They would be lost after they had been said to be kept."""
    monkeypatch.setattr("kvproto.tiers.pack_store._LONGEST_INDEX", 1 << 15)
    store = PackStore(tmp_path)
    store.put("o/a", b"1")
    with pytest.raises(OSError, match="keys in") as caught:
        store.put_all((key, b"2") for key in keys)
    assert caught.value.errno == errno.EFBIG
    assert [*store.keys("o"), *store.keys("t")] == ["o/a"]
    assert [each.get("o/a") for each in (store, PackStore(tmp_path))] == [b"1"] * 2


def test_small_objects_give_back_their_space(tmp_path: Path) -> None:
    """Each lies in blocks that it shares with its neighbours; those that stay are whole."""
    store, data = PackStore(tmp_path), [os.urandom(3000) for _ in range(64)]
    store.put_all([(f"o/{n}", data[n]) for n in range(64)])
    (one,) = packs(tmp_path)
    os.sync()
    gone = [n for n in range(64) if n not in (7, 8, 40)]
    for n in (*gone[::3], *gone[1::3], *gone[2::3]):
        store.delete(f"o/{n}")
    os.sync()
    assert one.stat().st_blocks * 512 < 64 * 3000 / 3, "this file system has no holes"
    for each in (store, PackStore(tmp_path)):
        assert [each.get(f"o/{n}") for n in range(64)] == [None if n in gone else data[n] for n in range(64)]


def test_a_pack_that_was_replaced_under_its_name_is_deleted_from(tmp_path: Path) -> None:
    """As by somebody who restores a copy; no byte of another file is marked, and no deletion is lost."""
    store = PackStore(tmp_path)
    store.put_all([("o/a", b"1"), ("o/b", b"2")])
    (one,) = packs(tmp_path)
    assert store.get("o/a") == b"1"
    copy = shutil.copy(one, tmp_path / "copy")
    os.replace(copy, one)
    store.delete("o/a")
    for each in (store, PackStore(tmp_path)):
        assert (each.get("o/a"), each.get("o/b")) == (None, b"2")
    PackStore(tmp_path / "other").put_all([("o/b", b"3"), ("o/a", b"4")])
    (other,) = packs(tmp_path / "other")
    os.replace(other, one)
    store.delete("o/a")
    for each in (store, PackStore(tmp_path)):
        assert (each.get("o/a"), each.get("o/b")) == (None, b"3")


def test_a_deletion_that_failed_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a key in two packs; nothing comes to light afterwards."""
    store = PackStore(tmp_path)
    store.put_all([("o/a", b"1"), ("o/b", b"1")])
    (one,) = packs(tmp_path)
    shutil.copy(one, one.with_name("0000000000000001.00000000"))
    assert sorted(store.keys("o")) == ["o/a", "o/b"]

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, "a fault")

    with monkeypatch.context() as failing:
        failing.setattr(os, "pwrite", fails)
        with pytest.raises(OSError, match="a fault"):
            store.delete("o/a")
    store.delete("o/a")
    for each in (store, PackStore(tmp_path)):
        assert each.get("o/a") is None
        assert sorted(each.keys("o")) == ["o/b"]


def test_a_change_that_our_own_hides_is_found(tmp_path: Path) -> None:
    """We name a pack right after another did, so that the time of the folder is ours."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    for n in range(100):
        theirs.put(f"o/{n}", b"%d" % n)
        ours.put(f"m/{n}", b"")
        assert ours.get(f"o/{n}") == b"%d" % n


def test_a_pack_that_has_gone_is_not_kept_open(tmp_path: Path) -> None:
    """Its space would be held for as long as we have no other use for its descriptor."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    theirs.put("o/a", b"1")
    assert ours.get("o/a") == b"1"
    held = len(os.listdir("/proc/self/fd"))
    theirs.delete("o/a")
    assert ours.get("o/a") is None
    assert len(os.listdir("/proc/self/fd")) == held - 1
    assert len(ours._open) == len(theirs._open) == 0


@pytest.mark.parametrize("stamp", [float("nan"), float("inf"), float("-inf")])
def test_a_pack_whose_time_is_no_number_is_none(tmp_path: Path, stamp: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its age would be none either, so that nobody could sweep it."""
    monkeypatch.setattr("time.time", lambda: stamp)
    PackStore(tmp_path).put("o/a", b"1")
    monkeypatch.undo()
    store = PackStore(tmp_path)
    assert store.get("o/a") is None
    assert len([*store.keys("t")]) == 1
    assert sweep(store, -1.0) == 1


def test_deletions_of_others_cost_one_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each pack that has gone, nor the packs that are still there opened again."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    for n in range(50):
        theirs.put(f"o/{n}", b"1")
    assert len([*ours.keys("o")]) == 50
    for n in range(0, 50, 2):
        theirs.delete(f"o/{n}")
    calls, real, opened = [0, 0], os.listdir, PackFile.__init__

    def listdir(path: str) -> list[str]:
        calls[0] += 1
        return real(path)

    def opening(self: PackFile, path: str) -> None:
        calls[1] += 1
        opened(self, path)

    ours.get("o/none")
    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(PackFile, "__init__", opening)
    theirs.delete("o/1")
    calls[1] = 0
    assert ours.get("o/none") is None
    assert calls[0] <= 2
    assert calls[1] == 0


def test_former_packs_are_emptied_only_after_the_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power could undo the name of the new pack, and keep what was done to the old one."""
    store = PackStore(tmp_path, durable=True)
    store.put("o/a", b"old")
    steps, real = list[str](), (os.fsync, os.replace, os.pwrite, os.unlink)

    def noting(name: str, call: Any) -> Any:
        def made(*args: Any) -> Any:
            steps.append(name)
            return call(*args)

        return made

    for name, call in zip(("fsync", "replace", "pwrite", "unlink"), real, strict=True):
        monkeypatch.setattr(os, name, noting(name, call))
    store.put("o/a", b"new")
    assert steps == ["fsync", "replace", "fsync", "pwrite", "unlink"]


def allow(spare: int) -> None:
    """Let this process open so many files more; which numbers it uses has holes."""
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
    limit = next(itertools.islice((n for n in itertools.count() if n not in used), spare, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


PACKS = 40
"""More than a store holds open."""


@pytest.mark.parametrize("spare", [2, 3, 4, 5, 6, 7, 8, 9, 13, 20, 31, 32, 33])
def test_packs_that_are_held_open_leave_a_descriptor(in_memory: Path, spare: int) -> None:
    """A process that may open few files more reads, writes, deletes and lists, instead of failing for good."""

    def use() -> None:
        writer = PackStore(in_memory, durable=True)
        for n in range(PACKS):
            writer.put(f"o/{n}", b"%d" % n)
        store = PackStore(in_memory, durable=True)
        assert store.get("o/0") == b"0"
        allow(spare)
        for n in range(PACKS):
            assert store.get(f"o/{n}") == b"%d" % n
            store.put(f"m/{n}", b"%d" % n)
            store.delete(f"o/{n}")
        for end in range(PACKS):  # so that each call meets a table that is full
            assert [store.get(f"m/{n}") for n in range(end)] == [b"%d" % n for n in range(end)]
            assert [*store.keys("o")] == [*store.keys("t")] == []
            assert store.get("o/none") is None

    assert in_child(use) == 0
