"""Stored pages beside plain sequential I/O on the same disk, in the same run, at the same durability.

`python benchmarks/tiers.py [--out] [--rounds N]`; then tables.py and plots.py make the table and the picture of docs/tiers.md.

A block is a page, of 8 MLA layers and a draft of one: 663,552 bytes. In each round every contender writes as many new blocks, and
reads them once they are out of the page cache of the system; the order changes from round to round, since the rate of a disk does.
What is written counts when it would survive a loss of power, for 16 blocks at a time, and 64 in packs.

- `one file`: blocks one after the other in one new file, which is synced after each 16. One thread, as fio's sequential jobs.
- `one file, direct`: the same past the page cache of the system, 8 blocks at a time, as fio's jobs with --direct=1 --iodepth=8.
- `plain files`: a new file for each block; each 16 files are synced, and then their folder. Four threads.
- `files`, `packs`: `PageStore` over the durable back ends, by four threads that take what waits, as `Tiers` does. Pages are read into
  memory that earlier rounds have used, as `Tiers` uses it again.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from harness import arguments, facts, keep

from kvproto.tiers.file_store import FileStore
from kvproto.tiers.index import Index
from kvproto.tiers.pack_store import PackStore
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageComponent, PageLayout
from kvproto.tiers.page_store import BufferPool, PageStore
from kvproto.tiers.store import Store
from kvproto.tiers.workers import Workers
from kvproto.wire.enums import KeyForm, LengthRule

PAGE, THREADS, STORED = 64, 4, 256
"""Tokens of a page; threads; pages of a round."""
PREFIX, INDEXED = 512, 1_000_000
"""Pages of a prompt of 32K tokens, and of an index."""
SIZES = 8 * 64 * 1152, 64 * 1152
GROUP = 16
"""Pages that are synced together."""
LAYOUT = PageLayout(
    PAGE,
    bytes(32),
    (
        PageComponent(0, KeyForm.OWN, LengthRule.PREFIX, SIZES[0]),
        PageComponent(1, KeyForm.AHEAD, LengthRule.PREFIX, SIZES[1]),
    ),
)
DATA = {group: np.random.default_rng(group).bytes(size) for group, size in enumerate(SIZES)}
BLOCK = b"".join(DATA.values())
ROOMS = BufferPool(LAYOUT)
DEPTH = 8
ALIGNED = [memoryview(mmap(-1, len(BLOCK))) for _ in range(1 + DEPTH)]
"""A block, and room for as many as are read at a time."""
ALIGNED[0][:] = BLOCK


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class OneFile:
    """Blocks of one file."""

    def __init__(self, root: Path, pages: int) -> None:
        self.path, self.pages = root / "blocks", pages

    def write(self) -> None:
        with self.path.open("xb", buffering=0) as file:
            for i in range(self.pages):
                file.write(BLOCK)
                if (i + 1) % GROUP == 0:
                    os.fdatasync(file.fileno())
            os.fsync(file.fileno())
        _sync(self.path.parent)

    def read(self) -> None:
        with self.path.open("rb", buffering=0) as file:
            while file.read(len(BLOCK)):
                continue


class Direct(OneFile):
    """Blocks of one file, past the page cache."""

    def write(self) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        for at in range(0, self.pages, GROUP):
            _each(lambda i: os.pwrite(file, ALIGNED[0], i * len(BLOCK)), range(at, at + GROUP), DEPTH)
            os.fdatasync(file)
        os.close(file)
        _sync(self.path.parent)

    def read(self) -> None:
        file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        rooms = ALIGNED[1:]
        assert {*_each(lambda i: os.preadv(file, [rooms[i % DEPTH]], i * len(BLOCK)), range(self.pages), DEPTH)} == {
            len(BLOCK)
        }
        os.close(file)


class PlainFiles:
    """A file for each block."""

    def __init__(self, root: Path, pages: int) -> None:
        self.paths = [root / f"{i}" for i in range(pages)]

    def write(self) -> None:
        _each(_write_synced, [self.paths[at : at + GROUP] for at in range(0, len(self.paths), GROUP)])

    def read(self) -> None:
        _each(Path.read_bytes, self.paths)


class Stored:
    """Pages of a prompt on a shelf."""

    def __init__(self, store: Store, chain: Chain) -> None:
        self.page_store, self.chain = PageStore(store, LAYOUT), chain

    def write(self) -> None:
        workers = Workers(THREADS, 1e9, len(self.chain.ahead))
        pages = [
            workers.gather(self.page_store.write_all, (self.chain, i, DATA), self.page_store.store.batch)
            for i in range(len(self.chain.ahead))
        ]
        assert all(page.result() for page in pages)
        workers.close(1.0)

    def read(self) -> None:
        rooms = [ROOMS.take() for _ in self.chain.ahead]
        assert all(_each(lambda i: self.page_store.read(self.chain, i, buffers=rooms[i]), range(len(rooms))))
        for room in rooms:
            ROOMS.give_back(room)


def _each(work: Callable[[Any], object], some: Iterable[Any], threads: int = THREADS) -> list[object]:
    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(work, some)]


def _write_synced(paths: Iterable[Path]) -> None:
    files = [path.open("xb", buffering=0) for path in paths]
    for file in files:
        file.write(BLOCK)
    for file in files:
        os.fsync(file.fileno())
        file.close()
    _sync(Path(files[0].name).parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def dropped(root: Path) -> None:
    """Take what is in a folder out of the page cache."""
    for path in [path for path in root.rglob("*") if path.is_file()]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(chain: Chain, rounds: int) -> dict[str, Any]:
    """MB/s of all contenders, and what part of the rate of `one file` each reached, as medians over rounds."""
    pages = len(chain.ahead)
    makes: dict[str, Callable[[Path], Any]] = {
        "one file": lambda root: OneFile(root, pages),
        "one file, direct": lambda root: Direct(root, pages),
        "plain files": lambda root: PlainFiles(root, pages),
        "files": lambda root: Stored(FileStore(root, durable=True), chain),
        "packs": lambda root: Stored(PackStore(root, durable=True), chain),
    }
    took: dict[str, dict[str, list[float]]] = {way: {name: [] for name in makes} for way in ("write", "read")}
    names = [*makes]
    with TemporaryDirectory(dir=".") as folder:  # all is deleted at the end: a disk is slower while it discards
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            folders = {name: Path(folder) / f"{turn}" / name for name in names}
            contenders = {}
            for name in order:
                folders[name].mkdir(parents=True)
                contenders[name] = makes[name](folders[name])
                os.sync()
                took["write"][name].append(timed(contenders[name].write))
            for name in order:
                dropped(folders[name])
                took["read"][name].append(timed(contenders[name].read))
    size = pages * len(BLOCK) / 1e6
    rates = {way: {name: [size / one for one in seconds] for name, seconds in of.items()} for way, of in took.items()}
    shares = {
        way: {
            name: round(median(rate / plain for rate, plain in zip(own, of["one file"], strict=True)), 2)
            for name, own in of.items()
            if name != "one file"
        }
        for way, of in rates.items()
    }
    return {
        "pages": pages,
        "mb": round(size),
        "rounds": rounds,
        "sha256_mb_s": round(size / timed(lambda: [hashlib.sha256(BLOCK).digest() for _ in range(pages)])),
        "mb_s": {way: {name: round(median(own)) for name, own in of.items()} for way, of in rates.items()},
        "of_one_file": shares,
        "samples_mb_s": {way: {name: [*map(round, own)] for name, own in of.items()} for way, of in rates.items()},
    }


def random_prompt(seed: int, pages: int) -> Chain:
    """The ids of a prompt of random tokens, and one token more."""
    prompt = Chain(bytes(32), PAGE)
    prompt.extend(np.random.default_rng(seed).integers(0, 1 << 17, pages * PAGE + 1))
    return prompt


def measure_index(prompts: int) -> dict[str, float]:
    """Memory and lookups of an index that is full of prompts of 512 pages, with a target and a draft."""
    before, index = resident(), Index(LAYOUT, prompts * PREFIX)
    for seed in range(prompts):
        reservation = index.reserve_pages(random_prompt(seed, PREFIX), 0, PREFIX)
        assert reservation is not None
        reservation.fill_all()
        reservation.seal_all([(0, 1)] * PREFIX)
        assert reservation.publish() == PREFIX
    used = resident() - before
    lookups: dict[int, list[float]] = {PREFIX: [], 1: []}
    for seed in np.random.default_rng(1).integers(0, prompts, 200).tolist():
        for pages, times in lookups.items():
            prompt = random_prompt(seed, pages)
            times.append(timed(lambda prompt=prompt: index.find(prompt).close()))
    return {
        "pages": prompts * PREFIX,
        "total_mb": round(used / 1e6),
        "lookup_of_512_pages_ms": round(1e3 * median(lookups[PREFIX]), 3),
        "lookup_of_1_page_us": round(1e6 * median(lookups[1]), 2),
    }


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """Measure, print, keep."""
    args = arguments(__doc__, "tiers", rounds=15, quick="few of everything, to see that it works").parse_args()
    index = measure_index(8 if args.quick else INDEXED // PREFIX)
    print("index: " + ", ".join(f"{name} {figure:,}" for name, figure in index.items()))
    disk = measure(random_prompt(0, 2 * GROUP if args.quick else STORED), args.rounds)
    for way, rates in disk["mb_s"].items():
        print(f"{way}, MB/s: " + ", ".join(f"{name} {rate:,}" for name, rate in rates.items()))
    keep(args.out, facts() | {"page_tokens": PAGE, "index": index, "disk": disk})
    return 0


if __name__ == "__main__":
    sys.exit(main())
