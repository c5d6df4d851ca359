"""A cache whose accessor stands for an engine's attention, by page table and token; it knows nothing of kvproto."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine_cache import ITEMS, Bytes, EngineCache, Ints, Key

from kvproto import Cache, DType, ItemKind, KvprotoError, Options, Pool, Ticket, Withdrawal, allocate, lay_out
from kvproto.transport.nixl.direct import WriteMode
from kvproto.transport.nixl.transport import NixlTransport

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
    "long": [
        Cache.gqa("kv", 1, kv_heads=4, head_dim=64, page=16, dtype=DType.U8),
        Cache.handoff("first", {"token": (DType.I32, 4)}),
    ],
    "large": [
        Cache.gqa("kv", 64, kv_heads=8, head_dim=512, page=32, dtype=DType.U8),
        Cache.handoff("first", {"token": (DType.I32, 4)}),
    ],
}
_GQA: dict[str, Any] = {"kv_heads": 2, "head_dim": 32, "page": 16}
for _name, _cache in (
    ("bf16", Cache.gqa("kv", 2, **_GQA).converts("e4m3_tensor", "e4m3_block")),
    ("fp8_tensor", Cache.gqa("kv", 2, dtype=DType.F8E4M3, **_GQA).converts(
        "e4m3_tensor", scales={"k": 0.02, "v": [0.25, 0.01]})),
    ("fp8_block", Cache.gqa("kv", 2, dtype=DType.F8E4M3, scale_block=16, **_GQA).converts("e4m3_block")),
):  # fmt: skip
    WORLDS[_name] = [_cache, Cache.handoff("first", {"token": (DType.I32, 4)})]
WORLDS["latent"] = [cache for cache in WORLDS["mla"] if cache.group.name != "draft"]
SLOTS, SLOT = 5, 704
"""Staging slots of a sink, and their bytes: a stream takes several, and rows lie over their ends."""


class Toy(EngineCache):
    """Arrays of numpy, one for each part of a layer."""

    def __init__(self, world: str, heads_first: bool) -> None:
        caches = WORLDS[world]
        geometry = lay_out(caches)
        groups = {g.name: g for g in geometry.groups if g.kind is not ItemKind.HANDOFF}
        layers = {c.group.name: list(c.layers) for c in caches}
        shapes = {
            (g.name, layer, p.name): (ITEMS, p.lanes, g.rows, p.lane_bytes) if heads_first
            else (ITEMS, g.rows, p.lanes, p.lane_bytes)
            for g in groups.values() for layer in layers[g.name] for p in g.parts
        }  # fmt: skip
        self.memory = allocate(sum(math.prod(shape) for shape in shapes.values()))
        whole, at = np.from_dlpack(self.memory), 0
        held: dict[Key, Bytes] = {}
        for key, shape in shapes.items():
            held[key] = whole[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        axes = "page head token dim" if heads_first else "page token head dim"
        tensors = {
            name: {p.name: [held[name, n, p.name] for n in layers[name]] for p in g.parts} for name, g in groups.items()
        }
        super().__init__(geometry, Pool(geometry, tensors, axes=axes))
        self._cells = {key: a.transpose(0, 2, 1, 3) if heads_first else a for key, a in held.items()}
        """By group, layer and part: [item, row, head, byte]."""

    def put(self, key: Key, table: list[int], rows: Ints, data: Bytes) -> None:
        self._cells[key][self._places(key, table, rows)] = data

    def get(self, key: Key, table: list[int], rows: Ints) -> Bytes:
        return self._cells[key][self._places(key, table, rows)]

    def _places(self, key: Key, table: list[int], rows: Ints) -> tuple[Ints, Ints]:
        """Items and rows in them."""
        group, items = self.groups[key[0]], np.array(table)
        return items[rows // group.rows if group.kind is ItemKind.PAGE else rows * 0], rows % group.rows


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
    """Options to open an engine with: it offers PULL wherever memory is shared, and by NIXL has staging slots."""
    transport = ask["transport"].lower()
    chosen: Any = NixlTransport(WriteMode.PACKED, SLOTS, SLOT) if transport == "nixl" else transport
    return Options(transports=[chosen], verify=ask.get("verify", True), pull=transport == "shm", **keys_of(ask, folder))


def is_free(taken: Withdrawal, seconds: float) -> dict[str, Any]:
    """Whether memory that was taken back may be used for something else within so many seconds."""
    try:
        taken.wait(seconds)
    except TimeoutError:
        return {"free": False}
    return {"free": True}


def serve(adapter: Any) -> None:
    """JSON lines in, JSON lines out: the operations are the methods of the adapter."""
    for line in sys.stdin:
        ask = json.loads(line)
        call: Callable[[dict[str, Any]], Any] | None = getattr(adapter, f"on_{ask['op']}", None)
        answer: dict[str, Any] = {"seq": ask["seq"]}
        try:
            answer |= {"unsupported": ask["op"]} if call is None else {"ok": call(ask) or {}}
        except NotImplementedError as error:
            answer |= {"unsupported": str(error)}
        except KvprotoError as error:
            answer |= {"err": {"code": error.code.name, "path": error.path, "text": str(error)}}
        print(json.dumps(answer), flush=True)
        if ask["op"] == "stop":
            return
