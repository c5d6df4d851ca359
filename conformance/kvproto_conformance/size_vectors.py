"""Makes plan vectors at the bounds of a plan: `python -m kvproto_conformance.size_vectors` writes plan/sizes.json.

Small Descriptions whose plans would be large: each is next to one that is just small enough. Inputs are built with
kvproto's constructors; what is expected comes from the suite's own planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from kvproto.planning.geometry import Geometry, Group, Rank, mla, owns
from kvproto.wire import to_json
from kvproto.wire.enums import DType
from kvproto_conformance.checking import beyond
from kvproto_conformance.codec import Refusal
from kvproto_conformance.codec.facts import LIMITS
from kvproto_conformance.planner import plan
from kvproto_conformance.row_vectors import changed, one, sections
from kvproto_conformance.suites import MADE, text

FILE = MADE / "plan/sizes.json"
MOST = LIMITS["max_shares"]
Pair = tuple[Geometry, Geometry]


def ranks(group: Group, number: int, layers: Iterable[int] = (0,), spans: int = 1) -> Geometry:
    """Ranks that all own the same layers and lanes, in so many intervals that touch."""
    layers = tuple(layers)
    lanes = [(n, n + 1) for n in range(spans)] if spans > 1 else None
    made = tuple(Rank(rank=r, owns=(owns(group, layers, lanes),)) for r in range(number))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=made)


def lanes(number: int, size: int) -> Group:
    """A latent of so many lanes."""
    return changed(mla(0, "target", 0, size, 16, dtype=DType.U8), 0, lanes=number)


def cases() -> Iterator[tuple[str, Pair, str]]:
    """id, source and sink, note."""
    plain = mla(0, "target", 0, 16, 16, dtype=DType.U8)
    here, there = (attrs.evolve(plain, cp_size=n) for n in (181, 180))
    # 181 * 180 pairs of classes, 2 cuts, 361 runs, and a piece for each rank
    yield (
        "pieces-at-most",
        (ranks(here, 1), ranks(there, 14)),
        "65,536 pieces are not too many: it is a rank that is missing",
    )
    yield "refused-pieces", (ranks(here, 1), ranks(there, 15)), "a rank more is a piece more"
    yield (
        "refused-pieces-of-cuts",
        (ranks(here, 1), ranks(changed(there, 0, lanes=2, lane_bytes=8), 1, spans=2)),
        "a cut more is 32,580 pieces more",
    )
    yield "shares-at-most", (one(lanes(MOST, 2)), one(lanes(2 * MOST, 1))), "a share for each of the larger lanes"
    yield "refused-shares", (one(lanes(MOST + 1, 2)), one(lanes(2 * MOST + 2, 1))), "a lane more"
    yield "refused-shares-back", (one(lanes(2 * MOST + 2, 1)), one(lanes(MOST + 1, 2))), "and the other way round"
    half = MOST // 2
    yield "shares-of-two-ranks", (ranks(lanes(half, 2), 2), ranks(lanes(MOST, 1), 2)), "a share for each rank and lane"
    yield "refused-shares-of-two-ranks", (ranks(lanes(half + 1, 2), 2), ranks(lanes(MOST + 2, 1), 2)), "a lane more"
    yield (
        "shares-of-four-layers",
        (ranks(lanes(MOST // 4, 2), 1, range(4)), ranks(lanes(half, 1), 1, range(4))),
        "layers in one run count one by one where lanes differ",
    )
    yield (
        "refused-shares-of-four-layers",
        (ranks(lanes(MOST // 4 + 1, 2), 1, range(4)), ranks(lanes(half + 2, 1), 1, range(4))),
        "a lane more",
    )
    for id_, size in (("shares-of-sections", MOST), ("refused-shares-of-sections", MOST + 1)):
        cut = sections(lanes(1, size), size - 3, 3)
        yield id_, (one(cut), one(lanes(size, 1))), "beside sections the smaller lanes count"
        yield f"{id_}-back", (one(lanes(size, 1)), one(cut)), "the same back"
    wide = changed(plain, 0, lanes=31, lane_bytes=1)
    run, apart = range(257), range(0, 514, 2)
    yield (
        "shares-of-one-run",
        (ranks(wide, 9, run), ranks(wide, 9, run, 31)),
        "257 layers in a row are one, where no rank has a choice",
    )
    yield (
        "refused-shares-of-runs",
        (ranks(wide, 9, apart), ranks(wide, 9, apart, 31)),
        "each second layer: as many runs as layers",
    )
    yield (
        "refused-shares-of-a-choice",
        (ranks(wide, 10, run), ranks(wide, 9, run, 31)),
        "a source rank more, and each layer counts",
    )
    both = attrs.evolve(wide, parts=(*wide.parts, attrs.evolve(lanes(2 * MOST, 1).parts[0], name="rope")))
    other = attrs.evolve(both, parts=(wide.parts[0], attrs.evolve(lanes(MOST, 2).parts[0], name="rope")))
    yield (
        "refused-shares-of-two-parts",
        (one(both), one(other)),
        "the first part has a share, and the second all that may be",
    )


def made() -> str:
    """The text of the file."""
    rows = []
    for id_, (source, sink), note in cases():
        given: dict[str, Any] = {"source": to_json(source), "sink": to_json(sink), "features": []}
        try:
            expected: dict[str, Any] = {"expected": plan(given["source"], given["sink"])}
        except Refusal as refusal:
            expected = {"error": refusal.code, "path": refusal.path}
        rows.append(
            {
                "id": id_,
                "clause": "KVP-PLAN-SIZE",
                **given,
                **beyond(given["source"], given["sink"]),
                **expected,
                "note": note,
            }
        )
    return text("plan/sizes", rows)


def main() -> int:
    """Write the file."""
    FILE.write_text(made())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
