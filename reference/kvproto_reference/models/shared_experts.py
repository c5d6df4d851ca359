"""Experts that all ranks of an engine share, while each replica attends to requests of its own: DP attention."""

from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ..gather import near_to


@attrs.frozen
class SharedExperts:
    """The ranks over which whole experts are dealt (expert parallel): tokens go to the rank of an expert, and back.

    Every layer with experts is an exchange of all ranks, so they run steps together. One whose replica has no tokens
    takes part without any.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def share(self, experts: int) -> slice:
        """The experts of this rank; shares differ by one if the number of ranks does not divide them."""
        return slice(*(experts * rank // self.size for rank in (self.rank, self.rank + 1)))

    def held(self, experts: int) -> int:
        """Their number."""
        return experts * (self.rank + 1) // self.size - experts * self.rank // self.size

    def step(self, runs: bool) -> bool:
        """Tell the other ranks whether this one is to run a step, and hear whether any is; a collective."""
        heard = self._exchange(torch.full((self.size,), int(runs)), [1] * self.size, [1] * self.size)
        return bool(heard.any())

    def run(self, experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """What experts of all ranks make of rows [n, hidden], sorted by expert, `counts` [experts] for each.

        `experts` runs those of this rank: rows in their order, and how many are for each. A collective.
        """
        pieces = [counts[self._of(rank).share(len(counts))] for rank in range(self.size)]
        held = self.held(len(counts))
        asked = self._exchange(torch.cat(pieces), [*map(len, pieces)], [held] * self.size).view(self.size, held)
        there, here = [int(piece.sum()) for piece in pieces], asked.sum(1).tolist()
        came = self._exchange(rows, there, here)
        # They came rank by rank, each sorted by expert.
        expert = torch.arange(held, device=rows.device).repeat(self.size).repeat_interleave(asked.flatten())
        order = expert.argsort(stable=True)
        made = experts(came[order], asked.sum(0))
        return self._exchange(made[order.argsort()], here, there)

    def _of(self, rank: int) -> "SharedExperts":
        return attrs.evolve(self, rank=rank)

    def _exchange(self, sent: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
        """Send consecutive rows to each rank, so many as `there` says; returns those that come, `here` from each."""
        near = near_to(sent, self.group)
        found = near.new_empty((sum(here), *near.shape[1:]))
        dist.all_to_all_single(found, near, list(here), list(there), self.group)
        return found.to(sent.device)
