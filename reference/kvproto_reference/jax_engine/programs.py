"""The functions that XLA compiles: pieces of a step, once for each shape of step, for all runners.

A step that nobody watches is one program. One whose layers are announced as they are computed is a program for its
beginning, one for each kind of layer, and one for its logits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..models import ModelConfig
from .attention import Attention, Heads, Paged, Reads
from .context import ContextAttention
from .mesh import DEALT, EVERYWHERE, RANKS
from .model import Weights, block, fuse, head_block, logits, recurrent_block

__all__ = ["ALL", "NEAR", "RECURRENT", "Given", "Made", "Piece", "Programs", "compiled", "quick"]

Tree = TypeVar("Tree")

QUICK: dict[str, dict[str, Any]] = {
    "cpu": {
        "xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    },
    "gpu": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
}  # fmt: skip
"""Compiler options by platform that cut compile time to an eighth, which small models spend most of their time on.

On GPUs, matrix products are then those of the library: XLA does not compile variants to find the fastest.
"""
ALL, NEAR, RECURRENT = "all", "near", "recurrent"
"""Kinds of layers: with attention to all tokens, with a sliding window, and with a recurrent state."""


@functools.cache
def quick(platform: str = "cpu") -> dict[str, Any]:
    """The options of QUICK that this version of XLA knows; later versions have dropped some."""
    known: dict[str, Any] = {}
    x = jax.device_put(np.zeros((8, 8), np.float32), jax.devices(platform)[0])  # so that it compiles for this platform
    for name, value in QUICK[platform].items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda x: x @ x, compiler_options={name: value}).lower(x).compile()
            known[name] = value
    return known


@attrs.frozen
class Piece:
    """The part of a step that a program computes; equal pieces share one program."""

    kinds: tuple[str, ...]
    """The kind of each layer, in order; empty for none."""
    at: tuple[tuple[tuple[str, int], ...], ...]
    """Of each layer that has rows: which of the arrays of its pools has each part."""
    taps: tuple[int, ...] = ()
    """The layers, counted from the first of the piece, after which hidden states are kept."""
    begins: bool = False
    """Whether it embeds tokens; otherwise it goes on from x."""
    ends: bool = False
    """Whether it makes logits; otherwise it gives x."""
    fuses: bool = False
    """Whether the features of a head are hidden states of its target; otherwise it made them itself."""


class Given(NamedTuple):
    """The arguments of a program: weights, what it reads, and x or tokens."""

    top: Weights
    """Embedding, last norm and output."""
    layers: Sequence[Weights]
    heads: Heads
    pools: Mapping[str, tuple[jax.Array, ...]]
    """By kind of layer: the arrays of the pools."""
    firsts: Mapping[str, jax.Array]
    """By kind: the first page [layers, parts] of each."""
    reads: Mapping[str, Reads]
    """By kind of layer; that of ALL is always there."""
    states: Sequence[Mapping[str, jax.Array]]
    """Of recurrent layers, before the step: [ranks, spans, ...] by part."""
    stops: jax.Array
    """After how many tokens of each span states are wanted, [spans, m]."""
    x: jax.Array
    """The input [spans, n, hidden], or the tokens [spans, n]."""
    features: jax.Array | None
    """For a head, [spans, n, width]."""
    wanted: jax.Array
    """Tokens whose logits are wanted, counted along the spans [m]."""


class Made(NamedTuple):
    """The results of a program."""

    x: jax.Array | None
    """The output of the last layer [spans, n, hidden], if there are no logits."""
    logits: tuple[jax.Array | None, ...]
    """Logits [m, vocab], the most likely tokens [m], and a head's output [m, hidden]; empty if there are none."""
    rows: Mapping[str, Mapping[str, jax.Array]]
    """By kind of layer: new rows by part, [ranks, layers, spans, n, KV heads, row_dim]."""
    states: Sequence[Mapping[str, jax.Array]]
    """Of recurrent layers, after `stops`: [ranks, spans, m, ...] by part."""
    taps: jax.Array | None
    """Hidden states [spans, n, taps * hidden]."""


@attrs.frozen
class Programs:
    """The compiled functions of a model, divided over a mesh in one way."""

    config: ModelConfig
    attention: Attention | ContextAttention
    mesh: Mesh
    key_of: tuple[int, ...] = ()
    """The key head of each value head of a rank, in recurrent layers; the same on all ranks."""
    near: Attention | None = None
    """The attention of layers with a sliding window."""
    small: bool = True
    """Whether the model takes longer to compile than to run, so that XLA is to be quick about it."""

    @property
    def tokens(self) -> PartitionSpec:
        """Placement of a step's tokens: all on every rank, or split over `cp`, with a grid for each rank along it."""
        return DEALT if isinstance(self.attention, ContextAttention) else EVERYWHERE

    def run(self, piece: Piece, given: Given) -> Made:
        """Run a piece of a step."""
        return _program(self, piece)(given)  # type: ignore[no-any-return]


def compiled(mesh: Mesh, program: Callable[..., Any], takes: Any, gives: Any, small: bool = True) -> Callable[..., Any]:
    """Compile a program to run on every rank of a mesh with its share of the arguments, in full float32 precision."""

    def precise(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return program(*args)

    mapped = jax.shard_map(precise, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    return jax.jit(mapped, compiler_options=quick(mesh.devices.flat[0].platform) if small else None)


def _mine(tree: Tree) -> Tree:
    """Drop the first axis, of length 1, from the arrays of one rank."""
    found: Tree = jax.tree.map(lambda x: x[0], tree)
    return found


def _any(spec: PartitionSpec) -> Any:
    """The same in place of the arrays that it describes."""
    return spec


@functools.cache
def _program(p: Programs, piece: Piece) -> Callable[..., Any]:
    ranks, tokens, everywhere = map(_any, (RANKS, p.tokens, EVERYWHERE))
    takes = Given(
        top=ranks, layers=ranks, heads=ranks, pools=ranks, firsts=everywhere, reads=ranks, states=ranks,
        stops=everywhere, x=tokens, features=tokens, wanted=everywhere,
    )  # fmt: skip
    gives = Made(x=tokens, logits=everywhere, rows=ranks, states=ranks, taps=everywhere)
    return compiled(p.mesh, functools.partial(_run, p, piece), (takes,), gives, p.small)


def _run(p: Programs, piece: Piece, given: Given) -> Made:
    """Compute a piece on one rank."""
    g = given._replace(**{name: _mine(getattr(given, name)) for name in ("top", "layers", "heads", "reads", "states")})
    x = g.top["embed"][g.x] if piece.begins else g.x
    layer = _Layers(p, piece, g)
    taps = []
    for nth, (kind, weights) in enumerate(zip(piece.kinds, g.layers, strict=True)):
        x = layer(kind, weights, x)
        if nth in piece.taps:
            taps.append(x)
    rows = {
        kind: {part: jnp.stack([each[part] for each in some])[None] for part in some[0]}
        for kind, some in layer.rows.items()
    }
    states = jax.tree.map(lambda found: found[None], layer.states)
    kept = jnp.concatenate(taps, -1) if taps else None
    if kept is not None and p.tokens == DEALT:
        kept = lax.all_gather(kept, "cp", tiled=True)
    if not piece.ends:
        return Made(x, (), rows, states, kept)
    x = lax.all_gather(x, "cp", tiled=True) if p.tokens == DEALT else x
    x = x.reshape(-1, x.shape[-1])[g.wanted]
    found = logits(p.config, g.top, x)
    return Made(None, (found, jnp.argmax(found, -1), None if p.config.head is None else x), rows, states, kept)


class _Layers:
    """The layers of a piece on one rank, and what they make."""

    def __init__(self, p: Programs, piece: Piece, given: Given) -> None:
        self._p, self._given, self._fuses = p, given, piece.fuses
        self._at, self._states = iter(piece.at), iter(given.states)
        self.rows: dict[str, list[Mapping[str, jax.Array]]] = {}
        self.states: list[Mapping[str, jax.Array]] = []

    def __call__(self, kind: str, weights: Weights, x: jax.Array) -> jax.Array:
        p, g = self._p, self._given
        if kind == RECURRENT:
            real = g.reads[ALL].positions >= 0
            x, states = recurrent_block(p.config, weights, x, real, next(self._states), g.stops, p.key_of, self._total)
            self.states.append(states)
            return x
        reads, attention = g.reads[kind], p.attention if kind == ALL or p.near is None else p.near
        done = self.rows.setdefault(kind, [])
        firsts = g.firsts[kind][len(done)]
        pool = {
            part: Paged(g.pools[kind][array], first)
            for (part, array), first in zip(next(self._at), firsts, strict=True)
        }
        attend = lambda q, new: attention(q, new, pool, reads, g.heads)  # noqa: E731
        if g.features is None:
            x, rows = block(p.config, weights, x, reads.positions, attend, self._total)
        else:
            features = fuse(weights, g.features) if self._fuses else g.features
            x, rows = head_block(p.config, weights, x, features, reads.positions, attend, self._total)
        done.append(rows)
        return x

    def _total(self, summand: jax.Array) -> jax.Array:
        return lax.psum(summand, ("group", "dcp"))  # type: ignore[no-untyped-call,no-any-return]
