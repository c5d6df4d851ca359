"""vLLM's classes of cache specifications: each is stated, or refused with a reason.

Classes count by their very names, as derived classes hold something else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvproto import Cache, LocalError
from kvproto.errors import ErrorCode

__all__ = [
    "MLA", "REFUSED", "RING", "STATE", "STATED", "WINDOWS", "check_spec", "dealt", "heads_of", "key_of", "packed",
    "refused", "specs_of",
]  # fmt: skip

STATE = "MambaSpec"
"""Caches whose block is a state."""
WINDOWS = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
"""Caches whose blocks the engine gives up when a window, or a chunk, has left them."""
MLA = ("MLAAttentionSpec", "SlidingWindowMLASpec")
"""Caches of a row a token: a latent, or the key of an index."""
RING = "CircularBufferSpec"
"""Caches whose block is the ring of a request, of what an index or a compressor has not completed."""
STATED = ("FullAttentionSpec", "SinkFullAttentionSpec", "MLAAttentionSpec", *WINDOWS, STATE, RING)
REFUSED = {
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


def check_spec(name: str, spec: Any, known: str | None = None) -> None:
    """Raise LocalError for a specification of the layer `name` that is not stated.

    `known`: the name of a back end by which it is known what rows hold, whatever the fields say.
    """
    if (kind := type(spec).__name__) not in STATED:
        raise refused(name, f"caches {', '.join(STATED)}", f"{kind}: {REFUSED.get(kind, 'not known')}")
    if known is None and kind == RING:
        raise refused(name, "a ring of a back end that is known", kind)
    for field, plain in _PLAIN.items() if known is None and kind != STATE else ():
        if (found := getattr(spec, field, plain)) != plain:
            raise refused(f"{name} {field}", str(plain), f"{found} in {kind}")


def key_of(spec: Any) -> str:
    """Marks of a kind of layers: all of a specification but who leads a group of layers with one index."""
    led = getattr(spec, "is_index_group_leader", None)
    return repr(spec if led is None else dataclasses.replace(spec, is_index_group_leader=False))


def heads_of(model: Any, name: str, spec: Any, ranks: int) -> int:
    """KV heads of a layer on all ranks; 1 of caches that have none.

    Raises LocalError where each of several ranks has one, and the model has layers of more and of fewer: vLLM says what
    a rank has, not whether it is another's too.
    """
    if type(spec).__name__ in (*MLA, STATE, RING):
        return 1
    mine: int = spec.num_kv_heads
    if mine > 1 or ranks == 1:
        return mine * ranks
    layers = getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None) or []
    fields = [*model.hf_text_config.to_dict().items(), *(pair for each in layers for pair in each.items())]
    counts = {n for field, n in fields if field.endswith(("kv_heads", "key_value_heads")) and isinstance(n, int)}
    if len(counts) > 1:
        advice = f"a head of {' or '.join(map(str, sorted(counts)))} on each of {ranks} ranks"
        raise refused(name, "KV heads that follow from those of a rank: fewer ranks", advice)
    return int(model.get_total_num_kv_heads())


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
