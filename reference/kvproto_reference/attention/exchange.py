"""Exchange of queries and merge of attention among the ranks of a DCP group, over torch.distributed.

Each rank attends over its own tokens with the query heads of all ranks; then each gets its own heads over all tokens.
A layer needs an all-gather of q, then either an all-gather of the log-sum-exps and a reduce-scatter of the outputs, or
one all-to-all of both packed. If every rank projects q for all (`replicated`), nothing is gathered.
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import EngineError
from ..gather import gather, near_to, scatter_sum
from .base import Exchange
from .lse import Found, Partial, merge, share

__all__ = ["EXCHANGES", "ON_CUDA", "AllGather", "AllToAll", "Alone", "exchange_of"]


class Alone(Exchange):
    """A group of one rank."""

    def queries(self, q: Tensor) -> Tensor:
        return q

    def own(self, q: Tensor) -> Tensor:
        return q

    def merge(self, part: Found) -> Found:
        return part


@attrs.frozen
class _Group(Exchange):
    size: int
    group: dist.ProcessGroup
    replicated: bool = False
    """Whether every rank projects the queries of the whole group, so that none have to be gathered."""

    def queries(self, q: Tensor) -> Tensor:
        return q if self.replicated else self._gather(q).movedim(0, 1).flatten(1, 2)

    def own(self, q: Tensor) -> Tensor:
        return self._heads(q)[:, dist.get_rank(self.group)] if self.replicated else q

    def _heads(self, x: Tensor) -> Tensor:
        """[tokens, heads of the group, ...] -> [tokens, ranks, heads of a rank, ...]."""
        return x.reshape(x.shape[0], self.size, -1, *x.shape[2:])

    def _gather(self, mine: Tensor) -> Tensor:
        return gather(mine, self.size, self.group)

    def _near(self, mine: Tensor) -> Tensor:
        return near_to(mine, self.group)


class AllGather(_Group):
    """All-gather of the log-sum-exps, then reduce-scatter of the weighted outputs in float32."""

    def merge(self, part: Found) -> Partial:
        part = part.natural()
        total = torch.logsumexp(self._gather(part.lse), 0)
        out = share(part, total)
        mine = scatter_sum(self._heads(out).movedim(1, 0), self.group)
        own = self._heads(total)[:, dist.get_rank(self.group)]
        return Partial(mine.to(part.out.dtype), own)


class AllToAll(_Group):
    """One all-to-all of outputs and log-sum-exps, packed as bytes; the merge is local."""

    def merge(self, part: Found) -> Partial:
        part = part.natural()
        packed = torch.cat((part.out.contiguous().view(torch.uint8), part.lse[..., None].view(torch.uint8)), -1)
        sent = self._near(self._heads(packed).movedim(1, 0))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        received = received.to(packed.device)
        out = received[..., :-4].contiguous().view(part.out.dtype)
        lse = received[..., -4:].contiguous().view(torch.float32)[..., 0]
        return merge([Partial(*each) for each in zip(out, lse, strict=True)])


ON_CUDA = {"a2a_packed": "PackedAllToAll", "peer": "PeerMapped"}
"""Exchanges of `cuda_exchange`, by NCCL and by mapped memory, for ranks with a GPU each and elements of 16 bits."""
EXCHANGES = ("ag_rs", "a2a", *ON_CUDA)
"""All exchanges by name; the first two are over any process group."""


def exchange_of(name: str, size: int, group: dist.ProcessGroup, replicated: bool = False) -> Exchange:
    """An exchange by name, made by all ranks of the group together; raises EngineError if they cannot have it."""
    if name in ON_CUDA:
        if not torch.cuda.is_available() or dist.get_backend(group) != "nccl":
            raise EngineError(f"exchange {name} needs a process group of NCCL, with a GPU for each rank")
        from . import cuda_exchange  # cuda-core need not be installed for the others

        made: Exchange = getattr(cuda_exchange, ON_CUDA[name])(size, group, replicated)
        return made
    if name not in EXCHANGES:
        raise EngineError(f"exchange must be one of {EXCHANGES}, not {name!r}")
    return {"ag_rs": AllGather, "a2a": AllToAll}[name](size, group, replicated)
