"""Llama/Qwen3-style attention: grouped KV heads, QK-norm, RoPE; caches K and V."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import LayerCaches
from .common import attend, rms_norm, rope, split_heads, weight
from .config import ModelConfig
from .parallel import TensorParallel, kv_head_range


class GqaAttention(nn.Module):
    """One layer's attention over the KV heads of this rank."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        self.config, self.tp, self.layer = config, tp, layer
        lo, hi = kv_head_range(config, tp.rank, tp.size)
        mine, each = tp.share(config.heads), config.heads // config.kv_heads
        self.heads, self.kv_heads = tp.width(config.heads), hi - lo
        self.kv_of = torch.arange(mine.start, mine.stop) // each - lo
        """The KV head, of this rank's, that each of its query heads attends to."""
        dim = config.head_dim
        self.q = weight(self.heads * dim, config.hidden)
        self.k = weight(self.kv_heads * dim, config.hidden)
        self.v = weight(self.kv_heads * dim, config.hidden)
        self.o = weight(config.hidden, self.heads * dim)
        self.q_norm = nn.Parameter(torch.ones(dim))
        self.k_norm = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, positions: Tensor, table: tuple[Tensor, Tensor], cache: LayerCaches) -> Tensor:
        """x [..., n, hidden] at positions [n] -> [..., n, hidden], summed over ranks."""
        dim, eps = self.config.head_dim, self.config.norm_eps
        q = split_heads(F.linear(x, self.q), self.heads)
        k = split_heads(F.linear(x, self.k), self.kv_heads)
        v = split_heads(F.linear(x, self.v), self.kv_heads)
        q = rope(rms_norm(q, self.q_norm, eps), table)
        cache.write(self.layer, "k", rope(rms_norm(k, self.k_norm, eps), table))
        cache.write(self.layer, "v", v)
        keys, values = (cache.read(self.layer, part)[..., self.kv_of, :] for part in ("k", "v"))
        out = attend(q, keys, values, positions, dim**-0.5)
        return self.tp.all_reduce(F.linear(out.flatten(-2), self.o))
