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


class DSATokenToKVPool(MLATokenToKVPool):
    """The same, and keys of an indexer: of a page all keys, then their scales."""

    index_kpool, quant_block_size = 1, 128

    def __init__(self, *, index_head_dim: int = 128, skip_topk_layers: list[bool] | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.index_head_dim, self.index_page_size = index_head_dim, self.page_size
        pages, skipped = self.size // self.page_size + 1, skip_topk_layers or [False] * self.layer_num
        width = self.page_size * (index_head_dim + 4)
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
        page_size: int, device: str = "cpu", **more: Any,
    ) -> None:  # fmt: skip
        self.page_size, self.device = page_size, device
        full, swa = full_attention_layer_ids, swa_attention_layer_ids
        common = {"page_size": page_size, "device": device} | more
        self.full_kv_pool = MHATokenToKVPool(size=size, layer_num=len(full), **common)
        self.swa_kv_pool = MHATokenToKVPool(size=size_swa, layer_num=len(swa), **common)
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
        state = torch.zeros if 0 in temporal else None
        self.mamba_cache = SimpleNamespace(
            conv=[zeros((*lead, *conv), dtype, device)],
            temporal=state((*lead, *temporal), device=device) if state else zeros((*lead, *temporal), torch.float32, device),
        )  # fmt: skip

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
