"""The suite's own conversion: what parts may state, the converted source, and the formulas number by number; slow."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from kvproto_conformance.codec import Refusal
from kvproto_conformance.codec.facts import CONVERSIONS, PART_NAMES, SCALED_BY

Json = dict[str, Any]
_BYTES = {"BF16": 2, "F8E4M3": 1, "F32": 4}


# what a Description states


def check_parts(group: Json, at: str) -> None:
    """Raise Refusal for a part that cannot have what it states (KVP-CNV-STATED)."""
    for j, part in enumerate(group["parts"]):
        known, path = _known(part), f"{at}.parts[{j}]"
        scales = scales_of(group, part)
        rows = [CONVERSIONS[name] for name in known]
        narrow = [name for name in known if part["dtype"] == CONVERSIONS[name]["narrow"]]
        size = int(part["lane_bytes"])
        good = all(part["dtype"] in (row["wide"], row["narrow"]) for row in rows) and len(narrow) < 2
        if known:
            good = good and not {"encoding", "at", "whole"} & part.keys() and group["kind"] != "HANDOFF"
        if known and not narrow:
            good = good and size % 2 == 0 and scales is None
        by_part = bool(narrow) and CONVERSIONS[narrow[0]]["scales"] == "part"
        if by_part:
            good = good and scales is not None and _fit(part, scales)
        _need(good, f"{path}.x_conversions")
        wanted = bool(narrow) and not by_part
        bits = [int(x) for x in part.get("x_scales", ())]
        _need(bool(bits) == wanted and all(1 <= x >> 23 < 255 for x in bits), f"{path}.x_scales")


def _fit(part: Json, scales: Json) -> bool:
    number, rest = divmod(int(scales["lane_bytes"]), 4)
    alike = scales["dtype"] == "F32" and scales["lanes"] == part["lanes"] and "whole" not in scales
    return alike and rest == 0 and int(part["lane_bytes"]) % number == 0


def check_share(group: Json, share: Json, at: str) -> None:
    """Raise Refusal for lanes or layers that lack scales (KVP-CNV-LANES)."""
    for j, part in enumerate(group["parts"]):
        scales = scales_of(group, part)
        if scales is not None and _known(part):
            _need(_spans(share, j) == _spans(share, group["parts"].index(scales)), f"{at}.lanes")
        stated = part.get("x_scales", ())
        _need(len(stated) < 2 or all(int(layer) < len(stated) for layer in share["layers"]), f"{at}.layers")


def _known(part: Json) -> list[str]:
    return [name for name in part.get("x_conversions", ()) if name in CONVERSIONS]


def _registered(name: str) -> str:
    return next((row for row, aliases in PART_NAMES.items() if name in (row, *aliases)), name)


def scales_of(group: Json, part: Json) -> Json | None:
    """The part of the group that by its name scales another."""
    name = _registered(part["name"])
    return next((p for p in group["parts"] if SCALED_BY.get(_registered(p["name"])) == name), None)


def _spans(share: Json, part: int) -> list[tuple[int, int]]:
    return [(int(s["lo"]), int(s["hi"])) for s in share["lanes"] if int(s["part"]) == part]


def converted(source: Json, sink: Json) -> Json:
    """The source's Description, with each part in the form that a group of the sink has (KVP-CNV-PLAN)."""
    changed = {}
    for group in source["groups"]:
        mine = _layers(source, group)
        taken = [g for g in sink["groups"] if g["model"] == group["model"] and mine & _layers(sink, g)]
        changed[group["id"]] = _group(group, taken)
    ranks = [
        rank | {"owns": [share | {"lanes": _lanes(share, changed[share["group"]][1])} for share in rank["owns"]]}
        for rank in source["ranks"]
    ]
    return source | {"groups": [changed[g["id"]][0] for g in source["groups"]], "ranks": ranks}


def same_scales(a: Json, b: Json, layers: Iterable[int]) -> bool:
    """Whether two parts state no two scales of one of these layers (KVP-CNV-SCALES)."""
    mine, yours = (part.get("x_scales", ()) for part in (a, b))
    if a["dtype"] != b["dtype"] or not mine or not yours:
        return True
    return all(mine[n if len(mine) > 1 else 0] == yours[n if len(yours) > 1 else 0] for n in layers)


def _layers(side: Json, group: Json) -> set[str]:
    owned = (share for rank in side["ranks"] for share in rank["owns"] if share["group"] == group["id"])
    return {layer for share in owned for layer in share["layers"]}


def _group(group: Json, taken: Iterable[Json]) -> tuple[Json, list[int]]:
    """A group in other forms, and of each of its parts the part whose lanes it has."""
    parts, behind, gone = list(group["parts"]), list[tuple[Json, int]](), list[Json | None]()
    for i, part in enumerate(group["parts"]):
        found = (
            (g, other)
            for g in taken
            for other in g["parts"]
            if other["name"] == part["name"] and other["dtype"] != part["dtype"]
            for name in _known(part)
            if name in _known(other)
            and {part["dtype"], other["dtype"]} == {CONVERSIONS[name][k] for k in ("wide", "narrow")}
        )
        to = next(found, None)
        if to is None:
            continue
        theirs, other = to
        size = int(part["lane_bytes"]) // _BYTES[part["dtype"]] * _BYTES[other["dtype"]]
        parts[i] = part | {"dtype": other["dtype"], "lane_bytes": str(size)}
        scales = scales_of(theirs, other)
        if other["dtype"] == "F8E4M3" and scales is not None:
            behind.append((scales | {"lanes": part["lanes"]}, i))
        elif other["dtype"] == "BF16":
            gone.append(scales_of(group, part))
    kept = [(part, i) for i, part in enumerate(parts) if group["parts"][i] not in gone]
    return group | {"parts": [part for part, _ in kept + behind]}, [i for _, i in kept + behind]


def _lanes(share: Json, lanes_of: list[int]) -> list[Json]:
    return [
        {"part": str(p), "lo": str(lo), "hi": str(hi)} for p, i in enumerate(lanes_of) for lo, hi in _spans(share, i)
    ]


def _need(good: bool, path: str) -> None:
    if not good:
        raise Refusal("BAD_GEOMETRY", path)


# the formulas (KVP-CNV-EXACT)


def convert(question: Json) -> Json:
    """The other form of one lane: `data`, and the `scales` that were made of it."""
    data, blocks = bytes.fromhex(question["data"]), int(question["blocks"])
    stated = bytes.fromhex(question["scales"])
    widens = question["dtype"] == "F8E4M3"
    elements = (
        [_e4m3(code) for code in data] if widens else [_f32(b"\0\0" + data[i : i + 2]) for i in range(0, len(data), 2)]
    )
    size = len(elements) // blocks
    cut = [elements[i : i + size] for i in range(0, len(elements), size)]
    scales = [_f32(stated[i : i + 4]) for i in range(0, len(stated), 4)] or [_scale(block) for block in cut]
    pairs = [(x, s) for block, s in zip(cut, scales, strict=True) for x in block]
    if widens:
        return {"data": b"".join(_to_bf16(_rounded(x * s)) for x, s in pairs).hex()}
    found = {"data": bytes(_to_e4m3(_rounded(x / s)) for x, s in pairs).hex()}
    return found if stated else found | {"scales": b"".join(struct.pack("<f", s) for s in scales).hex()}


def _scale(block: list[float]) -> float:
    return _rounded(max([abs(x) for x in block if math.isfinite(x)] + [2.0**-100]) / 448)


def _f32(data: bytes) -> float:
    return float(struct.unpack("<f", data)[0])


def _rounded(x: float) -> float:
    """The nearest float32; of a quotient or product of two, rounding to a double before it changes nothing."""
    try:
        return _f32(struct.pack("<f", x))
    except OverflowError:
        return math.copysign(math.inf, x)


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return math.copysign(size, -1 if code & 0x80 else 1)


_FINITE = [_e4m3(code) for code in range(0x7F)]


def _to_e4m3(y: float) -> int:
    if math.isnan(y):
        return 0x7F
    size = Fraction(min(abs(y), 448))
    above = bisect_left(_FINITE, size)  # the number that is as large or larger, and the one before
    code = min(range(max(above - 1, 0), above + 1), key=lambda c: (abs(Fraction(_FINITE[c]) - size), c & 1))
    return code | (0x80 if math.copysign(1, y) < 0 else 0)


def _to_bf16(y: float) -> bytes:
    if math.isnan(y):
        return bytes((0xC0, 0x7F))
    (bits,) = struct.unpack("<I", struct.pack("<f", abs(y)))
    low = bits >> 16
    if math.isfinite(y):
        value, above = (
            Fraction(2) ** 128 if b == 0x7F80 else Fraction(_f32(struct.pack("<I", b << 16))) for b in (low, low + 1)
        )
        off, more = Fraction(abs(y)) - value, above - Fraction(abs(y))
        low += off > more or (off == more and low & 1 == 1)
    return struct.pack("<H", low | (0x8000 if math.copysign(1, y) < 0 else 0))
