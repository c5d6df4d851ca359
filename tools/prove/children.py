"""Tasks in forked children, a few at a time, each within a time limit: what a task changes is gone with its process."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

__all__ = ["DIED", "LATE", "in_children"]

LATE, DIED = "no end within its time", "the process died"
_MEMORY = 8 << 30
"""Bytes that a child may map: a mutant may ask for any number."""
Task = Callable[[], str]


def in_children(tasks: Iterable[tuple[str, Task]], jobs: int, limit: float) -> Iterator[tuple[str, str]]:
    """Name and answer of each task, as they end; LATE or DIED where there is no answer."""
    left = iter(tasks)
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    more = True
    while more or running:
        while more and len(running) < jobs:
            name, task = next(left, ("", None))
            if task is None:
                more = False
                break
            here, there = multiprocessing.Pipe(duplex=False)
            started = multiprocessing.get_context("fork").Process(target=_child, args=(task, there))
            started.start()
            there.close()
            running[here] = name, started, time.monotonic() + limit
        if not running:
            break
        soonest = min(deadline for _, _, deadline in running.values())
        ready = set(wait(list(running), max(0.0, soonest - time.monotonic())))
        for here in list(running):
            name, child, deadline = running[here]
            late = deadline < time.monotonic()
            if here not in ready and not late:
                continue
            yield name, _answer(here) if here in ready else LATE
            child.kill()
            child.join()
            here.close()
            del running[here]


def _answer(here: Connection) -> str:
    try:
        return str(here.recv())
    except EOFError:
        return DIED


def _child(task: Task, there: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    there.send(task())
    there.close()
    os._exit(0)
