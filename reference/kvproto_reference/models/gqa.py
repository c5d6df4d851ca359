"""Llama/Qwen-style attention: grouped KV heads, RoPE, QK-norm or biases where the model has them; caches K and V."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Attention
from .common import rms_norm, rope, split_heads, weight
from .config import ModelConfig
from .parallel import TensorParallel, kv_head_range


class GqaAttention(nn.Module):
    """One layer's attention, whose KV heads are those of this rank's DCP group."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        self.config, self.tp, self.layer = config, tp, layer
        lo, hi = kv_head_range(config, tp)
        queries = tp.queries(config.heads)
        self.heads, self.kv_heads = queries.stop - queries.start, hi - lo
        dim = config.head_dim
        self.q = weight(self.heads * dim, config.hidden)
        self.k = weight(self.kv_heads * dim, config.hidden)
        self.v = weight(self.kv_heads * dim, config.hidden)
        self.o = weight(config.hidden, tp.width(config.heads) * dim)
        self.q_bias = nn.Parameter(torch.zeros(self.heads * dim)) if config.qkv_bias else None
        self.k_bias = nn.Parameter(torch.zeros(self.kv_heads * dim)) if config.qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(self.kv_heads * dim)) if config.qkv_bias else None
        self.q_norm = nn.Parameter(torch.ones(dim)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(dim)) if config.qk_norm else None

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """x [..., n, hidden] -> [..., n, hidden], summed over ranks."""
        c = self.config
        q = split_heads(F.linear(x, self.q, self.q_bias), self.heads)
        k = split_heads(F.linear(x, self.k, self.k_bias), self.kv_heads)
        v = split_heads(F.linear(x, self.v, self.v_bias), self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, c.norm_eps), rms_norm(k, self.k_norm, c.norm_eps)
        both = rope(torch.cat((q, k), dim=-2), table, c.rope_pairs)
        q, k = both[..., : self.heads, :], both[..., self.heads :, :]
        out = attention.attend(self.layer, q, {"k": k, "v": v})
        return self.tp.all_reduce(F.linear(out.flatten(-2), self.o))
