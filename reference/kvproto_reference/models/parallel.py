"""Tensor parallelism: which heads a rank holds, and how weights are cut at load."""

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import EngineError
from .config import ModelConfig


@attrs.frozen
class TensorParallel:
    """Place of this process in a TP group; `group` None means the default process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __attrs_post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise EngineError(f"TP rank {self.rank} is outside a group of {self.size}")

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of the ranks' `x` (any shape), bitwise equal on all ranks; identity when the size is 1."""
        if self.size == 1:
            return x
        total = x.detach().contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def share(self, count: int) -> slice:
        """This rank's even share of `count` rows."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


SOLO = TensorParallel()


def check_split(config: ModelConfig, size: int) -> None:
    """Raise EngineError unless the model divides over `size` TP ranks."""
    for name, count in (("heads", config.heads), ("ffn", config.ffn)):
        if count % size:
            raise EngineError(f"{name} {count} does not divide over TP {size}")
    if config.kind == "gqa":
        large, small = max(config.kv_heads, size), min(config.kv_heads, size)
        if large % small:
            raise EngineError(f"{config.kv_heads} KV heads neither divide over nor replicate evenly to TP {size}")


def kv_head_range(config: ModelConfig, rank: int, size: int) -> tuple[int, int]:
    """Global KV heads [lo, hi) in the cache of one rank; the MLA latent counts as one head on all ranks."""
    check_split(config, size)
    if not 0 <= rank < size:
        raise EngineError(f"TP rank {rank} is outside a group of {size}")
    if config.kind == "mla":
        return 0, 1
    if size <= config.kv_heads:
        each = config.kv_heads // size
        return rank * each, (rank + 1) * each
    # More ranks than KV heads: consecutive ranks hold a copy of the same head.
    head = rank * config.kv_heads // size
    return head, head + 1


def shard(config: ModelConfig, tp: TensorParallel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's cut of full weights, keyed as in the full checkpoint."""
    check_split(config, tp.size)
    lo, hi = kv_head_range(config, tp.rank, tp.size)
    kv = slice(lo * config.head_dim, hi * config.head_dim)
    cut: dict[str, Tensor] = {}
    for name, full in state.items():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("q", "gate", "up", "k_up", "v_up"):
            piece = full[tp.share(full.shape[0])]
        elif leaf in ("k", "v"):
            piece = full[kv]
        elif leaf in ("o", "down"):
            piece = full[:, tp.share(full.shape[1])]
        else:
            piece = full
        cut[name] = piece.to(torch.float32).contiguous()
    return cut
