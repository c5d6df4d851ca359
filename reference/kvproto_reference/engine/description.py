"""What a prefill or decode engine of this package tells kvproto about itself."""

import hashlib
from pathlib import Path

import torch

from kvproto.geometry import Geometry, Group, Rank, facts, gqa, handoff, mla, owns
from kvproto.node.pool import Pool
from kvproto.wire.enums import DType

from ..checkpoint import CONFIG_FILE, WEIGHTS_FILE
from ..models import ModelConfig, TensorParallel, kv_head_range
from .pool import KVPool

TARGET, DRAFT, FIRST = 0, 1, 2
"""Group ids: the target's cache, the draft's, the first token."""

_FLOAT = 4


def geometry(target: Path, draft: Path, configs: tuple[ModelConfig, ModelConfig], tp: int, page_size: int) -> Geometry:
    """The Description of one replica: two models on `tp` ranks, every rank holding the logits."""
    groups = [_group(m, c, page_size) for m, c in enumerate(configs)]
    groups.append(handoff(FIRST, "first token", {"token": (DType.U32, 4)}))
    identity = facts(
        {"weights.target": fingerprint(target), "weights.draft": fingerprint(draft), "tokenizer": "bytes+eos256"}
    )
    ranks = []
    for rank in range(tp):
        shares = [owns(g, range(c.layers), [_lanes(c, rank, tp)]) for g, c in zip(groups, configs, strict=False)]
        ranks.append(Rank(rank=rank, owns=(*shares, owns(groups[FIRST], [0]))))
    return Geometry(replica=0, facts=identity, groups=tuple(groups), ranks=tuple(ranks))


def _group(model: int, config: ModelConfig, page_size: int) -> Group:
    name = ("target", "draft")[model]
    if config.kind == "mla":
        return mla(model, name, model, config.row_dim * _FLOAT, page_size)
    return gqa(model, name, model, config.kv_heads, config.row_dim * _FLOAT, page_size)


def _lanes(config: ModelConfig, rank: int, tp: int) -> tuple[int, int]:
    return kv_head_range(config, rank, tp)


def fingerprint(folder: Path) -> str:
    """Names the weights by their content."""
    data = (folder / CONFIG_FILE).read_bytes() + (folder / WEIGHTS_FILE).read_bytes()
    return hashlib.sha256(data).hexdigest()[:16]


def adopt(pool: Pool, config: ModelConfig, group: int, tp: TensorParallel) -> KVPool:
    """The engine's tensors over the registered memory of one group."""
    items = pool.side.columns[group].items
    tensors = {}
    for layer, part, shape in KVPool.shapes(config, tp, items, pool.side.group(group).rows):
        tensors[layer, part] = torch.from_numpy(pool.array(group, layer, part).view("float32")).reshape(shape)
    return KVPool.wrap(config, tensors)
