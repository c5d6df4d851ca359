"""Two transports that damage what they copy, as another package would install them: `flips-target`, `flips-draft`."""

from collections.abc import Mapping, Sequence

from kvproto.transport.base import Memory, Move, Provider
from kvproto.transport.bench import Measured
from kvproto.transport.shm.transport import ShmCopy, ShmTransport

ROW, BYTE, BIT = 3, 3, 0x40
"""The top exponent bit of the first float32 of row 3."""


class Flipping(ShmTransport):
    """Copies as `shm` does, and flips one bit of what it wrote of one group: in layer 0, the last part."""

    def __init__(self, group: int) -> None:
        self._group = group

    def start(self, moves: Sequence[Move]) -> ShmCopy:
        """Copy, then flip."""
        copied = super().start(moves)
        for move in moves:
            ops = move.program.ops
            (op,) = ops[(ops["group"] == self._group) & (ops["layer"] == 0)][-1:]
            rows = move.program.maps[op["map"]]
            place = op["sink_offset"] + int(rows.sink_item[0]) * op["sink_item_stride"]
            place += (int(rows.sink_row[0]) + ROW) * op["sink_row_stride"] + BYTE
            move.sinks[int(op["sink_region"])].buffer[place] ^= BIT  # type: ignore[union-attr]
        return copied


class _Flips(Provider):
    def __init__(self, name: str, group: int) -> None:
        """`group` is the sink's group id."""
        self.name, self._group = name, group

    def preference(self, memory: Memory) -> int:
        return 0

    def open(self, memory: Mapping[int, Memory], measured: Sequence[Measured] = ()) -> Flipping:
        return Flipping(self._group)


TARGET = _Flips("flips-target", 0)
DRAFT = _Flips("flips-draft", 1)
