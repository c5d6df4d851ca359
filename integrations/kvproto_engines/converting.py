"""Conversions by which a cache of an engine may be handed over, where its user says so (feature CONVERT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproto import Cache, DType, LocalError
from kvproto.errors import ErrorCode

__all__ = ["converting"]

_VALUES = ("k", "v", "latent")
_SCALES = tuple(f"{name}_scale" for name in _VALUES)


def converting(cache: Cache, path: str, ids: Sequence[int], scales: Sequence[Any]) -> Cache:
    """The cache of layers `ids`, which states conversions of its rows of K and V, or of latents; others as they are.

    `scales` are those of K and of V of each layer, if its elements have one scale a tensor. Raises LocalError(
    LAYOUT_UNSUPPORTED) for elements and rows that no conversion reads.
    """
    parts = {part.name: part for part in cache.group.parts}
    values = [part for name, part in parts.items() if name in _VALUES]
    if not values or not parts.keys() <= {*_VALUES, *_SCALES}:
        return cache
    dtypes = {part.dtype for part in values}
    wrong = "elements of " + ", ".join(sorted(DType(dtype).name for dtype in dtypes))
    if any((part.encoding, part.at, part.whole) != (None, None, None) for part in values):
        wrong = "rows in sections, or whole pages"
    elif dtypes == {DType.BF16} and len(values) == len(parts):
        return cache.converts("e4m3_tensor", "e4m3_block")
    elif dtypes == {DType.F8E4M3} and len(values) < len(parts):
        return cache.converts("e4m3_block")
    elif dtypes == {DType.F8E4M3}:
        of_layer = dict(zip(ids, scales, strict=True))
        stated = {
            part.name: [float(of_layer[n][at]) if n in of_layer else 1.0 for n in range(max(ids) + 1)]
            for at, part in enumerate(values)
        }
        return cache.converts("e4m3_tensor", scales=stated)
    mine, advice = "rows of BF16, or of FP8 (E4M3) with scales", "leave `convert` out"
    raise LocalError(ErrorCode.LAYOUT_UNSUPPORTED, path, mine, wrong, advice)
