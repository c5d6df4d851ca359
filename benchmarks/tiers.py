"""A million pages in the index: bytes a page, time of a lookup, of a write, and of giving up; and pages on a disk.

`benchmarks/tiers_disk.py` says what stored pages are compared with.

python -m benchmarks.tiers [--pages N] [--rounds N]     writes benchmarks/results/tiers.json, then runs benchmarks/tiers_report.py

N pages of target and draft, a tenth of the other layouts; and rounds of writing 256 pages to the disk and reading them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from kvproto.tiers.index import Index
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageComponent, PageLayout
from kvproto.wire.enums import KeyForm, LengthRule

from . import tiers_disk, tiers_report
from .tiers_disk import timed

RESULT = Path(__file__).parent / "results" / "tiers.json"
PAGE, PREFIX, STORED = 64, 512, 256
"""Tokens of a page; pages of a prompt of 32K tokens, and of what a round writes to the disk."""
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


def measure(rules: tuple[LengthRule, ...], pages: int) -> dict[str, object]:
    """Of an index that is full of prompts of 512 pages."""
    parts = tuple(PageComponent(g, KeyForm.AHEAD if g == 1 else KeyForm.OWN, rule, 1) for g, rule in enumerate(rules))
    layout, groups = PageLayout(PAGE, bytes(32), parts), range(len(parts))
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


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows, load = {}, os.getloadavg()[0]
    for name, rules in LAYOUTS.items():  # each in a process of its own, whose memory is its own
        pages = args.pages if name == "target and draft" else args.pages // 10
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows[name] = pool.submit(measure, rules, pages).result()
    disk = tiers_disk.measure(chain(0, STORED), args.rounds)
    head = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "page_tokens": PAGE,
    }
    RESULT.write_text(
        json.dumps({**head, "load_average": round(load, 1), "index": rows, "disk": disk}, indent=1) + "\n"
    )
    print(RESULT.read_text())
    return tiers_report.main([])


if __name__ == "__main__":
    raise SystemExit(main())
