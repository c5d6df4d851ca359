"""Pools for engines that compute in JAX: `python examples/jax_pool.py`.

A JAX array never changes, but peers write a pool. So the pool is kvproto's memory, and XLA only reads it. The prefill
engine copies what XLA has computed into its pool. The decode engine views the pages that have arrived as arrays,
without a copy (`jax.dlpack.from_dlpack`). Make such a view after the transfer, and drop it before you fetch into its
pages again: XLA may assume that the bytes of an array stay the same. Never donate it either, as XLA would then write
into the pool.

On a GPU, pass `device` to `Pool.allocate`, or give Pool JAX arrays that only your own kernels write. On the CPU, memory
that JAX allocates belongs to this process alone, and Pool says so.
"""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvproto import Cache, DType, LocalError, Pool, Prompt, Sink, Source, allocate, lay_out, new_ticket

LAYERS, HEADS, DIM, PAGE, PAGES = 2, 2, 16, 16, 16
SHAPE = (LAYERS, 2, PAGES, PAGE, HEADS, DIM)
AXES = "layer part page token head dim"
GEOMETRY = lay_out([Cache.gqa("kv", LAYERS, kv_heads=HEADS, head_dim=DIM, page=PAGE, dtype=DType.F32)])


class Memory:
    """The cache of one engine."""

    def __init__(self) -> None:
        self._bytes = allocate(4 * int(np.prod(SHAPE)))
        self.array = np.from_dlpack(self._bytes).view(np.float32).reshape(SHAPE)
        """For writes from the host: float32 [layer, part, page, token, head, dim]."""
        self.pool = Pool(GEOMETRY, {"kv": self.array}, axes=AXES)

    def view(self) -> jax.Array:
        """What the pool holds now, for XLA to read without a copy."""
        return jax.lax.bitcast_convert_type(
            jax.dlpack.from_dlpack(self._bytes).reshape(*SHAPE, 4), jnp.float32
        )  # fmt: skip


@jax.jit  # type: ignore[untyped-decorator]
def prefill(tokens: jax.Array) -> jax.Array:
    """K and V of a prompt, [layer, part, token, head, dim]."""
    weights = jax.random.normal(jax.random.key(0), (LAYERS, 2, 1, HEADS, DIM))
    return jnp.tanh(weights * jnp.cumsum(tokens)[:, None, None] / 64)


@jax.jit  # type: ignore[untyped-decorator]
def gather(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """The rows that a page table names, [layer, part, token, head, dim]."""
    return pool[:, :, pages].reshape(LAYERS, 2, -1, HEADS, DIM)


def refused(pool: Any) -> str:
    """What Pool says about memory that JAX allocated on the host."""
    try:
        Pool(GEOMETRY, {"kv": pool}, axes=AXES)
    except LocalError as error:
        return str(error)
    return "taken"


def main() -> None:
    """Hand one request over, and compare."""
    print(f"memory of JAX: {refused(jnp.zeros(SHAPE, jnp.float32))}")
    mine, theirs = Memory(), Memory()
    address = f"ipc://{tempfile.mkdtemp()}/prefill"
    with Source("prefill", mine.pool, address) as source, Sink("decode", theirs.pool, {"prefill": address}) as sink:
        tokens = np.arange(2 * PAGE)
        prompt, ticket = Prompt(tokens), new_ticket("prefill")
        request, fetch = source.request(ticket, prompt), sink.fetch(ticket, prompt, {"kv": [7, 2]})
        rows = prefill(jnp.asarray(tokens))
        mine.array[:, :, [3, 4]] = np.asarray(rows).reshape(LAYERS, 2, 2, PAGE, HEADS, DIM)
        request.finish({"kv": [3, 4]})
        arrived = fetch.wait(60)
        assert jnp.array_equal(gather(theirs.view(), jnp.array([7, 2])), rows)
        print(f"{sum(arrived.bytes.values())} bytes, equal")


if __name__ == "__main__":
    main()
