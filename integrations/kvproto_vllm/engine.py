"""From vLLM's own configuration and tensors to a Description and a Pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from vllm.model_executor.models.utils import extract_layer_index

from kvproto import LocalError, Parallel, Pool, lay_out
from kvproto.errors import ErrorCode
from kvproto_engines.facts import digest_of, rope_of, weights_of
from kvproto_vllm.caches import WINDOW, Layers, refuse_cache, state
from kvproto_vllm.orders import Table
from kvproto_vllm.settings import Settings

__all__ = ["Opened", "open_pool"]

logger = logging.getLogger("vllm.kvproto")

UNSUPPORTED = (
    "data_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
)  # fmt: skip
"""Sizes of vLLM's parallel configuration that have to be 1 until engines with them were tried."""


@attrs.frozen
class Opened:
    """An engine's caches as kvproto sees them.

    Fields:
        pool: Of this rank.
        tables: By the name of a group of the pool, which block table of a request is its page table.
    """

    pool: Pool
    tables: dict[str, Table]


def open_pool(config: Any, kv_config: Any, tensors: dict[str, torch.Tensor], rank: int, settings: Settings) -> Opened:
    """The pool of one tensor-parallel rank; raises LocalError for caches that this connector cannot state."""
    for name in UNSUPPORTED:
        if (size := getattr(config.parallel_config, name, 1)) != 1:
            raise refuse_cache(name, "1", str(size))
    for form in {"auto": ("strides", "whole")}.get(settings.pages, (settings.pages,)):
        try:
            opened = _open(config, kv_config, tensors, rank, settings, form == "strides")
        except LocalError as error:
            if settings.pages != "auto" or form == "whole" or error.code not in _BY_STRIDES:
                raise
            logger.warning("pages move whole, between equal engines alone: %s", error)
            continue
        logger.info("kvproto: pages of %s, %s", list(opened.tables), form)
        return opened
    raise AssertionError(settings.pages)


_BY_STRIDES = (ErrorCode.LAYOUT_OPAQUE, ErrorCode.BAD_GEOMETRY)
"""How strides are refused that do not describe a page, or that are too many."""


def _open(
    config: Any, kv_config: Any, tensors: dict[str, torch.Tensor], rank: int, settings: Settings, strides: bool
) -> Opened:  # fmt: skip
    groups = list(_layers(config, kv_config, tensors))
    stated = {each.title: state(each, strides) for _, each in groups}
    geometry = lay_out(
        [each.cache for each in stated.values()], Parallel(tp=config.parallel_config.tensor_parallel_size),
        replica=config.parallel_config.data_parallel_index,
        facts=_facts(config, settings, [each for _, each in groups]),
        depth=groups[0][1].depth,
    )  # fmt: skip
    given = {title: each.tensors for title, each in stated.items()}
    pool = Pool(geometry, given, rank=rank, axes={title: each.axes for title, each in stated.items()})
    windows = {each.title: each.spec.block_size for _, each in groups if type(each.spec).__name__ == WINDOW}
    tables = {each.title: Table(i, stated[each.title].pages, windows.get(each.title, 0)) for i, each in groups}
    return Opened(pool, tables)


def _layers(config: Any, kv_config: Any, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[int, Layers]]:
    """Layers that one group can state, and their block table."""
    running = config.compilation_config.static_forward_context
    heads, titles = config.model_config.get_total_num_kv_heads(), 0
    for index, group in enumerate(kv_config.kv_cache_groups):
        kinds: dict[Any, list[str]] = {}
        for name in group.layer_names:
            spec = group.kv_cache_spec
            kinds.setdefault(getattr(spec, "kv_cache_specs", {}).get(name, spec), []).append(name)
        for spec, names in kinds.items():
            names.sort(key=extract_layer_index)
            layer = running[names[0]]
            backend = layer.get_attn_backend().get_name()
            yield index, Layers(
                title=f"{backend.lower()} {titles}" if titles else backend.lower(), layer=layer, backend=backend,
                spec=spec, names=names, ids=[extract_layer_index(name) for name in names],
                tensors=[tensors[name] for name in names], heads=heads, blocks=kv_config.num_blocks,
                computed=config.model_config.dtype, stored=config.cache_config.cache_dtype,
                scales=[_scales(running[name]) for name in names],
                depth=config.model_config.hf_text_config.num_hidden_layers,
            )  # fmt: skip
            titles += 1


def _scales(layer: Any) -> tuple[float, float]:
    """Static scales of K and of V."""
    return getattr(layer, "_k_scale_float", 1.0), getattr(layer, "_v_scale_float", 1.0)


def _facts(config: Any, settings: Settings, layers: list[Layers]) -> dict[str, str]:
    """What has to be equal so that bytes mean the same."""
    model = config.model_config
    weights = settings.weights or weights_of(model.model, model.revision, [model.quantization, _dummy(config)])
    facts = {"weights.target": weights, "rope.target": rope_of(model.hf_text_config)}
    if scales := [each.scales for each in layers if each.spec.kv_quant_mode]:
        facts["kv_scales.target"] = digest_of(scales)
    return facts


def _dummy(config: Any) -> str:
    return f"dummy {config.model_config.seed}" if config.load_config.load_format == "dummy" else ""
