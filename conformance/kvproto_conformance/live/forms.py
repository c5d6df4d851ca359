"""Rows of a cache that a hand-over converts, byte by byte: the suite's own formulas over labelled content."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvproto_conformance.conversion import convert, scales_of

Json = dict[str, Any]
Bytes = npt.NDArray[np.uint8]
_SIZE = {"BF16": 2, "F8E4M3": 1, "F32": 4}


class Form(NamedTuple):
    """The lanes of the source from which those of one part of the sink are made."""

    made: str
    """The form that they get: NARROW, WIDE or SCALES; empty if they move as they are."""
    name: str
    dtype: str
    lane: int
    """Bytes of a lane of that part of the source."""
    size: int
    """Bytes of a lane of the sink."""
    scales: str
    """The source's part that scales it, if that is read."""
    blocks: int
    stated: tuple[str, ...]
    """Float32 in hex of each layer, or one of all, if scales are stated."""

    @classmethod
    def of(cls, home: Json, group: Json, name: str) -> Form | None:
        """The form of a part of the sink's group, whose source is `home`; None if neither side states a conversion."""
        if not any("x_conversions" in part for part in home["parts"]):
            return None
        wanted, parts = _named(group, name), {part["name"]: part for part in home["parts"]}
        size = int(wanted["lane_bytes"])
        if name not in parts:
            scaled = next(part for part in group["parts"] if scales_of(group, part) is wanted)
            part = parts[scaled["name"]]
            return cls("SCALES", part["name"], part["dtype"], int(part["lane_bytes"]), size, "", size // 4, ())
        part = parts[name]
        made = "" if part["dtype"] == wanted["dtype"] else "WIDE" if part["dtype"] == "F8E4M3" else "NARROW"
        narrow, owner = (part, home) if made == "WIDE" else (wanted, group)
        beside = scales_of(owner, narrow) if made else None
        blocks = 1 if beside is None else int(beside["lane_bytes"]) // 4
        stated = tuple(int(bits).to_bytes(4, "little").hex() for bits in narrow.get("x_scales", ()) if made)
        read = "" if beside is None or made != "WIDE" else beside["name"]
        return cls(made, name, part["dtype"], int(part["lane_bytes"]), size, read, blocks, stated)

    def bytes_of(self, layer: int, data: bytes, scales: bytes) -> bytes:
        """A lane of the sink, made of one of the source and the scales that are read with it."""
        if not self.made:
            return data
        stated = scales.hex() or (self.stated[layer if len(self.stated) > 1 else 0] if self.stated else "")
        found = _converted(self.dtype, data, self.blocks, stated)
        return found[1] if self.made == "SCALES" else found[0]


@lru_cache(1 << 16)
def _converted(dtype: str, data: bytes, blocks: int, scales: str) -> tuple[bytes, bytes]:
    """A lane in its other form, and the scales that were made."""
    found = convert({"dtype": dtype, "data": data.hex(), "blocks": str(blocks), "scales": scales})
    return bytes.fromhex(found["data"]), bytes.fromhex(found.get("scales", ""))


def _named(group: Json, name: str) -> Json:
    found: Json = next(part for part in group["parts"] if part["name"] == name)
    return found


def values(label: Bytes, dtype: str) -> Bytes:
    """Labels [rows, bytes] of a part that states a conversion, as numbers of sizes that conversions tell apart.

    Of BF16 up to 4, of scales up to 2^-7, and any code of FP8.
    """
    data = label.copy()
    if dtype == "BF16":
        data[:, 1::2] = data[:, 1::2] & 0x80 | 0x3C | data[:, 1::2] & 3
    elif dtype == "F32":
        data[:, 3::4] = 0x3B
    return data


def dtype_of(group: Json, name: str) -> str:
    """The dtype of a part whose content is of such numbers; empty if the group states no conversion."""
    return _named(group, name)["dtype"] if any("x_conversions" in part for part in group["parts"]) else ""


def other(geometry: Json, conversion: str, blocks: int = 2) -> Json:
    """A Description whose parts of a group that states a conversion are in its other form, by this conversion."""
    return geometry | {"groups": [_other(group, conversion, blocks) for group in geometry["groups"]]}


STATED = {"k": ["1048576000", "1008981770"], "v": ["1017370378"]}
"""Bits of 0.25 and of 0.01 in layers 0 and 1, and of 0.02: division by the first makes ties."""


def _other(group: Json, conversion: str, blocks: int) -> Json:
    if not any("x_conversions" in part for part in group["parts"]):
        return group
    scales = [scales_of(group, part) for part in group["parts"]]
    kept = [part for part in group["parts"] if not any(part is each for each in scales)]
    made = [_turned(part, conversion) for part in kept]
    if conversion == "e4m3_block" and made[0]["dtype"] == "F8E4M3":
        made += [
            {"name": f"{part['name']}_scale", "dtype": "F32", "lanes": part["lanes"], "lane_bytes": str(4 * blocks)}
            for part in kept
        ]
    return group | {"parts": made}


def _turned(part: Json, conversion: str) -> Json:
    narrows = part["dtype"] == "BF16"
    elements = int(part["lane_bytes"]) // _SIZE[part["dtype"]]
    stated = {key: value for key, value in part.items() if not key.startswith("x_")}
    stated |= {"dtype": "F8E4M3", "lane_bytes": str(elements)} if narrows else {
        "dtype": "BF16", "lane_bytes": str(2 * elements)}  # fmt: skip
    stated["x_conversions"] = [conversion]
    if narrows and conversion == "e4m3_tensor":
        stated["x_scales"] = STATED[part["name"]]
    return stated


def unstated(geometry: Json) -> Json:
    """The same Description without the fields of conversions."""
    return geometry | {
        "groups": [
            group | {"parts": [{k: v for k, v in p.items() if not k.startswith("x_")} for p in group["parts"]]}
            for group in geometry["groups"]
        ]
    }


def restated(geometry: Json) -> Json:
    """A Description whose rows of elements are of another dtype, of which it states conversions to and from others."""

    def part(stated: Json) -> Json:
        dtype = "BF16" if stated["dtype"] != "BF16" else "F8E4M3"
        found = stated | {"dtype": dtype, "x_conversions": ["e4m3_tensor"]}
        return found if dtype == "BF16" else found | {"x_scales": ["1048576000"]}

    return geometry | {
        "groups": [
            group if group["kind"] == "HANDOFF" else group | {"parts": [part(p) for p in group["parts"]]}
            for group in geometry["groups"]
        ]
    }


def joined(lanes: Iterable[bytes]) -> Bytes:
    """Lanes as one row of bytes."""
    return np.frombuffer(b"".join(lanes), np.uint8)
