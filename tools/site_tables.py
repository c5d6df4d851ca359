"""Tables of the site: numbers to the right, rows that may be cards, and the page of clauses ready for its filter."""

from __future__ import annotations

import html
import re

from tools.specgen.clauses import Clause, binds
from tools.specgen.registry import Facts

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<t([hd])([^>]*)>(.*?)</t\1>", re.DOTALL)
_NUMBER = re.compile(r"[-+~]?(?:\d[\d,. ]*|0x[0-9A-F]+)(?: ?[%x])?(?:, p?\d[\d,.]*)?")
_TAG = re.compile(r"<[^>]+>")
_LONG = 40
_TEXTS = 4
"""Rows become cards on a narrow screen if a cell has more than these characters, or if so many columns are words."""
_CLAUSE = re.compile(r"<tr>(\s*<td[^>]*>(?:<a[^>]*>)?<code>(KVP-[A-Z0-9-]+)</code>)")


def laid_out(page: str) -> str:
    """The HTML of a page, with the cells of its tables marked for site.css."""
    return _TABLE.sub(lambda m: _table(m[0]), page)


def _table(table: str) -> str:
    rows = [_CELL.findall(row) for row in _ROW.findall(table)]
    heads, body = [_text(cell) for _, _, cell in rows[0]], rows[1:]
    columns = [[_text(row[i][2]) for row in body if i < len(row)] for i in range(len(heads))]
    numeric = [any(c) and all(_NUMBER.fullmatch(cell) for cell in c if cell) for c in columns]
    long = [any(len(cell) > _LONG for cell in c) for c in columns]
    cards = (len(heads) > 2 and any(long)) or len(heads) - sum(numeric) >= _TEXTS

    def row(match: re.Match[str]) -> str:
        column = iter(range(len(heads)))
        return f"<tr>{_CELL.sub(lambda m: cell(m, next(column)), match[1])}</tr>"

    def cell(match: re.Match[str], column: int) -> str:
        marks = ' class="number"' if numeric[column] else ""
        if match[1] == "d" and cards:
            marks += f' data-head="{html.escape(heads[column])}"' + " data-long" * long[column]
        return f"<t{match[1]}{match[2]}{marks}>{match[3]}</t{match[1]}>"

    return _ROW.sub(row, table).replace("<table>", "<table data-cards>" if cards else "<table data-scrolls>", 1)


def _text(cell: str) -> str:
    return html.unescape(_TAG.sub("", cell)).strip()


def filterable(page: str, known: dict[str, Clause], facts: Facts) -> str:
    """The page of clauses, whose rows say what clauses.js filters by; exemptions below name some of them again."""
    left = dict(known)

    def marked(match: re.Match[str]) -> str:
        if (clause := left.pop(match[2], None)) is None:
            return match[0]
        sides = " ".join(side for side in ("source", "sink") if binds(clause, side))
        says = {
            "id": clause.id,
            "data-role": clause.role,
            "data-profile": facts["profile"][clause.profile]["title"],
            "data-page": clause.page.removesuffix(".md"),
            "data-sides": sides,
        }
        return "<tr " + " ".join(f'{name}="{html.escape(value)}"' for name, value in says.items()) + f">{match[1]}"

    return _CLAUSE.sub(marked, page)
