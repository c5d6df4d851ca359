"""Maths which both model kinds share; all tensors float32, leading batch dims allowed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .parallel import TensorParallel


def weight(*shape: int) -> nn.Parameter:
    """A matrix parameter [..., out, in], drawn with deviation in^-0.5."""
    return nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads * d] -> [..., heads, d]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim: x [..., d], gain [d]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def rope_table(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n, 1, dim / 2] of positions [n]."""
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = positions.to(torch.float32)[:, None, None] * rates
    return angles.cos(), angles.sin()


def rope(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, half-split layout: x [..., n, heads, dim]."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Causal attention: q [..., n, heads, d], k and v [..., m, KV heads, d], positions [n] -> [..., n, heads, d]."""
    n, heads = q.shape[-3:-1]
    m, kv_heads = k.shape[-3:-1]
    q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
    if kv_heads != heads:
        k = k.repeat_interleave(heads // kv_heads, dim=-3)
        v = v.repeat_interleave(heads // kv_heads, dim=-3)
    if n == m:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = torch.arange(m) <= positions[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(-3, -2)


class SwiGLU(nn.Module):
    """Gated feed-forward block; the ffn width is split over TP ranks."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        width = tp.width(config.ffn)
        self.gate = weight(width, config.hidden)
        self.up = weight(width, config.hidden)
        self.down = weight(config.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden], summed over ranks."""
        inner = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return self.tp.all_reduce(F.linear(inner, self.down))
