"""What the checksum kernel reads (kernel.cu); nothing here touches a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram, RowMap
from kvproto.transport.cuda.table import MAP, MAP_FIELDS, PLACES, RUN_BYTES, RUN_WORDS, SUM, WORDS, up, write_runs

__all__ = ["SUMMED", "SumTable", "sum_table"]

SUMMED = 1 << 30
"""Bytes that take about a millisecond."""
_MOST = 65_535
"""Operations of a launch: blocks along the second axis of a grid."""
_ROW = 16
"""Bytes of an expanded row."""


@attrs.frozen(eq=False)
class SumTable:
    """One side's operations of a rank pair, sorted by the width of their words and by map."""

    ops: npt.NDArray[np.void]
    """Rows of dtype SUM; `total` is the position of the group among `groups`."""
    spans: tuple[tuple[int, int, int], ...]
    """(map, start, stop) of operations of one map."""
    launches: tuple[tuple[int, int, int], ...]
    """(bytes of a word, offset of the first operation in the image, number of operations)."""
    groups: tuple[int, ...]
    maps: tuple[frozenset[int], ...]
    """Of each group; a group none of whose maps has rows has no checksum."""
    n_maps: int
    """Maps to expand: those of rows, then those of global rows."""

    def sizes(self, maps: Sequence[RowMap]) -> tuple[int, int]:
        """Bytes of an image and of the expanded rows."""
        runs = sum(len(m.rows) + len(m.piece_rows) for m in maps)
        return self._runs + RUN_BYTES * runs + 8 * len(self.groups) + 8, 2 * _ROW * sum(m.size for m in maps) + _ROW

    @property
    def _ops(self) -> int:
        return up(self.n_maps * MAP.itemsize)

    @property
    def _runs(self) -> int:
        return self._ops + up(self.ops.nbytes)

    def write(self, maps: Sequence[RowMap], image: npt.NDArray[np.uint8], image_at: int, rows_at: int) -> int:
        """Write one request's image, to be read at address `image_at`; the number of bytes, the last being the totals.

        Rows are expanded to `rows_at`.
        """
        ops = image[self._ops : self._ops + self.ops.nbytes].view(SUM)
        ops.data.cast("B")[:] = self.ops.data.cast("B")
        at, rows = self._runs, [rows_at]
        for n, m in enumerate((*maps, *maps)):
            globals_ = n >= len(maps)
            size = len(m.piece_rows if globals_ else m.rows)
            MAP_FIELDS.pack_into(image.data, n * MAP.itemsize, image_at + at, rows[-1], size, m.size)
            runs = image[at : at + RUN_BYTES * size].view(np.uint32).reshape(RUN_WORDS, size)
            if not globals_:
                write_runs(m, runs)
            elif size:
                runs[:] = 0
                np.cumsum(m.piece_rows[:-1], out=runs[0, 1:], dtype=np.uint32)
                runs[2] = m.piece_first
            at += RUN_BYTES * size
            rows.append(rows[-1] + _ROW * m.size)
        at = -(-at // 8) * 8
        for n, start, stop in self.spans:
            some = ops[start:stop]
            some["places"], some["globals"], some["n_rows"] = rows[n], rows[n + len(maps)], maps[n].size
        ops["total"] *= 8
        ops["total"] += np.uint64(image_at + at)
        image[at : at + 8 * len(self.groups)] = 0
        return at + 8 * len(self.groups)

    def found(self, maps: Sequence[RowMap], totals: npt.NDArray[np.uint8]) -> dict[int, int]:
        """Checksums by sink group id, of the last bytes of the image."""
        some = {n for n, m in enumerate(maps) if m.size}
        values = totals.view(np.uint64).tolist()
        return {g: value for g, of, value in zip(self.groups, self.maps, values, strict=True) if some & of}


def sum_table(program: CopyProgram, addresses: Mapping[int, int], sink: bool) -> SumTable:
    """The table of a program's operations on one side, whose regions are at these addresses."""
    side = "sink" if sink else "source"
    ops = program.ops
    made = np.zeros(len(ops), SUM)
    made["base"] = np.array([addresses[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
    made["base"] += ops[f"{side}_offset"].astype(np.uint64)
    for place in PLACES:
        made[place] = ops[f"{side}_{place}_stride"]
    together = ops["lane_bytes"].astype(np.uint64)
    for name in ("base", *PLACES):
        together |= made[name]
    word = np.max([np.where(together & np.uint64(size - 1), 1, size) for size in WORDS], axis=0, initial=1)
    groups = np.unique(ops["group"]).tolist()
    made["seed"], made["lo"], made["sink"] = ops["seed"], ops["lo"], sink
    made["lanes"], made["lane_bytes"] = ops["lanes"], ops["lane_bytes"]
    made["total"] = np.searchsorted(groups, ops["group"])
    order = np.lexsort((ops["map"], -word))
    made, word, maps = made[order], word[order], ops["map"][order].tolist()
    firsts = np.flatnonzero(np.diff(word, prepend=0)).tolist()
    cuts = sorted({*firsts, *range(0, len(ops), _MOST), len(ops)})
    n_maps = 2 * len(program.maps)
    begin = up(n_maps * MAP.itemsize)
    spans, at = [], 0
    for number, some in groupby(maps):
        spans.append((number, at, at := at + len(list(some))))
    return SumTable(
        made, tuple(spans), tuple((int(word[a]), begin + a * SUM.itemsize, b - a) for a, b in pairwise(cuts)),
        tuple(groups), tuple(frozenset(ops["map"][ops["group"] == g].tolist()) for g in groups), n_maps,
    )  # fmt: skip
