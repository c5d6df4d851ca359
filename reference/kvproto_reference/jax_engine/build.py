"""Assembles models, pools and attention into the ranks of an engine, which one process hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import numpy.typing as npt

from kvproto import Geometry, ItemKind, Pool

from .. import checkpoint
from ..cache.states import CONV, shapes_of
from ..engine.build import Hosted
from ..engine.description import DRAFT, TARGET, WINDOW, Layout, shards
from ..errors import EngineError
from ..models import ModelConfig, TensorParallel, key_head_of, kv_head_of
from .attention import Attention, Heads
from .context import ContextAttention
from .mesh import by_rank, mesh_of
from .pool import RankPools, RankStates, gpus_of
from .programs import Programs
from .runner import JaxRunner

__all__ = ["jax_hosted", "jax_runner"]


def jax_hosted(
    folders: Sequence[Path],
    geometry: Geometry,
    layout: Layout,
    pages: int,
    gpus: Sequence[int] = (),
    window_pages: int | None = None,
) -> Hosted:
    """All ranks of an engine in JAX, one on each of `gpus` (CUDA ordinals), or without any on devices made of the CPU.

    Sliding windows have `window_pages` pages (None: as many as the rest). Raises EngineError.
    """
    if any(checkpoint.load_config(folder).head is not None for folder in folders):
        raise EngineError("the JAX engine runs no head: choose --framework torch, or another draft")
    devices: Sequence[int | None] = gpus or [None] * layout.ranks
    counts = {group.name: pages for group in geometry.groups if group.kind != ItemKind.HANDOFF}
    if WINDOW in counts:
        counts[WINDOW] = window_pages or pages
    pools = [Pool.allocate(geometry, counts, rank=rank, device=devices[rank]) for rank in range(layout.ranks)]
    runners = [jax_runner(folder, pools, name, layout) for folder, name in zip(folders, (TARGET, DRAFT), strict=False)]
    return Hosted(pools=dict(enumerate(pools)), target=runners[0], draft=runners[1] if runners[1:] else None)


def jax_runner(folder: Path, pools: Sequence[Pool], group: str, layout: Layout, by_token: bool = False) -> JaxRunner:
    """The model in a checkpoint folder, on all ranks; `pools` are theirs in rank order, and `group` is TARGET or DRAFT.

    It computes where the pools are: on a GPU for each rank, or on the host. `by_token` is that of `Attention`, and
    ignored with context parallelism. Raises EngineError for ranks with unequal KV heads, for pools that are not
    float32, and for two pools on one GPU.
    """
    if [pool.rank for pool in pools] != list(range(layout.ranks)):
        raise EngineError(f"JAX hosts all {layout.ranks} ranks: it needs their pools, in rank order")
    config, model = checkpoint.load_config(folder), (TARGET, DRAFT).index(group)
    places = [layout.place(model, TensorParallel(rank, layout.tp)) for rank in range(layout.tp)]
    dcp, owned = places[0].dcp, [shards(pool.geometry, pool.rank)[group] for pool in pools]
    mesh = mesh_of(layout.tp, dcp, layout.cp, gpus_of(pools))
    attention: Attention | ContextAttention
    if layout.cp > 1 and owned[0].count > 1:
        attention = ContextAttention(config.score_scale, config.value_dim, layout.cp)
    else:
        replicated = dcp > 1 and places[0].replicate_q
        attention = Attention(config.score_scale, config.value_dim, dcp, layout.exchange, replicated, by_token)
    states = [checkpoint.state(folder, place) for place in places]

    def dealt(pieces: Sequence[npt.NDArray[Any]]) -> jax.Array:
        """Put the piece of each TP rank on the ranks that hold it, padded to one shape."""
        return by_rank(mesh, _padded(pieces) * layout.cp)

    weights = {name: dealt([state[name].numpy() for state in states]) for name in states[0]}
    heads = Heads(
        dealt([_kv_heads(config, place, place.together) for place in places]),
        dealt([_kv_heads(config, place, place) for place in places]),
    )
    windows = None
    if config.hybrid and (layout.cp > 1 or dcp > 1 or not isinstance(attention, Attention)):
        raise EngineError("tokens of a hybrid model are not dealt over ranks: leave context parallelism and DCP out")
    if config.window is not None and isinstance(attention, Attention):
        near = attrs.evolve(attention, reach=config.window.tokens)
        windows = Programs(config, near, mesh), RankPools(pools, WINDOW, config, mesh, windowed=True)
    return JaxRunner(
        Programs(config, attention, mesh, _key_heads(config, places)),
        weights,
        heads,
        RankPools(pools, group, config, mesh),
        owned,
        windows,
        RankStates(pools, config, mesh, owned[0].span) if config.delta is not None else None,
    )


def _key_heads(config: ModelConfig, places: Sequence[TensorParallel]) -> tuple[int, ...]:
    """The key head of each value head in recurrent layers; raises EngineError if ranks differ in it."""
    if config.delta is None:
        return ()
    found = {(*key_head_of(config, place), *shapes_of(config, place)[CONV]) for place in places}
    if len(found) > 1:
        heads = f"{config.delta.key_heads} key heads and {config.delta.value_heads} value heads"
        advice = "choose another --tp, or --framework torch"
        raise EngineError(f"JAX needs recurrent layers with equal shares of {heads}, not {len(places)} ranks: {advice}")
    return tuple(key_head_of(config, places[0]))


def _kv_heads(config: ModelConfig, place: TensorParallel, among: TensorParallel) -> npt.NDArray[np.int32]:
    """The KV head of the rank that each query head of `among` reads, int32 [heads]."""
    return np.array(kv_head_of(config, place, among.share(config.heads)), np.int32)


def _padded(pieces: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Pad all pieces with zeros to the largest shape, where ranks' shares differ; such heads and widths add nothing."""
    shape = np.max([piece.shape for piece in pieces], axis=0)
    return [np.pad(piece, [(0, most - own) for most, own in zip(shape, piece.shape, strict=True)]) for piece in pieces]
