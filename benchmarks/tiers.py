"""A million pages in the index: bytes a page, time of a lookup, of a write, and of giving up; and pages in files.

Files are written to the disk and read from it: synced, and dropped from the page cache of the system. Beside them are plain
files of the same sizes, the same through the page cache, and SHA-256, which is the bound of whatever comes out of memory.

python -m benchmarks.tiers [--pages N]     writes benchmarks/results/tiers.json; N of target and draft, a tenth of the others
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvproto.tiers.components import Layout, Part
from kvproto.tiers.identity import Chain
from kvproto.tiers.index import Index
from kvproto.tiers.shelf import Shelf
from kvproto.tiers.store import Files
from kvproto.wire.enums import KeyForm, LengthRule

RESULT = Path(__file__).parent / "results" / "tiers.json"
PAGE, PREFIX = 64, 512
"""Tokens of a page; pages of a prompt of 32K tokens."""
LAYOUTS = {
    "target": (LengthRule.PREFIX,),
    "target and draft": (LengthRule.PREFIX, LengthRule.PREFIX),
    "target, draft and state": (LengthRule.PREFIX, LengthRule.PREFIX, LengthRule.STATE),
}


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def chain(seed: int, pages: int) -> Chain:
    """The ids of a prompt of random tokens, and one token more."""
    made = Chain(bytes(32), PAGE)
    made.extend(np.random.default_rng(seed).integers(0, 1 << 17, pages * PAGE + 1))
    return made


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(rules: tuple[LengthRule, ...], pages: int) -> dict[str, object]:
    """Of an index that is full of prompts of 512 pages."""
    parts = tuple(Part(g, KeyForm.AHEAD if g == 1 else KeyForm.OWN, rule, 1) for g, rule in enumerate(rules))
    layout, groups = Layout(PAGE, bytes(32), parts), range(len(parts))
    prompts = pages // PREFIX
    before, index = resident(), Index(layout, prompts * PREFIX)
    published = []

    def write(prompt: Chain) -> None:
        claim = index.claim(prompt, 0, PREFIX)
        assert claim is not None
        for i in range(PREFIX):
            claim.fill(i)
            claim.seal(i, groups)
        assert claim.publish() == PREFIX

    for seed in range(prompts):
        prompt = chain(seed, PREFIX)
        published.append(timed(lambda prompt=prompt: write(prompt)))
    used = resident() - before
    assert len(index) == prompts * PREFIX
    hashed, found, missed, given_up = [], [], [], []
    for seed in np.random.default_rng(1).integers(0, prompts, 200).tolist():
        hashed.append(timed(lambda seed=seed: chain(seed, PREFIX)))
        prompt = chain(seed, PREFIX)

        def look(prompt: Chain = prompt) -> None:
            with index.find(prompt) as hit:
                assert len(hit.pages) == PREFIX

        found.append(timed(look))
        short = chain(seed, 1)
        missed.append(timed(lambda short=short: index.find(short).close()))
    for _ in range(20):
        given_up.append(timed(lambda: index.evict(index.slots.free + PREFIX)))
    median = statistics.median
    return {
        "pages": prompts * PREFIX, "bytes_a_page": round(used / (prompts * PREFIX)), "total_mb": round(used / 1e6),
        "lookup_of_512_pages_ms": round(1e3 * median(found), 3), "lookup_us_a_page": round(1e6 * median(found) / PREFIX, 2),
        "lookup_of_1_page_us": round(1e6 * median(missed), 2), "ids_of_512_pages_ms": round(1e3 * median(hashed), 2),
        "write_us_a_page": round(1e6 * median(published) / PREFIX, 2), "evict_us_a_page": round(1e6 * median(given_up) / PREFIX, 2),
    }  # fmt: skip


def stored(pages: int = PREFIX, sizes: tuple[int, ...] = (8 * 64 * 1152, 64 * 1152)) -> dict[str, object]:
    """A prompt of 512 pages, as of 8 MLA layers and a draft of one, written to files and read again."""
    parts = tuple(
        Part(g, KeyForm.AHEAD if g == 1 else KeyForm.OWN, LengthRule.PREFIX, size) for g, size in enumerate(sizes)
    )
    layout, prompt = Layout(PAGE, bytes(32), parts), chain(0, pages)
    data = {g: np.random.default_rng(g).bytes(size) for g, size in enumerate(sizes)}
    rates: dict[str, float] = {}
    total = pages * sum(sizes) / 1e6

    def rate(name: str, work: Callable[[], object]) -> None:
        rates[name] = round(total / timed(work))

    with TemporaryDirectory(dir=".") as name, ThreadPoolExecutor(4) as pool:
        root = Path(name)
        plain = [(root / f"{i}-{g}", one) for i in range(pages) for g, one in data.items()]
        rate("sha256_mb_s", lambda: [hashlib.sha256(one).digest() for _, one in plain])
        rate("plain_write_cached_mb_s", lambda: [path.write_bytes(one) for path, one in plain])
        rate("plain_read_cached_mb_s", lambda: [path.read_bytes() for path, _ in plain])
        rate("plain_write_mb_s", lambda: [synced(path, one) for path, one in plain])
        dropped(root)
        rate("plain_read_mb_s", lambda: [path.read_bytes() for path, _ in plain])
        shelf = Shelf(Files(root / "cached"), layout)
        rate("write_cached_mb_s", lambda: [shelf.write(prompt, i, data) for i in range(pages)])
        rate("read_cached_mb_s", lambda: [shelf.read(prompt, i) for i in range(pages)])
        for threads, each in ((1, map), (4, pool.map)):
            shelf = Shelf(Files(root / f"{threads}", durable=True), layout)
            write, read = partial(shelf.write, prompt, data=data), partial(shelf.read, prompt)
            rate(f"write_{threads}_threads_mb_s", partial(drain, each, write, pages))
            dropped(root)
            rate(f"read_{threads}_threads_mb_s", partial(drain, each, read, pages))
        warm = [timed(lambda: shelf.find(prompt)) for _ in range(20)]
        cold = timed(lambda: Shelf(Files(root / "1"), layout).find(prompt))
    return {
        "pages": pages,
        "mb": round(total),
        **rates,
        "warm_lookup_ms": round(1e3 * statistics.median(warm), 2),
        "open_and_lookup_ms": round(1e3 * cold),
    }


def drain(each: Callable[..., Iterable[object]], work: Callable[[int], object], pages: int) -> None:
    """Do it for each page."""
    assert all(each(work, range(pages)))


def synced(path: Path, data: bytes) -> None:
    """Write a file, and wait for the disk."""
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def dropped(root: Path) -> None:
    """Take what is in a folder out of the page cache."""
    for path in [path for path in root.rglob("*") if path.is_file()]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1_000_000)
    args = parser.parse_args()
    rows, load = {}, os.getloadavg()[0]
    for name, rules in LAYOUTS.items():  # each in a process of its own, whose memory is its own
        pages = args.pages if name == "target and draft" else args.pages // 10
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows[name] = pool.submit(measure, rules, pages).result()
    head = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "page_tokens": PAGE,
    }
    RESULT.write_text(
        json.dumps({**head, "load_average": round(load, 1), "index": rows, "files": stored()}, indent=1) + "\n"
    )
    print(RESULT.read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
