"""The codec beside msgspec typed structs (msgpack maps), in one process, all checks on.

`python benchmarks/codec.py [--before PATH] [--out]`: prints medians in microseconds; --out keeps all samples. `strict` is
kvproto's strict reader alone. msgspec has the same content as typed structs with field names as keys, and number arrays as
lists of integers (its typed form). Each gets what an engine has (numpy page
ids for kvproto, a list for msgspec, made beforehand) and must give the content back; that is asserted before anything is
timed. Rounds are interleaved. --before PATH also measures the codec of another checkout, in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import msgspec
import numpy as np
from harness import arguments, facts, in_turn, keep

from kvproto.wire import decode, encode, tables
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, MemoryKind, Outcome, Transport
from kvproto.wire.strict import read_whole

WAYS = ("kvproto encode", "kvproto decode", "strict decode", "msgspec encode", "msgspec decode")
IDS = {"session": 0x1122334455667788, "request": 77, "sequence": 1234}


def done() -> m.Done:
    """A writer's Done of a target and a draft, with the first token and two checksums."""
    checksums = (m.Checksum(group=0, value=0x9E3779B97F4A7C15), m.Checksum(group=1, value=0xBF58476D1CE4E5B9))
    return m.Done(
        **IDS,
        writer=5,
        groups=np.array([0, 1], np.uint32),
        bytes=73 << 20,
        outcome=Outcome.CONTINUE,
        handoff=(m.HandOff(group=2, data=b"\1\2\3\4"),),
        checksums=checksums,
    )


def transfer(groups: int, pages: int) -> m.Transfer:
    """A Transfer of that many page ids of each group, in random order."""
    dice = np.random.default_rng(7)
    items = [dice.permutation(1 << 20)[:pages].astype(np.uint32) for _ in range(groups)]
    count = pages * 64
    return m.Transfer(
        **IDS,
        ticket=bytes(range(16)),
        content=bytes(range(32)),
        source_version=1,
        sink_version=1,
        epoch=1,
        grants=tuple(m.Grants(group=g, first=0, count=count, valid=count, items=items[g]) for g in range(groups)),
        writers=np.array([1, 5], np.uint32),
    )


def register(groups: list[tuple[int, int, int]]) -> m.Register:
    """A Register with one region per tensor; `groups` holds (tensors, item length, row length)."""
    regions: list[m.Region] = []
    columns = []
    for group, (tensors, item, row) in enumerate(groups):
        first = len(regions)
        regions += [_region(number, item) for number in range(first, first + tensors)]
        zeros = np.zeros(tensors, np.uint64)
        columns.append(
            m.Columns(
                group=group,
                items=4096,
                region=np.arange(first, first + tensors, dtype=np.uint32),
                offset=zeros,
                item_stride=zeros + np.uint64(item),
                row_stride=zeros + np.uint64(row),
                lane_stride=zeros + np.uint64(min(row, 256)),
            )
        )
    return m.Register(
        session=IDS["session"],
        request=3,
        source=bytes(range(32)),
        sink=bytes(range(1, 33)),
        epoch=1,
        access=Access.WRITE,
        regions=tuple(regions),
        columns=tuple(columns),
        routes=tuple(m.RouteRef(group=group, digest=bytes(range(group, group + 32))) for group in range(len(groups))),
        plan=bytes(range(2, 34)),
    )


def _region(number: int, item: int) -> m.Region:
    return m.Region(
        id=number,
        base=(0x7F00 << 32) + number * (1 << 30),
        length=item * 4096,
        kind=MemoryKind.CUDA,
        device="GPU-5e0d6c2a-94d1-7a35-8c7e-2f1b0a9d4c11",
        boot=bytes(range(16)),
        handles=(m.Handle(transport=Transport.CUDA, data=bytes((number + i) % 256 for i in range(64))),),
    )


SHAPES: dict[str, Callable[[], Any]] = {
    "DoneAck": lambda: m.DoneAck(**IDS),
    "Done": done,
    "Transfer, 2 x 8 ids": lambda: transfer(2, 8),
    "Transfer, 2 x 2,048 ids": lambda: transfer(2, 2048),
    "Transfer, 131,072 ids": lambda: transfer(1, 131072),
    "Register, 80 GQA layers + 8 states": lambda: register([(160, 64 * 2048, 2048), (8, 1 << 20, 4096)]),
}


def _typed() -> dict[str, Any]:
    """msgspec structs by name, made from the registry's tables, so that the content is the same."""
    structs: dict[str, Any] = {}

    def python(type_: str) -> Any:
        if type_.startswith("list<"):
            return list[python(type_[5:-1])]  # type: ignore[misc]
        if type_.startswith("array<"):
            return list[int]
        if type_.startswith("struct:"):
            return structs[type_[7:]]
        return {"str": str, "bytes": bytes, "bool": bool}.get(type_, int)

    waiting = list(tables.FIELDS)
    while waiting:
        name = waiting.pop(0)
        rows = tables.FIELDS[name]
        needed = {row[2].rpartition("struct:")[2].rstrip(">") for row in rows if "struct:" in row[2]}
        if needed - structs.keys():
            waiting.append(name)
            continue
        fields: list[Any] = [(row[1], python(row[2])) for row in rows if row[3]]
        fields += [(row[1], python(row[2]) | None, None) for row in rows if not row[3]]
        structs[name] = msgspec.defstruct(name, fields, omit_defaults=True, forbid_unknown_fields=True)
    return structs


TYPED = _typed()


def typed(value: Any) -> Any:
    """The same content as a msgspec struct."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [typed(element) for element in value]
    if attrs.has(type(value)):
        fields = {field.name: typed(getattr(value, field.name)) for field in attrs.fields(type(value))}
        return TYPED[type(value).__name__](**{name: field for name, field in fields.items() if field is not None})
    return int(value) if isinstance(value, int) else value


def timed(work: Callable[[], Any], number: int) -> float:
    """Microseconds of one call."""
    start = time.perf_counter()
    for _ in range(number):
        work()
    return (time.perf_counter() - start) / number * 1e6


def measure(name: str, rounds: int) -> dict[str, Any]:
    """All contenders on one shape; raw samples in microseconds."""
    value = SHAPES[name]()
    other, packer = typed(value), msgspec.msgpack.Encoder()
    unpacker = msgspec.msgpack.Decoder(type(other))
    frame, packed, kind = encode(value), packer.encode(other), type(value).__name__
    body = memoryview(frame)[tables.HEADER_BYTES :]
    assert decode(frame) == read_whole(kind, body) == value
    assert unpacker.decode(packed) == other
    work: dict[str, Callable[[], Any]] = {
        "kvproto encode": lambda: encode(value),
        "kvproto decode": lambda: decode(frame),
        "strict decode": lambda: read_whole(kind, body),
        "msgspec encode": lambda: packer.encode(other),
        "msgspec decode": lambda: unpacker.decode(packed),
    }
    number = {way: max(1, int(2000 / max(timed(call, 3), 0.5))) for way, call in work.items()}
    samples = in_turn({way: lambda way=way: timed(work[way], number[way]) for way in work}, rounds, warm=0)
    return {"samples_us": samples, "bytes": {"kvproto": len(frame), "msgspec": len(packed)}}


def before(path: Path) -> dict[str, Any]:
    """The shapes' results with the kvproto of another checkout."""
    command = [sys.executable, __file__, "--json"]
    out = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(path)}, check=True, capture_output=True, text=True
    )
    results: dict[str, Any] = json.loads(out.stdout)
    return results


def show(title: str, shapes: dict[str, Any]) -> None:
    """Print the medians of all shapes."""
    print(f"{title:36}" + "".join(f"{way:>16}" for way in WAYS) + f"{'bytes':>10}")
    for name, row in shapes.items():
        print(
            f"{name:36}"
            + "".join(f"{median(row['samples_us'][w]):16.1f}" for w in WAYS)
            + f"{row['bytes']['kvproto']:10,}"
        )


def main() -> int:
    """Measure, print, keep."""
    parser = arguments(__doc__, "codec", rounds=31)
    parser.add_argument("--before", type=Path, metavar="PATH", help="a checkout whose codec to measure too")
    parser.add_argument("--json", action="store_true", help="print the samples alone, as JSON")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    earlier = before(args.before) if args.before else {}
    shapes = {name: measure(name, args.rounds) for name in SHAPES}
    if args.json:
        print(json.dumps(shapes))
        return 0
    if earlier:
        show("before, us", earlier)
    show("now, us", shapes)
    head = {"benchmark": "codec"} | facts("msgspec", "msgpack", "attrs") | {"rounds": args.rounds}
    keep(args.out, head | {"shapes": shapes, "before": earlier})
    return 0


if __name__ == "__main__":
    sys.exit(main())
