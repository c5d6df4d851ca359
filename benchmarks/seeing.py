"""What metrics, log records and a feed cost a small transfer: CPU time of both sides in one process.

    python benchmarks/seeing.py

A source and a sink without I/O threads hand over prompts of ten tokens, 320 bytes. The ways take turns in short
rounds, so that what else runs on the machine meets all alike; each figure is the least of its rounds. `counting_us` is
the cost of the counts alone, by calling them with the events of a transfer. Writes benchmarks/results/seeing.json.
"""

from __future__ import annotations

import json
import logging
import select
import tempfile
import time
import timeit
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvproto import Options, new_ticket
from kvproto.events import Arrived, Event, Freed, Sent
from kvproto.observability.counts import Counts
from kvproto.rank.base import EngineRank
from tests.door.doors import PROMPT, Two, two

RESULT = Path(__file__).parent / "results" / "seeing.json"
ROUNDS, TRANSFERS = 120, 20
WAYS: dict[str, dict[str, Any]] = {
    "metrics": {"metrics": True},
    "off": {},
    "feed that nobody follows": {"feed": ""},
    "metrics again": {"metrics": True},
    "off again": {},
}
"""Two ways come twice, so that the difference of equals shows what the figures are worth."""


def transfer(both: Two) -> list[Event]:
    """One, from both tickets to pages that are free."""
    ticket, told = new_ticket("prefill"), list[Event]()
    request = both.source.request(ticket, PROMPT)
    request.finish({"kv": [3, 1, 2]})
    found = both.sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
    doors: list[EngineRank] = [both.source, both.sink]
    while not (found.done and request.done):
        waits = [timer for door in doors if (timer := door.next_timer()) is not None]
        ready, _, _ = select.select(doors, [], [], min(waits, default=1.0))
        for door in doors:
            if door in ready or door.next_timer() == 0.0:
                told += door.step()
    return told


def microseconds(both: Two) -> float:
    """CPU time of a transfer, the mean of a round."""
    began = time.process_time()
    for _ in range(TRANSFERS):
        transfer(both)
    return (time.process_time() - began) / TRANSFERS * 1e6


def counting() -> float:
    """Microseconds that counting the events of a transfer takes."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder, two(Path(folder), Options(thread=False)) as both:
        transfer(both)
        events = [e for e in transfer(both) if isinstance(e, Arrived | Sent | Freed)]
        assert len(events) == 3
    number = 20_000
    return (
        min(timeit.repeat(lambda: [counts.hear(e) for e in events], timer=time.process_time, number=number, repeat=9))
        / number
        * 1e6
    )


def main() -> None:
    logging.getLogger().addHandler(logging.NullHandler())
    best: dict[str, float] = {}
    with ExitStack() as stack:
        made = {}
        for name, more in WAYS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options = [
                Options(thread=False, **{k: folder / side if k == "feed" else v for k, v in more.items()})
                for side in ("feed-source", "feed-sink")
            ]
            made[name] = stack.enter_context(two(folder, *options))
            microseconds(made[name])
        for _ in range(ROUNDS):
            for name, both in made.items():
                best[name] = min(best.get(name, float("inf")), microseconds(both))
    found = {
        "cpu_us_per_transfer": {name: round(us, 1) for name, us in best.items()},
        "counting_us": round(counting(), 2),
    }
    found["counting_share"] = round(found["counting_us"] / min(best["off"], best["off again"]), 4)
    RESULT.write_text(
        json.dumps({"date": datetime.now(UTC).strftime("%Y-%m-%d"), "bytes": 320, **found}, indent=1) + "\n"
    )
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
