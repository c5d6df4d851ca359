"""Tokens over ranks: the suite's own deal says what kvproto's says, and the cases tell a wrong deal or merge by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto import Group, local_row, owned_before, owner
from kvproto.wire import from_json
from kvproto_conformance import dcp, dcp_vectors, testee
from kvproto_conformance.cases import load
from kvproto_conformance.dcp import Deal
from kvproto_conformance.run import run

CASES = [case for case in load() if case.suite in ("deal", "merge")]


def test_the_file_is_as_its_inputs_say() -> None:
    assert dcp_vectors.FILE.read_text() == dcp_vectors.made()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 40), st.integers(1, 5), st.integers(0, 300))
def test_two_deals_agree(ranks: int, run_: int, origin: int, step: int, more: int) -> None:
    made = dcp_vectors.group(ranks, run_ * step, origin * step, step=step)
    group, deal = from_json(Group, made), Deal.of(made)
    start = origin * step if ranks > 1 else 0
    tokens = np.arange(start, start + more, dtype=np.int64)
    rows = tokens // step
    local = rows if ranks == 1 else local_row(group, rows)
    ours = list(zip(owner(group, rows).tolist(), local.tolist(), strict=True))
    assert ours == [deal.owner(token) for token in tokens.tolist()]
    for rank in range(ranks):
        assert owned_before(group, rank, (start + more) // step) == deal.length(rank, start + more)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(("interleave", "origin"), [(1, 0), (3, 0), (4, 6), (16, 1)])
def test_every_token_has_one_place(ranks: int, interleave: int, origin: int) -> None:
    """Lengths are the number of places, which have no gaps; rank 0 has the longest."""
    deal = Deal.of(dcp_vectors.group(ranks, interleave, origin))
    for tokens in range(origin, origin + 70):
        places = [deal.owner(token) for token in range(origin if ranks > 1 else 0, tokens)]
        lengths = [deal.length(rank, tokens) for rank in range(ranks)]
        assert set(places) == {(rank, row) for rank, length in enumerate(lengths) for row in range(length)}
        assert len(places) == sum(lengths)
        assert max(lengths) == lengths[0] <= lengths[-1] + interleave or ranks == 1


class Within(testee.Testee):
    """An implementation within this process."""

    def __init__(self, answer: Any) -> None:
        super().__init__(["no process"])
        self._answer = answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._answer(question)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            return {"broken": repr(error)}
        return found


def failed(answer: Any) -> set[str]:
    return {result.case.id.removeprefix("dcp/") for result in run(CASES, Within(answer)) if result.wrong}


def test_the_suite_passes_its_own_answers() -> None:
    assert failed(dcp.answer) == set()


MUTANTS: dict[str, tuple[str, str, set[str]]] = {
    # the rule, what stands in its place, cases that must fail
    "origin ignored": (
        "past = token - self.origin", "past = token",
        {"owner-2x2-from-5", "owner-2x2-from-5-before", "slots-3x4-from-100-rank-0"}),
    "origin ignored in lengths": (
        "divmod(max(tokens - self.origin, 0)", "divmod(max(tokens, 0)",
        {"length-2x2-from-5", "length-3x4-from-100-before", "pages-3x4-from-100"}),
    "owned before the origin": (
        "if past < 0:", "if past < -1:", {"owner-2x2-from-5-before", "owner-3x4-from-100-before"}),
    "interleave off by one": (
        "divmod(past // self.interleave,", "divmod((past + 1) // self.interleave,",
        {"owner-2x4", "owner-2x3", "owner-4x16", "length-2x2", "slots-example"}),
    "always token by token": (
        "divmod(past // self.interleave,", "divmod(past,", {"owner-2x4", "owner-5x7", "length-4x64"}),
    "rows of a turn only": (
        "* self.interleave + past % self.interleave)", "* self.interleave)", {"owner-2x4", "slots-2x3-rank-1"}),
    "interleave in rows": (
        "past % self.interleave) // self.step", "past % self.interleave)",
        {"owner-4x8-step-4", "owner-2x6-step-3-from-9"}),
    "order ignored": ("rank = self.order[run]", "rank = run % self.ranks", {"owner-2x4-zigzag", "owner-3x1-spans", "slots-4x2-zigzag-rank-3"}),
    "order of ranks, not of runs": (
        "len(self.order))\n        rank", "self.ranks)\n        rank", {"owner-2x4-zigzag", "owner-4x16-quarters", "slots-2x3-uneven-rank-1"}),
    "every rank once a turn": (
        "turns * self.order.count(rank)", "turns", {"owner-2x3-uneven", "owner-4x2-zigzag", "slots-2x4-zigzag-from-6-step-2-rank-1"}),
    "lengths of equal shares": ("self.order.count(cp_rank) *", "1 *", {"length-2x4-zigzag", "length-2x3-uneven"}),
    "pages of rank 0": (
        "max(self.length(rank, tokens) for rank in range(self.ranks))", "self.length(0, tokens)",
        {"pages-3x2-last-first", "pages-2x3-uneven"}),
    "a deal of one": ("if self.ranks == 1:\n            return 0, token // self.step", "if False:\n            return 0, 0", {"owner-1-as-if-dealt"}),
    "incomplete rows count": ("return held // self.step", "return -(-held // self.step)", {"length-4x8-step-4"}),
    "lengths by rounding up": (
        "return held // self.step", "return -(-max(tokens - self.origin, 0) // self.ranks) // self.step", {"length-8x1", "length-2x4"}),
    "each rank's own pages": (
        "max(self.length(rank, tokens)", "min(self.length(rank, tokens)", {"pages-8x1", "pages-2x2", "pages-4x64"}),
    "slots of others' tokens": (
        "found is None or found[0] != cp_rank", "found is None", {"slots-example", "slots-8x1-rank-7"}),
    "pages of tokens": (
        "found[1] // self.page]", "token // self.page // self.ranks]", {"slots-2x3-rank-0", "slots-4x64-rank-3"}),
    "base 2 read as natural": ("(math.log(2) if part[\"base\"] == \"2\" else 1)", "1", {"merge-base-2", "merge-base-mixed"}),
    "natural read as base 2": ("(math.log(2) if part[\"base\"] == \"2\" else 1)", "math.log(2)", {"merge-example", "merge-base-mixed"}),
    "empty by what was written": (
        "if int(part[\"tokens\"][i]) == 0:", "if False:",
        {"merge-empty-shard-zero", "merge-empty-shard-inf", "merge-empty-shard-stale", "merge-all-empty-finite", "merge-row-by-row"}),
    "an output that nobody wrote": (
        "return -math.inf, [0.0] * len(out)", "return -1e30, out",
        {"merge-empty-shard-nan", "merge-all-empty-stale", "merge-one-of-eight", "merge-all-empty-one"}),
    "empty by multiplication": (
        "live = [(lse, out) for lse, out in parts if lse > -math.inf]", "live = parts", {"merge-masked", "merge-all-empty-one"}),
    "greatest not taken off": ("most = max(lse for lse, _ in live)", "most = 0.0", {"merge-apart"}),
    "a mean of outputs": ("math.exp(lse - total) * x", "x / len(live)", {"merge-example", "merge-seven-ranks"}),
    "lse in bf16": (
        "float(part[\"lse\"][i]) *", "(round(float(part[\"lse\"][i]) * 16) / 16) *", {"merge-float"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_fails_the_cases_that_name_it(name: str) -> None:
    rule, faulty, wanted = MUTANTS[name]
    source = Path(dcp.__file__).read_text()
    assert source.count(rule) == 1
    mutant: dict[str, Any] = {"__name__": "kvproto_conformance.mutant"}
    exec(compile(source.replace(rule, faulty), dcp.__file__, "exec"), mutant)
    assert wanted <= failed(mutant["answer"])
