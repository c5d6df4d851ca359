"""Statements of HiCache's pools of the host: each by its very class, in every layout that strides describe.

A pool holds all layers of a token side by side (page_first), of a page (page_first_direct, page_head), or each layer
apart (layer_first). The layers of a draft that is packed behind the target's are a group of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproto import Cache
from kvproto_engines.elements import FLOATS
from kvproto_sglang.pools.stated import Owner, Stated, Table, refused

__all__ = ["HOST_POOLS", "state_host"]

_LAYER = {"layer_first": 0, "page_first": 1, "page_first_direct": 1, "page_head": 3}
"""The axis of layers in the tensor of K, of V, or of latents, by layout."""
_AXES = {"page_head": "page head token dim"}


def _attention(pool: Any) -> dict[str, tuple[Any, int]]:
    return {"k": (pool.kv_buffer[0], pool.head_dim), "v": (pool.kv_buffer[1], pool.v_head_dim)}


def _latent(pool: Any) -> dict[str, tuple[Any, int]]:
    return {"latent": (pool.kv_buffer, pool.kv_cache_dim)}


HOST_POOLS = {"MHATokenToKVPoolHost": _attention, "MLATokenToKVPoolHost": _latent}


def state_host(pool: Any, owner: Owner, drafts: Owner | None = None) -> list[Stated]:
    """Contents of a pool of the host, of the target and of drafts behind it; raises LocalError for unknown pools."""
    kind, known = type(pool).__name__, sorted(HOST_POOLS)
    if kind not in known:
        raise refused(f"host pool of the {owner.of}", f"one of {known}", kind)
    if pool.layout not in _LAYER or (kind == "MLATokenToKVPoolHost" and pool.layout not in list(_LAYER)[:3]):
        raise refused("hicache_mem_layout", f"one of {list(_LAYER)}", pool.layout)
    if pool.dtype not in FLOATS:
        raise refused("kv_cache_dtype", f"one of {[str(each) for each in FLOATS]}", str(pool.dtype))
    if getattr(pool, "dcp_size", 1) != 1:
        raise refused("dcp_size", "1", str(pool.dcp_size))
    count = pool.target_layer_num
    made = [_group(pool, owner, range(pool.start_layer, pool.start_layer + count), range(count))]
    if pool.layer_num > count:
        if drafts is None:
            raise refused("layers of a draft", "none without a draft model", str(pool.layer_num - count))
        made.append(_group(pool, drafts, range(pool.layer_num - count), range(count, pool.layer_num)))
    return made


def _group(pool: Any, owner: Owner, ids: Sequence[int], places: Sequence[int]) -> Stated:
    """Layers of one model, by their numbers and their places in the pool."""
    tensors, parts, axis = {}, {}, _LAYER[pool.layout]
    heads = owner.heads(pool.head_num) if hasattr(pool, "head_num") else 1
    for part, (tensor, dim) in HOST_POOLS[type(pool).__name__](pool).items():
        layers = [tensor.select(axis, place) for place in places]
        tensors[part] = [each if each.dim() == 4 else each.unflatten(0, (-1, pool.page_size)) for each in layers]
        parts[part] = FLOATS[pool.dtype], heads, dim * pool.dtype.itemsize
    cache = Cache.paged(owner.title, ids, parts=parts, page=pool.page_size, model=owner.number)
    return Stated(cache, tensors, _AXES.get(pool.layout, "page token head dim"), Table(pool.page_size))
