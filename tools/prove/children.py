"""Tasks in forked children, a few at a time, each within a time limit: what a task changes is gone with its process.

Limits are those of a machine that does nothing else; they grow with the processes that wait for each of its cores.

A task that raises is a fault of this tool, and ends it: nothing may count as noticed that only broke the asking.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

LATE, DIED = "no end within its time", "the process died"
_MEMORY = 16 << 30
"""Bytes that a child may map: a mutant may ask for any number."""
Task = Callable[[], str]


class Answer(NamedTuple):
    """Of one task."""

    name: str
    text: str
    """LATE or DIED where there is no answer."""
    seconds: float
    """Of CPU, with those of its own children that it has waited for."""


def crowding() -> float:
    """The slowdown against an idle machine, by how many processes want each core; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def in_children(tasks: Iterable[tuple[str, Task]], jobs: int, limit: float) -> Iterator[Answer]:
    """The answer of each task, as they end. Raises what a task raises."""
    left = iter(tasks)
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    try:
        while True:
            while len(running) < jobs and (task := next(left, None)) is not None:
                here, started = _started(task[1])
                running[here] = task[0], started, time.monotonic() + limit * crowding()
            if not running:
                return
            soonest = min(deadline for _, _, deadline in running.values())
            ready = set(wait(list(running), max(0.0, soonest - time.monotonic())))
            for here, (name, child, deadline) in list(running.items()):
                if here in ready:
                    answer, fault = _heard(here)
                elif deadline < time.monotonic():
                    answer, fault = LATE, ""
                else:
                    continue
                del running[here]
                seconds = _end(here, child)
                if fault:
                    raise RuntimeError(f"{name}: {fault}")
                yield Answer(name, answer, seconds)
    finally:
        for here, (_, child, _) in running.items():
            _end(here, child)


def _started(task: Task) -> tuple[Connection, BaseProcess]:
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(task, there))
    child.start()
    there.close()
    return here, child


def _end(here: Connection, child: BaseProcess) -> float:
    """End a child; returns the seconds of CPU that it took."""
    before = _of_children()
    child.kill()
    child.join()
    here.close()
    return _of_children() - before


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _heard(here: Connection) -> tuple[str, str]:
    """The answer, and what the task raised."""
    try:
        answer, fault = here.recv()
    except EOFError:
        return DIED, ""
    return answer, fault


def _child(task: Task, there: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        there.send((task(), ""))
    except Exception:
        there.send(("", traceback.format_exc()))
    there.close()
    os._exit(0)
