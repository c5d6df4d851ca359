"""A run as JSON (report.schema.json), and its other forms: JUnit, a badge, and a summary in Markdown."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import attrs

from kvproto_conformance.claims import Claim
from kvproto_conformance.codec.facts import MAJOR, MINOR
from kvproto_conformance.data import digest, sentence, spec
from kvproto_conformance.run import PROTOCOL, Greeting, Result, Status, Verdict

Json = dict[str, Any]
SCHEMA = 1
COLOURS = {"conformant": "brightgreen", "incomplete": "yellow", "nonconformant": "red", "invalid-run": "lightgrey"}
GOOD = (Status.PASS, Status.NONSTRICT, Status.DECLINED)
_FORM = Path(__file__).with_name("report.schema.json")


_UNPRINTABLE = re.compile(r"[^\n\t -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class BadReport(Exception):
    """The file is not a report of this suite."""


@attrs.frozen
class Run:
    """Everything about one run."""

    suite: str
    """The suite's version."""
    command: tuple[str, ...]
    greeting: Greeting
    claim: Claim
    seed: int
    results: tuple[Result, ...]
    verdict: Verdict
    seconds: float
    left_out: int
    """The number of cases of the claim that were filtered out, or cannot run in this suite."""
    complaints: tuple[str, ...] = ()
    """Defects of the baseline."""
    vectors: Path | None = None
    """The folder of the cases, if it is not the suite's own."""
    engines: Mapping[str, Sequence[str]] = attrs.Factory(dict)
    """By role, the command of the live engine's adapter."""
    wanting: Mapping[str, int] = attrs.Factory(dict)
    """Needs of the cases that were left out, and how many need each."""

    def json(self) -> Json:
        """The report, with the questions and answers of cases that did not pass."""
        ofclaim = [result for result in self.results if result.case.suite != PROTOCOL]
        counted = [result for result in ofclaim if result.status is not Status.UNASKED]
        unasked = Counter(result.why for result in ofclaim if result.status is Status.UNASKED)
        return {
            "schema": SCHEMA,
            "spec": _spec(self.claim.minor),
            "suite": self.suite,
            "vectors": digest(self.vectors) if self.vectors else digest(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": list(self.command),
            **({"engines": {role: list(words) for role, words in self.engines.items()}} if self.engines else {}),
            "testee": {
                "name": self.greeting.name,
                "version": self.greeting.version,
                "language": self.greeting.language,
            },
            "claim": {
                "role": self.claim.role,
                "level": self.claim.level,
                "extensions": sorted(self.claim.extensions),
                "messages": sorted(self.claim.messages),
            },
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "verdict": self.verdict.name.lower().replace("_", "-"),
            "passed": sum(result.status in GOOD for result in counted),
            "cases": len(counted),
            "left_out": self.left_out,
            **({"wanting": dict(self.wanting)} if self.wanting else {}),
            **({"unasked": dict(unasked)} if unasked else {}),
            "complaints": list(self.complaints),
            "results": [_row(result) for result in self.results],
        }


def _spec(minor: int) -> str:
    """The version of a claim: the suite's, or an earlier minor version."""
    return spec() if minor == MINOR else f"{MAJOR}.{minor}"


def _row(result: Result) -> Json:
    case = result.case
    row = {"id": case.id, "suite": case.suite, "clause": case.clause, "must": case.must, "status": str(result.status)}
    row |= {"seconds": round(result.seconds, 4), "note": case.note} | ({"why": result.why} if result.why else {})
    wrong = [{"question": w.question, "expected": w.expected, "got": w.got} for w in result.wrong]
    if wrong:
        row["wrong"] = wrong
    return row | ({"wire": list(result.wire)} if result.wire else {})


def read(path: Path) -> Json:
    """Read a report from a file; raises BadReport."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadReport(f"{path}: {error.strerror}") from None
    except ValueError:
        raise BadReport(f"{path}: not JSON") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or "results" not in found:
        raise BadReport(f"{path}: no report of this suite (schema {SCHEMA})")
    if lacking := next(_lacking(found, json.loads(_FORM.read_text(encoding="utf-8")), ""), None):
        raise BadReport(f"{path}: a damaged report: {lacking}")
    return found


_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def _lacking(value: Any, schema: Json, path: str) -> Iterator[str]:
    """Yield what a report lacks of its schema: keys that are required, and types."""
    wanted = schema.get("type")
    if wanted and not isinstance(value, _TYPES[wanted]):
        yield f"{path or 'the whole'} is not of type {wanted}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}"
    yield from (f"{path}.{key}".lstrip(".") + " is missing" for key in schema.get("required", ()) if key not in value)
    for key, inner in schema.get("properties", {}).items():
        if key in value:
            yield from _lacking(value[key], inner, f"{path}.{key}".lstrip("."))
    if "items" in schema:
        for i, each in enumerate(value):
            yield from _lacking(each, schema["items"], f"{path}[{i}]")


def headline(report: Json) -> str:
    """`kvproto 1.0-rc1 · reader · L1 · 2,180/2,180`."""
    claim = report["claim"]
    words = [f"kvproto {report['spec']}", claim["role"], claim["level"], *claim["extensions"]]
    some = [f"of {', '.join(claim['messages'])}"] if claim["messages"] else []
    return " · ".join([*words, *some, f"{report['passed']:,}/{report['cases']:,}"])


def unasked(report: Json) -> list[str]:
    """Lines about what was not asked of this engine and counts neither way, with the reason; empty if there is none."""
    rows = [row for row in report["results"] if row["status"] == Status.UNASKED]
    said = [
        f"not asked, and not counted: {number:,} scenarios {why}: "
        + ", ".join(row["id"] for row in rows if row["why"] == why)
        for why, number in report.get("unasked", {}).items()
    ]
    if said and "inline" not in report["claim"]["extensions"]:
        said.append("its bytes went by INLINE, which is not claimed: wrong Data and Credit were not tried")
    return said


def badge(report: Json) -> str:
    """An endpoint of shields.io."""
    label, _, message = headline(report).partition(" · ")
    found = {"schemaVersion": 1, "label": label, "message": message, "color": COLOURS[report["verdict"]]}
    return json.dumps(found, ensure_ascii=False) + "\n"


def junit(report: Json) -> str:
    """JUnit XML: each suite is a test suite, the clause is the class, and the id is the name."""
    by_suite: dict[str, list[Json]] = {}
    for row in report["results"]:
        by_suite.setdefault(row["suite"], []).append(row)
    top = xml.Element("testsuites", name=headline(report), time=str(report["seconds"]))
    for name, rows in by_suite.items():
        count = Counter(row["status"] for row in rows)
        failures, errors = count["fail"] + count["unearned"], count["error"] + count["suite-error"]
        skipped = count["known"] + count["unasked"]
        said = {"failures": failures, "errors": errors, "skipped": skipped, "tests": len(rows)}
        suite = xml.SubElement(top, "testsuite", {"name": name} | {key: str(n) for key, n in said.items()})
        for row in rows:
            case = xml.SubElement(suite, "testcase", classname=row["clause"], name=row["id"], time=str(row["seconds"]))
            kind = {
                "fail": "failure",
                "unearned": "failure",
                "error": "error",
                "suite-error": "error",
                "known": "skipped",
                "unasked": "skipped",
            }.get(row["status"])
            if kind:
                words = sentence(row["clause"])["text"]
                found = xml.SubElement(case, kind, message=_printable(row.get("why") or words or row["note"]))
                found.text = "\n".join(_printable(text(w)) for w in row.get("wrong", ()))
    xml.indent(top)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(top, encoding="unicode") + "\n"


def _printable(text: str) -> str:
    """The text without the control characters that XML does not allow."""
    return _UNPRINTABLE.sub("?", text)


def text(wrong: Json) -> str:
    """The question, the expectation and the answer, one line each, shortened if long."""
    rows = (("asked", wrong["question"]), ("expected", wrong["expected"]), ("got", wrong["got"]))
    return "\n".join(f"{name:<9}{short(value)}" for name, value in rows)


def short(value: Any, size: int = 400) -> str:
    """A value as one line of JSON; if it is long, only its beginning and its end."""
    if isinstance(value, dict) and set(value) == {"broken"}:
        return f"no answer: {value['broken']}"
    line = json.dumps(value, ensure_ascii=False)
    return line if len(line) <= size else f"{line[: size // 2]} ... {line[-size // 4 :]}"


def summary(report: Json) -> str:
    """Markdown for the summary of a CI job."""
    count = Counter((row["suite"], row["status"]) for row in report["results"])
    suites = list(dict.fromkeys(row["suite"] for row in report["results"]))
    lines = [f"### {headline(report)}: {report['verdict']}", "", "| suite | passed | of |", "|---|---|---|"]
    for suite in suites:
        all_ = sum(n for (name, status), n in count.items() if name == suite and status != Status.UNASKED)
        lines.append(f"| {suite} | {sum(count[suite, status] for status in GOOD)} | {all_} |")
    lines += [f"\n{line}" for line in unasked(report)]
    bad = [row for row in report["results"] if row["status"] not in (*GOOD, Status.KNOWN, Status.UNASKED)]
    if bad:
        lines += ["", "| case | clause | status | |", "|---|---|---|---|"]
        lines += [f"| {row['id']} | {row['clause']} | {row['status']} | {row['note']} |" for row in bad[:20]]
        lines += [f"\nand {len(bad) - 20} more"] if len(bad) > 20 else []
    return "\n".join(lines) + "\n"
