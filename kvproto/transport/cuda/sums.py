"""What the checksum kernel reads (kernel.cu); nothing here touches a device."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram
from kvproto.transport.cuda.table import PLACES, SUM, WORDS

__all__ = ["SUMMED", "Image", "sums"]

SUMMED = 1 << 30
"""Bytes that take about a millisecond."""
_MOST = 65_535
"""Operations of a launch: blocks along the second axis of a grid."""


@attrs.frozen(eq=False)
class Image:
    """What lies in the GPU's memory: operations, and the places of their rows."""

    bytes: npt.NDArray[np.uint8]
    """The last ones are the totals, a u64 for each group."""
    words: tuple[tuple[int, int, int], ...]
    """Width of the words that a launch reads, its first operation, and its number of operations."""
    groups: list[int]

    def rebase(self, at: int) -> None:
        """Let the operations point into the image at address `at`, once."""
        made = self.bytes[: sum(count for *_, count in self.words) * SUM.itemsize].view(SUM)
        for name in ("places", "globals", "total"):
            made[name] += np.uint64(at)


def sums(program: CopyProgram, addresses: Mapping[int, int], sink: bool) -> Image:
    """The image of a program's checksums on one side, whose regions are at these addresses."""
    side = "sink" if sink else "source"
    ops = program.ops[np.array([m.size > 0 for m in program.maps], bool)[program.ops["map"]]]
    groups = np.unique(ops["group"]).tolist()
    made = np.zeros(len(ops), SUM)
    made["base"] = np.array([addresses[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
    made["base"] += ops[f"{side}_offset"].astype(np.uint64)
    for place in PLACES:
        made[place] = ops[f"{side}_{place}_stride"]
    together = ops["lane_bytes"].astype(np.uint64)
    for name in ("base", *PLACES):
        together |= made[name]
    word = np.max([np.where(together & np.uint64(size - 1), 1, size) for size in WORDS], axis=0, initial=1)
    order = np.argsort(-word, kind="stable")
    made, ops, word = made[order], ops[order], word[order]
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
    image = np.concatenate([p.reshape(-1).view(np.uint8) for p in pieces])
    firsts = np.flatnonzero(np.diff(word, prepend=0)).tolist()
    cuts = sorted({*firsts, *range(0, len(ops), _MOST), len(ops)})
    launches = [(int(word[a]), a, b - a) for a, b in pairwise(cuts)]
    return Image(image, tuple(launches), groups)
