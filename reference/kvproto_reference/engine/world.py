"""The processes of one engine, and the groups in which their ranks exchange."""

import socket
from collections.abc import Sequence

import attrs
import torch.distributed as dist


@attrs.frozen
class World:
    """Place of this process among those of its engine; `group` None means the default process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    bells: tuple[socket.socket, ...] = ()
    """Sockets to each other rank for rank 0, and to rank 0 for the others; `Lockstep` uses them."""
    computes: str = "gloo"
    """The back end of groups in which models exchange: nccl, if each rank has a GPU of its own. `group` is of gloo."""
    _made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = attrs.field(factory=dict, init=False, eq=False)

    def among(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The one of these groups that this process is in, None if it would be alone; a collective of all processes."""
        key = tuple(map(tuple, groups))
        if key not in self._made:
            mine = None
            for ranks in key:
                if len(ranks) > 1:
                    whole = len(ranks) == self.size and self.computes == "gloo"
                    made = self.group if whole else dist.new_group(list(ranks), backend=self.computes)
                    mine = made if self.rank in ranks else mine
            self._made[key] = mine
        return self._made[key]
