"""Every byte by its global coordinate, with loops only: shares no formula with the planner.

A pool is a flat array. The oracle knows, for a rank, which global coordinate each of its bytes stands for, by walking
tokens one by one and counting.
"""

import hashlib
from collections.abc import Iterator

import attrs
import numpy as np

from kvproto.wire.enums import ItemKind
from kvproto.wire.messages import Columns, Geometry, Group, Owns

Coordinate = tuple[int, int, str, int, int]
"""model, layer, part, row, byte on the lane axis"""


@attrs.frozen
class Request:
    """Tokens [first, first + count) of a group at one rank, and its items from the one with the first owned row."""

    first: int
    count: int
    items: list[int]


def value(at: Coordinate) -> int:
    """The byte that stands at a global coordinate."""
    return hashlib.blake2b(repr(at).encode(), digest_size=1).digest()[0]


def rows_of(group: Group, cp_rank: int, request: Request) -> Iterator[tuple[int, int, int]]:
    """Global row, item and row in the item, of each requested row that the rank owns."""
    if group.kind == ItemKind.SLOT:
        for row in range(group.live_rows or group.rows):
            yield row, request.items[0], row
        return
    step = group.tokens_per_row
    local = 0
    base = None
    end = request.first + request.count
    for row in range(end // step):
        token = row * step
        if group.kind == ItemKind.RING:
            if token >= request.first:
                yield row, request.items[0], row % group.rows
            continue
        if group.cp_size > 1 and ((token - group.origin) // group.interleave) % group.cp_size != cp_rank:
            continue
        if token >= group.origin or group.cp_size == 1:
            if token >= request.first:
                if base is None:
                    base = local // group.rows
                yield row, request.items[local // group.rows - base], local % group.rows
            local += 1


def bytes_of(group: Group, share: Owns, columns: Columns, request: Request) -> Iterator[tuple[int, Coordinate]]:
    """Offset in the region and global coordinate of every requested byte that the rank owns."""
    rows = list(rows_of(group, share.cp_rank, request))
    column = 0
    for layer in share.layers.tolist():
        for p, part in enumerate(group.parts):
            lanes = [lane for span in share.lanes if span.part == p for lane in range(span.lo, span.hi)]
            for row, item, within in rows:
                for local, lane in enumerate(lanes):
                    at = (
                        int(columns.offset[column])
                        + item * int(columns.item_stride[column])
                        + within * int(columns.row_stride[column])
                        + local * int(columns.lane_stride[column])
                    )
                    for byte in range(part.lane_bytes):
                        yield at + byte, (group.model, layer, part.name, row, lane * part.lane_bytes + byte)
            column += 1


def fill(
    geometry: Geometry, rank: int, columns: dict[int, Columns], requests: dict[int, Request], length: int
) -> np.ndarray:
    """A pool whose owned, requested bytes hold their value, and noise elsewhere."""
    pool = np.random.default_rng(rank).integers(0, 256, length, np.uint8)
    for at, where in walk(geometry, rank, columns, requests):
        pool[at] = value(where)
    return pool


def walk(
    geometry: Geometry, rank: int, columns: dict[int, Columns], requests: dict[int, Request]
) -> Iterator[tuple[int, Coordinate]]:
    """`bytes_of` over all groups of a rank."""
    groups = {g.id: g for g in geometry.groups}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        if groups[share.group].kind != ItemKind.HANDOFF:
            yield from bytes_of(groups[share.group], share, columns[share.group], requests[share.group])
