"""Faults in any back end, by seed, and what a page store must do under them.

python -m tests.tiers.schedules 10000 [STORE ..]     runs so many schedules and prints what they met
"""

import errno
import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kvproto.tiers.fsck import GRACE, check_store, prune
from kvproto.tiers.manifest import Data
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageComponent, PageLayout
from kvproto.tiers.page_store import PageBuffers, PageStore
from kvproto.tiers.store import BatchStore, IntoStore, Store
from kvproto.wire.enums import KeyForm, LengthRule

Kind = Callable[..., Store]
"""A class of back ends."""
LAYOUT = PageLayout(
    2, bytes(32),
    (
        PageComponent(0, KeyForm.OWN, LengthRule.PREFIX, 24), PageComponent(1, KeyForm.AHEAD, LengthRule.PREFIX, 8),
        PageComponent(2, KeyForm.OWN, LengthRule.STATE, 5),
    ),
)  # fmt: skip
TORN = ("half", "half and fails", "flip", "nothing")
FAULTS = {
    "put": ("fails", "full", "dies before", "dies after", *TORN),
    "get": ("fails", "short", "flip", "gone"),
    "delete": ("fails", "dies before", "dies after", "nothing"),
}


class Died(Exception):
    """The process of the writer is gone at this point."""


class Memory:
    """A back end in memory."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def put(self, key: str, data: Data) -> None:
        self.data[key] = bytes(data)

    def get(self, key: str) -> bytes | None:
        return self.data.get(key)

    def delete(self, key: str) -> None:
        self.data.pop(key, None)

    def keys(self, kind: str) -> Iterator[str]:
        return (key for key in [*self.data] if key.startswith(f"{kind}/"))

    def age(self, key: str) -> float:
        return 1e9

    def size(self, key: str) -> int | None:
        return len(self.data[key]) if key in self.data else None


class Faulty:
    """Another back end with faults: each call fails in one of the ways above, as often as `rate` says."""

    batch = 16

    def __init__(self, inner: Store, rng: random.Random, rate: float) -> None:
        self.inner, self.rng, self.rate = inner, rng, rate
        self.met: Counter[str] = Counter()

    def put(self, key: str, data: Data) -> None:
        self._put(key, data, self._fault("put"))

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        pairs = [*pairs]
        faults = [self._fault("put") for _ in pairs]
        if isinstance(self.inner, BatchStore) and not any(faults):
            self.inner.put_all(pairs)
        else:
            for (key, data), fault in zip(pairs, faults, strict=True):
                self._put(key, data, fault)

    def _put(self, key: str, data: Data, fault: str) -> None:
        if fault in TORN and fault != "nothing":
            self.inner.put(key, self._flipped(data) if fault == "flip" else data[: len(data) // 2])
        elif fault in ("", "dies after"):
            self.inner.put(key, data)
        self._end(fault)

    def get(self, key: str) -> bytes | None:
        fault, data = self._fault("get"), self.inner.get(key)
        self._end(fault)
        if data is None or fault == "gone":
            return None
        return {"short": data[:-1], "flip": self._flipped(data)}.get(fault, data)

    def get_into(self, key: str, room: memoryview) -> int | None:
        fault, there = self._fault("get"), None
        if isinstance(self.inner, IntoStore):
            there = self.inner.get_into(key, room)
        elif (data := self.inner.get(key)) is not None:
            there = len(data)
            room[: len(data)] = data[: len(room)]
        self._end(fault)
        if there is None or fault == "gone":
            return None
        if fault == "flip":
            room[:] = self._flipped(room)
        return there - (fault == "short")

    def delete(self, key: str) -> None:
        fault = self._fault("delete")
        if fault in ("", "dies after"):
            self.inner.delete(key)
        self._end(fault)

    def keys(self, kind: str) -> Iterator[str]:
        return self.inner.keys(kind)

    def age(self, key: str) -> float:
        return self.inner.age(key)

    def size(self, key: str) -> int | None:
        return self.inner.size(key)

    def _fault(self, call: str) -> str:
        if self.rng.random() >= self.rate:
            return ""
        fault = self.rng.choice(FAULTS[call])
        self.met[f"{call} {fault}"] += 1
        return fault

    def _end(self, fault: str) -> None:
        if fault.endswith("fails"):
            raise OSError(errno.EIO, "a fault")
        if fault == "full":
            raise OSError(errno.ENOSPC, "a fault")
        if fault.startswith("dies"):
            raise Died

    def _flipped(self, data: Data) -> bytes:
        changed, bit = bytearray(data), self.rng.randrange(8 * max(len(data), 1))
        if changed:
            changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)


def prompt(*tokens: int) -> Chain:
    """Of pages of two tokens."""
    made = Chain(bytes(32), 2)
    made.extend(tokens)
    return made


def page(chain: Chain, i: int, writer: int = 0) -> dict[int, bytes]:
    """The right bytes of a page, which depend on its tokens, its group and who computed them."""
    seed = chain.ids(LAYOUT.form)[i] + bytes((writer,))
    return {p.group: hashlib.shake_128(seed + bytes((p.group,))).digest(p.length) for p in LAYOUT.components}


def schedule(seed: int, store: Store) -> Counter[str]:
    """Two writers, faults, deaths, little room; then no faults, and all is mended. Raises AssertionError.

    What is in the store is deleted first.
    """
    rng, met = random.Random(seed), Counter[str]()
    for key in _all(store):
        store.delete(key)
    faulty = Faulty(store, rng, rng.choice((0.02, 0.1, 0.3)))
    high = rng.choice((0, 150))
    shelves = [PageStore(faulty, LAYOUT, high // 2, high) for _ in range(2)]
    prompts = [prompt(*tokens) for tokens in ((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 9, 9, 9), (8, 8, 8))]
    room = {part.group: memoryview(bytearray(part.length)) for part in LAYOUT.components}
    for _ in range(25):
        which, chain = rng.randrange(2), rng.choice(prompts)
        try:
            if rng.random() < 0.5:
                first, together = rng.randrange(len(chain.ahead)), rng.random() < 0.5
                given = [(chain, i, page(chain, i, which)) for i in range(first, len(chain.ahead))]
                for _, _, data in given:
                    if rng.random() < 0.3:
                        del data[2]
                met["groups written"] += together and all(shelves[which].write_all(given))
                if not together:
                    shelves[which].write(*given[0])
            elif rng.random() < 0.1:
                sweep(shelves[which].store, -10.0)
            else:
                _read(shelves[which], chain, met, rng.choice((None, room)))
        except Died:
            met["deaths"] += 1
            shelves[which] = _born_again(faulty, high, met)
    faulty.rate = 0.0
    fresh = PageStore(faulty, LAYOUT)
    for chain in prompts:
        for i in range(len(chain.ahead)):
            assert fresh.write(chain, i, page(chain, i))
        assert _read(fresh, chain, met) == len(chain.ahead), "what was damaged is whole again"
    sweep(fresh.store, -10.0)
    pages = {id for chain in prompts for id in chain.ahead}
    assert len(_all(store)) == (1 + len(LAYOUT.components)) * len(pages), "nothing is left that no manifest names"
    return met + faulty.met


def sweep(store: Store, grace: float = GRACE) -> int:
    """Delete orphans and unfinished files; returns how many, or 0 if the store fails."""
    try:
        return prune(store, check_store(store), grace)[1]
    except OSError:
        return 0


def _born_again(store: Faulty, high: int, met: Counter[str]) -> PageStore:
    """The page store of the next process, which may die of what it does at first."""
    while True:
        try:
            return PageStore(store, LAYOUT, high // 2, high)
        except Died:
            met["deaths"] += 1


def _all(store: Store) -> list[str]:
    return [key for kind in ("m", "o", "t") for key in store.keys(kind)]


def stored(page_store: PageStore, chain: Chain) -> int:
    """How many leading pages of a prompt come whole."""
    count = len(chain.ids(page_store.layout.form))
    return next((i for i in range(count) if page_store.read(chain, i) is None), count)


def _read(page_store: PageStore, chain: Chain, met: Counter[str], room: PageBuffers | None = None) -> int:
    """Pages of a prompt that come whole, in `room` if there is one; each is one writer's, all of it."""
    for i in range(len(chain.ahead)):
        got = page_store.read(chain, i, room)
        if got is None:
            return i
        rights = [page(chain, i, writer) for writer in range(2)]
        assert any(got.items() <= right.items() for right in rights), "a wrong byte"
        met["pages read"] += 1
    return len(chain.ahead)


def main() -> int:
    """Run schedules, print what they met."""
    from tests.tiers.stores import STORES, opened

    count = int(sys.argv[1])
    for kind in sys.argv[2:] or STORES:
        met, begun = Counter[str](), time.monotonic()
        with opened(kind) as store:
            for seed in range(count):
                met += schedule(seed, store)
        print(f"{kind}: {count} schedules in {time.monotonic() - begun:.0f} s, no wrong byte:")
        for name, number in sorted(met.items()):
            print(f"  {number:8} {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
