"""Puts models, pools and attention together: what one process of an engine hosts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from kvproto import Geometry, Pool

from .. import checkpoint
from ..adapters import NO_ADAPTERS, Adapters, load_adapters
from ..attention.base import Exchange
from ..attention.exchange import Alone, exchange_of
from ..attention.flashinfer_kernel import FlashInferKernel, kernel_of
from ..attention.hybrid import HybridAttention
from ..attention.paged import PagedAttention
from ..attention.torch_kernel import TorchKernel
from ..cache import NOTHING, HybridPools, KVPool, Shard
from ..cache.memory import Allocate
from ..errors import EngineError
from ..models import FusedOps, Head, Lora, Model, ModelConfig, Ops, Pipeline, TensorParallel, head_among, kv_head_of
from .captured import CapturedRunner
from .context import ContextRunner
from .description import DRAFT, TARGET, Layout, hand_over, shards
from .runner import NO_LORAS, Elsewhere, HeadRunner, Runner, TorchRunner
from .world import World


@attrs.frozen(kw_only=True)
class Hosted:
    """The ranks of an engine in one process, and the models that step all of them."""

    pools: Mapping[int, Pool]
    """The pools that kvproto serves, by rank."""
    target: Runner
    draft: Runner | None
    elsewhere: Callable[[], Mapping[int, Pool]] | None = None
    """Moves the pools to other memory, without their contents; None if the engine cannot."""

    @property
    def shards(self) -> list[Shard]:
        """The tokens of a sequence that each model's pool stores: the target's, and the draft's if there is one."""
        return [runner.shard for runner in (self.target, self.draft) if runner is not None]


def torch_hosted(
    folders: Sequence[Path],
    configs: Sequence[ModelConfig],
    geometry: Geometry,
    layout: Layout,
    world: World,
    pages: int,
    device: torch.device,
    memory: Allocate,
    back_end: str = "torch",
    captured: bool = False,
    window_pages: int | None = None,
    adapters: Adapters = NO_ADAPTERS,
) -> Hosted:
    """One rank of an engine in torch, which has a process for each; `torch_runner` says what two of the last are.

    `adapters` are of the target. Sliding windows have `window_pages` pages (None: as many as the rest).
    """
    mine, ranks = shards(geometry, world.rank), range(layout.ranks)
    stages = [ranks[first : first + layout.stage] for first in ranks[:: layout.stage]]
    along = world.among([stage[first :: layout.tp] for stage in stages for first in range(layout.tp)])
    among = world.among([ranks[first : first + layout.dcp] for first in ranks[:: layout.dcp]])
    caches: dict[str, KVPool] = {}
    beside = NOTHING
    runners: list[Runner] = []
    head = head_among(configs)
    taps = head.taps if head else ()
    for model, (name, folder, config) in enumerate(zip((TARGET, DRAFT)[: len(folders)], folders, configs, strict=True)):
        place = place_of(layout, model, config, world)
        # of a hybrid's stage without attention to all tokens, the shard that another stage has of it
        group = next(group for group in geometry.groups if group.name == name)
        shard, own = mine.get(name, Shard(group, place.cp_rank)), place.stages(config.layers)
        if not own.layers:
            ahead = 0 if config.head is None else 1
            runners.append(Elsewhere(own, config.vocab, shard, device, ahead))
            continue
        form = layout.kv_dtype
        cache = caches[name] = KVPool.allocate(config, pages, group.rows, place, device, memory, form=form)
        if config.hybrid:
            beside = HybridPools.allocate(config, pages, shard, place, device, memory, window_pages)
        loaded = checkpoint.load_either(folder, folders[0], place, dtype=config.dtype, device=device)
        made = torch_runner(
            loaded,
            cache,
            shard,
            among,
            layout.exchange,
            along if shard.count > 1 else None,
            back_end=back_end,
            captured=captured,
            taps=() if model else taps,
            beside=beside if config.hybrid else NOTHING,
            loras=load_adapters(NO_ADAPTERS if model else adapters, config, place, device),
        )
        runners.append(made)

    def elsewhere() -> Mapping[int, Pool]:
        for cache in caches.values():
            cache.move(memory)
        beside.move(memory)
        return {world.rank: hand_over(geometry, caches, world.rank, beside)}

    pools = {world.rank: hand_over(geometry, caches, world.rank, beside)}
    return Hosted(
        pools=pools,
        target=runners[0],
        draft=runners[1] if runners[1:] else None,
        elsewhere=None if captured else elsewhere,
    )


def place_of(layout: Layout, model: int, config: ModelConfig, world: World) -> TensorParallel:
    """The heads and layers of the target (0) or draft (1) that this rank has; all ranks call it in the same order.

    The nth holders of all stages form a pipeline, together with the ranks that hold nothing and need its logits.
    """
    ranks, each, held, size = range(layout.ranks), layout.stage, layout.holders(model), layout.shares(model)
    nth = world.rank % each % held
    first = world.place - world.rank
    chunks = tuple((first + stage * each + nth, layers) for stage, layers in layout.chunks(model, config.layers))
    line = world.among([[rank for rank in ranks if rank % each % held == n] for n in range(held)])
    beside = world.among([ranks[first + n : first + n + size] for first in ranks[::each] for n in range(0, held, size)])
    experts = None if model else world.experts(each)  # each replica has the whole draft
    place = TensorParallel(nth % size, size, beside, pipeline=Pipeline(world.place, chunks, line), experts=experts)
    return layout.place(model, place)


def torch_runner(
    model: Model | Head,
    pool: KVPool,
    shard: Shard,
    among: dist.ProcessGroup | None = None,
    exchange: str = "a2a",
    context: dist.ProcessGroup | None = None,
    by_token: bool = False,
    back_end: str = "torch",
    captured: bool = False,
    taps: Sequence[int] = (),
    beside: HybridPools = NOTHING,
    loras: Mapping[str, Lora] = NO_LORAS,
) -> Runner:
    """A model over its pool on one rank; DCP ranks merge over the group `among` by an exchange of EXCHANGES.

    `context` is the CP group of prefill ranks, on back end torch. `by_token` is as in `PagedAttention`, and `back_end`
    a name of KERNELS. With `captured`, decode steps on a GPU are CUDA graphs. `taps` are layers of a target whose
    hidden states a head reads. `beside` has the pools of a hybrid's other layers, and `loras` are adapters by name.
    Raises EngineError where heads, hybrids or adapters cannot be had.
    """
    config, place = model.config, model.tp
    if captured and (taps or isinstance(model, Head)):
        raise EngineError("CUDA graphs keep no hidden states, which a head needs: leave --captured out")
    if captured and loras:
        raise EngineError("a CUDA graph computes all tokens alike, with or without adapters: leave --captured out")
    if captured and config.moe is not None:
        raise EngineError("the host looks which experts are chosen, which no CUDA graph does: leave --captured out")
    group, own = (where.share(config.heads) for where in (place.together, place))
    heads = kv_head_of(config, place, group), kv_head_of(config, place, own)
    merging: Exchange = Alone()
    if among is not None and place.dcp > 1:
        merging = exchange_of(exchange, place.dcp, among, place.replicate_q)
    if config.hybrid and not isinstance(model, Head):
        if back_end != "torch" or captured or by_token or context is not None:
            raise EngineError("a hybrid model runs by back end torch, without graphs, and not by context parallelism")
        if not beside.fit(config, place):
            raise EngineError("a hybrid model needs pools of its own for sliding windows, and for recurrent states")
        window = None
        if config.window is not None and beside.windows is not None:
            mine = kv_head_of(config, place.whole, own)
            reads = TorchKernel(beside.windows, mine, mine, config.window.tokens)
            window = PagedAttention(beside.windows, reads, Alone())
        mixed = HybridAttention(pool, TorchKernel(pool, *heads), merging, window, beside.states, shard)
        return TorchRunner(model, mixed, shard, taps, loras)
    if context is not None:
        if isinstance(model, Head):
            raise EngineError("a head is not dealt over ranks of prefill: leave --draft-sharded out")
        return ContextRunner(model, pool, TorchKernel(pool, *heads), shard, context, taps, loras)
    kernel = kernel_of(back_end, pool, *heads, fixed=captured)
    model.use(FusedOps() if isinstance(kernel, FlashInferKernel) else Ops())
    attention = PagedAttention(pool, kernel, merging, by_token)
    if isinstance(model, Head):
        return HeadRunner(model, attention, shard)
    if captured and pool.device.type == "cuda":
        return CapturedRunner(model, attention, shard)
    return TorchRunner(model, attention, shard, taps, loras)
