"""Caches of a live engine in any framework, as the adapters drive them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto import Geometry, ItemKind, Pool

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Key = tuple[str, int, str]
"""Group, layer and part."""
ITEMS = 64


class EngineCache:
    """The caches of one rank, and who has which pages, rings and slots.

    A framework is adapted by a class of its own: `__init__` makes a world, `put` writes rows as the engine writes those
    of new tokens, and `get` reads them as its attention does. Both find them by the page table, never by address.
    """

    def __init__(self, geometry: Geometry, pool: Pool, items: int = ITEMS) -> None:
        self.geometry, self.pool = geometry, pool
        self.groups = {g.name: g for g in geometry.groups if g.kind is not ItemKind.HANDOFF}
        self._free = {name: list(range(items)) for name in self.groups}

    def put(self, key: Key, table: list[int], rows: Ints, data: Bytes) -> None:
        """Write `data` [rows, lanes, bytes] of these rows of a request; a part in sections comes whole."""
        raise NotImplementedError

    def get(self, key: Key, table: list[int], rows: Ints) -> Bytes:
        """The bytes that attention finds in these rows of a request, as many as `put` is given."""
        raise NotImplementedError

    def take(self, tokens: int) -> dict[str, list[int]]:
        """A page table for so many tokens."""
        need = {n: -(-tokens // g.rows) if g.kind is ItemKind.PAGE else 1 for n, g in self.groups.items()}
        return {name: [self._free[name].pop(0) for _ in range(count)] for name, count in need.items()}

    def give_back(self, table: dict[str, list[int]]) -> None:
        """Nobody needs these items any more."""
        for name, items in table.items():
            self._free[name] += items

    def write(self, table: dict[str, list[int]], ask: dict[str, Any]) -> None:
        """Do what `fill` asks."""
        (part,) = (p for p in self.groups[ask["group"]].parts if p.name == ask["part"] and not p.at)
        size = part.lane_bytes if part.whole is None else part.whole
        data = np.frombuffer(bytes.fromhex(ask["data"]), np.uint8).reshape(-1, part.lanes, size)
        self.put(_key(ask), table[ask["group"]], np.arange(ask["first"], ask["first"] + len(data)), data)

    def read(self, table: dict[str, list[int]], ask: dict[str, Any]) -> str:
        """The bytes that `read` asks for, in hex."""
        rows = np.arange(ask["first"], ask["first"] + ask["count"])
        return bytes(np.ascontiguousarray(self.get(_key(ask), table[ask["group"]], rows)).tobytes()).hex()


def _key(ask: dict[str, Any]) -> Key:
    return ask["group"], ask["layer"], ask["part"]
