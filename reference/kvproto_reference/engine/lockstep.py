"""Keeps the ranks of an engine in one state: at each step every rank hears what all ranks say, in the same order."""

import json
from typing import Any

import torch
import torch.distributed as dist

from ..gather import gather

Said = list[dict[str, Any]]


class Lockstep:
    """All-gather of JSON between the tensor-parallel ranks of one engine."""

    def __init__(self, size: int, group: dist.ProcessGroup | None) -> None:
        self._size, self._group = size, group

    def exchange(self, mine: Said) -> list[Said]:
        """What each rank said, by rank."""
        if self._size == 1:
            return [mine]
        data = torch.tensor(list(json.dumps(mine).encode() if mine else b""), dtype=torch.uint8)
        lengths = gather(torch.tensor([data.numel()]), self._size, self._group).flatten().tolist()
        if not any(lengths):
            return [[] for _ in lengths]
        found = gather(torch.nn.functional.pad(data, (0, max(lengths) - data.numel())), self._size, self._group)
        return [json.loads(bytes(f[:n].numpy())) if n else [] for f, n in zip(found, lengths, strict=True)]
