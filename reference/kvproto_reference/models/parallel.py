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
        """This rank's share of `count` units; shares differ by one where the ranks do not divide them."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def width(self, count: int) -> int:
        """Units of this rank's share."""
        return count * (self.rank + 1) // self.size - count * self.rank // self.size


SOLO = TensorParallel()


def check_split(config: ModelConfig, size: int) -> None:
    """Raise EngineError where some of `size` TP ranks would have no query head, or nothing of the ffn."""
    for name, count in (("heads", config.heads), ("ffn", config.ffn)):
        if count < size:
            raise EngineError(f"{name} {count} are too few for TP {size}")


def kv_head_range(config: ModelConfig, rank: int, size: int) -> tuple[int, int]:
    """Global KV heads [lo, hi) that the query heads of one rank attend to; the MLA latent counts as one, on all ranks.

    Where the ranks do not divide the heads, or are more than the KV heads, a KV head is in the cache of several ranks.
    """
    check_split(config, size)
    if not 0 <= rank < size:
        raise EngineError(f"TP rank {rank} is outside a group of {size}")
    if config.kind == "mla":
        return 0, 1
    mine, each = TensorParallel(rank, size).share(config.heads), config.heads // config.kv_heads
    return mine.start // each, -(-mine.stop // each)


def shard(config: ModelConfig, tp: TensorParallel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's cut of full weights, keyed as in the full checkpoint."""
    check_split(config, tp.size)
    lo, hi = kv_head_range(config, tp.rank, tp.size)
    kv = slice(lo * config.head_dim, hi * config.head_dim)
    cut: dict[str, Tensor] = {}
    for name, full in state.items():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("q", "k_up", "v_up"):
            piece = full.reshape(config.heads, -1, *full.shape[1:])[tp.share(config.heads)].flatten(0, 1)
        elif leaf in ("gate", "up"):
            piece = full[tp.share(config.ffn)]
        elif leaf in ("k", "v"):
            piece = full[kv]
        elif leaf == "o":
            piece = full.reshape(len(full), config.heads, -1)[:, tp.share(config.heads)].flatten(1, 2)
        elif leaf == "down":
            piece = full[:, tp.share(config.ffn)]
        else:
            piece = full
        cut[name] = piece.to(torch.float32).contiguous()
    return cut
