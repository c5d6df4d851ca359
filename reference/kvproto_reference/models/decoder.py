"""The decoder stack around either attention kind, and around recurrent layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Attention, Taps
from .common import SwiGLU, product, weight
from .config import ModelConfig
from .delta import DeltaNet
from .gqa import GqaAttention
from .lora import NONE, Adapted
from .mla import MlaAttention
from .moe import MoeFFN
from .ops import Stepping, Table
from .parallel import SOLO, TensorParallel, check_split, place_in


class Block(Stepping):
    """Pre-norm attention, or a recurrence in its place, and feed-forward of one layer."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        self.eps, self.tp = config.norm_eps, tp
        self.attn_norm = nn.Parameter(torch.ones(config.hidden))
        kind = GqaAttention if config.kind == "gqa" else MlaAttention
        place = place_in(config, tp, layer)
        self.attn: GqaAttention | MlaAttention | DeltaNet = (DeltaNet if config.recurs(layer) else kind)(
            config, place, layer
        )
        self.ffn_norm = nn.Parameter(torch.ones(config.hidden))
        sparse = config.moe is not None and layer in config.moe.layers
        self.ffn: SwiGLU | MoeFFN = (
            MoeFFN(config.hidden, config.moe, tp)
            if config.moe is not None and sparse
            else SwiGLU(config.hidden, config.ffn, tp)
        )

    def forward(self, x: Tensor, table: Table, attention: Attention, adapted: Adapted = NONE) -> Tensor:
        """x [..., n, hidden] -> [..., n, hidden]."""
        mixed = self.attn.forward(self.ops.norm(x, self.attn_norm, self.eps), table, attention, adapted)
        x, normed = self.ops.add_norm(x, mixed, self.ffn_norm, self.eps)
        return x + self.tp.all_reduce(self.ffn.forward(normed))

    def idle(self) -> None:
        """Run this rank's experts for the tokens of other replicas."""
        if isinstance(self.ffn, MoeFFN):
            self.ffn.forward(self.ffn_norm.new_empty(0, len(self.ffn_norm)))


class Decoder(Stepping):
    """A GQA or MLA language model, with the weights of only this TP rank and pipeline stage."""

    rates: Tensor

    def __init__(self, config: ModelConfig, tp: TensorParallel = SOLO) -> None:
        super().__init__()
        check_split(config, tp.size, tp.dcp)
        self.config, self.tp = config, tp
        self.stages = stages = tp.stages(config.layers)
        embeds = stages.first or (stages.last and config.tied)
        self.embed = weight(config.vocab, config.hidden) if embeds else None
        self.blocks = {layer: Block(config, tp, layer) for layer in stages.layers}
        self.layers = nn.ModuleDict({str(layer): block for layer, block in self.blocks.items()})
        self.norm = nn.Parameter(torch.ones(config.hidden)) if stages.last else None
        self.head = weight(config.vocab, config.hidden) if stages.last and not config.tied else None
        self.register_buffer("rates", torch.tensor(config.rates, device="cpu"), persistent=False)

    def join(self) -> None:
        """Put weights with the same input next to each other, once they are loaded and on their device.

        A step of few tokens is as fast as weights are read, and one long product reads faster than two or three.
        """
        for module in self.modules():
            if isinstance(module, GqaAttention | DeltaNet | SwiGLU):
                module.join()

    def idle(self) -> None:
        """Take part in the steps that other replicas run, until none of them has another one: see `ExpertParallel`."""
        while self.tp.experts is not None and self.tp.experts.step(False):
            for block in self.blocks.values():
                block.idle()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        computed: Callable[[int], None] | None = None,
        wanted: Tensor | None = None,
        taps: Taps | None = None,
        seen: tuple[Tensor, Tensor] | None = None,
        adapted: Adapted = NONE,
    ) -> Tensor:
        """Float32 logits [..., n, vocab] of tokens [..., n] int64 at positions [n] int64.

        `computed` is called with each layer once its rows are written, on a GPU in stream order. `wanted` [m] names the
        tokens whose logits are; all by default. `taps` collect hidden states of all tokens. `seen` are tokens [k], and
        what the model reads in place of their embeddings [k, hidden]. `adapted` has the adapters of tokens [n].
        """
        config, stages = self.config, self.stages
        if self.tp.experts is not None:
            self.tp.experts.step(True)
        table = self.ops.table(positions, self.rates, config.rope_gain, config.rope_pairs)
        if stages.first and self.embed is not None:
            x = F.embedding(tokens, self.embed)
            if seen is not None:
                place, rows = (each.to(x.device) for each in seen)
                x = x.index_copy(0, place, rows.to(x.dtype))
        else:
            shape, dtype = (*tokens.shape, config.hidden), getattr(torch, config.dtype)
            x = torch.empty(shape, dtype=dtype, device=tokens.device)
        before, _ = stages.chunks[0]
        for rank, layers in stages.chunks:
            x, before = stages.hand(x, before, rank), rank
            for layer in layers if rank == stages.rank else ():
                x = self.blocks[layer].forward(x, table, attention, adapted)
                if computed is not None:
                    computed(layer)
                if taps is not None:
                    taps.put(layer, x)
        if taps is not None:
            taps.spread(stages, x)
        x = x if wanted is None else x[wanted]
        head = self.embed if self.head is None else self.head
        if self.norm is None or head is None:
            return stages.everywhere(x.new_empty((*x.shape[:-1], config.vocab), dtype=torch.float32))
        return stages.everywhere(product(self.ops.norm(x, self.norm, config.norm_eps), head).float())
