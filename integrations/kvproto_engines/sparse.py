"""Pages for DeepSeek's kernels of sparse attention, whichever engine runs them: a row of quantized MLA, and an index.

A row is the latent in FP8, a scale for each 128 elements, and the rotary key in BF16. A page of the index is the keys
of all its tokens, then their scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvproto import Cache, DType
from kvproto_engines.elements import numbers_of

__all__ = ["SCALE", "index_numbers", "index_of", "index_views", "row_numbers", "row_of"]

_BLOCK = 128
SCALE = 4
"""Bytes of a scale."""
_TYPES = {"latent": (DType.F8E4M3, 1), "latent_scale": (DType.F32, SCALE), "rope": (DType.BF16, 2)}


def row_of(latent: int, rope: int) -> dict[str, tuple[DType, int, int]]:
    """The parts of a row, with their lanes and bytes, as `Cache.paged` takes them."""
    counts = {"latent": latent, "latent_scale": -(-latent // _BLOCK), "rope": rope}
    return {name: (_TYPES[name][0], 1, count * _TYPES[name][1]) for name, count in counts.items() if count}


def index_views(buffer: torch.Tensor, page: int, dim: int) -> dict[str, torch.Tensor]:
    """Keys and scales of an index, [page, token, byte], of a buffer of bytes [page, ...].

    Raises ValueError for a buffer of other pages than `page` tokens, with keys of `dim` bytes, have.
    """
    if tuple(buffer.shape[1:]) != (page * (dim + SCALE),) or buffer.dtype != torch.uint8:
        wanted = f"pages of {page * (dim + SCALE)} bytes"
        raise ValueError(f"an index {tuple(buffer.shape)} of {buffer.dtype}, not {wanted}")
    keys, scales = buffer[:, : page * dim], buffer[:, page * dim :]
    return {"index": keys.view(-1, page, dim), "index_scale": scales.view(-1, page, SCALE)}


def row_numbers(rows: torch.Tensor, latent: int) -> torch.Tensor:
    """The latent and the rotary key that rows of bytes hold."""
    scaled = latent + -(-latent // _BLOCK) * SCALE
    data, scales = (
        numbers_of(rows[..., :latent], torch.float8_e4m3fn),
        numbers_of(rows[..., latent:scaled], torch.float32),
    )
    each = scales.repeat_interleave(_BLOCK, -1)[..., :latent]
    return torch.cat([data * each, numbers_of(rows[..., scaled:], torch.bfloat16)], -1)


def index_of(
    title: str, layers: Sequence[int], dim: int, page: int, model: int, exponents: bool = False
) -> Cache:  # fmt: skip
    """The cache of an index, whole on every rank; `exponents`: a scale is four bytes of UE8M0 in place of an F32."""
    scale = DType.F8E8M0 if exponents else DType.F32
    parts = {"index": (DType.F8E4M3, 1, dim), "index_scale": (scale, 1, SCALE)}
    return Cache.paged(title, layers, parts=parts, page=page, model=model).replicated()


def index_numbers(buffer: torch.Tensor, page: int, dim: int, exponents: bool = False) -> torch.Tensor:
    """The keys that a buffer of bytes [page, ...] holds."""
    views = index_views(buffer, page, dim)
    keys, scales = numbers_of(views["index"], torch.float8_e4m3fn), views["index_scale"]
    if not exponents:
        return keys * numbers_of(scales, torch.float32)
    return keys * torch.exp2(scales.float() - 127).repeat_interleave(dim // SCALE, -1)
