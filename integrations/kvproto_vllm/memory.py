"""Host memory for an engine's caches that other processes can map.

vLLM asks a connector for a context in which it allocates its caches (`get_mem_pool_context`). On a GPU its own
allocations do. On the CPU this context has `torch.zeros` take its bytes from `kvproto.allocate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack

import kvproto

__all__ = ["ShareableMemory"]


class ShareableMemory(TorchFunctionMode):
    """Within it `torch.zeros(bytes, dtype=torch.int8)` on the CPU is memory that transports can share."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.zeros and len(args) == 1 and isinstance(args[0], int) and named.get("dtype") is torch.int8:
            device = torch.device(named.get("device") or "cpu")
            if device.type == "cpu":
                return from_dlpack(kvproto.allocate(args[0])).view(torch.int8)
        return func(*args, **named)
