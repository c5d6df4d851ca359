"""Statements of SGLang's pools: each by its very class, as derived classes hold something else.

Tensors are SGLang's own, on the CPU or on a GPU, in any order that their strides say: [slot, head, dim] with the slots
of a page one after another (NHD), [page, head, token, dim] (HND), or [slot, 1, latent] (MLA).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import attrs
import torch

from kvproto import Cache, DType
from kvproto_engines.elements import FLOATS, QUANTIZED
from kvproto_engines.sparse import SCALE, index_views, row_of
from kvproto_sglang.pools.compressed import compressed
from kvproto_sglang.pools.refusals import REFUSED
from kvproto_sglang.pools.stated import Owner, Stated, Table, refused
from kvproto_sglang.pools.states import recurrent

__all__ = ["DRAFTS", "KINDS", "SHARDED", "state"]


def state(pool: Any, owner: Owner, kinds: Iterable[str] | None = None) -> list[Stated]:
    """The caches in a pool of a model; raises LocalError for a class that is not one of `kinds`, or of `KINDS`."""
    kind, known = type(pool).__name__, sorted(KINDS if kinds is None else kinds)
    if kind not in known:
        raise refused(f"KV pool of the {owner.of}", f"one of {known}", f"{kind}: {REFUSED.get(kind, 'not here')}")
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
    return [_dealt(Stated(cache, tensors, axes, Table(pool.page_size), scaled=pool.dtype in QUANTIZED), owner)]


def _block_scaled(pool: Any, owner: Owner) -> list[Stated]:
    """K and V in FP8 or FP4, and a scale in UE8M0 for each of so many elements of a head, in buffers of their own."""
    _check(pool)
    four, heads, page = pool.store_dtype == torch.uint8, owner.heads(pool.head_num), pool.page_size
    dtype, block = (DType.F4E2M1, 16) if four else (DType.F8E4M3, 32)
    if getattr(pool, "mxfp8_sf_interleaved", False):
        raise refused("page_size", "scales of a token one after another, which pages of 128 do not have", str(page))
    tensors: dict[str, Any] = {"k": pool.k_buffer, "v": pool.v_buffer}
    for part, scales in (("k", pool.k_scale_buffer), ("v", pool.v_scale_buffer)):
        dim = tensors[part][0].shape[2] * (2 if four else 1)
        tensors[f"{part}_scale"] = [each.view(torch.uint8).view(len(each), -1, dim // block) for each in scales]
    tensors = {name: [each.view(torch.uint8) for each in _paged(pool, found)] for name, found in tensors.items()}
    parts = {
        name: (DType.F8E8M0 if name.endswith("scale") else dtype, heads, each[0].shape[3])
        for name, each in tensors.items()
    }
    cache = Cache.paged(owner.title, owner.layers(pool), parts=parts, page=page, model=owner.number)
    made = Stated(cache, tensors, "page token head dim", Table(page))
    return [made if four else attrs.evolve(made, component="block_scale")]


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
    return [_dealt(Stated(cache, tensors, "page token dim", Table(page), scaled=scaled), owner)]


def _latent_scaled(pool: Any, owner: Owner) -> list[Stated]:
    """Latent and rotary key of MLA in FP4, and a scale for each 16 elements in a buffer of its own."""
    _check(pool)
    page, (first, *_), (scale, *_) = pool.page_size, pool.kv_buffer, pool.kv_scale_buffer
    parts = {"latent": (DType.F4E2M1, 1, first.shape[2]), "latent_scale": (DType.F8E8M0, 1, scale.shape[1])}
    cache = Cache.paged(owner.title, owner.layers(pool), parts=parts, page=page, model=owner.number)
    buffers = {"latent": pool.kv_buffer, "latent_scale": [each[:, None] for each in pool.kv_scale_buffer]}
    tensors = {part: [each[:, :, 0] for each in _paged(pool, found)] for part, found in buffers.items()}
    return [Stated(cache, tensors, "page token dim", Table(page))]


def _indexed(pool: Any, owner: Owner) -> list[Stated]:
    """MLA, and the keys of the indexer of sparse attention: of a page all keys, then their scales.

    A key stands for a token, or for several (kpool), and then tokens are pending until they are a key.
    """
    page, dim, tokens = pool.page_size, pool.index_head_dim, pool.index_kpool
    if (pool.index_page_size, pool.quant_block_size) != (page // tokens, dim):
        mine = f"pages of {page // tokens} keys of {dim} bytes, with one scale each"
        raise refused("index", mine, f"pages of {pool.index_page_size}, a scale for {pool.quant_block_size} bytes")
    layers = zip(owner.layers(pool), pool.index_k_with_scale_buffer, strict=True)
    held = [(n, each) for n, each in layers if each.shape[0]]
    latent = _latent(pool, owner)
    if not held:  # each layer attends to what an earlier one has chosen
        return latent
    ids, views = [n for n, _ in held], [index_views(each, page // tokens, dim) for _, each in held]
    parts = {part: [each[part] for each in views] for part in views[0]}
    of = {"index": (DType.F8E4M3, 1, dim), "index_scale": (DType.F32, 1, SCALE)}
    rows: dict[str, Any] = {"page": page, "tokens_per_row": tokens, "model": owner.number}
    cache = Cache.paged(f"{owner.title} index", ids, parts=of, **rows).replicated()
    table = Table(page, split=owner.dcp if owner.dealt else 1)  # all tokens on each rank, in pages of its own
    return [
        *latent, Stated(cache, parts, "page token dim", table, component="dsa"), *_pending(pool, owner, ids)
    ]  # fmt: skip


def _pending(pool: Any, owner: Owner, ids: list[int]) -> list[Stated]:
    """Keys of an indexer, and their scores, of the tokens that are no row of it yet: a ring of a request."""
    if not getattr(pool, "kpool_use_compress", False):
        return []
    if pool.tail_extra_slots:
        raise refused("tail_extra_slots", "0: rings of the tokens of a key", str(pool.tail_extra_slots))
    tensors = {"pending_index": pool._compress_tail_k, "sglang.pending_score": pool._compress_tail_score}
    held = {part: [each for each in found if each.shape[0]] for part, found in tensors.items()}
    size = pool.index_head_dim * held["pending_index"][0].itemsize
    parts = dict.fromkeys(held, (FLOATS[held["pending_index"][0].dtype], 1, size))
    title, tokens = f"{owner.title} pending", pool.index_kpool
    cache = Cache.paged(title, ids, parts=parts, page=tokens, model=owner.number).replicated()
    return [Stated(cache, held, "page token dim", Table(tokens, most=1), component="dsa_tail")]


def _sparse(pool: Any, owner: Owner) -> list[Stated]:
    """MiniMax-M3: K and V of all layers, and keys of an indexer, of the layers that choose tokens."""
    if pool.index_kv_pool is not None or pool.dense_pool is not None:
        raise refused(f"KV pool of the {owner.of}", "keys of an indexer alone", "values of it too, or HiSparse")
    (main,) = state(pool.main_pool, owner, FLAT[:1])
    dense = [n for n in main.cache.layers if n not in pool.sparse_layer_id_mapping]
    made = [main] if len(dense) in (0, len(main.cache.layers)) else _split(main, pool.sparse_layer_id_mapping)
    made[-1] = attrs.evolve(made[-1], component="minimax_dense_kv" if dense else "")
    if (index := pool.index_k_pool) is None:
        return made
    if type(index).__name__ != "MHATokenToKOnlyPool":
        raise refused("index", "MHATokenToKOnlyPool", type(index).__name__)
    _check(index)
    parts = {"index": (_element(index), 1, index.head_dim * index.store_dtype.itemsize)}
    ids, page = list(pool.index_k_layer_id_mapping), pool.page_size
    cache = Cache.paged(f"{owner.title} index", ids, parts=parts, page=page, model=owner.number).replicated()
    tensors: Any = [each[:, :, 0] for each in _paged(index, index.k_buffer)]
    return [*made, Stated(cache, tensors, "page token dim", Table(page), component="minimax_index_k")]


def _split(made: Stated, first: Container[int]) -> list[Stated]:
    """The same in two groups, of these layers and of the others."""
    found = []
    for title, inside in ((made.cache.group.name, True), (f"{made.cache.group.name} dense", False)):
        places = [n for n, layer in enumerate(made.cache.layers) if (layer in first) == inside]
        group = attrs.evolve(made.cache.group, name=title)
        cache = attrs.evolve(made.cache, group=group, layers=tuple(made.cache.layers[n] for n in places))
        tensors = {part: [each[n] for n in places] for part, each in made.tensors.items()}
        found.append(attrs.evolve(made, cache=cache, tensors=tensors))
    return found


def _windowed(pool: Any, owner: Owner) -> list[Stated]:
    """Layers that attend to all tokens, and layers with a sliding window in pages of their own."""
    if pool.request_window is not None or pool.swa_req_ring_size is not None or pool.swa_uses_full_indices:
        raise refused("sliding window", "pages of its own", "rows of a request, or the pages of other layers")
    ids = {swa: [n for n, (_, other) in pool.layers_mapping.items() if other == swa] for swa in (False, True)}
    made = state(pool.full_kv_pool, owner.within(ids[False]), FLAT) if ids[False] else []
    found = state(pool.swa_kv_pool, owner.within(ids[True], True), FLAT[:3]) if ids[True] else []
    scales = any(each.component == "block_scale" for each in found)
    return made + [attrs.evolve(each, component="swa", beside="block_scale_swa" * scales) for each in found]


def _hybrid(pool: Any, owner: Owner) -> list[Stated]:
    """Layers that attend to all tokens, and layers with a recurrent state a request."""
    ids = list(pool.full_attention_layer_id_mapping)
    made = state(pool.full_kv_pool, owner.within(ids), FLAT) if ids else []
    return made + recurrent(pool.mamba_pool, owner)


def _pooled(pool: Any, owner: Owner) -> list[Stated]:
    """A hybrid with an index of which a key stands for several tokens (Qwen4-Exp).

    Keys and positions of the tokens that are no key yet are in rings of a request.
    """
    ids, tokens = list(pool.full_attention_layer_id_mapping), pool.qsa_compress_ratio
    key, position = DType.BF16, DType.I64
    rows = QUANTIZED.get(pool.qsa_compressed_dtype, key)
    keys, pending = pool.qsa_compressed_k_buffer_pool, pool.qsa_key_state_buffer_pool
    ring, positions = Table(tokens), [pool.qsa_rope_position_buffer[:, None]]
    return [
        *_hybrid(pool, owner),
        _rows(owner, "index", ("index", rows), ids, keys, Table(pool.page_size), "qsa_compressed", tokens),
        _rows(owner, "pending", ("pending_index", key), ids, pending, ring, "qsa_pending"),
        _rows(owner, "positions", ("pending_position", position), [0], positions, ring, "qsa_pending"),
    ]


def _rows(
    owner: Owner, title: str, part: tuple[str, DType], ids: list[int], tensors: list[torch.Tensor], table: Table,
    component: str, tokens: int = 1,
) -> Stated:  # fmt: skip
    """A part of layers whose buffers are [row, 1, element], whole on every rank, with so many tokens to a row."""
    (name, dtype), size = part, tensors[0][0].nbytes
    title, rows = f"{owner.title} {title}", {"page": table.page, "tokens_per_row": tokens}
    cache = Cache.paged(title, ids, parts={name: (dtype, 1, size)}, model=owner.number, **rows).replicated()
    length = cache.group.rows
    whole = [each[: len(each) // length * length].view(torch.uint8) for each in tensors]
    views = [each.view(-1, length, size) for each in whole]
    return Stated(cache, views, "page token dim", table, component=component)


KINDS: dict[str, Callable[[Any, Owner], list[Stated]]] = {
    "MHATokenToKVPool": _attention,
    "MHATokenToKVPoolMXFP8": _block_scaled,
    "MLATokenToKVPool": _latent,
    "DSATokenToKVPool": _indexed,
    "MHATokenToKVPoolFP4": _block_scaled,
    "MLATokenToKVPoolFP4": _latent_scaled,
    "SWAKVPool": _windowed,
    "HybridLinearKVPool": _hybrid,
    "QSATokenToKVPool": _pooled,
    "MiniMaxSparseKVPool": _sparse,
    "DeepSeekV4TokenToKVPool": compressed,
}
FLAT = tuple(KINDS)[:6]
"""Classes of pools whose layers are all alike: those within others."""
DRAFTS = (*FLAT, "SWAKVPool", "HybridLinearKVPool", "DeepSeekV4TokenToKVPool")
"""Classes of drafts' pools."""
SHARDED = ("MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool")
"""Classes of pools whose tokens context-parallel ranks deal among themselves."""


def _dealt(made: Stated, owner: Owner) -> Stated:
    """The same where context-parallel ranks deal the tokens of a page: a page of a rank has as many of its own."""
    if owner.dcp == 1:
        return made
    if not owner.dealt:
        return attrs.evolve(made, cache=made.cache.replicated())
    table = attrs.evolve(made.table, page=made.table.page * owner.dcp)
    return attrs.evolve(made, cache=made.cache.sharded(), table=table)


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
