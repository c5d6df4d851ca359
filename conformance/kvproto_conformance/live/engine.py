"""The engine under test: a program that the suite starts and controls by JSON lines.

Each line is answered by one line, in order. An answer echoes `seq` and has `ok`, `err` or `unsupported`. Anything else
(no answer in time, the end of the program, a line that is not an answer) is an EngineFault and never a refusal.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

Json = dict[str, Any]
_LONGEST_LINE = 1 << 24
_TAIL = 2048
_OVER = ("freed", "undelivered", "expired")
"""States of a request whose pages are the source's own again."""
_CLOSING = 2.0
"""Seconds in which its output is closed once it is killed, unless a process in a session of its own holds it open."""


class EngineFault(Exception):
    """The engine did not answer as an adapter must: `kind` is crash, timeout or garbage."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Unsupported(Exception):
    """The adapter says that it cannot do what was asked."""


class Engine:
    """One run of an adapter."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it; raises EngineFault if there is no such program."""
        self._silent = False
        self._errors: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - read after the program has ended
        try:
            self._program = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise EngineFault("crash", f"cannot start {command[0]}: {error.strerror}") from error
        assert self._program.stdin is not None
        os.set_blocking(self._program.stdin.fileno(), False)
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._seq = 0
        self.held: set[str] = set()
        """Ids of requests and fetches whose pages it has not got back."""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def printed(self) -> bytes:
        """The engine's stderr so far."""
        return os.pread(self._errors.fileno(), 1 << 24, 0)

    @property
    def pids(self) -> list[int]:
        """The process ids of the adapter and of all that it has started, such as the engine under a shell script."""
        found = [self._program.pid]
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                session = path.read_text().rpartition(")")[2].split()[3]  # the name before it may contain anything
                found += [int(path.parent.name)] if int(session) == self._program.pid else []
        return found

    def ask(self, op: str, within: float = 60.0, **more: Any) -> Json:
        """Have the engine do something; returns the value of `ok`. Raises EngineFault and Unsupported."""
        answer = self.answer(op, within, **more)
        if "err" in answer:
            raise EngineFault("garbage", f"{op} was answered by {answer['err']}")
        found = dict(answer["ok"])
        if op in ("request", "fetch"):
            self.held.add(more["id"])
        elif op == "release" or found.get("state") in _OVER:
            self.held.discard(more["id"])
        return found

    def answer(self, op: str, within: float = 60.0, **more: Any) -> Json:
        """The same, but returns the whole answer, with `ok` or `err`."""
        self._seq += 1
        self._write(json.dumps({"seq": self._seq, "op": op, **more}).encode() + b"\n", op, within)
        try:
            heard = self._lines.get(timeout=within)
        except queue.Empty:
            raise self._silence(f"no answer to {op} for {within:g} s") from None
        if not heard:
            self._lines.put(b"")
            raise EngineFault("crash", self._end())
        return _checked(heard, self._seq, op)

    def _write(self, line: bytes, op: str, within: float) -> None:
        """Write a question; an adapter that does not read it counts as one that does not answer."""
        pipe, end = self._program.stdin, time.monotonic() + within
        assert pipe is not None
        try:
            while line:
                if not select.select([], [pipe], [], max(end - time.monotonic(), 0))[1]:
                    raise self._silence(f"{op} was not read for {within:g} s")
                line = line[os.write(pipe.fileno(), line) :]
        except (BrokenPipeError, ValueError) as error:
            raise EngineFault("crash", self._end()) from error

    def _silence(self, text: str) -> EngineFault:
        self._silent = True
        return EngineFault("timeout", text)

    def stop(self) -> None:
        """Ask it to end, unless it has been silent before, and make sure that it does."""
        if not self._silent:
            with contextlib.suppress(EngineFault, Unsupported):
                self.answer("stop", 5.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._program.wait(2.0)
        self.kill()

    def kill(self) -> None:
        """Kill it and all that it has started (SIGKILL), and wait for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._program.pid, signal.SIGKILL)
        self._program.wait()
        self._listener.join(_CLOSING)
        pipes = [self._program.stdin] if self._listener.is_alive() else [self._program.stdin, self._program.stdout]
        for pipe in pipes:
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Stop its processes meanwhile (SIGSTOP); it hears what was sent all at once afterwards."""
        os.killpg(self._program.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._program.pid, signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._program.poll() is None

    def _listen(self) -> None:
        assert self._program.stdout is not None
        while line := self._program.stdout.readline(_LONGEST_LINE):
            self._lines.put(line)
        self._lines.put(b"")

    def _end(self) -> str:
        """The exit of the engine, and its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(2.0)
        size = self._errors.seek(0, 2)
        self._errors.seek(max(size - _TAIL, 0))
        said = self._errors.read().decode(errors="replace").strip()
        return f"it ended with {self._program.poll()}" + (f": {said}" if said else "")


def _checked(line: bytes, seq: int, op: str) -> Json:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        raise EngineFault("garbage", f"{line[:80]!r} is no JSON") from None
    if not isinstance(answer, dict) or answer.get("seq") != seq:
        raise EngineFault("garbage", f"an answer to {op} with seq {seq}, not {line[:80]!r}")
    if "unsupported" in answer:
        raise Unsupported(f"the adapter answers {op} by unsupported")
    if not isinstance(answer.get("ok", answer.get("err")), dict):
        raise EngineFault("garbage", f"neither ok nor err nor unsupported: {line[:80]!r}")
    return answer
