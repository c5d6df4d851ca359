"""Owners of an engine's pages, by request, and what each page must hold: only granted pages may change."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvproto import Pool

from .labels import GROUP, PAGE, Cells, Found, blank, cells, found, places, read

__all__ = ["Book", "Finding", "Shelf"]

Name = tuple[int, int]
"""A request and its attempt."""


@attrs.frozen
class Finding:
    """Something that must never happen."""

    kind: str
    text: str
    victim: Name | None = None
    author: Name | None = None
    """The request that wrote what was found, by its label."""
    torn: bool = False
    """Whether what was found is not a label."""


class Shelf:
    """Pages of a pool, and what they should hold. Freed pages are filled with what no peer may see, and used next."""

    def __init__(self, pool: Pool, whose: int) -> None:
        """`whose` distinguishes engines in what their free pages hold."""
        self.pool, self._whose, self._number = pool, whose, 0
        self.cells: dict[tuple[int, int], Cells] = {place: cells(pool, *place) for place in places()}
        self._seen = {place: some.copy() for place, some in self.cells.items()}
        self._granted = np.zeros(pool.pages(GROUP), bool)
        self._owner: dict[int, Name] = {}
        self._past: dict[Name, str] = {}
        """Outcomes of requests: proven, arrived or lost."""
        self._free = list(range(pool.pages(GROUP)))
        self._blank(self._free)

    def _blank(self, pages: Sequence[int]) -> None:
        for place, some in self.cells.items():
            some[list(pages)] = blank(self._number, len(pages), *place, self._whose)
        self._number += len(pages)
        self._settle(pages)

    def _settle(self, pages: Sequence[int]) -> None:
        """Accept what these pages hold; from now on no peer may change it."""
        some = list(pages)
        for place, now in self.cells.items():
            self._seen[place][some] = now[some]
        self._granted[some] = False

    def tables(self, pages: Sequence[int]) -> dict[str, Sequence[int]]:
        """Page tables of every cache of the pool; a draft has the same page numbers."""
        return {group.name: pages for group in self.pool.geometry.groups}

    def take(self, tokens: int) -> list[int] | None:
        """Pages for `tokens` tokens; None while there are too few."""
        count = -(-tokens // PAGE)
        if count > len(self._free):
            return None
        self._free, taken = self._free[: len(self._free) - count], self._free[len(self._free) - count :]
        return taken[::-1]

    def write(self, name: Name, pages: Sequence[int], first: int, end: int) -> None:
        """Label tokens [first, end) of a request."""
        at = np.arange(first, end)
        rows = np.asarray(pages, np.int64)[at // PAGE], at % PAGE
        for place, some in self.cells.items():
            some[rows] = self._seen[place][rows] = read(*name, at, *place)

    def check(self) -> list[Finding]:
        """Find what has changed on pages that are not granted."""
        findings = []
        for place, now in self.cells.items():
            if np.array_equal(now, self._seen[place]):
                continue
            differ = (now != self._seen[place]).any((1, 2, 3)) & ~self._granted
            for page in np.flatnonzero(differ).tolist():
                findings.append(self._stray(page, now[page], self._seen[place][page]))
                self._seen[place][page] = now[page]
        return findings

    def _stray(self, page: int, now: Cells, before: Cells) -> Finding:
        token, head = np.argwhere((now != before).any(-1))[0]
        what, victim = found(now[token, head]), self._owner.get(page)
        author = _name(what)
        ended = self._past.get(author or (0, 0), "")
        kind = {"proven": "write after proof", "arrived": "write after arrival"}.get(ended, "stray write")
        whose = f"which {victim[0]}.{victim[1]} has" if victim is not None else "which is free"
        return Finding(
            kind,
            f"{what} was written into page {page}, {whose}; its author is {ended or 'unknown'}",
            victim,
            author,
            what.request is None,
        )

    def free(self, pages: Sequence[int]) -> None:
        """Free pages that no peer reads or writes any more: blank them, and use them before others."""
        self._blank(pages)
        self._free += pages

    def wipe(self) -> None:
        """Free all pages."""
        self.free([page for page in range(self.pool.pages(GROUP)) if page not in set(self._free)])

    def close(self) -> None:
        """Drop all views of the pool's memory."""
        self.cells.clear()


class Book(Shelf):
    """The pages of a decode engine."""

    def grant(self, name: Name, pages: Sequence[int]) -> None:
        """Let peers write these pages from now on."""
        self._granted[list(pages)] = True
        self._owner |= dict.fromkeys(pages, name)

    def arrived(self, name: Name, pages: Sequence[int], tokens: int) -> list[Finding]:
        """Check that all tokens are there, and the rest of the last page as it was; no peer may write them any more."""
        findings = self._wrong(name, pages, tokens)
        self._past[name] = "arrived"
        self._settle(pages)
        return findings

    def _wrong(self, name: Name, pages: Sequence[int], tokens: int) -> list[Finding]:
        at = np.arange(tokens)
        rows = np.asarray(pages, np.int64)[at // PAGE], at % PAGE
        for place, now in self.cells.items():
            here, wanted = now[rows], read(*name, at, *place)
            differ = np.argwhere((here != wanted).any(-1))
            if differ.size:
                token, head = differ[0]
                what = found(here[token, head])
                where = f"layer {place[0]} part {place[1]} token {token} head {head}"
                kind = "freed too early" if what.blank else "wrong byte"
                text = f"{name[0]}.{name[1]} arrived with {what} at {where}, {len(differ)} differ"
                return [Finding(kind, text, name, _name(what), what.request is None)]
            page, row = pages[-1], (tokens - 1) % PAGE + 1
            if not np.array_equal(now[page, row:], self._seen[place][page, row:]):
                return [Finding("stray write", f"{name[0]}.{name[1]} has rows beyond its tokens", name, name)]
        return []

    def lost(self, name: Name, proven: bool) -> None:
        """Note that a request will not arrive."""
        self._past[name] = "proven" if proven else "lost"

    def free(self, pages: Sequence[int]) -> None:
        super().free(pages)
        for page in pages:
            self._owner.pop(page, None)


def _name(what: Found) -> Name | None:
    return None if what.request is None or what.blank else (what.request, what.attempt)
