"""The decoder stack around either attention kind."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Attention
from .common import SwiGLU, weight
from .config import ModelConfig
from .gqa import GqaAttention
from .mla import MlaAttention
from .moe import MoeFFN
from .ops import Ops, Stepping, Table
from .parallel import SOLO, TensorParallel, check_split


class Block(Stepping):
    """Pre-norm attention and feed-forward of one layer."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        self.eps, self.tp = config.norm_eps, tp
        self.attn_norm = nn.Parameter(torch.ones(config.hidden))
        kind = GqaAttention if config.kind == "gqa" else MlaAttention
        self.attn: GqaAttention | MlaAttention = kind(config, tp, layer)
        self.ffn_norm = nn.Parameter(torch.ones(config.hidden))
        sparse = config.moe is not None and layer in config.moe.layers
        self.ffn: SwiGLU | MoeFFN = (
            MoeFFN(config.hidden, config.moe, tp)
            if config.moe is not None and sparse
            else SwiGLU(config.hidden, config.ffn, tp)
        )

    def forward(self, x: Tensor, table: Table, attention: Attention) -> Tensor:
        """x [..., n, hidden] -> [..., n, hidden]."""
        mixed = self.attn.forward(self.ops.norm(x, self.attn_norm, self.eps), table, attention)
        x, normed = self.ops.add_norm(x, mixed, self.ffn_norm, self.eps)
        return x + self.tp.all_reduce(self.ffn.forward(normed))


class Decoder(Stepping):
    """A GQA or MLA language model; holds this TP rank's weights only."""

    rates: Tensor

    def __init__(self, config: ModelConfig, tp: TensorParallel = SOLO) -> None:
        super().__init__()
        check_split(config, tp.size, tp.dcp)
        self.config, self.tp = config, tp
        self.embed = weight(config.vocab, config.hidden)
        self.blocks = [Block(config, tp, layer) for layer in range(config.layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = None if config.tied else weight(config.vocab, config.hidden)
        self.register_buffer("rates", torch.tensor(config.rates, device="cpu"), persistent=False)

    def join(self) -> None:
        """Lay the weights that have one input side by side, once they are loaded and where they stay.

        A step of few tokens is as fast as weights are read, and one long product reads faster than two or three.
        """
        for module in self.modules():
            if isinstance(module, GqaAttention | SwiGLU):
                module.join()

    def use(self, ops: Ops) -> None:
        """Take the steps between products by these, as those of an attention back end fit its tensors."""
        for module in self.modules():
            if isinstance(module, Stepping):
                module.ops = ops

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, computed: Callable[[int], None] | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Float32 logits [..., n, vocab] of tokens [..., n] int64 at positions [n] int64.

        `computed` is called with each layer once its rows are written, on a GPU in stream order. `wanted` [m] names the
        tokens whose logits are; all by default.
        """
        table = self.ops.table(positions, self.rates, self.config.rope_gain, self.config.rope_pairs)
        x = F.embedding(tokens, self.embed)
        for layer, block in enumerate(self.blocks):
            x = block.forward(x, table, attention)
            if computed is not None:
                computed(layer)
        x = x if wanted is None else x[wanted]
        head = self.embed if self.head is None else self.head
        return F.linear(self.ops.norm(x, self.norm, self.config.norm_eps), head).float()
