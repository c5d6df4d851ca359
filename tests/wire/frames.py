"""Strategies that follow the tables, and frames made by hand."""

from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvproto.wire import enums, messages, tables

BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
MESSAGES = [n for n in tables.FIELDS if hasattr(getattr(messages, n), "TYPE")]
DONE_ACK = 0x0206
GOODBYE = 0x0005
# DoneAck of session 5, request 6, sequence 1: magic, 1.0, type 0x0206, flags, reserved, length 7, map of 3
GOLDEN = bytes.fromhex("4b565057 01 00 0602 0000 0000 07000000 83 0105 0206 0301")


def frame(type_: int, body: bytes | str, major: int = 1) -> bytes:
    body = bytes.fromhex(body) if isinstance(body, str) else body
    return b"KVPW" + bytes([major, 0]) + type_.to_bytes(2, "little") + bytes(4) + len(body).to_bytes(4, "little") + body


def extended(value: str) -> bytes:
    """DoneAck with the value in a fourth field, 0x8001, that may be ignored."""
    return frame(DONE_ACK, "84 0105 0206 0301 cd8001" + value)


@cache
def values(row: tables.Field) -> st.SearchStrategy[Any]:
    _, _, type_, _, low, high, length = row
    if type_.startswith("list<"):
        inner = values((0, "", type_[5:-1], True, None, None, None))
        return st.lists(inner, min_size=low or 0, max_size=3).map(tuple)
    if type_.startswith("array<"):
        widths = [bits for bits in (8, 16, 32, 64) if bits <= BITS[type_[6:-1]]]
        elements = st.one_of(*(st.lists(st.integers(0, 2**b - 1), min_size=low or 0, max_size=5) for b in widths))
        return elements.map(lambda v: np.array(v, np.uint64))
    if type_.startswith("struct:"):
        return objects(type_[7:])
    if type_.startswith("enum:"):
        known = st.sampled_from(list(getattr(enums, type_[5:])))
        return known | st.integers(0xF000, 0xFFFF) if type_[5:] in tables.OPEN_ENUMS else known
    if type_ == "bytes":
        return st.binary(min_size=length or low or 0, max_size=length or 300)
    if type_ == "str":
        return st.text(min_size=low or 0, max_size=(high or 80) // 4)
    if type_ == "bool":
        return st.booleans()
    return st.integers(low or 0, high if high is not None else 2 ** BITS[type_] - 1)


@cache
def optional(row: tables.Field) -> st.SearchStrategy[Any]:
    return st.none() | values(row)


@cache
def objects(name: str) -> st.SearchStrategy[Any]:
    """A message or struct that keeps its rules."""
    return _objects(name)


@st.composite
def _objects(draw: st.DrawFn, name: str) -> Any:
    rows = {r[1]: r for r in tables.FIELDS[name]}
    fields = {n: draw(values(r) if r[3] else optional(r)) for n, r in rows.items()}
    for rule, args, _ in tables.RULES.get(name, ()):
        repair(draw, rule, [str(a) for a in args], fields, rows)
    return getattr(messages, name)(**fields)


def repair(draw: st.DrawFn, rule: str, args: list[str], fields: dict[str, Any], rows: dict[str, tables.Field]) -> None:
    """Bend the fields until the rule holds."""
    field = args[0]
    value = fields[field]
    if rule in ("present_iff", "only_if"):
        type_ = rows[args[1]][2][5:]
        wanted = fields[args[1]] == getattr(enums, type_)[args[2]]
        if not wanted:
            fields[field] = None
        elif rule == "present_iff" and value is None:
            fields[field] = draw(values(rows[field]))
    elif value is None:
        return
    elif rule in ("ascend", "rise", "unique"):
        if isinstance(value, np.ndarray):
            fields[field] = np.unique(value)
        elif len(args) == 1:
            fields[field] = tuple(sorted(set(value)))
        else:
            elements = value if rule == "rise" else {getattr(e, args[1]): e for e in value}.values()
            fields[field] = tuple(sorted(elements, key=lambda e: getattr(e, args[1])))
    elif rule == "subset":
        fields[field] = tuple(v for v in value if v in fields[args[1]])
    elif rule in ("le", "lt"):
        low, high = sorted((value, fields[args[1]]))
        if low == high and rule == "lt":
            low, high = 0, max(high, 1)
        fields[field], fields[args[1]] = low, high
    elif rule == "sum_le":
        if args[2] in fields:
            fields[args[2]] = min(value + fields[args[1]], 2**64 - 1)
            fields[field] = fields[args[2]] - fields[args[1]]
        else:
            fields[field] = min(value, 2**62)
            fields[args[1]] = min(fields[args[1]], 2**62)
    elif rule == "same_length":
        fields |= {a: np.resize(fields[a], len(value)) for a in args}
    else:
        raise AssertionError(rule)


def transfer(*grants: messages.Grants) -> messages.Transfer:
    return messages.Transfer(
        session=1,
        request=1,
        sequence=1,
        ticket=b"\xab" * 16,
        content=bytes(32),
        source_version=1,
        sink_version=1,
        epoch=1,
        grants=grants,
        writers=np.array([0]),
    )


def grant(items: Any) -> messages.Grants:
    return messages.Grants(group=0, first=0, count=9, valid=9, items=items)


def register(length: int = 4096) -> messages.Register:
    regions = tuple(
        messages.Region(
            id=i,
            base=1 << 46,
            length=length if i == 2 else 1,
            kind=enums.MemoryKind.HOST,
            boot=bytes(16),
            handles=(messages.Handle(transport=enums.Transport.SHM, data=b"\xcd\xef\xcd\xef"),),
        )
        for i in range(3)
    )
    return messages.Register(
        session=1,
        request=1,
        source=bytes(32),
        sink=bytes(32),
        epoch=1,
        access=enums.Access.WRITE,
        regions=regions,
        columns=(),
        routes=(),
        plan=bytes(32),
    )
