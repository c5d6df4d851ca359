"""Maths that both model kinds share; leading batch dims allowed. Norms, rotations and expert scores are float32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parallel import TensorParallel


def weight(*shape: int) -> nn.Parameter:
    """A matrix parameter [..., out, in], drawn with deviation in^-0.5."""
    drawn = torch.empty(*shape)
    # Meta tensors stand for weights that are loaded; drawing them would cost the import of torch's compiler.
    return nn.Parameter(drawn if drawn.is_meta else drawn.normal_(std=shape[-1] ** -0.5))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads * d] -> [..., heads, d], of no tokens too."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim: x [..., d], gain [d]."""
    return F.rms_norm(x, gain.shape, gain, eps)


def rope_table(positions: Tensor, rates: Tensor, gain: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n, 1, pairs] float32, times `gain`, of positions [n] and rates [pairs]."""
    angles = positions.to(torch.float32)[:, None, None] * rates
    return angles.cos() * gain, angles.sin() * gain


def rope(x: Tensor, table: tuple[Tensor, Tensor], pairs: bool = False) -> Tensor:
    """Rotary embedding of x [..., n, heads, dim]: neighbours are turned together (pairs), or halves are."""
    cos, sin = table
    first, second = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return (torch.stack(turned, dim=-1).flatten(-2) if pairs else torch.cat(turned, dim=-1)).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of n tokens among themselves: q, k, v [..., n, heads, d] -> [..., n, heads, d]."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(-3, -2)


class SwiGLU(nn.Module):
    """Gated feed-forward block; its width is split over TP ranks."""

    def __init__(self, hidden: int, ffn: int, tp: TensorParallel) -> None:
        super().__init__()
        width = tp.width(ffn)
        self.gate = weight(width, hidden)
        self.up = weight(width, hidden)
        self.down = weight(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> this rank's summand of [..., hidden]."""
        inner = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return F.linear(inner, self.down)
