"""The formulas of conversions, over arrays of any shape [..., lane, byte] (spec/v1/conversion.md, KVP-CNV-EXACT)."""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto.planning.conversion import Made

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_GREATEST, _LEAST = np.float32(448), np.float32(2.0**-100)
_NAN, _WIDE_NAN, _INFINITE = 0x7F, 0x7FC0, 0x7F80
_SHORT = 8
_TOGETHER = 1 << 17
"""Bytes converted at once, few enough to stay in a core's caches with all that is made of them."""
_KEPT = 256
"""Tables of stated scales that are kept."""


@np.errstate(over="ignore", invalid="ignore")
def convert(made: Made, data: Bytes, scales: Bytes | int, blocks: int) -> Bytes:
    """Lanes [..., lane, byte] in their other form, or their scales.

    `scales` are the bits of a stated scale, or the scales [..., lane, byte] that are read too; 0 if they are made.
    A lane has scales of `blocks` blocks of equal length.
    """
    if isinstance(scales, int) and scales:
        narrows = made == Made.NARROW
        values: npt.NDArray[Any] = _to_narrow(scales) if narrows else _to_wide(scales)
        return values.take(data.view("<u2") if narrows else data).view(np.uint8)
    lanes = data.reshape(-1, data.shape[-1])
    read = None if isinstance(scales, int) else np.ascontiguousarray(scales).view("<f4").reshape(-1, blocks, 1)
    step = max(_TOGETHER // lanes.shape[1], 1)
    parts = [
        _blocks(made, lanes[at : at + step], blocks, None if read is None else read[at : at + step])
        for at in range(0, len(lanes), step)
    ]
    return np.concatenate(parts).reshape(*data.shape[:-1], -1)


def _blocks(made: Made, lanes: Bytes, blocks: int, scales: Floats | None) -> Bytes:
    """Lanes [lane, byte] by scales of blocks [lane, block, 1], which are read or made."""
    if scales is not None:
        values = _values().take(lanes).reshape(len(lanes), blocks, -1)
        return _bf16(values * scales).view(np.uint8).reshape(len(lanes), -1)
    bits = lanes.view("<u2").reshape(len(lanes), blocks, -1)
    made_here = _scales(bits)
    if made == Made.SCALES:
        return made_here[..., 0].view(np.uint8)
    return _codes(_floats(bits) / made_here).reshape(len(lanes), -1)


def _floats(bits: npt.NDArray[np.uint16]) -> Floats:
    """The float32 of BF16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _scales(bits: npt.NDArray[np.uint16]) -> Floats:
    """Scales [lane, block, 1] of BF16 [lane, block, element], whose bits without the sign are in order of size."""
    size = bits & 0x7FFF
    while size.shape[-1] > _SHORT and size.shape[-1] % 2 == 0:  # as numpy is slow along an axis of few elements
        half = size.shape[-1] // 2
        size = np.maximum(size[..., :half], size[..., half:])
    amax = size.max(-1, keepdims=True)
    if amax.max() >= _INFINITE:
        size = bits & 0x7FFF
        amax = np.where(size < _INFINITE, size, np.uint16(0)).max(-1, keepdims=True)
    scales: Floats = np.divide(np.maximum(_floats(amax), _LEAST), _GREATEST, dtype=np.float32)
    return scales


def _codes(y: Floats) -> Bytes:
    """F8E4M3 of float32, by the upper half of the bits; whether the lower half is zero decides ties alone."""
    bits = y.view(np.uint32)
    codes: Bytes = _nearest().take((bits >> 16) | ((bits & 0xFFFF) != 0))
    return codes


@lru_cache(1)
def _nearest() -> Bytes:
    """The F8E4M3 nearest to the float32 of each upper half of bits [65536], ties to even."""
    y = np.abs(_floats(np.arange(1 << 16, dtype=np.uint16)).astype(np.float64))
    finite = _values()[:_NAN].astype(np.float64)
    middles = (finite[1:] + finite[:-1]) / 2
    code = np.searchsorted(middles, y)  # the middles below y; a tie belongs to the even one of its neighbours
    tie = y == middles[np.minimum(code, middles.size - 1)]
    code += tie & (code % 2 == 1)
    sign = np.arange(1 << 16) >> 8 & 0x80
    return np.where(np.isnan(y), _NAN, code | sign).astype(np.uint8)


@lru_cache(1)
def _values() -> Floats:
    """The value of each F8E4M3 [256]."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    values: Floats = np.where(code & 0x80, -size, size).astype(np.float32)
    values[[_NAN, 0xFF]] = np.nan
    return values


def _bf16(y: Floats) -> npt.NDArray[np.uint16]:
    bits = y.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(y), _WIDE_NAN, rounded).astype("<u2")


@lru_cache(_KEPT)
def _to_narrow(scale: int) -> Bytes:
    return _codes(_floats(np.arange(1 << 16, dtype=np.uint16)) / np.uint32(scale).view(np.float32))


@lru_cache(_KEPT)
def _to_wide(scale: int) -> npt.NDArray[np.uint16]:
    return _bf16(_values() * np.uint32(scale).view(np.float32))
