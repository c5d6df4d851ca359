"""Puts models, pools and attention together: what one process of an engine hosts."""

from collections.abc import Mapping
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from kvproto import Geometry, Pool

from .. import checkpoint
from ..attention.exchange import EXCHANGES, Alone
from ..attention.paged import PagedAttention
from ..attention.torch_kernel import TorchKernel
from ..cache import KVPool, Shard
from ..cache.memory import Allocate
from ..models import Model, ModelConfig, TensorParallel, kv_head_of
from .description import DRAFT, TARGET, Layout, hand_over, shards
from .runner import Runner, TorchRunner


@attrs.frozen(kw_only=True)
class Hosted:
    """The ranks of an engine that one process has, and the models that step all of them."""

    pools: Mapping[int, Pool]
    """What kvproto is told of, by rank."""
    target: Runner
    draft: Runner


def torch_hosted(
    folders: tuple[Path, Path], configs: tuple[ModelConfig, ModelConfig], geometry: Geometry, layout: Layout,
    tp: TensorParallel, pages: int, device: torch.device, memory: Allocate,
) -> Hosted:  # fmt: skip
    """One rank of an engine in torch."""
    mine = shards(geometry, tp.rank)
    among = dcp_group(tp, layout.dcp)
    caches, runners = {}, []
    for model, (name, folder, config) in enumerate(zip((TARGET, DRAFT), folders, configs, strict=True)):
        place = layout.place(model, tp)
        cache = caches[name] = KVPool.allocate(config, pages, mine[name].group.rows, place, device, memory)
        loaded = checkpoint.load(folder, place, dtype=config.dtype, device=device)
        runners.append(torch_runner(loaded, cache, mine[name], among, layout.exchange))
    return Hosted(pools={tp.rank: hand_over(geometry, caches, tp.rank)}, target=runners[0], draft=runners[1])


def dcp_group(tp: TensorParallel, dcp: int) -> dist.ProcessGroup | None:
    """The process group of a rank's DCP group; all ranks of the TP group call this together."""
    if dcp == 1:
        return None
    groups = [dist.new_group(list(range(first, first + dcp))) for first in range(0, tp.size, dcp)]
    mine: dist.ProcessGroup = groups[tp.rank // dcp]
    return mine


def torch_runner(
    model: Model, pool: KVPool, shard: Shard, among: dist.ProcessGroup | None = None, exchange: str = "a2a",
    by_token: bool = False,
) -> TorchRunner:  # fmt: skip
    """A model over its pool on one rank; DCP ranks merge over the group `among`, by a key of EXCHANGES.

    `by_token`: see `PagedAttention`.
    """
    config, place = model.config, model.tp
    group, own = (where.share(config.heads) for where in (place.together, place))
    kernel = TorchKernel(pool, kv_head_of(config, place, group), kv_head_of(config, place, own))
    merging = Alone() if among is None or place.dcp == 1 else EXCHANGES[exchange](place.dcp, among, place.replicate_q)
    return TorchRunner(model, PagedAttention(pool, kernel, merging, by_token), shard)
