"""Makes plan/rows.json, of rows, rings and sections, by the suite's own planner, as `plan_vectors` does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from kvproto.planning.geometry import Geometry, Group, LaneSpan, Rank, gqa, handoff, mla, owns
from kvproto.wire.enums import DType, ItemKind
from kvproto_conformance.plan_vectors import Pair, engine, heads, row
from kvproto_conformance.suites import MADE, text

FILE = MADE / "plan/rows.json"
Case = tuple[str, str, Pair, str]
"""Id, clause, source and sink, note."""
EXACT, FIT, OPAQUE = "KVP-PLAN-EXACT", "KVP-PLAN-FIT", "KVP-PLAN-OPAQUE"

HEADS = gqa(0, "target", 0, 4, 16, 4, dtype=DType.U8)
LATENT = mla(0, "target", 0, 1152, 64, dtype=DType.U8)
SCALES = attrs.evolve(gqa(0, "scales", 0, 4, 4, 1), tokens_per_row=16, partial=True)
RING = attrs.evolve(HEADS, kind=ItemKind.RING, rows=8)
SLOT = attrs.evolve(HEADS, kind=ItemKind.SLOT, rows=4)


def sections(group: Group, *sizes: int, part: int = 0) -> Group:
    """The same with one part in sections of so many bytes."""
    parts, at = list(group.parts), 0
    (whole,) = parts[part : part + 1]
    made = []
    for size in sizes:
        made.append(attrs.evolve(whole, lane_bytes=size, at=at, whole=sum(sizes)))
        at += size
    parts[part : part + 1] = made
    return attrs.evolve(group, parts=tuple(parts))


def changed(group: Group, part: int, **change: Any) -> Group:
    """The same with one part changed."""
    parts = list(group.parts)
    parts[part] = attrs.evolve(parts[part], **change)
    return attrs.evolve(group, parts=tuple(parts))


def dealt(group: Group, ranks: int, interleave: int, origin: int = 0) -> Geometry:
    """Tokens over ranks that hold all lanes."""
    group = attrs.evolve(group, cp_size=ranks, interleave=interleave, origin=origin)
    made = tuple(Rank(rank=r, owns=(owns(group, [0, 1], cp_rank=r),)) for r in range(ranks))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=made)


def over(group: Group, ranks: int, layers: int = 2) -> Geometry:
    """Lanes over tensor-parallel ranks."""
    return engine((group, layers, heads(group.parts[0].lanes, ranks)), ranks=ranks)


def one(*groups: Group) -> Geometry:
    """One rank that holds everything."""
    return engine(*((group, 1, None) for group in groups), ranks=1)


def odd_owners() -> Geometry:
    """Two ranks that hold other lanes of each section, in another order."""
    group = sections(HEADS, 12, 4)
    lanes = [[(0, 2, 3), (0, 0, 2), (1, 0, 1), (2, 0, 4)], [(0, 3, 4), (0, 0, 1), (1, 1, 4), (2, 0, 4)]]
    made = []
    for rank, spans in enumerate(lanes):
        owned = tuple(LaneSpan(part=p, lo=lo, hi=hi) for p, lo, hi in spans)
        made.append(Rank(rank=rank, owns=(attrs.evolve(owns(group, [0, 1]), lanes=owned),)))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=tuple(made))


def layers_apart(group: Group) -> Geometry:
    """Layers 0 and 2 in one group, 1 and 3 in another, as a pool that two kinds of layers share."""
    other = attrs.evolve(group, id=1, name="odd", rows=group.rows + 1)
    owned = owns(group, [0, 2]), owns(other, [1, 3])
    return Geometry(replica=0, facts=(), groups=(group, other), ranks=(Rank(rank=0, owns=owned),))


def plans() -> Iterator[Case]:
    """All cases of this file."""
    yield from _scales_of_pages()
    yield from _owners()
    yield from _rings()
    yield from _sections()
    yield from _sections_of_kinds()
    yield from _refused_sections()


def _scales_of_pages() -> Iterator[Case]:
    """Rows that are scales of several tokens."""
    for p, d in ((4, 2), (2, 4), (1, 3), (3, 2), (8, 1)):
        yield (
            f"page-scales-{p}-{d}", EXACT, (over(SCALES, p), over(SCALES, d)),
            "scales of pages are lanes like any others",
        )  # fmt: skip
    yield (
        "page-scales-dealt", EXACT, (dealt(SCALES, 2, 16), dealt(SCALES, 4, 32)), "rows of 16 tokens, dealt by one and by two",
    )  # fmt: skip
    yield (
        "page-scales-draft", EXACT, (over(attrs.evolve(SCALES, model=1), 2), over(attrs.evolve(SCALES, model=1), 4)),
        "of a draft",
    )  # fmt: skip
    whole = attrs.evolve(SCALES, partial=None)
    yield (
        "partial-false", EXACT, (over(whole, 2), over(attrs.evolve(SCALES, partial=False), 1)),
        "false is what absent means",
    )  # fmt: skip
    yield "refused-partial-sink", FIT, (over(whole, 2), over(SCALES, 1)), "a source that does not fill rows in part"
    yield "refused-partial-source", FIT, (over(SCALES, 2), over(whole, 1)), "a sink that does not want rows in part"
    other = attrs.evolve(SCALES, tokens_per_row=32)
    yield "refused-partial-pages", FIT, (over(SCALES, 1), over(other, 1)), "scales of pages of another size"
    for name, odd in (("slot", SLOT), ("hand-off", handoff(0, "target", {"token": (DType.U32, 4)}))):
        odd = attrs.evolve(odd, partial=True)
        yield f"refused-partial-{name}", "KVP-GEO-PARTIAL", (one(odd), one(odd)), "rows that stand for no tokens"


def _owners() -> Iterator[Case]:
    """Heads that nobody needs or nobody has, and rows that are scratch."""
    inner = Geometry(
        replica=0, facts=(), groups=(HEADS,), ranks=(Rank(rank=0, owns=(owns(HEADS, [0, 1], [(1, 3)]),)),)
    )  # fmt: skip
    yield "heads-that-nobody-needs", EXACT, (over(HEADS, 2), inner), "the outer heads have an owner and no use"
    yield "heads-of-nobody-else", EXACT, (over(HEADS, 4), inner), "two of four ranks send nothing"
    yield (
        "refused-heads-of-nobody", "KVP-PLAN-COVER", (inner, over(HEADS, 2)), "the outer heads have a use and no owner",
    )  # fmt: skip

    state = attrs.evolve(SLOT, live_rows=3)
    yield (
        "live-rows-elsewhere", EXACT, (over(state, 2), over(attrs.evolve(SLOT, rows=3), 1)), "3 of 4 rows are all of 3",
    )  # fmt: skip
    yield "refused-live-rows", FIT, (over(state, 1), over(SLOT, 1)), "a state of 3 rows to one of 4"


def _rings() -> Iterator[Case]:
    """Rings of rows, to pages and back."""
    yield "ring-to-pages", EXACT, (over(RING, 2), over(HEADS, 1)), "the last rows of a window"
    yield "pages-to-ring", EXACT, (over(HEADS, 1), over(RING, 2)), "the same back"
    yield "ring-to-dealt-pages", EXACT, (one_two(RING), dealt(HEADS, 3, 2)), "each token from the one ring to its rank"
    yield "dealt-pages-to-ring", EXACT, (dealt(HEADS, 3, 2, 4), one_two(RING)), "all ranks of the deal fill one ring"
    several = attrs.evolve(HEADS, tokens_per_row=4)
    yield (
        "rows-of-4-to-ring", EXACT, (over(several, 2), over(attrs.evolve(several, kind=ItemKind.RING), 1)),
        "rows of several tokens, in a ring too",
    )  # fmt: skip
    yield "ring-to-pages-and-ring", EXACT, (one(RING), layers_ring()), "layers of one ring to pages and to a ring"
    coded = changed(HEADS, 0, encoding="tiled")
    for name, source, sink in (
        ("ring-to-slot", RING, SLOT), ("slot-to-pages", SLOT, HEADS),
        ("opaque-pages-to-ring", coded, attrs.evolve(coded, kind=ItemKind.RING)),
        ("hand-off-to-pages", handoff(0, "target", {"k": (DType.U8, 64), "v": (DType.U8, 64)}), HEADS),
    ):  # fmt: skip
        yield (
            f"refused-{name}", FIT, (one(source), one(sink)),
            "rows that do not stand for the same, or bytes that nobody may cut",
        )  # fmt: skip
    beside = attrs.evolve(changed(HEADS, 1, encoding="tiled"), kind=ItemKind.RING)
    yield (
        "refused-ring-beside-opaque", FIT, (one(HEADS), one(beside)),
        "the plain part of a group whose items move whole",
    )  # fmt: skip


def _sections() -> Iterator[Case]:
    """Parts that one side stores in several sections."""
    split = sections(LATENT, 1024, 128)
    for p, d in ((1, 1), (4, 2), (2, 8)):
        yield f"latent-split-joint-{p}-{d}", EXACT, (over(split, p), over(LATENT, d)), "two buffers to one row"
        yield f"latent-joint-split-{p}-{d}", EXACT, (over(LATENT, p), over(split, d)), "one row to two buffers"
    yield (
        "latent-cut-elsewhere", EXACT, (one(split), one(sections(LATENT, 512, 256, 384))), "sections that do not match",
    )  # fmt: skip
    yield "latent-one-section", EXACT, (one(sections(LATENT, 1152)), one(LATENT)), "a section that is the whole"
    for p, d in ((2, 1), (1, 2), (4, 4), (3, 2)):
        yield (
            f"k-in-two-{p}-{d}", EXACT, (over(sections(HEADS, 12, 4), p), over(HEADS, d)),
            "some bytes of each head apart",
        )  # fmt: skip
        yield f"k-from-one-{p}-{d}", EXACT, (over(HEADS, p), over(sections(HEADS, 12, 4), d)), "the same back"
    fine = gqa(0, "target", 0, 8, 8, 4, dtype=DType.U8)
    yield (
        "sections-of-folded-lanes", EXACT, (over(fine, 4), over(sections(HEADS, 12, 4), 2)),
        "a section ends inside a lane of the other side",
    )  # fmt: skip
    yield "sections-folded-back", EXACT, (over(sections(HEADS, 6, 10), 2), over(fine, 1)), "and the other way round"
    yield "sections-odd-owners", EXACT, (over(HEADS, 2), odd_owners()), "each rank its own lanes of each section"
    yield "sections-odd-sources", EXACT, (odd_owners(), one_two(HEADS)), "pieces of a head from two ranks"
    turned = sections(sections(HEADS, 8, 8, part=1), 4, 12)
    turned = attrs.evolve(turned, parts=tuple(turned.parts[i] for i in (0, 2, 1, 3)))
    yield "sections-in-turn", EXACT, (over(turned, 2), over(HEADS, 1)), "k, v, k, v: those of one name are in order"
    yield (
        "sections-in-turn-back", EXACT, (over(HEADS, 2), over(turned, 1)),
        "the index of a part is that of its first section",
    )  # fmt: skip


def _sections_of_kinds() -> Iterator[Case]:
    """Sections of slots, rings, deals and layers."""
    coded = changed(HEADS, 0, encoding="tiled")
    split = sections(LATENT, 1024, 128)
    yield "sections-of-state", EXACT, (one(sections(SLOT, 4, 4, 8)), one(SLOT)), "state in three buffers"
    yield "sections-of-a-ring", EXACT, (one(sections(RING, 4, 12)), one(HEADS)), "a ring of sections to pages"
    yield (
        "sections-beside-opaque", EXACT, (one(changed(sections(HEADS, 8, 8, part=1), 0, encoding="tiled")), one(coded)),
        "whole items of both",
    )  # fmt: skip
    yield "sections-dealt", EXACT, (dealt(split, 4, 64), dealt(LATENT, 2, 16)), "tokens over ranks on both sides"
    yield (
        "layers-in-two-groups", EXACT, (layers_apart(split), engine((LATENT, 4, None), ranks=1)),
        "a part in two groups, by layers",
    )  # fmt: skip
    yield (
        "shared-layers", EXACT, (engine((LATENT, 6, None), ranks=2), engine((LATENT, 4, None), ranks=1)),
        "a sink states layers that are written",
    )  # fmt: skip


def _refused_sections() -> Iterator[Case]:
    """Sections and opaque parts that do not fit."""
    coded = changed(HEADS, 0, encoding="tiled")
    split = sections(LATENT, 1024, 128)
    for name, group in broken().items():
        yield (
            f"refused-sections-{name}", "KVP-GEO-PARTS" if name == "twice" else "KVP-GEO-SECTIONS",
            (one(LATENT), one(group)), "a Description that contradicts itself",
        )  # fmt: skip
    yield (
        "refused-sections-length", "KVP-PLAN-FIT", (one(sections(LATENT, 1024, 64)), one(LATENT)),
        "a rotary part of another length",
    )  # fmt: skip
    yield "refused-sections-dtype", "KVP-PLAN-FIT", (one(as_type(split, DType.I8)), one(LATENT)), "of another type"
    yield (
        "refused-sections-to-opaque", OPAQUE, (one(split), one(changed(LATENT, 0, encoding="tiled"))),
        "a tiled row cannot be cut",
    )  # fmt: skip
    plain = attrs.evolve(HEADS, rows=8)
    yield (
        "refused-beside-opaque-pages", OPAQUE, (two_groups(coded, plain), one(coded)),
        "a plain part from pages of another size",
    )  # fmt: skip
    yield "beside-opaque-pages", EXACT, (two_groups(coded, HEADS), one(coded)), "and from pages of the same size"
    turned_back = dealt(attrs.evolve(coded, order=np.array([1, 0], np.uint32)), 2, 4)
    for name, pair in (("source", (turned_back, dealt(coded, 2, 4))), ("sink", (dealt(coded, 2, 4), turned_back))):
        yield f"refused-opaque-order-{name}", OPAQUE, pair, "as many runs, of which the other rank takes the first"
    idle = attrs.evolve(coded, interleave=64, origin=128)
    yield "opaque-without-a-deal", EXACT, (one(coded), one(idle)), "an interleave that means nothing"


def one_two(group: Group) -> Geometry:
    """One rank with layers 0 and 1."""
    return engine((group, 2, None), ranks=1)


def layers_ring() -> Geometry:
    """Layer 0, of which a ring is kept."""
    return one(attrs.evolve(RING, rows=16))


def as_type(group: Group, dtype: DType) -> Group:
    """The same of another element type."""
    return attrs.evolve(group, parts=tuple(attrs.evolve(p, dtype=dtype) for p in group.parts))


def two_groups(opaque: Group, plain: Group) -> Geometry:
    """K of the one and V of the other."""
    k, v = attrs.evolve(opaque, parts=opaque.parts[:1]), attrs.evolve(plain, id=1, name="v", parts=plain.parts[1:])
    return one(k, v)


def broken() -> dict[str, Group]:
    """Sections that do not tile a lane, and others that cannot be."""
    split = sections(LATENT, 1024, 128)
    return {
        "gap": changed(split, 1, at=1056), "overlap": changed(split, 1, at=1000), "late": changed(split, 0, at=8),
        "beyond": changed(split, 1, lane_bytes=256), "short": changed(split, 1, lane_bytes=64),
        "order": attrs.evolve(split, parts=split.parts[::-1]), "twice": attrs.evolve(LATENT, parts=LATENT.parts * 2),
        "wholes": changed(split, 1, whole=2304), "dtypes": changed(split, 1, dtype=DType.I8),
        "lanes": changed(split, 1, lanes=2), "opaque": changed(split, 1, encoding="tiled"),
        "alone": attrs.evolve(split, parts=split.parts[:1]),
        "hand-off": sections(handoff(0, "target", {"latent": (DType.U8, 1152)}), 1024, 128),
    }  # fmt: skip


def made() -> str:
    """The text of the file."""
    return text("plan/rows", (row(id, clause, pair, [], note) for id, clause, pair, note in plans()))


if __name__ == "__main__":
    FILE.write_text(made())
