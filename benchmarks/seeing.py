"""Costs of metrics, log records and a feed in a small transfer: `python benchmarks/seeing.py [--out]`; CPU time of both sides.

A source and a sink without I/O threads hand over prompts of ten tokens, 320 bytes. The ways take turns in short
rounds, so that what else runs on the machine meets all alike; each figure is the least of its rounds. `counting_us` is
the cost of the counts alone, by calling them with the events of a transfer.
"""

from __future__ import annotations

import logging
import tempfile
import time
import timeit
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import arguments, facts, in_turn, keep
from pair import Pair

from kvproto import Cache, DType, Options, Pool, Prompt, lay_out
from kvproto.events import Arrived, Event, Freed, Sent
from kvproto.observability.counts import Counts

TRANSFERS = 20
GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=DType.U8)])
PROMPT, PAGES = Prompt(range(10)), {"kv": [3, 1, 2]}
WAYS: dict[str, dict[str, Any]] = {
    "metrics": {"metrics": True},
    "off": {},
    "feed that nobody follows": {"feed": True},
    "metrics again": {"metrics": True},
    "off again": {},
}
"""Two ways come twice, so that the difference of equals shows what the figures are worth."""


def pair_of(stack: ExitStack, feed: bool = False, **options: Any) -> Pair:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    feeds = [folder / side if feed else None for side in ("source", "sink")]
    pools = Pool.allocate(GEOMETRY, 8), Pool.allocate(GEOMETRY, 8)
    return Pair(stack, pools, *(Options(thread=False, feed=path, **options) for path in feeds))


def microseconds(pair: Pair) -> float:
    """CPU time of a transfer, the mean of a round."""
    began = time.process_time()
    for _ in range(TRANSFERS):
        pair.hand_over(PROMPT, PAGES)
    return (time.process_time() - began) / TRANSFERS * 1e6


def counting() -> float:
    """Microseconds that counting the events of a transfer takes."""
    counts, told = Counts(time.monotonic), list[Event]()
    with ExitStack() as stack:
        pair = pair_of(stack)
        pair.settle()
        request, fetch = pair.ask(PROMPT, PAGES)
        request.finish(PAGES)
        while not (fetch.done and request.done):
            told += pair.source.step() + pair.sink.step()
    events = [event for event in told if isinstance(event, Arrived | Sent | Freed)]
    assert len(events) == 3
    number = 20_000
    work = timeit.Timer(lambda: [counts.hear(event) for event in events], timer=time.process_time)
    return min(work.repeat(number=number, repeat=9)) / number * 1e6


def main() -> None:
    args = arguments(__doc__, "seeing", rounds=120).parse_args()
    logging.getLogger().addHandler(logging.NullHandler())
    with ExitStack() as stack:
        pairs = {name: pair_of(stack, **options) for name, options in WAYS.items()}
        samples = in_turn({name: lambda pair=pair: microseconds(pair) for name, pair in pairs.items()}, args.rounds)
    least = {name: round(min(us), 1) for name, us in samples.items()}
    count = round(counting(), 2)
    share = round(count / min(least["off"], least["off again"]), 4)
    figures = {"cpu_us_per_transfer": least, "counting_us": count, "counting_share": share}
    for name, figure in figures.items():
        print(name, figure)
    keep(args.out, facts() | {"bytes": 320} | figures)


if __name__ == "__main__":
    main()
