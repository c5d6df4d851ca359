"""vLLM's classes of cache specifications: each is stated, or refused with a reason.

Classes count by their very names, as derived classes hold something else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvproto import Cache, LocalError
from kvproto.errors import ErrorCode

__all__ = [
    "MLA", "REFUSED", "STATE", "STATED", "WINDOWS", "check_spec", "dealt", "key_of", "packed", "refused", "specs_of",
]  # fmt: skip

STATE = "MambaSpec"
"""Caches whose block is a state."""
WINDOWS = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
"""Caches whose blocks the engine gives up when a window, or a chunk, has left them."""
MLA = ("MLAAttentionSpec", "SlidingWindowMLASpec")
"""Caches of a row a token: a latent, or the key of an index."""
STATED = ("FullAttentionSpec", "SinkFullAttentionSpec", "MLAAttentionSpec", *WINDOWS, STATE)
REFUSED = {
    "CircularBufferSpec": "a ring of what an index or a compressor has not completed",
    "CrossAttentionSpec": "rows of what an encoder saw, not of the prompt's tokens",
    "EncoderOnlyAttentionSpec": "no cache",
    "HiddenStateCacheSpec": "hidden states, which are taken out and not decoded with",
    "HiSparseHotSpec": "copies of pages that are in host memory",
    "HiSparseResidentSpec": "copies of pages that are in host memory",
    "RSWASpec": "pages that the engine gives up between a prompt and a window",
}
"""Classes, and what they hold; those of `UniformTypeKVCacheSpecs` count each."""
_PACKED = "fp8_ds_mla"
"""vLLM's name of rows of quantized MLA for sparse attention."""
_PLAIN = {"tokens_per_state": 1, "model_version": None}
"""Fields by which a class holds something else: a row for several tokens, or what DeepSeek V4 has."""


def check_spec(name: str, spec: Any) -> None:
    """Raise LocalError for a specification of the layer `name` that is not stated."""
    if (kind := type(spec).__name__) not in STATED:
        raise refused(name, f"caches {', '.join(STATED)}", f"{kind}: {REFUSED.get(kind, 'not known')}")
    for field, plain in _PLAIN.items() if kind != STATE else ():
        if (found := getattr(spec, field, plain)) != plain:
            raise refused(f"{name} {field}", str(plain), f"{found} in {kind}")


def key_of(spec: Any) -> str:
    """Marks of a kind of layers: all of a specification but who leads a group of layers with one index."""
    led = getattr(spec, "is_index_group_leader", None)
    return repr(spec if led is None else dataclasses.replace(spec, is_index_group_leader=False))


def specs_of(group: Any) -> dict[str, Any]:
    """The specification of each layer of a group of vLLM's, in the group's order."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {name: each.get(name, group.kv_cache_spec) for name in group.layer_names}


def dealt(cache: Cache, spec: Any, size: int) -> Cache:
    """The cache as `size` context-parallel ranks hold it; raises LocalError if the engine does not say how."""
    if size == 1:
        return cache
    sharded = getattr(spec, "dcp_sharded", None)
    if sharded is None:
        mine = "1, with a vLLM that does not say which layers it deals"
        raise refused("decode_context_parallel_size", mine, str(size))
    return cache.sharded() if sharded else cache.replicated()


def packed(spec: Any) -> bool:
    """Whether rows hold their scales."""
    return getattr(spec, "cache_dtype_str", None) == _PACKED


def refused(path: str, mine: str, yours: str) -> LocalError:
    """An error of what this connector cannot state."""
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours, "docs/vllm-reference.md: what is stated")
