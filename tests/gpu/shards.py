"""Random sequences over the pools of a DCP group's ranks, and float64 attention over all of their tokens."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from kvproto import Group
from kvproto.wire.enums import ItemKind
from kvproto_reference.attention.batch import Batch, Span, batch_of
from kvproto_reference.cache import KVPool, Shard
from kvproto_reference.models import ModelConfig

GQA = ModelConfig(kind="gqa", hidden=1, layers=1, heads=16, ffn=1, kv_heads=1, head_dim=128, dtype="bfloat16")
MLA = ModelConfig(
    kind="mla", hidden=1, layers=1, heads=32, ffn=1, latent=512, rope_dim=64, nope_dim=128, v_dim=128, dtype="bfloat16"
)
CONFIGS = {"gqa": GQA, "mla": MLA}


def deal(page: int, size: int, interleave: int) -> Group:
    """A group of tokens one to a row, dealt over `size` ranks."""
    return Group(
        id=0, name="kv", model=0, kind=ItemKind.PAGE, rows=page, tokens_per_row=1, cp_size=size, interleave=interleave,
        origin=0, parts=(),
    )  # fmt: skip


@attrs.frozen(eq=False)
class Sequences:
    """Rows of sequences of some lengths, the last `count` tokens of each being new, and queries for them."""

    config: ModelConfig
    lengths: tuple[int, ...]
    count: int
    rows: list[dict[str, Tensor]]
    """By sequence and part: [length, 1, row_dim]."""
    q: Tensor
    """[tokens, heads, row_dim] of all heads."""

    @classmethod
    def random(cls, kind: str, lengths: tuple[int, ...], count: int, device: torch.device, seed: int = 0) -> Sequences:
        config, dice = CONFIGS[kind], torch.Generator(device).manual_seed(seed)
        options = {"generator": dice, "device": device, "dtype": torch.float32}

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, **options).bfloat16()

        rows = [{part: draw(n, 1, config.row_dim) for part in config.parts} for n in lengths]
        return cls(config, lengths, count, rows, draw(len(lengths) * count, config.heads, config.row_dim))

    def rank(self, group: Group, rank: int) -> tuple[KVPool, Batch]:
        """A rank's pool, NaN in every row that it has not been given, and the step.

        Where the new tokens are several of a sequence, the pool holds those before alone.
        """
        shard = Shard(group, rank)
        held = [shard.pages(n) for n in self.lengths]
        order = np.random.default_rng(1).permutation(sum(held) + 3)
        tables = np.split(order[: sum(held)], np.cumsum(held)[:-1])
        device = self.q.device
        pool = KVPool.allocate(self.config, sum(held) + 3, group.rows, device=device)
        for tensor in pool.tensors.values():
            tensor.fill_(float("nan"))
        for rows, n, table in zip(self.rows, self.lengths, tables, strict=True):
            stored = n if self.count == 1 else n - self.count
            slots = torch.from_numpy(shard.slots(table, np.arange(stored))).to(device)
            for part, new in rows.items():
                pool.tensors[0, part].flatten(0, 1)[slots[slots >= 0]] = new[:stored][slots >= 0]
        spans = [Span(n - self.count, self.count, t) for n, t in zip(self.lengths, tables, strict=True)]
        return pool, batch_of(spans, shard)

    def new(self) -> dict[str, Tensor]:
        """Rows of the new tokens [tokens, 1, row_dim]."""
        return {part: torch.cat([rows[part][-self.count :] for rows in self.rows]) for part in self.config.parts}

    def exact(self) -> Tensor:
        """Attention [tokens, heads, value_dim] of each token over its sequence up to itself, in float64."""
        found = []
        for i, (rows, n) in enumerate(zip(self.rows, self.lengths, strict=True)):
            q = self.q[i * self.count : (i + 1) * self.count].double()
            k = next(iter(rows.values()))[:, 0].double()
            v = rows.get("v", rows.get("latent"))[:, 0, : self.config.value_dim].double()
            scores = torch.einsum("chd,nd->chn", q, k) * self.config.score_scale
            seen = (
                torch.arange(n, device=q.device) <= n - self.count + torch.arange(self.count, device=q.device)[:, None]
            )
            weights = torch.softmax(torch.where(seen[:, None], scores, -torch.inf), -1)
            found.append(torch.einsum("chn,nd->chd", weights, v))
        return torch.cat(found)


def error(out: Tensor, exact: Tensor) -> float:
    """The worst relative L2 error of a head vector; NaN is infinite."""
    worst = float(((out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    return worst if worst == worst else float("inf")
