"""Drafts of one layer that read the target's hidden states: EAGLE-3 heads and MTP layers."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import EngineError
from .base import Attention
from .common import SwiGLU, weight
from .config import HeadConfig, ModelConfig
from .gqa import GqaAttention
from .mla import MlaAttention
from .ops import Stepping
from .parallel import SOLO, TensorParallel, check_split


class Head(Stepping):
    """A head with the weights of this TP rank; `embed` is the target's own embedding.

    Its row of position t is of token t + 1 and of a feature of position t: what `fuse` makes of the target's hidden
    states there, or the output of row t - 1 if token t was only proposed. Its logits are of token t + 2.

    An EAGLE-3 head (arXiv 2503.01840, 3.1) fuses states of several layers, attends with token and feature side by side,
    and has a vocabulary of its own. An MTP layer (DeepSeek-V3, arXiv 2412.19437, 2.2) reads the last layer alone, and
    projects token and feature into a block like the target's. A tied one says tokens by the target's embedding.
    """

    rates: Tensor
    d2t: Tensor

    def __init__(self, config: ModelConfig, tp: TensorParallel = SOLO) -> None:
        super().__init__()
        check_split(config, tp.size, tp.dcp)
        self.config, self.tp = config, tp
        reads = head_of(config)
        mtp = reads.form == "mtp"
        self.embed = weight(config.vocab, config.hidden)
        self.embed_norm = nn.Parameter(torch.ones(config.hidden))
        self.feature_norm = nn.Parameter(torch.ones(config.hidden))
        self.fc = None if mtp else weight(config.hidden, reads.hidden)
        self.proj = weight(config.hidden, 2 * config.hidden) if mtp else None
        self.attn_norm = nn.Parameter(torch.ones(config.hidden)) if mtp else None
        kind = GqaAttention if config.kind == "gqa" else MlaAttention
        self.attn: GqaAttention | MlaAttention = kind(config, tp, 0)
        self.ffn_norm = nn.Parameter(torch.ones(config.hidden))
        self.ffn = SwiGLU(config.hidden, config.ffn, tp)
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = None if config.tied else weight(reads.vocab, config.hidden)
        self.whole = reads.vocab == config.vocab
        mapped = torch.zeros(reads.vocab, dtype=torch.int64, device="cpu" if self.whole else None)
        self.register_buffer("d2t", mapped, persistent=not self.whole)
        self._said: Tensor | None = None
        self.register_buffer("rates", torch.tensor(config.rates, device="cpu"), persistent=False)

    @property
    def tokens(self) -> Tensor:
        """The target's id of each token that the head can propose [draft vocab]; `d2t` has the distances to it."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def join(self) -> None:
        """See `Decoder.join`."""
        for module in (self.attn, self.ffn):
            if isinstance(module, GqaAttention | SwiGLU):
                module.join()
        self._said = self._rows.data

    def fuse(self, hidden: Tensor) -> Tensor:
        """Features [..., hidden] of the target's hidden states [..., taps * width], of any float type."""
        return hidden.to(self.embed.dtype) if self.fc is None else F.linear(hidden.to(self.fc.dtype), self.fc)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        features: Tensor,
        attention: Attention,
        computed: Callable[[int], None] | None = None,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Float32 logits [..., n, draft vocab] and output [..., n, hidden] of rows at `positions` [n].

        `tokens` [..., n] are those after the positions, and `features` [..., n, hidden] those of the positions. The
        output stands for the feature of the next position. `computed` and `wanted` are as in `Decoder.forward`.
        """
        ops, eps = self.ops, self.config.norm_eps
        table = ops.table(positions, self.rates, self.config.rope_gain, self.config.rope_pairs)
        embedded = ops.norm(F.embedding(tokens, self.embed), self.embed_norm, eps)
        x, read = features.clone(), torch.cat((embedded, ops.norm(features, self.feature_norm, eps)), -1)
        if self.proj is not None and self.attn_norm is not None:
            x = F.linear(read, self.proj)
            read = ops.norm(x, self.attn_norm, eps)
        x, normed = ops.add_norm(x, self.attn.forward(read, table, attention), self.ffn_norm, eps)
        x = x + self.tp.all_reduce(self.ffn.forward(normed))
        if computed is not None:
            computed(0)
        x = x if wanted is None else x[wanted]
        said = self._rows if self._said is None else self._said
        return F.linear(ops.norm(x, self.norm, eps), said).float(), x

    @property
    def _rows(self) -> Tensor:
        """The output matrix [draft vocab, hidden]."""
        if self.head is not None:
            return self.head
        return self.embed if self.whole else self.embed[self.tokens]

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [n, draft vocab] as [n, vocab] of the target's tokens; what the head cannot propose has -inf."""
        whole = logits
        if not self.whole:
            whole = logits.new_full((*logits.shape[:-1], self.config.vocab), -torch.inf)
            whole[..., self.tokens] = logits
        return self.tp.stages(1).everywhere(whole)

    def check_tokens(self) -> None:
        """Raise EngineError for a `d2t` that names tokens which the target has not, or one of them twice."""
        tokens, vocab = self.tokens, self.config.vocab
        beyond = tokens[(tokens < 0) | (tokens >= vocab)]
        if len(beyond):
            raise EngineError(
                f"d2t of the head names token {int(beyond[0])}, and the target has {vocab}: use the map that it was"
                " trained with"
            )
        if len(torch.unique(tokens)) != len(tokens):
            raise EngineError(
                f"d2t of the head maps {len(tokens)} tokens to {len(torch.unique(tokens))} of the target's: use the map"
                " that it was trained with"
            )


def head_among(configs: Sequence[ModelConfig]) -> HeadConfig | None:
    """Inputs of the draft if it is a head; configs of a target and perhaps a draft."""
    return configs[1].head if configs[1:] else None


def head_of(config: ModelConfig) -> HeadConfig:
    """Inputs of a head; raises EngineError for the config of another model."""
    if config.head is None:
        raise EngineError("the config is of no head: it has no member head")
    return config.head
