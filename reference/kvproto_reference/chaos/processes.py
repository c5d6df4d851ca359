"""The engines' processes as the harness sees them: started from one server, watched and killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import attrs

from .decode import Decode
from .engine import Setup, run
from .prefill import Prefill

__all__ = ["Runner", "prepare"]

_FORKED = multiprocessing.get_context("forkserver")


def prepare(nixl: bool) -> None:
    """Start the server of processes now, with NIXL if needed; engines are forked from it within milliseconds."""
    _FORKED.set_forkserver_preload([f"kvproto_reference.chaos.{'warm_nixl' if nixl else 'warm'}"])
    begin = _FORKED.Process(target=os.getpid)
    begin.start()
    begin.join()


def _engine(conn: Connection, setup: Setup) -> None:
    run(Prefill if setup.name.startswith("prefill") else Decode, conn, setup)


class Runner:
    """One engine, over all of its runs."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.runs = setup, 0
        self.up = self.stopped = False
        """Whether it has said that its door is open, and whether a signal has stopped it."""
        self.process: BaseProcess | None = None
        self.conn: Connection | None = None
        self.pids: list[int] = []
        self.short = self.behind = False
        """Whether it lacks memory, and whether its clock has been set back."""

    def start(self, **changes: Any) -> None:
        """Start another run, with some of the setup changed."""
        ours, theirs = _FORKED.Pipe()
        made = _FORKED.Process(target=_engine, args=(theirs, attrs.evolve(self.setup, **changes)))
        made.start()
        theirs.close()
        self.short, self.behind = False, "behind" in changes
        self.process, self.conn, self.up, self.stopped = made, ours, False, False
        self.runs += 1
        self.pids.append(self.pid)

    @property
    def pid(self) -> int:
        """The PID of the present run."""
        assert self.process is not None
        return self.process.pid or 0

    @property
    def alive(self) -> bool:
        """Whether there is a run that has not been killed."""
        return self.conn is not None

    def tell(self, *word: Any) -> None:
        """Say something to the engine, unless it is dead or has not listened for long."""
        if self.conn is not None and self.up and select.select([], [self.conn], [], 0)[1]:
            with contextlib.suppress(OSError):
                self.conn.send(word)

    def heard(self) -> list[tuple[Any, ...]] | None:
        """Messages of the engine since the last call; None at its end."""
        found = deque[tuple[Any, ...]]()
        try:
            while self.conn is not None and self.conn.poll():
                found += self.conn.recv()
        except (EOFError, OSError):
            return list(found) or None
        return list(found)

    def signal(self, number: int) -> None:
        """Send a signal to the present run, if any."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)

    def gone(self) -> int | None:
        """Wait for the end of a run that has been killed or ends by itself; returns its exit code."""
        if self.process is None or self.conn is None:
            return None
        self.process.join(10)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        self.conn.close()
        self.conn, self.up = None, False
        return code

    def left(self) -> list[int]:
        """Processes of its runs' sessions that are still there."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in self.pids:
                with contextlib.suppress(OSError, IndexError):
                    fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) in self.pids and fields[0] != "Z":
                        found.append(int(name))
        return found
