"""Expert parallel: whole experts are dealt over all ranks of an engine, whose replicas have attention of their own."""

import itertools
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from ..gather import near_to


@attrs.frozen
class ExpertParallel:
    """The ranks over which whole experts are dealt: rows of tokens go to the rank with their expert, and back.

    Every layer with experts is an exchange of all ranks, so they run steps together. One whose replica has no tokens
    takes part without any.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def held(self, experts: int) -> list[int]:
        """The number of experts of each rank, one after the other."""
        bounds = [experts * rank // self.size for rank in range(self.size + 1)]
        return [hi - lo for lo, hi in itertools.pairwise(bounds)]

    def share(self, experts: int) -> slice:
        """The experts of this rank."""
        first = sum(self.held(experts)[: self.rank])
        return slice(first, first + self.held(experts)[self.rank])

    def step(self, runs: bool) -> bool:
        """Tell the other ranks whether this one is to run a step, and hear whether any is; a collective."""
        heard = self._exchange(torch.full((self.size,), int(runs)), [1] * self.size, [1] * self.size)
        return bool(heard.any())

    def run(self, experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Run the experts of all ranks on rows [n, hidden], sorted by expert, `counts` [experts] for each.

        `experts` runs those of this rank: rows in their order, and how many are for each. A collective.
        """
        held = self.held(len(counts))
        mine = held[self.rank]
        asked = self._exchange(counts, held, [mine] * self.size).view(self.size, mine)
        there, here = [int(each.sum()) for each in counts.split_with_sizes(held)], asked.sum(1).tolist()
        came = self._exchange(rows, there, here)
        # They came rank by rank, each sorted by expert.
        expert = torch.arange(mine, device=rows.device).repeat(self.size).repeat_interleave(asked.flatten())
        order = expert.argsort(stable=True)
        made = experts(came[order], asked.sum(0))
        return self._exchange(made[order.argsort()], here, there)

    def _exchange(self, sent: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
        """Send consecutive rows to each rank, so many as `there` says; returns the rows that come, `here` from each."""
        near = near_to(sent, self.group)
        found = near.new_empty((sum(here), *near.shape[1:]))
        dist.all_to_all_single(found, near, list(here), list(there), self.group)
        return found.to(sent.device)
