"""What every back end promises, and what is special to object stores."""

import itertools
import random
import socket
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGKILL
from time import monotonic

import msgpack
import pytest

from kvproto.errors import LocalError
from kvproto.tiers.file_store import FileStore
from kvproto.tiers.fsck import check_store, prune
from kvproto.tiers.manifest import manifest_key
from kvproto.tiers.object_store import ObjectStore
from kvproto.tiers.pack_store import PackStore
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.store import IntoStore, Store, open_store
from tests.processes import FORKED, imported
from tests.tiers.schedules import LAYOUT, page, prompt, sweep
from tests.tiers.stores import BUCKET, KEYS, STORES, opened, server

imported(__name__)

PROMPT = prompt(1, 2, 3, 4, 5)
NAMES = [f"{kind}/{i:02}{'ab' * 31}.{'cd' * 32}" for kind in ("m", "o") for i in range(3)]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, tmp_path) as made:
        yield made


def test_bytes_are_kept_under_keys(store: Store) -> None:
    name = NAMES[0]
    assert (store.get(name), store.size(name), store.age(name) if not hasattr(store, "data") else 0.0) == (
        None,
        None,
        0,
    )
    for data in (b"abc", bytearray(b"defg"), memoryview(b"xhijkly")[1:-1], b""):
        store.put(name, data)
        assert (store.get(name), store.size(name)) == (bytes(data), len(data))
    assert store.age(name) > -2.0
    store.delete(name)
    store.delete(name)
    assert store.get(name) is None


def test_bytes_are_read_into_memory_that_is_there(store: Store) -> None:
    """All that there are, and no more than there is room for."""
    if not isinstance(store, IntoStore):
        pytest.skip("it makes the memory itself")
    assert store.get_into(NAMES[0], memoryview(bytearray(4))) is None
    store.put(NAMES[0], b"abcd")
    for size, there in ((4, b"abcd"), (6, b"abcd\0\0")):
        room = bytearray(size)
        assert store.get_into(NAMES[0], memoryview(room)) == 4
        assert room == there
    held = bytearray(b"......")
    assert (store.get_into(NAMES[0], memoryview(held)[1:4]) or 0) > 3
    assert (held[:1], held[4:]) == (b".", b"..")


def test_keys_are_listed_by_kind(store: Store) -> None:
    for name in NAMES:
        store.put(name, b"1")
    assert sorted(store.keys("m")) == NAMES[:3]
    assert sorted(store.keys("o")) == NAMES[3:]
    for name in store.keys("o"):
        store.delete(name)
    assert [*store.keys("o")] == [*store.keys("t")] == []


def test_pages_of_a_later_version_are_left_alone(store: Store) -> None:
    """KVP-TIER-NEWER: a field that we do not know; and a damaged page beside it goes."""
    page_store = PageStore(store, LAYOUT)
    for i in range(2):
        assert page_store.write(PROMPT, i, page(PROMPT, i))
    newer, damaged = (manifest_key(id, LAYOUT.geometry) for id in PROMPT.ahead)
    fields = msgpack.unpackb(store.get(newer) or b"", strict_map_key=False)
    store.put(newer, msgpack.packb({**fields, 0x3FFF: 1}))
    store.put(damaged, b"\x81")
    found = check_store(store, verify=True)
    assert (found.newer, [each.key for each in found.damaged], len(found.orphans)) == ([newer], [damaged], 3)
    assert prune(store, found, -10.0, verify=True) == (1, 3)
    assert sweep(page_store.store, -10.0) == 0
    assert len([*store.keys("m")]) == 1
    assert len([*store.keys("o")]) == 3
    assert page_store.read(PROMPT, 0) is None
    assert page_store.write(PROMPT, 0, page(PROMPT, 0))
    assert page_store.read(PROMPT, 0) == page(PROMPT, 0)


def write_pages(place: str, progress: Connection) -> None:
    """Write pages until this process is killed."""
    page_store = PageStore(open_store(place), LAYOUT)
    for turn in itertools.count():
        page_store.write_all([(PROMPT, i, page(PROMPT, i, 1)) for i in range(1 + turn % 2)])
        progress.send_bytes(b".")


def test_a_writer_that_is_killed_holds_up_nobody(tmp_path: Path) -> None:
    """KVP-TIER-LAST: at any time of its writes; the others go on with what is whole."""
    rng, came, page_store = random.Random(1), 0, PageStore(open_store(f"packs:{tmp_path}"), LAYOUT)
    for _ in range(6):
        progress, end = FORKED.Pipe(duplex=False)
        writer = FORKED.Process(target=write_pages, args=(f"packs:{tmp_path}", end))
        writer.start()
        end.close()
        for _ in range(rng.randrange(1, 60)):
            assert progress.recv_bytes()
        writer.kill()
        writer.join()
        assert writer.exitcode == -SIGKILL
        for i in range(2):
            got = page_store.read(PROMPT, i)
            assert got in (None, page(PROMPT, i), page(PROMPT, i, 1))
            came += got is not None
            assert page_store.write(PROMPT, i, page(PROMPT, i))
            assert page_store.read(PROMPT, i) == page(PROMPT, i)
    assert came


def test_a_server_that_does_not_answer_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        begun = monotonic()
        far = ObjectStore.at(
            "s3://pages/x", timeout=timedelta(seconds=0.3), retries=0, endpoint=f"http://127.0.0.1:{port}"
        )
        with pytest.raises(OSError, match=r"."):
            far.get(NAMES[0])
        page_store = PageStore(far, LAYOUT, scan=False)
        assert page_store.read(PROMPT, 0) is None
        assert not page_store.write(PROMPT, 0, page(PROMPT, 0))
        assert page_store.counts["failed"] == 2
        assert monotonic() - begun < 20.0


def test_a_place_is_a_folder_or_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": server()}).items():
        monkeypatch.setenv(name, value)
    places = {
        tmp_path: FileStore,
        f"{tmp_path}/a": FileStore,
        f"packs:{tmp_path}/d": PackStore,
        f"s3://{BUCKET}/{tmp_path.name}": ObjectStore,
    }
    for place, kind in places.items():
        made = open_store(place)
        assert type(made) is kind
        made.put(NAMES[0], b"1")
        assert open_store(place).get(NAMES[0]) == b"1"


@pytest.mark.parametrize("place", ["{}", "packs:{}"])
def test_a_place_is_synced_for_whoever_wants_it(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_store(place.format(tmp_path), durable=True)
    assert isinstance(made, FileStore | PackStore)
    assert made.durable


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvproto.tiers.object_store", None)
    with pytest.raises(LocalError, match=r"kvproto\[objects\]"):
        open_store("s3://somewhere")


@pytest.mark.parametrize("scheme", ["lmdb", "nixl"])
def test_a_back_end_that_is_gone_is_no_folder_of_its_name(scheme: str) -> None:
    with pytest.raises(LocalError, match="packs:FOLDER"):
        open_store(f"{scheme}:somewhere")
