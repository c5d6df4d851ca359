"""Where the ranks of an engine are: one device each, in a mesh of groups that hold the same KV heads."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import EngineError

__all__ = ["EVERYWHERE", "RANKS", "by_rank", "everywhere", "host_devices", "mesh_of"]

RANKS = PartitionSpec(("group", "dcp"))  # type: ignore[no-untyped-call]
"""An array whose first axis is dealt out over ranks."""
EVERYWHERE = PartitionSpec()  # type: ignore[no-untyped-call]


def host_devices(count: int) -> list[jax.Device]:
    """The first `count` devices that XLA makes of the host's CPU; the first call of a process fixes how many there are.

    Raises EngineError where XLA has started with fewer.
    """
    with contextlib.suppress(RuntimeError):  # it has started
        jax.config.update("jax_num_cpu_devices", count)  # type: ignore[no-untyped-call]
    found = jax.devices("cpu")
    if len(found) < count:
        raise EngineError(f"XLA started with {len(found)} host devices, not {count}: ask for all before it computes")
    return found[:count]


def mesh_of(ranks: int, dcp: int) -> Mesh:
    """`ranks` host devices in rank order, every `dcp` of them a DCP group."""
    return Mesh(np.array(host_devices(ranks)).reshape(-1, dcp), ("group", "dcp"))


def by_rank(mesh: Mesh, pieces: Sequence[npt.NDArray[Any]]) -> jax.Array:
    """Each rank's own array, all of one shape -> [ranks, ...]; a rank's program has [1, ...]."""
    made: jax.Array = jax.device_put(np.stack(pieces), NamedSharding(mesh, RANKS))
    return made


def everywhere(mesh: Mesh, array: npt.NDArray[Any]) -> jax.Array:
    """One array, on every rank."""
    made: jax.Array = jax.device_put(array, NamedSharding(mesh, EVERYWHERE))
    return made
