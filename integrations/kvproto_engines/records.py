"""Records of DeepSeek's caches and of their kin: the parts of a row, and where the rows of each lie in a page.

Whichever engine runs these models, one kernel computes, quantizes and stores a row, so an adapter cannot have a row
stored to see where it lies. Records are known by the sizes of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch

from kvproto import DType

__all__ = ["COMPRESSED", "INDEXES", "WINDOW", "Field", "Record", "pending", "plain"]


@attrs.frozen
class Field:
    """Bytes of a row: of a part, or padding, which has no name."""

    part: str
    kind: DType
    size: int


@attrs.frozen
class Record:
    """Rows of a page in planes: of a page all rows of the first plane, then all of the next."""

    planes: tuple[tuple[Field, ...], ...]

    @property
    def size(self) -> int:
        """Bytes of a row, in all planes."""
        return sum(field.size for plane in self.planes for field in plane)

    def parts(self, lanes: int = 1) -> dict[str, tuple[DType, int, int]]:
        """Element type, lanes and bytes of a lane of each part, as `Cache.paged` and `Cache.ring` take them."""
        return {each.part: (each.kind, lanes, each.size) for plane in self.planes for each in plane if each.part}

    def views(self, pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts [page, lane, row, byte] of pages [page, lane, row, element].

        Raises RuntimeError for pages with gaps between their rows, and ValueError for pages of no whole rows.
        """
        return {field.part: view for field, view in self._cut(pages.view(torch.uint8)) if field.part}

    def _cut(self, pages: torch.Tensor) -> Iterator[tuple[Field, torch.Tensor]]:
        if len(self.planes) > 1 or pages.shape[3] != self.size:  # rows of a lane, wherever its axes say they end
            pages = pages.view(len(pages), 1, -1)
            rows, rest = divmod(pages.shape[2], self.size)
            if rest:
                raise ValueError(f"pages of {pages.shape[2]} bytes, not of whole rows of {self.size}")
        at = 0
        for plane in self.planes:
            width = sum(field.size for field in plane)
            rows_of = pages
            if pages.dim() == 3:
                rows_of = pages[:, :, at : at + rows * width].view(len(pages), 1, rows, width)
                at += rows * width
            yield from zip(plane, torch.split(rows_of, [field.size for field in plane], 3), strict=True)


def _latents(of: str) -> dict[int, Record]:
    """Records of a latent of 512 elements, the last 64 its rotary key, by the bytes of a row."""
    latent, rope, scale = f"{of}latent", f"{of}rope", f"{of}latent_scale"
    return {
        584: Record((
            (Field(latent, DType.F8E4M3, 448), Field(rope, DType.BF16, 128)),
            (Field(scale, DType.F8E8M0, 7), Field("", DType.U8, 1)),
        )),
        528: Record(((Field(latent, DType.F8E4M3, 512), Field(scale, DType.F8E8M0, 16)),)),
        288: Record(((Field(latent, DType.F4E2M1, 256), Field(scale, DType.F8E4M3, 32)),)),
        1024: plain(latent, DType.BF16, 1024),
    }  # fmt: skip


def plain(part: str, kind: DType, size: int) -> Record:
    """Rows of one part and nothing else."""
    return Record(((Field(part, kind, size),),))


def pending(size: int, apart: bool) -> Record:
    """Index keys that are not pooled yet, in BF16, and what they are weighed by; `apart`: all keys come first."""
    fields = Field("pending_index", DType.BF16, size), Field("pending_score", DType.BF16, size)
    return Record(tuple((field,) for field in fields) if apart else (fields,))


COMPRESSED, WINDOW = _latents(""), _latents("window_")
"""Latents of DeepSeek V4 and V4.1 by the bytes of a row: of tokens that compressed rows stand for, and of a window."""
INDEXES: Mapping[tuple[int, bool], Record] = {
    (132, False): Record(((Field("index", DType.F8E4M3, 128),), (Field("index_scale", DType.F32, 4),))),
    (132, True): Record(((Field("index", DType.F8E4M3, 128),), (Field("index_scale", DType.F8E8M0, 4),))),
    (68, True): Record(((Field("index", DType.F4E2M1, 64),), (Field("index_scale", DType.F8E8M0, 4),))),
}
"""Index keys of 128 elements, by the bytes of a row and whether scales are exponents."""
