"""Host memory for SGLang's pools that other processes can map; on a GPU its own allocations are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack

import kvproto

__all__ = ["ShareableMemory"]


class ShareableMemory(TorchFunctionMode):
    """Within it `torch.zeros(shape, dtype=..., device="cpu")` is memory that transports can share."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.zeros and len(args) == 1 and torch.device(named.get("device") or "cpu").type == "cpu":
            dtype = named.get("dtype") or torch.get_default_dtype()
            length = math.prod(args[0]) * dtype.itemsize
            return from_dlpack(kvproto.allocate(length)).view(dtype).view(args[0])
        return func(*args, **named)
