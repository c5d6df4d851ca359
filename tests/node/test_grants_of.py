"""What a sink rank asks for, made from the page tables of its engine."""

import numpy as np

from kvproto.copying.program import RankLayout
from kvproto.planning.geometry import Geometry, Rank, handoff, mla, owns
from kvproto.rank import page_tables
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import DType


def test_the_window_of_a_hand_off_grant_is_zero() -> None:
    """KVP-HND-WINDOW: it needs no items either, and the engine names no pages for it."""
    groups = mla(0, "target", 0, 8, 4), handoff(1, "first token", {"token": (DType.I32, 4)})
    geometry = Geometry(
        replica=0, facts=(), groups=groups, ranks=(Rank(rank=0, owns=tuple(owns(g, [0]) for g in groups)),)
    )
    side = RankLayout(geometry, 0, columns_without_gaps(geometry, 0, {0: 8})[0])
    made = page_tables.grants_of(page_tables.PageRules(side), {"target": np.array([5, 2, 7])}, 4, 11)
    assert (made[0].first, made[0].count, made[0].valid, made[0].items.tolist()) == (4, 7, 11, [2, 7])
    assert (made[1].first, made[1].count, made[1].valid, made[1].items.tolist()) == (0, 0, 0, [])
