"""Makes vectors/dcp.json by the suite's own deal and merge: `python -m kvproto_conformance.dcp_vectors`."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from kvproto_conformance.dcp import answer
from kvproto_conformance.suites import MADE, text

FILE = MADE / "dcp.json"
TOLERANCE = "2e-5"
"""Of each number of a merge, times the greater of 1 and its size. A float32 of 100 is exact to 4e-6; a wrong base,
or a log-sum-exp in bf16, is wrong by a thousand times more."""

Json = dict[str, Any]


def _texts(numbers: Iterable[int]) -> list[str]:
    return [str(n) for n in numbers]


def group(
    ranks: int, interleave: int = 1, origin: int = 0, page: int = 4, step: int = 1, order: Iterable[int] = ()
) -> Json:  # fmt: skip
    """A Group in JSON form."""
    numbers = {
        "rows": page, "tokens_per_row": step, "cp_size": ranks, "interleave": interleave, "origin": origin,
    }  # fmt: skip
    part = {"name": "latent", "dtype": "BF16", "lanes": "1", "lane_bytes": "1152"}
    texts = {name: str(number) for name, number in numbers.items()}
    made = {"id": "0", "name": "target", "model": "0", "kind": "PAGE", **texts, "parts": [part]}
    return made | ({"order": _texts(order)} if order else {})


def part(base: str, tokens: list[int], lse: list[float], out: list[list[float]]) -> Json:
    """The result of one rank: a log-sum-exp and an output for each row, and how many tokens each has read."""
    shown = [[_shown(x) for x in row] for row in out]
    return {"base": base, "tokens": [str(n) for n in tokens], "lse": [_shown(x) for x in lse], "out": shown}


def _shown(x: float) -> str:
    """Nine digits of the nearest float32, which tell it from every other."""
    return f"{struct.unpack('f', struct.pack('f', x))[0]:.9g}"


DEALS: dict[str, tuple[Json, str]] = {
    "2x4": (group(2, 4, page=8), "the deal that is drawn in dcp.md"),
    "2x2": (group(2, 2), "the deal of the example"),
    "2x3": (group(2, 3), "an interleave that does not divide the page"),
    "3x1": (group(3, 1), "token by token over three ranks"),
    "8x1": (group(8, 1, page=16), "more ranks than tokens: the last have none"),
    "5x7": (group(5, 7, page=16), "numbers that divide nothing"),
    "4x16": (group(4, 16, page=16), "whole pages are dealt"),
    "4x64": (group(4, 64, page=16), "several pages at a stretch"),
    "2x2-from-5": (group(2, 2, origin=5), "dealt from token 5, which is no multiple of the turn"),
    "3x4-from-100": (group(3, 4, origin=100), "dealt from token 100, as from the first decoded token"),
    "4x8-step-4": (group(4, 8, step=4), "rows of four tokens, two rows at a stretch"),
    "2x6-step-3-from-9": (group(2, 6, origin=9, step=3), "rows of three tokens, from an origin"),
    "1": (group(1), "one rank owns all"),
    "1-as-if-dealt": (group(1, 16, origin=40), "one rank: interleave and origin say nothing"),
    "1-step-4": (group(1, step=4), "one rank, rows of four tokens"),
    "2x4-zigzag": (group(2, 4, page=8, order=(0, 1, 1, 0)), "the zigzag that is drawn in dcp.md"),
    "4x2-zigzag": (group(4, 2, order=(0, 1, 2, 3, 3, 2, 1, 0)), "a zigzag over four ranks"),
    "2x3-uneven": (group(2, 3, order=(0, 1, 1)), "rank 1 takes twice as many tokens"),
    "3x1-spans": (group(3, order=(0, 0, 0, 1, 2, 2)), "spans of three, one and two tokens"),
    "4x16-quarters": (group(4, 16, page=16, order=(0, 0, 1, 1, 2, 2, 3, 3)), "contiguous quarters, two runs each"),
    "3x2-last-first": (group(3, 2, order=(2, 1, 0)), "in turn, from the last rank on: rank 0 has the shortest share"),
    "2x4-zigzag-from-6-step-2": (
        group(2, 4, 6, step=2, order=(0, 1, 1, 0)),
        "a zigzag from an origin, of rows of two tokens",
    ),
    "2x4-in-turn": (group(2, 4, page=8, order=(0, 1)), "an order that says what is said without one"),
    "1-in-order": (group(1, 4, order=(0, 0)), "one rank: an order says nothing"),
}
"""Deal and what it shows, by name."""
FAR = 1 << 40


def deals() -> Iterator[tuple[str, str, Json, str]]:
    """id, clause, question and note of the level `deal`."""
    for name, (dealt, note) in DEALS.items():
        alone = dealt["cp_size"] == "1"
        origin = int(dealt["origin"])
        run, turns = int(dealt["interleave"]), 2 * len(dealt.get("order", range(int(dealt["cp_size"]))))
        near = sorted({max(run * k + d, 0) for k in range(turns + 1) for d in (-1, 0, 1)} | set(range(10)))
        tokens = [t if alone else origin + t for t in near]
        owner = {"op": "owner", "group": dealt, "tokens": _texts([*tokens, FAR, FAR + 1])}
        yield f"owner-{name}", "KVP-DCP-ONE" if alone else "KVP-DCP-OWNER", owner, note
        length = {"op": "length", "group": dealt, "tokens": _texts([0, *tokens, FAR])}
        yield f"length-{name}", "KVP-DCP-LENGTH", length, note
        yield f"pages-{name}", "KVP-DCP-PAGES", {"op": "pages", "group": dealt, "tokens": _texts([0, *tokens])}, note
        items = [str(9 + 5 * k % 97) for k in range(max(tokens) // int(dealt["rows"]) + 1)]
        for rank in sorted({0, int(dealt["cp_size"]) - 1}):
            slots = {"op": "slots", "group": dealt, "cp_rank": str(rank), "items": items, "tokens": _texts(tokens)}
            yield f"slots-{name}-rank-{rank}", "KVP-DCP-SLOT", slots, note
    for name in ("2x2-from-5", "3x4-from-100"):
        before = [0, 1, int(DEALS[name][0]["origin"]) - 1]
        for op in ("owner", "length"):
            asked = {"op": op, "group": DEALS[name][0], "tokens": _texts(before)}
            yield f"{op}-{name}-before", "KVP-DCP-BEFORE", asked, "tokens before the origin are nobody's"
    example = {"op": "slots", "group": group(2, 2), "cp_rank": "0", "items": ["7", "3"], "tokens": ["9", "10"]}
    yield "slots-example", "KVP-DCP-SLOT", example, "the example of dcp.md: slot 13, and none"


NAN, INF = math.nan, math.inf
NOTHING = part("e", [0], [NAN], [[NAN, INF]])
SOME = part("e", [3], [1.25], [[0.5, -2.0]])


def merges() -> Iterator[tuple[str, str, list[Json], str]]:
    """id, clause, parts and note of the level `merge`."""
    merge, neutral, empty = "KVP-DCP-MERGE", "KVP-DCP-NEUTRAL", "KVP-DCP-EMPTY"
    pair = [(1.0, 1.0), (2.0, 3.0)]
    natural = [part("e", [5], [lse], [[out]]) for lse, out in pair]
    binary = [part("2", [5], [lse / math.log(2)], [[out]]) for lse, out in pair]
    yield "example", merge, natural, "the example of dcp.md"
    yield "one", merge, [SOME], "one part alone is itself"
    yield "equal", merge, [SOME, SOME], "equal parts: the same output, and ln 2 more"
    for name, shift in (("large", 100.0), ("small", -100.0)):
        moved = [part("e", [5], [lse + shift], [[out]]) for lse, out in pair]
        yield name, merge, moved, f"exp({shift:.0f}) is no float32: the greatest has to be taken off first"
    far = [part("e", [5, 5], [1000.0, -1000.0], [[1.0], [2.0]]), part("e", [5, 5], [0.0, 0.0], [[3.0], [4.0]])]
    yield "apart", merge, far, "beyond what a double can raise e to; the weight that underflows is 0"
    rows = [
        part("e", [9 + r, r, 4], [5 * r % 7 - 3.0, 0.5 * r, 3.0 - r], [[r + 0.25, -r], [1.5, r], [r * r, 0.125]])
        for r in range(1, 8)
    ]
    yield "seven-ranks", merge, rows, "seven ranks, three rows"
    yield "base-2", "KVP-DCP-BASE", binary, "the same parts as `example` in base 2"
    yield "base-mixed", "KVP-DCP-BASE", [natural[0], binary[1]], "two kernels, two bases"
    for name, lse, out in (
        ("nan", NAN, NAN), ("inf", INF, 0.0), ("zero", 0.0, 0.0), ("stale", 7.5, 1e30), ("finite", -2.3819763e38, 4.0),
    ):  # fmt: skip
        nobody = part("e", [0], [lse], [[out, out]])
        yield f"empty-shard-{name}", neutral, [nobody, SOME], f"what a kernel may leave where it read nothing: {name}"
        yield f"all-empty-{name}", empty, [nobody, nobody], f"no rank read a token; left there: {name}"
    yield "empty-shard-base-2", neutral, [part("2", [0], [0.0], [[5.0, 5.0]]), SOME], "an empty part in another base"
    yield "masked", neutral, [part("e", [3], [-INF], [[NAN, NAN]]), SOME], "tokens read, and every one masked"
    yield "one-of-eight", neutral, [NOTHING, NOTHING, SOME, *[NOTHING] * 5], "a prompt of one token on eight ranks"
    rows = [
        part("e", [0, 2, 0], [NAN, 1.0, 9.0], [[NAN], [1.0], [9.0]]),
        part("e", [2, 0, 0], [1.0, NAN, 9.0], [[2.0], [NAN], [9.0]]),
    ]
    yield "row-by-row", neutral, rows, "each row has its own empty parts"
    yield "all-empty-one", empty, [NOTHING], "one part, and nothing in it"
    fine = [part("e", [5], [lse], [[out]]) for lse, out in ((11.0, 1.0), (11.028, -1.0))]
    yield "float", "KVP-DCP-FLOAT", fine, "in bf16 the two log-sum-exps are one"


def cases() -> Iterator[Json]:
    """Every case as the file has it."""
    for id_, clause, asked, note in deals():
        yield {"id": id_, "level": "deal", "clause": clause, "question": asked, "expected": answer(asked), "note": note}
    for id_, clause, parts, note in merges():
        asked = {"op": "merge", "parts": parts}
        yield {
            "id": f"merge-{id_}", "level": "merge", "clause": clause, "question": asked, "expected": answer(asked),
            "tolerance": TOLERANCE, "note": note,
        }  # fmt: skip


def made() -> str:
    """The text of the file."""
    return text("dcp", cases())


if __name__ == "__main__":
    FILE.write_text(made())
