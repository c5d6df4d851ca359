"""The mesh of an engine: one device for each rank, with an axis for each way of dividing work.

Ranks along `cp` share the tokens of a prefill step out; the ranks of one `group`, along `dcp`, hold the same KV heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import EngineError

__all__ = ["DEALT", "EVERYWHERE", "RANKS", "by_rank", "gpus", "here", "host_devices", "mesh_of", "placed"]

RANKS = PartitionSpec(("cp", "group", "dcp"))  # type: ignore[no-untyped-call]
"""An array whose first axis is split over all ranks."""
DEALT = PartitionSpec("cp")  # type: ignore[no-untyped-call]
"""An array whose first axis is split over `cp`, and which is the same on all other ranks."""
EVERYWHERE = PartitionSpec()  # type: ignore[no-untyped-call]
"""An array that is the same on all ranks."""


def host_devices(count: int) -> list[jax.Device]:
    """The first `count` devices that XLA makes of the host's CPU; the first call in a process fixes how many there are.

    Raises EngineError if XLA has started with fewer.
    """
    with contextlib.suppress(RuntimeError):  # XLA has started
        jax.config.update("jax_num_cpu_devices", count)  # type: ignore[no-untyped-call]
    found = jax.devices("cpu")
    if len(found) < count:
        raise EngineError(f"XLA started with {len(found)} host devices, not {count}: ask for all before it computes")
    return found[:count]


def gpus(numbers: Sequence[int]) -> list[jax.Device]:
    """The GPUs of these CUDA ordinals; raises EngineError for one named twice, or one that JAX does not see."""
    if len(set(numbers)) < len(numbers):
        raise EngineError(f"JAX needs a GPU of its own for each rank, not {list(numbers)}")
    try:
        found = {device.local_hardware_id: device for device in jax.devices("cuda")}
    except RuntimeError as error:
        raise EngineError("JAX computes on GPUs where it has CUDA: pip install 'jax[cuda13]'") from error
    if missing := sorted(set(numbers) - found.keys()):
        raise EngineError(f"JAX sees the GPUs {sorted(found)}, not {missing}")
    return [found[number] for number in numbers]


def mesh_of(tp: int, dcp: int = 1, cp: int = 1, on: Sequence[int] = (), first: int = 0) -> Mesh:
    """A mesh [cp, group, dcp] of a device for each rank, in rank order: `tp` for each CP rank, `dcp` for each group.

    `on` holds the CUDA ordinals of the ranks' GPUs; empty, it means host devices, from the one of number `first` on.
    If ranks are in processes of their own, it is that of this one, and `first` the rank with the first device. Raises
    EngineError.
    """
    if jax.process_count() > 1:
        devices = sorted(jax.devices("cuda" if on else "cpu"), key=lambda device: device.process_index)
        devices = devices[first : first + cp * tp]
    else:
        devices = gpus(on) if on else host_devices(first + cp * tp)[first:]
    return Mesh(np.array(devices).reshape(cp, -1, dcp), ("cp", "group", "dcp"))


def by_rank(mesh: Mesh, pieces: Sequence[npt.NDArray[Any]]) -> jax.Array:
    """Stack each rank's own array, all of one shape, as [ranks, ...]; the program of a rank sees [1, ...]."""
    made: jax.Array = placed(mesh, np.stack(pieces), RANKS)
    return made


def placed(mesh: Mesh, arrays: Any, where: PartitionSpec) -> Any:
    """Put a tree of arrays on the devices, split or copied as `where` says; those of another mesh are moved."""
    sharding = NamedSharding(mesh, where)
    if sharding.is_fully_addressable:
        return jax.device_put(arrays, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda at: x[at]), arrays)


def here(mesh: Mesh) -> list[int]:
    """The ranks of a mesh whose devices are of this process, counted along it."""
    mine = jax.process_index()
    return [nth for nth, device in enumerate(mesh.devices.flat) if device.process_index == mine]
