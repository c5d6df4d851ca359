"""What a prefill or decode engine of this package tells kvproto about itself."""

import math
from pathlib import Path

import torch
import torch.utils.dlpack

from kvproto.node.pool import Pool
from kvproto.planning.geometry import Geometry, Group, Rank, facts, gqa, handoff, mla, owns
from kvproto.wire.enums import DType

from ..checkpoint import fingerprint
from ..models import ModelConfig, TensorParallel, kv_head_range
from .pool import KVPool

TARGET, DRAFT, FIRST = 0, 1, 2
"""Group ids: the target's cache, the draft's, the first token."""

_TYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}


def geometry(
    target: Path, draft: Path, configs: tuple[ModelConfig, ModelConfig], tokenizer: str, tp: int, page_size: int
) -> Geometry:
    """The Description of one replica: two models on `tp` ranks, every rank holding the logits."""
    groups = [_group(m, c, page_size) for m, c in enumerate(configs)]
    groups.append(handoff(FIRST, "first token", {"token": (DType.U32, 4)}))
    identity = facts(
        {"weights.target": fingerprint(target), "weights.draft": fingerprint(draft), "tokenizer": tokenizer}
    )
    ranks = []
    for rank in range(tp):
        shares = [owns(g, range(c.layers), [_lanes(c, rank, tp)]) for g, c in zip(groups, configs, strict=False)]
        ranks.append(Rank(rank=rank, owns=(*shares, owns(groups[FIRST], [0]))))
    return Geometry(replica=0, facts=identity, groups=tuple(groups), ranks=tuple(ranks))


def _group(model: int, config: ModelConfig, page_size: int) -> Group:
    name = ("target", "draft")[model]
    dtype, row_bytes = _TYPES[config.dtype], config.row_dim * getattr(torch, config.dtype).itemsize
    if config.kind == "mla":
        return mla(model, name, model, row_bytes, page_size, dtype)
    return gqa(model, name, model, config.kv_heads, row_bytes, page_size, dtype)


def _lanes(config: ModelConfig, rank: int, tp: int) -> tuple[int, int]:
    return kv_head_range(config, rank, tp)


def device_of(number: int | None) -> torch.device:
    """Where torch puts what a rank computes."""
    return torch.device("cpu") if number is None else torch.device("cuda", number)


def adopt(pool: Pool, config: ModelConfig, group: int, tp: TensorParallel) -> KVPool:
    """The engine's tensors over the registered memory of one group."""
    items = pool.side.columns[group].items
    memory = torch.utils.dlpack.from_dlpack(pool.memory).view(torch.uint8)
    tensors = {}
    for layer, part, shape in KVPool.shapes(config, tp, items, pool.side.group(group).rows):
        offset, bytes_ = pool.place(group, layer, part)
        column = memory[offset : offset + math.prod(bytes_)]
        tensors[layer, part] = column.view(getattr(torch, config.dtype)).reshape(shape)
    return KVPool.wrap(config, tensors)
