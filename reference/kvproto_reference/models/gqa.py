"""Llama/Qwen-style attention: grouped KV heads, RoPE, QK-norm or biases where the model has them; caches K and V."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import LayerCaches
from .common import attend, rms_norm, rope, split_heads, weight
from .config import ModelConfig
from .parallel import TensorParallel, kv_head_range


class GqaAttention(nn.Module):
    """One layer's attention over the KV heads of this rank."""

    kv_of: Tensor
    """The KV head, of this rank's, that each of its query heads attends to."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        self.config, self.tp, self.layer = config, tp, layer
        lo, hi = kv_head_range(config, tp.rank, tp.size)
        mine, each = tp.share(config.heads), config.heads // config.kv_heads
        self.heads, self.kv_heads = tp.width(config.heads), hi - lo
        kv_of = torch.arange(mine.start, mine.stop, device="cpu") // each - lo
        self.register_buffer("kv_of", kv_of, persistent=False)
        dim = config.head_dim
        self.q = weight(self.heads * dim, config.hidden)
        self.k = weight(self.kv_heads * dim, config.hidden)
        self.v = weight(self.kv_heads * dim, config.hidden)
        self.o = weight(config.hidden, self.heads * dim)
        self.q_bias = nn.Parameter(torch.zeros(self.heads * dim)) if config.qkv_bias else None
        self.k_bias = nn.Parameter(torch.zeros(self.kv_heads * dim)) if config.qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(self.kv_heads * dim)) if config.qkv_bias else None
        self.q_norm = nn.Parameter(torch.ones(dim)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(dim)) if config.qk_norm else None

    def forward(self, x: Tensor, positions: Tensor, table: tuple[Tensor, Tensor], cache: LayerCaches) -> Tensor:
        """x [..., n, hidden] at positions [n] -> [..., n, hidden], summed over ranks."""
        c = self.config
        q = split_heads(F.linear(x, self.q, self.q_bias), self.heads)
        k = split_heads(F.linear(x, self.k, self.k_bias), self.kv_heads)
        v = split_heads(F.linear(x, self.v, self.v_bias), self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, c.norm_eps), rms_norm(k, self.k_norm, c.norm_eps)
        q = rope(q, table, c.rope_pairs)
        cache.write(self.layer, "k", rope(k, table, c.rope_pairs))
        cache.write(self.layer, "v", v)
        keys, values = (cache.read(self.layer, part)[..., self.kv_of, :] for part in ("k", "v"))
        out = attend(q, keys, values, positions, c.score_scale)
        return self.tp.all_reduce(F.linear(out.flatten(-2), self.o))
