"""The output of a run for people: failures first, each with its clause, its bytes, and how to repeat it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import TracebackType
from typing import Any

from kvproto_conformance.data import sentence
from kvproto_conformance.html import explained
from kvproto_conformance.report import GOOD, headline, text, unasked
from kvproto_conformance.run import PROTOCOL, Result
from kvproto_conformance.testee import NOT_ASKED

Json = dict[str, Any]
_FIRST = 10
"""The number of failures that are printed by default."""


class Progress:
    """A progress line, if stderr is a terminal."""

    def __init__(self, cases: int) -> None:
        self._cases, self._done, self._failed = cases, 0, 0
        self._watched = sys.stderr.isatty()

    def __call__(self, result: Result) -> None:
        self._done += 1
        self._failed += bool(result.wrong)
        if self._watched and (self._done % 20 == 0 or result.wrong):
            print(f"\r{self._done} of {self._cases} cases, {self._failed} wrong ", end="", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watched and self._done:
            print("\r\x1b[K", end="", file=sys.stderr)


def verdict(report: Json, every: bool) -> None:
    """Print failures and what is not as it SHOULD be, then counts, then the verdict."""
    bad = [row for row in report["results"] if row["status"] not in (*GOOD, "known", "unasked")]
    odd = [row for row in report["results"] if row["status"] == "nonstrict"]
    for row in [*bad, *odd] if every else [*bad[:_FIRST], *odd[:_FIRST]]:
        clause = sentence(row["clause"])
        print(f"{_painted(row['status'], '33' if row in odd else '31')}  {row['id']}: {row['note']}")
        print(f"    {row['clause']} ({clause['page']}): {clause['text']}")
        for each in row.get("wrong", ()):
            wrong(each)
        print()
    if len(bad) > _FIRST and not every:
        print(f"... and {len(bad) - _FIRST:,} more; --all prints them, --html and --report keep them\n")
    for line in report["complaints"]:
        print(f"baseline: {line}")
    count = Counter(row["status"] for row in report["results"] if row["suite"] != PROTOCOL)
    beside = Counter(row["status"] for row in report["results"] if row["suite"] == PROTOCOL)
    print(f"{_counts(count)}, in {report['seconds']:.1f} s")
    if beside:
        print(f"beside them, about the testee itself and with numbers that no vector has: {_counts(beside)}")
    for line in unasked(report):
        print(line)
    broken = {row["id"]: [w["got"].get("broken", "") for w in row.get("wrong", ())] for row in report["results"]}
    skipped = {id_: each for id_, why in broken.items() for each in why if each.startswith(NOT_ASKED)}
    if skipped:
        first, why = next(iter(skipped.items()))
        print(f"{len(skipped):,} of them were not asked, from {first} on{why.removeprefix(NOT_ASKED)}")
    if report["left_out"]:
        print(f"{report['left_out']:,} cases of the claim were not asked")
        for what, cases in report.get("wanting", {}).items():
            print(f"    {cases:,} of them need {what}")
    colour = {"conformant": "32", "incomplete": "33"}.get(report["verdict"], "31")
    print(f"{_painted(report['verdict'], colour)}: {headline(report)}")


def _counts(count: Counter[str]) -> str:
    return ", ".join(f"{number:,} {status}" for status, number in count.items())


def wrong(each: Json) -> None:
    """Print one question that was answered wrong, and its bytes."""
    print("    " + text(each).replace("\n", "\n    "))
    lines = explained(each["question"])
    for line in lines[-12:]:
        print(f"      {line}")


def _painted(words: str, colour: str) -> str:
    bright = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[1;{colour}m{words}\x1b[0m" if bright else words
