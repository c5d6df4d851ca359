"""Tensor parallelism: which heads a rank holds, and how weights are cut at load."""

import attrs
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
        # on the host: ranks may share a GPU, where no kernel may wait for another process
        total = x.detach().contiguous().clone() if x.device.type == "cpu" else x.detach().cpu()
        dist.all_reduce(total, group=self.group)
        return total.to(x.device)

    def share(self, count: int) -> slice:
        """This rank's share of `count` units; shares differ by one where the ranks do not divide them."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def width(self, count: int) -> int:
        """Units of this rank's share."""
        return count * (self.rank + 1) // self.size - count * self.rank // self.size


SOLO = TensorParallel()


def check_split(config: ModelConfig, size: int) -> None:
    """Raise EngineError where some of `size` TP ranks would have no query head, or nothing of the ffn."""
    widths = {"heads": config.heads, "ffn": config.ffn}
    if config.moe is not None:
        widths["moe.ffn"] = config.moe.ffn
        widths["moe.shared_ffn"] = config.moe.shared_ffn or size
    for name, count in widths.items():
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


CUTS = {
    **dict.fromkeys(("q", "q_bias", "k_up", "v_up"), ("heads", 0)),
    **dict.fromkeys(("k", "v", "k_bias", "v_bias"), ("kv_heads", 0)),
    "o": ("heads", -1),
    **dict.fromkeys(("gate", "up"), ("ffn", -2)),
    "down": ("ffn", -1),
}
"""What of a weight is shared out over ranks, and along which dim; weights that are not here are on every rank."""


def cut(config: ModelConfig, tp: TensorParallel, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """This rank's slice, dim by dim, of the full weight `name` of `shape`."""
    slices = [slice(0, length) for length in shape]
    unit, dim = CUTS.get(name.rsplit(".", 1)[-1], ("", 0))
    if unit:
        count = {"heads": config.heads, "kv_heads": config.kv_heads, "ffn": shape[dim]}[unit]
        mine = slice(*kv_head_range(config, tp.rank, tp.size)) if unit == "kv_heads" else tp.share(count)
        each = shape[dim] // count
        slices[dim] = slice(mine.start * each, mine.stop * each)
    return tuple(slices)
