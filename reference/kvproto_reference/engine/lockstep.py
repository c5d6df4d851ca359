"""Keeps the ranks of an engine in one state: at each step every rank hears what all ranks say, in the same order."""

import json
from typing import Any

import torch
import torch.distributed as dist

Said = list[dict[str, Any]]


class Lockstep:
    """All-gather of JSON between the tensor-parallel ranks of one engine."""

    def __init__(self, size: int, group: dist.ProcessGroup | None) -> None:
        self._size, self._group = size, group

    def exchange(self, mine: Said) -> list[Said]:
        """What each rank said, by rank."""
        if self._size == 1:
            return [mine]
        data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(lengths, torch.tensor([data.numel()]), group=self._group)
        longest = int(max(lengths))
        padded = torch.nn.functional.pad(data, (0, longest - data.numel()))
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._size)]
        dist.all_gather(found, padded, group=self._group)
        return [json.loads(bytes(f[: int(n)].numpy())) for f, n in zip(found, lengths, strict=True)]
