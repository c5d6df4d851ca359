"""Paged KV pool of one model on one rank."""

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import EngineError
from ..models import SOLO, ModelConfig, Rows, TensorParallel, kv_head_range
from .forms import FORMS, MODEL, TENSOR_SCALE, narrow, scale_of, wide
from .memory import Allocate, private

Key = tuple[int, str]


@attrs.frozen
class KVPool:
    """Tensors [pages + 1, page_size, local KV heads, row_dim] of the config's dtype, keyed by (layer, part).

    In a form of FP8 they are uint8, and `e4m3_block` has float32 [..., 1] beside them, as parts "NAME_scale".

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
    form: str = MODEL
    """A name of `FORMS`."""

    @classmethod
    def wrap(
        cls,
        config: ModelConfig,
        tensors: Mapping[Key, Tensor],
        tp: TensorParallel = SOLO,
        windowed: bool = False,
        form: str = MODEL,
    ) -> "KVPool":
        """Use tensors that someone else allocated, without a copy; raises EngineError unless they fit the config.

        All have one shape, and each is contiguous.
        """
        keys = _keys(config, tp, windowed)
        scales = [(layer, f"{part}_scale") for layer, part in keys if form == "e4m3_block"]
        if set(tensors) != {*keys, *scales}:
            raise EngineError(f"a {config.kind} pool of this rank needs tensors {keys + scales}, not {list(tensors)}")
        shape = tensors[keys[0]].shape
        if len(shape) != 4 or shape[3] != config.row_dim:
            raise EngineError(
                f"pool tensors must be [pages + 1, page_size, KV heads, {config.row_dim}], not {list(shape)}"
            )
        dtype, beside = _dtype(config, form), (torch.float32, torch.Size((*shape[:3], 1)))
        for key, wanted in {**dict.fromkeys(keys, (dtype, shape)), **dict.fromkeys(scales, beside)}.items():
            tensor = tensors[key]
            if (tensor.dtype, tensor.shape) != wanted or not tensor.is_contiguous():
                raise EngineError(f"pool tensor {key} must be contiguous {wanted[0]} {list(wanted[1])}")
        if shape[0] < 2:
            raise EngineError("pool tensors need at least one page, and the page that no sequence gets")
        return cls(config, dict(tensors), shape[0] - 1, shape[1], tensors[keys[0]].device, windowed, form)

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
        form: str = MODEL,
    ) -> "KVPool":
        """A zeroed pool of one rank in one allocation, with a tensor for each layer and part, for `pages` pages."""
        lo, hi = kv_head_range(config, tp)
        keys = _keys(config, tp, windowed)
        if not keys:  # of a hybrid's pipeline stage without such layers
            return cls(config, {}, pages, page_size, torch.device(device), windowed, form)
        shape, dtype = torch.Size((pages + 1, page_size, hi - lo, config.row_dim)), _dtype(config, form)
        places = dict.fromkeys(keys, (dtype, shape))
        if form == "e4m3_block":
            beside = torch.float32, torch.Size((*shape[:3], 1))
            places |= {(layer, f"{part}_scale"): beside for layer, part in keys}
        tensors = dict(_divided(places, memory, torch.device(device)))
        return cls.wrap(config, tensors, tp, windowed, form)

    def move(self, memory: Allocate) -> None:
        """Put the tensors into other memory, zeroed; what they held is gone."""
        if not self.tensors:
            return
        places = {key: (tensor.dtype, tensor.shape) for key, tensor in self.tensors.items()}
        self.tensors.update(_divided(places, memory, self.device))

    def check(self, pages: npt.NDArray[np.int32]) -> None:
        """Raise EngineError for pages that no sequence can have."""
        beyond = pages[(pages < 0) | (pages >= self.pages)]
        if beyond.size:
            raise EngineError(f"page {beyond[0]} is outside a pool of {self.pages} pages")

    def places(self, slots: npt.NDArray[np.int64]) -> Tensor:
        """Places of rows of these slots [tokens] in the pool; -1 stands for rows of other ranks."""
        self.check((slots[slots >= 0] // self.page_size).astype(np.int32))
        return torch.from_numpy(np.where(slots < 0, self.pages * self.page_size, slots)).to(self.device)

    def write(self, layer: int, places: Tensor, rows: Rows) -> Rows:
        """Store new rows, [tokens, local KV heads, row_dim] of each part; returns them as they will be read."""
        read = {}
        for part, new in rows.items():
            made = dict(self._stored(part, new))
            for name, stored in made.items():
                self.tensors[layer, name].flatten(0, 1)[places] = stored
            read[part] = self._rows(part, made)
        return read

    def read(self, layer: int, part: str, pages: Tensor) -> Tensor:
        """Pages [..., page_size, local KV heads, row_dim] of a part; of FP8 in float32."""
        return self._rows(part, {name: tensor[pages] for name, tensor in self._held(layer, part)})

    def read_rows(self, layer: int, part: str, rows: Tensor) -> Tensor:
        """Rows [n, row_dim] of a part, each of one KV head; of FP8 in float32."""
        held = self._held(layer, part)
        return self._rows(part, {name: tensor.flatten(0, 2).index_select(0, rows) for name, tensor in held})

    def take(self, other: "KVPool", pages: Sequence[int]) -> None:
        """Store what another pool of the same model has in these pages, in the form of this one."""
        index = torch.tensor(list(pages), device=self.device)
        for layer, part in self.tensors:
            if part in self.config.parts:
                rows = other.read(layer, part, index).to(getattr(torch, self.config.dtype))
                rows = rows.masked_fill(rows.isnan(), math.nan)  # the one of many that the conversion gives
                for name, stored in self._stored(part, rows):
                    self.tensors[layer, name][index] = stored

    def _stored(self, part: str, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a part, and what rows are there."""
        if self.form == MODEL:
            yield part, rows
        elif self.form == "e4m3_tensor":
            yield part, narrow(rows, TENSOR_SCALE)
        else:
            scale = scale_of(rows)
            yield part, narrow(rows, scale)
            yield f"{part}_scale", scale

    def _held(self, layer: int, part: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a part."""
        yield part, self.tensors[layer, part]
        if self.form == "e4m3_block":
            yield f"{part}_scale", self.tensors[layer, f"{part}_scale"]

    def _rows(self, part: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Rows as they are read from what is stored of them."""
        if self.form == MODEL:
            return stored[part]
        return wide(stored[part], stored.get(f"{part}_scale", TENSOR_SCALE))


def _dtype(config: ModelConfig, form: str) -> torch.dtype:
    if form not in FORMS:
        raise EngineError(f"rows are stored as {', '.join(FORMS)}, not {form}")
    made: torch.dtype = getattr(torch, config.dtype) if form == MODEL else torch.uint8
    return made


def _divided(
    places: Mapping[Key, tuple[torch.dtype, torch.Size]], memory: Allocate, device: torch.device
) -> Iterator[tuple[Key, Tensor]]:
    """Zeroed tensors of these types and shapes in one allocation, each at a multiple of 16 bytes."""
    sizes = [-(-math.prod(shape) * dtype.itemsize // 16) * 16 for dtype, shape in places.values()]
    whole = memory(sum(sizes), device)
    for (key, (dtype, shape)), room in zip(places.items(), whole.split_with_sizes(sizes), strict=True):
        yield key, room[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _keys(config: ModelConfig, tp: TensorParallel, windowed: bool) -> list[Key]:
    here = tp.stages(config.layers).layers
    return [(layer, part) for layer in config.row_layers(windowed) if layer in here for part in config.parts]
