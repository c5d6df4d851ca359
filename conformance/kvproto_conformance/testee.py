"""Drives a testee: a subprocess that reads a JSON object a line and answers with one.

Level `codec`: `{"op": "decode", "frame": HEX}` is answered by `{"message": NAME, "fields": {...}}` or `{"error": CODE,
"path": PATH}`; `{"op": "encode", "message": NAME, "fields": {...}}` by `{"frame": HEX}`. Bare structs too: `{"op":
"decode_struct", "struct": NAME, "bytes": HEX}` by `{"fields": {...}}` or the error, `{"op": "encode_struct", "struct":
NAME, "fields": {...}}` by `{"bytes": HEX}`.

Level `deal`: a question has a `group`, a Group in JSON form, and `tokens`; numbers are decimal strings, as everywhere.

    owner     {"cp_rank": [...], "row": [...]}    of each token; null where nobody owns it
    length    {"rows": [[...], ...]}              complete rows below each token, of each cp rank
    pages     {"pages": [...]}                    of a table that all ranks share, below each token
    slots     {"slots": [...]}                    of each token on `cp_rank`, by the table `items`; null for none

Level `merge`: `{"op": "merge", "parts": [PART, ...]}` is answered by `{"lse": [...], "out": [[...], ...]}`, in natural
logarithms. A PART has as many `tokens` (read by each row), `lse` and `out` (a list for each row), and the `base` of its
`lse`, "e" or "2". Floats are strings: decimals, of a float32 exactly, or nan, inf, -inf.

A testee that dies or is silent is restarted.
"""

from __future__ import annotations

import json
import selectors
import subprocess
from types import TracebackType
from typing import Any

__all__ = ["Testee"]


class Testee:
    """The implementation under test."""

    def __init__(self, command: list[str], patience: float = 10.0) -> None:
        self._command, self._patience = command, patience
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer; `{"broken": WHY}` where there is none."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return self._broken("it died")
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            if not ready.select(self._patience):
                return self._broken(f"no answer in {self._patience:.0f} s")
        line = process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            return self._broken("it died" if not line else "its answer is not JSON")
        return answer if isinstance(answer, dict) else self._broken("its answer is not an object")

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def _broken(self, why: str) -> dict[str, Any]:
        self.close()
        return {"broken": why}

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> Testee:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
