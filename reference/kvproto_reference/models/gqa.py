"""Llama/Qwen-style attention: grouped KV heads, RoPE, and QK-norm or biases if the model has them; caches K and V."""

import torch
from torch import Tensor, nn

from .base import Attention
from .common import join, product, split_heads, weight
from .config import ModelConfig
from .lora import NONE, Adapted
from .ops import Stepping, Table
from .parallel import TensorParallel, kv_head_range


class GqaAttention(Stepping):
    """The attention of one layer; its KV heads are those of this rank's DCP group."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        self.config, self.tp, self.layer = config, tp, layer
        lo, hi = kv_head_range(config, tp)
        queries = tp.queries(config.heads)
        self.heads, self.kv_heads = queries.stop - queries.start, hi - lo
        dim = config.head_dim
        self.q = weight(self.heads * dim, config.inputs)
        self.k = weight(self.kv_heads * dim, config.inputs)
        self.v = weight(self.kv_heads * dim, config.inputs)
        self.o = weight(config.hidden, tp.width(config.heads) * dim)
        self.q_bias = nn.Parameter(torch.zeros(self.heads * dim)) if config.qkv_bias else None
        self.k_bias = nn.Parameter(torch.zeros(self.kv_heads * dim)) if config.qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(self.kv_heads * dim)) if config.qkv_bias else None
        self.q_norm = nn.Parameter(torch.ones(dim)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(dim)) if config.qk_norm else None
        self._whole: Tensor | None = None

    def join(self) -> None:
        """See `Decoder.join`."""
        self._whole = join(self.q, self.k, self.v)

    def forward(self, x: Tensor, table: Table, attention: Attention, adapted: Adapted = NONE) -> Tensor:
        """x [..., n, inputs] -> [..., n, hidden], summed over ranks; with adapters, [n, inputs]."""
        c, bias = self.config, None
        weights = torch.cat((self.q, self.k, self.v)) if self._whole is None else self._whole
        if self.q_bias is not None and self.k_bias is not None and self.v_bias is not None:
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        projected, sizes = product(x, weights, bias), [self.heads, self.kv_heads, self.kv_heads]
        for name, part in zip("qkv", projected.split_with_sizes([n * c.head_dim for n in sizes], -1), strict=True):
            adapted.add(self.layer, name, x, part)
        q, k, v = split_heads(projected, sum(sizes)).split_with_sizes(sizes, dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.ops.norm(q, self.q_norm, c.norm_eps), self.ops.norm(k, self.k_norm, c.norm_eps)
        q, k = self.ops.rope(q, k, table, c.rope_pairs)
        out = attention.attend(self.layer, q, {"k": k, "v": v})
        return self.tp.all_reduce(product(out.flatten(-2), self.o))
