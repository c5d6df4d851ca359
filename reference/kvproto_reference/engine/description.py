"""What an engine of this package tells kvproto about itself: its caches, its ranks, its tensors."""

from collections.abc import Mapping
from pathlib import Path

from kvproto import Cache, DType, Geometry, Parallel, Pool, lay_out

from ..checkpoint import fingerprint
from ..models import ModelConfig, kv_head_range
from .pool import KVPool

TARGET, DRAFT, FIRST = "target", "draft", "first token"
"""Names of the groups: the target's cache, the draft's, and the token that prefill samples."""

_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}


def geometry(
    target: Path, draft: Path, configs: tuple[ModelConfig, ModelConfig], tokenizer: str, tp: int, page_size: int
) -> Geometry:
    """What the ranks of one replica own: the caches of two models, and on every rank the first token.

    `tokenizer` is the tokenizer's identity. Raises EngineError where `tp` ranks are too many for a model's heads.
    """
    caches = [_cache(model, config, tp, page_size) for model, config in enumerate(configs)]
    facts = {"weights.target": fingerprint(target), "weights.draft": fingerprint(draft), "tokenizer": tokenizer}
    return lay_out([*caches, Cache.handoff(FIRST, {"token": (DType.U32, 4)})], Parallel(tp=tp), facts=facts)


def _cache(model: int, config: ModelConfig, tp: int, page_size: int) -> Cache:
    name, dtype = (TARGET, DRAFT)[model], _DTYPES[config.dtype]
    if config.kind == "mla":
        kv_head_range(config, 0, tp)  # raises for too many ranks
        return Cache.mla(
            name, config.layers, latent=config.latent, rope=config.rope_dim, page=page_size, dtype=dtype, model=model
        )
    cache = Cache.gqa(
        name, config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, page=page_size, dtype=dtype,
        model=model,
    )  # fmt: skip
    return cache.divided([kv_head_range(config, rank, tp) for rank in range(tp)])


def hand_over(geometry: Geometry, caches: Mapping[str, KVPool], rank: int) -> Pool:
    """The pool of one rank, made of the tensors that the engine computes with, by group name."""
    return Pool(geometry, {name: _by_part(cache) for name, cache in caches.items()}, rank=rank)


def _by_part(cache: KVPool) -> dict[str, list[object]]:
    """One tensor [pages, page_size, heads, row_dim] for each layer, by part name."""
    layers = range(cache.config.layers)
    return {part: [cache.tensors[layer, part] for layer in layers] for part in cache.config.parts}
