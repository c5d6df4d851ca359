"""Hooks into HiCache if its storage is ours: keys of pages, the tree that asks for them, memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_memory

from kvproto_engines.memory import ShareableMemory
from kvproto_sglang.tiers.keys import KEYS

__all__ = ["HOOKS"]


def _keeps() -> bool:
    """Whether HiCache's storage is that of `kvproto_sglang.tiers`."""
    memory = get_memory()
    if not memory.enable_hierarchical_cache or memory.hicache_storage_backend != "dynamic":
        return False
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    given, *_ = HybridCacheController.parse_storage_backend_extra_config(memory.hicache_storage_backend_extra_config)
    return bool(given.get("module_path") == "kvproto_sglang.tiers")


def _host_allocated(original: Callable[..., Any], allocator: Any, dims: Any, dtype: Any, device: str) -> Any:
    """HiCache's pool of the host is memory that kvproto copies from and to."""
    if not _keeps():
        return original(allocator, dims, dtype, device)
    with ShareableMemory():
        return torch.zeros(tuple(dims), dtype=dtype, device=device)


def _tree(original: Callable[..., Any], name: str, params: Any) -> Any:
    """SGLang's tree in Rust computes keys of its own, which no other engine knows; the one in Python asks for them."""
    return "python" if _keeps() else original(name, params)


def _hashed(original: Callable[..., Any], token_ids: Any, prior_digest: Any, page_size: Any = None) -> Any:
    if KEYS.pages is None:
        return original(token_ids, prior_digest, page_size)
    from sglang.srt.mem_cache.cpp_utils.native_hash import _native_hash_input

    raw, count, width, ahead = _native_hash_input(token_ids)
    tokens = [*raw[::2], *raw[-1:]] if width == 2 and not ahead else raw  # pairs of a token and the next one
    return KEYS.of(tokens, count, prior_digest, width == 2, page_size)


def _seed(original: Callable[..., Any], extra_key: Any, cache_salt: Any) -> Any:
    return original(extra_key, cache_salt) if KEYS.pages is None else KEYS.seed(extra_key, cache_salt)


HOOKS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("mem_cache.pool_host.common.HostTensorAllocator.allocate", _host_allocated, "AROUND"),
    ("mem_cache.unified_cache.tree_core_registry.resolve_tree_core_backend", _tree, "AROUND"),
    ("mem_cache.utils.get_native_hash", _hashed, "AROUND"),
    ("mem_cache.utils.storage_namespace_seed", _seed, "AROUND"),
)
"""As those of the plug-in, below sglang.srt."""
