"""What SGLang asks of its packages of kernels for a model with short convolutions, in plain torch, for a CPU without them.

A plug-in of the tests (`sglang_bench`) calls `supply` in each process of SGLang.
"""

from __future__ import annotations

from typing import Any

import torch

_ABSENT = ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu")
"""Operators that modules for states look up when they are imported, and that short convolutions do not use."""


def supply() -> None:
    """Put these in place of kernels; those of delta nets are names alone."""
    for name in _ABSENT:
        if not hasattr(torch.ops.sgl_kernel, name):
            torch.library.define(f"sgl_kernel::{name}", "(Tensor x) -> Tensor")
    from sglang.srt.layers.attention.mamba import causal_conv1d

    causal_conv1d._causal_conv1d_fn_triton = causal
    causal_conv1d._causal_conv1d_update_triton = step


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
