"""Drives a testee: a subprocess that reads a JSON object a line and answers with one.

Level `codec`: `{"op": "decode", "frame": HEX}` is answered by `{"message": NAME, "fields": {...}}` or `{"error": CODE,
"path": PATH}`; `{"op": "encode", "message": NAME, "fields": {...}}` by `{"frame": HEX}`. Bare structs too: `{"op":
"decode_struct", "struct": NAME, "bytes": HEX}` by `{"fields": {...}}` or the error, `{"op": "encode_struct", "struct":
NAME, "fields": {...}}` by `{"bytes": HEX}`.

Level `negotiation`: `{"op": "negotiate", "sink": TERMS, "source": TERMS}` by `{"version": "1.0", "features": [...]}`,
or the error of the source's Refused. TERMS are `versions` as "1.0-7" (major, lowest and highest minor), and the numbers
of features that are `offered` and `needed`.

Level `deal`: a question has a `group`, a Group in JSON form, and `tokens`; numbers are decimal strings, as everywhere.

    owner     {"cp_rank": [...], "row": [...]}    of each token; null where nobody owns it
    length    {"rows": [[...], ...]}              complete rows below each token, of each cp rank
    pages     {"pages": [...]}                    of a table that all ranks share, below each token
    slots     {"slots": [...]}                    of each token on `cp_rank`, by the table `items`; null for none

Level `merge`: `{"op": "merge", "parts": [PART, ...]}` is answered by `{"lse": [...], "out": [[...], ...]}`, in natural
logarithms. A PART has as many `tokens` (read by each row), `lse` and `out` (a list for each row), and the `base` of its
`lse`, "e" or "2". Floats are strings: decimals, of a float32 exactly, or nan, inf, -inf.

Level `plan`: `{"op": "plan", "source": GEOMETRY, "sink": GEOMETRY, "features": [NAME, ...]}` is answered by `{"plan":
HEX, "routes": [{"source": RANK, "sink": RANK, "group": GROUP, "digest": HEX}, ...], "required": {RANK: [RANK, ...]},
"cold": [MODEL, ...]}`, or by the error of the first thing that is wrong: of the source's Description, of the sink's, of
the pair. Routes are those of all ranks, ascending; required are the source ranks that a sink rank awaits.

Level `lowering`: `{"op": "lower", "source": SIDE, "sink": SIDE}` by `{"copies": [[REGION, OFFSET, REGION, OFFSET,
BYTES], ...]}`: what is copied from where at the source to where at the sink, as runs of bytes that are contiguous on
both sides and as long as they can be, by ascending place at the sink. A SIDE has a `geometry`, its `rank`, the rank's
`columns` as in Register, and as `windows` its grants as in Transfer.

Level `verify`: `{"op": "checksums", "source": SIDE, "sink": SIDE}` by `{"checksums": {GROUP: SUM}}`, by the sink's
groups. Byte o of region r of the source's memory is (7 o + r) mod 256.

Level `late`: `{"op": "late", "group": GROUP, "cp_rank": N, "since": [TOKEN, ...], "grant": GRANT}` by `{"window":
GRANT}`, what is served of the grant, and where that begins later than it asks, `"begins": TOKEN`; or by the error.
`since` are the first tokens that the source still has, of each of its groups from which the sink's group is filled.

Level `stream`: `{"op": "stream", "source": SIDE, "sink": SIDE}` by `{"stream": [[REGION, OFFSET, REGION, OFFSET,
BYTES], ...]}`: the runs of level `lowering` in the order in which they are packed, as long as they are contiguous on
both sides and in the stream.

Level `inline`: `{"op": "inline", "length": N, "total": N, "data": [[OFFSET, BYTES, LAST], ...]}`: a sink expects a
stream of so many bytes and has granted so many in all, for which these Data come. The answer is `{"unpacked": N,
"counted": N}`, and where one was refused, which ended the transfer, `"refused": [WHICH, CODE, PATH]`, from 0. LAST is
"true" or "false".

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
