"""What `plan` accepts lowers, and every byte arrives: worlds of `tests.plan.wild`, held to what each of them has.

tools/prove/bugs.toml plants faulty rules that they must find.
"""

from collections import Counter

from tests.plan.wild import outcome, summary, world

SEEDS = range(80)
ODDITIES = (
    "PAGE to PAGE", "PAGE to RING", "RING to PAGE", "RING to RING", "SLOT to SLOT", "opaque part", "opaque pages dealt",
    "plain part beside an opaque one", "opaque slot with scratch", "rows covered in part", "slot with scratch", "deals apart",
    "deals by tables", "cp size beyond 9", "interleave beyond 9", "lanes folded", "sections at the source", "sections at the sink",
    "sections of several lanes", "other parts in the group", "pages of other sizes", "sub-range of lanes",
    "a source group for several sink groups", "SPREAD_ONE", "FEW_SOURCES", "COLD_DRAFT",
)  # fmt: skip


def test_what_is_planned_is_lowered_and_moved() -> None:
    codes: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for seed in SEEDS:
        code, found = outcome(world(seed), seed)
        codes[code] += 1
        odd.update(found)
    print(summary(codes, odd))
    assert codes["accepted"] > len(SEEDS) // 2
    assert len(codes) > 3
    assert [what for what in ODDITIES if not odd[what]] == []
