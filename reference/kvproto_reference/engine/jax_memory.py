"""Pools of a GPU in memory that JAX allocates, for engines in torch beside JAX."""

import os
from collections.abc import Mapping
from typing import Any

from kvproto.copying.program import Side
from kvproto.node.pool import Pool, pack
from kvproto.planning.geometry import Geometry
from kvproto.transport import memory

_HELD: list[Any] = []
"""Arrays that own the memory of pools; XLA computes nothing with them, so it never moves them."""


def allocate(geometry: Geometry, rank: int, items: Mapping[int, int], device: int) -> Pool:
    """As `kvproto.node.pool.allocate`, adopted from an array of JAX."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the GPU from torch
    import jax

    columns, length = pack(geometry, rank, items)
    array = jax.numpy.zeros(length, jax.numpy.uint8, device=jax.devices("cuda")[device]).block_until_ready()
    _HELD.append(array)
    return Pool({0: memory.adopt(array.unsafe_buffer_pointer(), length)}, Side(geometry, rank, columns))
