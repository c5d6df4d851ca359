"""Processes that begin with what their server has imported: forked from it, a few milliseconds each.

Each worker of the tests has one server. It imports once what the collected tests name here.
"""

import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

FORKED = multiprocessing.get_context("forkserver")
_IMPORTED = [f"kvproto.transport.{name}.provider" for name in ("cuda", "inline", "nixl", "shm")]
"""Modules in the order of their import; these are those that every node looks at."""
JAX = "kvproto_reference.jax_engine.apart", "kvproto_reference.jax_engine.build"
"""For tests that start engines of JAX: it may be imported before a fork, as it starts threads only to compute."""
Main = Callable[[], int]


def imported(*modules: str) -> None:
    """Let the server import these; a module of tests says so when it is collected."""
    _IMPORTED.extend(modules)
    FORKED.set_forkserver_preload(_IMPORTED)


def all_end_well(target: Callable[..., None], *arguments: Sequence[Any]) -> None:
    """Run a function with each of these arguments in a process of its own, all at once."""
    made = [FORKED.Process(target=_begin, args=(target, *each), daemon=True) for each in arguments]
    for process in made:
        process.start()
    for process in made:
        process.join()
    assert [process.exitcode for process in made] == [0] * len(made)


class Ended(NamedTuple):
    """What has become of a command."""

    status: int
    out: str
    said: str
    """On stderr."""


class Command:
    """An entry point that runs as if a shell had started it: a session, an environment and streams of its own."""

    def __init__(self, main: Main, arguments: Sequence[object]) -> None:
        """It has the environment and the `sys.path` that this process has now."""
        self._streams = [os.memfd_create("a command's stream") for _ in range(2)]
        paths = [f"/proc/{os.getpid()}/fd/{stream}" for stream in self._streams]
        given = [str(argument) for argument in arguments]
        self.process = FORKED.Process(target=_run, args=(main, given, dict(os.environ), paths))
        self.process.start()
        self._ended: Ended | None = None

    @property
    def pid(self) -> int:
        """Of the process, and of its session."""
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, seconds: float = 100) -> Ended:
        """Until it ends; it is killed if it does not."""
        if self._ended is None:
            self.process.join(seconds)
            status = self.process.exitcode
            self.process.kill()
            with contextlib.ExitStack() as stack:
                out, said = (stack.enter_context(open(stream)) for stream in self._streams)
                self._ended = Ended(-1 if status is None else status, _whole(out), _whole(said))
            assert status is not None, self._ended
        return self._ended


def _whole(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read())


def _begin(target: Callable[..., None], *arguments: Any) -> None:
    gc.freeze()  # collections of garbage need not look at what the server has imported
    target(*arguments)


def _run(main: Main, arguments: list[str], environment: dict[str, str], streams: list[str]) -> None:
    gc.freeze()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY), number)
    sys.argv[1:] = arguments
    sys.exit(main())
