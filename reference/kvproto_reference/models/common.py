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


def join(*weights: nn.Parameter) -> Tensor:
    """Moves matrices [out, in] of one input to where they touch; the whole [sum of outs, in], for one product."""
    whole = torch.cat([each.data for each in weights])
    for each, place in zip(weights, whole.split_with_sizes([len(each) for each in weights]), strict=True):
        each.data = place
    return whole


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads * d] -> [..., heads, d], of no tokens too."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim: x [..., d], gain [d]."""
    return F.rms_norm(x, gain.shape, gain, eps)


def rope_table(positions: Tensor, rates: Tensor, gain: float, pairs: bool = False) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, times `gain`, of positions [n], for `rope`: [n, 1, 2 * rates] float32 each."""
    angles = positions.to(torch.float32)[:, None, None] * rates
    cos, sin = angles.cos() * gain, angles.sin() * gain
    both = (cos, cos), (-sin, sin)
    first, second = (torch.stack(b, -1).flatten(-2) if pairs else torch.cat(b, -1) for b in both)
    return first, second


def rope(x: Tensor, table: tuple[Tensor, Tensor], pairs: bool = False) -> Tensor:
    """Rotary embedding of x [..., n, heads, dim]: neighbours are turned together (pairs), or halves are."""
    cos, sin = table
    other = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2) if pairs else x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, other, sin).to(x.dtype)


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
        self._both: Tensor | None = None

    def join(self) -> None:
        """See `Decoder.join`."""
        self._both = join(self.gate, self.up)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> this rank's summand of [..., hidden]."""
        both = torch.cat((self.gate, self.up)) if self._both is None else self._both
        gate, up = F.linear(x, both).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)
