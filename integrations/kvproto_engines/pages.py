"""Places of K and V of a head in a page of a packed back end: by strides where these say it, else by an encoding.

A page of vLLM's `CPU_ATTN` is [heads, tokens, 2 * head_dim] in name only: of each head it has all of K, then all of V,
and each half in an order that suits the machine's instructions. The order is measured once, by packing the numbers of
the elements, and not assumed. An order in which equally many elements lie between one token and the next is stated as
sections of a head with strides, so that kvproto moves such pages to and from any other layout. Another order is an
`encoding` named after it, and such pages only meet equal ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvproto import Cache, DType, LocalError
from kvproto.errors import ErrorCode

__all__ = ["Half", "cache_of", "chosen", "half_of", "measured", "views_of"]

IntArray = npt.NDArray[np.int64]


@attrs.frozen
class Half:
    """The K or the V of one head in a page.

    Fields:
        sections: Elements [lo, hi) of a head, and where the first of them lies for token 0; none: strides do not say.
        row: Elements from one token to the next.
        encoding: The name of this order.
    """

    sections: tuple[tuple[int, int, int], ...]
    row: int
    encoding: str

    def whole(self, dim: int) -> Half:
        """The same as bytes that only an equal page understands."""
        return Half(((0, dim, 0),), dim, self.encoding)


def half_of(positions: IntArray, name: str) -> Half:
    """The order of a half from the place of each element, [token, dim]."""
    encoding = f"{name}.{hashlib.sha256(positions.astype('<i8').tobytes()).hexdigest()[:12]}"
    tokens, dim = positions.shape
    row = int(positions[1, 0] - positions[0, 0]) if tokens > 1 else dim
    if (positions != positions[0] + row * np.arange(tokens)[:, None]).any() or row < 1:
        return Half((), 0, encoding)
    first = positions[0]
    begins = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(first) != 1)), dim]
    sections = tuple((lo, hi, int(first[lo])) for lo, hi in zip(begins, begins[1:], strict=False))
    return Half(sections, row, encoding)


_DIGIT = 7
"""Bits of a number that each element type holds exactly."""


def measured(pack: Callable[[IntArray], IntArray], tokens: int, dim: int, name: str) -> dict[str, Half]:
    """The orders of K and V by part; `pack` stores small numbers [token, dim] as both, and returns the page.

    The numbers of the elements are packed in digits that fit the element type. Raises ValueError for a page that does
    not hold each element once.
    """
    numbers = np.arange(tokens * dim, dtype=np.int64).reshape(tokens, dim)
    page = np.zeros(2 * tokens * dim, np.int64)
    for shift in range(0, max(tokens * dim - 1, 1).bit_length(), _DIGIT):
        page += pack((numbers >> shift) & ((1 << _DIGIT) - 1)) << shift
    halves = {}
    for half, part in zip(page.reshape(2, -1), ("k", "v"), strict=True):
        if not np.array_equal(np.sort(half), numbers.ravel()):
            raise ValueError(f"a page of {name} does not hold each element of {part} once")
        positions = np.empty_like(half)
        positions[half] = np.arange(half.size)
        halves[part] = half_of(positions.reshape(tokens, dim), f"{name}.{part}")
    return halves


def chosen(halves: Mapping[str, Half], dim: int, strides: bool, name: str) -> dict[str, Half]:
    """The orders by strides, or as bytes that only equal pages understand.

    Raises LocalError where strides do not describe the order of the layer `name`.
    """
    if not strides:
        return {part: half.whole(dim) for part, half in halves.items()}
    if opaque := next((half.encoding for half in halves.values() if not half.sections), ""):
        advice = 'no strides describe it; "pages": "whole" moves it between equal engines'
        raise LocalError(ErrorCode.LAYOUT_OPAQUE, name, "pages of strides", opaque, advice)
    return dict(halves)


def cache_of(
    name: str, layers: Sequence[int], heads: int, tokens: int, dtype: DType, size: int, halves: Mapping[str, Half],
    encoded: bool = False, model: int = 0,
) -> Cache:  # fmt: skip
    """K and V of `layers` in pages of `tokens`, elements of `size` bytes; `encoded`: of an order without strides."""
    parts = {}
    for part, half in halves.items():
        sizes = tuple((hi - lo) * size for lo, hi, _ in half.sections)
        parts[part] = dtype, heads, sizes if len(sizes) > 1 else sizes[0]
    made = Cache.paged(name, layers, parts=parts, page=tokens, model=model)
    if not encoded:
        return made
    named = tuple(attrs.evolve(part, encoding=halves[part.name].encoding) for part in made.group.parts)
    return attrs.evolve(made, group=attrs.evolve(made.group, parts=named))


def views_of(tensors: Sequence[torch.Tensor], halves: Mapping[str, Half]) -> dict[str, list[torch.Tensor]]:
    """By part, or section of one: [block, head, token, dim] of each layer's tensor [block, head, token, 2 * dim]."""
    found = {}
    for n, (part, half) in enumerate(halves.items()):
        for lo, hi, first in half.sections:
            size = tensors[0].itemsize
            name = part if len(half.sections) == 1 else f"{part}[{lo * size}:{hi * size}]"
            found[name] = [_view(tensor, n, first, half.row, hi - lo) for tensor in tensors]
    return found


def _view(tensor: torch.Tensor, half: int, first: int, row: int, width: int) -> torch.Tensor:
    """`width` elements of each token, which lie `row` apart, from element `first` of a half on."""
    blocks, heads, tokens, content = tensor.shape
    at = tensor.storage_offset() + half * tokens * content // 2 + first
    return torch.as_strided(tensor, (blocks, heads, tokens, width), (tensor.stride(0), tensor.stride(1), row, 1), at)
