"""Sizes and layers as the constructors of `Cache` accept them, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, ParamSpec, TypeVar

from kvproto.errors import LocalError, bad, check_type, check_whole
from kvproto.planning.geometry import Part
from kvproto.wire.enums import DType, ErrorCode

__all__ = ["BITS", "Sizes", "bytes_of", "called", "check_parts", "check_size", "ids_of", "parts_of", "scales_of"]

BITS: dict[int, int] = {
    DType.F32: 32, DType.F16: 16, DType.BF16: 16, DType.F8E4M3: 8, DType.F8E5M2: 8, DType.F8E8M0: 8, DType.F4E2M1: 4,
    DType.U8: 8, DType.I8: 8, DType.U32: 32, DType.I32: 32, DType.I64: 64,
}  # fmt: skip
"""Bits of an element of each known type."""

Sizes = tuple[DType, int, int | tuple[int, ...]]
"""Element type, lanes, and bytes of a lane or of each of its sections."""

Made = TypeVar("Made")
Given = ParamSpec("Given")


def called(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """Make missing and unknown arguments of `make` a LocalError instead of a TypeError."""
    signature = inspect.signature(make)

    @wraps(make)
    def checked(*args: Given.args, **named: Given.kwargs) -> Made:
        try:
            signature.bind(*args, **named)
        except TypeError as error:
            raise LocalError(ErrorCode.OUT_OF_RANGE, f"Cache.{make.__name__}", advice=str(error)) from None
        return make(*args, **named)

    return checked


def bytes_of(dtype: DType, elements: int, path: str = "elements") -> int:
    """Bytes of packed elements; raises LocalError(OUT_OF_RANGE) if the last byte would be half full."""
    size, rest = divmod(elements * BITS[dtype], 8)
    if rest:
        raise bad(path, f"an even number of {dtype.name}, two of which make a byte", elements)
    return size


def ids_of(layers: int | Iterable[int]) -> tuple[int, ...]:
    """Layer ids; a number n stands for layers 0 to n - 1."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        return tuple(range(check_whole("Cache.layers", layers, 0)))
    return tuple(check_whole("Cache.layers", layer, 0) for layer in layers)


def check_size(path: str, dtype: DType, size: Any) -> int:
    """`size`, once it is known to be bytes of whole elements of `dtype`; raises LocalError otherwise."""
    check_type(path, dtype, DType, "a kvproto.DType")
    if check_whole(path, size, 1) * 8 % BITS[dtype]:
        raise bad(path, f"a multiple of {BITS[dtype] // 8} bytes, an element of {dtype.name}", size)
    return int(size)


def check_parts(parts: Any, values: int, mine: str) -> None:
    """Raise LocalError unless `parts` maps names to `values` values each."""
    check_type("Cache.parts", parts, Mapping, f"a mapping of part name to {mine}")
    for name, given in parts.items():
        check_type("Cache.parts", name, str, "names of parts, each a str")
        if not isinstance(given, tuple | list) or len(given) != values:
            raise bad(f'Cache.parts["{name}"]', mine, given)


def parts_of(parts: Mapping[str, Sizes]) -> tuple[Part, ...]:
    """A part for each name, or a section for each of several sizes."""
    check_parts(parts, 3, "element type, lanes, and bytes of a lane or of each of its sections")
    made = []
    for name, (dtype, lanes, given) in parts.items():
        path = f'Cache.parts["{name}"]'
        check_whole(path, lanes, 1)
        if not isinstance(given, tuple | list):
            made.append(Part(name=name, dtype=dtype, lanes=lanes, lane_bytes=check_size(path, dtype, given)))
            continue
        sizes = [check_size(path, dtype, size) for size in given]
        if not sizes:
            raise bad(path, "a section at least", "none")
        for at, end in pairwise(accumulate(sizes, initial=0)):
            made.append(Part(name=name, dtype=dtype, lanes=lanes, lane_bytes=end - at, at=at, whole=sum(sizes)))
    return tuple(made)


def scales_of(
    elements: Mapping[str, int], lanes: int, block: int | None, dtype: DType | None = None
) -> dict[str, Sizes]:
    """For each part, a part with a scale (F32 by default) for each block of a lane's elements; none without blocks.

    Blocks divide a lane, so two sides whose scales are equally long have equal blocks.
    """
    if block is None:
        if dtype is not None:
            raise bad("Cache.scale_dtype", "nothing without scale_block", dtype.name)
        return {}
    for part, n in elements.items():
        if n % block:
            raise bad("Cache.scale_block", f"a divisor of {n}, the elements of a lane of {part}", block)
    chosen = DType.F32 if dtype is None else dtype
    return {
        f"{part}_scale": (chosen, lanes, bytes_of(chosen, n // block, "Cache.scale_block"))
        for part, n in elements.items()
    }
