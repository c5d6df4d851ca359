"""Pools of families that no table of K and V describes, handed over between engines of other page sizes and other numbers
of ranks.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.families import FAMILIES
from tests.sglang.handover import Side, hand_over
from tests.sglang.kinds import Standins

SIZES = [((64, 1), (16, 1)), ((128, 2), (256, 1)), ((256, 1), (32, 2)), ((64, 1), (64, 2))]


def side(family: str, page: int, ranks: int) -> Side:
    return FAMILIES[family].side(page, ranks, Standins())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_byte_is_where_the_other_engine_looks(family: str, sizes: Any, tmp_path: Path) -> None:
    one, two = (side(family, page, ranks) for page, ranks in sizes)
    assert hand_over(one, two, f"ipc://{tmp_path}/p-{{rank}}") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bit_that_flips_shows_in_each_part(family: str, tmp_path: Path) -> None:
    one, two = side(family, 128, 1), side(family, 64, 1)
    assert one.rows is not None
    keys = {rows.key[2]: rows.key for rows in one.rows(one, 0)}

    def spoil(source: Side) -> None:
        assert source.rows is not None
        for rows in source.rows(source, 0):
            if rows.key in keys.values():
                whole, at = rows.place
                whole[at[-1, 0, 0]] ^= 1

    assert two.rows is not None
    found = hand_over(one, two, f"ipc://{tmp_path}/p-{{rank}}", spoil=spoil)
    assert found == [f"rank 0, {rows.key}" for rows in two.rows(two, 0) if rows.key in keys.values()]
