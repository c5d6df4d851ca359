"""What `plan` accepts lowers, and every byte arrives: worlds of `tests.plan.wild`, held to what each of them has."""

from collections import Counter
from types import ModuleType

import pytest

from kvproto.errors import RemoteError
from tests.plan.mutant import mutant
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


MUTANTS = {
    "a row covered in part is left out": ("copying/grants.py", "if group.partial else end // step", "if group is None else end // step"),
    "a section is read where the whole would be": ("copying/lowering.py", "begin = lane * whole + at\n", "begin = lane * whole\n"),
    "sections count lanes from the first of all": ("copying/lowering.py", "(local + lane - first) * stride", "lane * stride"),
    "a lane that is cut in its middle begins at its begin": ("copying/lowering.py", "lanes * piece.stride + within, stride", "lanes * piece.stride, stride"),
    "opaque pages move their live rows": ("copying/lowering.py", "rows = np.full(ours.size, group.rows)", "rows = np.full(ours.size, max(group.rows - 1, 1))"),
    "rings do not wrap": ("copying/lowering.py", "if kind.wraps:  # one item, which wraps", "if kind.wraps and not len(row):"),
}  # fmt: skip


WRONG = (AssertionError, RemoteError, ArithmeticError, ValueError, IndexError, TypeError)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_the_worlds_find_a_faulty_rule(name: str) -> None:
    with mutant(*MUTANTS[name], "tests.plan.wild") as wild, pytest.raises(WRONG):
        _all(wild)


def _all(wild: ModuleType) -> None:
    for seed in SEEDS:
        wild.outcome(wild.world(seed), seed)
