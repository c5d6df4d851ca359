"""Statement of SGLang's pool of DeepSeek V4 and V4.1: latents of a window, and of several tokens each.

A page of rows holds the data of all of them and then their scales, or each row's scales behind it. What a compressor
needs of the last tokens lies in rings: for ratio 4 one in each page of the window, for others one for each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvproto import Cache, DType
from kvproto_engines.elements import FLOATS
from kvproto_sglang.pools.stated import Owner, Stated, Table, refused

__all__ = ["compressed"]

_Parts = dict[str, tuple[DType, int]]
_ROWS: dict[str, _Parts] = {
    "v4": {"latent": (DType.F8E4M3, 448), "rope": (DType.BF16, 128), "latent_scale": (DType.F8E8M0, 7)},
    "v41": {"latent": (DType.F8E4M3, 512), "latent_scale": (DType.F8E8M0, 16)},
    "v41_fp4": {"latent": (DType.F4E2M1, 256), "latent_scale": (DType.F8E4M3, 32)},
    "uniform_fp8": {"latent": (DType.F8E4M3, 512)},
}
"""The parts of a row and their bytes, in order, by SGLang's name of its encoding."""
_UNIFORM = "DeepSeekV4UniformFP8KVPool"
_KEYS: dict[bool, _Parts] = {
    False: {"index": (DType.F8E4M3, 128), "index_scale": (DType.F32, 4)},
    True: {"index": (DType.F4E2M1, 64), "index_scale": (DType.F8E8M0, 4)},
}
"""The same of a key of the indexer, in FP8 and in FP4."""
_OVERLAP = 4
"""The ratio whose windows overlap, so that its compressor needs the tokens of two rows."""


def compressed(pool: Any, owner: Owner) -> list[Stated]:
    """The caches of the model; raises LocalError for storage other than pages of a window and rings of tokens."""
    _check(pool)
    layers = range(pool._stage_start, pool._stage_end)
    window = pool.swa_kv_pool
    made = [_rows(f"{owner.title} window", window, layers, owner, pool.swa_page_size, "window_")]
    for ratio, rows in pool.kv_pools.items():
        ids = [n for n in pool.sources_by_ratio.get(ratio, ()) if n in layers]
        if not ids:
            continue
        title = f"{owner.title} c{ratio}"
        made.append(_rows(title, rows, ids, owner, pool.page_size, "", ratio))
        if ratio in pool.index_pools:
            made.append(_keys(f"{title} index", pool.index_pools[ratio], ids, owner, pool.page_size, ratio))
    for title, part, pools in (
        ("state", "compress_state", pool.compress_state_pools),
        ("index state", "index_compress_state", pool.indexer_compress_state_pools),
    ):
        for ratio in sorted({each.ratio for each in pools if each is not None}):
            found = {n: each for n, each in enumerate(pools) if each is not None and each.ratio == ratio}
            made.append(_inputs(f"{owner.title} c{ratio} {title}", part, found, owner, pool))
    return made


def _check(pool: Any) -> None:
    if pool.unified_kv_pool is not None:
        raise refused("DeepSeek V4", "pages of a window", "DeepSeekV4UnifiedKVPool")
    if pool.request_window is not None or pool.swa_req_ring_size is not None:
        raise refused(
            "DeepSeek V4", "a window in pages", "rings of a request (enable_encoder_swa_bounded_replay, DSpark)"
        )
    if pool.swa_valid_from is not None:
        raise refused("DeepSeek V4", "a draft whose rows are all the request's", "swa_valid_from (DSpark)")
    for each in (pool, pool.swa_kv_pool, *pool.kv_pools.values(), *pool.index_pools.values()):
        if each is not None and getattr(each, "enable_custom_mem_pool", False):
            raise refused("enable_custom_mem_pool", "False", "True")
        if (kind := type(each).__name__).startswith(("HiSparse", "NPU")):
            raise refused("DeepSeek V4", "DeepSeekV4SingleKVPool and DeepSeekV4IndexerPool", kind)


def _views(buffer: torch.Tensor, rows: int, parts: Iterable[tuple[str, int]], places: Sequence[tuple[int, int]]) -> Any:
    """By part, rows of each page of a buffer of bytes; `places` are where the first of each is, and how far apart."""
    data = buffer.view(torch.uint8)
    return {
        part: data.as_strided((len(data), rows, size), (data.stride(0), stride, 1), data.storage_offset() + at)
        for (part, size), (at, stride) in zip(parts, places, strict=True)
    }  # fmt: skip


def _rows(
    title: str, pool: Any, ids: Sequence[int], owner: Owner, page: int, prefix: str, ratio: int = 1
) -> Stated:  # fmt: skip
    """Latents of a window, or of `ratio` tokens each."""
    uniform = type(pool).__name__ == _UNIFORM
    name = "uniform_fp8" if uniform else pool.kv_layout.encoding.value
    if name not in _ROWS or pool.page_size * ratio != page:
        raise refused(title, f"rows {', '.join(_ROWS)}, and {page // ratio} in a page", f"{name}, {pool.page_size}")
    parts = {prefix + part: each for part, each in _ROWS[name].items()}
    data, base, scale = (512, 0, 0) if uniform else pool.kv_layout.row_addressing(pool.page_size)
    places, at = [], 0
    for part, (_, size) in parts.items():
        scaled = part.endswith("scale")
        places.append((base, scale) if scaled else (at, data))
        at += size * (not scaled)
    table = Table(page)
    return _stated(title, pool.kv_buffer, ids, owner, parts, places, table, ratio, "swa" if prefix else "")


def _keys(title: str, pool: Any, ids: Sequence[int], owner: Owner, page: int, ratio: int) -> Stated:
    """Keys of the indexer: of a page all keys, then their scales; SGLang's pages may hold several of these."""
    if (held := pool.index_k_with_scale_buffer) is None or pool.index_k_page8 or pool.index_head_dim != 128:
        raise refused(title, "keys of 128, and scales behind them", "another order (ROCm)")
    parts, rows = _KEYS[pool.use_fp4_indexer], pool.page_size
    (_, key), (_, scale) = parts.values()
    table = Table(rows * ratio, split=page // (rows * ratio))
    return _stated(title, held, ids, owner, parts, [(0, key), (rows * key, scale)], table, ratio, "")


def _inputs(title: str, part: str, found: dict[int, Any], owner: Owner, pool: Any) -> Stated:
    """Inputs of the compressors of some layers, of the last tokens: keys and values, then scores."""
    (first, *_), ids = found.values(), list(found)
    ratio, ring = first.ratio, first.ring_size
    if first.online:
        raise refused(title, "inputs of tokens", "sums of what came (SGLANG_OPT_USE_ONLINE_COMPRESS)")
    if ring % ratio or (ratio == 2 and ring != ratio):  # a request's item is then a whole ring, and not a part of it
        raise refused(title, f"rings of {ratio} tokens of a request", f"{ring}, as with drafts")
    tensors = [each.kv_score_buffer.kv_score for each in found.values()]
    size = tensors[0].shape[1] * tensors[0].itemsize
    if first.request_scoped:
        table, component = Table(ratio), "c128_state"
    else:
        table, component = Table(ratio, ring=ring, within=pool.swa_page_size), "swa"
    parts = {part: (FLOATS[tensors[0].dtype], size)}
    paged = [each[: len(each) // ratio * ratio].view(-1, ratio * each.shape[1]) for each in tensors]
    return _stated(title, paged, ids, owner, parts, [(0, size)], table, 1, component)


def _stated(
    title: str, buffers: Any, ids: Sequence[int], owner: Owner, parts: _Parts, places: Any, table: Table, ratio: int,
    component: str,
) -> Stated:  # fmt: skip
    """A group of these parts, in pages of the table; a latent is whole on every rank."""
    of = {part: (dtype, 1, size) for part, (dtype, size) in parts.items()}
    cache = Cache.paged(title, ids, parts=of, page=table.page, tokens_per_row=ratio, model=owner.number).replicated()
    sizes = [(part, size) for part, (_, size) in parts.items()]
    views = [_views(each, cache.group.rows, sizes, places) for each in buffers]
    tensors = {part: [each[part] for each in views] for part in parts}
    repeats = bool(owner.number) and component == "swa"
    return Stated(cache, tensors, "page token dim", table, component=component, repeats=repeats)
