"""What an engine of this package tells kvproto about itself: its caches, its ranks, its tensors."""

from collections.abc import Mapping
from pathlib import Path

import attrs

from kvproto import Cache, DType, Geometry, ItemKind, Parallel, Pool, lay_out

from ..cache import KVPool, Shard
from ..checkpoint import fingerprint
from ..models import ModelConfig, TensorParallel, kv_head_range

TARGET, DRAFT, FIRST = "target", "draft", "first token"
"""Names of the groups: the target's cache, the draft's, and the token that prefill samples."""

_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}


@attrs.frozen(kw_only=True)
class Layout:
    """How an engine divides its caches over its ranks."""

    tp: int = 1
    cp: int = 1
    """Context-parallel ranks of prefill, for each TP rank: they deal the target's tokens, computed and stored."""
    dcp: int = 1
    interleave: int = 1
    """Consecutive tokens that one CP or DCP rank stores."""
    deal: str | tuple[int, ...] = "cyclic"
    """Which rank stores each such run: a name that `Parallel` knows, or the ranks until they repeat."""
    draft_sharded: bool = False
    """Whether the draft's tokens are dealt out like the target's; engines mostly store a draft whole on every rank."""
    replicate_q: bool = False
    """Whether each rank projects the queries of its whole DCP group, so that none have to be gathered."""
    exchange: str = "a2a"
    """How DCP ranks merge: a name of `attention.exchange.EXCHANGES`."""

    @property
    def parallel(self) -> Parallel:
        """The same to kvproto."""
        return Parallel(tp=self.tp, cp=self.cp, dcp=self.dcp, interleave=self.interleave, deal=self.deal)

    @property
    def ranks(self) -> int:
        """Ranks in all; rank = cp rank * tp + TP rank."""
        return self.tp * self.cp

    def check(self, configs: tuple[ModelConfig, ModelConfig]) -> None:
        """Raise EngineError where the ranks cannot share out the heads of the target or of the draft."""
        for model, config in enumerate(configs):
            kv_head_range(config, self.place(model, TensorParallel(0, self.tp)))

    def place(self, model: int, tp: TensorParallel) -> TensorParallel:
        """The place of a rank for the target (0) or the draft (1)."""
        if model and not self.draft_sharded:
            return tp.whole
        return attrs.evolve(tp, dcp=self.dcp, replicate_q=self.replicate_q)


def geometry(
    target: Path, draft: Path, configs: tuple[ModelConfig, ModelConfig], tokenizer: str, layout: Layout, page_size: int,
    replica: int = 0,
) -> Geometry:  # fmt: skip
    """What the ranks of one replica own: the caches of two models, and on every rank the first token.

    `tokenizer` is the tokenizer's identity. Raises EngineError where the ranks are too many for a model's heads.
    """
    facts = {"weights.target": fingerprint(target), "weights.draft": fingerprint(draft), "tokenizer": tokenizer}
    return lay_out(
        [*caches(configs, layout, page_size), Cache.handoff(FIRST, {"token": (DType.U32, 4)})],
        layout.parallel,
        replica,
        facts,
    )


def caches(configs: tuple[ModelConfig, ModelConfig], layout: Layout, page_size: int) -> list[Cache]:
    """Those of the target and the draft."""
    return [cache(model, config, layout, page_size) for model, config in enumerate(configs)]


def cache(model: int, config: ModelConfig, layout: Layout, page_size: int) -> Cache:
    """The cache of the target (0) or the draft (1)."""
    name, dtype = (TARGET, DRAFT)[model], _DTYPES[config.dtype]
    ranks = [layout.place(model, TensorParallel(rank, layout.tp)) for rank in range(layout.tp)]
    shares = [kv_head_range(config, place) for place in ranks][:: ranks[0].dcp]
    if config.kind == "mla":
        made = Cache.mla(
            name, config.layers, latent=config.latent, rope=config.rope_dim, page=page_size, dtype=dtype, model=model
        )
    else:
        made = Cache.gqa(
            name, config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, page=page_size, dtype=dtype,
            model=model,
        ).divided(shares)  # fmt: skip
    return made.sharded() if model and layout.draft_sharded else made


def shards(geometry: Geometry, rank: int) -> dict[str, Shard]:
    """Which tokens a rank stores, by group name."""
    groups = {group.id: group for group in geometry.groups}
    owns = geometry.ranks[rank].owns
    return {groups[share.group].name: Shard(groups[share.group], share.cp_rank) for share in owns}


def bytes_a_token(geometry: Geometry) -> dict[str, float]:
    """KV bytes that a rank stores for each token of a sequence, on average over its deal, by group; the most of any."""
    groups = {group.id: group for group in geometry.groups}
    most: dict[str, float] = {}
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            if group.kind == ItemKind.PAGE:
                held = sum((span.hi - span.lo) * group.parts[span.part].lane_bytes for span in share.lanes)
                stored = held * len(share.layers) / group.cp_size
                most[group.name] = max(most.get(group.name, 0), stored)
    return most


def hand_over(geometry: Geometry, caches: Mapping[str, KVPool], rank: int) -> Pool:
    """The pool of one rank, made of the tensors that the engine computes with, by group name.

    Their last page, which no sequence is given, is not part of it.
    """
    return Pool(geometry, {name: _by_part(cache) for name, cache in caches.items()}, rank=rank)


def _by_part(cache: KVPool) -> dict[str, list[object]]:
    """One tensor [pages, page_size, heads, row_dim] for each layer, by part name."""
    layers = range(cache.config.layers)
    return {part: [cache.tensors[layer, part][: cache.pages] for layer in layers] for part in cache.config.parts}
