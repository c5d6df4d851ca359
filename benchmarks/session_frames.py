"""The cost of the greatest frame of each message to its receiver: `python benchmarks/session.py frames`.

In each state of a session and of a transfer that hears messages, by each way in which bytes move, each message comes with each of its fields as great as the limits let
it be: texts and byte strings of their full length, arrays of millions, lists that take all entries that a body may have. Seconds are CPU of this thread, from the
bytes of the frame to the bytes of the answers; the best of two, as others use the machine.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import attrs
import numpy as np

from kvproto.errors import KvprotoError
from kvproto.wire import encode, tables
from tests.session.test_product import MESSAGES, NOT_PLAIN, SENDERS, WAYS, Wrong, aborting, accepted, made

__all__ = ["frames"]

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


def heard(endpoint: Any, conn: str, frame: bytes, now: float) -> float:
    """CPU seconds of a frame."""
    endpoint.to_send(now)
    begun = time.thread_time()
    endpoint.receive(conn, frame, now)
    endpoint.to_send(now)
    return time.thread_time() - begun


def measured(way: str, receiver: str, state: str, kinds: int) -> Iterator[dict[str, Any]]:
    """Each frame, heard by a pair of its own."""
    wrong = Wrong(way)
    wrong.serves()
    for kind in [each for each in MESSAGES if SENDERS[each] != receiver][:kinds]:
        for n in range(len([*greatest(wrong.message(kind, 1))])):
            best: dict[str, Any] = {"seconds": float("inf")}
            for traced in (False, False, True):
                name = wrong.pair()
                sequence = _STATES[state](wrong, name)
                _, sink = wrong.sessions(name)
                message = wrong.message(kind, sink.session, sequence=sequence)
                label, message = next(islice(greatest(message), n, None))
                try:
                    frame = encode(message)
                except KvprotoError:  # by a rule between fields
                    break
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


def frames(ways: int, kinds: int) -> dict[str, Any]:
    """The slowest frame of each message by so many ways, of so many messages that each side hears; `bytes` and `memory` are its length and what it takes."""
    worst: dict[str, dict[str, Any]] = {}
    count, heaviest = 0, 0
    for way, receiver, state in product(list(WAYS)[:ways], ("source", "sink"), _STATES):
        for row in measured(way, receiver, state, kinds):
            count, heaviest = count + 1, max(heaviest, row["memory"])
            if row["seconds"] > worst.get(row["message"], {"seconds": -1.0})["seconds"]:
                worst[row["message"]] = row
    return {"number": count, "heaviest": heaviest, "worst": sorted(worst.values(), key=lambda row: -row["seconds"])}
