"""The committed captures, by release, and what their packages' own parsers read in them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from kvproto_captures.capture import RawMessage, messages
from kvproto_captures.interpreter import Interpretation, read

CAPTURES = Path(__file__).with_name("recordings")
ENGINES = {
    name: sorted(p.stem.partition("-")[2] for p in CAPTURES.glob(f"{name}-[0-9]*.jsonl")) for name in ("sglang", "vllm")
}


@attrs.frozen
class Kept:
    """One record of a capture file."""

    raw: RawMessage
    record: dict[str, Any]

    @property
    def reading(self) -> Interpretation:
        """How its own release reads it."""
        (only,) = read(self.raw)
        return only

    @property
    def blind(self) -> RawMessage:
        """The same without a note of where it comes from."""
        return attrs.evolve(self.raw, engine="", release="")


@cache
def kept(engine: str, release: str) -> tuple[Kept, ...]:
    data = (CAPTURES / f"{engine}-{release}.jsonl").read_bytes()
    records = [json.loads(line) for line in data.splitlines()]
    return tuple(Kept(*pair) for pair in zip(messages(data), records, strict=True))


def one(engine: str, release: str, message: str, variant: str) -> Kept:
    """The capture of that message."""
    found = (k for k in kept(engine, release) if k.record["variant"] == variant and message == full_name(k.record))
    return next(found)


def full_name(record: dict[str, Any]) -> str:
    name: str = record["message"]
    return name if "." in name else f"{record['backend']}.{name}"


def lines(engine: str, release: str, *picked: str) -> bytes:
    """A capture file of the records of those variants: `message variant` of each."""
    chosen = [k.record for k in kept(engine, release) if f"{full_name(k.record)} {k.record['variant']}" in picked]
    return "".join(json.dumps(record) + "\n" for record in chosen).encode()
