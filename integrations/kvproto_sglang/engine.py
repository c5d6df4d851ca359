"""From SGLang's own pool objects and configuration to a Pool of kvproto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from kvproto import Cache, DType, LocalError, Parallel, Pool, lay_out
from kvproto.errors import ErrorCode
from kvproto_engines.facts import rope_of, weights_of
from kvproto_sglang import metadata
from kvproto_sglang.settings import Settings

__all__ = ["Layout", "Opened", "open_pool"]

DTYPES = {torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16}
TARGET = "kv"
"""Name of the group of the target's pages."""


@attrs.frozen
class Layout:
    """The place of this process among those of its engine.

    Fields:
        refused: Sizes that have to be 1, by name.
        replica: Which of the `replicas` of data parallel, that of attention too.
    """

    tp: int = 1
    rank: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    replica: int = 0
    replicas: int = 1


@attrs.frozen
class Opened:
    """An engine's pool as kvproto sees it.

    Fields:
        groups: Names of those whose page table is the request's.
        parts: Of the metadata.
    """

    pool: Pool
    groups: tuple[str, ...]
    parts: tuple[str, ...]
    page: int


def open_pool(
    pool: Any, model: Any, server: Any, buffers: Any, states: Any, drafts: int, layout: Layout, settings: Settings,
    parts: tuple[str, ...],
) -> Opened:  # fmt: skip
    """The pool of one rank; raises LocalError for what this back end cannot state, by its name.

    `pool`, `model`, `server` and `buffers` are SGLang's KVCache, ModelConfig, ServerArgs and MetadataBuffers; `states`
    the types of its state pools and `drafts` the buffers of draft models among its pages.
    """
    for name, size in layout.refused:
        if size != 1:
            raise _refuse(name, "1", str(size))
    if layout.tp > 1 and settings.options.spread != "even":  # ranks that nobody reads would keep pages for long
        raise _refuse("options.spread", '"even" with tensor parallel', settings.options.spread)
    if getattr(server, "enable_memory_saver", False):
        raise _refuse("enable_memory_saver", "memory that stays where it is, as peers map it", "True")
    if states:
        raise _refuse("state pools", "none", ", ".join(str(getattr(each, "value", each)) for each in states))
    if drafts:
        raise _refuse("draft model", "none", f"{drafts} buffers of one")
    kind = type(pool).__name__
    if kind not in _KINDS:
        raise _refuse("KV pool", f"one of {sorted(_KINDS)}", kind)
    if pool.dtype not in DTYPES or pool.store_dtype != pool.dtype:
        raise _refuse("kv_cache_dtype", f"one of {[str(each) for each in DTYPES]}", f"{pool.dtype}")
    cache, tensors, axes = _KINDS[kind](pool, model)
    facts = settings.facts if settings.facts is not None else _facts(model, server, settings)
    geometry = lay_out(
        [cache, *metadata.cache_of(buffers, parts)], Parallel(tp=layout.tp), layout.replica, facts,
        depth=model.num_hidden_layers,
    )  # fmt: skip
    made = Pool(geometry, {TARGET: tensors}, rank=layout.rank, axes=axes)
    return Opened(made, (TARGET,), parts, pool.page_size)


def _attention(pool: Any, model: Any) -> tuple[Cache, dict[str, list[torch.Tensor]], str]:
    """K and V, each [slot, head, dim] a layer."""
    if pool.kv_cache_layout != "nhd":
        raise _refuse("kv_cache_layout", "nhd", str(pool.kv_cache_layout))
    cache = Cache.gqa(
        TARGET, _layers(pool), kv_heads=model.get_total_num_kv_heads(), head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim, page=pool.page_size, dtype=DTYPES[pool.dtype],
    )  # fmt: skip
    tensors = {"k": _paged(pool, pool.k_buffer), "v": _paged(pool, pool.v_buffer)}
    return cache, tensors, "page token head dim"


def _latent(pool: Any, model: Any) -> tuple[Cache, dict[str, list[torch.Tensor]], str]:
    """Latent and rotary key of MLA, [slot, 1, dim] a layer."""
    size = pool.kv_cache_dim * pool.dtype.itemsize
    parts = {"latent": (DTYPES[pool.dtype], 1, size)}
    cache = Cache.paged(TARGET, _layers(pool), parts=parts, page=pool.page_size)
    return cache, {"latent": [each[:, :, 0] for each in _paged(pool, pool.kv_buffer)]}, "page token dim"


_KINDS: dict[str, Callable[[Any, Any], tuple[Cache, dict[str, list[torch.Tensor]], str]]] = {
    "MHATokenToKVPool": _attention,
    "MLATokenToKVPool": _latent,
}
"""How pools are stated, by the very class; those that derive from them hold something else."""


def _layers(pool: Any) -> range:
    return range(pool.start_layer, pool.start_layer + pool.layer_num)


def _paged(pool: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each [page, token, head, dim], of a buffer [slot, head, dim] whose slots are those of pages one after another."""
    found = []
    for tensor in tensors:
        pages, rest = divmod(tensor.shape[0], pool.page_size)
        if tensor.dim() != 3 or rest:
            raise _refuse("KV pool", f"[slots, heads, dim] of pages of {pool.page_size}", str(tuple(tensor.shape)))
        if tensor.device.type != "cpu":
            raise _refuse("device", "cpu", str(tensor.device))
        found.append(tensor.view(pages, pool.page_size, *tensor.shape[1:]))
    return found


def _facts(model: Any, server: Any, settings: Settings) -> dict[str, str]:
    """What has to be equal so that bytes mean the same."""
    dummy = f"dummy {server.random_seed}" if server.load_format == "dummy" else ""
    weights = settings.weights or weights_of(server.model_path, server.revision, [server.quantization, dummy])
    return {"weights.target": weights, "rope.target": rope_of(model.hf_text_config)}


def _refuse(path: str, mine: str, yours: str) -> LocalError:
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours, "docs/sglang.md lists what this back end states")
