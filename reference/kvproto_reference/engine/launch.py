"""Starts the rank processes of an engine; the first runs in the calling process."""

import contextlib
import ctypes
import multiprocessing
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvproto.errors import DeviceFault, KvprotoError

from ..errors import EngineError
from .world import World

Run = Callable[[Any, World], int]
_Bells = list[tuple[socket.socket, socket.socket]]
"""For each process from the second on: the first one's end of a pair of sockets, and its own."""
_Sizes = tuple[int, int]
"""Ranks of a replica, and replicas."""
_PR_SET_PDEATHSIG = 1
_STOPS = signal.SIGINT, signal.SIGTERM
_LIBC = ctypes.CDLL(None)


def launch(run: Run, options: Any, size: int, folder: Path, replicas: int = 1) -> int:
    """Run `run(options, world)` in `size` processes of each replica; returns the exit status of the first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    meeting = folder / f"gloo-{secrets.token_hex(8)}"
    context = multiprocessing.get_context("fork")  # nothing of CUDA or gloo is open yet, and torch is imported once
    bells = [socket.socketpair() for _ in range(1, size * replicas)]
    sizes = size, replicas
    others = [
        context.Process(target=_child, args=(run, options, place, sizes, meeting, bells, os.getpid()), daemon=True)
        for place in range(1, size * replicas)
    ]
    try:
        with signals_held():
            for process in others:
                process.start()
        for _, theirs in bells:
            theirs.close()
        return _rank(run, options, 0, sizes, meeting, tuple(ours for ours, _ in bells))
    except KeyboardInterrupt:
        return 130
    finally:
        for process in others:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        meeting.unlink(missing_ok=True)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while processes are forked: what a handler raises in a hook of fork is lost.

    The new process has to call `release_signals` once its handlers are set.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        release_signals()


def release_signals() -> None:
    """Let SIGINT and SIGTERM come again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def end_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _child(run: Run, options: Any, place: int, sizes: _Sizes, meeting: Path, bells: _Bells, parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    release_signals()
    mine = bells[place - 1][1]
    for each in {end for pair in bells for end in pair} - {mine}:
        each.close()
    sys.exit(_rank(run, options, place, sizes, meeting, (mine,)))


def _rank(run: Run, options: Any, place: int, sizes: _Sizes, meeting: Path, bells: tuple[socket.socket, ...]) -> int:
    torch.set_num_threads(1)
    size, replicas = sizes
    replica, rank = divmod(place, size)
    try:
        if size * replicas == 1:
            return run(options, World())
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=place, world_size=size * replicas)
        except RuntimeError as error:  # another has ended meanwhile, and says why
            raise EngineError(f"rank {place} did not meet the others: {str(error).partition(chr(10))[0]}") from error
        try:
            engine = dist.group.WORLD
            members = [range(first, first + size) for first in range(0, size * replicas, size)]
            groups = [dist.new_group([*ranks]) for ranks in members] if replicas > 1 else [engine]
            return run(options, World(rank, size, groups[replica], bells, replica, replicas, engine))
        finally:
            dist.destroy_process_group()
    except (EngineError, KvprotoError, DeviceFault) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
