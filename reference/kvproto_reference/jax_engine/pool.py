"""The engine's registered pools: XLA reads them in place, and torch writes the rows that XLA returns.

XLA takes its inputs as constant and its outputs as its own, but a pool stays at its address while transports write it.
So a layer's program takes the pool as a plain input and never writes it. The input is an alias of the pool, made for
one layer of one step and dropped, which therefore sees whatever was written between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import torch
import torch.utils.dlpack
from jax.sharding import Mesh, NamedSharding
from torch import Tensor

from kvproto import DType, Pool

from ..cache.sharding import Ints
from ..cache.states import CONV, SSM, StateRecord
from ..engine.description import STATES
from ..errors import EngineError
from ..models import ModelConfig
from .mesh import RANKS, by_rank

__all__ = ["RankPools", "RankStates", "gpus_of"]

ALIGNED = 64
"""Alignment in bytes; XLA copies an input that is aligned to less."""


class RankPools:
    """One model's rows in the pools of all ranks, in rank order; raises EngineError for pools that JAX cannot read."""

    def __init__(
        self, pools: Sequence[Pool], group: str, config: ModelConfig, mesh: Mesh, windowed: bool = False
    ) -> None:
        """Of the layers that attend to all tokens, or of those with a sliding window."""
        self.pages = min(pool.pages(group) for pool in pools)
        self._sharding, self._devices = NamedSharding(mesh, RANKS), list(mesh.devices.flat)
        self._gpus = gpus_of(pools)
        self._views = {
            layer: {part: [_view(pool, group, layer, part) for pool in pools] for part in config.parts}
            for layer in config.row_layers(windowed)
        }
        shapes = {view.shape for layer in self._views.values() for views in layer.values() for view in views}
        if len(shapes) > 1:
            raise EngineError(f"JAX needs as many pages and KV heads on every rank, not {sorted(shapes)}")

    def check(self, pages: Sequence[int]) -> None:
        """Raise EngineError for a page outside the pools."""
        for page in pages:
            if not 0 <= page < self.pages:
                raise EngineError(f"page {page} is outside a pool of {self.pages} pages")

    def read(self, layer: int) -> dict[str, jax.Array]:
        """The present rows of a layer by part, float32 [ranks * pages, rows, KV heads, row_dim], each on its device.

        Raises EngineError if XLA would not read the registered memory itself.
        """
        return {part: self._alias(views) for part, views in self._views[layer].items()}

    def write(self, layer: int, rows: Mapping[str, jax.Array], places: Sequence[tuple[Ints, Ints]]) -> None:
        """Wait for a layer's new rows [ranks, spans, n, KV heads, row_dim] by part, and write them to the pools.

        `places` holds two arrays for each rank: tokens, counted along the spans, and the slots of their rows. The rows
        are there when this returns.
        """
        jax.block_until_ready(rows)  # type: ignore[no-untyped-call]
        for part, found in rows.items():
            for shard in found.addressable_shards:
                rank = shard.index[0].start or 0
                view = self._views[layer][part][rank]
                with _on(view.device):
                    tokens, slots = (torch.from_numpy(each).to(view.device) for each in places[rank])
                    new = torch.utils.dlpack.from_dlpack(shard.data)
                    view.flatten(0, 1)[slots] = new.flatten(0, 2)[tokens]
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def clear(self, pages: Sequence[int]) -> None:
        """Set all rows of these pages to zero."""
        for parts in self._views.values():
            for view in (view for views in parts.values() for view in views):
                view[list(pages)] = 0
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def _alias(self, views: Sequence[Tensor]) -> jax.Array:
        if self._gpus:
            made = [_exported(view) for view in views]
        else:
            made = jax.device_put([view.numpy() for view in views], self._devices)
        for view, array in zip(views, made, strict=True):
            if array.unsafe_buffer_pointer() != view.data_ptr():
                raise EngineError("XLA would read a copy of the pool, not the memory that transports write")
        shape = (len(views) * len(views[0]), *views[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, made)


class RankStates:
    """Recurrent states of one model in the pools of all ranks, in rank order."""

    def __init__(self, pools: Sequence[Pool], config: ModelConfig, mesh: Mesh, span: int) -> None:
        """`span` is the number of tokens that belong to a page; raises EngineError as `RankPools` does."""
        sizes, self._mesh, self.record = config.delta_sizes, mesh, StateRecord(span)
        self._views = {
            layer: {
                CONV: [_floats(pool, STATES[CONV], layer, CONV)[..., 0] for pool in pools],
                SSM: [_matrices(_floats(pool, STATES[SSM], layer, SSM)[:, 0], sizes.key_dim) for pool in pools],
            }
            for layer in sizes.layers
        }

    def read(self, layer: int, items: Sequence[int | None], spans: int) -> dict[str, jax.Array]:
        """The states [ranks, spans, ...] of a layer by part: in the items of the first spans, or zeros for None."""
        found = {}
        for part, views in self._views[layer].items():
            pieces = [torch.zeros(spans, *view.shape[1:]) for view in views]
            for piece, view in zip(pieces, views, strict=True):
                for span, item in enumerate(items):
                    if item is not None:
                        piece[span] = view[item]
            found[part] = by_rank(self._mesh, [piece.numpy() for piece in pieces])
        return found

    def write(self, layer: int, states: Mapping[str, jax.Array], places: Sequence[tuple[int, int, int]]) -> None:
        """Store states of a layer [ranks, spans, m, ...] by part; `places` has span, number and item of each."""
        for part, found in states.items():
            for shard in found.addressable_shards:
                view, new = self._views[layer][part][shard.index[0].start or 0], np.array(shard.data)[0]
                for span, nth, item in places:
                    view[item] = torch.from_numpy(new[span, nth]).to(view.device)


def gpus_of(pools: Sequence[Pool]) -> list[int]:
    """The CUDA ordinal of each rank's pool, or nothing if all are on the host; raises EngineError for a mixture."""
    found = [{memory.device for memory in pool.memories.values()} for pool in pools]
    numbers = [number for of_rank in found for number in of_rank if number is not None]
    if numbers and any(len(of_rank) > 1 or None in of_rank for of_rank in found):
        raise EngineError(f"JAX needs the pool of each rank on one GPU, or all on the host, not {found}")
    return numbers


def _view(pool: Pool, group: str, layer: int, part: str) -> Tensor:
    """A part of one rank's rows in its memory, float32 [pages, rows, KV heads, row_dim]; raises EngineError."""
    found = _floats(pool, group, layer, part)
    if not found.is_contiguous() or found.data_ptr() % ALIGNED:
        raise EngineError(
            f"pool {group!r}, layer {layer}, {part}: must be contiguous, at a multiple of {ALIGNED} bytes"
        )
    return found


def _floats(pool: Pool, group: str, layer: int, part: str) -> Tensor:
    """The same for any alignment, [items, rows, lanes, elements]."""
    if pool.group(group).parts[0].dtype != DType.F32:
        raise EngineError(f"the JAX engine computes in float32, and so must its pools be: {group!r} is not")
    region, offset, shape, strides = pool.place(group, layer, part)
    memory = torch.utils.dlpack.from_dlpack(pool.memories[region]).view(torch.uint8)
    return memory.as_strided(shape, strides, offset).view(torch.float32)


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
