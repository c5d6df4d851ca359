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


_MADE = (torch.zeros, torch.empty, torch.full)


def _shape(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Of the arguments of such a function: numbers, or one tuple of them."""
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


class ShareableMemory(TorchFunctionMode):
    """Within it `torch.zeros`, `empty` and `full` give memory on the CPU that transports can share."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of these elements alone."""
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _MADE and torch.device(named.get("device") or "cpu").type == "cpu":
            filled = func is torch.full
            shape = _shape(args[: 1 if filled else None] or (named["size"],))
            value = (args[1] if len(args) > 1 else named["fill_value"]) if filled else 0
            dtype = named.get("dtype") or (torch.tensor(value).dtype if filled else torch.get_default_dtype())
            length = math.prod(shape) * dtype.itemsize
            if length and self._dtype in (None, dtype):
                made = from_dlpack(kvproto.allocate(length)).view(dtype).view(shape)
                return made.fill_(value) if filled else made
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
