"""Bytes that a rank pair moves, by coordinate, as the suite's own planner says, and where a rank keeps each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvproto_conformance.conversion import converted
from kvproto_conformance.dcp import Deal
from kvproto_conformance.live.forms import Form, joined, values
from kvproto_conformance.lowering import Side
from kvproto_conformance.planner import boxes
from kvproto_conformance.sections import place

Json = dict[str, Any]
Bytes = npt.NDArray[np.uint8]
_MASK = 2**64 - 1


class Piece(NamedTuple):
    """Bytes [lo, hi) of the lane axis of one row; sorted, these are the order of the packed stream."""

    model: int
    layer: int
    part: int
    """The index in the sink's group; for sections, that of the first."""
    map: int
    row: int
    """The global row."""
    lo: int
    hi: int
    group: str
    """The sink's group."""
    home: str
    """The source's group."""
    name: str
    """The part's name."""
    form: Form | None = None
    """Of parts that state a conversion: what the bytes are made of."""


class _Side(Side):
    """A side that works out its rows only once."""

    def rows(self, id: str) -> dict[int, tuple[int, int]]:
        known: dict[str, dict[int, tuple[int, int]]] = self.__dict__.setdefault("_known", {})
        if id not in known:
            known[id] = super().rows(id)
        return known[id]


def side(geometry: Json, rank: int, columns: Iterable[Json] = (), windows: Iterable[Json] = ()) -> Side:
    """A rank of a Description (JSON form), with what it stated about its memory and about one request."""
    return _Side({"geometry": geometry, "rank": str(rank), "columns": list(columns), "windows": list(windows)})


def pieces(source: Json, sink: Json, pair: tuple[int, int], features: Iterable[str], wanted: Side) -> list[Piece]:
    """Pieces from one source rank to one sink rank for the windows of `wanted`, in the order of the packed stream."""
    here = side(converted(source, sink) if "CONVERT" in features else source, pair[0])
    homes = {group["id"]: group for group in source["groups"]}
    maps: dict[tuple[str, str, int, int], int] = {}
    rows: dict[tuple[str, str, int], list[int]] = {}
    found = []
    for a, b, group, model, first, last, index, lo, hi, c, d, _ in boxes(source, sink, features):
        if (a, b) != pair or wanted.groups[str(group)]["kind"] == "HANDOFF":
            continue
        name = wanted.groups[str(group)]["parts"][index]["name"]
        for layer in range(first, last):
            home = here.home(model, name, layer)
            number = maps.setdefault((home, str(group), c, d), len(maps))
            if (home, str(group), c) not in rows:
                rows[home, str(group), c] = list(_rows(here.groups[home], wanted, str(group), c))
            form = Form.of(homes[home], wanted.groups[str(group)], name)
            found += [
                Piece(model, layer, index, number, row, lo, hi, str(group), home, name, form)
                for row in rows[home, str(group), c]
            ]
    return sorted(found)


def _rows(src: Json, wanted: Side, group: str, c: int) -> Iterator[int]:
    """Global rows of the windows that the sink rank owns and class c of the source has."""
    deal, step = Deal.of(src), int(src["tokens_per_row"])
    for row in wanted.rows(group):
        owner = deal.owner(row * step) if src["kind"] == "PAGE" else (0, row)
        if owner is not None and owner[0] == c:
            yield row


def spans(of: Side, group: str, piece: Piece) -> Iterator[tuple[int, int, int, int]]:
    """The place of a piece at a rank: region, offset, and the bytes [lo, hi) of the lane axis that lie there."""
    stated, share, columns = of.groups[group], of.shares[group], of.columns[group]
    item, within = of.rows(group)[piece.row]
    parts = stated["parts"]
    for p, part in enumerate(parts):
        if part["name"] != piece.name:
            continue
        k = share["layers"].index(str(piece.layer)) * len(parts) + p
        at, *strides = (int(columns[name][k]) for name in ("offset", "item_stride", "row_stride", "lane_stride"))
        lanes = [n for s in share["lanes"] if int(s["part"]) == p for n in range(int(s["lo"]), int(s["hi"]))]
        for local, lane in enumerate(lanes):
            lo, hi = place(part, lane)
            first, end = max(lo, piece.lo), min(hi, piece.hi)
            if first < end:
                numbers = zip((item, within, local), strides, strict=True)
                yield int(columns["region"][k]), at + sum(n * s for n, s in numbers) + first - lo, first, end


def label(seed: str, model: int, layer: int, part: str, rows: npt.ArrayLike, lo: int, hi: int) -> Bytes:
    """The content of a request's cache, [rows, hi - lo]: each byte follows from its coordinate, whatever the layout."""
    key = np.uint64(crc32(f"{seed}/{model}/{layer}/{part}".encode()))
    x = np.asarray(rows, np.uint64).reshape(-1, 1) * np.uint64(0x9E3779B97F4A7C15)
    x = (x + np.arange(lo, hi, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)) ^ (key << np.uint64(20))
    x = (x ^ x >> np.uint64(31)) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(40)).astype(np.uint8)


def content(
    seed: str, model: int, layer: int, part: str, rows: npt.ArrayLike, lo: int, hi: int, form: Form | None
) -> Bytes:
    """The bytes [rows, hi - lo] of a part of the sink that a hand-over has to bring; of a form, whole lanes."""
    if form is None:
        return label(seed, model, layer, part, rows, lo, hi)
    first, end = lo // form.size, hi // form.size
    held = values(label(seed, model, layer, form.name, rows, first * form.lane, end * form.lane), form.dtype)
    scales = np.zeros((len(held), 0), np.uint8)
    if form.scales:
        width = 4 * form.blocks
        scales = values(label(seed, model, layer, form.scales, rows, first * width, end * width), "F32")
    made: Bytes = np.stack(
        [
            joined(
                form.bytes_of(layer, lane.tobytes(), beside.tobytes())
                for lane, beside in zip(row.reshape(end - first, -1), beside_row.reshape(end - first, -1), strict=True)
            )
            for row, beside_row in zip(held, scales, strict=True)
        ]
    )
    return made


def carried(piece: Piece, seed: str, lo: int, hi: int) -> Bytes:
    """The bytes [lo, hi) of the lane axis of a piece."""
    (held,) = content(seed, piece.model, piece.layer, piece.name, [piece.row], lo, hi, piece.form)
    found: Bytes = held
    return found


def checksums(moved: Iterable[Piece], seed: str) -> Mapping[str, int]:
    """Feature VERIFY: the checksum of each of the sink's groups, of labelled bytes."""
    found: dict[str, int] = {}
    lanes: dict[tuple[int, int], npt.NDArray[np.uint64]] = {}
    for p in moved:
        if (p.lo, p.hi) not in lanes:
            lanes[p.lo, p.hi] = np.array([_mix(x) for x in range(p.lo, p.hi)], np.uint64)
        held = carried(p, seed, p.lo, p.hi).astype(np.uint64)
        weight = _mix((p.row + _mix((p.model << 48) + (p.layer << 16) + p.part)) & _MASK)
        total = int((held * lanes[p.lo, p.hi]).sum(dtype=np.uint64)) * weight
        found[p.group] = (found.get(p.group, 0) + total) & _MASK
    return found


def _mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return (z ^ z >> 31) | 1
