"""Makes the vectors of Data: `python -m kvproto_conformance.inline_vectors` writes spec/v1/vectors/inline.json."""

from __future__ import annotations

from kvproto_conformance.inline import taken
from kvproto_conformance.suites import MADE, text

FILE = MADE / "inline.json"
LENGTH = 25

Data = tuple[int, int, bool]
CASES: tuple[tuple[str, str, int, tuple[Data, ...], str], ...] = (
    ("whole", "KVP-INL-NEXT", 25, ((0, 10, False), (10, 10, False), (20, 5, True)), "three pieces"),
    ("one", "KVP-INL-LAST", 25, ((0, 25, True),), "all at once, and all credit"),
    ("bytes", "KVP-INL-NEXT", 99, ((0, 1, False), (1, 1, False), (2, 23, True)), "pieces of any size"),
    ("not-yet", "KVP-INL-NEXT", 99, ((0, 10, False),), "the end has not come"),
    ("again", "KVP-INL-NEXT", 99, ((0, 10, False), (0, 10, False), (10, 15, True)), "what follows is dropped"),
    ("overlapping", "KVP-INL-NEXT", 99, ((0, 10, False), (9, 10, False)), "a byte twice"),
    ("gap", "KVP-INL-NEXT", 99, ((0, 10, False), (11, 10, False)), "a byte is left out"),
    ("not-the-first", "KVP-INL-NEXT", 99, ((10, 15, True),), "the end alone"),
    ("beyond-the-end", "KVP-INL-NEXT", 99, ((0, 10, False), (10, 16, True)), "a byte too many"),
    ("after-the-end", "KVP-INL-NEXT", 99, ((0, 25, True), (25, 1, True)), "one more byte"),
    ("far-away", "KVP-INL-NEXT", 99, ((2**64 - 1, 2, False),), "an end above 2^64"),
    ("last-too-early", "KVP-INL-LAST", 99, ((0, 10, True), (10, 15, True)), "the first of two says last"),
    ("last-missing", "KVP-INL-LAST", 99, ((0, 10, False), (10, 15, False)), "the last does not"),
    ("no-credit", "KVP-INL-BEYOND", 0, ((0, 10, False),), "before any Credit"),
    ("beyond-credit", "KVP-INL-BEYOND", 24, ((0, 10, False), (10, 15, True)), "by a byte"),
    ("beyond-then-within", "KVP-INL-COUNT", 20, ((0, 21, False), (0, 20, False)), "the transfer has ended; counted"),
    ("counted-when-dropped", "KVP-INL-COUNT", 30, ((5, 10, False), (0, 10, False), (0, 11, False)), "20 of 30 bytes"),
    ("credit-before-place", "KVP-INL-BEYOND", 9, ((5, 10, False),), "wrong in both"),
    ("place-before-last", "KVP-INL-NEXT", 99, ((1, 24, False),), "wrong in both"),
)
"""id, clause, total, Data as offset, bytes and last, note."""


def made() -> str:
    """The text of the file."""
    rows = []
    for id, clause, total, data, note in CASES:
        said = [[str(at), str(size), str(last).lower()] for at, size, last in data]
        expected = taken(LENGTH, total, said)
        asked = {"length": str(LENGTH), "total": str(total), "data": said}
        rows.append({"id": id, "clause": clause, **asked, "expected": expected, "note": note})
    return text("inline", rows)


if __name__ == "__main__":
    FILE.write_text(made())
