"""Families of models as vLLM 0.33 holds their caches: the specifications of their layers, and where each byte of a row is.

Numbers are those of published models, or of the defaults of their classes, with few layers. Places of bytes are written
down here from what vLLM's kernels say of themselves, once more than in the connector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import torch

BF16, F32, U8, F8 = torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn
Place = tuple[int, int]
"""The first byte, and how many: of a cell of one head and row, or of a block."""


@attrs.frozen
class Held:
    """Layers of one specification.

    Fields:
        backend: vLLM's name of it.
        kind: Class of the specification, and `fields` what it is given, but for the size of a block.
        layers: Their numbers.
        places: Of a row, of how many in a block: the bytes of each of its parts.
        heads: Of all ranks; 0: each rank has all rows.
        flat: Whether places are counted from the beginning of a block, not of a cell.
        name: Of a layer, behind its number.
        layer: Attributes of the running layer.
        block: Tokens of its block, if it has its own.
        ring: Rows of a ring, if it is one.
        cells: Of its tensor to a row.
        lanes: Heads of its tensor, of caches without heads.
    """

    backend: str
    kind: str
    layers: Sequence[int]
    fields: dict[str, Any]
    places: Callable[[int, int], list[Place]]
    heads: int = 0
    flat: bool = False
    name: str = "self_attn.attn"
    layer: dict[str, Any] = attrs.field(factory=dict)
    block: int = 0
    ring: int = 0
    cells: int = 1
    lanes: int = 1
    model: int = 0

    @property
    def window(self) -> int:
        """Tokens of a sliding window; 0 without one."""
        return int(self.fields.get("sliding_window", 0) or 0)

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return int(self.fields.get("tokens_per_state", 1))

    def heads_of(self, rank: int, ranks: int) -> list[int]:
        """The heads of a rank, in its order."""
        if not self.heads:
            return [0]
        each = max(1, self.heads // ranks)
        return [rank * self.heads // ranks + n for n in range(each)]


@attrs.frozen
class States:
    """States of layers: inputs of a convolution, by what follows one another in them, and a matrix a head.

    Fields:
        kind: vLLM's name of what they are the states of.
        conv: Channels of each block; ranks divide each.
        rows: Inputs that are kept.
        ssm: Heads, then the axes of a matrix.
        whole: Whether each rank has all channels.
    """

    kind: str
    layers: Sequence[int]
    conv: Sequence[int] = ()
    rows: int = 3
    ssm: Sequence[int] = ()
    whole: bool = False
    model: int = 0


def kv(
    layers: Sequence[int], heads: int, dim: int, v_dim: int = 0, dtype: torch.dtype = BF16, window: int = 0, chunk: int = 0,
    backend: str = "FLASH_ATTN", **other: Any,
) -> Held:  # fmt: skip
    """K and V of a head side by side."""
    k, v = dim * dtype.itemsize, (v_dim or dim) * dtype.itemsize
    more = {"sliding_window": window} if window else {"attention_chunk_size": chunk} if chunk else {}
    kind = "SlidingWindowSpec" if window else "ChunkedLocalAttentionSpec" if chunk else "FullAttentionSpec"
    fields = {"num_kv_heads": heads, "head_size": dim, "head_size_v": v_dim or dim, "dtype": dtype, **more}
    return Held(backend, kind, layers, fields, lambda *_: [(0, k), (k, v)], heads, layer={"impl": Stores(k)}, **other)


def mla(layers: Sequence[int], latent: int = 512, rope: int = 64, window: int = 0, **other: Any) -> Held:
    """A latent and the rotary key, one row a token."""
    size = (latent + rope) * 2
    more = {"sliding_window": window} if window else {}
    kind = "SlidingWindowMLASpec" if window else "MLAAttentionSpec"
    layer = {"impl": Stores(0), "kv_lora_rank": latent, "kv_cache_dtype": "auto", "_k_scale": None}
    return Held(
        "FLASH_ATTN_MLA", kind, layers, _one(latent + rope, BF16, **more), lambda *_: [(0, size)], layer=layer, **other
    )


def row(
    backend: str, layers: Sequence[int], *sizes: int, dtype: torch.dtype = U8, kind: str = "MLAAttentionSpec", gap: int = 0,
    **more: Any,
) -> Held:  # fmt: skip
    """Parts of these bytes side by side, then a gap."""
    own = {n: more.pop(n) for n in ("name", "layer", "block", "ring", "heads", "lanes") if n in more}
    ends = [sum(sizes[:n]) for n in range(len(sizes))]
    fields = _one((sum(sizes) + gap) // dtype.itemsize, dtype, **more)
    return Held(backend, kind, layers, fields, lambda *_: list(zip(ends, sizes, strict=True)), **own)


def planes(
    backend: str, layers: Sequence[int], groups: Sequence[Sequence[int]], gap: int = 0, dtype: torch.dtype = U8,
    kind: str = "MLAAttentionSpec", **more: Any,
) -> Held:  # fmt: skip
    """All rows of the first group of parts, then all of the next, each with its gap."""
    own = {n: more.pop(n) for n in ("name", "layer", "block", "ring", "lanes", "cells") if n in more}
    widths = [sum(group) + gap * (group is groups[-1]) for group in groups]

    def places(at: int, rows: int) -> list[Place]:
        found, begins = [], 0
        for group, width in zip(groups, widths, strict=True):
            inner = begins + at * width
            for size in group:
                found.append((inner, size))
                inner += size
            begins += rows * width
        return found

    lanes = own.get("lanes", 1)
    fields = _one(sum(widths) // lanes // own.get("cells", 1) // dtype.itemsize, dtype, **more) | {
        "num_kv_heads": lanes
    }
    return Held(backend, kind, layers, fields, places, flat=True, **own)


def _one(size: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    return {"num_kv_heads": 1, "head_size": size, "head_size_v": 0, "dtype": dtype, **more}


class Stores:
    """An implementation of attention that stores K and V, or a latent, as the back ends of GPUs do."""

    def __init__(self, key: int) -> None:
        self.key = key

    def do_kv_cache_update(self, *given: Any) -> None:
        if not self.key:
            latent, rope, cache, slots, *_ = given
            cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat([latent, rope[:, 0]], -1)
            return
        _, k, v, cache, slots = given
        into = cache.transpose(1, 2)
        into[slots // cache.shape[2], slots % cache.shape[2]] = torch.cat([k, v], -1)


# kinds of layers that several families have

WINDOW = "DEEPSEEK_SPARSE_SWA"
_COMPRESSOR = "CompressorBackend"
_INDEX = "DEEPSEEK_V32_INDEXER"


def _v4(layers: Sequence[int], ratio: int, backend: str = "FLASHMLA_SPARSE_DSV4") -> Held:
    more = {
        "tokens_per_state": ratio,
        "model_version": "deepseek_v4",
        "cache_dtype_str": "fp8_ds_mla",
        "alignment": 576,
    }
    return planes(backend, layers, [(448, 128), (7,)], 1, name="attn", state_content_bytes=584, **more)


def _swa(layers: Sequence[int], window: int = 128) -> Held:
    more = {"sliding_window": window, "model_version": "deepseek_v4", "cache_dtype_str": "fp8_ds_mla", "alignment": 576}
    kind, own = "SlidingWindowMLASpec", {"name": "attn.swa_cache", "block": 64, "state_content_bytes": 584}
    return planes(WINDOW, layers, [(448, 128), (7,)], 1, kind=kind, **own, **more)


def _inputs(layers: Sequence[int], size: int, window: int, block: int, of: str = "") -> Held:
    name, kind = f"attn.{of}compressor.state_cache", "SlidingWindowMLASpec"
    return row(_COMPRESSOR, layers, size, dtype=F32, kind=kind, name=name, block=block, sliding_window=window)


def _keys(layers: Sequence[int], ratio: int = 1, backend: str = _INDEX, name: str = "indexer.k_cache") -> Held:
    role = {"cache_role": "indexer"} if backend == _INDEX else {}
    return planes(backend, layers, [(128,), (4,)], name=name, tokens_per_state=ratio, **role)


def _ring(backend: str, layers: Sequence[int], *sizes: int, ring: int, name: str, **more: Any) -> Held:
    return row(backend, layers, *sizes, kind="CircularBufferSpec", ring=ring, block=ring, name=name, **more)


def _tail(layers: Sequence[int], ring: int) -> Held:
    """GLM-5.3: all keys of a ring, then what weighs them in a pool, each on an axis of its own."""
    kind, name = "CircularBufferSpec", "indexer.tail_cache"
    return planes(
        "KPOOL_TAIL", layers, [(256,), (256,)], dtype=BF16, kind=kind, ring=ring, block=ring, name=name, lanes=2
    )


def _streams(head: int, hidden: int) -> dict[str, Any]:
    return {"stream_ranges": ((0, head), (head, head), (2 * head, hidden), (2 * head + hidden, hidden))}


def _inkling(layers: Sequence[int], heads: int, head: int, hidden: int, kernel: int) -> Held:
    """Inputs of four convolutions of a head's share each, in a cell of a power of two."""
    used = (2 * head + 2 * hidden) * 2
    cell = 1 << (used - 1).bit_length()
    more = {"block": kernel, "heads": heads, "lanes": heads, "layer": _streams(head, hidden), "sliding_window": kernel}
    name, kind = "conv_state", "SlidingWindowSpec"
    return row("INKLING_SCONV_SWA", layers, used, gap=cell - used, dtype=BF16, kind=kind, name=name, **more)


def _qwen4(layers: Sequence[int], key: int, pool: int, positions: bool) -> list[Held]:
    """Qwen4-Exp: keys that are not pooled yet, and where it has images their positions, which begin at whole I64."""
    backend, layer = "QWEN4_EXP_EXP_QSA_STATE", {"key_head_size": key, "cache_rope_positions": positions}
    begin = -(-key // 4) * 4 * 2
    own: dict[str, Any] = {"name": "raw_key_cache", "layer": layer, "ring": pool, "block": pool}
    fields = _one(begin // 2 + 12 if positions else key, BF16)
    places = [(0, 2 * key), (begin, 24)][: 1 + positions]
    raw = Held(backend, "CircularBufferSpec", layers, fields, lambda *_: places, **own)
    return [raw, row(backend, layers, key * 2, dtype=BF16, tokens_per_state=pool, name="compressed_key_cache")]


def _gdn(layers: Sequence[int], key_heads: int, value_heads: int, dim: int) -> States:
    return States("GDN_ATTN", layers, (key_heads * dim, key_heads * dim, value_heads * dim), 3, (value_heads, dim, dim))


def _kda(layers: Sequence[int], heads: int, dim: int) -> States:
    return States("GDN_ATTN", layers, (heads * dim,) * 3, 3, (heads, dim, dim))


def _mamba2(layers: Sequence[int], heads: int, dim: int, groups: int, state: int) -> States:
    return States("MAMBA2", layers, (heads * dim, groups * state, groups * state), 3, (heads, dim, state))


FAMILIES: dict[str, list[Held | States]] = {
    "DeepSeek V3.2": [mla(range(3)), _keys(range(3))],
    "DeepSeek V4": [
        _swa(range(4)), _v4([1, 3], 4), _v4([2], 128), _keys([1, 3], 4, "DEEPSEEK_V4_INDEXER", "attn.indexer.k_cache"),
        _inputs([1, 3], 8192, 8, 4), _inputs([1, 3], 2048, 8, 4, "indexer."), _inputs([2], 4096, 128, 8),
    ],
    "DeepSeek V4, in bfloat16": [
        row(WINDOW, range(2), 1024, dtype=BF16, kind="SlidingWindowMLASpec", name="attn.swa_cache", block=64,
            sliding_window=128, model_version="deepseek_v4"),
        row("FLASHINFER_MLA_SPARSE_DSV4", [1], 1024, dtype=BF16, tokens_per_state=4, model_version="deepseek_v4"),
        _inputs([1], 8192, 8, 4),
    ],
    "DeepSeek V4.1": [
        row(WINDOW, range(4), 512, 16, kind="SlidingWindowMLASpec", name="attn.swa_cache", block=64, sliding_window=128,
            model_version="deepseek_v4", state_content_bytes=528),
        row("FLASHMLA_SPARSE_DSV41", [0, 2], 512, 16, tokens_per_state=2, model_version="deepseek_v4", name="attn",
            state_content_bytes=528),
        row("FLASHMLA_SPARSE_DSV41", [1], 512, 16, tokens_per_state=1, model_version="deepseek_v4", name="attn",
            state_content_bytes=528),
        planes("DEEPSEEK_V41_INDEXER", [0, 2], [(128,), (4,)], name="attn.indexer.k_cache", tokens_per_state=2),
        _ring(_COMPRESSOR, [0, 2], 4096, ring=8, name="attn.compressor.state_cache", dtype=F32),
    ],
    "DeepSeek V4.1, rows in NVFP4": [
        row(WINDOW, range(2), 512, 16, kind="SlidingWindowMLASpec", name="attn.swa_cache", block=64, sliding_window=128,
            model_version="deepseek_v4", state_content_bytes=528),
        row("FLASHMLA_MEGA_ATTN_DSV41", [0], 256, 32, tokens_per_state=2, model_version="deepseek_v4", name="attn",
            state_content_bytes=288),
    ],
    "GLM-5.2": [mla(range(4)), _keys([0, 2])],
    "GLM-5.3": [mla([1, 3]), _keys([1, 3], 4), _tail([1, 3], 4), _kda([0, 2], 4, 128)],
    "MiniMax-M3": [
        kv([0], 4, 128), kv([1, 2], 4, 128, backend="MINIMAX_M3_SPARSE"),
        row("MINIMAX_M3_SPARSE_INDEXER", [1, 2], 256, dtype=BF16, cache_role="indexer", name="indexer.index_cache"),
    ],
    "MiniMax-M3, indexes in FP8": [
        kv([1, 2], 4, 128, backend="TRITON_MSA"),
        row("MINIMAX_M3_SPARSE_INDEXER", [1, 2], 128, dtype=F8, cache_role="indexer", name="indexer.index_cache"),
    ],
    "Qwen3.5": [kv([1], 2, 256), _gdn([0], 4, 8, 128)],
    "Qwen4-Exp": [kv([1], 2, 256), *_qwen4([1], 128, 8, False), _gdn([0], 4, 8, 128),
                  States("SHORT_CONV", [0, 1], (512,), 3, whole=True)],
    "Qwen4-Exp with images": [kv([1], 2, 256), *_qwen4([1], 130, 8, True), _gdn([0], 4, 8, 128)],
    "Step-5": [
        kv(range(2), 8, 128, 256), row("STEP5_CSA_SUMMARY", [1], 256, kind="FullAttentionSpec", tokens_per_state=8, name="csa"),
        planes("STEP5_CSA_TAIL_RING", [1], [(512, 512)], dtype=BF16, kind="CircularBufferSpec", ring=16, block=32, cells=2,
               name="tail"),
    ],
    "Inkling": [
        kv([0], 4, 128), kv([1], 8, 128, window=32), _inkling([0], 4, 128, 256, 4), _inkling([1], 8, 128, 128, 4),
    ],
    "Kimi Linear": [mla([1]), _kda([0], 4, 128)],
    "Kimi K3": [mla([1, 3]), _kda([0, 2], 8, 128)],
    "Gemma 3n": [kv([0], 2, 256, window=32), kv([1], 2, 256)],
    "Gemma 4": [kv([0, 1], 8, 256, window=32), kv([2], 2, 512)],
    "MiMo-V2": [kv([0], 4, 192, 128), kv([1, 2], 8, 192, 128, window=32)],
    "Step-3.5": [kv([0], 8, 128), kv([1, 2], 8, 128, window=32)],
    "LongCat": [mla(range(4))],
    "Nemotron-H": [kv([1], 2, 128), _mamba2([0, 2], 8, 64, 2, 128)],
    "Granite 4": [kv([1], 4, 128), _mamba2([0], 8, 64, 2, 128)],
    "LFM2": [kv([1], 4, 64), States("SHORT_CONV", [0, 2], (512,), 2)],
    "Falcon-H1": [kv([0, 1], 2, 128), _mamba2([0, 1], 8, 64, 2, 256)],
    "gpt-oss": [kv([0, 2], 8, 64, window=32), kv([1], 8, 64)],
    "Llama 4": [kv([0, 1], 8, 128, chunk=64), kv([2], 8, 128)],
    "Ling hybrid": [mla([1]), States("LINEAR", [0], ssm=(8, 128, 128))],
    "Jamba": [kv([1], 4, 128), States("MAMBA1", [0], (1024,), 3, (1024, 16))],
    "Dory, HRM: a cache for each pass": [kv(range(6), 4, 64)],
    "Llama with EAGLE-3": [kv(range(3), 4, 128), kv([0], 4, 64, model=1)],
    "DeepSeek V3 with MTP of several layers": [mla(range(2)), mla(range(3), model=1)],
    "Qwen3 with DFlash": [kv(range(2), 4, 128), kv(range(3), 2, 128, window=32, model=1)],
}  # fmt: skip
"""Layers of each family, a few of each kind."""


def specification(kind: str, fields: dict[str, Any]) -> Any:
    """A specification as vLLM's class of this name is, with the defaults of fields that are not given."""
    plain = {"tokens_per_state": 1, "model_version": None, "cache_dtype_str": None, "num_kv_heads": 1}
    made = type(kind, (), {})()
    made.__dict__ |= plain | {"kv_quant_mode": SimpleNamespace(name="NONE")} | fields
    return made
