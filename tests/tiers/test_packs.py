"""Packs: what is special to files that hold many keys."""

import errno
import itertools
import os
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

import kvproto.tiers.pack_store
from kvproto.tiers.fsck import check_store
from kvproto.tiers.pack_store import PackFile, PackStore
from kvproto.tiers.page_store import PageStore
from tests.processes import imported
from tests.tiers.schedules import LAYOUT, page, prompt, stored, sweep
from tests.tiers.test_storage import PAGE_BYTES, PROMPT, die_at, in_child, in_process

imported(__name__)

LONG = prompt(*range(9))
LATER = 0x7 << 60
"""A number that no pack of ours has."""


def packs(root: Path) -> list[Path]:
    return sorted((root / "p").iterdir())


def write_until(step: int, before: bool, root: Path) -> None:
    """Three pages, unless it is killed at this call."""
    page_store = PageStore(PackStore(root, durable=True), LAYOUT)
    die_at(step, before)
    page_store.write_all([(LONG, i, page(LONG, i, 1)) for i in range(3)])


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_writer_that_is_killed_leaves_all_of_a_pack_or_nothing(tmp_path: Path, before: bool) -> None:
    """KVP-TIER-LAST: at every system call, with a page in it that replaces another; then all is written again."""
    kept = []
    for step in range(1, 100):
        root = tmp_path / f"{step}"
        assert PageStore(PackStore(root), LAYOUT).write(LONG, 0, page(LONG, 0))
        status = in_process(write_until, step, before, root)
        after = PageStore(PackStore(root), LAYOUT)
        kept.append(stored(after, LONG))
        whole = [page(LONG, i, 1) for i in range(3)]
        assert [after.read(LONG, i) for i in range(3)] == (whole if kept[-1] == 3 else [page(LONG, 0), None, None])
        assert after.write_all([(LONG, i, page(LONG, i)) for i in range(3)]) == [True] * 3
        sweep(after.store, -1.0)
        found = check_store(PackStore(root), verify=True)
        assert (len(found.pages), found.damaged, found.orphans, found.unfinished) == (3, [], {}, {})
        assert len(packs(root)) == 1
        if not status:
            break
        assert status == -signal.SIGKILL
    assert len(kept) == 1 + 13 + 3 + 1 + 1, (
        "open, write, fsync, name, fsync the folder, delete the former manifest; nothing"
    )
    assert kept == sorted(kept)
    assert {*kept} == {1, 3}


def changed(whole: bytes) -> Iterator[bytes]:
    """With one bit flipped, cut short, and longer."""
    for at in (*range(0, len(whole), 4), *range(len(whole) - 64, len(whole))):
        yield whole[:at] + bytes((whole[at] ^ 1 << at % 8,)) + whole[at + 1 :]
    yield from (whole[:at] for at in range(0, len(whole), 31))
    yield whole + b"\0"


def test_a_changed_byte_of_a_pack_is_a_miss_or_of_no_matter(tmp_path: Path) -> None:
    """KVP-TIER-CHECK, KVP-TIER-REWRITE: whoever has the pack open, and whoever opens it; the other pack serves on."""
    lost = 0
    first = PageStore(PackStore(tmp_path), LAYOUT)
    assert first.write(PROMPT, 0, page(PROMPT, 0))
    whole = packs(tmp_path)[0].read_bytes()
    for some in changed(whole):
        shutil.rmtree(tmp_path)
        ours = PageStore(PackStore(tmp_path), LAYOUT)
        assert ours.write(PROMPT, 0, page(PROMPT, 0))
        assert ours.write(LONG, 0, page(LONG, 0))
        packs(tmp_path)[0].write_bytes(some)
        for page_store in (ours, PageStore(PackStore(tmp_path), LAYOUT)):
            got = page_store.read(PROMPT, 0)
            assert got in (None, page(PROMPT, 0))
            lost += got is None
            assert page_store.read(LONG, 0) == page(LONG, 0)
        assert ours.counts["failed"] == 0
        assert ours.write(PROMPT, 0, page(PROMPT, 0))
        assert PageStore(PackStore(tmp_path), LAYOUT).read(PROMPT, 0) == page(PROMPT, 0)
    assert lost > len(whole) / 4


@pytest.mark.parametrize(
    "index", [[["o/a", -1], ["o/b", 4]], [[1, 3]], [["o/a", "3"]], [["o/a"]], [3], 3, {"o/a": 3}, [["o/a", 2.5]]]
)
def test_an_index_that_lies_is_no_pack(tmp_path: Path, index: object) -> None:
    """It is found where unfinished packs are, and the rest serves on."""
    store, lie = PackStore(tmp_path), msgpack.packb(index)
    store.put("o/a", b"whole")
    count = len(index) if isinstance(index, list | dict) else 1
    tail = struct.pack("<QId8s", 3, count, 0.0, b"kvpack1\n")
    (tmp_path / "p/0ffffffffffffffe.00000000").write_bytes(b"abc" + lie + b"\1" * count + tail)
    other = PackStore(tmp_path)
    assert other.get("o/a") == b"whole"
    assert [*other.keys("o")] == ["o/a"]
    assert [*other.keys("t")] == ["t/0ffffffffffffffe.00000000"]
    assert other.size("t/0ffffffffffffffe.00000000")
    assert other.age("t/0ffffffffffffffe.00000000") > -2.0
    other.delete("t/0ffffffffffffffe.00000000")
    assert [*other.keys("t")] == []


def test_the_latest_pack_counts_and_former_ones_are_emptied(tmp_path: Path) -> None:
    """Two writers at once have made two packs with the same keys; who deletes or writes a key leaves one at most."""
    store = PackStore(tmp_path)
    store.put_all([("o/a", b"1"), ("o/b", b"2"), ("o/a", b"3")])
    assert (store.get("o/a"), store.get("o/b")) == (b"3", b"2")
    (one,) = packs(tmp_path)
    shutil.copy(one, one.with_name(f"{LATER:016x}.00000000"))
    for reader in (store, PackStore(tmp_path)):
        assert sorted(reader.keys("o")) == ["o/a", "o/b"]
        assert reader.get("o/b") == b"2"
    store.delete("o/a")
    assert PackStore(tmp_path).get("o/a") is None
    store.put("o/b", b"4")
    assert [path.name[:16] for path in packs(tmp_path)] == [f"{LATER + 1:016x}"]
    assert PackStore(tmp_path).get("o/b") == b"4"


def test_no_writer_deletes_what_it_has_written_itself(tmp_path: Path) -> None:
    """However others have emptied the folder meanwhile, and whatever this process knew of it."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    for n in range(3):
        theirs.put(f"o/x{n}", b"x")
    theirs.put_all([("o/a", b"1"), ("o/b", b"2")])
    assert ours.get("o/a") == b"1"
    theirs.delete("o/a")
    ours.delete("o/b")
    for n in range(3):
        ours.delete(f"o/x{n}")
    for store in (ours, PackStore(tmp_path), theirs):
        store.put("o/a", b"3")
        assert [each.get("o/a") for each in (ours, theirs, PackStore(tmp_path))] == [b"3"] * 3


def test_a_folder_that_was_emptied_and_filled_again_loses_nothing(tmp_path: Path) -> None:
    """New packs have lower numbers than those that another process still knows."""
    reader = PackStore(tmp_path)
    for _ in range(2):
        writer = PackStore(tmp_path)
        for n in range(20):
            writer.put(f"o/{n}", b"%d" % n)
        assert len([*reader.keys("o")]) == 20
        for n in range(20):
            writer.delete(f"o/{n}")
        writer = PackStore(tmp_path)
        for n in reversed(range(20)):
            writer.put(f"o/{n}", b"%d" % n)
        assert [reader.get(f"o/{n}") for n in range(20)] == [b"%d" % n for n in range(20)]
        assert len([*PackStore(tmp_path).keys("o")]) == 20


def test_a_page_that_is_written_anew_while_it_is_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reader has from the former pack is not taken for damage of the new one."""
    writer, reader = PageStore(PackStore(tmp_path), LAYOUT), PageStore(PackStore(tmp_path), LAYOUT)
    assert writer.write(LONG, 0, page(LONG, 0))
    real, calls = PackFile.read_into, itertools.count()

    def read_into(self: PackFile, *args: Any) -> int:
        if next(calls) % 2:
            assert writer.write(LONG, 0, page(LONG, 0))
        return real(self, *args)

    monkeypatch.setattr(PackFile, "read_into", read_into)
    for _ in range(5):
        assert reader.read(LONG, 0) == page(LONG, 0)
    assert (reader.counts["damaged"], reader.counts["missed"]) == (0, 0)


def test_what_is_no_pack_of_ours_is_left_alone(tmp_path: Path) -> None:
    """Others' files, a folder, a pipe, a link, a later version, and what may not be read: the rest serves on."""
    store = PackStore(tmp_path)
    store.put("o/a", b"1")
    (one,) = packs(tmp_path)
    whole, places = one.read_bytes(), [one.with_name(f"7{n:015x}.{n:08x}") for n in range(5)]
    places[0].mkdir()
    os.mkfifo(places[1])
    places[2].symlink_to(one)
    places[3].write_bytes(whole[:-2] + b"2\n")
    places[4].write_bytes(whole)
    shutil.copy(one, one.with_name("copy"))
    shutil.copy(one, one.with_name(f"{1 << 64:x}.00000000"))
    kept = packs(tmp_path)
    for each in (store, PackStore(tmp_path)):
        assert each.get("o/a") == b"1"
        assert each.get("o/other") is None
        each.put("o/b", b"2")
        assert sorted(each.keys("o")) == ["o/a", "o/b"]
        each.put("o/a", b"3")
        assert [reader.get("o/a") for reader in (store, PackStore(tmp_path))] == [b"3", b"3"]
        each.put("o/a", b"1")
    assert {*kept} - {*packs(tmp_path)} <= {one, places[4]}
    (tmp_path / "t/folder").mkdir()
    assert [*store.keys("t")] == []


def test_a_pack_that_is_not_to_be_read_costs_no_other(tmp_path: Path) -> None:
    """Whoever is root becomes nobody first."""
    writer = PackStore(tmp_path)
    for n in range(3):
        writer.put(f"o/{n}", b"%d" % n)
    packs(tmp_path)[1].chmod(0)
    tmp_path.chmod(0o777)
    for folder in ("p", "t"):
        (tmp_path / folder).chmod(0o777)

    def use() -> None:
        os.chdir(tmp_path)
        if os.getuid() == 0:
            os.setuid(65534)
        store = PackStore(Path())
        assert [store.get(f"o/{n}") for n in range(3)] == [b"0", None, b"2"]
        store.put("o/1", b"new")
        assert sorted(store.keys("o")) == ["o/0", "o/1", "o/2"]

    assert in_child(use) == 0


def test_a_lack_of_descriptors_is_an_error_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been listed until then is not listed twice, and what another writes afterwards is found, and stays."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    for n in range(4):
        theirs.put(f"o/{n}", b"%d" % n)
    real, left = os.open, 2

    def open_(path: str, *args: Any, **named: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EMFILE, "a fault")
        return real(path, *args, **named)

    with monkeypatch.context() as lacking:
        lacking.setattr(os, "open", open_)
        with pytest.raises(OSError, match="a fault"):
            ours.get("o/0")
    for n in range(4):
        theirs.delete(f"o/{n}")
        theirs.put(f"o/{n}", b"new")
    assert [ours.get(f"o/{n}") for n in range(4)] == [b"new"] * 4
    assert sorted(ours.keys("o")) == sorted(PackStore(tmp_path).keys("o")) == [f"o/{n}" for n in range(4)]


def test_a_forked_process_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    store = PackStore(tmp_path)
    store.put("o/a", b"1")
    with store._lock:  # as a thread of the parent has it at that moment
        assert in_child(lambda: store.put("o/b", store.get("o/a") or b"")) == 0
    assert store.get("o/b") == b"1"


@pytest.mark.parametrize("step", [1, 2])
def test_a_deleter_that_is_killed_leaves_no_pack_for_ever(tmp_path: Path, step: int) -> None:
    """Between its mark, and the end of a pack that has no other key."""
    store = PackStore(tmp_path)
    store.put("o/a", b"1")

    def delete() -> None:
        store.get("o/a")
        die_at(step, step == 2)
        store.delete("o/a")

    assert in_child(delete) == signal.SIGKILL
    assert len(packs(tmp_path)) == 1
    assert PackStore(tmp_path).get("o/a") is None
    assert packs(tmp_path) == []
    store.put_all([])
    assert packs(tmp_path) == [*store.keys("t")] == []


def test_a_deleted_page_does_not_come_back(tmp_path: Path) -> None:
    """Its writer was killed before it had emptied the former pack."""
    store = PackStore(tmp_path)
    store.put("o/a", b"old")

    def write() -> None:
        assert store.get("o/a") == b"old"
        die_at(4, False)
        store.put("o/a", b"new")

    assert in_child(write) == signal.SIGKILL
    assert len(packs(tmp_path)) == 2
    for each in (PackStore(tmp_path), store):
        assert [*each.keys("o")] == ["o/a"]
        assert each.get("o/a") == b"new"
    store.delete("o/a")
    assert packs(tmp_path) == []


def test_changes_of_a_folder_whose_time_stands_still_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may count in seconds: a miss lists again after a while."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    os.utime(tmp_path / "p", (1, 1))
    assert ours.get("o/a") is None
    theirs.put("o/a", b"1")
    os.utime(tmp_path / "p", (1, 1))
    monkeypatch.setattr(kvproto.tiers.pack_store, "_RELIST", 0.0)
    assert ours.get("o/a") == b"1"


def test_what_another_writes_is_found_at_once(tmp_path: Path) -> None:
    """However close the two are in time, and although the folder was listed a moment before."""
    ours, theirs = PackStore(tmp_path), PackStore(tmp_path)
    for n in range(200):
        assert ours.get(f"o/{n}") is None
        theirs.put(f"o/{n}", b"%d" % n)
        assert ours.get(f"o/{n}") == b"%d" % n
        if n % 3 == 0:
            theirs.delete(f"o/{n}")
            assert ours.get(f"o/{n}") is None
    assert len([*ours.keys("o")]) == 200 - 67


def test_evicted_pages_give_back_their_space(tmp_path: Path) -> None:
    """Where the file system has holes, at once; and a pack goes with its last key."""
    size = 1 << 20
    store = PackStore(tmp_path)
    store.put_all([(f"o/{n}", bytes([n + 1]) * size) for n in range(4)])
    (one,) = packs(tmp_path)
    os.sync()
    for n in (0, 2):
        store.delete(f"o/{n}")
    os.sync()
    assert one.stat().st_blocks * 512 < 3 * size, "this file system has no holes"
    for n in range(4):
        assert PackStore(tmp_path).get(f"o/{n}") == (None if n in (0, 2) else bytes([n + 1]) * size)
    for n in (1, 3):
        store.delete(f"o/{n}")
    assert packs(tmp_path) == []


def test_pages_are_evicted_from_the_middle_of_packs(tmp_path: Path) -> None:
    """What is held of a group stays, and what was given up comes from no reader."""
    page_store = PageStore(PackStore(tmp_path), LAYOUT, 2 * PAGE_BYTES, 4 * PAGE_BYTES)
    assert page_store.write_all([(LONG, i, page(LONG, i)) for i in range(4)]) == [True] * 4
    assert page_store.read(LONG, 1) == page(LONG, 1)
    other = prompt(7, 7, 7)
    assert page_store.write(other, 0, page(other, 0))
    later = PageStore(PackStore(tmp_path), LAYOUT)
    assert later.bytes == page_store.bytes == 2 * PAGE_BYTES
    assert [later.read(LONG, i) for i in range(4)] == [None, page(LONG, 1), None, None]
    assert later.read(other, 0) == page(other, 0)


def test_more_packs_than_are_held_open(tmp_path: Path) -> None:
    """Descriptors do not grow with packs."""
    store = PackStore(tmp_path)
    for n in range(100):
        store.put(f"o/{n}", b"%d" % n)
    held = len(os.listdir("/proc/self/fd"))
    for n in range(100):
        assert store.get(f"o/{n}") == b"%d" % n
    assert len(os.listdir("/proc/self/fd")) <= held + 40


def test_a_key_is_listed_whose_latest_pack_has_given_it_up(tmp_path: Path) -> None:
    """Two wrote it at once, and the later of the two packs lost it: else its objects would be swept as nobody's."""
    store = PackStore(tmp_path)
    store.put_all([("m/a", b"1"), ("m/b", b"2")])
    (one,) = packs(tmp_path)
    shutil.copy(one, one.with_name(f"{LATER:016x}.00000000"))
    assert sorted(store.keys("m")) == ["m/a", "m/b"]
    store._delete_from(f"{LATER:016x}.00000000", "m/a")
    assert sorted(store.keys("m")) == ["m/a", "m/b"]
    assert store.get("m/a") == b"1"
