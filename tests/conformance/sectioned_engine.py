"""A reference engine whose K lies in two sections, the second ahead of the first: an adapter for live scenarios."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "conformance/testees"))

from engine_cache import ITEMS, Bytes, EngineCache, Ints, Key
from live_either import Either
from toy_engine import serve

from kvproto import Cache, DType, Pool, allocate, lay_out

ROWS, HEADS, SIZES = 16, 2, {"k": (12, 20), "v": 32}
AT = {"k[12:32]": (0, 20), "k[0:12]": (20, 32), "v": (32, 64)}
"""Where each section lies in the 64 bytes of a head."""


class Sectioned(EngineCache):
    """World gqa: a head is K's second section, its first, and V."""

    def __init__(self, world: str, heads_first: bool) -> None:
        parts = {name: (DType.U8, HEADS, size) for name, size in SIZES.items()}
        geometry = lay_out(
            [Cache.paged("kv", 2, parts=parts, page=ROWS), Cache.handoff("first", {"token": (DType.I32, 4)})]
        )
        memory = allocate(2 * ITEMS * ROWS * HEADS * 64)
        self._cells = np.from_dlpack(memory).reshape(2, ITEMS, ROWS, HEADS, 64)
        tensors = {name: [layer[..., lo:hi] for layer in self._cells] for name, (lo, hi) in AT.items()}
        super().__init__(geometry, Pool(geometry, {"kv": tensors}, axes="page token head dim"))

    def put(self, key: Key, table: list[int], rows: Ints, data: Bytes) -> None:
        cells, at = self._cells[key[1]], (np.array(table)[rows // ROWS], rows % ROWS)
        held = cells[at]
        held[..., _places(key[2])] = data
        cells[at] = held

    def get(self, key: Key, table: list[int], rows: Ints) -> Bytes:
        held: Bytes = self._cells[key[1]][np.array(table)[rows // ROWS], rows % ROWS]
        return held[..., _places(key[2])]


def _places(part: str) -> list[int]:
    """Of each byte of K or V of a head."""
    return [*range(20, 32), *range(20)] if part == "k" else [*range(32, 64)]


if __name__ == "__main__":
    serve(Either(Sectioned))
