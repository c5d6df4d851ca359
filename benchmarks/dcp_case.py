"""Cases of dcp_gpu.py: shapes of attention, batches over dealt tokens, and FlashInfer called by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from kvproto import Group
from kvproto.wire.enums import ItemKind
from kvproto_reference.attention.batch import Batch, Span, batch_of
from kvproto_reference.cache import KVPool, Shard
from kvproto_reference.models import ModelConfig


@attrs.frozen
class Shape:
    """One rank's attention."""

    name: str
    config: dict[str, Any]
    heads: int
    """Of a rank."""
    page: int

    def model(self, layers: int) -> ModelConfig:
        return ModelConfig(hidden=1, layers=layers, heads=self.heads, ffn=1, vocab=1, dtype="bfloat16", **self.config)

    @property
    def row(self) -> int:
        """Bytes of a token in a layer."""
        one = self.model(1)
        return len(one.parts) * one.row_dim * 2


SHAPES = [
    Shape("GQA", {"kind": "gqa", "kv_heads": 1, "head_dim": 128}, 8, 16),
    Shape("MLA", {"kind": "mla", "latent": 512, "rope_dim": 64, "nope_dim": 128, "v_dim": 128}, 16, 64),
]


def shard_of(shape: Shape, size: int, rank: int) -> Shard:
    group = Group(
        id=0,
        name="kv",
        model=0,
        kind=ItemKind.PAGE,
        rows=shape.page,
        tokens_per_row=1,
        cp_size=size,
        interleave=1,
        origin=0,
        parts=(),
    )
    return Shard(group, rank)


def batch_for(shape: Shape, shard: Shard, lengths: Sequence[int], count: int, seed: int) -> tuple[Batch, int]:
    """A step of the last `count` tokens of each sequence, in pages in random order, and the pages of a pool that holds it."""
    held = [shard.pages(length) for length in lengths]
    order = np.random.default_rng(seed).permutation(sum(held)).astype(np.int32)
    tables = np.split(order, np.cumsum(held)[:-1])
    return batch_of([Span(n - count, count, t) for n, t in zip(lengths, tables, strict=True)], shard), sum(held)


def bare(kernel: Any, pool: KVPool, batch: Batch, heads: int) -> Callable[[Tensor, int], object]:
    """FlashInfer called by hand for the same step, with arrays and output of its own."""
    import flashinfer
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    config, n = pool.config, len(batch.bounds)
    host = [torch.from_numpy(a) for a in (batch.page_starts, batch.pages, batch.bounds)]
    starts, pages, bounds = (a.to(pool.device) for a in host)
    if config.kind == "mla":
        q_starts = torch.arange(n + 1, dtype=torch.int32)
        wrapper = BatchMLAPagedAttentionWrapper(
            kernel._workspace, True, q_starts.to(pool.device), starts, pages, bounds
        )
        wrapper.plan(
            q_starts,
            host[0],
            host[1],
            host[2],
            heads,
            512,
            64,
            pool.page_size,
            False,
            config.score_scale,
            torch.bfloat16,
            torch.bfloat16,
        )
        return lambda q, layer: wrapper.run(
            q[..., :512],
            q[..., 512:],
            pool.tensors[layer, "latent"][:, :, 0, :512],
            pool.tensors[layer, "latent"][:, :, 0, 512:],
            return_lse=True,
        )
    last = (host[2] - 1) % pool.page_size + 1
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        kernel._workspace, "NHD", True, True, starts, pages, last.to(pool.device), backend="fa2"
    )
    decode.plan(
        host[0],
        host[1],
        last,
        heads,
        1,
        config.head_dim,
        pool.page_size,
        sm_scale=config.score_scale,
        q_data_type=torch.bfloat16,
    )
    return lambda q, layer: decode.run(q, (pool.tensors[layer, "k"], pool.tensors[layer, "v"]), return_lse=True)
