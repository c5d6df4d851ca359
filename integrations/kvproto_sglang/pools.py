"""Statements of SGLang's pools: each by its very class, as derived classes hold something else.

Tensors are SGLang's own, on the CPU or on a GPU, in any order that their strides say: [slot, head, dim] with the slots
of a page one after another (NHD), [page, head, token, dim] (HND), or [slot, 1, latent] (MLA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from kvproto import Cache, DType
from kvproto_engines.elements import FLOATS, QUANTIZED
from kvproto_engines.sparse import index_of, index_views, row_of
from kvproto_sglang.stated import Owner, Stated, Table, refused
from kvproto_sglang.states import recurrent

__all__ = ["FLAT", "KINDS", "state"]


def state(pool: Any, owner: Owner, kinds: Iterable[str] | None = None) -> list[Stated]:
    """The caches in a pool of a model; raises LocalError for a class that is not one of `kinds`, or of `KINDS`."""
    kind, known = type(pool).__name__, sorted(KINDS if kinds is None else kinds)
    if kind not in known:
        raise refused(f"KV pool of the {owner.of}", f"one of {known}", kind)
    return KINDS[kind](pool, owner)


def _attention(pool: Any, owner: Owner) -> list[Stated]:
    """K and V of each layer."""
    _check(pool)
    dtype, layout = _element(pool), pool.kv_cache_layout
    if layout not in ("nhd", "hnd"):
        raise refused("kv_cache_layout", "nhd or hnd", str(layout))
    heads, size = owner.heads(pool.head_num), pool.store_dtype.itemsize
    parts = {"k": (dtype, heads, pool.head_dim * size), "v": (dtype, heads, pool.v_head_dim * size)}
    cache = Cache.paged(owner.title, owner.layers(pool), parts=parts, page=pool.page_size, model=owner.number)
    tensors = {"k": _paged(pool, pool.k_buffer), "v": _paged(pool, pool.v_buffer)}
    axes = "page token head dim" if layout == "nhd" else "page head token dim"
    return [Stated(cache, tensors, axes, Table(pool.page_size), scaled=pool.dtype in QUANTIZED)]


def _latent(pool: Any, owner: Owner) -> list[Stated]:
    """Latent and rotary key of MLA; quantized for sparse attention, with their scales in the row."""
    _check(pool)
    width, page = pool.kv_cache_dim, pool.page_size
    packed = getattr(pool, "dsa_kv_cache_store_fp8", False)
    if packed:
        parts = row_of(pool.kv_lora_rank, pool.qk_rope_head_dim)
        if (size := sum(size for _, _, size in parts.values())) != width:
            raise refused("kv_cache_dim", f"{size} bytes of {', '.join(parts)}", str(width))
    else:
        parts = {"latent": (_element(pool), 1, width * pool.store_dtype.itemsize)}
    tensors: Any = [each[:, :, 0] for each in _paged(pool, pool.kv_buffer)]
    cache = Cache.paged(owner.title, owner.layers(pool), parts=parts, page=page, model=owner.number)
    scaled = pool.dtype in QUANTIZED and not packed
    return [Stated(cache, tensors, "page token dim", Table(page), scaled=scaled)]


def _indexed(pool: Any, owner: Owner) -> list[Stated]:
    """MLA, and the keys of the indexer of sparse attention: of a page all keys, then their scales."""
    page, dim = pool.page_size, pool.index_head_dim
    found = pool.index_kpool, pool.index_page_size, pool.quant_block_size
    if found != (1, page, dim):
        mine = f"a key of {dim} bytes for each token of a page of {page}, with one scale"
        raise refused("index", mine, "{} tokens to a key, pages of {}, {} to a scale".format(*found))
    layers = zip(owner.layers(pool), pool.index_k_with_scale_buffer, strict=True)
    held = [(n, each) for n, each in layers if each.shape[0]]
    latent = _latent(pool, owner)
    if not held:  # each layer attends to what an earlier one has chosen
        return latent
    ids, views = [n for n, _ in held], [index_views(each, page, dim) for _, each in held]
    parts = {part: [each[part] for each in views] for part in views[0]}
    cache = index_of(f"{owner.title} index", ids, dim, page, owner.number)
    return [*latent, Stated(cache, parts, "page token dim", Table(page), component="dsa")]


def _windowed(pool: Any, owner: Owner) -> list[Stated]:
    """Layers that attend to all tokens, and layers with a sliding window in pages of their own."""
    if pool.request_window is not None or pool.swa_req_ring_size is not None or pool.swa_uses_full_indices:
        raise refused("sliding window", "pages of its own", "rows of a request, or the pages of other layers")
    ids = {swa: [n for n, (_, other) in pool.layers_mapping.items() if other == swa] for swa in (False, True)}
    made = state(pool.full_kv_pool, owner.within(ids[False]), FLAT) if ids[False] else []
    found = state(pool.swa_kv_pool, owner.within(ids[True], True), FLAT[:2]) if ids[True] else []
    return made + [attrs.evolve(each, component="swa") for each in found]


def _hybrid(pool: Any, owner: Owner) -> list[Stated]:
    """Layers that attend to all tokens, and layers with a recurrent state a request."""
    ids = list(pool.full_attention_layer_id_mapping)
    made = state(pool.full_kv_pool, owner.within(ids), FLAT) if ids else []
    return made + recurrent(pool.mamba_pool, owner)


KINDS: dict[str, Callable[[Any, Owner], list[Stated]]] = {
    "MHATokenToKVPool": _attention,
    "MLATokenToKVPool": _latent,
    "DSATokenToKVPool": _indexed,
    "SWAKVPool": _windowed,
    "HybridLinearKVPool": _hybrid,
}
FLAT = tuple(KINDS)[:3]
"""Classes of pools whose layers are all alike: those within others, and drafts', with the target's pages."""


def _check(pool: Any) -> None:
    """Raise LocalError for memory, or contents, that the class alone does not tell."""
    for name in ("post_capture_active", "layer_shard_enabled", "enable_custom_mem_pool", "is_quantized_kv_cache"):
        if getattr(pool, name, False):
            raise refused(name, "False", "True")


def _element(pool: Any) -> DType:
    """The element type of a pool."""
    if pool.dtype in FLOATS and pool.store_dtype == pool.dtype:
        return FLOATS[pool.dtype]
    if pool.dtype in QUANTIZED and pool.store_dtype == torch.uint8:
        return QUANTIZED[pool.dtype]
    raise refused("kv_cache_dtype", f"one of {[str(each) for each in (*FLOATS, *QUANTIZED)]}", str(pool.dtype))


def _paged(pool: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each by its pages, of a buffer of pages, or one [slot, head, dim] with the slots of a page one after another."""
    page, shape = pool.page_size, tuple(tensors[0].shape)
    if len(shape) == 4 and shape[2] == page:
        return tensors
    if len(shape) != 3 or shape[0] % page:
        raise refused("KV pool", f"[slots, heads, dim] of pages of {page}", str(shape))
    return [each.view(-1, page, *shape[1:]) for each in tensors]
