"""Cases that nobody can have learnt: vectors with other numbers, made from the seed of a run.

A testee that remembers the answers to all vectors knows none of these. The suite's own codec, which the vectors hold to
the prose, writes them and says what they mean; numbers that it refuses are drawn again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import attrs

from kvproto_conformance.cases import Ask, Case
from kvproto_conformance.codec import Refusal, read_frame, read_struct, write_frame, write_struct
from kvproto_conformance.codec.facts import GREASE_FEATURES
from kvproto_conformance.run import PROTOCOL

Json = dict[str, Any]
FRESH = 24
"""The number of them in a run."""
PREFIX = "fresh/"
"""Of their ids; what follows is the id of the case that was changed."""
_NOTE = "answers that were learnt from the vectors"


def fresh(seed: int, cases: Iterable[Case]) -> list[Case]:
    """Some of a claim's cases, of one message or struct after the other, with what they say changed."""
    able = [case for case in cases if case.asks and not case.refusing and case.asks[0].question["op"] in _MAKERS]
    random.Random(seed).shuffle(able)
    turns: Counter[str] = Counter()
    rounds = {}
    for case in able:
        turns[case.about] += 1
        rounds[case.id] = turns[case.about]
    made = (freshened(seed, case) for case in sorted(able, key=lambda case: rounds[case.id]))
    return list(islice((case for case in made if case is not None), FRESH))


def freshened(seed: int, case: Case) -> Case | None:
    """One case with what it says changed; None if nothing of it can be."""
    maker = _MAKERS.get(case.asks[0].question["op"]) if case.asks else None
    asks = maker(random.Random(f"{seed} {case.id}"), case) if maker else ()
    return attrs.evolve(case, id=PREFIX + case.id, suite=PROTOCOL, asks=asks, note=_NOTE) if asks else None


def _codec(rng: random.Random, case: Case) -> tuple[Ask, ...]:
    """Other numbers, written by the suite and read by it."""
    first = case.asks[0]
    name = first.question.get("struct") or first.expected.get("message")
    if name is None or "fields" not in first.expected:
        return ()
    framed = "struct" not in first.question
    for _ in range(20):
        fields = _altered(rng, first.expected["fields"])
        try:
            data = (write_frame if framed else write_struct)(name, fields)
            read = read_frame(data)[1] if framed else read_struct(name, data)
        except Refusal:
            continue
        if read != first.expected["fields"]:
            return tuple(_asked(ask, read, data.hex()) for ask in case.asks)
    return ()


def _asked(ask: Ask, fields: Json, data: str) -> Ask:
    """The same question about other fields."""
    if "fields" in ask.question:
        return attrs.evolve(ask, question=ask.question | {"fields": fields}, expected=dict.fromkeys(ask.expected, data))
    place = "frame" if "frame" in ask.question else "bytes"
    return attrs.evolve(ask, question=ask.question | {place: data}, expected=ask.expected | {"fields": fields})


def _altered(rng: random.Random, value: Any) -> Any:
    """The same JSON form, in which about every second number is another."""
    if isinstance(value, dict):
        return {key: _altered(rng, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_altered(rng, each) for each in value]
    if isinstance(value, str) and value.isdecimal() and value.isascii() and rng.random() < 0.5:
        return str(rng.getrandbits(rng.choice((4, 7, 8, 15, 31, 50, 63))))
    return value


def _negotiation(rng: random.Random, case: Case) -> tuple[Ask, ...]:
    """The sink offers a feature as well that nobody knows, which changes nothing."""
    (ask,) = case.asks
    sink = ask.question["sink"]
    known = [int(number) for side in (sink, ask.question["source"]) for number in side["offered"]]
    unknown = rng.choice([number for number in GREASE_FEATURES if number > max(known, default=0)])
    changed = ask.question | {"sink": sink | {"offered": [*sink["offered"], str(unknown)]}}
    return (Ask(changed, ask.expected),)


_MAKERS: dict[str, Callable[[random.Random, Case], tuple[Ask, ...]]] = {
    "decode": _codec,
    "decode_struct": _codec,
    "negotiate": _negotiation,
}
