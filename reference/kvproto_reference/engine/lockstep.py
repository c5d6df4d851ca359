"""Keeps the ranks of an engine in one state: at each step every rank hears what all ranks say, in the same order.

All ranks sleep while there is nothing to compute. One that has something to say rings rank 0, rank 0 rings the others,
and all of them exchange.
"""

import json
import select
import socket
from collections.abc import Collection
from typing import Any

import torch

from ..errors import RankEnded
from ..gather import gather
from .world import World

Said = list[dict[str, Any]]


class Lockstep:
    """All-gather of JSON between the ranks of one engine."""

    def __init__(self, world: World) -> None:
        self._world = world

    def wait(self, fds: Collection[int], seconds: float | None, say: bool) -> bool:
        """Sleep until a rank has something to say, or for `seconds`; returns whether all ranks are to exchange now.

        This rank has something to say when one of `fds` is readable, or already if `say`. Before an exchange, either
        all ranks call it or none does. Raises EngineError if another rank has ended.
        """
        bells = {bell.fileno(): bell for bell in self._world.bells}
        poller = select.poll()
        for fd in (*bells, *fds):
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(0 if say else None if seconds is None else 1000 * seconds)]
        rung = [bells[fd] for fd in ready if fd in bells]
        if not (ready or say):
            return False
        if self._world.place == 0:
            for bell in rung:
                self._heard(bell, _MANY)
            for bell in bells.values():
                bell.send(_RING)
        else:
            (bell,) = bells.values()
            if not rung:
                bell.send(_RING)
            self._heard(bell, len(_RING))
        return True

    def _heard(self, bell: socket.socket, most: int) -> None:
        if not bell.recv(most):
            raise RankEnded

    def exchange(self, mine: Said) -> list[Said]:
        """Gather what each rank says, by rank."""
        size, group = self._world.processes, self._world.engine
        if size == 1:
            return [mine]
        data = torch.tensor(list(json.dumps(mine).encode() if mine else b""), dtype=torch.uint8)
        lengths = gather(torch.tensor([data.numel()]), size, group).flatten().tolist()
        if not any(lengths):
            return [[] for _ in lengths]
        found = gather(torch.nn.functional.pad(data, (0, max(lengths) - data.numel())), size, group)
        return [json.loads(bytes(f[:n].numpy())) if n else [] for f, n in zip(found, lengths, strict=True)]


_RING, _MANY = b"!", 4096
"""Rank 0 may be rung too often, in which case all exchange nothing; it rings each other rank once an exchange."""
