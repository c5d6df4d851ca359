"""Bytes of a token's row: the parts that lie one behind another, and the numbers that they hold.

An adapter has its engine store rows of numbers, and compares: that parts lie there is tried, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from kvproto import DType
from kvproto_engines.elements import numbers_of
from kvproto_engines.sparse import SCALE, row_numbers, row_of

__all__ = ["Rows", "dice", "of_elements", "of_packed_latents", "trial"]


@attrs.frozen
class Rows:
    """The parts of a row of each head.

    Fields:
        parts: Element type, lanes and bytes of a lane, as `Cache.paged` takes them.
        read: From a page of bytes [head, token, byte] to the numbers of each part [head, token, dim].
    """

    parts: dict[str, tuple[DType, int, int]]
    read: Callable[[torch.Tensor], list[torch.Tensor]]

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return sum(size for _, _, size in self.parts.values())


def of_elements(dims: Mapping[str, int], heads: int, kind: DType, dtype: torch.dtype, scaled: bool) -> Rows:
    """Elements of one type, `dims` of each part; `scaled`: an F32 scale lies behind each part."""
    parts: dict[str, tuple[DType, int, int]] = {}
    for part, dim in dims.items():
        parts[part] = kind, heads, dim * dtype.itemsize
        parts |= {f"{part}_scale": (DType.F32, heads, SCALE)} if scaled else {}
    sizes, types = [size for _, _, size in parts.values()], [dtype, torch.float32] if scaled else [dtype]

    def read(page: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(page, sizes, -1)
        found = [numbers_of(piece, types[n % len(types)]) for n, piece in enumerate(pieces)]
        return [(a * b).round() for a, b in zip(found[::2], found[1::2], strict=True)] if scaled else found

    return Rows(parts, read)


def of_packed_latents(latent: int, rope: int) -> Rows:
    """Quantized MLA, whose rows hold their scales."""
    return Rows(row_of(latent, rope), lambda page: [row_numbers(page, latent).round()])


def dice(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers that each element type holds exactly, in an order that differs along each axis."""
    return torch.randint(0, 6, tuple(shape), generator=torch.Generator().manual_seed(1)).float().to(device)


def trial(
    tensor: torch.Tensor, rows: Mapping[str, torch.Tensor], store: Callable[[], object],
    read: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> str | None:  # fmt: skip
    """The first part of which block 0 does not hold these rows, [token, head, dim], once `store` has put them there.

    What is read is [head, token, dim]. The block is left as it was.
    """
    with torch.inference_mode():
        before = tensor[0].clone()
        try:
            store()
            page = tensor[0].clone(memory_format=torch.contiguous_format).view(torch.uint8)
        finally:
            tensor[0].copy_(before)
    pairs = zip(rows.items(), read(page), strict=True)
    return next((part for (part, row), got in pairs if not torch.equal(got, row.transpose(0, 1))), None)
