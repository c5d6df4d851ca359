"""Forms in which a pool stores rows: as the model makes them, or in FP8 (E4M3) with scales, by torch's own rounding."""

import torch
from torch import Tensor

MODEL = "model"
FORMS = (MODEL, "e4m3_tensor", "e4m3_block")
"""As the model makes them, or by the conversions of these names: with one scale, or one for each token and head."""
TENSOR_SCALE = 2.0**-3
"""The scale of `e4m3_tensor`, for rows up to 56: no checkpoint of ours has measured ones."""
_GREATEST, _LEAST, _NAN = 448.0, 2.0**-100, 0x7F


def scale_of(rows: Tensor) -> Tensor:
    """Float32 scales [..., 1] of rows [..., row_dim], by their greatest finite elements."""
    size = rows.float().abs()
    size = torch.where(size.isfinite(), size, 0.0)
    return size.amax(-1, keepdim=True).clamp(min=_LEAST) / _GREATEST


def narrow(rows: Tensor, scale: Tensor | float) -> Tensor:
    """F8E4M3 codes, uint8 [..., row_dim], of rows by their scales [..., 1], or by one power of two."""
    values = rows.float() / scale
    codes = values.clamp(-_GREATEST, _GREATEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), _NAN, codes)


def wide(codes: Tensor, scale: Tensor | float) -> Tensor:
    """Float32 rows [..., row_dim] of codes by their scales [..., 1], or by one."""
    return codes.view(torch.float8_e4m3fn).float() * scale
