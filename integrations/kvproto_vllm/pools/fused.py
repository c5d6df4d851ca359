"""Caches whose rows vLLM computes, quantizes and stores in one kernel: stated by the names of their back ends.

The back ends of ROCm and XPU are not here, as nobody has compared theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvproto import Cache, DType, LocalError
from kvproto.errors import ErrorCode
from kvproto_engines.elements import FLOATS, QUANTIZED
from kvproto_engines.records import COMPRESSED, INDEXES, WINDOW, Field, Record, pending, plain
from kvproto_vllm.releases import scales_are_exponents
from kvproto_vllm.specs import RING, refused

__all__ = ["FUSED", "fused"]

_COMPRESSED = (
    "CPU_V4_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41",
    "FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41",
)  # fmt: skip
_INDEXES = ("CPU_V4_INDEXER", "DEEPSEEK_V32_INDEXER", "DEEPSEEK_V41_INDEXER", "DEEPSEEK_V4_INDEXER")
_SUMMED = 512
"""Bytes of an index key of Step-5, and of what weighs it in a summary."""
_ALIGNED = 8
"""Bytes by which a position of Qwen4-Exp begins."""


def _state(layers: Any, size: int) -> Record | None:
    """Inputs of a compressor: of an index, or of the latent of its layer."""
    of_index = {".indexer." in name for name in layers.names}
    part = "index_compress_state" if True in of_index else "compress_state"
    return plain(part, DType.F32, size) if len(of_index) == 1 else None


def _key(layers: Any, size: int) -> Record | None:
    """An index key of one element type; that a cache quantizes keys without a scale is its engine's own choice."""
    kind = (FLOATS | QUANTIZED).get(layers.tensors[0].dtype)
    return plain("index", kind, size) if kind is not None else None


def _keys(layers: Any, size: int) -> Record | None:
    """Of Qwen4-Exp: pooled index keys, or those that are not pooled yet, beside their positions if it has images."""
    if type(layers.spec).__name__ != RING:
        return _key(layers, size)
    key = layers.layer.key_head_size * 2
    fields: tuple[Field, ...] = (Field("pending_index", DType.BF16, key),)
    if layers.layer.cache_rope_positions:
        gap = -key % _ALIGNED
        fields += Field("", DType.U8, gap), Field("pending_position", DType.I64, size - key - gap)
    return Record((fields,))


def _inputs(layers: Any, size: int) -> Record:
    """Inputs of Inkling's four convolutions, a head's share of each."""
    used = sum(width for _, width in layers.layer.stream_ranges) * 2
    return Record(((Field("conv_rows", DType.BF16, used), Field("", DType.U8, size - used)),))


_BY_NAME: dict[str, Callable[[Any, int], Record | None]] = {
    **dict.fromkeys(_COMPRESSED, lambda _, size: COMPRESSED.get(size)),
    "DEEPSEEK_SPARSE_SWA": lambda _, size: WINDOW.get(size),
    **dict.fromkeys(_INDEXES, lambda _, size: INDEXES.get((size, scales_are_exponents()))),
    "CompressorBackend": _state,
    "KPOOL_TAIL": lambda _, size: pending(size, apart=True),
    "STEP5_CSA_TAIL_RING": lambda *_: pending(_SUMMED, apart=False),
    "STEP5_CSA_SUMMARY": lambda _, size: plain("index", DType.F8E4M3, size),
    "MINIMAX_M3_SPARSE_INDEXER": _key,
    "QWEN4_EXP_EXP_QSA_STATE": _keys,
    "INKLING_SCONV_SWA": _inputs,
}
"""By vLLM's name of a back end: what a row holds, of so many bytes in its tensor; None: not known."""
FUSED = frozenset(_BY_NAME)
_HEADED = ("INKLING_SCONV_SWA",)
"""Back ends whose ranks divide heads among them, as there are never more ranks; others have all rows on each rank."""


def fused(layers: Any) -> tuple[Cache, dict[str, list[Any]]]:
    """The cache of these layers, and the tensors of each part; raises LocalError for rows that are not known."""
    spec, tensors, tokens = layers.spec, layers.tensors, layers.spec.tokens_per_state
    size = tensors[0].shape[3] * tensors[0].itemsize
    record = _BY_NAME[layers.backend](layers, size)
    if record is None or torch.version.hip:
        found = f"{layers.backend}, {size} bytes of {tensors[0].dtype}{' on ROCm' if torch.version.hip else ''}"
        raise refused(layers.names[0], "a row whose parts are known by its size", found)
    if getattr(spec, "bounded_replay", False):
        mine, advice = "a window that the engine does not compute again", "start it with --no-swa-bounded-replay"
        raise LocalError(ErrorCode.BAD_COLUMNS, layers.names[0], mine, "bounded_replay", advice)
    try:
        views = [record.views(each) for each in tensors]
    except (RuntimeError, ValueError) as error:  # as `view` refuses bytes that lie apart
        raise refused(layers.names[0], "pages without gaps", str(error)) from error
    lanes = spec.num_kv_heads * layers.ranks if layers.backend in _HEADED else 1
    parts, rows = record.parts(lanes), next(iter(views[0].values())).shape[2]
    if type(spec).__name__ == RING:
        cache = Cache.ring(layers.title, layers.ids, parts=parts, ring_rows=rows, model=layers.model)
    elif (page := rows * tokens) * len(tensors[0]) == spec.block_size * layers.blocks:
        cache = Cache.paged(layers.title, layers.ids, parts=parts, page=page, tokens_per_row=tokens, model=layers.model)
    else:
        found = f"{len(tensors[0])} pages of {rows} rows of {tokens} tokens"
        raise refused(layers.names[0], f"{layers.blocks} blocks of {spec.block_size} tokens", found)
    return cache, {part: [each[part] for each in views] for part in views[0]}
