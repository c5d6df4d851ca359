"""SGLang's pools, as far as the back end looks, with tensors of the shapes, strides and types that SGLang allocates.

They are written and read by the methods that SGLang's own have, so that `tests.sglang.handover` takes either.
"""

from types import SimpleNamespace
from typing import Any

import torch

from kvproto_engines.memory import ShareableMemory

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    with ShareableMemory():
        return torch.zeros(shape, dtype=dtype, device=device)


class Pool:
    """What all of them have."""

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, layer_num: int, device: str, start: int) -> None:
        self.size, self.page_size, self.layer_num, self.start_layer = size, page_size, layer_num, start
        self.dtype, self.store_dtype = dtype, torch.uint8 if dtype in FP8 else dtype
        self.device = device


class MHATokenToKVPool(Pool):
    """K and V: halves of one allocation a layer where they are of one size, [slot, head, dim] or [page, head, token, dim]."""

    def __init__(
        self, *, size: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int, layer_num: int,
        device: str = "cpu", v_head_dim: int | None = None, layout: str = "nhd", start_layer: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(size, page_size, dtype, layer_num, device, start_layer)
        self.head_num, self.head_dim, self.v_head_dim, self.kv_cache_layout = (
            head_num,
            head_dim,
            v_head_dim or head_dim,
            layout,
        )
        slots, made = size + page_size, []
        for dim in (self.head_dim, self.v_head_dim):
            nhd = (slots, head_num, dim)
            made.append(nhd if layout == "nhd" else (slots // page_size, head_num, page_size, dim))
        if made[0] == made[1]:
            both = [zeros((2, *made[0]), self.store_dtype, device) for _ in range(layer_num)]
            self.k_buffer, self.v_buffer = ([each[n] for each in both] for n in (0, 1))
        else:
            self.k_buffer, self.v_buffer = (
                [zeros(shape, self.store_dtype, device) for _ in range(layer_num)] for shape in made
            )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k_buffer[layer_id - self.start_layer].view(self.dtype)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v_buffer[layer_id - self.start_layer].view(self.dtype)

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        for buffer, rows in ((self.k_buffer, cache_k), (self.v_buffer, cache_v)):
            rows, into = rows.view(self.store_dtype), buffer[layer.layer_id - self.start_layer]
            if self.kv_cache_layout == "nhd":
                into[loc] = rows
            else:
                into.transpose(1, 2)[loc // self.page_size, loc % self.page_size] = rows


class MLATokenToKVPool(Pool):
    """Latent and rotary key, [slot, 1, dim] a layer; of sparse attention in FP8 a row of bytes."""

    def __init__(
        self, *, size: int, page_size: int, dtype: torch.dtype, kv_lora_rank: int, qk_rope_head_dim: int, layer_num: int,
        device: str = "cpu", kv_cache_dim: int | None = None, start_layer: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(size, page_size, dtype, layer_num, device, start_layer)
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.kv_cache_dim = kv_cache_dim or kv_lora_rank + qk_rope_head_dim
        self.dsa_kv_cache_store_fp8 = kv_cache_dim not in (None, kv_lora_rank + qk_rope_head_dim)
        shape = size + page_size, 1, self.kv_cache_dim
        self.kv_buffer = [zeros(shape, self.store_dtype, device) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.kv_buffer[layer_id - self.start_layer].view(self.dtype)

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: Any) -> None:
        self.kv_buffer[layer.layer_id - self.start_layer][loc] = cache_k.view(self.store_dtype)


def _tail(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return zeros(shape, torch.bfloat16, device) if shape[0] else torch.zeros(shape, dtype=torch.bfloat16, device=device)


class DSATokenToKVPool(MLATokenToKVPool):
    """The same, and keys of an indexer: of a page all keys, then their scales."""

    quant_block_size, tail_extra_slots = 128, 0

    def __init__(
        self, *, index_head_dim: int = 128, skip_topk_layers: list[bool] | None = None, index_kpool: int = 1,
        index_kpool_compress: bool = False, max_running_requests: int = 0, index_buf_size: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(**more)
        self.index_kpool, self.kpool_use_compress = index_kpool, index_kpool_compress
        self.index_head_dim, self.index_page_size = index_head_dim, self.page_size // index_kpool
        pages, skipped = (
            (index_buf_size or self.size) // self.page_size + 1,
            skip_topk_layers or [False] * self.layer_num,
        )
        width = self.index_page_size * (index_head_dim + 4)
        tails = [(0 if skip else max_running_requests + 1, index_kpool, index_head_dim) for skip in skipped]
        if index_kpool_compress:
            for part in ("k", "score"):
                made = [_tail(shape, self.device) for shape in tails]
                setattr(self, f"_compress_tail_{part}", made)
        self.index_k_with_scale_buffer = [
            zeros((pages, width), torch.uint8, self.device)
            if not skip
            else torch.zeros((0, width), dtype=torch.uint8, device=self.device)
            for skip in skipped
        ]

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.index_k_with_scale_buffer[layer_id - self.start_layer]


class SWAKVPool:
    """Layers that attend to all tokens, and layers with a window, in pools of their own."""

    request_window = swa_req_ring_size = None
    swa_uses_full_indices = False

    def __init__(
        self, *, size: int, size_swa: int, swa_attention_layer_ids: list[int], full_attention_layer_ids: list[int],
        page_size: int, device: str = "cpu", token_to_kv_pool_class: Any = MHATokenToKVPool, **more: Any,
    ) -> None:  # fmt: skip
        self.page_size, self.device = page_size, device
        full, swa = full_attention_layer_ids, swa_attention_layer_ids
        common = {"page_size": page_size, "device": device} | more
        self.full_kv_pool = token_to_kv_pool_class(size=size, layer_num=len(full), **common)
        self.swa_kv_pool = token_to_kv_pool_class(size=size_swa, layer_num=len(swa), **common)
        self.layers_mapping = {n: (i, False) for i, n in enumerate(full)} | {n: (i, True) for i, n in enumerate(swa)}


class MambaPool:
    """A convolution's inputs and a matrix a head, of all layers: [layer, slot, ...]."""

    _slot_siblings: tuple[Any, ...] = ()
    replayssm_write_pos = None

    def __init__(
        self, *, size: int, mamba_layer_ids: list[int], conv: tuple[int, int], temporal: tuple[int, int, int],
        dtype: torch.dtype = torch.bfloat16, device: str = "cpu", groups: list[int] | None = None, axis: int = 0,
    ) -> None:  # fmt: skip
        self.mamba_layer_ids, self.conv_shard_groups, self.conv_slice_axis = mamba_layer_ids, groups, axis
        lead = len(mamba_layer_ids), size + 1

        def made(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
            whole = (*lead, *shape)
            return torch.zeros(whole, dtype=kind, device=device) if 0 in whole else zeros(whole, kind, device)

        self.mamba_cache = SimpleNamespace(conv=[made(conv, dtype)], temporal=made(temporal, torch.float32))

    def get_cpu_copy(self, indices: torch.Tensor) -> Any:
        cache = self.mamba_cache
        return [each[:, indices].cpu() for each in cache.conv], cache.temporal[:, indices].cpu()

    def load_cpu_copy(self, copy: Any, indices: torch.Tensor) -> None:
        cache = self.mamba_cache
        for into, rows in zip((*cache.conv, cache.temporal), (*copy[0], copy[1]), strict=True):
            into[:, indices] = rows.to(into.device)


class HybridLinearKVPool:
    """Layers that attend to all tokens in a pool of their own, beside states."""

    def __init__(self, full: Any, full_attention_layer_ids: list[int], mamba_pool: MambaPool) -> None:
        self.full_kv_pool, self.mamba_pool = full, mamba_pool
        self.page_size, self.device = full.page_size, full.device
        self.full_attention_layer_id_mapping = {n: i for i, n in enumerate(full_attention_layer_ids)}


def buffers(rows: int = 4, hidden: int = 8, draft_index: int = 0) -> Any:
    """SGLang's metadata buffers."""
    made = {name: torch.zeros((rows, 16), dtype=torch.int32) for name in ("output_ids", "cached_tokens")}
    made |= {"output_token_logprobs_idx": torch.zeros((rows, 16), dtype=torch.int32)}
    made |= {"output_token_logprobs_val": torch.zeros((rows, 16)), "output_top_logprobs_val": torch.zeros((rows, 8))}
    made |= {
        "output_top_logprobs_idx": torch.zeros((rows, 8), dtype=torch.int32),
        "output_topk_p": torch.zeros((rows, 16)),
    }
    made |= {"output_topk_index": torch.zeros((rows, 16), dtype=torch.int64)}
    made |= {"output_hidden_states": torch.zeros((rows, hidden), dtype=torch.bfloat16)}
    index = torch.full((rows, draft_index), -1, dtype=torch.int32) if draft_index else None
    masks = dict.fromkeys(
        ("output_token_sampling_mask_len", "output_token_sampling_mask_idx", "output_token_sampling_logprobs")
    )
    return SimpleNamespace(
        **made, **masks, output_dsa_topk_indices=index, bootstrap_room=torch.zeros((rows, 8), dtype=torch.uint64),
        kv_checksum=None,
    )  # fmt: skip


def _buffers(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [zeros(shape, dtype, device) for _ in range(count)]


class MHATokenToKVPoolMXFP8:
    """K and V in FP8, and a scale for each 32 elements."""

    mxfp8_sf_interleaved, block, per_byte = False, 32, 1

    def __init__(
        self, *, size: int, page_size: int, head_num: int, head_dim: int, layer_num: int, device: str = "cpu", **more: Any
    ) -> None:  # fmt: skip
        self.size, self.page_size, self.head_num, self.device = size, page_size, head_num, device
        self.layer_num, self.start_layer, slots = layer_num, 0, size + page_size
        self.store_dtype = torch.uint8 if self.per_byte == 2 else FP8[0]
        data = slots, head_num, head_dim // self.per_byte
        for name in ("k", "v"):
            setattr(self, f"{name}_buffer", _buffers(layer_num, data, self.store_dtype, device))
            scale = (
                (slots, head_num * head_dim // self.block)
                if self.per_byte == 2
                else (slots, head_num, head_dim // self.block)
            )
            setattr(self, f"{name}_scale_buffer", _buffers(layer_num, scale, torch.uint8, device))


class MHATokenToKVPoolFP4(MHATokenToKVPoolMXFP8):
    """K and V in FP4, and a scale for each 16 elements, those of all heads in one row."""

    block, per_byte = 16, 2


class MLATokenToKVPoolFP4:
    """A latent in FP4, and a scale for each 16 elements."""

    def __init__(self, *, size: int, page_size: int, layer_num: int, device: str = "cpu") -> None:
        self.page_size, self.layer_num, self.start_layer, self.device = page_size, layer_num, 0, device
        self.kv_buffer = _buffers(layer_num, (size + page_size, 1, 288), torch.uint8, device)
        self.kv_scale_buffer = _buffers(layer_num, (size + page_size, 36), torch.uint8, device)


class MHATokenToKOnlyPool(Pool):
    """Keys of an indexer."""

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, layer_num: int, device: str, dim: int) -> None:
        super().__init__(size, page_size, dtype, layer_num, device, 0)
        self.head_dim, self.k_buffer = dim, _buffers(layer_num, (size + page_size, 1, dim), dtype, device)


class MiniMaxSparseKVPool:
    """K and V of all layers, and keys of an indexer, of the sparse ones."""

    index_kv_pool = dense_pool = None

    def __init__(
        self, *, size: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int, idx_head_dim: int,
        dense_layer_ids: list[int], sparse_layer_ids: list[int], device: str = "cpu",
    ) -> None:  # fmt: skip
        self.page_size, self.device = page_size, device
        count = len(dense_layer_ids) + len(sparse_layer_ids)
        self.main_pool = MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=dtype,
            head_num=head_num,
            head_dim=head_dim,
            layer_num=count,
            device=device,
        )
        self.sparse_layer_id_mapping = self.index_k_layer_id_mapping = {n: i for i, n in enumerate(sparse_layer_ids)}
        self.index_k_pool = MHATokenToKOnlyPool(size, page_size, dtype, len(sparse_layer_ids), device, idx_head_dim)


class QSATokenToKVPool(HybridLinearKVPool):
    """Attention beside states, and an index of which a key stands for several tokens."""

    def __init__(
        self, full: Any, ids: list[int], mamba_pool: MambaPool, ratio: int, dim: int, request_rows: int,
    ) -> None:  # fmt: skip
        super().__init__(full, ids, mamba_pool)
        self.qsa_compress_ratio, self.qsa_compressed_dtype = ratio, torch.bfloat16
        slots, rows, device = full.size + full.page_size, request_rows * ratio, full.device
        self.qsa_compressed_k_buffer_pool = _buffers(len(ids), (-(-slots // ratio), 1, dim), torch.bfloat16, device)
        self.qsa_key_state_buffer_pool = _buffers(len(ids), (rows, 1, dim), torch.bfloat16, device)
        self.qsa_rope_position_buffer = zeros((rows, 3), torch.int64, device)


class ShortConvPool:
    """Inputs of a convolution over embeddings per layer."""

    enabled = True

    def __init__(self, size: int, device: str) -> None:
        self.layer_map, self.conv_state = {0: 0}, zeros((1, size + 1, 24, 3), torch.bfloat16, device)


class NGramPool:
    """The last tokens of a request."""

    enabled = True

    def __init__(self, size: int, device: str) -> None:
        self.context = zeros((size + 1, 5), torch.int64, device)


class DeepSeekV4SingleKVPool:
    """Latents in pages of bytes."""

    def __init__(self, size: int, page_size: int, whole_page: int, layers: int, layout: str, device: str) -> None:
        data, scale, align = {"v4": (576, 8, 576), "v41": (512, 16, 512), "v41_fp4": (256, 32, 256)}[layout]
        self.page_size = page_size
        self.kv_layout = SimpleNamespace(
            encoding=SimpleNamespace(value=layout), row_addressing=lambda rows: (data, rows * data, scale)
        )
        pages, width = -(-(size + whole_page) // page_size), -(-page_size * (data + scale) // align) * align
        self.kv_buffer = _buffers(layers, (pages, width), torch.uint8, device)


class DeepSeekV4IndexerPool:
    """Keys of an indexer in pages of bytes: of a page all keys, then their scales."""

    index_k_page8, index_head_dim = False, 128

    def __init__(self, size: int, page_size: int, whole_page: int, layers: int, four: bool, device: str) -> None:
        self.page_size, self.use_fp4_indexer = page_size, four
        shape = -(-(size + whole_page) // page_size), page_size * (68 if four else 132)
        self.index_k_with_scale_buffer = _buffers(layers, shape, torch.uint8, device)


class CompressStatePool:
    """Inputs of a compressor, of the last tokens."""

    online = False

    def __init__(self, owners: int, ratio: int, dim: int, drafts: bool, device: str) -> None:
        """With rings of so many pages of a window, or requests; longer ones with drafts."""
        self.ratio, self.ring_size, self.request_scoped = ratio, (8 if ratio == 4 else ratio) * (1 + drafts), ratio != 4
        size = owners * self.ring_size
        rows = -(-(size + self.ring_size + 1) // ratio) * ratio
        width = 2 * (2 if ratio == 4 else 1) * dim
        self.kv_score_buffer = SimpleNamespace(kv_score=zeros((rows, width), torch.float32, device))


class DeepSeekV4TokenToKVPool:
    """A window in each layer, and rows of several tokens."""

    unified_kv_pool = request_window = swa_req_ring_size = swa_valid_from = None

    def __init__(
        self, size: int, page: int, ratios: Any, layout: str, sources: Any, request_rows: int, drafts: int = 0,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self.page_size = self.swa_page_size = page
        self._stage_start, self._stage_end, self.device = 0, len(ratios), device
        self.swa_kv_pool = DeepSeekV4SingleKVPool(size, page, page, len(ratios), layout, device)
        of = {r: [n for n in (sources or range(len(ratios))) if ratios[n] == r] for r in sorted({*ratios} - {0})}
        self.sources_by_ratio, rows = of, "v41_fp4" if layout == "v41" else layout
        self.kv_pools = {
            r: DeepSeekV4SingleKVPool(size // r, page // r, page, len(layers), rows, device) for r, layers in of.items()
        }
        self.index_pools = {
            r: DeepSeekV4IndexerPool(size // r, page // 4 if r == 4 else 64, page, len(of[r]), r != 4, device)
            for r in of if r != 128
        }  # fmt: skip
        self.compress_state_pools, self.indexer_compress_state_pools = [None] * len(ratios), [None] * len(ratios)
        for layer, r in ((layer, ratio) for ratio in of if ratio > 1 for layer in of[ratio]):
            count = size // page if r == 4 else request_rows
            self.compress_state_pools[layer] = CompressStatePool(count, r, 512, drafts > 0, device)
            if r == 4:
                self.indexer_compress_state_pools[layer] = CompressStatePool(count, r, 128, drafts > 0, device)
