"""Paged KV pool of one model on one rank."""

import math
from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import EngineError
from ..models import SOLO, ModelConfig, Rows, TensorParallel, kv_head_range
from .memory import Allocate, private

Key = tuple[int, str]


@attrs.frozen
class KVPool:
    """Tensors [pages + 1, page_size, local KV heads, row_dim] of the config's dtype, keyed by (layer, part).

    No sequence gets the last page: rows that are not this rank's go there, so that a step can write all of its rows.
    """

    config: ModelConfig
    tensors: dict[Key, Tensor]
    pages: int
    page_size: int
    device: torch.device
    """The device that holds the tensors."""
    windowed: bool = False
    """Whether it is of the layers with a sliding window, not of those that attend to all tokens."""

    @classmethod
    def wrap(
        cls, config: ModelConfig, tensors: Mapping[Key, Tensor], tp: TensorParallel = SOLO, windowed: bool = False
    ) -> "KVPool":
        """Use tensors that someone else allocated, without a copy; raises EngineError unless they fit the config.

        All have one shape, and each is contiguous.
        """
        keys = _keys(config, tp, windowed)
        if set(tensors) != set(keys):
            raise EngineError(f"a {config.kind} pool of this rank needs tensors {keys}, not {list(tensors)}")
        shape = tensors[keys[0]].shape
        if len(shape) != 4 or shape[3] != config.row_dim:
            raise EngineError(
                f"pool tensors must be [pages + 1, page_size, KV heads, {config.row_dim}], not {list(shape)}"
            )
        dtype = getattr(torch, config.dtype)
        for key in keys:
            tensor = tensors[key]
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise EngineError(f"pool tensor {key} must be contiguous {config.dtype} {list(shape)}")
        if shape[0] < 2:
            raise EngineError("pool tensors need at least one page, and the page that no sequence gets")
        return cls(config, dict(tensors), shape[0] - 1, shape[1], tensors[keys[0]].device, windowed)

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        pages: int,
        page_size: int,
        tp: TensorParallel = SOLO,
        device: torch.device | str = "cpu",
        memory: Allocate = private,
        windowed: bool = False,
    ) -> "KVPool":
        """A zeroed pool of one rank in one allocation, with a tensor for each layer and part, for `pages` pages."""
        lo, hi = kv_head_range(config, tp)
        keys = _keys(config, tp, windowed)
        if not keys:  # of a hybrid's pipeline stage without such layers
            return cls(config, {}, pages, page_size, torch.device(device), windowed)
        shape, dtype = (len(keys), pages + 1, page_size, hi - lo, config.row_dim), getattr(torch, config.dtype)
        whole = memory(math.prod(shape) * dtype.itemsize, torch.device(device)).view(dtype).view(shape)
        return cls.wrap(config, dict(zip(keys, whole, strict=True)), tp, windowed)

    def move(self, memory: Allocate) -> None:
        """Put the tensors into other memory, zeroed; what they held is gone."""
        if not self.tensors:
            return
        one, keys = next(iter(self.tensors.values())), list(self.tensors)
        shape = len(keys), *one.shape
        whole = memory(math.prod(shape) * one.dtype.itemsize, one.device).view(one.dtype).view(shape)
        self.tensors.update(zip(keys, whole, strict=True))

    def check(self, pages: npt.NDArray[np.int32]) -> None:
        """Raise EngineError for pages that no sequence can have."""
        beyond = pages[(pages < 0) | (pages >= self.pages)]
        if beyond.size:
            raise EngineError(f"page {beyond[0]} is outside a pool of {self.pages} pages")

    def places(self, slots: npt.NDArray[np.int64]) -> Tensor:
        """Places of rows of these slots [tokens] in the pool; -1 stands for rows of other ranks."""
        self.check((slots[slots >= 0] // self.page_size).astype(np.int32))
        return torch.from_numpy(np.where(slots < 0, self.pages * self.page_size, slots)).to(self.device)

    def write(self, layer: int, places: Tensor, rows: Rows) -> None:
        """Store new rows, [tokens, local KV heads, row_dim] of each part."""
        for part, new in rows.items():
            self.tensors[layer, part].flatten(0, 1)[places] = new


def _keys(config: ModelConfig, tp: TensorParallel, windowed: bool) -> list[Key]:
    here = tp.stages(config.layers).layers
    return [(layer, part) for layer in config.row_layers(windowed) if layer in here for part in config.parts]
