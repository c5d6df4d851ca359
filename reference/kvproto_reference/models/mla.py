"""DeepSeek-style latent attention: caches one row [latent + rope_dim] per position, shared by all heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import LayerCaches
from .common import attend, rms_norm, rope, split_heads, weight
from .config import ModelConfig
from .parallel import TensorParallel


class MlaAttention(nn.Module):
    """One layer's attention in the absorbed form; query heads are split over ranks, the latent is on all."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        self.config, self.tp, self.layer = config, tp, layer
        self.heads = tp.width(config.heads)
        self.q = weight(self.heads * (config.nope_dim + config.rope_dim), config.hidden)
        self.kv_a = weight(config.latent + config.rope_dim, config.hidden)
        self.kv_norm = nn.Parameter(torch.ones(config.latent))
        self.k_up = weight(self.heads, config.nope_dim, config.latent)
        self.v_up = weight(self.heads, config.v_dim, config.latent)
        self.o = weight(config.hidden, self.heads * config.v_dim)

    def forward(self, x: Tensor, positions: Tensor, table: tuple[Tensor, Tensor], cache: LayerCaches) -> Tensor:
        """x [..., n, hidden] at positions [n] -> [..., n, hidden], summed over ranks."""
        c = self.config
        q = split_heads(F.linear(x, self.q), self.heads)
        q_nope, q_rope = q[..., : c.nope_dim], q[..., c.nope_dim :]
        kv = F.linear(x, self.kv_a).unsqueeze(-2)
        latent, k_rope = kv[..., : c.latent], kv[..., c.latent :]
        row = torch.cat((rms_norm(latent, self.kv_norm, c.norm_eps), rope(k_rope, table)), dim=-1)
        cache.write(self.layer, "latent", row)
        rows = cache.read(self.layer, "latent")
        # W_uk goes into the query, so that scores are taken against the cached latents themselves.
        absorbed = torch.einsum("...hd,hdl->...hl", q_nope, self.k_up)
        query = torch.cat((absorbed, rope(q_rope, table)), dim=-1)
        # The whole row serves as value (the fused kernel wants equal widths); its rope part is cut off after.
        mixed = attend(query, rows, rows, positions, (c.nope_dim + c.rope_dim) ** -0.5)[..., : c.latent]
        out = torch.einsum("...hl,hvl->...hv", mixed, self.v_up)
        return self.tp.all_reduce(F.linear(out.flatten(-2), self.o))
