"""What the checksum kernel reads (kernel.cu); nothing here touches a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram
from kvproto.transport.cuda.table import PLACES, SUM

__all__ = ["rebase", "sums"]


def sums(
    program: CopyProgram, addresses: Mapping[int, int], sink: bool
) -> tuple[npt.NDArray[np.uint8], int, list[int]]:
    """The image that the checksum kernel reads, the number of operations that it begins with, and the groups in order.

    `rebase` it to the address where it will lie. Its last bytes are the totals, a u64 for each group.
    """
    side = "sink" if sink else "source"
    ops = program.ops[np.array([m.size > 0 for m in program.maps], bool)[program.ops["map"]]]
    groups = np.unique(ops["group"]).tolist()
    made = np.zeros(len(ops), SUM)
    made["base"] = np.array([addresses[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
    made["base"] += ops[f"{side}_offset"].astype(np.uint64)
    for place in PLACES:
        made[place] = ops[f"{side}_{place}_stride"]
    made["seed"], made["lo"] = ops["seed"], ops["lo"]
    made["lanes"], made["lane_bytes"] = ops["lanes"], ops["lane_bytes"]
    pieces: list[npt.NDArray[Any]] = [made]
    here = made.nbytes
    for i, m in enumerate(program.maps):
        item, first = (m.sink_item, m.sink_row) if sink else (m.source_item, m.source_row)
        rows = np.arange(m.size) - np.repeat(m.ends - m.rows, m.rows) + np.repeat(first, m.rows)
        places = np.stack([np.repeat(item, m.rows), rows], axis=1).astype(np.uint32)
        some = ops["map"] == i
        made["places"][some], made["globals"][some] = here, here + places.nbytes
        made["n_rows"][some] = m.size
        pieces += [places, m.global_rows.astype(np.uint64)]
        here += places.nbytes + 8 * m.size
    made["total"] = here + 8 * np.searchsorted(groups, ops["group"]).astype(np.uint64)
    pieces.append(np.zeros(len(groups), np.uint64))
    return np.concatenate([p.reshape(-1).view(np.uint8) for p in pieces]), len(ops), groups


def rebase(image: npt.NDArray[np.uint8], operations: int, at: int) -> None:
    """Let the operations of `sums` point into their image at address `at`."""
    made = image[: operations * SUM.itemsize].view(SUM)
    for name in ("places", "globals", "total"):
        made[name] += np.uint64(at)
