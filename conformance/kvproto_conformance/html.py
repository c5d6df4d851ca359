"""One or more reports as a single HTML file, light and dark, without scripts or external resources."""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import Any

from kvproto_conformance.claims import SUITES
from kvproto_conformance.data import sentence
from kvproto_conformance.explain import explain
from kvproto_conformance.report import GOOD, headline, text, unasked

Json = dict[str, Any]
_STYLE = """
:root{color-scheme:light dark;--line:#8884;--good:light-dark(#1a7f37,#3fb950);--bad:light-dark(#cf222e,#f85149);--dim:light-dark(#666,#aaa);--odd:light-dark(#9a6700,#d29922)}
body{font:15px/1.5 system-ui,sans-serif;max-width:96rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.pass,.conformant{color:var(--good)}.fail,.error,.unearned,.nonconformant,.invalid-run{color:var(--bad)}.nonstrict,.known,.incomplete{color:var(--odd)}td.d{white-space:nowrap;color:var(--dim)}
.verdict{font-weight:700}.dim{color:var(--dim)}pre{overflow-x:auto;background:#8881;padding:.6rem;border-radius:.3rem;font-size:13px}
code{overflow-wrap:anywhere}@media(min-width:60rem){td:first-child code{white-space:nowrap}}
@media(max-width:40rem){body{margin:1rem auto;padding:0 .6rem}th,td{padding:.25rem .3rem}}
details{border-bottom:1px solid var(--line);padding:.3rem 0}summary{cursor:pointer}
"""
_HEX = 2048
"""Digits of a frame that are explained."""


def page(report: Json) -> str:
    """Verdict, suites, what failed with its bytes explained, and every clause with its cases."""
    rows = [row for row in report["results"] if row["status"] != "unasked"]
    bad = [row for row in rows if row["status"] not in GOOD]
    testee = report["testee"]
    parts = [
        f"<h1>{escape(headline(report))}</h1>",
        f'<p><span class="verdict {report["verdict"]}">{report["verdict"]}</span> · {escape(testee["name"])} {escape(testee["version"])}'
        f" ({escape(testee['language'])}) · {report['date']} · {report['seconds']:.1f} s · seed {report['seed']}</p>",
        f'<p class="dim">suite {escape(report["suite"])} · vectors {report["vectors"][:16]} · <code>{escape(" ".join(report["command"]))}</code></p>',
        *(f'<p class="fail">{escape(line)}</p>' for line in report["complaints"]),
        f'<p class="incomplete">{report["left_out"]:,} cases of the claim were not asked{_wanting(report)}.</p>'
        if report["left_out"]
        else "",
        *(f'<p class="dim">{escape(line)}</p>' for line in unasked(report)),
        "<h2>Suites</h2>",
        _suites(rows),
        f"<h2>What did not pass ({len(bad):,})</h2>" if bad else "",
        *(_failed(row) for row in bad[:200]),
        f"<p>and {len(bad) - 200:,} more</p>" if len(bad) > 200 else "",
        "<h2>Clauses</h2>",
        _clauses(rows),
    ]
    return _document("kvproto conformance", "\n".join(parts))


def _wanting(report: Json) -> str:
    """The needs of the cases that were left out."""
    needs = [f"{cases:,} need {what}" for what, cases in report.get("wanting", {}).items()]
    return escape(f": {', '.join(needs)}") if needs else ""


def _suites(rows: list[Json]) -> str:
    count = Counter((row["suite"], row["status"] in GOOD) for row in rows)
    names = dict.fromkeys(row["suite"] for row in rows)
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(SUITES[name].says if name in SUITES else 'the testee itself')}</td>"
        f'<td class="n">{count[name, True]:,}</td><td class="n">{count[name, True] + count[name, False]:,}</td></tr>'
        for name in names
    )
    return f'<table><tr><th>suite</th><th></th><th class="n">passed</th><th class="n">of</th></tr>{body}</table>'


def _failed(row: Json) -> str:
    clause = sentence(row["clause"])
    parts = [f"<p>{_prose(clause['text'])}</p>"]
    for wrong in row.get("wrong", ()):
        parts.append(f"<pre>{escape(text(wrong))}</pre>")
        if lines := explained(wrong["question"]):
            parts.append(f"<pre>{escape(chr(10).join(lines))}</pre>")
    if row.get("wire"):
        parts.append(f"<p>What both sides said:</p><pre>{escape(chr(10).join(row['wire']))}</pre>")
    return (
        f'<details><summary><span class="{row["status"]}">{row["status"]}</span> <code>{escape(row["id"])}</code> '
        f'{escape(row["note"])} <span class="dim">{escape(row["clause"])}</span></summary>{"".join(parts)}</details>'
    )


def explained(question: Json) -> list[str]:
    """The annotated bytes of a question that has some."""
    digits = question.get("frame") or question.get("bytes") or ""
    if not digits or len(digits) > _HEX:
        return []
    return explain(bytes.fromhex(digits), question.get("struct", ""))


def _clauses(rows: list[Json]) -> str:
    by_clause: dict[str, list[Json]] = {}
    for row in rows:
        by_clause.setdefault(row["clause"], []).append(row)
    body = "".join(
        f"<tr><td><code>{escape(clause)}</code></td><td>{_prose(sentence(clause)['text'])}</td>"
        f'<td class="n">{"".join(_mark(bad, len(some)))}</td></tr>'
        for clause, some in sorted(by_clause.items())
        for bad in [sum(row["status"] not in GOOD for row in some)]
    )
    return f'<table><tr><th>clause</th><th></th><th class="n">cases</th></tr>{body}</table>'


def _prose(text: str) -> str:
    """A sentence of the specification, with its code as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _mark(bad: int, all_: int) -> str:
    return f'<span class="fail">{all_ - bad:,}/{all_:,}</span>' if bad else f'<span class="pass">{all_:,}</span>'


def matrix(reports: list[Json]) -> str:
    """A table of implementations by suite, from several reports."""
    names = [name for name in SUITES if any(name in _counts(report) for report in reports)]
    head = "".join(f'<th class="n">{name}</th>' for name in names)
    body = "".join(
        f'<tr><td>{escape(_who(report))}</td><td class="d">{escape(_claim(report))}</td>'
        f'<td class="{report["verdict"]}">{report["verdict"]}</td>'
        + "".join(f'<td class="n">{_cell(report, name)}</td>' for name in names)
        + f'<td class="d">{report["date"][:10]}</td></tr>'
        for report in reports
    )
    table = f"<table><tr><th>implementation</th><th>claim</th><th>verdict</th>{head}<th>date</th></tr>{body}</table>"
    return _document("kvproto: who keeps the contract", f"<h1>kvproto: who keeps the contract</h1>\n{table}")


def matrix_text(reports: list[Json]) -> str:
    """The same in Markdown: a table of implementations, and one of suites, with a column for each implementation."""
    lines = ["| implementation | claim | verdict | cases | date |", "|---|---|---|---:|---|"]
    counts = [_counts(report) for report in reports]
    for report, own in zip(reports, counts, strict=True):
        who, claim = (_cell_text(words) for words in (_who(report), _claim(report)))
        cases = _cell_counts(sum(good for good, _ in own.values()), sum(number for _, number in own.values()))
        lines.append(f"| {who} | {claim} | {report['verdict']} | {cases} | {report['date'][:10]} |")
    heads = [_cell_text(f"{report['testee']['name']} {report['claim']['level']}") for report in reports]
    lines += ["", f"| suite | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name in SUITES:
        if any(name in own for own in counts):
            lines.append(f"| {name} | {' | '.join(_cell_counts(*own.get(name, (0, 0))) for own in counts)} |")
    return "\n".join(lines) + "\n"


def _cell_counts(good: int, number: int) -> str:
    """Number of cases if all passed; otherwise the number that passed too."""
    return f"{number:,}" if good == number > 0 else f"{good:,}/{number:,}" if number else ""


def _cell_text(words: str) -> str:
    """Words of a testee as the text of one cell of a table in Markdown, whatever they contain."""
    printable = "".join(c if c.isprintable() else " " for c in words)
    return escape(printable, quote=False).replace("|", "\\|")


def _who(report: Json) -> str:
    testee = report["testee"]
    return " ".join(word for word in (testee["name"], testee["version"], f"({testee['language']})") if "?" not in word)


def _claim(report: Json) -> str:
    """The role and level; the columns show which extensions."""
    claim = report["claim"]
    return f"{claim['role']} · {claim['level']}" + (f" of {', '.join(claim['messages'])}" if claim["messages"] else "")


def _counts(report: Json) -> dict[str, tuple[int, int]]:
    """By suite, how many cases passed, and of how many."""
    all_ = Counter(row["suite"] for row in report["results"] if row["status"] != "unasked")
    good = Counter(row["suite"] for row in report["results"] if row["status"] in GOOD)
    return {name: (good[name], number) for name, number in all_.items()}


def _cell(report: Json, name: str) -> str:
    good, all_ = _counts(report).get(name, (0, 0))
    return _mark(all_ - good, all_) if all_ else ""


def _document(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )
