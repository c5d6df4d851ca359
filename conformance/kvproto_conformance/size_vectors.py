"""Makes plan/sizes.json, of plans at their bounds and just beyond: `python -m kvproto_conformance.size_vectors`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import numpy as np

from kvproto.planning.geometry import Geometry, Group, Rank, mla, owns
from kvproto.wire.enums import DType
from kvproto_conformance.codec.facts import LIMITS
from kvproto_conformance.plan_vectors import Pair, row
from kvproto_conformance.row_vectors import changed, one, sections
from kvproto_conformance.suites import MADE, text

FILE = MADE / "plan/sizes.json"
HALF = LIMITS["max_pieces"] // 2
PLAIN = mla(0, "target", 0, 16, 16, dtype=DType.U8)
SIZE = "KVP-PLAN-SIZE"


def ranks(group: Group, number: int, layers: Iterable[int] = (0,), spans: int = 1) -> Geometry:
    """Ranks that all own the same layers and lanes, in so many intervals that touch."""
    layers = tuple(layers)
    lanes = [(n, n + 1) for n in range(spans)] if spans > 1 else None
    made = tuple(Rank(rank=r, owns=(owns(group, layers, lanes),)) for r in range(number))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=made)


def lanes(number: int, size: int) -> Group:
    """A latent of so many lanes."""
    return changed(mla(0, "target", 0, size, 16, dtype=DType.U8), 0, lanes=number)


def cases() -> Iterator[tuple[str, str, Pair, str]]:
    """id, clause, source and sink, note."""
    yield from _cut()
    yield from _lanes()
    yield from _dealt()


def _cut() -> Iterator[tuple[str, str, Pair, str]]:
    """Pieces of ranks, cuts and layers, where lanes are alike and tokens are not dealt."""
    wide, run = changed(PLAIN, 0, lanes=128), range(64)
    # of 64 layers, 128 pieces of each rank
    for back in (False, True):
        for number in (31, 32):
            pair = ranks(wide, number, run), ranks(wide, 1, run, 128)
            yield (
                f"{'refused-pieces' if number == 32 else 'pieces'}-of-cuts{'-back' * back}",
                SIZE,
                (pair[1], pair[0]) if back else pair,
                "ranks that own all lanes are cut where another rank's intervals begin",
            )
    yield (
        "refused-layer-before-pieces", "KVP-PLAN-FIT", (ranks(lanes(1, HALF), 1), ranks(lanes(HALF, 1), 1, range(2))),
        "all layers are compared before any is counted",
    )  # fmt: skip
    both, other = (
        attrs.evolve(PLAIN, parts=(*PLAIN.parts, attrs.evolve(rope.parts[0], name="rope")))
        for rope in (lanes(HALF - 1, 1), lanes(1, HALF - 1))
    )
    yield "refused-pieces-of-two-parts", SIZE, (one(both), one(other)), "the second part alone could be planned"


def _lanes() -> Iterator[tuple[str, str, Pair, str]]:
    """Pieces of lanes that differ in size: for each rank its one interval, and the smaller lanes in it."""
    for size, id_ in ((HALF - 1, "lanes-at-most"), (HALF, "refused-lanes")):
        pair = one(lanes(1, size)), one(lanes(size, 1))
        yield id_, SIZE, pair, "one lane of a side is all lanes of the other"
        yield f"{id_}-back", SIZE, (pair[1], pair[0]), "and the other way round"
    for half, id_ in ((HALF // 2 - 1, "lanes-by-halves"), (HALF // 2, "refused-lanes-by-halves")):
        yield id_, SIZE, (one(lanes(half, 2)), one(lanes(2 * half, 1))), "the smaller lanes count, not the larger"
    for size, id_ in ((HALF // 4 - 1, "lanes-of-four-layers"), (HALF // 4, "refused-lanes-of-four-layers")):
        pair = ranks(lanes(1, size), 1, range(4)), ranks(lanes(size, 1), 1, range(4))
        yield id_, SIZE, pair, "layers in one run count one by one"
    for size, id_ in ((HALF - 2, "lanes-of-sections"), (HALF - 1, "refused-lanes-of-sections")):
        cut = sections(lanes(1, size), size - 3, 3)
        yield id_, SIZE, (one(cut), one(lanes(size, 1))), "a section has the smaller lanes that it reaches into"
        yield f"{id_}-back", SIZE, (one(lanes(size, 1)), one(cut)), "the same back"
    for half, id_ in ((HALF - 3, "lanes-cut-by-sections"), (HALF - 2, "refused-lanes-cut-by-sections")):
        cut = sections(lanes(1, 2 * half), 2 * half - 3, 3)
        yield id_, SIZE, (one(cut), one(lanes(half, 2))), "a lane that two sections reach into counts in both"


def _dealt() -> Iterator[tuple[str, str, Pair, str]]:
    """Pieces of token classes, and runs of deals."""
    # 19 * 13,797 pairs of a sink rank and a class of the source, and one the other way round
    dealt = attrs.evolve(PLAIN, cp_size=13797)
    missing = "so many pieces are not too many: it is a rank that is missing"
    yield "pieces-of-classes", SIZE, (ranks(dealt, 1), ranks(PLAIN, 19)), missing
    yield "refused-pieces-of-classes", SIZE, (ranks(dealt, 2), ranks(PLAIN, 19)), "a rank more, and that goes first"
    yield "refused-pieces-of-classes-back", SIZE, (ranks(PLAIN, 19), ranks(dealt, 2)), "and the other way round"
    order = np.arange(4096, dtype=np.uint32) % 2
    turns = attrs.evolve(PLAIN, cp_size=2, order=order)
    made = tuple(Rank(rank=r, owns=(owns(turns, range(17), cp_rank=r),)) for r in range(2))
    source = Geometry(replica=0, facts=(), groups=(turns,), ranks=made)
    for number, id_ in ((16, "runs-at-most"), (17, "refused-runs")):
        groups = tuple(attrs.evolve(PLAIN, id=n, name=f"layer {n}") for n in range(number))
        rank = Rank(rank=0, owns=tuple(owns(group, [n]) for n, group in enumerate(groups)))
        sink = Geometry(replica=0, facts=(), groups=groups, ranks=(rank,))
        yield id_, "KVP-PLAN-RUNS", (source, sink), "4,096 runs, for each group that meets them"


def made() -> str:
    """The text of the file."""
    return text("plan/sizes", (row(id, clause, pair, [], note) for id, clause, pair, note in cases()))


if __name__ == "__main__":
    FILE.write_text(made())
