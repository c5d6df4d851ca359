"""The adapter of live engines in torch: the paged pools and the attention of the reference engine, in both roles."""

from __future__ import annotations

from typing import Any

import torch
from engine_cache import ITEMS, Bytes, EngineCache, Ints, Key
from live_either import Either
from toy_engine import serve

from kvproto import Cache, DType, lay_out
from kvproto_reference.attention.batch import Span, batch_of
from kvproto_reference.attention.torch_kernel import TorchKernel
from kvproto_reference.cache import KVPool, Shard
from kvproto_reference.cache.forms import FORMS
from kvproto_reference.cache.memory import shareable
from kvproto_reference.engine import description
from kvproto_reference.models import ModelConfig

_SIZES: dict[str, Any] = {"hidden": 8, "ffn": 8, "nope_dim": 2, "v_dim": 2}
WORLDS: dict[str, list[ModelConfig]] = {
    "gqa": [ModelConfig(kind="gqa", layers=2, heads=2, kv_heads=2, head_dim=8, **_SIZES)],
    "mla": [
        ModelConfig(kind="mla", layers=3, heads=2, latent=8, rope_dim=4, **_SIZES),
        ModelConfig(kind="gqa", layers=1, heads=4, kv_heads=4, head_dim=2, **_SIZES),
    ],
    "long": [ModelConfig(kind="gqa", layers=1, heads=4, kv_heads=4, head_dim=16, **_SIZES)],
}
"""The caches of the worlds, of float32: a lane has as many bytes. Neither engine has rings or states."""
WORLDS["latent"] = WORLDS["mla"][:1]
_TOKEN = {"token": (DType.I32, 4)}
_HIDDEN = {**_TOKEN, "hidden": (DType.U8, 24)}
HANDOFF = {"gqa": _TOKEN, "mla": _HIDDEN, "latent": _HIDDEN, "long": _TOKEN, "bf16": _TOKEN}
CONVERTS = {"bf16": [ModelConfig(kind="gqa", layers=2, heads=2, kv_heads=2, head_dim=32, dtype="bfloat16", **_SIZES)]}
"""Worlds in bfloat16 whose rows may be converted to FP8 and back; what an engine in FP8 stores, it rounds by itself."""


def configs(world: str) -> list[ModelConfig]:
    """Models whose caches are those of a world; raises NotImplementedError for others."""
    if world not in WORLDS:
        raise NotImplementedError(f"world {world}: the reference engines' caches are paged")
    return WORLDS[world]


class _Seen(TorchKernel):
    """The attention kernel, which shows what it has collected."""

    def _keys_values(self, rows: Any, heads: torch.Tensor) -> Any:
        self.rows = rows
        return super()._keys_values(rows, heads)


class TorchCache(EngineCache):
    """Pools of the reference engine in torch, written and read by its step."""

    def __init__(self, world: str, heads_first: bool) -> None:
        models = CONVERTS.get(world) or configs(world)
        layout = description.Layout(kv_converts=FORMS[1:] if world in CONVERTS else ())
        caches = [description.cache(n, model, layout, (16, 8)[n]) for n, model in enumerate(models)]
        geometry = lay_out([*caches, Cache.handoff("first", HANDOFF[world])])
        self.pools = {
            cache.group.name: KVPool.allocate(model, ITEMS, cache.group.rows, memory=shareable)
            for cache, model in zip(caches, models, strict=True)
        }
        super().__init__(geometry, description.hand_over(geometry, self.pools, 0))

    def put(self, key: Key, table: list[int], rows: Ints, data: Bytes) -> None:
        if not len(rows):
            return
        group, layer, part = key
        pool = self.pools[group]
        batch = batch_of([Span(int(rows[0]), len(rows), table)], Shard(self.groups[group], 0))
        new = torch.from_numpy(data.copy()).view(getattr(torch, pool.config.dtype))
        pool.write(layer, pool.places(batch.slots), {part: new})

    def get(self, key: Key, table: list[int], rows: Ints) -> Bytes:
        group, layer, part = key
        pool, end = self.pools[group], int(rows[-1]) + 1
        kernel = _Seen(pool, range(1), range(1))
        kernel.plan(batch_of([Span(end, 1, [*table, *table])], Shard(self.groups[group], 0), whole=False))
        kernel.pool(layer, torch.zeros(1, 1, pool.config.row_dim))
        found: Bytes = kernel.rows[part][0, rows].contiguous().view(torch.uint8).numpy()
        return found


if __name__ == "__main__":
    serve(Either(TorchCache))
