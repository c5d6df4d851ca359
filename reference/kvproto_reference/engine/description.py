"""What an engine of this package states to kvproto: its caches, its ranks, its tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from kvproto import Cache, DType, Geometry, ItemKind, Parallel, Pool, lay_out

from ..cache import KVPool, Shard
from ..checkpoint import check_head, fingerprint
from ..errors import EngineError
from ..models import ModelConfig, TensorParallel, head_among, kv_head_range
from . import logprobs

TARGET, DRAFT, FIRST = "target", "draft", "first token"
"""Names of the groups: the target's cache, the draft's, and the token that prefill samples."""
HIDDEN = "hidden"
"""The part of the last group that a head goes on from."""

_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}


@attrs.frozen(kw_only=True)
class Layout:
    """How an engine divides its caches over its ranks."""

    tp: int = 1
    pp: int = 1
    """Pipeline stages that the target's layers are divided over; the draft and the first token are on the last one."""
    virtual: int = 1
    """Chunks of layers that each stage has: chunk i is on stage i mod pp."""
    cp: int = 1
    """Context-parallel ranks of prefill for each TP rank, among which the target's tokens are dealt."""
    dcp: int = 1
    interleave: int = 1
    """Consecutive tokens that one CP or DCP rank stores."""
    deal: str | tuple[int, ...] = "cyclic"
    """Which rank stores each such run: a name that `Parallel` knows, or the ranks until they repeat."""
    draft_tp: int | None = None
    """How many ranks, the first of the last stage, divide the draft's heads; None for all of them, by TP rank."""
    draft_sharded: bool = False
    """Whether the draft's tokens are dealt like the target's; most engines store a draft whole on every rank."""
    replicate_q: bool = False
    """Whether each rank projects the queries of its whole DCP group, so that none have to be gathered."""
    exchange: str = "a2a"
    """How DCP ranks merge: a name of `attention.exchange.EXCHANGES`."""

    @property
    def parallel(self) -> Parallel:
        """The same sizes, as kvproto has them."""
        return Parallel(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            dcp=self.dcp,
            interleave=self.interleave,
            deal=self.deal,
            virtual=self.virtual,
        )

    @property
    def stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp

    @property
    def ranks(self) -> int:
        """Ranks in all; rank = (stage * cp + cp rank) * tp + TP rank."""
        return self.pp * self.stage

    def shares(self, model: int) -> int:
        """TP ranks of the target (0) or the draft (1)."""
        return (self.draft_tp if model else None) or self.tp

    def holders(self, model: int) -> int:
        """Ranks of a stage that hold its layers of the target (0) or the draft (1)."""
        return (self.draft_tp if model else None) or self.stage

    def chunks(self, model: int, layers: int) -> list[tuple[int, range]]:
        """Stages and their layers of the target (0) or the draft (1), in order."""
        if model:
            return [(self.pp - 1, range(layers))]
        return [(i % self.pp, range(lo, hi)) for i, (lo, hi) in enumerate(self.parallel.bounds(layers))]

    def check(self, configs: Sequence[ModelConfig]) -> None:
        """Raise EngineError if the heads or layers of the target or of a draft cannot be divided over the ranks."""
        chunks, layers = self.pp * self.virtual, configs[0].layers
        for wrong, says in (
            (
                chunks > layers,
                f"{self.pp} pipeline stages with {self.virtual} chunks each are too many for {layers} layers",
            ),
            (
                self.holders(1) > self.stage,
                f"--draft-tp {self.draft_tp} is more than the {self.stage} ranks of a pipeline stage",
            ),
            (
                self.draft_sharded and self.draft_tp,
                "--draft-sharded deals the draft over all ranks, not over those of --draft-tp",
            ),
            (
                self.draft_sharded and self.cp > 1 and self.pp > 1,
                "--draft-sharded with --cp needs --pp 1: stages before the last would miss the draft's logits",
            ),
        ):
            if wrong:
                raise EngineError(says)
        for model, config in enumerate(configs):
            kv_head_range(config, self.place(model, TensorParallel(0, self.shares(model))))

    def place(self, model: int, tp: TensorParallel) -> TensorParallel:
        """The place of a rank for the target (0) or the draft (1)."""
        if model and not self.draft_sharded:
            return tp.whole
        return attrs.evolve(tp, dcp=self.dcp, replicate_q=self.replicate_q)


def geometry(
    folders: Sequence[Path],
    configs: Sequence[ModelConfig],
    tokenizer: str,
    layout: Layout,
    page_size: int,
    replica: int = 0,
    cold: bool = False,
    max_logprobs: int | None = None,
) -> Geometry:
    """What the ranks of one replica own: the models' caches, and on ranks of the last stage the first token.

    With it goes, for a head, what the target makes of the last token of the prompt. `tokenizer` is the tokenizer's
    identity. With `cold`, another engine need not know the draft, so nothing of that is asked for. With `max_logprobs`,
    the first token comes with log probabilities. Raises EngineError for too many ranks, and for a head of another
    target.
    """
    check_head(folders, configs)
    names = (TARGET, DRAFT)[: len(folders)]
    facts = {f"weights.{name}": fingerprint(folder) for name, folder in zip(names, folders, strict=True)}
    facts["tokenizer"], warn = tokenizer, dict[str, str]()
    if cold and DRAFT in names:
        warn = {f"weights.{DRAFT}": facts.pop(f"weights.{DRAFT}")}
    first = {"token": (DType.U32, 4)}
    if hidden_of(configs) and not cold:
        first[HIDDEN] = hidden_type(configs)
    if max_logprobs is not None:
        first |= logprobs.parts(max_logprobs)
    return lay_out(
        [*caches(configs, layout, page_size), Cache.handoff(FIRST, first)],
        layout.parallel,
        replica,
        facts,
        warn=warn,
    )


def hidden_of(configs: Sequence[ModelConfig]) -> int:
    """Elements of the target's hidden states that a head reads of each token; 0 without such a draft."""
    head = head_among(configs)
    return head.hidden if head else 0


def hidden_type(configs: Sequence[ModelConfig]) -> tuple[DType, int]:
    """Their element type, and their bytes."""
    dtype = configs[0].dtype
    return _DTYPES[dtype], hidden_of(configs) * getattr(torch, dtype).itemsize


def hidden_bytes(hidden: Tensor) -> bytes:
    """The hand-off data of these hidden states [1, taps * width]."""
    return hidden.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def hidden_from(data: bytes, configs: Sequence[ModelConfig], device: torch.device) -> Tensor:
    """Hidden states [1, taps * width] of such data."""
    found = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return found.view(getattr(torch, configs[0].dtype)).view(1, -1).to(device)


def caches(configs: Sequence[ModelConfig], layout: Layout, page_size: int) -> list[Cache]:
    """The cache of each model: of the target, and of the draft if there is one."""
    return [cache(model, config, layout, page_size) for model, config in enumerate(configs)]


def cache(model: int, config: ModelConfig, layout: Layout, page_size: int) -> Cache:
    """The cache of the target (0) or the draft (1)."""
    name, dtype = (TARGET, DRAFT)[model], _DTYPES[config.dtype]
    size = layout.shares(model)
    ranks = [layout.place(model, TensorParallel(rank, size)) for rank in range(size)]
    shares = [kv_head_range(config, place) for place in ranks][:: ranks[0].dcp]
    if config.kind == "mla":
        made = Cache.mla(
            name, config.layers, latent=config.latent, rope=config.rope_dim, page=page_size, dtype=dtype, model=model
        )
    else:
        made = Cache.gqa(
            name,
            config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            page=page_size,
            dtype=dtype,
            model=model,
        ).divided(shares)
    if model and layout.draft_tp:
        return made.over(tp=layout.draft_tp, cp=1, copies=False)
    return made.sharded() if model and layout.draft_sharded else made


def shards(geometry: Geometry, rank: int) -> dict[str, Shard]:
    """Which tokens a rank stores, by group name."""
    groups = {group.id: group for group in geometry.groups}
    owns = geometry.ranks[rank].owns
    return {groups[share.group].name: Shard(groups[share.group], share.cp_rank) for share in owns}


def bytes_a_token(geometry: Geometry) -> dict[str, float]:
    """By group: the most KV bytes that any rank stores for each token of a sequence, on average over its deal."""
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

    The last page of each, which no sequence gets, is not part of it.
    """
    names = {group.id: group.name for group in geometry.groups}
    layers = {names[share.group]: share.layers.tolist() for share in geometry.ranks[rank].owns}
    return Pool(geometry, {name: _by_part(cache, layers[name]) for name, cache in caches.items()}, rank=rank)


def _by_part(cache: KVPool, layers: Sequence[int]) -> dict[str, list[object]]:
    """One tensor [pages, page_size, heads, row_dim] for each of these layers, by part name."""
    return {part: [cache.tensors[layer, part][: cache.pages] for layer in layers] for part in cache.config.parts}
