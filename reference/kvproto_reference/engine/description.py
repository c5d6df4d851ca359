"""The Description of an engine of this package, for kvproto: its caches, its ranks, its tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from kvproto import Block, Cache, DType, Geometry, ItemKind, Parallel, Pool, lay_out

from ..adapters import NO_ADAPTERS, Adapters, digest_of
from ..cache import NOTHING, HybridPools, KVPool, Shard
from ..cache.forms import FORMS, MODEL, TENSOR_SCALE
from ..cache.states import CONV, SSM
from ..cache.windows import window_table
from ..checkpoint import check_draft, fingerprint
from ..errors import EngineError
from ..models import ModelConfig, TensorParallel, delta_heads, head_among, kv_head_range
from . import logprobs

TARGET, DRAFT, FIRST = "target", "draft", "first token"
"""Names of the groups: the target's cache, the draft's, and the token that prefill samples."""
WINDOW, STATES = "target window", {CONV: "target conv", SSM: "target ssm"}
"""Groups of a hybrid target: layers with a sliding window, and by part the states of recurrent layers."""
HIDDEN = "hidden"
"""The part of the last group that a head goes on from."""

DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}
"""Element types by their names in torch."""


@attrs.frozen(kw_only=True)
class Layout:
    """The division of an engine's caches over its ranks, and the form in which they store rows."""

    dp: int = 1
    """Replicas of which the engine consists: each attends to its own requests, and all share the target's experts."""
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
    """The rank that stores each such run: a name that `Parallel` knows, or the ranks until they repeat."""
    draft_tp: int | None = None
    """The number of ranks, the first of the last stage, that divide the draft's heads; None for all, by TP rank."""
    draft_sharded: bool = False
    """Whether the draft's tokens are dealt like the target's; most engines store a draft whole on every rank."""
    replicate_q: bool = False
    """Whether each rank projects the queries of its whole DCP group, so that none have to be gathered."""
    exchange: str = "a2a"
    """The way in which DCP ranks merge: a name of `attention.exchange.EXCHANGES`."""
    kv_dtype: str = MODEL
    """The form of the rows of all models: a name of `cache.forms.FORMS`; one of FP8 states that it is converted to."""
    kv_converts: tuple[str, ...] = ()
    """The forms of FP8 into and from which another engine's rows may be converted, where these are as the model is."""

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
        """Ranks of a replica; rank = (stage * cp + cp rank) * tp + TP rank."""
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
        """Raise EngineError if the heads or layers of the target or of a draft cannot be divided over the ranks.

        And for caches in FP8 of a model that is not in bfloat16, or a hybrid.
        """
        self._check_form(configs)
        chunks, layers = self.pp * self.virtual, configs[0].layers
        for wrong, says in (
            (
                chunks > layers,
                f"{self.pp} pipeline stages with {self.virtual} chunks each are too many for {layers} layers:"
                " lower --pp or --virtual",
            ),
            (
                self.holders(1) > self.stage,
                f"--draft-tp {self.draft_tp} is more than the {self.stage} ranks of a pipeline stage: lower it",
            ),
            (
                self.draft_sharded and self.draft_tp,
                "--draft-sharded deals the draft over all ranks, not over those of --draft-tp: leave one of them out",
            ),
            (
                self.draft_sharded and self.cp > 1 and self.pp > 1,
                "--draft-sharded with --cp needs --pp 1: stages before the last would miss the draft's logits",
            ),
        ):
            if wrong:
                raise EngineError(says)
        if self.dp > 1:
            self._check_experts(configs[0])
        for model, config in enumerate(configs):
            kv_head_range(config, self.place(model, TensorParallel(0, self.shares(model))))

    def _check_form(self, configs: Sequence[ModelConfig]) -> None:
        converts, fp8 = bool(self.kv_converts), self.kv_dtype != MODEL
        for wrong, says in (
            (not set(self.kv_converts) <= {*FORMS} - {MODEL}, f"--kv-converts names {', '.join(FORMS[1:])}"),
            (converts and fp8, "--kv-converts is of rows in bfloat16: an FP8 cache states its own conversion"),
            ((converts or fp8) and {config.dtype for config in configs} != {"bfloat16"},
             "FP8 is converted to and from bfloat16: choose --dtype bfloat16"),
            (fp8 and configs[0].hybrid, "the pools of a hybrid model are as the model is: leave --kv-dtype out"),
        ):  # fmt: skip
            if wrong:
                raise EngineError(says)

    def _check_experts(self, target: ModelConfig) -> None:
        """Raise EngineError for experts that replicas cannot share."""
        experts, ranks = 0 if target.moe is None else target.moe.experts, self.dp * self.stage
        for wrong, says in (
            (not experts, f"--dp {self.dp} shares experts among replicas, and the target has none: choose --target moe,"
             " or another with experts, or start replicas of their own, by --replica"),
            (0 < experts < ranks, f"{experts} experts are too few for {ranks} ranks, as each holds one at least: lower"
             " --dp or --tp"),
        ):  # fmt: skip
            if wrong:
                raise EngineError(says)

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
    adapters: Adapters = NO_ADAPTERS,
) -> Geometry:
    """Return what the ranks of one replica own: the models' caches, and on ranks of the last stage the first token.

    With it goes, for a head, what the target makes of the last token of the prompt. `tokenizer` is the tokenizer's
    identity. With `cold`, another engine need not know the draft, so nothing of that is asked for. With `max_logprobs`,
    the first token comes with log probabilities. Engines with other `adapters` are warned, as a request names the one
    that it needs. Raises EngineError for too many ranks, and for a head of another target.
    """
    check_draft(folders, configs)
    names = (TARGET, DRAFT)[: len(folders)]
    facts = {f"weights.{name}": fingerprint(folder) for name, folder in zip(names, folders, strict=True)}
    facts["tokenizer"], warn = tokenizer, dict[str, str]()
    if cold and DRAFT in names:
        warn = {f"weights.{DRAFT}": facts.pop(f"weights.{DRAFT}")}
    if adapters:
        warn["adapters"] = digest_of(adapters)
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
    return DTYPES[dtype], hidden_of(configs) * getattr(torch, dtype).itemsize


def hidden_bytes(hidden: Tensor) -> bytes:
    """The hand-off data of these hidden states [1, taps * width]."""
    return hidden.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def hidden_from(data: bytes, configs: Sequence[ModelConfig], device: torch.device) -> Tensor:
    """Hidden states [1, taps * width] of such data."""
    found = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return found.view(getattr(torch, configs[0].dtype)).view(1, -1).to(device)


def caches(configs: Sequence[ModelConfig], layout: Layout, page_size: int) -> list[Cache]:
    """The caches of the target, several if it is a hybrid, and of the draft if there is one."""
    made = [cache(model, config, layout, page_size) for model, config in enumerate(configs)]
    target = configs[0]
    window = [cache(0, target, layout, page_size, WINDOW)] if target.window is not None else []
    return [made[0], *window, *(_states(target, layout) if target.delta is not None else ()), *made[1:]]


def _states(config: ModelConfig, layout: Layout) -> list[Cache]:
    """The states of recurrent layers: channels of q, of k and of v, each divided as the ranks have heads; and heads."""
    sizes = config.delta_sizes
    ranks = [delta_heads(config, TensorParallel(rank, layout.tp)) for rank in range(layout.tp)]

    def block(heads: int, dim: int, which: int) -> Block:
        return Block(heads * dim, dim, tuple((rank[which].start * dim, rank[which].stop * dim) for rank in ranks))

    keys, values = (block(sizes.key_heads, sizes.key_dim, 0), block(sizes.value_heads, sizes.value_dim, 1))
    dtype = DTYPES[config.dtype]
    conv: dict[str, Any] = {
        "parts": {CONV: (dtype, 2 * keys.lanes + values.lanes, getattr(torch, config.dtype).itemsize)},
        "rows": sizes.kernel - 1,
        "blocks": {CONV: (keys, keys, values)},
    }
    ssm: dict[str, Any] = {
        "parts": {SSM: (DType.F32, sizes.value_heads, 4 * sizes.key_dim * sizes.value_dim)},
        "blocks": {SSM: (block(sizes.value_heads, 1, 1),)},
    }
    return [Cache.state(STATES[part], sizes.layers, **how) for part, how in ((CONV, conv), (SSM, ssm))]


def cache(model: int, config: ModelConfig, layout: Layout, page_size: int, name: str | None = None) -> Cache:
    """The rows of the target (0) or the draft (1): of layers that attend to all tokens, or those of group WINDOW."""
    windowed, name, dtype = name == WINDOW, name or (TARGET, DRAFT)[model], DTYPES[config.dtype]
    form, scales = layout.kv_dtype, None
    if form != MODEL:
        dtype, scales = DType.F8E4M3, dict.fromkeys(config.parts, TENSOR_SCALE) if form == "e4m3_tensor" else None
    block = config.row_dim if form == "e4m3_block" else None
    layers = config.row_layers(windowed)
    size = layout.shares(model)
    ranks = [layout.place(model, TensorParallel(rank, size)) for rank in range(size)]
    ranks = [rank.whole for rank in ranks] if windowed else ranks
    shares = [kv_head_range(config, place) for place in ranks][:: ranks[0].dcp]
    stored: dict[str, Any] = {"page": page_size, "dtype": dtype, "scale_block": block, "model": model}
    if config.kind == "mla":
        made = Cache.mla(name, layers, latent=config.latent, rope=config.rope_dim, **stored)
    else:
        made = Cache.gqa(name, layers, kv_heads=config.kv_heads, head_dim=config.head_dim, **stored).divided(shares)
    if names := layout.kv_converts if form == MODEL else (form,):
        made = made.converts(*names, scales=scales)
    if windowed:
        return made.replicated()
    if model and layout.draft_tp:
        return made.over(tp=layout.draft_tp, cp=1, copies=False)
    return made.sharded() if model and layout.draft_sharded else made


def windows_of(configs: Sequence[ModelConfig]) -> dict[str, int]:
    """To how many of the last tokens each group with a sliding window attends."""
    window = configs[0].window
    return {} if window is None else {WINDOW: window.tokens}


def check_kept(geometry: Geometry, each: Sequence[int]) -> None:
    """Raise EngineError if tiers would keep a state elsewhere than in the page of its last token.

    A slot of theirs has one state, and `each[0]` pages of the target.
    """
    if each[0] != 1 and any(group.kind == ItemKind.SLOT for group in geometry.groups):
        raise EngineError(
            f"tiers keep a state for each {each[0]} pages of the target, whose engine has one in each: choose pages as"
            " long as those of the draft"
        )


def shards(geometry: Geometry, rank: int) -> dict[str, Shard]:
    """The tokens that a rank stores, by group name."""
    groups = {group.id: group for group in geometry.groups}
    owns = geometry.ranks[rank].owns
    return {groups[share.group].name: Shard(groups[share.group], share.cp_rank) for share in owns}


def bytes_a_token(geometry: Geometry) -> dict[str, float]:
    """By group: the most KV bytes that any rank stores for each token of a sequence, on average over its deal."""
    return _most_bytes(geometry, ItemKind.PAGE)


def state_bytes(geometry: Geometry) -> dict[str, float]:
    """By group: the most bytes that any rank stores for the recurrent state of a sequence."""
    return _most_bytes(geometry, ItemKind.SLOT)


def _most_bytes(geometry: Geometry, kind: ItemKind) -> dict[str, float]:
    """By group of a kind: the most bytes that any rank stores for a token, or for a slot."""
    groups = {group.id: group for group in geometry.groups}
    most: dict[str, float] = {}
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            if group.kind == kind:
                held = sum((span.hi - span.lo) * group.parts[span.part].lane_bytes for span in share.lanes)
                rows = group.rows if kind == ItemKind.SLOT else 1 / group.cp_size
                most[group.name] = max(most.get(group.name, 0), held * len(share.layers) * rows)
    return most


def hand_over(geometry: Geometry, caches: Mapping[str, KVPool], rank: int, beside: HybridPools = NOTHING) -> Pool:
    """The pool of one rank, made of the tensors that the engine computes with, by group name and of a hybrid.

    The last page of rows, which no sequence gets, is not part of it.
    """
    groups, tensors, axes = {group.id: group for group in geometry.groups}, dict[str, Any](), dict[str, str]()
    for share in geometry.ranks[rank].owns:
        group = groups[share.group]
        if group.kind == ItemKind.HANDOFF:
            continue
        if group.kind == ItemKind.SLOT and beside.states is not None:
            held = {key: tensor.flatten(2) for key, tensor in beside.states.tensors.items()}
        else:
            pool = beside.windows if group.name == WINDOW and beside.windows is not None else caches[group.name]
            held = {key: tensor[: pool.pages] for key, tensor in pool.tensors.items()}
        layers = share.layers.tolist()
        tensors[group.name] = {part.name: [held[layer, part.name] for layer in layers] for part in group.parts}
        axes[group.name] = _AXES.get(group.name, "page token head dim")
    return Pool(geometry, tensors, rank=rank, axes=axes)


_AXES = {STATES[CONV]: "slot row lane", STATES[SSM]: "slot head dim"}


def page_tables(
    geometry: Geometry, tables: Mapping[str, Sequence[int]], tokens: int, span: int
) -> dict[str, Sequence[int]]:
    """By group name, the page tables of a prompt of `tokens` tokens, given those of each pool; and its state's slot.

    `span` tokens belong to a page of the target. The slot is that of the page to which the last token belongs.
    """
    found, last = dict(tables), (tokens - 1) // span
    for group in geometry.groups:
        if group.kind == ItemKind.SLOT:
            found[group.name] = tables[TARGET][last : last + 1]
        elif group.name == WINDOW:
            found[WINDOW] = window_table(tables[WINDOW], -(-tokens // group.rows))
    return found
