"""The kernels of merge.cu, compiled where they run and launched in torch's stream, so that they can be captured."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from cuda import core
from cuda.bindings import driver
from torch import Tensor

from ..errors import EngineError
from .lse import Base2, Found, Partial

__all__ = ["BLOCKS", "MergeKernels", "base2", "call"]

THREADS = 256
BLOCKS = 64
"""Blocks of a launch that waits for other ranks: few enough to run at once, even during a copy of pages."""
_ROWS = THREADS // 32
_SOURCE = Path(__file__).with_name("merge.cu")
_NAMES = ("pack", "merge", "gather", "exchange")


@lru_cache
def _functions(arch: str, brain: bool, parts: int, width: int) -> dict[str, Any]:
    macros: list[str | tuple[str, str]] = [
        ("BRAIN", str(int(brain))), ("PARTS", str(parts)), ("WIDTH", str(width)), ("THREADS", str(THREADS)),
        ("BLOCKS", str(BLOCKS)),
    ]  # fmt: skip
    options = core.ProgramOptions(arch=f"sm_{arch}", std="c++17", define_macro=macros)
    module = core.Program(_SOURCE.read_text(), "c++", options).compile("cubin")
    return {name: module.get_kernel(name).handle for name in _NAMES}


def call(result: tuple[Any, ...], what: str) -> Any:
    """The result of a call of the CUDA driver; raises EngineError."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(f"{what}: {code.name}")
    return values[0] if len(values) == 1 else tuple(values)


def base2(found: Found) -> Base2:
    """Return a kernel's result with the log-sum-exp in base 2."""
    if isinstance(found, Base2):
        return found
    read = torch.ones(len(found.out), dtype=torch.int32, device=found.out.device)
    return Base2(found.out, found.lse / math.log(2), read)


class MergeKernels:
    """Kernels for rows of one element type and width in elements, and for a number of parts or ranks."""

    def __init__(self, device: torch.device, dtype: torch.dtype, width: int, parts: int) -> None:
        """Raises EngineError for types, widths and numbers that the kernels do not support."""
        if dtype not in (torch.bfloat16, torch.float16) or width % 8 or parts < 2:
            raise EngineError(f"no merge kernel for {parts} parts of {dtype} [{width}]: 2-byte elements, 8 at a time")
        major, minor = torch.cuda.get_device_capability(device)
        self._functions = _functions(f"{major}{minor}", dtype == torch.bfloat16, parts, width)
        self.device, self.dtype, self.width, self.parts = device, dtype, width, parts

    def chunk(self, rows: int) -> int:
        """Bytes of a chunk of `rows` rows."""
        return rows * self.width * 2 + -(-rows // 4) * 16

    def pairs(self, rows: int) -> int:
        """Bytes of a chunk of `rows` rows in pairs of a word and an epoch."""
        return rows * (self.width * 4 + 16)

    def pack(self, found: Base2, chunks: Tensor) -> None:
        """Write for each rank a chunk with its heads; chunks uint8 [ranks, chunk bytes]."""
        tokens, heads = self._shape(found, self.parts)
        arguments = (*self.found(found), chunks.data_ptr(), chunks.stride(0))
        self.launch("pack", (-(-tokens * heads // _ROWS), self.parts), arguments)

    def unpack(self, chunks: Tensor, tokens: int, heads: int) -> list[Base2]:
        """Views of the parts of one rank's heads in received chunks, in which every token read something."""
        rows, cut = tokens * heads, tokens * heads * self.width * 2
        return [
            Base2(
                chunk[:cut].view(self.dtype).view(tokens, heads, self.width),
                chunk[cut : cut + rows * 4].view(torch.float32).view(tokens, heads),
                chunk[:0],
            )
            for chunk in chunks
        ]

    def merge(self, parts: Sequence[Found]) -> Partial:
        """Attention over the union of disjoint sets of tokens."""
        tokens, heads = self._shape(parts[0], 1)
        out = torch.empty((tokens, heads, self.width), dtype=self.dtype, device=self.device)
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=self.device)
        logs = [part.log2 if isinstance(part, Base2) else part.lse for part in parts]
        reads = [part.read.data_ptr() if isinstance(part, Base2) and len(part.read) else 0 for part in parts]
        factors = [1.0 if isinstance(part, Base2) else 1 / math.log(2) for part in parts]
        outs = [part.out.contiguous() for part in parts]
        arguments = (*(o.data_ptr() for o in outs), *(x.data_ptr() for x in logs), *reads, *factors)
        self.launch(
            "merge", (-(-tokens * heads // _ROWS), 1), (*arguments, out.data_ptr(), lse.data_ptr(), tokens, heads)
        )
        return Partial(out, lse)

    def found(self, found: Base2) -> tuple[int, ...]:
        """The kernel parameter for what was found for the heads of all ranks."""
        tokens, heads = self._shape(found, self.parts)
        return found.out.data_ptr(), found.log2.data_ptr(), found.read.data_ptr(), tokens, heads

    def _shape(self, found: Found, ranks: int) -> tuple[int, int]:
        tokens, heads, width = found.out.shape
        if width != self.width or found.out.dtype != self.dtype or heads % ranks or not found.out.is_contiguous():
            raise EngineError(
                f"{found.out.dtype} {list(found.out.shape)} for {ranks} ranks, not {self.dtype} [{self.width}]"
            )
        return tokens, heads // ranks

    def launch(self, name: str, grid: tuple[int, int], arguments: Sequence[int | float]) -> None:
        """Launch in torch's stream; every member of the kernel's parameter has 8 bytes."""
        form = "".join("d" if isinstance(value, float) else "q" for value in arguments)
        block = ctypes.create_string_buffer(struct.pack(f"<{form}", *arguments))
        places = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        launched = driver.cuLaunchKernel(
            self._functions[name], *grid, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(places), 0
        )
        call(launched, name)
