"""Mixture of experts: a router sends each token to a few of many narrow feed-forward blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import SwiGLU, weight
from .config import MoeConfig
from .parallel import TensorParallel


class Experts(nn.Module):
    """Weights of all routed experts; the width of each is split over TP ranks."""

    def __init__(self, hidden: int, moe: MoeConfig, tp: TensorParallel) -> None:
        super().__init__()
        width = tp.width(moe.ffn)
        self.gate = weight(moe.experts, width, hidden)
        self.up = weight(moe.experts, width, hidden)
        self.down = weight(moe.experts, hidden, width)

    def run(self, expert: int, x: Tensor) -> Tensor:
        """x [tokens, hidden] through one expert: this rank's summand of [tokens, hidden]."""
        inner = F.silu(F.linear(x, self.gate[expert])) * F.linear(x, self.up[expert])
        return F.linear(inner, self.down[expert])


class MoeFFN(nn.Module):
    """Routed experts and, in some models, one shared expert."""

    def __init__(self, hidden: int, moe: MoeConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.moe = moe
        self.router = weight(moe.experts, hidden)
        self.correction = nn.Parameter(torch.zeros(moe.experts)) if moe.correction else None
        self.experts = Experts(hidden, moe, tp)
        self.shared = SwiGLU(hidden, moe.shared_ffn, tp) if moe.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> this rank's summand of [..., hidden]."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens) if self.shared is None else self.shared.forward(tokens)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, column = (chosen == expert).nonzero(as_tuple=True)
            summand = self.experts.run(expert, tokens[rows]) * weights[rows, column, None]
            out = out.index_add(0, rows, summand.to(out.dtype))
        return out.view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 weights and indices, both [tokens, top_k], of the experts that tokens [tokens, hidden] go to."""
        moe = self.moe
        logits = F.linear(tokens.float(), self.router.float())
        scores = logits.softmax(-1) if moe.scores == "softmax" else logits.sigmoid()
        rank = scores if self.correction is None else scores + self.correction
        grouped = rank.reshape(len(tokens), moe.groups, moe.experts // moe.groups)
        best = grouped.topk(moe.group_best, dim=-1).values.sum(-1)
        lost = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(moe.top_groups, dim=-1).indices, False)
        chosen = grouped.masked_fill(lost[..., None], -torch.inf).flatten(-2).topk(moe.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if moe.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * moe.scale, chosen
