"""Starts the rank processes of an engine; the first runs in the calling process."""

import contextlib
import ctypes
import multiprocessing
import os
import secrets
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from kvproto.errors import DeviceFault, KvprotoError

from ..errors import EngineError, RankEnded
from .world import World

Run = Callable[[Any, World], int]
_Bells = list[tuple[socket.socket, socket.socket]]
"""For each process from the second on: the first one's end of a pair of sockets, and its own."""
_PR_SET_PDEATHSIG = 1
_STOPS = signal.SIGINT, signal.SIGTERM
_MS_TO_END = 5000
"""Milliseconds between the ends of a rank's sockets, as one that ends closes them in any order."""
_LIBC = ctypes.CDLL(None)


@attrs.frozen
class _Meeting:
    """The meeting place of an engine's processes, their number, and the GPU of each, if each has one of its own."""

    file: Path
    size: int
    """Ranks of a replica."""
    replicas: int
    gpus: Sequence[int]

    @property
    def processes(self) -> int:
        return self.size * self.replicas


def launch(run: Run, options: Any, size: int, folder: Path, replicas: int = 1, gpus: Sequence[int] = ()) -> int:
    """Run `run(options, world)` in `size` processes of each replica; returns the exit status of the first.

    With `gpus`, one for each process, their models exchange over NCCL.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    meeting = _Meeting(folder / f"gloo-{secrets.token_hex(8)}", size, replicas, gpus)
    context = multiprocessing.get_context("fork")  # nothing of CUDA or gloo is open yet, and torch is imported once
    bells = [socket.socketpair() for _ in range(1, meeting.processes)]
    others = [
        context.Process(target=_child, args=(run, options, place, meeting, bells, os.getpid()), daemon=True)
        for place in range(1, meeting.processes)
    ]
    try:
        with signals_held():
            for process in others:
                process.start()
        for _, theirs in bells:
            theirs.close()
        status = _rank(run, options, 0, meeting, tuple(ours for ours, _ in bells))
        if status:
            for ours, _ in bells:  # nobody waits for it any more
                ours.close()
        return status
    except KeyboardInterrupt:
        return 130
    finally:
        for process in others:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        meeting.file.unlink(missing_ok=True)


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


def _child(run: Run, options: Any, place: int, meeting: _Meeting, bells: _Bells, parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    release_signals()
    mine = bells[place - 1][1]
    for each in {end for pair in bells for end in pair} - {mine}:
        each.close()
    status = _rank(run, options, place, meeting, (mine,))
    if status and meeting.gpus:
        os._exit(status)  # the end of NCCL would wait for ranks that do not come any more
    sys.exit(status)


def _rank(run: Run, options: Any, place: int, meeting: _Meeting, bells: tuple[socket.socket, ...]) -> int:
    torch.set_num_threads(1)
    try:
        if meeting.processes == 1:
            return run(options, World())
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            here = f"file://{meeting.file}"
            dist.init_process_group("gloo", init_method=here, rank=place, world_size=meeting.processes)
        except RuntimeError as error:  # another has ended meanwhile, and says why
            raise EngineError(f"rank {place} did not meet the others: {str(error).partition(chr(10))[0]}") from error
        with _told_of_others(bells, place), _groups_of(meeting, place) as computes:
            return run(options, _world(meeting, place, bells, computes))
    except (EngineError, KvprotoError, DeviceFault) as error:
        if not (place and isinstance(error, RankEnded)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


@contextlib.contextmanager
def _told_of_others(bells: tuple[socket.socket, ...], place: int) -> Iterator[None]:
    """Raise RankEnded where a message or a collective failed because another rank has ended.

    Which of the two a rank notices first is chance. A rank that is not the first waits for the end of that one, which
    may itself wait to see who has ended.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        ends = select.poll()
        for bell in bells:
            ends.register(bell, select.POLLRDHUP)
        if not ends.poll(_MS_TO_END * (2 if place else 1)):
            raise
        raise RankEnded from error


def _world(meeting: _Meeting, place: int, bells: tuple[socket.socket, ...], computes: str) -> World:
    """The place of a process among the replicas of its engine."""
    engine, size = dist.group.WORLD, meeting.size
    replica, rank = divmod(place, size)
    groups = [engine]
    if meeting.replicas > 1:
        groups = [dist.new_group([*range(first, first + size)]) for first in range(0, meeting.processes, size)]
    mine = groups[replica if meeting.replicas > 1 else 0]
    return World(rank, size, mine, bells, replica, meeting.replicas, engine, computes)


@contextlib.contextmanager
def _groups_of(meeting: _Meeting, place: int) -> Iterator[str]:
    """The back end of the groups in which models exchange; all groups end with it."""
    if not meeting.gpus:
        try:
            yield "gloo"
        finally:
            dist.destroy_process_group()
        return
    torch.cuda.set_device(meeting.gpus[place])
    yield "nccl"
    dist.destroy_process_group()  # not after an error, as NCCL would wait for the others
