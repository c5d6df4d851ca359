"""How the tensors of vLLM's attention back ends are stated.

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
from kvproto_engines.pages import cache_of, measured, views_of

__all__ = ["WINDOW", "Layers", "Stated", "check_sizes", "refused", "state"]

WINDOW = "SlidingWindowSpec"
"""vLLM's name of caches whose blocks the engine gives up when a window has left them."""

_QUANTIZED: dict[tuple[str, str], tuple[DType, torch.dtype]] = {
    ("FP8_PER_TENSOR", "fp8"): (DType.F8E4M3, torch.float8_e4m3fn),
    ("FP8_PER_TENSOR", "fp8_e4m3"): (DType.F8E4M3, torch.float8_e4m3fn),
    ("FP8_PER_TENSOR", "fp8_e5m2"): (DType.F8E5M2, torch.float8_e5m2),
    ("FP8_PER_TOKEN_HEAD", "fp8_per_token_head"): (DType.F8E4M3, torch.float8_e4m3fn),
    ("INT8_PER_TOKEN_HEAD", "int8_per_token_head"): (DType.I8, torch.int8),
}
"""By vLLM's mode of quantization and name of the cache's type: what its bytes are. A mode per token and head has an F32
scale behind each head's K, and one behind its V."""
_SCALE = 4
"""Bytes of a scale."""


@attrs.frozen
class Layers:
    """Layers of one block table and one specification, and what is stated of them.

    Fields:
        title: Of the group.
        layer: The first of them, as the engine runs it.
        backend: Name of its attention back end.
        ids: Numbers of the layers, also of those on other pipeline stages.
        heads: KV heads of all ranks.
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
    """What these layers are, by `strides` where an order is measured; raises LocalError for what is not known."""
    kind = type(layers.spec).__name__
    if kind not in (known := ("FullAttentionSpec", "MLAAttentionSpec", WINDOW)):
        raise refused(layers.names[0], f"caches {', '.join(known)}", kind)
    pages = _pages(layers)
    return _packed(layers, strides) if layers.backend == "CPU_ATTN" else _rows(layers, pages)


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
    """What an element of the cache is; raises LocalError for a quantization that is not stated."""
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
    spec, (kind, dtype) = layers.spec, _element(layers)
    tensors = [each.unsqueeze(1) if each.dim() == 3 else each for each in layers.tensors]  # MLA of some releases
    shape = tuple(tensors[0].shape)
    apart = kind is DType.I8 or layers.stored.endswith("per_token_head")
    dims = {"latent": spec.head_size} if _mla(layers) else {"k": spec.head_size, "v": spec.head_size_v}
    parts: dict[str, tuple[DType, int, int]] = {}
    heads = 1 if _mla(layers) else layers.heads
    for part, dim in dims.items():
        parts[part] = kind, heads, dim * dtype.itemsize
        if apart:
            parts[f"{part}_scale"] = DType.F32, heads, _SCALE
    size = sum(size for _, _, size in parts.values())
    if len(shape) != 4 or shape[1] != spec.num_kv_heads or shape[3] * tensors[0].itemsize != size:
        expected = f"[blocks, {spec.num_kv_heads} heads, tokens, {size} bytes of {', '.join(parts)}]"
        raise refused(layers.names[0], expected, f"{layers.backend}, shape {shape} of {tensors[0].dtype}")
    rows = [_numbers((shape[2], shape[1], dim), tensors[0].device) for dim in dims.values()]
    page = _written(layers, tensors[0], rows).view(torch.uint8)
    at = 0
    for row, (part, dim) in zip(rows, dims.items(), strict=True):
        got = page[..., at : at + dim * dtype.itemsize].contiguous().view(dtype).float()
        at += parts[part][2]
        if apart:
            got = (got * page[..., at : at + _SCALE].contiguous().view(torch.float32)).round()
            at += _SCALE
        if not torch.equal(got, row.transpose(0, 1)):
            found, advice = f"{layers.backend} stores it elsewhere", "choose another back end"
            mine = f"{part} where the shape of its tensor says"
            raise LocalError(ErrorCode.LAYOUT_OPAQUE, layers.names[0], mine, found, advice)
    cache = Cache.paged(layers.title, layers.ids, parts=parts, page=shape[2], model=layers.model)
    return Stated(cache, tensors, pages)


def _mla(layers: Layers) -> bool:
    return type(layers.spec).__name__ == "MLAAttentionSpec"


def _numbers(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Numbers that each element type holds exactly, in an order that differs along each axis."""
    return torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(1)).float().to(device)


def _written(layers: Layers, tensor: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """What the engine's own function makes of block 0, which holds no request's tokens, when it stores these rows."""
    layer, slots = layers.layer, torch.arange(len(rows[0]), device=tensor.device)
    given = [(row * scale).to(layers.computed) for row, scale in zip(rows, layers.scales[0], strict=False)]
    with torch.inference_mode():
        before = tensor[0].clone()
        try:
            if _mla(layers):
                latent, rope = given[0][:, 0, : layer.kv_lora_rank], given[0][..., layer.kv_lora_rank :]
                rest = slots, layer.kv_cache_dtype, layer._k_scale
                layer.impl.do_kv_cache_update(latent.contiguous(), rope.contiguous(), tensor[:, 0], *rest)
            else:
                layer.impl.do_kv_cache_update(layer, *given, tensor, slots)
        except (AttributeError, NotImplementedError, TypeError) as error:
            mine = "a back end with a function that stores K and V"
            raise refused(layers.names[0], mine, f"{layers.backend}: {error}") from error
        page = tensor[0].clone(memory_format=torch.contiguous_format)
        tensor[0].copy_(before)
    return page


def _packed(layers: Layers, strides: bool) -> Stated:
    """K and V of CPU attention: sections of a head by strides, or whole pages."""
    (kind, dtype), tokens, dim = _element(layers), layers.spec.block_size, layers.spec.head_size

    def pack(numbers: Any) -> Any:
        page = torch.zeros(1, 1, tokens, 2 * dim, dtype=dtype)
        rows = torch.from_numpy(numbers).to(dtype).reshape(tokens, 1, dim)
        layers.layer.impl.do_kv_cache_update(layers.layer, rows, rows, page, torch.arange(tokens))
        return page.flatten().to(torch.int64).numpy()

    halves = measured(pack, tokens, dim, f"vllm.cpu_attn.{str(dtype).removeprefix('torch.')}")
    if strides and not all(half.sections for half in halves.values()):
        advice = 'no strides describe it; "pages": "whole" moves it between equal engines'
        raise LocalError(ErrorCode.LAYOUT_OPAQUE, layers.names[0], "pages of strides", halves["k"].encoding, advice)
    if not strides:
        halves = {part: half.whole(dim) for part, half in halves.items()}
    cache = cache_of(
        layers.title, layers.ids, layers.heads, tokens, kind, dtype.itemsize, halves, not strides, layers.model
    )
    return Stated(cache, views_of(layers.tensors, halves))


def refused(path: str, mine: str, yours: str) -> LocalError:
    """An error of what this connector cannot state."""
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours, "docs/vllm-reference.md: what is stated")
