"""Memory of pools: zeroed bytes that kvproto can share, as flat uint8 tensors."""

import os
from collections.abc import Callable

import torch
import torch.utils.dlpack
from torch import Tensor

import kvproto

Allocate = Callable[[int, torch.device], Tensor]
"""Makes zeroed bytes, uint8 [length], on a device."""


def device_of(number: int | None) -> torch.device:
    """The GPU of that number, or the host for None."""
    return torch.device("cpu") if number is None else torch.device("cuda", number)


def private(length: int, device: torch.device) -> Tensor:
    """Memory that torch allocates; on the host no other process can reach it."""
    return torch.zeros(length, dtype=torch.uint8, device=device)


def shareable(length: int, device: torch.device) -> Tensor:
    """Memory that any transport of kvproto can share; raises LocalError(TRANSPORT_FAILED) if there is too little."""
    memory: Tensor = torch.utils.dlpack.from_dlpack(kvproto.allocate(length, device.index))
    return memory.view(torch.uint8)


def of_jax(length: int, device: torch.device) -> Tensor:
    """Memory of a GPU that JAX allocates, for engines that run torch together with JAX.

    XLA never computes with the array, so it never moves it; the tensor keeps it alive.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU away from torch
    import jax

    array = jax.numpy.zeros(length, jax.numpy.uint8, device=jax.devices("cuda")[device.index or 0])
    memory: Tensor = torch.utils.dlpack.from_dlpack(array.block_until_ready())
    return memory
