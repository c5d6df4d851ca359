"""Assembles models, pools and attention into the ranks of an engine, which one process hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ..engine.world import World
from ..errors import EngineError
from ..models import ModelConfig, Pipeline, TensorParallel, head_among, key_head_of, kv_head_of, kv_head_range
from .attention import Attention, Heads
from .context import ContextAttention
from .mesh import by_rank, host_devices, mesh_of
from .model import SAID, turn
from .pool import RankPools, RankStates, gpus_of, numpy_of
from .programs import ALL, NEAR, Programs
from .runner import JaxRunner, Stage

__all__ = ["jax_hosted", "jax_runner"]


LARGE = 2**23
"""Elements of the weights of a rank from which on XLA is to compile programs that are fast, and may take its time."""


def jax_hosted(
    folders: Sequence[Path],
    geometry: Geometry,
    layout: Layout,
    pages: int,
    gpus: Sequence[int] = (),
    window_pages: int | None = None,
    dtype: str = "float32",
    apart: World | None = None,
) -> Hosted:
    """All ranks of an engine in JAX, one on each of `gpus` (CUDA ordinals), or without any on devices made of the CPU.

    Sliding windows have `window_pages` pages (None: as many as the rest). With `apart` it is the rank of this process
    alone, after `meet`. Raises EngineError.
    """
    devices: Sequence[int | None] = gpus or [None] * layout.ranks
    if apart is not None and (layout.pp > 1 or layout.draft_tp):
        raise EngineError("stages, and drafts on fewer ranks, are of ranks in one process: choose --framework jax")
    if not gpus and apart is None:
        host_devices(layout.ranks)  # all of them, as the first stage alone asks for its own
    groups = {group.id: group for group in geometry.groups}

    def allocated() -> dict[int, Pool]:
        made = {}
        for rank in geometry.ranks if apart is None else [geometry.ranks[apart.rank]]:
            names = [groups[share.group].name for share in rank.owns if groups[share.group].kind != ItemKind.HANDOFF]
            counts = {name: window_pages or pages if name == WINDOW else pages for name in names}
            made[rank.rank] = Pool.allocate(geometry, counts, rank=rank.rank, device=devices[rank.rank])
        return made

    pools, head = allocated(), head_among([checkpoint.load_config(folder, dtype) for folder in folders])
    runners = [
        jax_runner(folder, [*pools.values()], name, layout, dtype=dtype, target=folders[0], taps=taps)
        for folder, name, taps in zip(folders, (TARGET, DRAFT), (head.taps if head else (), ()), strict=False)
    ]

    def elsewhere() -> Mapping[int, Pool]:
        made = allocated()
        for runner in runners:
            runner.move(made)
        return made

    return Hosted(pools=pools, target=runners[0], draft=runners[1] if runners[1:] else None, elsewhere=elsewhere)


def jax_runner(
    folder: Path,
    pools: Sequence[Pool],
    group: str,
    layout: Layout,
    by_token: bool = False,
    dtype: str = "float32",
    target: Path | None = None,
    taps: Sequence[int] = (),
) -> JaxRunner:
    """The model in a checkpoint folder, on all ranks; `pools` are theirs in rank order, and `group` is TARGET or DRAFT.

    It computes where the pools are: on a GPU for each rank, or on the host. `by_token` is that of `Attention`, and
    ignored with context parallelism. A head has the embedding of `target`, whose steps keep the hidden states of the
    layers `taps`. Raises EngineError for ranks with unequal KV heads, and for two pools on one GPU.
    """
    if jax.process_count() == 1 and [pool.rank for pool in pools] != list(range(layout.ranks)):
        raise EngineError(f"JAX hosts all {layout.ranks} ranks: it needs their pools, in rank order")
    config, model = checkpoint.load_config(folder, dtype), (TARGET, DRAFT).index(group)
    if config.head is not None and layout.draft_sharded and layout.cp > 1:
        raise EngineError("a head is not dealt over ranks of prefill: leave --draft-sharded out")
    chunks, held = layout.chunks(model, config.layers), layout.holders(model)
    stages: dict[int, Stage] = {}
    for number in sorted({number for number, _ in chunks}):
        ranks = range(number * layout.stage, number * layout.stage + held)
        parts = Pipeline(number, tuple(chunks))
        places = [
            layout.place(model, TensorParallel(rank, layout.shares(model), pipeline=parts))
            for rank in range(layout.shares(model))
        ]
        load = _loaded(folder, target, config, places)
        mine = [pool for pool in pools if pool.rank in ranks]
        stages[number] = _stage(config, layout, group, mine, ranks, places, load, by_token)
    order = {number: nth for nth, number in enumerate(stages)}
    said = pools[0].geometry
    own = [found for rank in range(layout.ranks) if (found := shards(said, rank).get(group))][:held]
    return JaxRunner(config, [*stages.values()], [(order[number], layers) for number, layers in chunks], own, taps)


def _stage(
    config: ModelConfig,
    layout: Layout,
    group: str,
    pools: Sequence[Pool],
    ranks: Sequence[int],
    places: Sequence[TensorParallel],
    states: Sequence[Mapping[str, npt.NDArray[Any]]],
    by_token: bool,
) -> Stage:
    """A stage on these ranks, with the pools of those in this process; `places` and `states` are those of TP ranks."""
    tp, dcp, cp = len(places), places[0].dcp, len(ranks) // len(places)
    held_heads = {hi - lo for lo, hi in (kv_head_range(config, place) for place in places)}
    if len(held_heads) > 1:
        found = f"JAX needs as many KV heads on every rank, not {sorted(held_heads)}"
        raise EngineError(f"{found}: choose ranks that divide the heads, or --framework torch")
    mesh = mesh_of(tp, dcp, cp, gpus_of(pools), ranks[0])
    dealt_by = next(each.cp_size for each in pools[0].geometry.groups if each.name == group)
    attention: Attention | ContextAttention
    if cp > 1 and dealt_by > 1:
        attention = ContextAttention(config.score_scale, config.value_dim, cp)
    else:
        replicated = dcp > 1 and places[0].replicate_q
        attention = Attention(config.score_scale, config.value_dim, dcp, layout.exchange, replicated, by_token)
    if config.hybrid and (layout.cp > 1 or dcp > 1 or not isinstance(attention, Attention)):
        raise EngineError("tokens of a hybrid model are not dealt over ranks: leave context parallelism and DCP out")

    def dealt(pieces: Sequence[npt.NDArray[Any]]) -> jax.Array:
        """Put the piece of each TP rank on the ranks that hold it, padded to one shape."""
        return by_rank(mesh, _padded(pieces) * cp)

    weights = {name: dealt([state[name] for state in states]) for name in states[0]}
    heads = [[_kv_heads(config, place, among) for place, among in each] for each in (
        [(place, place.together) for place in places], [(place, place) for place in places],
    )]  # fmt: skip
    even = all(_even(each) for some in heads for each in some) and len({len(each) for each in heads[1]}) == 1
    here = places[0].stages(config.layers).layers
    row_layers = [layer for layer in config.row_layers() if layer in here]
    held, near = {ALL: RankPools(pools, group, config, mesh, row_layers)}, None
    if config.window is not None and isinstance(attention, Attention):
        near = attrs.evolve(attention, reach=config.window.tokens)
        held[NEAR] = RankPools(pools, WINDOW, config, mesh, [n for n in config.row_layers(windowed=True) if n in here])
    recurrent = [layer for layer in here if config.recurs(layer)]
    small = sum(weight.size for weight in states[0].values()) < LARGE
    return Stage(
        programs=Programs(config, attention, mesh, _key_heads(config, places), near, small),
        heads=Heads(None, None) if even else Heads(*map(dealt, heads)),
        top={name: weight for name, weight in weights.items() if _layer_of(config, name) is None},
        layers={n: {_inner(name): w for name, w in weights.items() if _layer_of(config, name) == n} for n in here},
        pools=held,
        states=RankStates(pools, config, mesh, recurrent) if recurrent else None,
        ranks=tuple(ranks),
    )


def _loaded(
    folder: Path, target: Path | None, config: ModelConfig, places: Sequence[TensorParallel]
) -> list[dict[str, npt.NDArray[Any]]]:
    """The weights of each place, as the programs have them."""
    found = []
    for place in places:
        if config.head is None:
            state = checkpoint.state(folder, place, dtype=config.dtype)
        elif target is None:
            raise EngineError(f"{folder} is a head, which runs beside its target: give it as the draft")
        else:
            head = checkpoint.load_head(folder, target, place, dtype=config.dtype)
            state = head.state_dict()
            if not head.whole:
                tokens = head.tokens
                state |= {SAID: tokens.int(), "head": state.get("head", state["embed"][tokens])}
                del state["d2t"]
        arrays = {name: numpy_of(value.detach()) for name, value in state.items()}
        found.append({name: turn(name, array) for name, array in arrays.items()})
    return found


def _layer_of(config: ModelConfig, name: str) -> int | None:
    """The layer that a weight belongs to; None for embedding, last norm and output."""
    if config.head is not None:
        return None if name in ("embed", "norm", "head", SAID) else 0
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def _inner(name: str) -> str:
    """The name of a weight within its layer."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


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


def _even(heads: npt.NDArray[np.int32]) -> bool:
    """Whether as many consecutive query heads read each KV head."""
    kv_heads = heads.max() + 1
    return len(heads) % kv_heads == 0 and bool((heads == np.repeat(np.arange(kv_heads), len(heads) // kv_heads)).all())


def _padded(pieces: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Pad all pieces with zeros to the largest shape, where ranks' shares differ; such heads and widths add nothing."""
    shape = np.max([piece.shape for piece in pieces], axis=0)
    return [np.pad(piece, [(0, most - own) for most, own in zip(shape, piece.shape, strict=True)]) for piece in pieces]
