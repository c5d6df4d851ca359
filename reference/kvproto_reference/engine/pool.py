"""Paged KV pool of one model on one TP rank, and a sequence's view of it."""

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ..errors import EngineError
from ..models import SOLO, ModelConfig, TensorParallel, kv_head_range
from .memory import Allocate, private

Key = tuple[int, str]


@attrs.frozen
class KVPool:
    """Tensors [pages, page_size, local KV heads, row_dim] of the config's dtype, keyed by (layer, part)."""

    config: ModelConfig
    tensors: Mapping[Key, Tensor]
    pages: int
    page_size: int

    @property
    def device(self) -> torch.device:
        """The device that holds the tensors."""
        return next(iter(self.tensors.values())).device

    @classmethod
    def wrap(cls, config: ModelConfig, tensors: Mapping[Key, Tensor]) -> "KVPool":
        """Use tensors that someone else allocated, without a copy; all have one shape, and each is contiguous."""
        keys = [(layer, part) for layer in range(config.layers) for part in config.parts]
        if set(tensors) != set(keys):
            raise EngineError(
                f"a {config.kind} pool of {config.layers} layers needs tensors {keys}, not {list(tensors)}"
            )
        shape = tensors[keys[0]].shape
        if len(shape) != 4 or shape[3] != config.row_dim:
            raise EngineError(f"pool tensors must be [pages, page_size, KV heads, {config.row_dim}], not {list(shape)}")
        dtype = getattr(torch, config.dtype)
        for key in keys:
            tensor = tensors[key]
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise EngineError(f"pool tensor {key} must be contiguous {config.dtype} {list(shape)}")
        return cls(config, dict(tensors), shape[0], shape[1])

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        pages: int,
        page_size: int,
        tp: TensorParallel = SOLO,
        device: torch.device | str = "cpu",
        memory: Allocate = private,
    ) -> "KVPool":
        """A zeroed pool of one rank: one allocation, and in it a tensor for each layer and part."""
        lo, hi = kv_head_range(config, tp.rank, tp.size)
        keys = [(layer, part) for layer in range(config.layers) for part in config.parts]
        shape, dtype = (len(keys), pages, page_size, hi - lo, config.row_dim), getattr(torch, config.dtype)
        whole = memory(math.prod(shape) * dtype.itemsize, torch.device(device)).view(dtype).view(shape)
        return cls.wrap(config, dict(zip(keys, whole, strict=True)))


class PagedCache:
    """Rows of one sequence in a pool, for the forward of positions [start, stop)."""

    def __init__(self, pool: KVPool, page_table: Sequence[int], start: int, stop: int) -> None:
        size = pool.page_size
        if not 0 <= start < stop:
            raise EngineError(f"positions [{start}, {stop}) are no chunk")
        if stop > len(page_table) * size:
            raise EngineError(f"position {stop - 1} is beyond {len(page_table)} pages of {size} slots")
        used = page_table[: -(-stop // size)]
        for page in used:
            if not 0 <= page < pool.pages:
                raise EngineError(f"page {page} is outside a pool of {pool.pages} pages")
        self._pool, self._stop = pool, stop
        self._table = torch.tensor(used, dtype=torch.int64, device=pool.device)
        positions = torch.arange(start, stop, device=pool.device)
        self._slots = self._table[positions // size] * size + positions % size

    def write(self, layer: int, part: str, rows: Tensor) -> None:
        """Store rows [stop - start, local KV heads, row_dim] at the chunk's slots."""
        self._pool.tensors[layer, part].flatten(0, 1)[self._slots] = rows

    def read(self, layer: int, part: str) -> Tensor:
        """Rows of positions [0, stop): [stop, local KV heads, row_dim]."""
        return self._pool.tensors[layer, part][self._table].flatten(0, 1)[: self._stop]
