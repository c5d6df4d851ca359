"""What an EAGLE-3 head is trained by; `python -m kvproto_reference.train --only head-mla` trains one.

As in decode, the head goes on from what it made itself: row t of unroll u reads the output of row t - 1 of unroll
u - 1, and sees rows made of the target's hidden states up to those that decode would have (arXiv 2503.01840, 3.2).
"""

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from . import checkpoint
from .data import load_text, passages
from .models import Attention, Decoder, Dense, EagleConfig, EagleHead, ModelConfig, Rows, Taps, kv_head_of
from .models.parallel import SOLO
from .presets import HeadPreset


class Unrolled(Attention):
    """Attention of a head's unrolls over a whole window; the row of place i in unroll u is at position i + u.

    Unroll 0 is causal. In unroll u, place i attends to places 0 to i of unroll 0, and to place i of those since.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._dense, self._scale, self._width = Dense(config), config.score_scale, config.value_dim
        self._kv_of = torch.tensor(kv_head_of(config, SOLO, slice(0, config.heads)))
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        keys = rows["k"] if "k" in rows else rows["latent"]
        self._keys.append(keys[..., self._kv_of, :])
        self._values.append(rows.get("v", keys)[..., self._kv_of, : self._width])
        if len(self._keys) == 1:
            return self._dense.attend(layer, q, rows)
        n = q.shape[-3]
        first = torch.einsum("...qhd,...khd->...hqk", q, self._keys[0])
        first = first.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        since = [torch.einsum("...qhd,...qhd->...hq", q, keys).unsqueeze(-1) for keys in self._keys[1:]]
        shares = (torch.cat((first, *since), -1) * self._scale).softmax(-1)
        out = torch.einsum("...hqk,...khd->...qhd", shares[..., :n], self._values[0])
        for i, values in enumerate(self._values[1:]):
            out = out + torch.einsum("...hq,...qhd->...qhd", shares[..., n + i], values)
        return out


def head_of(preset: HeadPreset, folder: Path, target: Decoder) -> EagleHead:
    """An untrained head of the target in a folder, with the target's embedding and the text's most frequent tokens."""
    sizes = target.config
    reads = EagleConfig(target=checkpoint.fingerprint(folder), width=sizes.hidden, taps=preset.taps, vocab=preset.vocab)
    config = ModelConfig(
        kind="gqa", hidden=sizes.hidden, layers=1, heads=preset.heads, kv_heads=preset.kv_heads,
        head_dim=sizes.hidden // preset.heads, ffn=preset.ffn, vocab=sizes.vocab, eagle=reads,
    )  # fmt: skip
    head = EagleHead(config)
    counts = Counter(token for part in passages(load_text()) for token in part)
    tokens = torch.tensor(sorted(token for token, _ in counts.most_common(preset.vocab)))
    head.d2t.copy_(tokens - torch.arange(preset.vocab))
    if target.embed is not None:
        head.embed.data.copy_(target.embed)
    return head


def loss_of(head: EagleHead, target: Decoder, windows: Tensor, unrolled: int) -> Tensor:
    """The mean cross entropy of the head's proposals with what the target says there; windows [windows, tokens + 1].

    Proposals count where the target's most likely token is one that the head can say.
    """
    taps, n = Taps(head.config.eagle.taps if head.config.eagle else ()), windows.shape[1] - 1
    with torch.no_grad():
        says = target.forward(windows[:, :-1], torch.arange(n), Dense(target.config), taps=taps)
        can = torch.isin(says.argmax(-1), head.tokens)
        wanted = says[..., head.tokens].softmax(-1)
    attention, losses = Unrolled(head.config), list[Tensor]()
    count = n - unrolled  # places whose last proposal is still in the window
    features = head.fuse(taps.hidden[:, :count])
    for u in range(unrolled):
        logits, features = head.forward(windows[:, u + 1 : u + 1 + count], torch.arange(count) + u, features, attention)
        place = slice(u + 1, u + 1 + count)
        entropy = -(wanted[:, place] * logits.log_softmax(-1)).sum(-1)
        losses.append((entropy * can[:, place]).sum() / can[:, place].sum())
    return torch.stack(losses).mean()
