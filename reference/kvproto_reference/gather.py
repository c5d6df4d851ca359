"""All-gather and reduce-scatter over a process group; the first on the host by one message to each rank."""

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(mine: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """[...] of each of `size` ranks -> [ranks, ...] on all of them; a collective. Group None is the default group."""
    near = near_to(mine, group)
    if dist.get_backend(group) == "gloo":  # its ring needs more than twice the CPU time, most of it to wake threads
        sent = near.expand(size, *near.shape).contiguous()
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=group)
    else:
        found = near.new_empty((size, *near.shape))
        _ALL_GATHER(found.flatten(0, 1), near, group=group)
    return found.to(mine.device)


def scatter_sum(summands: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[ranks, ...] on each rank -> [...] on each: the sum of what all of them have for it; a collective."""
    near = near_to(summands, group)
    mine = near.new_empty(near.shape[1:])
    _REDUCE_SCATTER(mine, near.flatten(0, 1), group=group)
    return mine.to(summands.device)


def near_to(mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tensor where the group can reach it: gloo reaches only the host, and ranks may share a GPU."""
    return (mine.cpu() if dist.get_backend(group) == "gloo" else mine).contiguous()
