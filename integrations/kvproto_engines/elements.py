"""Element types of engines' caches."""

from __future__ import annotations

import torch

from kvproto import DType

__all__ = ["FLOATS", "QUANTIZED", "numbers_of"]

FLOATS = {torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16}
QUANTIZED = {torch.float8_e4m3fn: DType.F8E4M3, torch.float8_e5m2: DType.F8E5M2}
"""Types that engines store as bytes; what scales them is a number of the checkpoint."""


def numbers_of(view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that bytes hold."""
    return view.contiguous().view(dtype).float()
