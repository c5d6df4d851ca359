"""What the greatest frame of each message costs whoever hears it: `python benchmarks/worst_frames.py [--write]`.

In each state of a session and of a transfer that hears messages, by each way in which bytes move, each message comes with each of its fields as great as the limits let
it be: texts and byte strings of their full length, arrays of millions, lists that take all entries that a body may have. Seconds are CPU of this thread, from the
bytes of the frame to the bytes of the answers; the best of two, as others use the machine. --write keeps the slowest of each message in
benchmarks/results/worst_frames.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvproto.errors import KvprotoError
from kvproto.wire import encode, tables
from tests.session.test_product import MESSAGES, NOT_PLAIN, SENDERS, WAYS, Wrong, aborting, accepted, made

RESULTS = Path(__file__).parent / "results/worst_frames.json"
FRAME_S, FRAME_BYTES = 0.05, 64 << 20
"""What a frame may cost."""
_ARRAY = tables.MAX_ARRAY - 256
_STATES: dict[str, Callable[[Wrong, str], int]] = {
    "ready": lambda wrong, name: 1,
    "accepted": accepted,
    "aborting": aborting,
}


def greatest(base: Any) -> Iterator[tuple[str, Any]]:
    """The message with one field after the other as great as it may be."""
    for _, name, type_, _, _, high, length in tables.FIELDS[type(base).__name__]:
        if type_.startswith("array<"):
            yield name, attrs.evolve(base, **{name: np.arange(_ARRAY, dtype=np.uint32)})
        elif type_ == "bytes" and length is None:
            yield name, attrs.evolve(base, **{name: bytes(high or tables.MAX_BYTES)})
        elif type_ == "str":
            yield name, attrs.evolve(base, **{name: "x" * (high or tables.MAX_STRING)})
        elif type_.startswith("list<struct:"):
            yield from lists(base, name, type_[len("list<struct:") : -1])


def lists(base: Any, name: str, struct: str) -> Iterator[tuple[str, Any]]:
    """A list as long as the body may have it, and one whose first element has a great field."""
    rows, present = tables.FIELDS[struct], getattr(base, name) or ()
    element = made(struct, **NOT_PLAIN.get(struct, {}))
    count = (tables.MAX_VALUES - 64) // (1 + len([row for row in rows if row[3]]))
    first, text = rows[0][1], rows[0][2] == "str"
    many = tuple(attrs.evolve(element, **{first: str(n) if text else n}) for n in range(count))
    yield f"{name}, {count:,}", attrs.evolve(base, **{name: many})
    one = present[0] if present else element
    for label, great in greatest(one):
        yield f"{name}[0].{label}", attrs.evolve(base, **{name: (great, *present[1:])})


def frames(wrong: Wrong, kind: str, session: int, sequence: int) -> Iterator[tuple[str, bytes]]:
    """The greatest frames of a message that can be encoded."""
    for label, message in greatest(wrong.message(kind, session, sequence=sequence, attempt=1)):
        with contextlib.suppress(KvprotoError):
            yield label, encode(message)


def heard(endpoint: Any, conn: str, frame: bytes, now: float) -> float:
    """CPU seconds of a frame."""
    endpoint.to_send(now)
    begun = time.thread_time()
    endpoint.receive(conn, frame, now)
    endpoint.to_send(now)
    return time.thread_time() - begun


def measured(way: str, receiver: str, state: str) -> Iterator[dict[str, Any]]:
    """Each frame, heard by a pair of its own."""
    wrong = Wrong(way)
    wrong.serves()
    for kind in [each for each in MESSAGES if SENDERS[each] != receiver]:
        for n in range(len([*greatest(wrong.message(kind, 1))])):
            best: dict[str, Any] = {"seconds": float("inf")}
            for traced in (False, False, True):
                name = wrong.pair()
                sequence = _STATES[state](wrong, name)
                _, sink = wrong.sessions(name)
                some = [*frames(wrong, kind, sink.session, sequence)]
                if n >= len(some):
                    break
                label, frame = some[n]
                endpoint: Any = wrong.world.sources["s0"] if receiver == "source" else wrong.world.sinks[name]
                conn = name if receiver == "source" else "s0"
                if traced:
                    tracemalloc.start()
                seconds = heard(endpoint, conn, frame, wrong.world.now)
                if traced:
                    best["memory"] = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                elif seconds < best["seconds"]:
                    best |= {"message": kind, "field": label, "bytes": len(frame), "seconds": seconds,
                             "way": way, "to": receiver, "state": state}  # fmt: skip
                wrong.world.sinks.pop(name)
            if "memory" in best:
                yield best


def main() -> int:
    """Measure, print, keep; 1 where a frame costs too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the slowest in {RESULTS.name}")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    worst: dict[str, dict[str, Any]] = {}
    heaviest, count = 0, 0
    for way in args.ways:
        for receiver in ("source", "sink"):
            for state in _STATES:
                for row in measured(way, receiver, state):
                    count, heaviest = count + 1, max(heaviest, row["memory"])
                    if row["seconds"] > worst.get(row["message"], {"seconds": -1.0})["seconds"]:
                        worst[row["message"]] = row
    print(f"{'message':14}{'field':32}{'bytes':>12}{'ms':>8}{'MiB':>7}  heard by")
    for row in sorted(worst.values(), key=lambda each: -each["seconds"]):
        figures = f"{row['bytes']:12,}{row['seconds'] * 1e3:8.1f}{row['memory'] / 2**20:7.1f}"
        print(f"{row['message']:14}{row['field']:32}{figures}  {row['to']}, {row['state']}, {row['way']}")
    print(f"{count:,} frames; the heaviest took {heaviest / 2**20:.1f} MiB")
    if args.write:
        head = {"benchmark": "worst_frames", "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": f"{platform.machine()}, {platform.system()}", "python": platform.python_version(),
                "load": os.getloadavg()[0], "frames": count, "heaviest": heaviest}  # fmt: skip
        RESULTS.write_text(json.dumps(head | {"worst": worst}, indent=1) + "\n")
    return int(heaviest > FRAME_BYTES or any(row["seconds"] > FRAME_S for row in worst.values()))


if __name__ == "__main__":
    sys.exit(main())
