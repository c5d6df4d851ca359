"""The small steps between a model's matrix products in torch; FlashInfer has one kernel for each (`FusedOps`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FusedOps", "Ops", "Stepping", "Table"]

Table = tuple[Tensor, Tensor]
"""The angles for `Ops.rope`, as `table` of the same ops makes them."""


class Ops:
    """Norms and rotations for any device and type, in float32; leading batch dims are allowed."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dim: x [..., d], gain [d]."""
        return F.rms_norm(x, gain.shape, gain, eps)

    def add_norm(self, x: Tensor, summand: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum, and its norm; neither argument is used again."""
        total = x + summand
        return total, self.norm(total, gain, eps)

    def gated(self, both: Tensor) -> Tensor:
        """[..., 2 * width], gates before values -> [..., width]."""
        gate, value = both.chunk(2, -1)
        return F.silu(gate) * value

    def table(self, positions: Tensor, rates: Tensor, gain: float, pairs: bool) -> Table:
        """Cosines and signed sines, times `gain`, of positions [n]: [n, 1, 2 * rates] float32 each."""
        cos, sin = _angles(positions, rates, gain)
        both = (cos, cos), (-sin, sin)
        first, second = (torch.stack(b, -1).flatten(-2) if pairs else torch.cat(b, -1) for b in both)
        return first[:, None], second[:, None]

    def rope(self, q: Tensor, k: Tensor, table: Table, pairs: bool) -> tuple[Tensor, Tensor]:
        """Rotary embedding of q and k [..., n, heads, dim], of neighbouring elements (`pairs`) or of halves.

        Neither argument is used again.
        """
        return self._turn(q, table, pairs), self._turn(k, table, pairs)

    def _turn(self, x: Tensor, table: Table, pairs: bool) -> Tensor:
        cos, sin = table
        other = x.reshape(*x.shape[:-1], -1, 2).flip(-1).flatten(-2) if pairs else x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * cos, other, sin).to(x.dtype)


class FusedOps(Ops):
    """FlashInfer's kernels, for bfloat16 and float16 on CUDA, without batch dims; they overwrite arguments."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        from flashinfer.norm import rmsnorm

        return rmsnorm(x, gain, eps) if len(x) else x  # it refuses no tokens at all, as of a piece that nobody reads

    def add_norm(self, x: Tensor, summand: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from flashinfer.norm import fused_add_rmsnorm

        fused_add_rmsnorm(summand, x, gain, eps)
        return x, summand

    def gated(self, both: Tensor) -> Tensor:
        from flashinfer.activation import silu_and_mul

        return silu_and_mul(both)  # type: ignore[no-any-return]

    def table(self, positions: Tensor, rates: Tensor, gain: float, pairs: bool) -> Table:
        """Cosines, then sines [n, 2 * rates] float32, and the row that each token reads [n]."""
        return torch.cat(_angles(positions, rates, gain), -1), torch.arange(len(positions), device=positions.device)

    def rope(self, q: Tensor, k: Tensor, table: Table, pairs: bool) -> tuple[Tensor, Tensor]:
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

        turns, rows = table
        apply_rope_with_cos_sin_cache_inplace(rows, q, k, q.shape[-1], turns, is_neox=not pairs)
        return q, k


class Stepping(nn.Module):
    """A module that takes such steps; in torch by default."""

    ops = Ops()

    def use(self, ops: Ops) -> None:
        """Use these ops for the steps between matrix products; an attention back end has ones that fit its tensors."""
        for module in self.modules():
            if isinstance(module, Stepping):
                module.ops = ops


def _angles(positions: Tensor, rates: Tensor, gain: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, times `gain`: [n, rates] float32 each."""
    angles = positions.to(torch.float32)[:, None] * rates
    return angles.cos() * gain, angles.sin() * gain
