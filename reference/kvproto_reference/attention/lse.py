"""Attention over some of the tokens, and how several of these become attention over all of them.

With scores s_j, a set S of tokens gives L = ln sum_S exp(s_j) and o = sum_S exp(s_j - L) v_j. Disjoint sets merge with
weights exp(L_r - L), L = ln sum_r exp(L_r); a set without tokens is (o, L) = (0, -inf). The same sum merges the shards
of ranks, and a prefix with new tokens (spec/v1/dcp.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..errors import EngineError

__all__ = ["Base2", "Found", "Partial", "merge", "share"]


@attrs.frozen(eq=False)
class Partial:
    """Normalised attention `out` [tokens, heads, width] over some tokens, and their `lse` [tokens, heads].

    The log-sum-exp is natural and float32. A row without tokens has out 0 and lse -inf.
    """

    out: Tensor
    lse: Tensor

    def __attrs_post_init__(self) -> None:
        if self.lse.dtype != torch.float32 or self.lse.shape != self.out.shape[:-1]:
            found = f"{self.lse.dtype} {list(self.lse.shape)} beside {list(self.out.shape)}"
            raise EngineError(f"a log-sum-exp must be float32 [tokens, heads], not {found}")

    @classmethod
    def of(cls, out: Tensor, lse: Tensor, some: Tensor) -> Partial:
        """Return a kernel's result, with the neutral element for tokens that had nothing to read: `some` bool [tokens].

        Kernels leave anything there, NaN and stale memory included, so it is selected away, never multiplied.
        """
        some = some[..., None]
        return cls(torch.where(some[..., None], out, 0), torch.where(some, lse, -math.inf))

    def natural(self) -> Partial:
        """Itself."""
        return self

    def __getitem__(self, index: Any) -> Partial:
        """The rows that an index of the leading dims names."""
        return Partial(self.out[index], self.lse[index])


@attrs.frozen(eq=False)
class Base2:
    """The result of a kernel, unchanged: the log-sum-exp `log2` [tokens, heads] is in base 2, as FlashInfer's are.

    `read` [tokens] is the number of rows that a token read; if it is 0, both of the others may hold anything. Only a
    merge that knows this type accepts one; `natural` makes what the others accept, in additional passes.
    """

    out: Tensor
    log2: Tensor
    read: Tensor

    def natural(self) -> Partial:
        """The same in natural logarithms, with the neutral element where no row was read."""
        return Partial.of(self.out, self.log2 * math.log(2), self.read > 0)


Found = Partial | Base2
"""The result of a kernel."""


def share(part: Partial, total: Tensor) -> Tensor:
    """The summand of `part` in attention whose log-sum-exp is `total`, in float32; 0 in rows without tokens."""
    weight = torch.where(torch.isneginf(part.lse), 0, torch.exp(part.lse - total))[..., None]
    return torch.where(weight > 0, part.out.float() * weight, 0)


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint sets of tokens; `out` has the element type of the first."""
    total = torch.logsumexp(torch.stack([part.lse for part in parts]), dim=0)
    out = torch.zeros(parts[0].out.shape, dtype=torch.float32, device=total.device)
    for part in parts:
        out += share(part, total)
    return Partial(out.to(parts[0].out.dtype), total)
