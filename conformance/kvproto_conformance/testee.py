"""Drives a testee: a subprocess that reads one JSON object per line and answers with one (spec/v1/testee.md).

Whatever a testee does, each question ends with an answer, or with `Broken`, which says what it did instead; it is then
restarted. A testee that breaks too often, or takes too much time, gets no more questions.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

Json = dict[str, Any]
NOT_ASKED = "not asked"
"""The beginning of the reason once a testee gets no more questions."""
_LONGEST = 36 << 20
"""The most bytes of an answer; the longest frame in hex has 32 MiB."""
_WORDS = 2048
"""Bytes of its stderr that are kept."""
_STDOUT = "stdout is for answers alone, print notes to stderr"
_START = 4
"""The factor of the patience for the first answer, as an interpreter and its libraries have to start."""
_ENDING = 2.0
"""Seconds in which a testee that has closed its output ends, at most."""


class CannotStart(Exception):
    """There is no process to ask, and why."""


@attrs.frozen
class Broken:
    """The way in which a testee failed to answer."""

    kind: str
    """crash, timeout, garbage or given-up."""
    why: str


@attrs.frozen
class _Process:
    """A running testee with its pipes."""

    popen: subprocess.Popen[bytes]
    stdin: int
    stdout: int
    stderr: int


class Testee:
    """The implementation under test: `patience` seconds for each answer, `budget` for all, and `breaks` restarts."""

    def __init__(self, command: list[str], patience: float = 5.0, budget: float = 600.0, breaks: int = 50) -> None:
        self.command, self._patience, self._breaks = command, patience, breaks
        self._silences = 3
        self._end = time.monotonic() + budget
        self._budget = budget
        self._process: _Process | None = None
        self._sequence = 0
        self._greeting: Json = {}
        self._read = bytearray()
        self._words = b""

    def greet(self, greeting: Json) -> Json | Broken:
        """Start it and say hello, as every restart will; returns what it says about itself."""
        self._greeting = greeting
        return self._asked(self._start(), greeting, _START * self._patience)

    def ask(self, question: Json) -> Json | Broken:
        """Its answer, without `seq`."""
        if time.monotonic() > self._end:
            return Broken("given-up", f"{NOT_ASKED}: the {self._budget:.0f} s of this run are over")
        if self._breaks <= 0 or self._silences <= 0:
            why = "it broke too often before" if self._breaks <= 0 else "it was silent too often before"
            return Broken("given-up", f"{NOT_ASKED}: {why}")
        try:
            if self._process is None and isinstance(again := self.greet(self._greeting), Broken):
                return again
        except CannotStart as error:
            return Broken("crash", str(error))
        assert self._process is not None
        return self._asked(self._process, question, self._patience)

    def stop(self) -> Json | Broken:
        """Tell it to stop; it must end by itself, with status 0 and no further output."""
        process, self._sequence = self._process, self._sequence + 1
        if process is None:
            return Broken("crash", "it does not run")
        line = json.dumps({"op": "stop", "seq": self._sequence}).encode() + b"\n"
        found = self._exchange(process, line, self._patience)
        if isinstance(found, bytes) or self._read:
            said = found if isinstance(found, bytes) else bytes(self._read)
            return self._broken("garbage", f"it says more than it was asked: {_shown(said)}")
        if found.kind != "crash" or process.popen.returncode is None:
            return self._broken(found.kind, f"after `stop`: {found.why}")
        status = process.popen.returncode
        self.close()
        return {} if status == 0 else Broken("crash", f"after `stop`, {_ended(status)}")

    def _asked(self, process: _Process, question: Json, patience: float) -> Json | Broken:
        self._sequence += 1
        line = json.dumps({"seq": self._sequence, **question}).encode() + b"\n"
        found = self._exchange(process, line, patience)
        if isinstance(found, Broken):
            return self._broken(found.kind, found.why)
        try:
            answer = json.loads(found, parse_constant=_constant)
        except (ValueError, RecursionError):
            return self._broken("garbage", f"its answer is not JSON: {_shown(found)}; {_STDOUT}")
        if not isinstance(answer, dict):
            return self._broken("garbage", f"its answer is not an object: {_shown(found)}")
        sequence = answer.pop("seq", None)
        if type(sequence) is not int or sequence != self._sequence:
            before = type(sequence) is int and 0 < sequence < self._sequence
            hint = "; was the question before this one answered twice?" if before else ""
            text = f"its answer has seq {sequence!r}, and the question had {self._sequence}{hint}"
            return self._broken("garbage", text)
        return answer

    def _exchange(self, process: _Process, line: bytes, patience: float) -> bytes | Broken:
        """Write a line and read one, whichever is possible first, so that the two sides cannot deadlock."""
        end, left, seen = time.monotonic() + patience, memoryview(line), 0
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            ready.register(process.stderr, selectors.EVENT_READ)
            ready.register(process.stdin, selectors.EVENT_WRITE)
            while (line_end := self._read.find(b"\n", seen)) < 0 or left:
                seen = line_end if line_end >= 0 else len(self._read)
                remaining = end - time.monotonic()
                if remaining <= 0:
                    return Broken("timeout", f"no answer within {patience:g} s")
                for key, _ in ready.select(remaining):
                    if key.fd == process.stdin:
                        left = self._write(process, left)
                        if not left:
                            ready.unregister(process.stdin)
                        continue
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        ready.unregister(key.fd)
                    if key.fd == process.stderr:
                        self._words = (self._words + chunk)[-_WORDS:]
                    elif not chunk:
                        return self._death(process, end)
                    else:
                        self._read += chunk
                        if len(self._read) > _LONGEST:
                            return Broken("garbage", f"a line of more than {_LONGEST >> 20} MiB")
        found = bytes(self._read[:line_end])
        del self._read[: line_end + 1]
        return found

    @staticmethod
    def _write(process: _Process, left: memoryview) -> memoryview:
        try:
            return left[os.write(process.stdin, left) :]
        except BlockingIOError:
            return left
        except OSError:  # it no longer reads; its output and exit status tell why
            return left[:0]

    def _death(self, process: _Process, end: float) -> Broken:
        """The exit of the process, now that its output is closed, if it does end."""
        try:
            status = process.popen.wait(max(0.1, min(_ENDING, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            return Broken("crash", "it closed its output")
        with contextlib.suppress(OSError):
            self._words = (self._words + os.read(process.stderr, 1 << 16))[-_WORDS:]
        words = self._words.decode(errors="replace").strip()
        return Broken("crash", _ended(status) + (f"; its last words:\n{words}" if words else ""))

    def _start(self) -> _Process:
        try:
            popen = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                bufsize=0, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise CannotStart(f"{self.command[0]}: {_why(self.command[0], error)}") from None
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._read, self._words = bytearray(), b""
        self._process = _Process(popen, popen.stdin.fileno(), popen.stdout.fileno(), popen.stderr.fileno())
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(pipe, False)
        return self._process

    def _broken(self, kind: str, why: str) -> Broken:
        self.close()
        self._breaks -= 1
        self._silences -= kind == "timeout"
        return Broken(kind, why)

    def close(self) -> None:
        """Kill the process and everything that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        for pipe in (process.popen.stdin, process.popen.stdout, process.popen.stderr):
            if pipe is not None:
                pipe.close()
        process.popen.wait()

    def __enter__(self) -> Testee:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _why(program: str, error: OSError) -> str:
    path = Path(shutil.which(program) or program)
    if isinstance(error, FileNotFoundError) and path.is_file():
        first = path.open("rb").readline(200).decode(errors="replace").strip()
        return f"it is there, but what its first line asks for is not: {first}"
    if isinstance(error, FileNotFoundError):
        return "there is no such program"
    if isinstance(error, PermissionError):
        return "it may not be run (chmod +x?)"
    return error.strerror or str(error)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _ended(status: int | None) -> str:
    if status is not None and status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it ended with status {status}"


def _shown(line: bytes) -> str:
    text = line[:80].decode(errors="backslashreplace")
    return repr(text) + ("..." if len(line) > 80 else "")
