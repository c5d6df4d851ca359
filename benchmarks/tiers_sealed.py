"""Sealed pages beside unsealed ones: rates and CPU time of writing and reading, in the same rounds.

Pages of 663,552 bytes, written to a folder and to packs and read back. `memory` is a folder of /dev/shm, so that only
the processor counts; `disk` is this folder's, with the system's cache dropped before pages are read. The order of both
alternates from round to round, and ratios are medians over rounds.

`python benchmarks/tiers_sealed.py [--out]`; needs cryptography (extra seal).
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from harness import arguments, facts, keep
from tiers import dropped, timed

from kvproto.tiers.file_store import FileStore
from kvproto.tiers.manifest import Data
from kvproto.tiers.pack_store import PackStore
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageComponent, PageLayout
from kvproto.tiers.page_store import BufferPool, PageStore
from kvproto.tiers.sealing import Seal
from kvproto.wire.enums import KeyForm, LengthRule

SIZES, PAGES, ROUNDS, BATCH = (8 * 64 * 1152, 64 * 1152), 128, 5, 16
LAYOUT = PageLayout(
    64, bytes(32), tuple(PageComponent(g, KeyForm.OWN, LengthRule.PREFIX, n) for g, n in enumerate(SIZES))
)
PLACES = (
    ("files", "memory", "/dev/shm", 1), ("packs", "memory", "/dev/shm", 1),
    ("packs", "disk", ".", 4),
)  # fmt: skip
"""The back end, where its folder is, and with how many threads."""
Kind = Callable[[Path], Any]
KINDS: Mapping[str, Kind] = {"files": FileStore, "packs": PackStore}


def used(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and seconds of the processor, of this process."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    wall = timed(work)
    return wall, spent() - before


def measure(kind: Kind, root: Path, seal: Seal | None, count: int, threads: int) -> dict[str, float]:
    """MB/s by the clock and by the processor, written and read."""
    chain = Chain(bytes(32), LAYOUT.page, np.arange(count * LAYOUT.page))
    data: dict[int, Data] = {group: np.random.default_rng(group).bytes(size) for group, size in enumerate(SIZES)}
    pages, buffers = PageStore(kind(root), LAYOUT, scan=False), BufferPool(LAYOUT)
    pages.seal = seal
    megabytes, figures = count * sum(SIZES) / 1e6, dict[str, float]()

    def write(first: int) -> None:
        last = min(first + BATCH, count)
        assert all(pages.write_all([(chain, i, data) for i in range(first, last)]))

    def read(i: int) -> None:
        room = buffers.take()
        found = pages.read(chain, i, room)
        assert found is not None
        assert found[1] == data[1]
        buffers.give_back(room)

    with ThreadPoolExecutor(threads) as pool:
        wall, cpu = used(lambda: [*pool.map(write, range(0, count, BATCH))])
        figures |= {"write": megabytes / wall, "write_cpu": megabytes / cpu}
        dropped(root)
        wall, cpu = used(lambda: [*pool.map(read, range(count))])
        figures |= {"read": megabytes / wall, "read_cpu": megabytes / cpu}
    return figures


def compared(kind: Kind, place: str | None, count: int, rounds: int, threads: int) -> dict[str, Any]:
    """Medians in MB/s of unsealed and sealed pages, and the medians of their ratios."""
    ways: dict[str, Seal | None] = {"unsealed": None, "sealed": Seal([bytes(32)])}
    all_rounds: list[dict[str, dict[str, float]]] = []
    for n in range(rounds):
        figures: dict[str, dict[str, float]] = {}
        for name in [*ways][:: 1 if n % 2 else -1]:
            with TemporaryDirectory(dir=place) as folder:
                figures[name] = measure(kind, Path(folder) / "store", ways[name], count, threads)
        all_rounds.append(figures)
    names = [*all_rounds[0]["sealed"]]
    made = {
        way: {name: round(statistics.median(each[way][name] for each in all_rounds)) for name in names} for way in ways
    }
    ratios = {
        name: round(statistics.median(each["sealed"][name] / each["unsealed"][name] for each in all_rounds), 2)
        for name in names
    }
    return made | {"ratio": ratios, "rounds": all_rounds}


def main() -> int:
    """Measure, print, keep."""
    args = arguments(__doc__, "tiers_sealed", quick="few of everything, to see that it works").parse_args()
    count, rounds = (BATCH, 1) if args.quick else (PAGES, ROUNDS)
    figures: dict[str, Any] = {"pages": count, "page_bytes": sum(SIZES)}
    for name, where, place, threads in PLACES:
        row = compared(KINDS[name], place, count, rounds, threads)
        figures[f"{name}, {where}"] = row
        print(f"{name}, {where}", json.dumps({k: row[k] for k in row if k != "rounds"}))
    keep(args.out, facts() | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
