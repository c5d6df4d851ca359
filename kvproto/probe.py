"""Programs that are named by their run length, for probes, benchmarks and tests."""

from __future__ import annotations

import numpy as np

from kvproto.program import OP, CopyProgram, IntArray, RowMap

__all__ = ["scattered"]


def scattered(
    width: int, number: int, layers: int = 1, pool: int | None = None, seed: int = 0, run: int = 1
) -> CopyProgram:
    """`number` runs of `run` rows of `width` bytes, of each layer, between places in no order of pools of `pool` rows.

    A pool holds layer after layer without gaps, in region 0.
    """
    dice = np.random.default_rng(seed)
    room = (pool or number * run) // run
    places = [dice.permutation(room)[:number] if room < 1 << 24 else _some(dice, room, number) for _ in range(2)]
    zero = np.zeros(number, np.int64)
    ops = np.zeros(layers, OP)
    size = room * run
    ops["layer"], ops["lanes"], ops["lane_bytes"] = np.arange(layers), 1, width
    for side in ("source", "sink"):
        ops[f"{side}_offset"] = np.arange(layers) * size * width
        ops[f"{side}_item_stride"] = size * width
        ops[f"{side}_row_stride"] = ops[f"{side}_lane_stride"] = width
        ops[f"{side}_items"], ops[f"{side}_rows"] = 1, size
    first = np.array([0])
    made = RowMap(zero, places[0] * run, zero, places[1] * run, np.full(number, run), first, np.array([number * run]))
    return CopyProgram((made,), ops, (1,))


def _some(dice: np.random.Generator, room: int, number: int) -> IntArray:
    """Distinct random places of a room that is too large to permute."""
    found: IntArray = np.unique(dice.integers(0, room, number + number // 8 + 64))
    some: IntArray = dice.permutation(found)[:number]
    return some
