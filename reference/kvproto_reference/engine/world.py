"""The processes of one engine, and the groups in which their ranks exchange."""

import socket
from collections.abc import Sequence

import attrs
import torch.distributed as dist

from ..models import ExpertParallel


@attrs.frozen
class World:
    """Place of this process among those of its replica; `group` None means the default process group.

    With DP attention, an engine has several replicas that share its experts. Otherwise it is one.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    bells: tuple[socket.socket, ...] = ()
    """Sockets to each other process of the engine for the first one, and to the first for the others: `Lockstep`'s."""
    replica: int = 0
    replicas: int = 1
    engine: dist.ProcessGroup | None = None
    """All processes of the engine."""
    computes: str = "gloo"
    """The back end of groups in which models exchange: nccl, if each rank has a GPU of its own. `group` is of gloo."""
    _made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = attrs.field(factory=dict, init=False, eq=False)

    @property
    def place(self) -> int:
        """Place of this process in its engine: replica by replica."""
        return self.replica * self.size + self.rank

    @property
    def processes(self) -> int:
        """Of the engine."""
        return self.replicas * self.size

    def experts(self, stage: int) -> ExpertParallel | None:
        """The ranks over which experts of a layer are dealt: of the same pipeline stage, each of `stage` ranks.

        None where there is one replica. A collective of all processes of the engine.
        """
        if self.replicas == 1:
            return None
        firsts = range(0, self.processes, self.size)
        stages = [[first + rank + n for first in firsts for n in range(stage)] for rank in range(0, self.size, stage)]
        mine = stages[self.rank // stage]
        groups = [self.engine if len(ranks) == self.processes else dist.new_group(ranks) for ranks in stages]
        return ExpertParallel(mine.index(self.place), len(mine), groups[self.rank // stage])

    def among(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The one of these groups of a replica that this process is in, None if it would be alone.

        A collective of all processes of the engine.
        """
        key = tuple(map(tuple, groups))
        if key not in self._made:
            mine = None
            for replica in range(self.replicas):
                for ranks in key:
                    if len(ranks) > 1:
                        whole = len(ranks) == self.size and self.computes == "gloo"
                        places = [replica * self.size + rank for rank in ranks]
                        made = self.group if whole else dist.new_group(places, backend=self.computes)
                        mine = made if self.rank in ranks and self.replica == replica else mine
            self._made[key] = mine
        return self._made[key]
