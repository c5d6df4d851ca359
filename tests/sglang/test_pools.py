"""Pools of each class of SGLang's, handed over between engines of other page sizes and other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest

from kvproto import Options
from tests.cases import sampled
from tests.sglang.handover import Side, hand_over
from tests.sglang.kinds import KINDS, Standins, side

SIZES = [((16, 2), (64, 1)), ((1, 1), (32, 2)), ((64, 1), (16, 1)), ((64, 1), (64, 2))]


@pytest.mark.parametrize(("kind", "sizes"), sampled(KINDS, SIZES, every=3))
def test_every_value_is_where_the_other_engine_looks(kind: str, sizes: Any, tmp_path: Path) -> None:
    one, two = (side(kind, page, ranks) for page, ranks in sizes)
    assert hand_over(one, two, f"ipc://{tmp_path}/p-{{rank}}") == []


@pytest.mark.parametrize("kind", ["MHA", "MHA in FP8", "sliding windows", "EAGLE"])
def test_pages_of_heads_meet_pages_of_tokens(kind: str, tmp_path: Path) -> None:
    heads = Standins(layout="hnd")
    assert hand_over(side(kind, 64, 1, heads), side(kind, 16, 2), f"ipc://{tmp_path}/p-{{rank}}") == []
    assert hand_over(side(kind, 1, 1), side(kind, 32, 1, heads), f"ipc://{tmp_path}/q-{{rank}}") == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_that_flips_shows(kind: str, tmp_path: Path) -> None:

    def spoil(source: Side) -> None:
        KINDS[kind].flip(source.ranks[0], source)

    assert len(hand_over(side(kind, 64, 1), side(kind, 16, 1), f"ipc://{tmp_path}/p-{{rank}}", spoil=spoil)) == 1


def test_a_draft_may_start_cold(tmp_path: Path) -> None:
    """An engine without one prefills: the target's pages arrive, and the draft's are left alone."""
    sides = side("MHA", 64, 1), side("EAGLE", 16, 2)
    found = hand_over(*sides, f"ipc://{tmp_path}/p-{{rank}}", lambda _: Options(thread=False, cold_draft=True))
    assert found == [f"rank {rank}, model 1, {part} of layer 0" for rank in range(2) for part in "kv"]


def test_a_window_is_whole_where_pages_are_found_again(tmp_path: Path) -> None:
    """Pages that a radix cache keeps are fetched from their beginning on; that of smaller pages at prefill is not there."""
    one, two = side("sliding windows", 64, 1), side("sliding windows", 16, 1)
    two.exact = False
    assert hand_over(one, two, f"ipc://{tmp_path}/p-{{rank}}") == []
    one, two = side("sliding windows", 16, 1), side("sliding windows", 64, 1)
    two.exact = False
    with pytest.raises(AssertionError, match="NOT_HELD"):
        hand_over(one, two, f"ipc://{tmp_path}/q-{{rank}}")
