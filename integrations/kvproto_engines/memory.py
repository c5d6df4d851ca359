"""Host memory for an engine's caches that other processes can map.

vLLM asks a connector for a context in which it allocates its caches (`get_mem_pool_context`); the pools of SGLang are
made in one. On a GPU the engine's own allocations do. On the CPU `torch.zeros` takes its bytes from `kvproto.allocate`.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack

import kvproto

__all__ = ["ShareableMemory", "only_context"]


class ShareableMemory(TorchFunctionMode):
    """Within it `torch.zeros(shape, dtype=...)`, or `size=`, on the CPU is memory that transports can share."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of these elements alone."""
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        sizes: tuple[Any, ...] = args or ((named["size"],) if "size" in named else ())
        if func is torch.zeros and len(sizes) == 1 and torch.device(named.get("device") or "cpu").type == "cpu":
            dtype = named.get("dtype") or torch.get_default_dtype()
            shape = (sizes[0],) if isinstance(sizes[0], int) else tuple(sizes[0])
            length = math.prod(shape) * dtype.itemsize
            if length and self._dtype in (None, dtype):
                return from_dlpack(kvproto.allocate(length)).view(dtype).view(shape)
        return func(*args, **named)


_given: list[weakref.ref[ShareableMemory]] = []
"""The context that `only_context` gave last."""


def only_context(dtype: torch.dtype) -> ShareableMemory | None:
    """A context for an engine's caches; None while another lives: vLLM takes one at most of all its connectors."""
    if _given and _given[0]() is not None:
        return None
    made = ShareableMemory(dtype)
    _given[:] = [weakref.ref(made)]
    return made
