"""Losses of heads; `python -m kvproto_reference.train --only eagle-mla` trains one of a shipped target.

As in decode, the head goes on from what it made itself: row t of unroll u reads the output of row t - 1 of unroll
u - 1, and sees rows made of the target's hidden states up to those that decode would have (arXiv 2503.01840, 3.2).
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from . import checkpoint
from .data import load_text, passages
from .models import Attention, Decoder, Dense, Head, HeadConfig, ModelConfig, Rows, Taps, kv_head_of
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
        keys, heads = rows["k"] if "k" in rows else rows["latent"], self._kv_of.to(q.device)
        self._keys.append(keys[..., heads, :])
        self._values.append(rows.get("v", keys)[..., heads, : self._width])
        if len(self._keys) == 1:
            return self._dense.attend(layer, q, rows)
        n = q.shape[-3]
        first = torch.einsum("...qhd,...khd->...hqk", q, self._keys[0])
        first = first.masked_fill(torch.ones(n, n, device=q.device).triu(1).bool(), -torch.inf)
        since = [torch.einsum("...qhd,...qhd->...hq", q, keys).unsqueeze(-1) for keys in self._keys[1:]]
        shares = (torch.cat((first, *since), -1) * self._scale).softmax(-1)
        out = torch.einsum("...hqk,...khd->...qhd", shares[..., :n], self._values[0])
        for i, values in enumerate(self._values[1:]):
            out = out + torch.einsum("...hq,...qhd->...qhd", shares[..., n + i], values)
        return out


def config_of(preset: HeadPreset, folder: Path, target: ModelConfig) -> ModelConfig:
    """The config of a head of the target in a folder."""
    mtp = preset.form == "mtp"
    reads = HeadConfig(
        target=checkpoint.fingerprint(folder),
        width=target.hidden,
        taps=(target.layers - 1,) if mtp else preset.taps,
        vocab=target.vocab if mtp else preset.vocab,
        form=preset.form,
    )
    config = ModelConfig(
        kind="gqa",
        hidden=target.hidden,
        layers=1,
        heads=preset.heads,
        kv_heads=preset.kv_heads,
        head_dim=target.hidden // preset.heads,
        ffn=preset.ffn,
        vocab=target.vocab,
        norm_eps=target.norm_eps,
        rope_theta=target.rope_theta,
        tied=mtp or preset.tied,
        head=reads,
    )
    if preset.kind == "gqa":
        return config
    latent = {name: getattr(target, name) for name in ("latent", "rope_dim", "nope_dim", "v_dim")}
    return attrs.evolve(config, kind="mla", kv_heads=0, head_dim=0, **latent)


def untrained_head(config: ModelConfig, target: Decoder, counts: Sequence[int]) -> Head:
    """A head with the target's embedding, which can propose the most frequent tokens; `counts` [vocab] of a text."""
    head = Head(config)
    if config.head is not None and not head.whole:
        tokens = torch.tensor(counts).argsort(descending=True, stable=True)[: config.head.vocab].sort().values
        head.d2t.copy_(tokens - torch.arange(len(tokens)))
    said = target.embed if target.head is None else target.head
    if target.embed is not None and said is not None:
        head.embed = torch.nn.Parameter(target.embed.data.float(), requires_grad=False)
        if head.head is not None:
            head.head.data.copy_(said[head.tokens])
    return head


def counts_of_text(vocab: int) -> list[int]:
    """The number of times that each token is in the shipped text."""
    counts = Counter(token for part in passages(load_text()) for token in part)
    return [counts[token] for token in range(vocab)]


def unrolls(head: Head, target: Decoder, windows: Tensor, unrolled: int) -> tuple[list[Tensor], Tensor]:
    """Logits [windows, places, draft vocab] of each unroll, and the target's [windows, tokens, vocab].

    `windows` [windows, tokens + 1]; places are those whose last proposal is still in the window. The proposal of place
    i in unroll u is of the token that the target says at i + u + 1.
    """
    reads = head.config.head
    taps, n = Taps(reads.taps if reads else ()), windows.shape[1] - 1
    positions = torch.arange(n, device=windows.device)
    with torch.no_grad():
        says = target.forward(windows[:, :-1], positions, Dense(target.config), taps=taps)
    attention, found, count = Unrolled(head.config), list[Tensor](), n - unrolled
    features = head.fuse(taps.hidden[:, :count])
    for u in range(unrolled):
        tokens = windows[:, u + 1 : u + 1 + count]
        logits, features = head.forward(tokens, positions[:count] + u, features, attention)
        found.append(logits)
    return found, says


def loss_of(head: Head, target: Decoder, windows: Tensor, unrolled: int) -> Tensor:
    """The mean cross entropy of the head's proposals and the target's own logits; windows [windows, tokens + 1].

    Proposals count where the target's most likely token is one that the head can say.
    """
    found, says = unrolls(head, target, windows, unrolled)
    can = torch.isin(says.argmax(-1), head.tokens)
    wanted = (says if head.whole else says[..., head.tokens]).softmax(-1)
    losses = []
    for u, own in enumerate(found):
        place = slice(u + 1, u + 1 + own.shape[1])
        entropy = -(wanted[:, place] * own.log_softmax(-1)).sum(-1)
        losses.append((entropy * can[:, place]).sum() / can[:, place].sum())
    return torch.stack(losses).mean()


def chosen(head: Head, target: Decoder, windows: Tensor, unrolled: int) -> Tensor:
    """Proposals in a row that are the target's own choice, counted after each place of windows that it chose."""
    found, says = unrolls(head, target, windows, unrolled)
    best = says.argmax(-1)
    right = [head.tokens[own.argmax(-1)] == best[:, u + 1 : u + 1 + own.shape[1]] for u, own in enumerate(found)]
    return torch.stack(right).cumprod(0).sum(0)
