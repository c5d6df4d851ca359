"""Tensor and pipeline parallelism, and DCP: which heads and layers a rank holds, and how weights are cut at load."""

import attrs
import torch.distributed as dist
from torch import Tensor

from ..errors import EngineError
from ..gather import gather, near_to
from .config import ModelConfig
from .expert_parallel import ExpertParallel


@attrs.frozen
class Pipeline:
    """The layers of a model by rank, and this rank's place; `group` None means that it has all of them.

    A step is on one rank at a time: hidden states go from chunk to chunk, and all ranks wait for the logits.
    """

    rank: int
    """Place in the engine, as those in `chunks`."""
    chunks: tuple[tuple[int, range], ...]
    """In order: a rank, and the layers that it has."""
    group: dist.ProcessGroup | None = None
    """The ranks with layers, and others that need the logits."""

    @property
    def layers(self) -> list[int]:
        """The layers of this rank."""
        return [layer for rank, layers in self.chunks if rank == self.rank for layer in layers]

    @property
    def first(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.chunks[0][0] == self.rank

    @property
    def last(self) -> bool:
        """Whether this rank makes logits."""
        return self.chunks[-1][0] == self.rank

    def hand(self, x: Tensor, source: int, sink: int) -> Tensor:
        """Move hidden states (any shape, the same on all ranks) from `source` to `sink`; other ranks keep theirs."""
        if source == sink or self.rank not in (source, sink) or not x.numel():
            return x
        moved = near_to(x, self.group)
        if self.rank == source:
            dist.send(moved, sink, self.group)
            return x
        dist.recv(moved, source, self.group)
        return moved.to(x.device)

    def holder(self, layer: int) -> int:
        """The rank that has a layer."""
        return next(rank for rank, layers in self.chunks if layer in layers)

    def everywhere(self, x: Tensor, source: int | None = None) -> Tensor:
        """Logits of the last rank, or what `source` has, on all ranks; on the others the argument gives the shape."""
        if self.group is None or not x.numel():
            return x
        told = near_to(x, self.group)
        dist.broadcast(told, self.chunks[-1][0] if source is None else source, self.group)
        return told.to(x.device)


@attrs.frozen
class TensorParallel:
    """Place of this process in a TP group; `group` None means the default process group.

    With `dcp` N, every N consecutive ranks are a DCP group: they hold the same KV heads, and divide the tokens.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    dcp: int = 1
    replicate_q: bool = False
    """Whether a rank projects the queries of its whole DCP group, so that none have to be gathered."""
    pipeline: Pipeline | None = None
    """The layers that this rank has; None: all of them."""
    experts: ExpertParallel | None = None
    """The ranks over which whole experts are dealt; None: those of the TP group divide the width of each."""

    def __attrs_post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise EngineError(f"TP rank {self.rank} is outside a group of {self.size}")
        if self.dcp < 1 or self.size % self.dcp:
            raise EngineError(f"DCP groups of {self.dcp} do not divide {self.size} TP ranks: choose another --dcp")

    @property
    def cp_rank(self) -> int:
        """Place in the DCP group."""
        return self.rank % self.dcp

    @property
    def whole(self) -> "TensorParallel":
        """The same place for a model whose cache is not dealt: each rank stores all tokens of its own heads."""
        return attrs.evolve(self, dcp=1, replicate_q=False)

    @property
    def together(self) -> "TensorParallel":
        """The place of this rank's DCP group among the groups, which divide KV heads as ranks would."""
        return TensorParallel(self.rank // self.dcp, self.size // self.dcp)

    def stages(self, layers: int) -> Pipeline:
        """A model's layers by rank."""
        return self.pipeline or Pipeline(self.rank, ((self.rank, range(layers)),))

    def queries(self, count: int) -> slice:
        """The query heads, of `count`, that this rank projects."""
        return (self.together if self.replicate_q else self).share(count)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of the ranks' `x` (any shape), bitwise equal on all ranks; identity when the size is 1."""
        if self.size == 1:
            return x
        if dist.get_backend(self.group) == "nccl":
            total = x.detach().contiguous().clone()
            dist.all_reduce(total, group=self.group)
            return total
        return gather(x.detach(), self.size, self.group).sum(0)

    def share(self, count: int) -> slice:
        """This rank's share of `count` units; shares differ by one if the number of ranks does not divide them."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def width(self, count: int) -> int:
        """Units of this rank's share."""
        return count * (self.rank + 1) // self.size - count * self.rank // self.size


SOLO = TensorParallel()


def check_split(config: ModelConfig, size: int, dcp: int = 1) -> None:
    """Raise EngineError if some of `size` TP ranks would have no query head, or nothing of the ffn.

    In DCP groups, also if ranks have unequal numbers of heads, as queries and outputs are exchanged in equal pieces.
    """
    if dcp > 1 and config.heads % size:
        raise EngineError(
            f"DCP needs as many heads on every rank: {size} ranks do not divide {config.heads} heads: choose another TP"
            " size, or --dcp 1"
        )
    widths = {"heads": config.heads, "ffn": config.ffn}
    if config.delta is not None:
        widths["delta.value_heads"] = config.delta.value_heads
    if config.moe is not None:
        widths["moe.ffn"] = config.moe.ffn
        widths["moe.shared_ffn"] = config.moe.shared_ffn or size
    for name, count in widths.items():
        if count < size:
            raise EngineError(f"{name} {count} are too few for TP {size}: choose a smaller size")


def kv_head_range(config: ModelConfig, tp: TensorParallel) -> tuple[int, int]:
    """Global KV heads [lo, hi) that a rank stores: those that the query heads of its DCP group attend to.

    Without DCP the group is the rank. If the groups do not divide the heads, or outnumber the KV heads, a KV head is in
    the cache of several of them. The MLA latent counts as one head, on all ranks.
    """
    check_split(config, tp.size, tp.dcp)
    if config.kind == "mla":
        return 0, 1
    mine, each = tp.together.share(config.heads), config.heads // config.kv_heads
    return mine.start // each, -(-mine.stop // each)


def place_in(config: ModelConfig, tp: TensorParallel, layer: int) -> TensorParallel:
    """The place of a rank in one layer: tokens of sliding windows are dealt nowhere."""
    return tp if config.reach(layer) is None else tp.whole


def kv_head_of(config: ModelConfig, tp: TensorParallel, heads: slice) -> list[int]:
    """The KV head, of those that the rank stores, that each of these query heads attends to."""
    if config.kind == "mla":
        return [0] * (heads.stop - heads.start)
    lo, _ = kv_head_range(config, tp)
    return [head // (config.heads // config.kv_heads) - lo for head in range(heads.start, heads.stop)]


def delta_heads(config: ModelConfig, tp: TensorParallel) -> tuple[slice, slice]:
    """Key and value heads of recurrent layers that a rank has; ranks may share key heads, as `kv_head_range` does."""
    sizes = config.delta_sizes
    values, each = tp.share(sizes.value_heads), sizes.value_heads // sizes.key_heads
    return slice(values.start // each, -(-values.stop // each)), values


def key_head_of(config: ModelConfig, tp: TensorParallel) -> list[int]:
    """The key head, of those that the rank has, of each of its value heads."""
    keys, values = delta_heads(config, tp)
    each = config.delta_sizes.value_heads // config.delta_sizes.key_heads
    return [head // each - keys.start for head in range(values.start, values.stop)]


CUTS = {
    **dict.fromkeys(("q", "q_bias", "k_up"), ("queries", 0)),
    "v_up": ("heads", 0),
    **dict.fromkeys(("k", "v", "k_bias", "v_bias"), ("kv_heads", 0)),
    "o": ("heads", -1),
    **dict.fromkeys(("gate", "up"), ("ffn", -2)),
    "down": ("ffn", -1),
    **dict.fromkeys(("query", "key", "query_conv", "key_conv"), ("key_heads", 0)),
    **dict.fromkeys(("value", "value_conv", "output_gate", "decay", "strength", "rate", "shift"), ("value_heads", 0)),
    "out": ("value_heads", -1),
}
"""By weight: the unit in which it is divided over ranks, and the dim; weights that are not here are on every rank."""


def cut(config: ModelConfig, tp: TensorParallel, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """This rank's slice, dim by dim, of the full weight `name` of `shape`."""
    slices = [slice(0, length) for length in shape]
    if name.startswith("layers."):
        tp = place_in(config, tp, int(name.split(".")[1]))
    if tp.experts is not None and ".experts." in name:
        return tp.experts.share(shape[0]), *slices[1:]
    unit, dim = CUTS.get(name.rsplit(".", 1)[-1], ("", 0))
    if unit:
        units = {
            "queries": (config.heads, tp.queries(config.heads)),
            "heads": (config.heads, tp.share(config.heads)),
            "kv_heads": (config.kv_heads, slice(*kv_head_range(config, tp))),
            "ffn": (shape[dim], tp.share(shape[dim])),
        }
        if config.delta is not None:
            keys, values = delta_heads(config, tp)
            units |= {"key_heads": (config.delta.key_heads, keys), "value_heads": (config.delta.value_heads, values)}
        count, mine = units[unit]
        each = shape[dim] // count
        slices[dim] = slice(mine.start * each, mine.stop * each)
    return tuple(slices)
