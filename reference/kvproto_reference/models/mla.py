"""DeepSeek-style latent attention: caches one row [latent + rope_dim] per position, shared by all heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Attention
from .common import split_heads, weight
from .config import ModelConfig
from .lora import NONE, Adapted
from .ops import Stepping, Table
from .parallel import TensorParallel

LATENT_EPS = 1e-6
"""Epsilon of the inner norms; DeepSeek's code uses this one, whatever the model's own."""


class MlaAttention(Stepping):
    """The attention of one layer in the absorbed form; query heads are split over ranks, the latent is on all of them.

    DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        self.config, self.tp, self.layer = config, tp, layer
        queries = tp.queries(config.heads)
        self.heads, own = queries.stop - queries.start, tp.width(config.heads)
        width, rank = self.heads * (config.nope_dim + config.rope_dim), config.q_rank
        self.q_a = weight(rank, config.inputs) if rank else None
        self.q_a_norm = nn.Parameter(torch.ones(rank)) if rank else None
        self.q = weight(width, rank or config.inputs)
        self.kv_a = weight(config.latent + config.rope_dim, config.inputs)
        self.kv_norm = nn.Parameter(torch.ones(config.latent))
        self.k_up = weight(self.heads, config.nope_dim, config.latent)
        self.v_up = weight(own, config.v_dim, config.latent)
        self.o = weight(config.hidden, own * config.v_dim)

    def forward(self, x: Tensor, table: Table, attention: Attention, adapted: Adapted = NONE) -> Tensor:
        """x [..., n, inputs] -> [..., n, hidden], summed over ranks; with adapters, [n, inputs]."""
        c = self.config
        q = split_heads(self._queries(x, adapted), self.heads)
        q_nope, q_rope = q[..., : c.nope_dim], q[..., c.nope_dim :]
        kv = self._project("kv_a", x, adapted).unsqueeze(-2)
        latent, k_rope = kv[..., : c.latent], kv[..., c.latent :]
        q_rope, k_rope = self.ops.rope(q_rope, k_rope, table, c.rope_pairs)
        row = torch.cat((self.ops.norm(latent, self.kv_norm, LATENT_EPS), k_rope), dim=-1)
        # W_uk is applied to the query, so that scores are computed against the cached latents themselves.
        absorbed = torch.einsum("...hd,hdl->...hl", q_nope, self.k_up)
        query = torch.cat((absorbed, q_rope), dim=-1)
        mixed = attention.attend(self.layer, query, {"latent": row})
        out = torch.einsum("...hl,hvl->...hv", mixed, self.v_up)
        return self.tp.all_reduce(F.linear(out.flatten(-2), self.o))

    def _queries(self, x: Tensor, adapted: Adapted) -> Tensor:
        """x [..., inputs] -> [..., heads * (nope_dim + rope_dim)]."""
        if self.q_a_norm is not None:
            x = self.ops.norm(self._project("q_a", x, adapted), self.q_a_norm, LATENT_EPS)
        return self._project("q", x, adapted)

    def _project(self, name: str, x: Tensor, adapted: Adapted) -> Tensor:
        """x [..., in] -> [..., out], by one of the weights that adapters may change."""
        out = F.linear(x, getattr(self, name))
        adapted.add(self.layer, name, x, out)
        return out
