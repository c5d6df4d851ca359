"""Statements of the tensors of vLLM's attention back ends.

On a GPU a block is [head, token, K then V], or [token, latent] for MLA, in any order and with any gaps that the strides
say, one allocation a layer or one for all. Shapes come from the engine's own specification of the cache. That the bytes
lie there is tried, not assumed: the engine's own function writes a block, and what it wrote is compared.
On the CPU the order within a block is measured (`kvproto_engines.pages`).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from kvproto import Cache, DType, LocalError
from kvproto.errors import ErrorCode
from kvproto_engines.elements import FLOATS
from kvproto_engines.pages import cache_of, chosen, measured, views_of
from kvproto_engines.rows import dice, of_elements, of_packed_latents, trial
from kvproto_engines.sparse import SCALE, index_numbers, index_of, index_views
from kvproto_vllm.pools.fused import FUSED, fused
from kvproto_vllm.releases import scales_are_exponents
from kvproto_vllm.specs import MLA, check_spec, packed, refused

__all__ = ["Layers", "Stated", "check_sizes", "state"]

_QUANTIZED: dict[tuple[str, str], tuple[DType, torch.dtype]] = {
    ("FP8_PER_TENSOR", "fp8"): (DType.F8E4M3, torch.float8_e4m3fn),
    ("FP8_PER_TENSOR", "fp8_e4m3"): (DType.F8E4M3, torch.float8_e4m3fn),
    ("FP8_PER_TENSOR", "fp8_e5m2"): (DType.F8E5M2, torch.float8_e5m2),
    ("FP8_PER_TOKEN_HEAD", "fp8_per_token_head"): (DType.F8E4M3, torch.float8_e4m3fn),
    ("INT8_PER_TOKEN_HEAD", "int8_per_token_head"): (DType.I8, torch.int8),
}
"""By vLLM's mode of quantization and name of the cache's type: what its bytes are. A mode per token and head has an F32
scale behind each head's K, and one behind its V."""
_UNTRIED = ("CUTLASS_MSA", "MINIMAX_M3_SPARSE", "TRITON_MSA")
"""MiniMax-M3's back ends, whose one kernel normalizes, rotates and stores K and V: known by name."""
_INDEX, _KEYS_TO_A_SCALE = "DEEPSEEK_V32_INDEXER", 128
"""vLLM's back end of the keys by which sparse attention chooses tokens."""


@attrs.frozen
class Layers:
    """Layers of one block table and one specification, and what is stated of them.

    Fields:
        title: Of the group.
        layer: The first of them, as the engine runs it.
        backend: Name of its attention back end.
        ids: Numbers of the layers, also of those on other pipeline stages.
        heads: KV heads of all ranks.
        ranks: Tensor-parallel ranks, which divide the heads.
        blocks: Of the engine.
        tensors: Of each layer; of one with states, a list.
        computed: Element type of what is computed.
        stored: vLLM's name of the cache's element type.
        scales: Of K and of V of each layer, where a cache is quantized by them.
        model: 0 the target, 1 its draft.
    """

    title: str
    layer: Any
    backend: str
    spec: Any
    names: list[str]
    ids: list[int]
    tensors: list[Any]
    heads: int
    ranks: int
    blocks: int
    computed: torch.dtype
    stored: str
    scales: list[tuple[float, float]]
    model: int = 0


@attrs.frozen
class Stated:
    """Layers as kvproto sees them.

    Fields:
        tensors: Of each layer [page, head, token, dim], in the order of the layers, or such by part.
        pages: Of one block of the engine: more than 1 where the back end's kernels take smaller ones.
    """

    cache: Cache
    tensors: Any
    pages: int = 1


def check_sizes(parallel: Any) -> None:
    """Raise LocalError for a vLLM that divides prompts among ranks as this connector does not state."""
    if (size := getattr(parallel, "prefill_context_parallel_size", 1)) != 1:
        raise refused("prefill_context_parallel_size", "1", str(size))


def state(layers: Layers, strides: bool) -> Stated:
    """State these layers, by `strides` where an order is measured; raises LocalError for what is not known."""
    known = layers.backend in FUSED and (layers.backend, getattr(layers.spec, "tokens_per_state", 1)) != (_INDEX, 1)
    check_spec(layers.names[0], layers.spec, layers.backend if known else None)
    if known:
        layers = attrs.evolve(layers, tensors=_headed(layers))
        return Stated(*fused(layers), len(layers.tensors[0]) // layers.blocks)
    pages = _pages(layers)
    if layers.backend.endswith("CPU_ATTN"):  # of chunked local attention too
        return _packed(layers, strides)
    indexes = str(getattr(layers.spec, "cache_role", "")).lower().endswith("indexer")
    return _index(layers, pages) if indexes else _rows(layers, pages)


def _pages(layers: Layers) -> int:
    """Blocks of the back end's kernels in one of the engine's."""
    spec, shape = layers.spec, tuple(layers.tensors[0].shape)
    pages = int(shape[0]) // layers.blocks
    wanted = layers.blocks * pages, spec.block_size // max(pages, 1)
    if len({tensor.shape for tensor in layers.tensors}) > 1 or wanted != (shape[0], shape[-2]):
        expected = f"{layers.blocks} blocks of {spec.block_size} tokens in each layer"
        raise refused(layers.names[0], expected, f"a tensor of shape {shape}")
    return pages


def _element(layers: Layers) -> tuple[DType, torch.dtype]:
    """The element type of the cache; raises LocalError for a quantization that is not stated."""
    found, mode = layers.tensors[0].dtype, getattr(layers.spec.kv_quant_mode, "name", "NONE")
    if mode == "NONE" and found in FLOATS:
        return FLOATS[found], found
    if (element := _QUANTIZED.get((mode, layers.stored))) is None or found.itemsize != 1:
        mine = ", ".join(sorted([str(each) for each in FLOATS] + [name for _, name in _QUANTIZED]))
        raise refused(layers.names[0], mine, f"{found}, {mode}, {layers.stored}")
    if getattr(layers.layer, "calculate_kv_scales", False):
        raise refused(layers.names[0], "scales of the checkpoint", "scales that the first forward decides")
    return element


def _rows(layers: Layers, pages: int) -> Stated:
    """K and V of each head side by side, with their scales where these are in the cache; or the one row of MLA, latent
    and rotary key.
    """
    spec, tensors, mla = layers.spec, _headed(layers), type(layers.spec).__name__ in MLA
    shape, dims = tensors[0].shape, {"latent": spec.head_size} if mla else {"k": spec.head_size, "v": spec.head_size_v}
    if packed(spec):
        rows = of_packed_latents(rank := layers.layer.kv_lora_rank, spec.head_size - rank)
    else:
        kind, dtype = _element(layers)
        scaled = kind is DType.I8 or layers.stored.endswith("per_token_head")
        rows = of_elements(dims, 1 if mla else layers.heads, kind, dtype, scaled)
    if len(shape) != 4 or shape[1] != spec.num_kv_heads or shape[3] * tensors[0].itemsize != rows.size:
        expected = f"[blocks, {spec.num_kv_heads} heads, tokens, {rows.size} bytes of {', '.join(rows.parts)}]"
        raise refused(layers.names[0], expected, f"{layers.backend}, shape {tuple(shape)} of {tensors[0].dtype}")
    given = {part: dice((shape[2], shape[1], dim), tensors[0].device) for part, dim in dims.items()}
    if layers.backend not in _UNTRIED:
        _try(layers, tensors[0], given, _store_latent if mla else _store, rows.read)
    cache = Cache.paged(layers.title, layers.ids, parts=rows.parts, page=shape[2], model=layers.model)
    return Stated(cache, tensors, pages)


def _index(layers: Layers, pages: int) -> Stated:
    """Keys of an index: of a page all keys, then their scales."""
    tensors, dim = _headed(layers), layers.spec.head_size - SCALE
    page, shuffled = (
        tensors[0].shape[2],
        bool(torch.version.hip) or getattr(layers.layer, "uses_shuffled_layout", False),
    )
    if layers.backend != _INDEX or dim != _KEYS_TO_A_SCALE or shuffled:
        mine = f"{_INDEX}, keys of {_KEYS_TO_A_SCALE} bytes with a scale each, in rows"
        raise refused(layers.names[0], mine, f"{layers.backend}, {dim} bytes{', shuffled' * shuffled}")
    try:
        views = [index_views(each.view(len(each), -1), page, dim) for each in tensors]
    except (RuntimeError, ValueError) as error:  # as `view` refuses bytes that lie apart
        raise refused(layers.names[0], "pages without gaps", str(error)) from error
    given, exponents = {"index": dice((page, 1, dim), tensors[0].device)}, scales_are_exponents()
    _try(layers, tensors[0], given, _store_key, lambda found: [index_numbers(found.view(1, -1), page, dim, exponents)])
    cache = index_of(layers.title, layers.ids, dim, page, layers.model, exponents)
    return Stated(cache, {part: [each[part].unsqueeze(1) for each in views] for part in views[0]}, pages)


def _headed(layers: Layers) -> list[torch.Tensor]:
    """[block, head, token, content]; of MLA some releases have no heads."""
    return [each.unsqueeze(1) if each.dim() == 3 else each for each in layers.tensors]


def _try(layers: Layers, tensor: torch.Tensor, rows: dict[str, torch.Tensor], store: Any, read: Any) -> None:
    """Raise LocalError where rows that the engine stores in block 0, which is no request's, are read as others."""
    slots, scales = torch.arange(tensor.shape[2], device=tensor.device), layers.scales[0]
    pairs = zip(rows.values(), scales, strict=False)
    given = [(row * (1 if packed(layers.spec) else scale)).to(layers.computed) for row, scale in pairs]
    try:
        part = trial(tensor, rows, lambda: store(layers.layer, given, tensor, slots), read)
    except (AttributeError, ImportError, NotImplementedError, TypeError) as error:
        mine = "a back end with a function that stores K and V"
        raise refused(layers.names[0], mine, f"{layers.backend}: {error}") from error
    if part:
        found, advice = f"{layers.backend} stores it elsewhere", "choose another back end"
        mine = f"{part} where the shape of its tensor says"
        raise LocalError(ErrorCode.LAYOUT_OPAQUE, layers.names[0], mine, found, advice)


def _store(layer: Any, given: list[torch.Tensor], tensor: torch.Tensor, slots: torch.Tensor) -> None:
    layer.impl.do_kv_cache_update(layer, *given, tensor, slots)


def _store_latent(layer: Any, given: list[torch.Tensor], tensor: torch.Tensor, slots: torch.Tensor) -> None:
    latent, rope = given[0][:, 0, : layer.kv_lora_rank], given[0][..., layer.kv_lora_rank :]
    rest = slots, layer.kv_cache_dtype, layer._k_scale
    layer.impl.do_kv_cache_update(latent.contiguous(), rope.contiguous(), tensor[:, 0], *rest)


def _store_key(_: Any, given: list[torch.Tensor], tensor: torch.Tensor, slots: torch.Tensor) -> None:
    from vllm import _custom_ops

    scale = "mxfp8" if scales_are_exponents() else "ue8m0"
    _custom_ops.indexer_k_quant_and_cache(given[0][:, 0], tensor[:, 0], slots, _KEYS_TO_A_SCALE, scale)


def _packed(layers: Layers, strides: bool) -> Stated:
    """K and V of CPU attention: sections of a head by strides, or whole pages."""
    (kind, dtype), tokens, dim = _element(layers), layers.spec.block_size, layers.spec.head_size

    def pack(numbers: Any) -> Any:
        page = torch.zeros(1, 1, tokens, 2 * dim, dtype=dtype)
        rows = torch.from_numpy(numbers).to(dtype).reshape(tokens, 1, dim)
        layers.layer.impl.do_kv_cache_update(layers.layer, rows, rows, page, torch.arange(tokens))
        return page.flatten().to(torch.int64).numpy()

    halves = measured(pack, tokens, dim, f"vllm.cpu_attn.{str(dtype).removeprefix('torch.')}")
    halves = chosen(halves, dim, strides, layers.names[0])
    size, whole = dtype.itemsize, not strides
    cache = cache_of(layers.title, layers.ids, layers.heads, tokens, kind, size, halves, whole, layers.model)
    return Stated(cache, views_of(layers.tensors, halves))
