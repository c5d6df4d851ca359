"""Makes vectors/late.json by the suite's own `late`: `python -m kvproto_conformance.late_vectors`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from kvproto.planning.geometry import Group, gqa
from kvproto.wire import to_json
from kvproto.wire.enums import DType, ItemKind
from kvproto.wire.messages import Grants
from kvproto_conformance.checking import extensions
from kvproto_conformance.codec import Refusal
from kvproto_conformance.late import inside_item, items_of, served
from kvproto_conformance.row_vectors import changed
from kvproto_conformance.suites import MADE, text

FILE = MADE / "late.json"
END = 45
PLAIN = gqa(0, "window", 0, 2, 4, 4, dtype=DType.U8)


def groups() -> Iterator[tuple[str, Group, str]]:
    """id, group, note."""
    yield "pages", PLAIN, "pages of 4 tokens"
    yield "compressed", attrs.evolve(PLAIN, tokens_per_row=4, rows=2), "rows of 4 tokens, pages of 2 rows"
    yield (
        "scales",
        attrs.evolve(PLAIN, tokens_per_row=8, rows=1, partial=True),
        "a row that is covered in part moves too",
    )
    yield "ring", attrs.evolve(PLAIN, kind=ItemKind.RING, rows=64), "one item"
    yield "dealt", attrs.evolve(PLAIN, cp_size=2, interleave=3, rows=2, origin=6), "3 tokens in turn, from token 6 on"
    yield "tiled", changed(PLAIN, 0, encoding="tiled"), "items are held whole"
    deal: dict[str, Any] = {"cp_size": 2, "interleave": 6, "rows": 4}
    yield (
        "tiled-dealt",
        changed(attrs.evolve(PLAIN, **deal), 0, encoding="tiled"),
        "turns of 12 tokens, items of 4 rows",
    )
    deal |= {"interleave": 2, "order": np.array([0, 1, 1], np.uint32), "origin": 4}
    yield "tiled-order", changed(attrs.evolve(PLAIN, **deal), 0, encoding="tiled"), "rank 1 takes two runs of three"
    yield "images", attrs.evolve(PLAIN, axis="image", rows=5), "positions of another axis"
    yield "compressed-ring", attrs.evolve(PLAIN, kind=ItemKind.RING, tokens_per_row=4, rows=16), "rows of 4 tokens"


def cases() -> Iterator[dict[str, Any]]:
    """Windows from the beginning and from later on, with `late` and without, at both cp ranks."""
    for id, group, note in groups():
        start = group.origin if group.cp_size > 1 else 0
        for cp_rank in range(group.cp_size):
            for since, first, late in (
                ([0], start, False), ([9, 3], start, False), ([9, 3], start, True), ([17], 16 + start, True),
                ([16], 40, False), ([99], start + 8, True), ([0], start, True), ([2, 1], start, True),
            ):  # fmt: skip
                yield _case(id, group, cp_rank, since, first, END, late, note)
        for since, first, end, late in (
            ([0], 6, END, False), ([9, 3], 6, END, False), ([9, 3], 6, END, True), ([0], 41, 43, False), ([0], 43, 43, False),
        ) if group.tokens_per_row > 1 else ():  # fmt: skip
            yield _case(id, group, 0, since, first, end, late, "inside a row" if first < end else "no tokens")

    for late in (False, True):
        yield _case("pages", PLAIN, 0, [17], 8, 8, late, "no tokens, of which none is gone")
    slot = attrs.evolve(PLAIN, kind=ItemKind.SLOT, tokens_per_row=4)
    yield _case("slot", slot, 0, [0], 6, END, False, "a slot moves whole")


def _case(
    id: str, group: Group, cp_rank: int, since: list[int], first: int, end: int, late: bool, note: str
) -> dict[str, Any]:
    form = to_json(group)
    items = np.arange(len(items_of(form, str(cp_rank), first, end)), dtype=np.uint32)[::-1] * 2
    grant = to_json(Grants(group=0, first=first, count=end - first, valid=END, items=items, late=late or None))
    inside, cut = first % group.tokens_per_row, inside_item(form, str(cp_rank), first, end)
    return {
        "id": f"{id}-{cp_rank}-{max(since)}-{first}{f'-{end}' if end < END else ''}{'-late' * late}",
        "clause": "KVP-GRANT-ROW" if inside else "KVP-GRANT-WHOLE" if cut else "KVP-GRANT-LATE" if late else "KVP-GRANT-HELD",
        "group": form, "cp_rank": str(cp_rank), "since": [str(n) for n in since], "grant": grant, "note": note,
    }  # fmt: skip


def made() -> str:
    """The text of the file."""
    rows = []
    for case in cases():
        try:
            expected = served(case["group"], case["cp_rank"], case["grant"], [int(n) for n in case["since"]])
        except Refusal as refusal:
            expected = {"error": refusal.code, "path": refusal.path}
        rows.append({**case, **extensions({"groups": [case["group"]]}), **expected})
    return text("late", rows)


if __name__ == "__main__":
    FILE.write_text(made())
