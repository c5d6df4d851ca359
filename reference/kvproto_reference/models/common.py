"""Maths that both model kinds share; leading batch dims are allowed. Expert scores are float32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops import Stepping
from .parallel import TensorParallel


def weight(*shape: int) -> nn.Parameter:
    """A matrix parameter [..., out, in], drawn with deviation in^-0.5."""
    drawn = torch.empty(*shape)
    # Meta tensors stand for weights that will be loaded; drawing them would import torch's compiler.
    return nn.Parameter(drawn if drawn.is_meta else drawn.normal_(std=shape[-1] ** -0.5))


def join(*weights: nn.Parameter) -> Tensor:
    """Move matrices [out, in] of one input next to each other; returns the whole [sum of outs, in], for one product."""
    whole = torch.cat([each.data for each in weights])
    for each, place in zip(weights, whole.split_with_sizes([len(each) for each in weights]), strict=True):
        each.data = place
    return whole


_FEW = 8, 3
"""The most rows of a step for which a matrix comes first, by whether it has at least as many rows as columns."""


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times a matrix [out, in] -> [..., out].

    A step of few tokens is as fast as matrices are read. On the host, MKL reads one fastest if it comes first, with two
    to eight columns, for some shapes at three times the rate of `linear`.
    """
    rows = x.numel() // x.shape[-1]
    few = _FEW[len(matrix) < x.shape[-1]]
    if x.device.type != "cpu" or x.dtype != torch.float32 or not 0 < rows <= few:
        return F.linear(x, matrix, bias)
    columns = x.reshape(rows, -1)
    columns = columns if rows > 1 else torch.cat((columns, columns))
    out = torch.mm(matrix, columns.t()).t()[:rows].reshape(*x.shape[:-1], -1).contiguous()
    return out if bias is None else out.add_(bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads * d] -> [..., heads, d], also without tokens."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, reach: int | None = None) -> Tensor:
    """Causal attention of n tokens among themselves: q, k, v [..., n, heads, d] -> [..., n, heads, d].

    With `reach`, to the last so many tokens, of which a token itself is one.
    """
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    if reach is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(-3, -2)
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril().triu(1 - reach)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale).transpose(-3, -2)


class SwiGLU(Stepping):
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
        return product(self.ops.gated(product(x, both)), self.down)
