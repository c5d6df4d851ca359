"""The engine's registered pools: XLA reads them in place, and torch writes the rows that XLA returns.

XLA takes its inputs as constant and its outputs as its own, but a pool stays at its address while transports write it.
So a program takes the pool as a plain input and never writes it. The input is an alias of the pool, made for one
program of one step and dropped, which therefore sees whatever was written between steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
import torch.utils.dlpack
from jax.sharding import Mesh, NamedSharding
from torch import Tensor

from kvproto import DType, Pool

from ..cache.sharding import Ints
from ..cache.states import CONV, SSM
from ..engine.description import STATES
from ..errors import EngineError
from ..models import ModelConfig
from .mesh import RANKS, here

__all__ = ["RankPools", "RankStates", "gpus_of", "host_tensor", "numpy_of"]

ALIGNED = 64
"""Alignment in bytes; XLA copies an input that is aligned to less."""
TYPES = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}
At = tuple[tuple[tuple[str, int], ...], ...]
"""By layer: which of some arrays has each part."""


class RankPools:
    """Rows of some layers of one model in the pools of ranks, in rank order; raises EngineError for other pools.

    In a pool that is one allocation, all layers and parts are pages of one array, which is one input of a program.
    """

    def __init__(
        self, pools: Sequence[Pool], group: str, config: ModelConfig, mesh: Mesh, layers: Sequence[int]
    ) -> None:
        self._group, self._parts, self._layers = group, config.parts, tuple(layers)
        self._sharding, self._here, self._ranks = NamedSharding(mesh, RANKS), here(mesh), mesh.size
        self._devices = [mesh.devices.flat[rank] for rank in self._here]
        self.move(pools)

    def move(self, pools: Sequence[Pool]) -> None:
        """Use other pools of the same shape."""
        keys = [(layer, part) for layer in self._layers for part in self._parts]
        self.pages = min(pool.pages(self._group) for pool in pools) if keys else 0
        self._gpus = gpus_of(pools)
        self._views = {key: [_rows(pool, self._group, *key) for pool in pools] for key in keys}
        shapes = {view.shape for views in self._views.values() for view in views}
        if len(shapes) > 1:
            raise EngineError(f"JAX needs pools of as many pages on every rank, not {sorted(shapes)}")
        firsts = [_firsts(pool, self._group, keys) for pool in pools]
        alike = firsts[0] is not None and all(each == firsts[0] for each in firsts)
        self._firsts = dict(zip(keys, firsts[0] or (), strict=True)) if alike else None
        self._wholes: list[Tensor] = []
        if self._firsts:
            blocks = max(self._firsts.values()) + self.pages
            self._wholes = [view.as_strided((blocks, *view.shape[1:]), view.stride()) for view in self._views[keys[0]]]

    def check(self, pages: Sequence[int]) -> None:
        """Raise EngineError for a page outside the pools."""
        for page in pages if self._layers else ():
            if not 0 <= page < self.pages:
                raise EngineError(f"page {page} is outside a pool of {self.pages} pages")

    def at(self, layers: Sequence[int]) -> tuple[At, npt.NDArray[np.int32]]:
        """Arrays of `read` that have the parts of these layers, and the parts' first pages there [layers, parts]."""
        if self._firsts is None:
            number = itertools.count()
            at = tuple(tuple((part, next(number)) for part in self._parts) for _ in layers)
            return at, np.zeros((len(layers), len(self._parts)), np.int32)
        firsts = [[self._firsts[layer, part] for part in self._parts] for layer in layers]
        return (tuple((part, 0) for part in self._parts),) * len(layers), np.array(firsts, np.int32)

    def read(self, layers: Sequence[int]) -> tuple[jax.Array, ...]:
        """The present rows of these layers, [ranks * pages, rows, KV heads, row_dim], each rank's on its device.

        Raises EngineError if XLA would not read the registered memory itself.
        """
        if self._firsts is None:
            return tuple(self._alias(self._views[layer, part]) for layer in layers for part in self._parts)
        return (self._alias(self._wholes),) if layers else ()

    def write(self, layers: Sequence[int], rows: Mapping[str, jax.Array], places: Sequence[tuple[Ints, Ints]]) -> None:
        """Wait for the new rows of layers [ranks, layers, spans, n, KV heads, row_dim] by part, and write them.

        `places` holds two arrays for each rank: tokens, counted along the spans, and the slots of their rows. The rows
        are there when this returns.
        """
        jax.block_until_ready(rows)  # type: ignore[no-untyped-call]
        for part, found in rows.items():
            for shard in found.addressable_shards:
                rank = shard.index[0].start or 0
                whole = self._stacked(layers, part, self._here.index(rank))
                with _on(whole[0].device):
                    tokens, slots = (torch.from_numpy(each).to(whole[0].device) for each in places[rank])
                    new = tensor_of(shard.data).flatten(0, 1).flatten(1, 2)[:, tokens]
                    if isinstance(whole, Tensor):
                        whole[:, slots] = new
                    else:
                        for view, own in zip(whole, new, strict=True):
                            view[slots] = own
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def clear(self, pages: Sequence[int]) -> None:
        """Set all rows of these pages to zero."""
        for views in self._views.values():
            for view in views:
                view[list(pages)] = 0
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def _stacked(self, layers: Sequence[int], part: str, rank: int) -> Tensor | list[Tensor]:
        """The rows of layers by slot, [layers, slots, KV heads, row_dim]: one tensor if they are at one distance."""
        views = [self._views[layer, part][rank].flatten(0, 1) for layer in layers]
        steps = {later.data_ptr() - view.data_ptr() for view, later in itertools.pairwise(views)}
        step = steps.pop() // views[0].element_size() if len(steps) == 1 else 0
        if self._firsts is None or step <= 0 or steps:
            return views
        return views[0].as_strided((len(views), *views[0].shape), (step, *views[0].stride()))

    def _alias(self, views: Sequence[Tensor]) -> jax.Array:
        if self._gpus:
            made = [_exported(view) for view in views]
        else:
            made = jax.device_put([numpy_of(view) for view in views], self._devices)
        for view, array in zip(views, made, strict=True):
            if array.unsafe_buffer_pointer() != view.data_ptr():
                raise EngineError("XLA would read a copy of the pool, not the memory that transports write")
        shape = (self._ranks * len(views[0]), *views[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, made)


class RankStates:
    """Recurrent states of some layers of one model in the pools of ranks, in rank order."""

    def __init__(self, pools: Sequence[Pool], config: ModelConfig, mesh: Mesh, layers: Sequence[int]) -> None:
        """Raises EngineError as `RankPools` does."""
        self._config, self._layers = config, layers
        self._here, self._ranks = here(mesh), mesh.size
        self.move(pools)

    def move(self, pools: Sequence[Pool]) -> None:
        """Use other pools of the same shape."""
        dim = self._config.delta_sizes.key_dim
        self._views = {
            layer: {
                CONV: [_typed(pool, STATES[CONV], layer, CONV)[..., 0] for pool in pools],
                SSM: [_matrices(_typed(pool, STATES[SSM], layer, SSM)[:, 0], dim) for pool in pools],
            }
            for layer in self._layers
        }

    def read(self, layer: int, items: Sequence[int | None], spans: int) -> dict[str, npt.NDArray[Any]]:
        """The states [ranks, spans, ...] of a layer by part: in the items of the first spans, or zeros for None.

        Those of ranks in other processes are zeros too.
        """
        found = {}
        for part, views in self._views[layer].items():
            whole = torch.zeros(self._ranks, spans, *views[0].shape[1:], dtype=views[0].dtype)
            for rank, view in zip(self._here, views, strict=True):
                for span, item in enumerate(items):
                    if item is not None:
                        whole[rank, span] = view[item]
            found[part] = numpy_of(whole)
        return found

    def write(self, layer: int, states: Mapping[str, jax.Array], places: Sequence[tuple[int, int, int]]) -> None:
        """Store states of a layer [ranks, spans, m, ...] by part; `places` has span, number and item of each."""
        for part, found in states.items():
            for shard in found.addressable_shards if places else ():
                view = self._views[layer][part][self._here.index(shard.index[0].start or 0)]
                new = tensor_of(shard.data)[0]
                for span, nth, item in places:
                    view[item] = new[span, nth].to(view.device)


def numpy_of(tensor: Tensor) -> npt.NDArray[Any]:
    """The same memory of the host as an array, of any float type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    found: npt.NDArray[Any] = tensor.numpy()
    return found


def host_tensor(array: jax.Array) -> Tensor:
    """A copy of an array of any devices as a tensor of the host."""
    found = np.array(array)
    if found.dtype == jnp.bfloat16:
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(found)


def tensor_of(array: jax.Array) -> Tensor:
    """The same memory of one device as a tensor."""
    found: Tensor = torch.utils.dlpack.from_dlpack(array)
    return found


def gpus_of(pools: Sequence[Pool]) -> list[int]:
    """The CUDA ordinal of each rank's pool, or nothing if all are on the host; raises EngineError for a mixture."""
    found = [{memory.device for memory in pool.memories.values()} for pool in pools]
    numbers = [number for of_rank in found for number in of_rank if number is not None]
    if numbers and any(len(of_rank) > 1 or None in of_rank for of_rank in found):
        raise EngineError(f"JAX needs the pool of each rank on one GPU, or all on the host, not {found}")
    return numbers


def _firsts(pool: Pool, group: str, keys: Sequence[tuple[int, str]]) -> tuple[int, ...] | None:
    """Beginnings of layers and parts, in pages from the first one; None if they are no pages of one array."""
    places = [pool.place(group, *key) for key in keys]
    if len({region for region, *_ in places}) != 1:
        return None
    length = places[0][3][0]
    steps = [offset - places[0][1] for _, offset, _, _ in places]
    return None if min(steps) < 0 or any(step % length for step in steps) else tuple(step // length for step in steps)


def _rows(pool: Pool, group: str, layer: int, part: str) -> Tensor:
    """A part of one rank's rows in its memory, [pages, rows, KV heads, row_dim]; raises EngineError."""
    found = _typed(pool, group, layer, part)
    if not found.is_contiguous() or found.data_ptr() % ALIGNED:
        raise EngineError(
            f"pool {group!r}, layer {layer}, {part}: must be contiguous, at a multiple of {ALIGNED} bytes"
        )
    return found


def _typed(pool: Pool, group: str, layer: int, part: str) -> Tensor:
    """The same for any alignment, [items, rows, lanes, elements]."""
    dtype = DType(next(each.dtype for each in pool.group(group).parts if each.name == part))
    if dtype not in TYPES:
        known = ", ".join(each.name for each in TYPES)
        raise EngineError(f"the JAX engine computes with pools of {known}, and {group!r} has {dtype.name}")
    region, offset, shape, strides = pool.place(group, layer, part)
    memory = torch.utils.dlpack.from_dlpack(pool.memories[region]).view(torch.uint8)
    return memory.as_strided(shape, strides, offset).view(TYPES[dtype])


def _matrices(view: Tensor, rows: int) -> Tensor:
    """The same memory with its last axis as matrices of so many rows."""
    return view.view(*view.shape[:-1], rows, view.shape[-1] // rows)


def _exported(view: Tensor) -> jax.Array:
    with _on(view.device):
        seen: jax.Array = jax.dlpack.from_dlpack(view)
        return seen


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one of torch, which exports tensors of no other."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
