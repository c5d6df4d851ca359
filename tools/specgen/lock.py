"""Locks of what may not change unnoticed: `clauses.lock`, `registry.lock` and `vectors.lock`, one line per fact.

The first line of a lock is the changelog line that explains its latest change; `renew` writes both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from tools.specgen.clauses import clauses
from tools.specgen.lint import RegistryError
from tools.specgen.registry import ROOT, SPEC, Facts, moves, version

CHANGELOG = ROOT / "CHANGELOG.md"
_FACTS = ("id", "type", "unit", "presence", "since", "min", "max", "length", "secret")


def _clauses(facts: Facts) -> Iterator[tuple[str, str]]:
    for clause in clauses(facts).values():
        yield clause.id, f"{clause.role} {clause.keyword} {clause.error or '-'} {clause.page} {clause.digest}"


def registry_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """Every fact that is on the wire or decides what is refused, as text."""
    for table in ("protocol", "field_ids", "ext"):
        for name, value in facts[table].items():
            yield f"{table}.{name}", str(value)
    for name, value in facts["grease"].items():
        yield f"grease.{name}", str(value)
    for name, doc in facts["predicate"].items():
        yield f"predicate.{name}", doc
    for name, row in facts["limit"].items():
        yield f"limit.{name}", f"{row['value']} {row['unit']} {row['scope']}"
    for name, row in facts["feature"].items():
        yield f"feature.{name}", f"{row['value']} {row['status']}"
    for name, row in facts["error"].items():
        yield f"error.{name}", f"0x{row['code']:04X} {row['class']} {row['recovery']}"
    for name, enum in facts["enum"].items():
        yield f"enum.{name}", "open" if enum["open"] else "closed"
        for member, value in enum["values"].items():
            yield f"enum.{name}.{member}", str(value)
    for kind in ("struct", "message"):
        for name, body in facts[kind].items():
            if kind == "message":
                reply = ", ".join(body["reply"]) or "-"
                behind = f" behind {' or '.join(body['feature'])}" if "feature" in body else ""
                yield (
                    f"message.{name}",
                    f"0x{body['id']:04X} {body['sender']} {body['delivery']} -> {reply}; {body['status']}{behind}",
                )
            for field in body["field"]:
                yield f"{kind}.{name}.{field['name']}", " ".join(f"{k}={field[k]}" for k in _FACTS if k in field)
            for i, rule in enumerate(body.get("rule", ())):
                args = ", ".join(map(str, rule["args"]))
                yield f"{kind}.{name}, rule {i + 1}", f"{rule['rule']}({args}) {rule['error']}"
    for name in facts["machine"]:
        for before, message, after, features in moves(facts, name):
            yield f"machine.{name}.{before}, {message}", f"{after} {' or '.join(features) or '-'}"
    for name, row in facts["profile"].items():
        yield f"profile.{name}", f"{row['kind']} {row.get('status', '-')}; needs {' '.join(row['needs']) or '-'}"
    for name, row in facts["fact"].items():
        yield f"fact.{name}", row["rule"]
    for name, row in facts["metric"].items():
        yield f"metric.{name}", f"{row['type']} {row['unit']} {' '.join(row['labels'])}".rstrip()
    for name, values in facts["metric_label"].items():
        yield f"metric_label.{name}", " ".join(values)
    yield "metric_buckets.second", " ".join(map(str, facts["metric_buckets"]["second"]))
    for name, row in facts.get("conversion", {}).items():  # kept versions may lack it
        yield f"conversion.{name}", f"{row['wide']} {row['narrow']}; scales {row['scales']}"
    for name, row in facts["part"].items():
        scales = ["; scales", row["scales"]] if "scales" in row else []
        optional = ["; optional"] if row.get("optional") else []
        yield f"part.{name}", " ".join([f"of {row.get('of', '-')}:", *row["aliases"], *scales, *optional])


def _vectors(facts: Facts) -> Iterator[tuple[str, str]]:
    for path in sorted((SPEC / "vectors").rglob("*.json")):
        suite = json.loads(path.read_text())
        named = suite.get("geometries", {})
        for case in suite["cases"]:
            known = {k: named[v] if named and k in ("source", "sink") else v for k, v in case.items() if k != "note"}
            text = json.dumps(known, sort_keys=True)
            yield f"{suite['suite']}/{case['id']}", hashlib.sha256(text.encode()).hexdigest()[:16]


_LOCKS = {"clauses": _clauses, "registry": registry_rows, "vectors": _vectors}


def _path(name: str) -> Path:
    return SPEC / f"{name}.lock"


def _held(name: str) -> tuple[str, dict[str, str]]:
    """The reason and the rows of a lock file."""
    if not _path(name).exists():
        return "", {}
    head, *lines = _path(name).read_text().splitlines()
    return head.removeprefix("# "), dict(line.split(" | ", 1) for line in lines)


def differences(facts: Facts) -> list[str]:
    """Differences from the locks, by name, one line each."""
    lines = []
    for name, rows in _LOCKS.items():
        reason, held = _held(name)
        now = dict(_unique(name, rows(facts)))
        if reason not in CHANGELOG.read_text():
            lines.append(f"{name}.lock: the changelog does not have the line {reason!r}")
        for key in [*held, *(k for k in now if k not in held)]:
            before, after = held.get(key), now.get(key)
            if before != after:
                change = "is new" if before is None else "is gone" if after is None else f"was {before}, is {after}"
                lines.append(f"{name}.lock: {key} {change}")
    return lines


def _unique(name: str, rows: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen = set()
    for key, text in rows:
        if key in seen:
            raise RegistryError(f"{name}: {key} comes twice")
        seen.add(key)
        yield key, text


def renew(facts: Facts, why: str) -> list[str]:
    """Write the reason to the changelog, and renew the locks; returns the differences that this settled."""
    why = " ".join(why.split())
    if not why:
        raise RegistryError("a change of what is locked needs a reason")
    settled = [line for line in differences(facts) if "the changelog does not" not in line]
    if not settled:
        return []
    _log(facts, why)
    for name, rows in _LOCKS.items():
        _, held = _held(name)
        now = dict(rows(facts))
        if held != now:
            body = "".join(f"{key} | {value}\n" for key, value in now.items())
            _path(name).write_text(f"# {why}\n{body}")
    return settled


def opened(facts: Facts, why: str) -> None:
    """Write to the changelog, and into all locks, that a candidate was opened."""
    head = f"{version(facts)} is opened: "
    lines = CHANGELOG.read_text().splitlines(keepends=True)
    CHANGELOG.write_text("".join(line for line in lines if not line.startswith(f"* {head}")))
    _log(facts, why := head + why)
    for name, rows in _LOCKS.items():
        body = "".join(f"{key} | {value}\n" for key, value in _unique(name, rows(facts)))
        _path(name).write_text(f"# {why}\n{body}")


def _log(facts: Facts, why: str) -> None:
    """Write a line to the section of today's version, which is begun if there is none."""
    text, section = CHANGELOG.read_text(), f"### Spec {version(facts)}\n\n"
    before, first, after = text.partition("### Spec ")
    if not first:
        raise RegistryError("CHANGELOG.md has no section '### Spec'")
    if section not in text:
        text = f"{before}{section}\n{first}{after}"
    CHANGELOG.write_text(text.replace(section, f"{section}* {why}\n", 1))
