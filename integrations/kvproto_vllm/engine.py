"""From vLLM's own configuration and tensors to a Description and a Pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import attrs
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index

from kvproto import LocalError, Parallel, Pool, lay_out
from kvproto.errors import ErrorCode
from kvproto_engines.facts import digest_of, rope_of, weights_of
from kvproto_vllm.caches import WINDOW, Layers, Stated, check_sizes, state
from kvproto_vllm.orders import Table
from kvproto_vllm.releases import conv_rows_first
from kvproto_vllm.settings import Settings
from kvproto_vllm.states import STATE, order_of, states

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
"""How strides are refused that do not describe a page, or that are too many."""


def _open(
    config: Any, kv_config: Any, tensors: dict[str, Any], rank: int, settings: Settings, strides: bool
) -> Opened:  # fmt: skip
    groups, parallel = list(_layers(config, kv_config, tensors)), config.parallel_config
    check_sizes(parallel, len(groups) + (config.speculative_config is not None))
    stated: list[tuple[Table, Stated]] = []
    for index, each in groups:
        kind, tp = type(each.spec).__name__, parallel.tensor_parallel_size
        made = states(each, tp, conv_rows_first()) if kind == STATE else [state(each, strides)]
        window, span = (each.spec.block_size, each.spec.sliding_window) if kind == WINDOW else (0, 0)
        span += getattr(each.spec, "extra_retained_tokens", 0)  # which drafts may compute again
        stated += [(Table(index, one.pages, window, kind == STATE, span), one) for one in made]
    depth, pp = _depth(config), parallel.pipeline_parallel_size
    stages = tuple(hi - lo for lo, hi in (get_pp_indices(depth, stage, pp) for stage in range(pp)))
    target, draft = _facts(config, settings, [each for _, each in groups])
    facts = (target, draft) if settings.options.cold_draft else (target | draft, {})
    geometry = lay_out(
        [each.cache for _, each in stated],
        Parallel(tp=parallel.tensor_parallel_size, pp=pp, stages=stages if pp > 1 else None),
        replica=parallel.data_parallel_index, facts=facts[0], warn=facts[1], depth=depth,
    )  # fmt: skip
    tensors_of = {each.cache.group.name: each.tensors for _, each in stated}
    pool = Pool(geometry, tensors_of, rank=rank, axes="page head token dim")
    tables = {each.cache.group.name: table for table, each in stated}
    logger.info("kvproto: pages of %s, %s", list(tables), "strides" if strides else "whole")
    return Opened(pool, tables)


def _layers(config: Any, kv_config: Any, tensors: dict[str, Any]) -> Iterator[tuple[int, Layers]]:
    """Layers that one group can state, and their block table."""
    running, depth, titles = config.compilation_config.static_forward_context, _depth(config), 0
    drafts = config.speculative_config is not None
    for index, group in enumerate(kv_config.kv_cache_groups):
        kinds: dict[Any, list[str]] = {}
        for name in group.layer_names:
            spec = group.kv_cache_spec
            draft = drafts and (extract_layer_index(name) >= depth or name.startswith("draft_model."))
            kinds.setdefault((getattr(spec, "kv_cache_specs", {}).get(name, spec), int(draft)), []).append(name)
        for (spec, number), names in kinds.items():
            names.sort(key=extract_layer_index)
            layer, model, stateful = running[names[0]], _models(config)[number], type(spec).__name__ == STATE
            backend, ids = layer.get_attn_backend().get_name(), [extract_layer_index(name) % depth for name in names]
            if config.parallel_config.pipeline_parallel_size > 1:
                ids = list(range(depth))
            yield index, Layers(
                title=f"{backend.lower()} {titles}" if titles else backend.lower(), layer=layer, backend=backend,
                spec=spec, names=names, ids=ids,
                tensors=[running[name].kv_cache if stateful else tensors[name] for name in names],
                heads=model.get_total_num_kv_heads(), blocks=kv_config.num_blocks, computed=model.dtype,
                stored=config.cache_config.cache_dtype, scales=[_scales(running[name]) for name in names], model=number,
            )  # fmt: skip
            titles += 1


def _depth(config: Any) -> int:
    """Layers of the target: those beyond are a draft's."""
    return int(config.model_config.hf_text_config.num_hidden_layers)


def _models(config: Any) -> list[Any]:
    """What vLLM knows of the target, and of its draft."""
    return [config.model_config, getattr(config.speculative_config, "draft_model_config", None)]


def _scales(layer: Any) -> tuple[float, float]:
    """Static scales of K and of V."""
    return getattr(layer, "_k_scale_float", 1.0), getattr(layer, "_v_scale_float", 1.0)


def _facts(config: Any, settings: Settings, layers: list[Layers]) -> list[dict[str, str]]:
    """What has to be equal so that bytes mean the same, of the target and of a draft."""
    facts: list[dict[str, str]] = [{}, {}]
    dummy = f"dummy {config.model_config.seed}" if config.load_config.load_format == "dummy" else ""
    for number in {each.model for each in layers}:
        model, of = _models(config)[number], ("target", "draft")[number]
        named = settings.weights if of == "target" else None
        facts[number][f"weights.{of}"] = named or weights_of(model.model, model.revision, [model.quantization, dummy])
        facts[number][f"rope.{of}"] = rope_of(model.hf_text_config)
        own = [each for each in layers if each.model == number]
        if scales := [each.scales for each in own if getattr(each.spec, "kv_quant_mode", 0)]:
            facts[number][f"kv_scales.{of}"] = digest_of(scales)
        if order := next(filter(None, map(order_of, own)), ""):
            facts[number][f"state_order.{of}"] = order
    return facts
