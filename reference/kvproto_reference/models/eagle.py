"""An EAGLE-3 head: a draft of one layer that reads the target's hidden states (arXiv 2503.01840, 3.1)."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import EngineError
from .base import Attention
from .common import SwiGLU, weight
from .config import EagleConfig, ModelConfig
from .gqa import GqaAttention
from .mla import MlaAttention
from .ops import Stepping
from .parallel import SOLO, TensorParallel, check_split


class EagleHead(Stepping):
    """A head with the weights of this TP rank.

    Its row of position t is of token t + 1 and of a feature of position t: what `fuse` makes of the target's hidden
    states there, or the output of row t - 1 if token t was only proposed. Its logits are of token t + 2.
    """

    rates: Tensor
    d2t: Tensor

    def __init__(self, config: ModelConfig, tp: TensorParallel = SOLO) -> None:
        super().__init__()
        check_split(config, tp.size, tp.dcp)
        self.config, self.tp = config, tp
        reads = eagle_of(config)
        self.embed = weight(config.vocab, config.hidden)
        self.fc = weight(config.hidden, reads.hidden)
        self.embed_norm = nn.Parameter(torch.ones(config.hidden))
        self.feature_norm = nn.Parameter(torch.ones(config.hidden))
        kind = GqaAttention if config.kind == "gqa" else MlaAttention
        self.attn: GqaAttention | MlaAttention = kind(config, tp, 0)
        self.ffn_norm = nn.Parameter(torch.ones(config.hidden))
        self.ffn = SwiGLU(config.hidden, config.ffn, tp)
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = weight(reads.vocab, config.hidden)
        self.register_buffer("d2t", torch.zeros(reads.vocab, dtype=torch.int64))
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

    def fuse(self, hidden: Tensor) -> Tensor:
        """Features [..., hidden] of the target's hidden states [..., taps * width], of any float type."""
        return F.linear(hidden.to(self.fc.dtype), self.fc)

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
        both = torch.cat((embedded, ops.norm(features, self.feature_norm, eps)), -1)
        mixed = self.attn.forward(both, table, attention)
        x, normed = ops.add_norm(features.clone(), mixed, self.ffn_norm, eps)
        x = x + self.tp.all_reduce(self.ffn.forward(normed))
        if computed is not None:
            computed(0)
        x = x if wanted is None else x[wanted]
        return F.linear(ops.norm(x, self.norm, eps), self.head).float(), x

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [n, draft vocab] as [n, vocab] of the target's tokens; what the head cannot propose has -inf."""
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


def eagle_among(configs: Sequence[ModelConfig]) -> EagleConfig | None:
    """What the draft reads if it is a head, of the configs of a target and perhaps a draft."""
    return configs[1].eagle if configs[1:] else None


def eagle_of(config: ModelConfig) -> EagleConfig:
    """What a head reads; raises EngineError for the config of another model."""
    if config.eagle is None:
        raise EngineError("the config is of no EAGLE-3 head: it has no member eagle")
    return config.eagle
