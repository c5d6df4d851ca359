"""The engine processes that the demo starts and restarts."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

import attrs

from ..engine.launch import end_with, release_signals, signals_held
from ..errors import EngineError
from .network import enter

Main = Callable[[list[str]], int]
"""The entry point of an engine: it takes the command-line options and returns the exit status."""


@attrs.define
class _Engine:
    main: Main
    options: list[str]
    namespace: str | None
    process: BaseProcess
    may_end: bool = False


class Engines:
    """The engine processes, by name."""

    def __init__(self, fork: bool = True) -> None:
        """Fork the engines, which saves importing torch again, or spawn them, as a process that uses CUDA must."""
        self._context = ForkContext() if fork else SpawnContext()
        self._engines: dict[str, _Engine] = {}

    def start(self, name: str, main: Main, options: list[str], namespace: str | None = None) -> None:
        """Start an engine by its entry point, in the network namespace given or in ours; it shares our stderr."""
        process = self._context.Process(target=_engine, args=(main, options, os.getpid(), namespace))
        with signals_held():
            process.start()
        self._engines[name] = _Engine(main, options, namespace, process)

    def restart(self, name: str) -> None:
        """Start an engine that has ended again, with the options and the namespace it had."""
        engine = self._engines[name]
        self.start(name, engine.main, engine.options, engine.namespace)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal that may end the engine: SIGTERM to its first process, any other to all of them."""
        engine = self._engines[name]
        engine.may_end = True
        first = engine.process.pid or 0
        others = [] if number == signal.SIGTERM else Path(f"/proc/{first}/task/{first}/children").read_text().split()
        for pid in (first, *map(int, others)):
            with contextlib.suppress(ProcessLookupError):  # the others end with the first
                os.kill(pid, number)

    def exit_status(self, name: str) -> int | None:
        """The exit status of an engine, negative for the signal that killed it; None while it runs."""
        return self._engines[name].process.exitcode

    def check(self) -> None:
        """Raise EngineError if an engine has ended that was sent no signal."""
        for name, engine in self._engines.items():
            if engine.process.exitcode is not None and not engine.may_end:
                raise EngineError(f"the {name} engine ended with exit status {engine.process.exitcode}")

    def __enter__(self) -> "Engines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes = [engine.process for engine in self._engines.values()]
        for name, engine in self._engines.items():
            if kind is not None and engine.process.exitcode is None:
                self.signal(name, signal.SIGCONT)
                os.kill(engine.process.pid or 0, signal.SIGINT)  # SIGTERM would let it finish
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _engine(main: Main, options: list[str], parent: int, namespace: str | None) -> None:
    told = []

    def interrupted(number: int, _: object) -> None:
        told.append(number)  # a library that is called meanwhile may raise an error of its own in place of this one
        raise KeyboardInterrupt

    try:
        if namespace is not None:
            enter(namespace)
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release_signals()
        end_with(parent)
        sys.exit(main(options))
    except (KeyboardInterrupt, Exception):
        if not told:
            raise
        sys.exit(130)  # it had not begun to serve
