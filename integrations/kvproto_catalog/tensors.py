"""Places of a rank's caches in an engine's tensors: pools as orders of axes, and the columns that follow.

An order names axes, outermost first: L layer, P part, B block (an item), N token (a row), H head (a lane); the elements
of a lane come last and are not named. Each place on the axes before a bar has its own tensor. "L|PBNH" is a tensor for
each layer, with all of K before all of V; "LBNHP" is one tensor, in which K and V of a head lie side by side.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import attrs

from kvproto.copying.columns import columns_at
from kvproto.errors import bad
from kvproto.planning.geometry import Geometry, Group, Owns
from kvproto.planning.kinds import KINDS
from kvproto.wire.messages import Columns

WORDS = {"L": "layer", "P": "part", "B": "block", "N": "token", "H": "head", "C": "byte"}


@attrs.frozen
class Slab:
    """Layers of equal size and shape, which lie in memory by one order of axes."""

    name: str
    order: str
    layers: tuple[tuple[int, tuple[int, ...]], ...]
    """For each place on axis L: the layer, and the ids of the groups whose parts are on axis P."""
    page: int = 0
    """Least bytes of a layer's block; what its parts do not fill is padding."""
    block: int = 0
    """Least bytes from one block to the next, if blocks are outermost."""
    arena: str | None = None
    """An allocation that several slabs share; by default each tensor has its own."""
    offset: int = 0
    """The byte of the arena at which the slab begins."""


@attrs.frozen
class Array:
    """An engine's view of an allocation: lengths and byte strides by axis, outermost first."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    region: int
    offset: int = 0


@attrs.frozen
class RankMemory:
    """The memory that a rank registers: allocations, the views of them, and columns group by group."""

    regions: tuple[tuple[str, int], ...]
    """Name and bytes of each allocation; its region id is its index."""
    arrays: tuple[Array, ...]
    columns: tuple[Columns, ...]


@attrs.define
class _PlacedPart:
    """One part on axis P: its extents, the strides so far, and the bytes that they span."""

    nth: int
    """Index of its group among those of the layer."""
    index: int
    """Index among the parts of that group."""
    name: str
    extent: dict[str, int]
    span: int
    offset: int = 0
    stride: dict[str, int] = attrs.field(factory=dict)


def rank_memory(geometry: Geometry, rank: int, slabs: Iterable[Slab], items: Mapping[int, int]) -> RankMemory:
    """Tensors and columns of one rank, with `items[id]` blocks or slots of each group; raises OUT_OF_RANGE."""
    groups = {g.id: g for g in geometry.groups}
    shares = next(r.owns for r in geometry.ranks if r.rank == rank)
    owned = {o.group: o for o in shares if KINDS[groups[o.group].kind].has_memory}
    regions, sizes, arrays = dict[str, int](), dict[str, int](), dict[str, Array]()  # ids of regions, bytes, views
    places: dict[int, dict[tuple[int, int], _Place]] = {id: {} for id in owned}
    for slab in slabs:
        split, _, inner = slab.order.rpartition("|")
        here = [(layer, ids) for layer, ids in slab.layers if all(i in owned and layer in owned[i].layers for i in ids)]
        counts = {items[i] for _, ids in here for i in ids}
        if len(counts) > 1:
            raise bad("items", f"as many of all groups of {slab.name}", sorted(counts))
        laid = {
            ids: _strides(slab, inner, [(groups[i], owned[i]) for i in ids], len(here), min(counts)) for _, ids in here
        }
        for place, (layer, ids) in enumerate(here):
            parts = laid[ids]
            for part in parts:
                name = slab.name + f".{layer}" * ("L" in split) + f".{part.name}" * ("P" in split)
                where = slab.arena or name
                region = regions.setdefault(where, len(regions))
                sizes[where] = max(sizes.get(where, 0), slab.offset + part.span)
                at = slab.offset + part.offset + part.stride.get("L", 0) * place
                places[ids[part.nth]][layer, part.index] = region, at, part.stride
                if name not in arrays:
                    shown = [p for p in parts if p is part or "P" not in split]
                    arrays[name] = _view(name, inner, shown, region, slab.offset)
    columns = tuple(_columns(groups[id], share, items[id], places[id]) for id, share in owned.items())
    return RankMemory(tuple(sizes.items()), tuple(arrays.values()), columns)


def _strides(slab: Slab, inner: str, held: Sequence[tuple[Group, Owns]], layers: int, items: int) -> list[_PlacedPart]:
    """The parts of a layer with the stride of each axis, computed from the elements of a lane outwards."""
    parts: list[_PlacedPart] = []
    for nth, (group, share) in enumerate(held):
        for index, stated in enumerate(group.parts):
            heads = sum(s.hi - s.lo for s in share.lanes if s.part == index)
            parts.append(_PlacedPart(nth, index, stated.name, {"N": group.rows, "H": heads}, stated.lane_bytes))
    for i, axis in reversed([*enumerate(inner)]):
        if axis in "LB" and not set(inner[:i]) - {"L", "B"} and not any(p.stride.keys() & {"L", "B"} for p in parts):
            for part in parts:
                part.span = max(part.span, slab.page)
        if axis == "P":
            for part, before in zip(parts, accumulate((p.span for p in parts), initial=0), strict=False):
                part.offset += before
            total = sum(p.span for p in parts)
            for part in parts:
                part.span = total
        for part in parts if axis != "P" else ():
            part.stride[axis] = max(part.span, slab.block if axis == "B" else 0)
            part.extent |= {"L": layers, "B": items}
            part.span = part.stride[axis] * part.extent[axis]
    return parts


def _view(name: str, inner: str, parts: Sequence[_PlacedPart], region: int, offset: int) -> Array:
    """A tensor as an engine sees it: parts side by side in a lane share an axis, and so do parts of unequal shape."""
    axes, shape, strides = [], [], []
    beside = inner.endswith("P")
    flat = len({(p.extent["N"], p.extent["H"], 0 if beside else p.stride[inner[-1]]) for p in parts}) > 1
    for axis in inner:
        if axis == "P":
            if flat:
                break
            if len(parts) > 1 and not beside:
                axes.append(axis)
                shape.append(len(parts))
                strides.append(parts[1].offset - parts[0].offset)
            continue
        axes.append(axis)
        shape.append(parts[0].extent[axis])
        strides.append(parts[0].stride[axis])
    last = min(strides, default=0) if flat or beside else parts[0].stride[inner[-1]]
    return Array(name, tuple(WORDS[a] for a in (*axes, "C")), (*shape, last), (*strides, 1), region, offset)


_Place = tuple[int, int, dict[str, int]]
"""Region, offset, and the stride of each axis."""


def _columns(group: Group, share: Owns, items: int, places: Mapping[tuple[int, int], _Place]) -> Columns:
    """One entry for each owned layer and, within it, each part."""
    entries = [(layer, part) for layer in share.layers.tolist() for part in range(len(group.parts))]
    if missing := [entry for entry in entries if entry not in places]:
        raise bad(f"pools of {group.name!r}", f"a tensor with part {missing[0][1]}", f"none of layer {missing[0][0]}")
    rows = [
        (region, offset, stride["B"], stride["N"], stride["H"])
        for region, offset, stride in map(places.__getitem__, entries)
    ]
    return columns_at(group.id, items, rows)
