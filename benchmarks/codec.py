"""The codec beside msgspec typed structs (msgpack maps) and positional frames, in one process, all checks on.

`python benchmarks/codec.py [--write]`: prints the table; --write keeps raw samples in benchmarks/results/codec.json.
Contenders: kvproto; msgspec with the same content as typed structs, field names as keys, number arrays as lists of
integers (its typed form); `frames`, struct-packed positional parts, parsed by index without checks, as engines do today.
Each gets what an engine has (numpy page ids for kvproto and frames, a list for msgspec, made beforehand) and must give the
content back; that is asserted before anything is timed. Rounds are interleaved; times are medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import struct
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import msgpack
import msgspec
import numpy as np

from kvproto.wire import decode, encode, tables
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, MemoryKind, Outcome, Transport

ROUNDS = 31
RESULTS = Path(__file__).parent / "results/codec.json"


# the shapes


def done() -> m.Done:
    """A writer's Done of a target and a draft, with the first token and two checksums."""
    return m.Done(
        session=0x1122334455667788, request=77, sequence=1234, attempt=1, writer=5, groups=np.array([0, 1], np.uint32), bytes=73 << 20,
        outcome=Outcome.CONTINUE, handoff=(m.HandOff(group=2, data=b"\1\2\3\4"),),
        checksums=(m.Checksum(group=0, value=0x9E3779B97F4A7C15), m.Checksum(group=1, value=0xBF58476D1CE4E5B9)),
    )  # fmt: skip


def transfer(pages: int) -> m.Transfer:
    """A Transfer of that many page ids in random order."""
    items = np.random.default_rng(7).permutation(1 << 20)[:pages].astype(np.uint32)
    grants = (m.Grants(group=0, first=0, count=pages * 64, valid=pages * 64, items=items),)
    return m.Transfer(
        session=0x1122334455667788, request=78, sequence=1234, attempt=1, ticket=bytes(range(16)), content=bytes(range(32)), source_version=1,
        sink_version=1, epoch=1, grants=grants, writers=np.array([1, 5], np.uint32),
    )  # fmt: skip


def register(groups: list[tuple[int, int, int]]) -> m.Register:
    """A Register with one region per tensor; `groups` holds (tensors, item length, row length)."""
    regions: list[m.Region] = []
    columns = []
    for group, (tensors, item, row) in enumerate(groups):
        first = len(regions)
        for _ in range(tensors):
            number = len(regions)
            handle = m.Handle(transport=Transport.CUDA, data=bytes((number + i) % 256 for i in range(64)))
            regions.append(
                m.Region(
                    id=number,
                    base=(0x7F00 << 32) + number * (1 << 30),
                    length=item * 4096,
                    kind=MemoryKind.CUDA,
                    device="GPU-5e0d6c2a-94d1-7a35-8c7e-2f1b0a9d4c11",
                    boot=bytes(range(16)),
                    handles=(handle,),
                )
            )
        full = np.full(tensors, 0, np.uint64)
        columns.append(
            m.Columns(
                group=group,
                items=4096,
                region=np.arange(first, first + tensors, dtype=np.uint32),
                offset=full,
                item_stride=full + np.uint64(item),
                row_stride=full + np.uint64(row),
                lane_stride=full + np.uint64(min(row, 256)),
            )
        )
    routes = tuple(m.RouteRef(group=g, digest=bytes((g + i) % 256 for i in range(32))) for g in range(len(groups)))
    return m.Register(
        session=0x1122334455667788, request=3, source=bytes(range(32)), sink=bytes(range(1, 33)), epoch=1, access=Access.WRITE,
        regions=tuple(regions), columns=tuple(columns), routes=routes, plan=bytes(range(2, 34)),
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {
    "Done": done,
    "Transfer, 32 ids": lambda: transfer(32),
    "Transfer, 2,048 ids": lambda: transfer(2048),
    "Transfer, 131,072 ids": lambda: transfer(131072),
    "Register, 61 MLA + 1 draft layer": lambda: register([(61, 64 * 1152, 1152), (2, 64 * 2048, 2048)]),
    "Register, 80 GQA layers + 8 states": lambda: register([(160, 64 * 2048, 2048), (8, 1 << 20, 4096)]),
}


# msgspec typed structs, made from the registry, so that the content is the same


def _typed() -> dict[str, Any]:
    made: dict[str, Any] = {}

    def python(type_: str) -> Any:
        if type_.startswith("list<"):
            return list[python(type_[5:-1])]  # type: ignore[misc]
        if type_.startswith("array<"):
            return list[int]
        if type_.startswith("struct:"):
            return made[type_[7:]]
        return {"str": str, "bytes": bytes, "bool": bool}.get(type_, int)

    todo = list(tables.FIELDS)
    while todo:
        name = todo.pop(0)
        needed = {r[2].rpartition("struct:")[2].rstrip(">") for r in tables.FIELDS[name] if "struct:" in r[2]}
        if needed - made.keys():
            todo.append(name)
            continue
        fields: list[Any] = [(r[1], python(r[2])) for r in tables.FIELDS[name] if r[3]]
        fields += [(r[1], python(r[2]) | None, None) for r in tables.FIELDS[name] if not r[3]]
        made[name] = msgspec.defstruct(name, fields, omit_defaults=True, forbid_unknown_fields=True)
    return made


TYPED = _typed()


def typed(value: Any) -> Any:
    """The same content as a msgspec struct."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [typed(v) for v in value]
    if attrs.has(type(value)):
        found = {a.name: typed(getattr(value, a.name)) for a in attrs.fields(type(value))}
        return TYPED[type(value).__name__](**{k: v for k, v in found.items() if v is not None})
    return int(value) if isinstance(value, int) else value


# positional frames: a list of parts, each found by its index; numbers as decimal text or native struct


def frames_encode(v: Any) -> list[bytes]:
    """The parts of a multipart message, as today's engines send it."""
    if isinstance(v, m.Done):
        parts = [str(n).encode() for n in (v.session, v.sequence, v.attempt, v.writer, v.bytes, int(v.outcome))]
        return [
            *parts,
            v.groups.tobytes(),
            b"".join(h.data for h in v.handoff),
            struct.pack(f"{len(v.checksums or ())}Q", *(c.value for c in v.checksums or ())),
        ]
    if isinstance(v, m.Transfer):
        (grant,) = v.grants
        assert grant.items is not None
        numbers = [str(n).encode() for n in (v.session, v.sequence, v.attempt, v.epoch, grant.first, grant.count)]
        return [*numbers, v.ticket, v.content, v.writers.tobytes(), grant.items.tobytes()]
    regions = v.regions
    parts = [str(n).encode() for n in (v.session, v.epoch)]
    parts += [
        struct.pack(f"{len(regions)}Q", *(r.base for r in regions)),
        struct.pack(f"{len(regions)}Q", *(r.length for r in regions)),
    ]
    parts += [b"".join(r.handles[0].data for r in regions), regions[0].device.encode()]
    for c in v.columns:
        parts += [
            getattr(c, n).astype(np.uint64).tobytes()
            for n in ("region", "offset", "item_stride", "row_stride", "lane_stride")
        ]
    return [*parts, v.source, v.sink, v.plan, b"".join(r.digest for r in v.routes)]


def frames_decode(kind: type[Any], p: list[bytes]) -> Any:
    """What its parser does: by index, without a check."""
    if kind is m.Done:
        return (
            tuple(int(x.decode("ascii")) for x in p[:6]),
            np.frombuffer(p[6], np.uint32),
            p[7],
            struct.unpack(f"{len(p[8]) // 8}Q", p[8]),
        )
    if kind is m.Transfer:
        return (
            tuple(int(x.decode("ascii")) for x in p[:6]),
            p[6],
            p[7],
            np.frombuffer(p[8], np.uint32),
            np.frombuffer(p[9], np.uint32),
        )
    n = len(p[2]) // 8
    head = (
        int(p[0].decode("ascii")),
        int(p[1].decode("ascii")),
        list(struct.unpack(f"{n}Q", p[2])),
        list(struct.unpack(f"{n}Q", p[3])),
    )
    handles = [p[4][i : i + 64] for i in range(0, len(p[4]), 64)]
    return *head, handles, p[5].decode(), [list(struct.unpack(f"{len(x) // 8}Q", x)) for x in p[6:-4]], p[-4:]


def timed(work: Callable[[], Any], number: int) -> float:
    """Microseconds of one call."""
    start = time.perf_counter()
    for _ in range(number):
        work()
    return (time.perf_counter() - start) / number * 1e6


def measure(name: str) -> dict[str, Any]:
    """All contenders on one shape; raw samples in microseconds."""
    value = SHAPES[name]()
    other, packer = typed(value), msgspec.msgpack.Encoder()
    unpacker = msgspec.msgpack.Decoder(type(other))
    frame, packed, parts = encode(value), packer.encode(other), frames_encode(value)
    assert decode(frame) == value
    assert unpacker.decode(packed) == other
    kind = type(value)
    work: dict[str, Callable[[], Any]] = {
        "kvproto encode": lambda: encode(value),
        "kvproto decode": lambda: decode(frame),
        "msgspec encode": lambda: packer.encode(other),
        "msgspec decode": lambda: unpacker.decode(packed),
        "frames encode": lambda: frames_encode(value),
        "frames decode": lambda: frames_decode(kind, parts),
    }
    samples: dict[str, list[float]] = {label: [] for label in work}
    number = {label: max(1, int(2000 / max(timed(w, 3), 0.5))) for label, w in work.items()}
    for _ in range(ROUNDS):
        for label, w in work.items():
            samples[label].append(timed(w, number[label]))
    size = {"kvproto": len(frame), "msgspec": len(packed), "frames": sum(map(len, parts))}
    return {"samples_us": samples, "bytes": size}


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the samples in {RESULTS.name}")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    found = {}
    print(
        f"{'median of encode + decode, us':36}{'kvproto':>10}{'msgspec':>10}{'ratio':>8}{'frames':>10} | bytes{'kvproto':>9}{'msgspec':>10}{'frames':>9}"
    )
    for name in SHAPES:
        print(f"  {name} ...", end="\r", file=sys.stderr, flush=True)
        row = found[name] = measure(name)
        both = {
            who: sum(median(row["samples_us"][f"{who} {way}"]) for way in ("encode", "decode"))
            for who in ("kvproto", "msgspec", "frames")
        }
        row["median_us"] = both | {label: median(s) for label, s in row["samples_us"].items()}
        b = row["bytes"]
        print(
            f"{name:36}{both['kvproto']:10.1f}{both['msgspec']:10.1f}{both['kvproto'] / both['msgspec']:8.2f}{both['frames']:10.1f} |"
            f"      {b['kvproto']:8,}  {b['msgspec']:8,} {b['frames']:8,}"
        )
    if args.write:
        versions = {
            "python": platform.python_version(),
            "msgspec": msgspec.__version__,
            "msgpack": ".".join(map(str, msgpack.version)),
            "numpy": np.__version__,
            "attrs": attrs.__version__,
        }
        head = {
            "benchmark": "codec",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.system()}",
            "versions": versions,
            "rounds": ROUNDS,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(head | {"shapes": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
