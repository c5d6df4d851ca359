"""Ranks of an engine in processes of their own, which compute together by `jax.distributed`."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import jax
import torch.distributed as dist

from ..engine.world import World
from ..errors import EngineError

__all__ = ["meet", "part", "told_of_others"]

WAIT = 10
"""Seconds after which a process is taken for dead, or goes without the others."""


def meet(world: World, gpu: int | None) -> None:
    """Meet the other processes, before JAX has begun; the device of this one is a GPU (CUDA ordinal), or its CPU.

    Nothing is encrypted: all run on one host, and listen on its loopback alone. What JAX's gloo prints goes to stderr.
    """
    sys.stdout.flush()
    os.dup2(2, 1)
    if gpu is None:
        jax.config.update("jax_num_cpu_devices", 1)  # type: ignore[no-untyped-call]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told = [f"127.0.0.1:{free.getsockname()[1]}"]
    dist.broadcast_object_list(told, 0, world.group)
    jax.distributed.initialize(
        told[0],
        world.size,
        world.rank,
        [gpu or 0],
        coordinator_bind_address=told[0],
        heartbeat_timeout_seconds=WAIT,
        shutdown_timeout_seconds=WAIT,
    )


def part(well: bool) -> None:
    """Leave the others, which leave too; or, unless all is well, see to it that this process can end without them."""
    if well:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
        return
    ended = sys.exc_info()[1]
    status = ended.code if isinstance(ended, SystemExit) and isinstance(ended.code, int) else 1
    atexit.register(os._exit, status)  # before what JAX does then: it waits for the others, and aborts


@contextlib.contextmanager
def told_of_others() -> Iterator[None]:
    """Raise EngineError where a computation failed because another process has ended."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise EngineError(f"a step with the other ranks failed: {str(error).splitlines()[0]}") from error
