"""What XLA compiles, once for a shape of step and for all runners: a step's first rows, one layer, and logits."""

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
from .model import Weights, block, logits

__all__ = ["Programs", "compiled", "quick"]

Tree = TypeVar("Tree")

QUICK: dict[str, dict[str, Any]] = {
    "cpu": {
        "xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    },
    "gpu": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
}  # fmt: skip
"""To compile in an eighth of the time, which for models of this size is far more than they compute: by platform.

On GPUs matrix products are then the library's, as they come; none is compiled in many ways to find the quickest.
"""


@functools.cache
def quick(platform: str = "cpu") -> dict[str, Any]:
    """Those of QUICK that this XLA knows: later ones have dropped some."""
    known: dict[str, Any] = {}
    x = jax.device_put(np.zeros((8, 8), np.float32), jax.devices(platform)[0])  # so that it compiles for this platform
    for name, value in QUICK[platform].items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda x: x @ x, compiler_options={name: value}).lower(x).compile()
            known[name] = value
    return known


@attrs.frozen
class Programs:
    """The compiled functions of a model in one division over a mesh."""

    config: ModelConfig
    attention: Attention | ContextAttention
    mesh: Mesh

    @property
    def tokens(self) -> PartitionSpec:
        """Where the tokens of a step are: all on every rank, or dealt out over `cp`, each with a grid of its own."""
        return DEALT if isinstance(self.attention, ContextAttention) else EVERYWHERE

    def embed(self, weights: Weights, tokens: jax.Array) -> jax.Array:
        """tokens [spans, n] -> x [spans, n, hidden]."""
        return _embed(self)(weights, tokens)  # type: ignore[no-any-return]

    def layer(
        self,
        weights: Weights,
        heads: Heads,
        pool: dict[str, jax.Array],
        reads: Reads,
        x: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The next x, and the new rows of each rank by part, [ranks, spans, n, KV heads, row_dim]."""
        return _layer(self)(weights, heads, pool, reads, x)  # type: ignore[no-any-return]

    def head(self, weights: Weights, x: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [m, vocab] of these tokens of the step [m], counted along the spans, and the most likely of each."""
        return _head(self)(weights, x, wanted)  # type: ignore[no-any-return]


def compiled(mesh: Mesh, program: Callable[..., Any], takes: Any, gives: Any) -> Callable[..., Any]:
    """A function that runs on every rank of a mesh, with its share of what it takes, in float32 throughout."""

    def precise(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return program(*args)

    mapped = jax.shard_map(precise, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    return jax.jit(mapped, compiler_options=quick(mesh.devices.flat[0].platform))


def _mine(tree: Tree) -> Tree:
    """[1, ...] of one rank -> [...]."""
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
def _head(p: Programs) -> Callable[..., Any]:
    def program(w: Weights, x: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = lax.all_gather(x, "cp", tiled=True) if p.tokens == DEALT else x
        found = logits(p.config, _mine(w), x.reshape(-1, x.shape[-1])[wanted])
        return found, jnp.argmax(found, -1)

    return compiled(p.mesh, program, (RANKS, p.tokens, EVERYWHERE), EVERYWHERE)
