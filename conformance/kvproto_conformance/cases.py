"""Cases are data: the questions for a testee, and the answers that it must give."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from kvproto_conformance.claims import SUITES, Claim, extensions_of, extensions_with
from kvproto_conformance.codec.facts import MESSAGE_TYPES
from kvproto_conformance.data import VECTORS, sentence

Json = dict[str, Any]
WRITES = frozenset({"encode", "encode_struct"})
"""Questions that are not for readers."""


_WRITING = frozenset({"KVP-JSON-RANGE", "KVP-JSON-REQUIRED", "KVP-JSON-RULE", "KVP-BODY-W-FORM"})
"""Clauses of the JSON form that say what no writer may write, whatever form it is given."""


@attrs.frozen
class Ask:
    """One question and its answer."""

    question: dict[str, Any]
    expected: dict[str, Any]
    """The exact answer of the testee."""
    tolerance: float = 0.0
    """The error that a number of the answer may have, as a multiple of its size or of 1, whichever is greater."""
    more: bool = False
    """Whether the answer may have keys that are not in `expected`."""
    declined: dict[str, Any] | None = None
    """The refusal that is as good, of a testee that does not claim the extension which this needs."""


@attrs.frozen
class Case:
    """One thing that a testee must get right, in one or two questions."""

    id: str
    clause: str
    suite: str
    asks: tuple[Ask, ...]
    note: str
    about: str = ""
    """The message or struct that it is about, if any."""
    needs: frozenset[str] = frozenset()
    """Extensions that a claim needs for this case to apply."""
    either: frozenset[str] = frozenset()
    """Extensions of which a claim needs one, as its message or struct belongs to no other profile."""
    role: str = ""
    """Source or sink, if the case is for one role only."""
    beyond: tuple[tuple[str, str], ...] = ()
    """Extensions that its Descriptions need, and where a planner without them refuses (KVP-GEO-UNSUPPORTED)."""
    minors: range = range(256)
    """The minor versions whose implementations are asked: from that of what it is about, until it is replaced."""

    @property
    def must(self) -> bool:
        """Whether its clause is a MUST; breaking a SHOULD only makes a pass non-strict."""
        return not sentence(self.clause)["keyword"].startswith(("SHOULD", "MAY"))

    @property
    def refusing(self) -> bool:
        """Whether the right answer is a refusal."""
        return bool(self.asks) and all("error" in ask.expected for ask in self.asks)


def load(folder: Path = VECTORS) -> list[Case]:
    """All cases of a folder, by suite, then by file, then in file order; the suite's own are read once."""
    return [*_own()] if folder == VECTORS else _read(folder)


@cache
def _own() -> tuple[Case, ...]:
    return (*_read(VECTORS),)


def _read(folder: Path) -> list[Case]:
    found = []
    for pattern, cases_of in _FILES.items():
        for path in sorted(folder.glob(pattern)):
            file = json.loads(path.read_text())
            for row in file["cases"]:
                for suite, asks in cases_of(file, row):
                    name = suite if suite in _CLAUSES else file["suite"]
                    clause = _CLAUSES.get(suite, row["clause"])
                    needs = extensions_of(suite, row.get("features", [])) | {*row.get("extensions", ())}
                    about = _about(row)
                    either = extensions_with(row.get("message") or row.get("struct") or about)
                    beyond = tuple((each["extension"], each["path"]) for each in row.get("beyond", ()))
                    minors = range(_minor(row.get("as_of", "1.0")), _minor(row.get("until", "1.256")))
                    of = Case(f"{name}/{row['id']}", clause, suite, asks, row["note"], about, needs, either)
                    found.append(attrs.evolve(of, beyond=beyond, minors=minors))
    return sorted(found, key=lambda case: [*SUITES].index(case.suite))


def _minor(version: str) -> int:
    return int(version.partition(".")[2])


def of_minor(cases: Iterable[Case], minor: int) -> list[Case]:
    """The cases for an implementation that was made for a minor version; the frames that it writes say so."""
    return [
        attrs.evolve(case, asks=tuple(_written(ask, minor) for ask in case.asks))
        for case in cases
        if minor in case.minors
    ]


def _written(ask: Ask, minor: int) -> Ask:
    """A question, with the minor version in the frame that is to be written; that of a message of major 0 stays."""
    frame = str(ask.expected.get("frame", ""))
    if int(frame[8:10] or "0", 16) == 0 or int(frame[10:12], 16) == minor:
        return ask
    return attrs.evolve(ask, expected=ask.expected | {"frame": f"{frame[:10]}{minor:02x}{frame[12:]}"})


def claimed(cases: Iterable[Case], claim: Claim) -> list[Case]:
    """The cases by which a claim is judged; a reader only reads."""
    roles = {"", "source", "sink"} if claim.role == "both" else {"", claim.role}
    cases = of_minor(cases, claim.minor)
    found = [
        easier(c, claim.extensions)
        for c in cases
        if c.role in roles and claim.asks(c.suite, c.needs, c.either, c.about)
    ]
    if claim.role != "reader":
        return found
    read = [attrs.evolve(c, asks=tuple(ask for ask in c.asks if ask.question["op"] not in WRITES)) for c in found]
    return [case for case in read if case.asks]


def easier(case: Case, extensions: Collection[str]) -> Case:
    """The case for a claim with these extensions: without one that it needs, a refusal is as good as the answer."""
    path = next((path for name, path in case.beyond if name not in extensions), None)
    refusal = {"error": "LAYOUT_UNSUPPORTED", "path": path}
    return (
        case if path is None else attrs.evolve(case, asks=tuple(attrs.evolve(a, declined=refusal) for a in case.asks))
    )


Asked = Iterator[tuple[str, tuple[Ask, ...]]]
"""The suite and the questions of each case that a row of a file makes."""


def _about(row: Json) -> str:
    """The struct or message of a row; for refused bytes, what their envelope says."""
    if "bytes" not in row or "struct" in row:
        return str(row.get("struct", ""))
    layout = MESSAGE_TYPES.get(int.from_bytes(bytes.fromhex(row["bytes"][12:16]), "little"))
    return layout.name if layout else ""


def _codec(file: Json, row: Json) -> Asked:
    yield "codec", _read_and_written(row)


def _negotiated(file: Json, row: Json) -> Asked:
    question = {"op": "negotiate", "sink": row["sink"], "source": row["source"]}
    answer: Json = {key: row[key] for key in ("version", "features") if key in row}
    yield "negotiation", (Ask(question, answer or _refused(row)),)


def _dealt(file: Json, row: Json) -> Asked:
    yield row["level"], (Ask(row["question"], row["expected"], float(row.get("tolerance", 0))),)


def _planned(file: Json, row: Json) -> Asked:
    """Resolve Descriptions that the row names; in such files, what is expected leaves out the routes."""
    named = file.get("geometries", {})
    source, sink = (named[row[side]] if named else row[side] for side in ("source", "sink"))
    question = {"op": "plan", "source": source, "sink": sink, "features": row["features"]}
    yield "plan", (Ask(question, row.get("expected") or _refused(row), more=bool(named)),)


def _lowered(file: Json, row: Json) -> Asked:
    sides = {side: row[side] for side in ("source", "sink")}
    yield "lowering", (Ask({"op": "lower", **sides}, {"copies": row["expected"]}),)
    yield "verify", (Ask({"op": "checksums", **sides}, {"checksums": row["sums"]}),)
    yield "stream", (Ask({"op": "stream", **sides}, {"stream": row["stream"]}),)


def _late(file: Json, row: Json) -> Asked:
    question = {"op": "late", **{key: row[key] for key in ("group", "cp_rank", "since", "grant")}}
    answer: Json = {key: row[key] for key in ("begins", "window") if key in row}
    yield "late", (Ask(question, answer or _refused(row)),)


def _inline(file: Json, row: Json) -> Asked:
    question = {"op": "inline", **{key: row[key] for key in ("length", "total", "data")}}
    yield "inline", (Ask(question, row["expected"]),)


def _converted(file: Json, row: Json) -> Asked:
    asked = {key: row[key] for key in ("conversion", "dtype", "data", "scales", "blocks")}
    yield "convert", (Ask({"op": "convert", **asked}, row["expected"]),)


def _json_form(file: Json, row: Json) -> Asked:
    """Cases of a reader of the JSON form: it answers canonical bytes, or a refusal."""
    kind = "struct" if "struct" in row else "message"
    question = {"op": "encode_struct" if kind == "struct" else "encode", kind: row[kind], "fields": row["fields"]}
    answer = {"bytes" if kind == "struct" else "frame": row["bytes"]} if "bytes" in row else _refused(row)
    suite = "writing" if row["clause"] in _WRITING else "json"
    yield "tickets" if row[kind] == "Ticket" else suite, (Ask(question, answer),)


def _streamed(file: Json, row: Json) -> Asked:
    yield "streams", (Ask({"op": "decode_stream", "chunks": row["chunks"]}, {"frames": row["frames"]}),)


_CLAUSES = {"verify": "KVP-VERIFY-SOURCE", "stream": "KVP-STG-ORDER"}
"""The cases of suites that share the rows of another."""
_FILES: dict[str, Callable[[Json, Json], Asked]] = {
    "codec/*.json": _codec, "json.json": _json_form, "streams.json": _streamed, "negotiation.json": _negotiated,
    "dcp.json": _dealt, "plan/*.json": _planned, "lowering*.json": _lowered, "late.json": _late, "inline.json": _inline,
    "conversion.json": _converted,
}  # fmt: skip


def _refused(row: Json) -> Json:
    return {"error": row["error"], "path": row["path"]}


def _read_and_written(row: Json) -> tuple[Ask, ...]:
    """A frame or bare struct: a writer must reproduce what a reader accepts, except for what may be ignored."""
    expected: dict[str, Any] = {k: row[k] for k in ("message", "fields", "error", "path") if k in row}
    if (struct := row.get("struct")) is not None:
        read = Ask({"op": "decode_struct", "struct": struct, "bytes": row["bytes"]}, expected)
        written = Ask({"op": "encode_struct", "struct": struct, "fields": row.get("fields")}, {"bytes": row["bytes"]})
    else:
        read = Ask({"op": "decode", "frame": row["bytes"]}, expected)
        written = Ask({"op": "encode", **expected}, {"frame": row["bytes"]})
    return (read, written) if "fields" in row and row.get("canonical", True) else (read,)
