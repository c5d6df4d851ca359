"""Versions meet: what an implementation of one version writes, one of another reads, and they agree on what to speak.

What a reader makes of a later writer's message follows from the two registries and conventions.md: it keeps unknown
values of open enums, skips what may be ignored, and refuses the rest.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvproto_conformance.cases import WRITES, Case, claimed, load, of_minor
from kvproto_conformance.claims import Claim
from kvproto_conformance.codec import Refusal
from kvproto_conformance.data import KEPT, REGISTRY, VECTORS
from kvproto_conformance.negotiation import negotiated
from kvproto_conformance.run import Wrong, run
from kvproto_conformance.testee import Broken, Testee

Json = dict[str, Any]


SESSIONS = {
    "source": ("LIVE-101", "LIVE-102", "LIVE-103", "LIVE-105", "LIVE-111", "LIVE-121"),
    "sink": ("LIVE-301", "LIVE-302", "LIVE-303", "LIVE-305", "LIVE-311", "LIVE-318"),
}
"""By the role of a live engine, scenarios of what is stable, which a peer of any version plays."""


@attrs.frozen
class Version:
    """The registry of a version."""

    facts: Json = attrs.field(repr=False)

    @property
    def terms(self) -> Json:
        """The terms in Hello of an implementation of all of it."""
        protocol = self.facts["protocol"]
        features = sorted(row["value"] for row in self.facts["feature"].values())
        spoken = f"{protocol['major']}.0-{protocol['minor']}"
        return {"versions": [spoken], "offered": [str(feature) for feature in features], "needed": []}

    def body(self, name: str) -> Json | None:
        """A message or struct."""
        found: Json | None = (self.facts["struct"] | self.facts["message"]).get(name)
        return found

    def enum(self, name: str) -> tuple[bool, dict[str, int]]:
        """Whether it is open, and its values."""
        if name == "ErrorCode":
            return True, {code: row["code"] for code, row in self.facts["error"].items()}
        row = self.facts["enum"][name]
        return bool(row["open"]), row["values"]


@attrs.frozen
class Kept:
    """A candidate that is kept: `conformance/versions/NAME`."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def speaking(self) -> list[str]:
        """Beginning of a command of the suite that is to speak this version: with its tables in place of today's."""
        return ["env", f"KVPROTO_REGISTRY={self.folder / 'registry.json'}", sys.executable, "-m"]

    @property
    def command(self) -> list[str]:
        """The command of its testee."""
        return [*self.speaking, "kvproto_conformance.older"]

    def live(self, role: str, ids: Collection[str], adapter: Sequence[str]) -> tuple[bool, str]:
        """Play scenarios with a live engine as a peer of this version: whether none failed, and what was printed."""
        chosen = [word for id_ in ids for word in ("--id", id_)]
        command = [*self.speaking, "kvproto_conformance.live", "--role", role, *chosen, "--", *adapter]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        statuses = {line.partition(" ")[0] for line in said.splitlines()}
        return "pass" in statuses and not statuses & {"fail", "error", "suite-error"}, said

    @property
    def version(self) -> Version:
        """Its registry."""
        return Version(json.loads((self.folder / "registry.json").read_text(encoding="utf-8")))

    def cases(self) -> list[Case]:
        """Its vectors."""
        files = json.loads(lzma.decompress((self.folder / "vectors.json.xz").read_bytes()))
        with tempfile.TemporaryDirectory(prefix="kvproto-kept-") as folder:
            for name, file in files.items():
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(file), encoding="utf-8")
            return load(Path(folder))


def kept() -> list[Kept]:
    """All candidates that are kept, the oldest first."""
    order = [row["version"] for row in json.loads(REGISTRY.read_text(encoding="utf-8"))["candidate"]]
    return [Kept(KEPT / name) for name in order if (KEPT / name).is_dir()]


def last(versions: Sequence[Kept]) -> set[str]:
    """Of each minor version the last candidate: the others were replaced, and nobody has to keep what they said."""
    return set({kept.name.partition("-")[0]: kept.name for kept in versions}.values())


@attrs.frozen
class Sample:
    """Something to say: the fields of a message or struct, in JSON form."""

    id: str
    kind: str
    """message or struct."""
    name: str
    fields: Json = attrs.field(repr=False)

    @property
    def writes(self) -> Json:
        """The question to the writer."""
        op = "encode" if self.kind == "message" else "encode_struct"
        return {"op": op, self.kind: self.name, "fields": self.fields}

    def reads(self, written: str) -> Json:
        """The question to the reader."""
        if self.kind == "message":
            return {"op": "decode", "frame": written}
        return {"op": "decode_struct", "struct": self.name, "bytes": written}

    @property
    def answer(self) -> str:
        """The key of the bytes in the answer of who writes."""
        return "frame" if self.kind == "message" else "bytes"


def samples(cases: Iterable[Case], extensions: Collection[str] = ()) -> list[Sample]:
    """Samples that the vectors of a codec with these extensions have written, each once."""
    found: dict[str, Sample] = {}
    for case in (case for case in cases if case.needs <= {*extensions}):
        for ask in case.asks:
            if (
                case.suite == "codec"
                and ask.question["op"] in ("encode", "encode_struct")
                and "error" not in ask.expected
            ):
                kind = "message" if ask.question["op"] == "encode" else "struct"
                sample = Sample(case.id, kind, ask.question[kind], ask.question["fields"])
                found[json.dumps(sample.writes, sort_keys=True)] = sample
    return list(found.values())


def heard(sample: Sample, writer: Version, reader: Version) -> Json | None:
    """The answer of a reader to what a writer of another version wrote; None where it has no question for it."""
    body = writer.body(sample.name)
    assert body is not None
    if sample.kind == "message":
        majors = [version.facts["protocol"]["major"] for version in (writer, reader)]
        if majors[0] != majors[1] and not body["frozen"]:
            return {"error": "UNSUPPORTED_VERSION", "path": "@major"}
        if reader.body(sample.name) is None:
            return {"error": "UNKNOWN_MESSAGE", "path": "@type"}
    elif reader.body(sample.name) is None:
        return None
    try:
        fields = _map(sample.name, sample.fields, writer, reader, "")
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}
    return {"message": sample.name, "fields": fields} if sample.kind == "message" else {"fields": fields}


def _map(name: str, fields: Json, writer: Version, reader: Version, path: str) -> Json:
    written, read = writer.body(name), reader.body(name)
    assert written is not None
    known = {field["id"]: field for field in read["field"]} if read else {}
    found: Json = {}
    for field in sorted(written["field"], key=lambda field: int(field["id"])):
        if field["name"] not in fields:
            continue
        if field["id"] in known:
            at = f"{path}.{field['name']}" if path else field["name"]
            found[field["name"]] = _value(field["type"], fields[field["name"]], writer, reader, at)
        elif not field["id"] & 0x8000:
            raise Refusal("UNKNOWN_FIELD", f"{path}.#{field['id']:04x}" if path else f"#{field['id']:04x}")
    return found


def _value(type_: str, value: Any, writer: Version, reader: Version, path: str) -> Any:
    if type_.startswith("list<"):
        return [_value(type_[5:-1], each, writer, reader, f"{path}[{i}]") for i, each in enumerate(value)]
    if type_.startswith("struct:"):
        return _map(type_[7:], value, writer, reader, path)
    if not type_.startswith("enum:"):
        return value
    number = int(value["unknown"]) if isinstance(value, dict) else writer.enum(type_[5:])[1][value]
    is_open, values = reader.enum(type_[5:])
    word = next((word for word, each in values.items() if each == number), None)
    if word is None and not is_open:
        raise Refusal("UNKNOWN_ENUM_VALUE", path)
    return {"unknown": str(number)} if word is None else word


def meet(
    said: Iterable[Sample], writer: Testee, reader: Testee, versions: tuple[Version, Version]
) -> Iterator[Wrong | None]:
    """Yield the error of each sample that was written and read; None if all is right."""
    for sample in said:
        expected = heard(sample, *versions)
        if expected is None:
            continue
        written = _answer(writer.ask(sample.writes))
        if not isinstance(data := written.get(sample.answer), str):
            yield Wrong(sample.writes, {sample.answer: "..."}, written)
            continue
        question = sample.reads(data)
        got = _answer(reader.ask(question))
        yield None if got == expected else Wrong(question, expected, got)


def negotiate(testee: Testee, mine: Json, theirs: Json) -> Iterator[Wrong | None]:
    """Whether a testee negotiates with a side of another version as the specification says, in both roles."""
    for sink, source in ((mine, theirs), (theirs, mine)):
        try:
            expected = negotiated(sink, source)
        except Refusal as refusal:
            expected = {"error": refusal.code, "path": refusal.path}
        question = {"op": "negotiate", "sink": sink, "source": source}
        got = _answer(testee.ask(question))
        yield None if got == expected else Wrong(question, expected, got)


def all_of(
    kept: Kept, old: Testee, testee: Testee, claim: Claim, today: Version, vectors: Path = VECTORS
) -> Iterator[tuple[str, list[Wrong], int]]:
    """Comparison of a claim, of version `today`, with a candidate: the subject, failures, number of questions."""
    now = load(vectors)
    replaced = {case.id: case.minors for case in now}
    held = [attrs.evolve(case, minors=replaced.get(case.id, case.minors)) for case in kept.cases()]
    cases = claimed(held, claim)
    results = run(cases, testee)
    yield "its vectors hold", [wrong for result in results for wrong in result.wrong], len(results)
    mine = {case.about for case in cases if case.suite == "codec"}
    said = [sample for sample in samples(kept.cases(), claim.extensions) if sample.name in mine]
    ways = [("it writes, the testee reads", said, old, testee, (kept.version, today))]
    if any(ask.question["op"] in WRITES for case in cases for ask in case.asks):
        ours = [sample for sample in samples(of_minor(now, claim.minor), claim.extensions) if sample.name in mine]
        ways.append(("the testee writes, it reads", ours, testee, old, (today, kept.version)))
    for what, some, writer, reader, versions in ways:
        found = list(meet(some, writer, reader, versions))
        yield what, [wrong for wrong in found if wrong], len(found)
    if any(case.suite == "negotiation" for case in cases):
        found = list(negotiate(testee, today.terms, kept.version.terms))
        yield "they negotiate alike", [wrong for wrong in found if wrong], len(found)


def _answer(found: Json | Broken) -> Json:
    if isinstance(found, Broken):
        return {"broken": found.why}
    return {key: value for key, value in found.items() if key != "text"}
