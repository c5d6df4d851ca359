"""From vLLM's own configuration and tensors to a Description and a Pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import attrs
from vllm.distributed import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index

from kvproto import LocalError, Parallel, Pool, lay_out
from kvproto.errors import ErrorCode
from kvproto_engines.converting import converting
from kvproto_engines.facts import digest_of, rope_of, weights_of
from kvproto_engines.orders import Table
from kvproto_engines.stages import Key, Share, gatherer, in_step, joined, titles_of
from kvproto_vllm.pools.caches import Layers, Stated, check_sizes, state
from kvproto_vllm.pools.states import order_of, states
from kvproto_vllm.releases import conv_rows_first
from kvproto_vllm.settings import Settings
from kvproto_vllm.specs import RING, STATE, WINDOWS, dealt, heads_of, key_of, packed, refused, specs_of

__all__ = ["Opened", "open_pool"]

logger = logging.getLogger("vllm.kvproto")


@attrs.frozen
class Opened:
    """An engine's caches as kvproto sees them.

    Fields:
        pool: Of this rank.
        tables: By the name of a group of the pool, which block table of a request is its page table.
    """

    pool: Pool
    tables: dict[str, Table]


def open_pool(config: Any, kv_config: Any, tensors: dict[str, Any], rank: int, settings: Settings) -> Opened:
    """The pool of one rank; raises LocalError for caches that this connector cannot state."""
    given = config, kv_config, tensors, rank, settings
    if settings.pages != "whole":
        try:
            return _open(*given, strides=True)
        except LocalError as error:
            if settings.pages == "strides" or error.code not in _BY_STRIDES:
                raise
            logger.warning("pages move whole, between equal engines alone: %s", error)
    return _open(*given, strides=False)


_BY_STRIDES = (ErrorCode.LAYOUT_OPAQUE, ErrorCode.BAD_GEOMETRY, ErrorCode.OUT_OF_RANGE)
"""The errors of strides that do not describe a page, or that are too many."""


def _open(
    config: Any, kv_config: Any, tensors: dict[str, Any], rank: int, settings: Settings, strides: bool
) -> Opened:  # fmt: skip
    parallel = config.parallel_config
    check_sizes(parallel)
    pp, tp = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    dcp = getattr(parallel, "decode_context_parallel_size", 1)
    gather, kinds = gatherer(pp, get_pp_group), _kinds(config, kv_config)
    titles = titles_of(key for stage in gather(list(kinds)) for key in stage)
    stated: list[tuple[Table, Stated]] = []

    def share() -> list[Share]:
        made = []
        for key, (spec, names) in kinds.items():
            layers = _layers(config, kv_config, tensors, titles[key], key, spec, names)
            caches = list(_stated(layers, key[1], dcp, strides, settings.convert))
            stated.extend(caches)
            if pp > 1 and any(part.x_scales is not None for _, one in caches for part in one.cache.group.parts):
                mine = "scales of all layers on each rank, as `convert` states them"
                raise refused(layers.names[0], mine, f"{pp} pipeline stages")
            scales = layers.scales if getattr(spec, "kv_quant_mode", 0) and not packed(spec) else []
            made.append(Share(key, [each.cache for _, each in caches], scales, order_of(layers)))
        return made

    shares = joined(in_step(gather, share))
    depth = _depth(config)
    stages = tuple(hi - lo for lo, hi in (get_pp_indices(depth, stage, pp) for stage in range(pp)))
    target, draft = _facts(config, settings, [shares[key] for key in titles])
    facts = (target, draft) if settings.options.cold_draft else (target | draft, {})
    if settings.convert:  # an engine in BF16 has no scales; those that both state are compared (KVP-CNV-SCALES)
        scaled = {name for name in facts[0] if name.startswith("kv_scales.")}
        facts[1].update({name: facts[0].pop(name) for name in scaled})
    geometry = lay_out(
        [cache for key in titles for cache in shares[key].caches],
        Parallel(
            tp=tp, pp=pp, stages=stages if pp > 1 else None, dcp=dcp,
            interleave=getattr(parallel, "cp_kv_cache_interleave_size", 1),
        ),
        replica=parallel.data_parallel_index, facts=facts[0], warn=facts[1],
        depth=depth if pp > 1 else None,  # a looped model has a cache for each pass
    )  # fmt: skip
    tensors_of = {each.cache.group.name: each.tensors for _, each in stated}
    pool = Pool(geometry, tensors_of, rank=rank, axes="page head token dim")
    tables = {each.cache.group.name: table for table, each in stated}
    logger.info("kvproto: pages of %s, %s", list(tables), "strides" if strides else "whole")
    return Opened(pool, tables)


def _kinds(config: Any, kv_config: Any) -> dict[Key, tuple[Any, list[str]]]:
    """The kinds of this stage's layers, each with its specification and the names of the layers in their order."""
    running, depth, drafts = _running(config), _depth(config), config.speculative_config is not None
    found: dict[Key, tuple[Any, list[str]]] = {}
    for index, group in enumerate(kv_config.kv_cache_groups):
        for name, spec in specs_of(group).items():
            draft = drafts and (extract_layer_index(name) >= depth or name.startswith("draft_model."))
            backend = running[name].get_attn_backend().get_name().lower()
            found.setdefault((backend, index, int(draft), key_of(spec)), (spec, []))[1].append(name)
    for _, names in found.values():
        names.sort(key=extract_layer_index)
    return found


def _layers(
    config: Any, kv_config: Any, tensors: dict[str, Any], title: str, key: Key, spec: Any, names: list[str]
) -> Layers:
    """The layers of a kind, with what vLLM says of them."""
    running, model, depth = _running(config), _models(config)[key[2]], _depth(config)
    layer, ranks, stateful = (
        running[names[0]],
        config.parallel_config.tensor_parallel_size,
        type(spec).__name__ == STATE,
    )
    return Layers(
        title=title, layer=layer, backend=layer.get_attn_backend().get_name(), spec=spec, names=names,
        ids=[number % depth if key[2] else number for number in map(extract_layer_index, names)],
        tensors=[running[name].kv_cache if stateful else tensors[name] for name in names],
        heads=heads_of(model, names[0], spec, ranks), ranks=ranks, blocks=kv_config.num_blocks, computed=model.dtype,
        stored=config.cache_config.cache_dtype, scales=[_scales(running[name]) for name in names], model=key[2],
    )  # fmt: skip


def _stated(
    layers: Layers, index: int, dcp: int, strides: bool, convert: bool
) -> Iterator[tuple[Table, Stated]]:  # fmt: skip
    """The caches of a kind of layers, and the page table of each."""
    spec, kind = layers.spec, type(layers.spec).__name__
    made = states(layers, conv_rows_first()) if kind == STATE else [state(layers, strides)]
    window = spec.block_size if kind in WINDOWS else 0
    chunk, span = (getattr(spec, name, 0) if window else 0 for name in ("attention_chunk_size", "sliding_window"))
    span += getattr(spec, "extra_retained_tokens", 0)  # which drafts may compute again
    for one in made:
        cache = converting(one.cache, layers.names[0], layers.ids, layers.scales) if convert else one.cache
        cache = dealt(cache, spec, dcp)
        table = Table(index, one.pages, window, kind in (STATE, RING), span, chunk, kind == RING)
        yield table, attrs.evolve(one, cache=cache)


def _running(config: Any) -> Any:
    """vLLM's layers by name."""
    return config.compilation_config.static_forward_context


def _depth(config: Any) -> int:
    """Layers of the target: those beyond are a draft's."""
    return int(config.model_config.hf_text_config.num_hidden_layers)


def _models(config: Any) -> list[Any]:
    """The models of the target and of its draft, as vLLM knows them."""
    return [config.model_config, getattr(config.speculative_config, "draft_model_config", None)]


def _scales(layer: Any) -> tuple[float, float]:
    """Static scales of K and of V."""
    return getattr(layer, "_k_scale_float", 1.0), getattr(layer, "_v_scale_float", 1.0)


def _facts(config: Any, settings: Settings, shares: list[Share]) -> list[dict[str, str]]:
    """Facts that have to be equal so that bytes mean the same, of the target and of a draft."""
    facts: list[dict[str, str]] = [{}, {}]
    dummy = f"dummy {config.model_config.seed}" if config.load_config.load_format == "dummy" else ""
    for number in {share.key[2] for share in shares}:
        model, of = _models(config)[number], ("target", "draft")[number]
        named = settings.weights if of == "target" else None
        facts[number][f"weights.{of}"] = named or weights_of(model.model, model.revision, [model.quantization, dummy])
        facts[number][f"rope.{of}"] = rope_of(model.hf_text_config)
        own = [share for share in shares if share.key[2] == number]
        if scales := [share.scales for share in own if share.scales]:
            facts[number][f"kv_scales.{of}"] = digest_of(scales)
        if order := next((share.order for share in own if share.order), ""):
            facts[number][f"state_order.{of}"] = order
    return facts
