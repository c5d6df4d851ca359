"""A cache with an accessor of its own, which stands for an engine's attention: it knows nothing of kvproto's copies.

What a page, ring or slot holds is read and written by token and head through the page table, never by address.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto import Cache, DType, ItemKind, KvprotoError, Options, Pool, Ticket, allocate, lay_out

Bytes = npt.NDArray[np.uint8]
ITEMS = 64
WORLDS: dict[str, list[Cache]] = {
    "gqa": [
        Cache.gqa("kv", 2, kv_heads=2, head_dim=32, page=16, dtype=DType.U8),
        Cache.handoff("first", {"token": (DType.I32, 4)}),
    ],
    "mla": [
        Cache.mla("target", 3, latent=32, rope=16, page=8, dtype=DType.U8),
        Cache.gqa("draft", 1, kv_heads=4, head_dim=8, page=16, dtype=DType.U8, model=1),
        Cache.handoff("first", {"token": (DType.I32, 4), "hidden": (DType.U8, 24)}),
    ],
    "hybrid": [
        Cache.gqa("full", [0], kv_heads=2, head_dim=16, page=8, dtype=DType.U8),
        Cache.window("window", [1], kv_heads=2, head_dim=16, ring_rows=8, dtype=DType.U8),
        Cache.state("state", [2], parts={"ssm": (DType.U8, 4, 32)}, rows=2, scratch_rows=1),
    ],
}


class Toy:
    """Pools of one world, and who has which items."""

    def __init__(self, world: str, heads_first: bool) -> None:
        caches = WORLDS[world]
        self.geometry = lay_out(caches)
        self.groups = {g.name: g for g in self.geometry.groups if g.kind is not ItemKind.HANDOFF}
        layers = {c.group.name: list(c.layers) for c in caches}
        shapes = {
            (g.name, layer, p.name): (ITEMS, p.lanes, g.rows, p.lane_bytes) if heads_first
            else (ITEMS, g.rows, p.lanes, p.lane_bytes)
            for g in self.groups.values() for layer in layers[g.name] for p in g.parts
        }  # fmt: skip
        self.memory = allocate(sum(math.prod(shape) for shape in shapes.values()))
        whole, at = np.from_dlpack(self.memory), 0
        held: dict[tuple[str, int, str], Bytes] = {}
        for key, shape in shapes.items():
            held[key] = whole[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        axes = "page head token dim" if heads_first else "page token head dim"
        tensors = {
            name: {p.name: [held[name, n, p.name] for n in layers[name]] for p in g.parts}
            for name, g in self.groups.items()
        }
        self.pool = Pool(self.geometry, tensors, axes=axes)
        self._cells = {key: a.transpose(0, 2, 1, 3) if heads_first else a for key, a in held.items()}
        """By group, layer and part: [item, row, head, byte]."""
        self._free = {name: list(range(ITEMS)) for name in self.groups}

    def take(self, tokens: int) -> dict[str, list[int]]:
        """A page table for so many tokens."""
        need = {n: -(-tokens // g.rows) if g.kind is ItemKind.PAGE else 1 for n, g in self.groups.items()}
        return {name: [self._free[name].pop(0) for _ in range(count)] for name, count in need.items()}

    def give_back(self, table: dict[str, list[int]]) -> None:
        """Nobody needs these items any more."""
        for name, items in table.items():
            self._free[name] += items

    def rows(self, table: dict[str, list[int]], group: str, layer: int, part: str, first: int, count: int) -> Any:
        """Cells and the two indices by which attention finds rows [first, first + count)."""
        cells, rows = self._cells[group, layer, part], np.arange(first, first + count)
        size, items = self.groups[group].rows, np.array(table[group])
        return cells, items[rows // size if self.groups[group].kind is ItemKind.PAGE else rows * 0], rows % size

    def write(self, table: dict[str, list[int]], ask: dict[str, Any]) -> None:
        """Rows from `first` on, as attention writes them."""
        data = np.frombuffer(bytes.fromhex(ask["data"]), np.uint8)
        shape = self._cells[ask["group"], ask["layer"], ask["part"]].shape[2:]
        cells, items, rows = self.rows(table, *_place(ask), data.size // math.prod(shape))
        cells[items, rows] = data.reshape(-1, *shape)

    def read(self, table: dict[str, list[int]], ask: dict[str, Any]) -> str:
        """Rows [first, first + count) as attention reads them, in hex."""
        cells, items, rows = self.rows(table, *_place(ask), ask["count"])
        return bytes(cells[items, rows].tobytes()).hex()


def _place(ask: dict[str, Any]) -> tuple[str, int, str, int]:
    return ask["group"], ask["layer"], ask["part"], ask["first"]


def ticket_of(ask: dict[str, Any]) -> Ticket:
    """The ticket that the suite has made."""
    return Ticket(key=bytes.fromhex(ask["key"]), engine=ask["engine"], replica=0, deadline=ask["deadline"])


def keys_of(ask: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Options with the keys of an engine, and of a source the clients that may connect; none where there are none."""
    if "keys" not in ask:
        return {}
    for name, text, mode in (
        ("secret.key", ask["keys"]["secret"], 0o600), ("public.key", ask["keys"]["public"], 0o644),
        ("allow.toml", "".join(f'[[client]]\nkey = "{c["key"]}"\nengine = "{c["engine"]}"\n'
                               for c in ask.get("clients", [])), 0o600),
    ):  # fmt: skip
        (folder / name).touch(mode)
        (folder / name).write_text(text + "\n")
    return {"keys": folder}


def options_of(ask: dict[str, Any], folder: Path) -> Options:
    """What an engine is opened with: it offers PULL wherever memory is shared."""
    transport = ask["transport"].lower()
    return Options(
        transports=[transport], verify=ask.get("verify", True), pull=transport == "shm", **keys_of(ask, folder)
    )


def serve(adapter: Any) -> None:
    """JSON lines in, JSON lines out: the operations are the methods of the adapter."""
    for line in sys.stdin:
        ask = json.loads(line)
        call: Callable[[dict[str, Any]], Any] | None = getattr(adapter, f"on_{ask['op']}", None)
        answer: dict[str, Any] = {"seq": ask["seq"]}
        try:
            answer |= {"unsupported": ask["op"]} if call is None else {"ok": call(ask) or {}}
        except KvprotoError as error:
            answer |= {"err": {"code": error.code.name, "path": error.path, "text": str(error)}}
        print(json.dumps(answer), flush=True)
        if ask["op"] == "stop":
            return
