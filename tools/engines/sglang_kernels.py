"""Kernels that SGLang asks of its packages, in plain torch for a CPU without them: for convolutions and other states, for
attention to a window, and for HiCache, whose memory is not pinned here.

A plug-in of the tests (`sglang_bench`) calls `supply` in each process of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools.engines import sglang_states


def supply() -> None:
    """Put these in place of kernels."""
    sglang_states.supply(causal, step)
    from sglang.srt.layers.attention.mamba import causal_conv1d

    causal_conv1d._causal_conv1d_fn_triton = causal
    causal_conv1d._causal_conv1d_update_triton = step
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, _translated(getattr(TorchNativeAttnBackend, name)))
    from sglang.srt.mem_cache.pool_host import common, mha, mla

    common._cuda_host_register = _unpinned
    for module in (mha, mla):
        module.transfer_kv_direct = tokens_of_layers
        module.transfer_kv_per_layer_direct_pf_lf = layer_of_pages
        module.transfer_kv_all_layer_direct_lf_pf = layers_to_pages


def _translated(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of layers with a window looks for their rows where they are: in the slots of their own pool."""

    def call(
        backend: Any, query: Any, output: Any, k_cache: Any, v_cache: Any, table: Any, *args: Any, **named: Any
    ) -> Any:
        pool = backend.token_to_kv_pool
        window = getattr(pool, "swa_kv_pool", None)
        if window is not None and k_cache.data_ptr() in [each.data_ptr() for each in window.k_buffer]:
            table = pool.translate_loc_from_full_to_swa(table.long())
        return original(backend, query, output, k_cache, v_cache, table, *args, **named)

    return call


def _unpinned(*args: Any, **named: Any) -> None:
    """There is no device that memory could be pinned for."""


def tokens_of_layers(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Copy tokens between two pools, layer by layer."""
    for source, sink in zip(src_layers, dst_layers, strict=True):
        sink[dst_indices.long()] = source[src_indices.long()]


def layer_of_pages(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:  # fmt: skip
    """Copy one layer of pages [page, layer, token, ...] to a pool by tokens."""
    at = src_indices.long()
    for pages, sink in zip(src_ptrs, dst_ptrs, strict=True):
        sink[dst_indices.long()] = pages[at // page_size, layer_id, at % page_size]


def layers_to_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Copy all layers of a pool by tokens to pages [page, layer, token, ...]; of K all layers, then of V."""
    at = dst_indices.long()
    layers = len(src_ptrs) // len(dst_ptrs)
    for n, source in enumerate(src_ptrs):
        dst_ptrs[n // layers][at // page_size, n % layers, at % page_size] = source[src_indices.long()]


def causal(
    x: Any, weight: Any, bias: Any, conv_states: Any, query_start_loc: Any, cache_indices: Any, has_initial_state: Any,
    activation: str | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Convolve each of several prompts, [channel, token] one after another, and leave the last inputs in its state."""
    ends, out, kept = query_start_loc.tolist(), torch.empty_like(x), weight.shape[1] - 1
    for n, (lo, hi) in enumerate(zip(ends, ends[1:], strict=False)):
        slot = int(cache_indices[n])
        state = conv_states[slot] if bool(has_initial_state[n]) else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([state.to(x.dtype), x[:, lo:hi]], 1)
        out[:, lo:hi] = _convolved(inputs, weight, bias, activation)
        conv_states[slot] = inputs[:, -kept:].to(conv_states.dtype)
    return out


def step(
    x: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None, conv_state_indices: Any = None,
    **more: Any,
) -> Any:  # fmt: skip
    """A token of each of several requests, [request, channel]."""
    out = torch.empty_like(x)
    for n, slot in enumerate(conv_state_indices.tolist()):
        inputs = torch.cat([conv_state[slot].to(x.dtype), x[n, :, None]], 1)
        out[n] = _convolved(inputs, weight, bias, activation)[:, 0]
        conv_state[slot] = inputs[:, 1:].to(conv_state.dtype)
    return out


def _convolved(inputs: Any, weight: Any, bias: Any, activation: Any) -> Any:
    made = torch.nn.functional.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0]
    return torch.nn.functional.silu(made) if activation in ("silu", "swish", True) else made
