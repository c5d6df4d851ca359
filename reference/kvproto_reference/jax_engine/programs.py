"""The functions that XLA compiles: embedding, one layer, and logits; once for each shape of step, for all runners."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..models import ModelConfig
from .attention import Attention, Heads, Reads
from .context import ContextAttention
from .mesh import DEALT, EVERYWHERE, RANKS
from .model import Weights, block, logits, recurrent_block

__all__ = ["Programs", "compiled", "quick"]

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
class Programs:
    """The compiled functions of a model, divided over a mesh in one way."""

    config: ModelConfig
    attention: Attention | ContextAttention
    mesh: Mesh
    key_of: tuple[int, ...] = ()
    """The key head of each value head of a rank, in recurrent layers; the same on all ranks."""

    @property
    def tokens(self) -> PartitionSpec:
        """How a step's tokens are placed: all on every rank, or split over `cp`, with a grid for each rank along it."""
        return DEALT if isinstance(self.attention, ContextAttention) else EVERYWHERE

    def embed(self, weights: Weights, tokens: jax.Array) -> jax.Array:
        """The input x [spans, n, hidden] of the first layer for tokens [spans, n]."""
        return _embed(self)(weights, tokens)  # type: ignore[no-any-return]

    def layer(
        self,
        weights: Weights,
        heads: Heads,
        pool: dict[str, jax.Array],
        reads: Reads,
        x: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Compute a layer; returns the next x and new rows by part, [ranks, spans, n, KV heads, row_dim]."""
        return _layer(self)(weights, heads, pool, reads, x)  # type: ignore[no-any-return]

    def recurrent(
        self, weights: Weights, state: dict[str, jax.Array], stops: jax.Array, reads: Reads, x: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Compute a recurrent layer; returns the next x, and states by part, [ranks, spans, m, ...].

        These are after `stops` [spans, m] tokens, and `state` [ranks, spans, ...] are those before.
        """
        return _recurrent(self)(weights, state, stops, reads, x)  # type: ignore[no-any-return]

    def head(self, weights: Weights, x: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [m, vocab] and most likely tokens [m] after the `wanted` tokens [m] of a step, counted along spans."""
        return _head(self)(weights, x, wanted)  # type: ignore[no-any-return]


def compiled(mesh: Mesh, program: Callable[..., Any], takes: Any, gives: Any) -> Callable[..., Any]:
    """Compile a program to run on every rank of a mesh with its share of the arguments, in full float32 precision."""

    def precise(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return program(*args)

    mapped = jax.shard_map(precise, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    return jax.jit(mapped, compiler_options=quick(mesh.devices.flat[0].platform))


def _mine(tree: Tree) -> Tree:
    """Drop the first axis, of length 1, from the arrays of one rank."""
    found: Tree = jax.tree.map(lambda x: x[0], tree)
    return found


@functools.cache
def _embed(p: Programs) -> Callable[..., Any]:
    return compiled(p.mesh, lambda w, tokens: _mine(w)["embed"][tokens], (RANKS, p.tokens), p.tokens)


@functools.cache
def _layer(p: Programs) -> Callable[..., Any]:
    def program(w: Weights, heads: Heads, pool: Any, dealt: Reads, x: jax.Array) -> Any:
        reads = _mine(dealt)
        attend = lambda q, new: p.attention(q, new, pool, reads, _mine(heads))  # noqa: E731
        total = lambda summand: lax.psum(summand, ("group", "dcp"))  # type: ignore[no-untyped-call]  # noqa: E731
        x, rows = block(p.config, _mine(w), x, reads.positions, attend, total)
        return x, {part: new[None] for part, new in rows.items()}

    return compiled(p.mesh, program, (RANKS, RANKS, RANKS, RANKS, p.tokens), (p.tokens, RANKS))


@functools.cache
def _recurrent(p: Programs) -> Callable[..., Any]:
    def program(w: Weights, state: Any, stops: jax.Array, reads: Reads, x: jax.Array) -> Any:
        total = lambda summand: lax.psum(summand, ("group", "dcp"))  # type: ignore[no-untyped-call]  # noqa: E731
        real = _mine(reads).positions >= 0
        x, states = recurrent_block(p.config, _mine(w), x, real, _mine(state), stops, p.key_of, total)
        return x, {part: found[None] for part, found in states.items()}

    return compiled(p.mesh, program, (RANKS, RANKS, EVERYWHERE, RANKS, p.tokens), (p.tokens, RANKS))


@functools.cache
def _head(p: Programs) -> Callable[..., Any]:
    def program(w: Weights, x: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = lax.all_gather(x, "cp", tiled=True) if p.tokens == DEALT else x
        found = logits(p.config, _mine(w), x.reshape(-1, x.shape[-1])[wanted])
        return found, jnp.argmax(found, -1)

    return compiled(p.mesh, program, (RANKS, p.tokens, EVERYWHERE), EVERYWHERE)
