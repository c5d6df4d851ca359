"""The suite's own lowering: lowering.md word by word, byte by byte, over JSON forms; slow.

It shares no code with kvproto. The answer has one form, however it was found: runs of bytes that are contiguous on both
sides, as long as they can be, by ascending place at the sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from kvproto_conformance.dcp import Deal
from kvproto_conformance.planner import boxes
from kvproto_conformance.sections import place

Json = dict[str, Any]
Place = tuple[int, int]
"""Region and offset; or item and row."""


class Side:
    """One rank's share, columns and windows."""

    def __init__(self, given: Json) -> None:
        geometry = given["geometry"]
        self.groups = {g["id"]: g for g in geometry["groups"]}
        self.shares = {s["group"]: s for r in geometry["ranks"] if r["rank"] == given["rank"] for s in r["owns"]}
        self.columns = {c["group"]: c for c in given["columns"]}
        self.windows = {w["group"]: w for w in given["windows"]}

    def home(self, model: int, part: str, layer: int) -> str:
        """The group in which this rank has a layer of a part."""
        homes = (
            str(id)
            for id, share in self.shares.items()
            if self.groups[id]["model"] == str(model)
            and str(layer) in share["layers"]
            and part in [p["name"] for p in self.groups[id]["parts"]]
        )
        return next(homes)

    def rows(self, id: str) -> dict[int, tuple[int, int]]:
        """The rows that the window covers and the rank owns: global row to item and row within the item."""
        group, window = self.groups[id], self.windows[id]
        items = [int(item) for item in window["items"]]
        if group["kind"] == "SLOT":
            whole = any(part.get("encoding") for part in group["parts"])
            live = group["rows"] if whole else group.get("live_rows", group["rows"])
            return {row: (items[0], row) for row in range(int(live))}
        step, rows = int(group["tokens_per_row"]), int(group["rows"])
        first, end = int(window["first"]), int(window["first"]) + int(window["count"])
        last = -(-end // step) if group.get("partial") else end // step
        covered = range(-(-first // step), last)
        if group["kind"] == "RING":
            return {row: (items[0], row % rows) for row in covered if row >= last - rows}
        local = {row: Deal.of(group).owner(row * step) for row in covered}
        mine = {row: at[1] for row, at in local.items() if at and str(at[0]) == self.shares[id]["cp_rank"]}
        base = min(mine.values(), default=0) // rows
        return {row: (items[at // rows - base], at % rows) for row, at in mine.items()}

    def byte(self, id: str, layer: int, part: str, at: tuple[int, int], x: int) -> Place:
        """The place of byte x of the lane axis."""
        group, share, columns = self.groups[id], self.shares[id], self.columns[id]
        for p, stated in enumerate(group["parts"]):
            spans = [span for span in share["lanes"] if int(span["part"]) == p]
            numbers = [lane for span in spans for lane in range(int(span["lo"]), int(span["hi"]))]
            for local, lane in enumerate(numbers if stated["name"] == part else ()):
                lo, hi = place(stated, lane)
                if lo <= x < hi:
                    k = share["layers"].index(str(layer)) * len(group["parts"]) + p
                    begin, *strides = (
                        int(columns[name][k]) for name in ("offset", "item_stride", "row_stride", "lane_stride")
                    )
                    places = zip((*at, local), strides, strict=True)
                    return int(columns["region"][k]), begin + sum(n * stride for n, stride in places) + x - lo
        raise ValueError(f"byte {x} of {part} is not of this rank")


def copies(source: Json, sink: Json) -> list[list[str]]:
    """[source region, source offset, sink region, sink offset, bytes] of what one rank sends another."""
    return joined({to: from_ for from_, to, _ in _moved(source, sink)})


def stream(source: Json, sink: Json) -> list[list[str]]:
    """The same runs of bytes, in the order in which they are packed; a run ends where any of its three places does."""
    moved = sorted(((*at[1:4], number, *at[4:]), from_, to) for from_, to, at, number in _numbered(source, sink))
    runs: list[list[int]] = []
    for _, from_, to in moved:
        last = runs[-1] if runs else [-1] * 5
        if [last[0], last[1] + last[4], last[2], last[3] + last[4]] == [*from_, *to]:
            last[4] += 1
        else:
            runs.append([*from_, *to, 1])
    return [[str(n) for n in run] for run in runs]


def sums(source: Json, sink: Json) -> dict[str, str]:
    """Feature VERIFY: the checksum of each of the sink's groups that moved a row."""
    found: dict[str, int] = {}
    for from_, _, (group, model, layer, part, row, x) in _moved(source, sink):
        weight = _mix(row + _mix((model << 48) + (layer << 16) + part)) * _mix(x)
        found[str(group)] = (found.get(str(group), 0) + _byte(from_) * weight) % 2**64
    return {group: str(total) for group, total in found.items()}


def page_sums(source: Json, sink: Json) -> dict[str, list[str]]:
    """Feature VERIFY_PAGES: the same sums layer by layer, and page by page of those of which a row moved."""
    found: dict[str, dict[tuple[int, int], int]] = {}
    for from_, _, (group, model, layer, part, row, x) in _moved(source, sink):
        stated = Side(sink).groups[str(group)]
        apart = stated["kind"] == "PAGE" and not any("encoding" in p for p in stated["parts"])
        at = layer, row // int(stated["rows"]) if apart else 0
        weight = _mix(row + _mix((model << 48) + (layer << 16) + part)) * _mix(x)
        sums = found.setdefault(str(group), {})
        sums[at] = (sums.get(at, 0) + _byte(from_) * weight) % 2**64
    routed: dict[str, set[int]] = {}
    for a, b, group, _, first, last, *_ in boxes(source["geometry"], sink["geometry"]):
        if (str(a), str(b)) == (source["rank"], sink["rank"]):
            routed.setdefault(str(group), set()).update(range(first, last))
    return {
        group: [
            str(sums.get((layer, page), 0)) for layer in sorted(routed[group]) for page in sorted({p for _, p in sums})
        ]
        for group, sums in found.items()
    }


def _byte(place: Place) -> int:
    """The byte that the source's memory holds at a place, for checksums of it."""
    region, offset = place
    return (7 * offset + region) % 256


def _mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) | 1


def _moved(source: Json, sink: Json) -> Iterator[tuple[Place, Place, tuple[int, ...]]]:
    """Places of every byte at source and sink; and its group, model, layer, part, row and byte of the lane axis."""
    return ((from_, to, at) for from_, to, at, _ in _numbered(source, sink))


def _numbered(source: Json, sink: Json) -> Iterator[tuple[Place, Place, tuple[int, ...], int]]:
    """The same, and the number of its map."""
    here, there, seen = Side(source), Side(sink), set()
    maps: dict[tuple[str, int, int, int], int] = {}
    for a, b, dst, model, first, last, index, lo, hi, c, d, _ in boxes(source["geometry"], sink["geometry"]):
        if (str(a), str(b)) != (source["rank"], sink["rank"]):
            continue
        if there.groups[str(dst)]["kind"] == "HANDOFF":
            continue
        assert there.shares[str(dst)]["cp_rank"] == str(d)
        part = there.groups[str(dst)]["parts"][index]["name"]
        for layer in range(first, last):
            home = here.home(model, part, layer)
            number = maps.setdefault((home, dst, c, d), len(maps))
            for row, from_, to in _pairs(here, home, there, str(dst), c):
                for x in range(lo, hi):
                    at = there.byte(str(dst), layer, part, to, x)
                    assert at not in seen, "a byte of the sink is written twice"
                    seen.add(at)
                    yield here.byte(home, layer, part, from_, x), at, (dst, model, layer, index, row, x), number


def _pairs(here: Side, home: str, there: Side, id: str, c: int) -> Iterator[tuple[int, Place, Place]]:
    """Global row, and places at source and sink, of all rows of two groups and of one class of the source."""
    src, dst = here.groups[home], there.groups[id]
    held, wanted = here.rows(home), there.rows(id)
    if any("encoding" in p for p in dst["parts"]):
        items = {item: (row, within) for row, (item, within) in wanted.items() if row in held}
        for item, (row, within) in items.items():
            for other in range(int(dst["rows"])):
                yield _global(dst, row, other - within, other), (held[row][0], other), (item, other)
        return
    for row, to in wanted.items():
        owner = Deal.of(src).owner(row * int(src["tokens_per_row"])) if src["kind"] == "PAGE" else (0, row)
        if owner is not None and owner[0] == c:
            yield row, held[row], to


def _global(group: Json, row: int, beyond: int, within: int) -> int:
    """The row that lies so many beyond another of the same rank; of slots and rings, the row within the item."""
    if group["kind"] != "PAGE":
        return within
    deal, step = Deal.of(group), int(group["tokens_per_row"])
    mine = deal.owner(row * step)
    assert mine is not None
    return next(r for r in count() if deal.owner(r * step) == (mine[0], mine[1] + beyond))


def joined(moved: dict[Place, Place]) -> list[list[str]]:
    """Bytes of the sink, each with where it comes from, as the longest runs."""
    runs: list[list[int]] = []
    for (region, at), (other, from_) in sorted(moved.items()):
        if runs and runs[-1][:1] == [other] and runs[-1][2] == region:
            *_, size = runs[-1]
            if (runs[-1][1] + size, runs[-1][3] + size) == (from_, at):
                runs[-1][4] += 1
                continue
        runs.append([other, from_, region, at, 1])
    return [[str(n) for n in run] for run in runs]
