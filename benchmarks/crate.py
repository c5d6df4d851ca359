"""The crate kvproto beside the library in Python: codec and plans, in seconds of CPU.

`python benchmarks/crate.py [--out]`: prints medians; --out keeps all samples. The crate's example `figures` is compiled by
cargo, and gets from Python the frames and Descriptions that it works on. `read` borrows from the frame; `decode` and
Python's give what can be kept. Python has page ids as numpy arrays, which is what its `decode` makes. Planning begins with
two Descriptions that have been checked. Rounds are interleaved.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import ROOT, arguments, facts, in_turn, keep
from plan import gqa_engine

from kvproto.planning.plan import plan
from kvproto.wire import decode, encode, encode_struct
from kvproto.wire import messages as m

CRATE = ROOT / "crates/kvproto"
TARGET = ROOT / "build/crate"
LONG = 0.2
"""Seconds of CPU of one sample."""


def transfer(pages: int) -> m.Transfer:
    """A Transfer of so many page ids of each of two groups, in random order."""
    dice = np.random.default_rng(7)
    items = [dice.permutation(1 << 20)[:pages].astype(np.uint32) for _ in range(2)]
    grants = (m.Grants(group=g, first=0, count=pages * 64, valid=pages * 64, items=items[g]) for g in range(2))
    return m.Transfer(
        session=0x1122334455667788, request=77, sequence=1234, ticket=bytes(16), content=bytes(32),
        source_version=1, sink_version=1, epoch=1, grants=tuple(grants), writers=np.array([1, 5], np.uint32),
    )  # fmt: skip


def program() -> Path:
    """The crate's example `figures`, compiled."""
    command = ["cargo", "build", "--release", "--offline", "--quiet", "--example", "figures", "--target-dir", TARGET]
    subprocess.run(command, cwd=CRATE, check=True)
    return TARGET / "release/examples/figures"


def in_rust(figures: Path, what: str, given: list[bytes]) -> Callable[[], float]:
    """Seconds of CPU of one call in the crate, by what many calls take beyond none."""
    lines = "".join(f"{one.hex()}\n" for one in given)

    def seconds(times: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([figures, what, str(times)], input=lines, text=True, check=True, stdout=subprocess.PIPE)
        assert done.stdout.strip() == str(times)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    times = 1
    while (took := seconds(times)) < LONG / 4:
        times *= 4
    times = max(1, round(times * LONG / took))
    return lambda: max(seconds(times) - seconds(0), 0.0) / times


def in_python(work: Callable[[], Any]) -> Callable[[], float]:
    """Seconds of CPU of one call here."""
    begun = time.process_time()
    work()
    times = max(1, round(LONG / max(time.process_time() - begun, 1e-6)))

    def sample() -> float:
        begun = time.process_time()
        for _ in range(times):
            work()
        return (time.process_time() - begun) / times

    return sample


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Of each piece of work the samples in Rust and in Python."""
    figures, work = program(), dict[str, Callable[[], float]]()
    for pages in (8, 2048):
        value, title = transfer(pages), f"Transfer, 2 x {pages:,} pages"
        frame = encode(value)
        for what, here in (
            ("encode", lambda v=value: encode(v)),
            ("decode", lambda f=frame: decode(f)),
            ("read", None),
        ):
            work[f"{title}: {what}|rust"] = in_rust(figures, what, [frame])
            if here is not None:
                work[f"{title}: {what}|python"] = in_python(here)
    for heads in (8, 64):
        side, title = gqa_engine(64, heads), f"64 x 64 ranks, 80 layers GQA ({heads} heads) + draft: plan"
        work[f"{title}|rust"] = in_rust(figures, "plan", [encode_struct(side)] * 2)
        work[f"{title}|python"] = in_python(lambda side=side: plan(side, side))
    found: dict[str, dict[str, list[float]]] = {}
    for name, samples in in_turn(work, rounds).items():
        title, _, language = name.partition("|")
        found.setdefault(title, {})[language] = samples
    return found


def main() -> int:
    """Measure, print, keep."""
    args = arguments(__doc__, "crate", rounds=7).parse_args()
    samples = measure(args.rounds)
    print(f"{'median, us of CPU':64}{'Rust':>12}{'Python':>12}")
    for name, of in samples.items():
        cells = (f"{median(of[language]) * 1e6:12.1f}" if language in of else "" for language in ("rust", "python"))
        print(f"{name:64}{''.join(cells)}")
    rustc = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    keep(args.out, {"benchmark": "crate"} | facts() | {"rustc": rustc, "seconds": samples})
    return 0


if __name__ == "__main__":
    sys.exit(main())
