"""Labels that pages hold instead of a cache: they name request, attempt, layer, part, head and token.

A label is 16 bytes and fills one head of one token. Its last word is a mix of the others, so that other bytes, or parts
of two labels, are recognized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto import Cache, DType, Geometry, Pool, lay_out

__all__ = [
    "GEOMETRY",
    "GROUP",
    "HEADS",
    "LAYERS",
    "PAGE",
    "WITH_DRAFT",
    "Cells",
    "Found",
    "blank",
    "cells",
    "found",
    "places",
    "read",
]

LAYERS, HEADS, PAGE = 3, 2, 8
GROUP = "kv"
_KV = Cache.gqa(GROUP, LAYERS, kv_heads=HEADS, head_dim=16, page=PAGE, dtype=DType.U8)
_DRAFT = Cache.gqa("draft", 1, kv_heads=HEADS, head_dim=16, page=PAGE, dtype=DType.U8, model=1)
GEOMETRY: Geometry = lay_out([_KV])
"""The cache of both sides: 16 bytes for each head and token."""
WITH_DRAFT: Geometry = lay_out([_DRAFT, _KV])
"""The same with a draft's cache, so that its group has another id; the contents of the draft are not checked."""
_PARTS = "k", "v"
_FREE = 0xFFFFFFFF
"""The request of pages that have no owner."""
Cells = npt.NDArray[np.uint32]
"""Labels, [..., heads, 4]: request, where, token, mix."""


@attrs.frozen
class Found:
    """The contents of a label; `request` is None for bytes that are not a label."""

    request: int | None
    attempt: int = 0
    token: int = 0
    blank: bool = False
    """Whether it is what an engine writes to free pages."""

    def __str__(self) -> str:
        if self.request is None:
            return "bytes that are no label"
        if self.blank:
            return f"what was in a free page, number {self.token}"
        return f"request {self.request}.{self.attempt} token {self.token}"


def places() -> list[tuple[int, int]]:
    """Layers and parts."""
    return [(layer, part) for layer in range(LAYERS) for part in range(len(_PARTS))]


def cells(pool: Pool, layer: int, part: int) -> Cells:
    """The labels of a layer and part, as a view: [pages, tokens, heads, 4]."""
    return pool.array(GROUP, layer, _PARTS[part]).view(np.uint32)


def read(request: int, attempt: int, tokens: Sequence[int] | npt.NDArray[Any], layer: int, part: int) -> Cells:
    """The labels of these tokens, [tokens, heads, 4]."""
    made = np.empty((len(tokens), HEADS, 4), np.uint32)
    made[..., 0] = request
    made[..., 1] = attempt << 24 | layer << 16 | part << 8
    made[..., 1] |= np.arange(HEADS, dtype=np.uint32)
    made[..., 2] = np.asarray(tokens)[:, None]
    made[..., 3] = _mix(made)
    return made


def blank(number: int, pages: int, layer: int, part: int, whose: int) -> Cells:
    """Cells of free pages, [pages, tokens, heads, 4]; `number` counts the pages that the engine has freed."""
    made = np.repeat(read(_FREE, whose, np.arange(number, number + pages), layer, part), PAGE, 0)
    return made.reshape(pages, PAGE, HEADS, 4)


def found(cell: Cells) -> Found:
    """Read one label [4]."""
    if _mix(cell[None])[0] != cell[3]:
        return Found(None)
    return Found(int(cell[0]), int(cell[1]) >> 24, int(cell[2]), int(cell[0]) == _FREE)


def _mix(some: Cells) -> Any:
    mixed = some[..., 0] * np.uint32(0x9E3779B1) ^ some[..., 1] * np.uint32(0x85EBCA77)
    return mixed ^ (some[..., 2] + np.uint32(1)) * np.uint32(0xC2B2AE3D)
