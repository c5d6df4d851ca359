"""From vLLM's own configuration and tensors to a Description and a Pool."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from vllm.model_executor.models.utils import extract_layer_index

from kvproto import Cache, DType, LocalError, Parallel, Pool, lay_out
from kvproto.errors import ErrorCode
from kvproto_vllm.pages import cache_of, measured, views_of
from kvproto_vllm.settings import Settings

__all__ = ["Opened", "open_pool"]

logger = logging.getLogger("vllm.kvproto")

DTYPES = {torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16}
UNSUPPORTED = (
    "data_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
)  # fmt: skip
"""Sizes of vLLM's parallel configuration that have to be 1 until engines with them were tried."""
_SAMPLE = 1 << 16
"""Bytes of the beginning and of the end of a file of weights that its digest covers."""


@attrs.frozen
class Opened:
    """An engine's caches as kvproto sees them.

    Fields:
        pool: Of this rank.
        tables: By the name of a group of the pool, which block table of a request is its page table.
    """

    pool: Pool
    tables: dict[str, int]


@attrs.frozen
class _Stated:
    """Some layers of one block table: their cache, its tensors by part, and the order of the tensors' axes."""

    cache: Cache
    tensors: dict[str, list[torch.Tensor]]
    axes: str


def open_pool(config: Any, kv_config: Any, tensors: dict[str, torch.Tensor], rank: int, settings: Settings) -> Opened:
    """The pool of one tensor-parallel rank; raises LocalError for caches that this connector cannot state."""
    for name in UNSUPPORTED:
        if (size := getattr(config.parallel_config, name, 1)) != 1:
            raise _refuse(name, "1", str(size))
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
    layers = config.compilation_config.static_forward_context
    heads = config.model_config.get_total_num_kv_heads()
    stated: dict[str, _Stated] = {}
    tables = {}
    for index, group in enumerate(kv_config.kv_cache_groups):
        kinds: dict[Any, list[str]] = {}
        for name in group.layer_names:
            spec = group.kv_cache_spec
            kinds.setdefault(getattr(spec, "kv_cache_specs", {}).get(name, spec), []).append(name)
        for spec, names in kinds.items():
            names.sort(key=extract_layer_index)
            backend = layers[names[0]].get_attn_backend().get_name()
            if backend not in _BACKENDS or type(spec).__name__ not in _SPECS:
                mine = f"back ends {sorted(_BACKENDS)} and caches {sorted(_SPECS)}"
                raise _refuse(names[0], mine, f"{backend}, {type(spec).__name__}")
            title = f"{backend.lower()} {len(stated)}" if stated else backend.lower()
            some = [tensors[name] for name in names]
            _check(names[0], spec, some[0], kv_config.num_blocks)
            stated[title] = _BACKENDS[backend](title, layers[names[0]], spec, names, some, heads, strides)
            tables[title] = index
    geometry = lay_out(
        [each.cache for each in stated.values()], Parallel(tp=config.parallel_config.tensor_parallel_size),
        replica=config.parallel_config.data_parallel_index,
        facts=_facts(config, settings), depth=config.model_config.hf_text_config.num_hidden_layers,
    )  # fmt: skip
    given = {title: each.tensors for title, each in stated.items()}
    pool = Pool(geometry, given, rank=rank, axes={title: each.axes for title, each in stated.items()})
    return Opened(pool, tables)


_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


def _check(name: str, spec: Any, tensor: torch.Tensor, blocks: int) -> None:
    """Raise LocalError for a tensor that is not [block, head, token, content] of the engine's own blocks."""
    shape = tuple(tensor.shape)
    if len(shape) != 4 or shape[0] != blocks or shape[2] != spec.block_size:
        raise _refuse(name, f"{blocks} blocks of {spec.block_size} tokens", f"a tensor of shape {shape}")
    if tensor.dtype not in DTYPES or spec.kv_quant_mode != 0:
        raise _refuse(name, f"elements of {[str(each) for each in DTYPES]}", f"{tensor.dtype}, {spec.kv_quant_mode}")


def _packed(
    title: str, layer: Any, spec: Any, names: list[str], tensors: list[torch.Tensor], heads: int, strides: bool
) -> _Stated:  # fmt: skip
    """K and V of CPU attention: sections of a head by strides, or whole pages."""
    tokens, dim, dtype = spec.block_size, spec.head_size, tensors[0].dtype

    def pack(numbers: Any) -> Any:
        page = torch.zeros(1, 1, tokens, 2 * dim, dtype=dtype)
        rows = torch.from_numpy(numbers).to(dtype).reshape(tokens, 1, dim)
        layer.impl.do_kv_cache_update(layer, rows, rows, page, torch.arange(tokens))
        return page.flatten().to(torch.int64).numpy()

    name = f"vllm.cpu_attn.{str(dtype).removeprefix('torch.')}"
    halves = measured(pack, tokens, dim, name)
    if strides and not all(half.sections for half in halves.values()):
        advice = 'no strides describe it; "pages": "whole" moves it between equal engines'
        raise LocalError(ErrorCode.LAYOUT_OPAQUE, names[0], "pages of strides", halves["k"].encoding, advice)
    if not strides:
        halves = {part: half.whole(dim) for part, half in halves.items()}
    cache = cache_of(title, _layer_ids(names), heads, tokens, DTYPES[dtype], dtype.itemsize, halves, not strides)
    return _Stated(cache, views_of(tensors, halves), "page head token dim")


def _latent(
    title: str, layer: Any, spec: Any, names: list[str], tensors: list[torch.Tensor], heads: int, strides: bool
) -> _Stated:  # fmt: skip
    """Latent and rotary key of MLA, a row for each token."""
    dtype = tensors[0].dtype
    parts = {"latent": (DTYPES[dtype], 1, spec.head_size * dtype.itemsize)}
    cache = Cache.paged(title, _layer_ids(names), parts=parts, page=spec.block_size)
    return _Stated(cache, {"latent": [tensor[:, 0] for tensor in tensors]}, "page token dim")


_BACKENDS: dict[str, Callable[..., _Stated]] = {"CPU_ATTN": _packed, "CPU_MLA": _latent}
"""How the pages of an attention back end are stated."""


def _layer_ids(names: Iterable[str]) -> list[int]:
    return [extract_layer_index(name) for name in names]


def _facts(config: Any, settings: Settings) -> dict[str, str]:
    """What has to be equal so that bytes mean the same."""
    text = config.model_config.hf_text_config
    rope = {name: getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta")}
    weights = settings.weights or _weights(config)
    return {"weights.target": weights, "rope.target": _digest(json.dumps(rope, sort_keys=True, default=str))}


def _weights(config: Any) -> str:
    """A digest of the files of a folder, or the name and revision of a model."""
    model = config.model_config
    suffix = "".join(f" {word}" for word in (model.quantization, _dummy(config)) if word)
    folder = Path(model.model)
    if not folder.is_dir():
        return f"{model.model}@{model.revision or 'main'}{suffix}"
    made = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf")):
        size = path.stat().st_size
        made.update(f"{path.name} {size};".encode())
        with path.open("rb") as file:
            made.update(file.read(_SAMPLE))
            file.seek(max(size - _SAMPLE, 0))
            made.update(file.read(_SAMPLE))
    return f"sha256 {made.hexdigest()[:32]}{suffix}"


def _dummy(config: Any) -> str:
    return f"dummy {config.model_config.seed}" if config.load_config.load_format == "dummy" else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _refuse(path: str, mine: str, yours: str) -> LocalError:
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours, "docs/vllm.md lists what this connector states")
