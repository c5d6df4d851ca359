"""Mixture of experts: a router sends each token to a few of many narrow feed-forward blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .common import SwiGLU, weight
from .config import MoeConfig
from .parallel import TensorParallel


class Experts(nn.Module):
    """Weights of routed experts: the width of each is split over TP ranks, or whole ones are dealt over all ranks."""

    def __init__(self, hidden: int, moe: MoeConfig, tp: TensorParallel) -> None:
        super().__init__()
        held, width = moe.experts, moe.ffn
        if tp.experts is None:
            width = tp.width(width)
        else:
            held = tp.experts.held(held)[tp.experts.rank]
        self.gate = weight(held, width, hidden)
        self.up = weight(held, width, hidden)
        self.down = weight(held, hidden, width)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [n, hidden] through the experts held, `counts` [held] of them through each: summands of [n, hidden]."""
        pieces = rows.split_with_sizes(counts.tolist())
        return torch.cat([self._run(expert, piece) for expert, piece in enumerate(pieces) if len(piece)] or [rows])

    def _run(self, expert: int, x: Tensor) -> Tensor:
        inner = F.silu(F.linear(x, self.gate[expert])) * F.linear(x, self.up[expert])
        return F.linear(inner, self.down[expert])


class MoeFFN(nn.Module):
    """Routed experts and, in some models, one shared expert."""

    def __init__(self, hidden: int, moe: MoeConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.moe, self.tp = moe, tp
        self.router = weight(moe.experts, hidden)
        self.correction = nn.Parameter(torch.zeros(moe.experts)) if moe.correction else None
        self.experts = Experts(hidden, moe, tp)
        self.shared = SwiGLU(hidden, moe.shared_ffn, tp) if moe.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> this rank's summand of [..., hidden]."""
        tokens = x.flatten(0, -2)
        out = torch.zeros_like(tokens) if self.shared is None else self.shared.forward(tokens)
        if self.tp.experts is None:
            out = out + self._routed(tokens)
        else:  # of the tokens that all ranks of an attention group have, each sends its share to the experts
            mine = self.tp.share(len(tokens))
            out[mine] += self._routed(tokens[mine])
        return out.view_as(x)

    def _routed(self, tokens: Tensor) -> Tensor:
        """Outputs of the chosen experts for tokens [n, hidden], or of this rank's part of each expert's width."""
        weights, chosen = self.route(tokens)
        order = chosen.flatten().argsort(stable=True)
        rows, counts = tokens[order // self.moe.top_k], chosen.flatten().bincount(minlength=self.moe.experts)
        ranks = self.tp.experts
        made = self.experts(rows, counts) if ranks is None else ranks.run(self.experts, rows, counts)
        by_token = made[order.argsort()].reshape(*chosen.shape, tokens.shape[-1])
        return (by_token * weights[..., None]).sum(1).to(tokens.dtype)

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
