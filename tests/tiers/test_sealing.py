"""Sealed pages: the form of the specification, and what an attacker who may write to the storage can make of them."""

import hmac
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvproto import Cache, DType, Pool, Tiers, lay_out
from kvproto.errors import LocalError
from kvproto.tiers import HostTiers, StoredPages
from kvproto.tiers.fsck import check_store, prune
from kvproto.tiers.manifest import Data, make_manifest, manifest_key, object_key
from kvproto.tiers.page_ids import Chain, namespace
from kvproto.tiers.page_layout import PageLayout
from kvproto.tiers.page_store import BufferPool, PageStore
from kvproto.tiers.sealing import Seal
from kvproto.tiers.store import Store
from kvproto.wire import decode_struct, encode_struct
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Manifest
from tests.errors import raises
from tests.processes import FORKED, imported
from tests.tiers.schedules import LAYOUT, Memory, page
from tests.tiers.stores import STORES, opened

imported(__name__)
MARK = b"kvproto seal 1\0"
OLD, NEW, OTHER = bytes(range(32)), bytes(range(100, 132)), bytes(32)
TOKENS = [n for n in (1, 2, 3, 4) for _ in range(LAYOUT.page)]


def prompt(salt: str = "blue", *, tokens: list[int] = TOKENS) -> Chain:
    return Chain(namespace({"weights.target": "w", "salt": salt}), LAYOUT.page, [*tokens, 9])


def pages(store: Store, *keys: bytes, layout: PageLayout = LAYOUT) -> PageStore:
    made = PageStore(store, layout)
    made.seal = Seal(keys) if keys else None
    return made


@pytest.fixture(params=[kind for kind in STORES if kind != "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, tmp_path) as made:
        yield made


def hkdf(key: bytes, info: bytes, length: int, salt: bytes | None = None) -> bytes:
    """RFC 5869 by hand; without `salt` only its second step."""
    if salt is not None:
        key = hmac.digest(salt, key, "sha256")
    made = last = b""
    for n in range(1, 256):
        last = hmac.digest(key, last + info + bytes([n]), "sha256")
        made += last
        if len(made) >= length:
            break
    return made[:length]


def by_the_specification(
    key: bytes, space: bytes, random: bytes, id: bytes, geometry: bytes, group: int, data: bytes
) -> bytes:
    name = sha256(MARK + key).digest()[:8]
    derived = hkdf(hkdf(key, MARK + space, 32, bytes(32)), MARK + random, 44)
    header = MARK + name + id + geometry + group.to_bytes(4, "little") + len(data).to_bytes(8, "little")
    return random + AESGCM(derived[:32]).encrypt(derived[32:], data, header)


def test_an_object_is_sealed_as_the_specification_says() -> None:
    chain, store = prompt(), Memory()
    assert pages(store, OLD).write(chain, 1, page(chain, 1))
    manifest = decode_struct(Manifest, store.data[manifest_key(chain.ahead[1], LAYOUT.geometry)])
    assert manifest.seal == sha256(MARK + OLD).digest()[:8]
    for component in manifest.components:
        sealed = store.data[object_key(manifest, component)]
        place = chain.ahead[1], LAYOUT.geometry, component.group, bytes(page(chain, 1)[component.group])
        assert sealed == by_the_specification(OLD, chain.space, sealed[:32], *place)


def test_the_example_of_the_specification_is_right() -> None:
    ramp = bytes(range(256))
    sealed = by_the_specification(ramp[:32], *(ramp[n : n + 32] for n in (32, 64, 96, 128)), 1, b"kvproto")
    text = Path("spec/v1/tiers.md").read_text()
    found = re.search(r"the key's name is\s+`([0-9a-f]+)` and the object ends with `([0-9a-f]+)`", text)
    assert found is not None
    assert found.groups() == (sha256(MARK + ramp[:32]).digest()[:8].hex(), sealed[32:].hex())


@pytest.mark.parametrize("buffers", [False, True])
def test_sealed_pages_come_back_and_nothing_of_them_is_in_the_storage(store: Store, buffers: bool) -> None:
    chain, ours = prompt(), pages(store, OLD)
    assert ours.write_all([(chain, i, page(chain, i)) for i in range(4)]) == [True] * 4
    for i in range(4):
        found = ours.read(chain, i, BufferPool(LAYOUT).take() if buffers else None)
        assert found is not None
        assert {group: bytes(data) for group, data in found.items()} == page(chain, i)
    stored = b"".join(store.get(key) or b"" for key in store.keys("o"))
    assert not any(bytes(data) in stored for i in range(4) for data in page(chain, i).values() if len(data) > 4)


def random_bytes(pipe: Connection) -> None:
    """What a process draws that seals one page again and again."""
    drawn, chain = list[bytes](), prompt()
    for _ in range(50):
        store = Memory()
        assert pages(store, OLD).write(chain, 0, page(chain, 0))
        drawn += [data[:32] for key, data in store.data.items() if key[0] == "o"]
    pipe.send(drawn)


def test_no_key_meets_two_objects() -> None:
    """KVP-TIER-SEAL: of one page, in two processes that were forked from one."""
    drawn: list[bytes] = []
    for _ in range(2):
        ours, theirs = FORKED.Pipe()
        process = FORKED.Process(target=random_bytes, args=(theirs,))
        process.start()
        drawn += ours.recv()
        process.join()
    assert len({*drawn}) == len(drawn) == 2 * 50 * len(LAYOUT.components)


def test_keys_are_changed_page_by_page() -> None:
    """The old key opens until its pages are gone; one that is lacking is a miss, counted, and deletes nothing."""
    store, chain = Memory(), prompt()
    assert pages(store, OLD).write(chain, 0, page(chain, 0))
    both = pages(store, NEW, OLD)
    assert both.write(chain, 1, page(chain, 1))
    assert [both.read(chain, i) for i in (0, 1)] == [page(chain, i) for i in (0, 1)]
    after = pages(store, NEW)
    assert (after.read(chain, 0), after.read(chain, 1)) == (None, page(chain, 1))
    assert (after.counts["locked"], after.counts["missed"], after.counts["damaged"]) == (1, 1, 0)
    assert both.read(chain, 0) == page(chain, 0)
    assert after.write(chain, 0, page(chain, 0))
    assert after.read(chain, 0) == page(chain, 0)


def test_a_page_whose_key_is_lacking_is_not_damaged() -> None:
    """KVP-TIER-LOCKED: neither for a reader, nor for `kvproto tiers`, which checks digests without keys."""
    store, chain = Memory(), prompt()
    assert pages(store, OLD).write(chain, 0, page(chain, 0))
    for reader in (pages(store), pages(store, OTHER)):
        assert not reader.holds(chain, 0)
        assert reader.read(chain, 0) is None
        assert reader.counts["locked"] == 2
    report = check_store(store, verify=True)
    assert (len(report.pages), report.damaged, report.orphans) == (1, [], {})
    prune(store, report, 0.0, verify=True)
    assert pages(store, OLD).read(chain, 0) == page(chain, 0)


def test_a_page_that_nobody_sealed_is_not_taken() -> None:
    """KVP-TIER-PLAIN: whoever can write to the storage could make one."""
    store, chain = Memory(), prompt()
    assert pages(store).write(chain, 0, page(chain, 0))
    assert pages(store, OLD).read(chain, 0) is None
    assert pages(store).read(chain, 0) == page(chain, 0)


def forged(store: Memory, chain: Chain, i: int, data: dict[int, bytes], **change: Any) -> None:
    """A page of whoever can write to the storage and has no key: all digests are right."""
    made = make_manifest(LAYOUT, chain, i, dict[int, Data](data), sha256(MARK + OLD).digest()[:8])
    made = attrs.evolve(made, **change)
    for component in made.components:
        store.put(object_key(made, component), data[component.group])
    store.put(manifest_key(made.id, made.geometry), encode_struct(made))


def objects(store: Memory, chain: Chain, i: int) -> dict[int, bytes]:
    manifest = decode_struct(Manifest, store.data[manifest_key(chain.ahead[i], LAYOUT.geometry)])
    return {component.group: store.data[object_key(manifest, component)] for component in manifest.components}


def changed(data: dict[int, bytes], at: int) -> dict[int, bytes]:
    first = bytearray(data[0])
    first[at] ^= 1
    return {**data, 0: bytes(first)}


FORGERIES: dict[str, Callable[[dict[int, bytes], dict[int, bytes], dict[int, bytes]], dict[int, bytes]]] = {
    "of another tenant": lambda mine, other, next: other,
    "of another place": lambda mine, other, next: next,
    "one group of another place": lambda mine, other, next: {**mine, 1: next[1]},
    "without a seal": lambda mine, other, next: {group: bytes(len(data)) for group, data in mine.items()},
    "another random byte": lambda mine, other, next: changed(mine, 0),
    "another byte": lambda mine, other, next: changed(mine, 40),
    "another tag": lambda mine, other, next: changed(mine, -1),
    "random bytes of another": lambda mine, other, next: {**mine, 0: next[0][:32] + mine[0][32:]},
}


@pytest.mark.parametrize("which", FORGERIES)
def test_what_was_not_sealed_as_this_page_is_a_miss(which: str) -> None:
    """KVP-TIER-OPEN: digests and names are right, and the tag is not."""
    store, mine, other = Memory(), prompt("blue"), prompt("green")
    ours = pages(store, OLD)
    for chain, i in ((mine, 0), (mine, 1), (other, 0)):
        assert ours.write(chain, i, page(chain, i))
    forged(store, mine, 0, FORGERIES[which](objects(store, mine, 0), objects(store, other, 0), objects(store, mine, 1)))
    assert ours.read(mine, 0, BufferPool(LAYOUT).take()) is None
    assert ours.counts["damaged"] == 1
    assert ours.read(mine, 1) == page(mine, 1)
    assert ours.write(mine, 0, page(mine, 0))
    assert ours.read(mine, 0) == page(mine, 0)


def test_a_page_of_another_geometry_is_a_miss() -> None:
    """Its writer's layout is as ours but for the digest."""
    store, chain = Memory(), prompt()
    theirs = attrs.evolve(LAYOUT, geometry=b"\1" * 32)
    assert pages(store, OLD, layout=theirs).write(chain, 0, page(chain, 0))
    manifest = decode_struct(Manifest, store.data[manifest_key(chain.ahead[0], theirs.geometry)])
    forged(store, chain, 0, {c.group: store.data[object_key(manifest, c)] for c in manifest.components})
    assert pages(store, OLD).read(chain, 0) is None


def test_torn_objects_are_a_miss(store: Store) -> None:
    chain, ours = prompt(), pages(store, OLD)
    assert ours.write(chain, 0, page(chain, 0))
    for key in [*store.keys("o")]:
        whole = store.get(key)
        assert whole is not None
        for torn in (whole[:-1], whole[:47], b"", whole + b"\0"):
            store.put(key, torn)
            assert ours._checked(_manifest(store, chain), None) is None
        store.put(key, whole)
    assert ours.read(chain, 0) is not None


def _manifest(store: Store, chain: Chain) -> Manifest:
    data = store.get(manifest_key(chain.ahead[0], LAYOUT.geometry))
    assert data is not None
    return decode_struct(Manifest, data)


# from an engine


def pool() -> Pool:
    made = Pool.allocate(lay_out([Cache.gqa("kv", 1, kv_heads=1, head_dim=4, page=4, dtype=DType.U8)]), 8)
    for name in ("k", "v"):
        array = made.array("kv", 0, name)
        array[:] = np.random.default_rng(1).integers(1, 256, array.shape, np.uint8)
    return made


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    file = folder / "seal"
    file.touch(0o600)
    file.write_text(f"{NEW.hex()}\n{OLD.hex()}\n")
    return file


def test_tiers_seal_what_they_store(tmp_path: Path, keys: Path) -> None:
    """And an engine with the keys finds it: by its host tiers, by storage alone, in another page length."""
    names, tokens = {"weights.target": "w"}, list(range(17))
    with closing(Tiers(pool(), names, page=4, host=8, storage=tmp_path / "s", seal=keys)) as tiers:
        lease = tiers.open(tiers.chain(tokens, salt="blue"), 5)
        assert lease is not None
        lease.leave(16)
        tiers.step()
        tiers.drain()
    for page_length, seal, found in ((4, keys, 4), (8, keys, 2), (4, None, 0), (8, None, 0)):
        made = HostTiers(pool(), names, page=page_length, host_bytes=1 << 16, storage=tmp_path / "s", seal=seal)
        with closing(made) as reader:
            chain = reader.chain(tokens, salt="blue")
            fetch = reader.fetch(chain, float("inf"))
            while not fetch.over(0.0):
                continue
            assert fetch.take() == found
    stored = StoredPages(pool(), names, page=4, storage=tmp_path / "s", seal=keys)
    assert stored.count(Chain(stored.space_of({"salt": "blue"}), 4, tokens), 0, 4) == 4
    stored.close()


@pytest.mark.parametrize(("text", "mode"), [("", 0o600), ("not hex", 0o600), ("00" * 31, 0o600), ("00" * 32, 0o644)])
def test_keys_that_cannot_be(keys: Path, text: str, mode: int) -> None:
    keys.write_text(text)
    keys.chmod(mode)
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE) as refused:
        Seal.read(keys)
    assert text.strip() == "" or text not in str(refused.value)


def test_what_is_not_installed_is_named(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    with pytest.raises(LocalError, match=r"kvproto\[seal\]"):
        Seal.read(keys)


def test_a_key_is_not_shown() -> None:
    key = secrets.token_bytes(32)
    assert key.hex() not in repr(vars(Seal([key]))["name"]) + str(Seal([key]))
