"""Kernels of recurrent states that SGLang asks of its packages, in plain torch for a CPU without them: of gated delta nets
and of Mamba 1 and 2.

`sglang_kernels.supply` calls `supply` here. A state is what SGLang's own kernels make it: a head's matrix [value, key].
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def supply(causal: Any, step: Any) -> None:
    """Put these in place of kernels, beside convolutions of prompts and of tokens."""
    for name, kernel in _KERNELS.items():  # modules look them up when they are imported
        setattr(torch.ops.sgl_kernel, name, kernel)
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.models import qwen2_moe

    gdn_backend.causal_conv1d_fn, gdn_backend.causal_conv1d_update = causal, step
    gdn_triton.chunk_gated_delta_rule = of_prompts
    fused_norm_gate.FusedRMSNormGated.forward = layernorm_gated.RMSNorm.forward = _gated_norm
    qwen2_moe.fused_gate_sigmoid_mul_add = _shared_expert
    mamba: Any = importlib.import_module("sglang.srt.layers.attention.mamba.mamba")
    mamba.causal_conv1d_fn = mamba.causal_conv1d_fn_triton = causal
    mamba.causal_conv1d_update = mamba.causal_conv1d_update_triton = step
    mamba.selective_state_update, mamba.mamba_chunk_scan_combined = selected, scanned
    mamba1: Any = importlib.import_module("sglang.srt.layers.attention.mamba.mamba1")
    mamba1.selective_state_update = selected


def gates(decay: Any, a: Any, b: Any, bias: Any) -> tuple[Any, Any]:
    """Logarithms of what is kept, and shares of what is new, [1, token, head]."""
    g = -decay.float().exp() * torch.nn.functional.softplus(a.float() + bias.float())
    return g[None], b.float().sigmoid()[None]


def of_tokens(
    *, A_log: Any, dt_bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any, initial_state_source: Any,
    initial_state_indices: Any, cu_seqlens: Any, **more: Any,
) -> Any:  # fmt: skip
    """A token of each of several requests."""
    g, beta = gates(A_log, a, b, dt_bias)
    given = {"initial_state": initial_state_source, "initial_state_indices": initial_state_indices}
    return of_prompts(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, **given)[0]


def of_prompts(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, initial_state_indices: Any, cu_seqlens: Any,
    **more: Any,
) -> tuple[Any, None, None]:  # fmt: skip
    """Several prompts, one after another [1, token, head, element], by the delta rule; each leaves its state in its slot."""
    heads, out, ends = v.shape[2], torch.empty_like(v), cu_seqlens.tolist()
    q, k = (torch.nn.functional.normalize(each[0].float(), dim=-1, eps=1e-6) for each in (q, k))
    q, k = (each.repeat_interleave(heads // each.shape[1], 1) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    for n, (lo, hi) in enumerate(zip(ends, ends[1:], strict=False)):
        slot = int(initial_state_indices[n])
        state = initial_state[slot].float()
        for t in range(lo, hi):
            state = state * g[0, t].float().exp()[:, None, None]
            new = (v[0, t].float() - (state @ k[t][..., None])[..., 0]) * beta[0, t].float()[:, None]
            state = state + new[..., None] * k[t][:, None]
            out[0, t] = (state @ q[t][..., None])[..., 0].to(out.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def selected(
    state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None,
    dt_softplus: bool = False, state_batch_indices: Any = None, out: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """A token of each of several requests, [request, head, dim], whose states are updated in their slots."""
    heads, slots = x.shape[1], state_batch_indices.long()
    step = torch.nn.functional.softplus(dt.float() + (dt_bias.float() if dt_bias is not None else 0))
    b, c = (each.float().repeat_interleave(heads // each.shape[1], 1)[:, :, None] for each in (B, C))
    made = state[slots].float() * (step[..., None] * A.float()).exp() + (step * x.float())[..., None] * b
    state[slots] = made.to(state.dtype)
    found = (made * c).sum(-1) + (x.float() * D.float() if D is not None else 0)
    found = found * torch.nn.functional.silu(z.float()) if z is not None else found
    return found.to(x.dtype) if out is None else out.copy_(found.to(out.dtype))


def scanned(
    x: Any, dt: Any, A: Any, B: Any, C: Any, *, D: Any, dt_bias: Any, cu_seqlens: Any, initial_states: Any, out: Any,
    state_dtype: Any, **more: Any,
) -> tuple[None, Any, None]:  # fmt: skip
    """Several prompts, one after another [1, token, head, dim]; the state after each."""
    (_, _, heads, dim), width, ends = x.shape, B.shape[3], cu_seqlens.tolist()
    states = torch.zeros((len(ends) - 1, heads, dim, width)) if initial_states is None else initial_states.float()
    decay, bias = (each[:, None].expand(heads, dim) for each in (A, dt_bias))
    for n, (lo, hi) in enumerate(zip(ends, ends[1:], strict=False)):
        for t in range(lo, hi):
            selected(
                states, x[:, t], dt[:, t, :, None].expand(1, heads, dim), decay[..., None].expand(heads, dim, width),
                B[:, t], C[:, t], D[:, None].expand(heads, dim), dt_bias=bias,
                state_batch_indices=torch.tensor([n]), out=out[:, t],
            )  # fmt: skip
    return None, states.to(state_dtype), None


def _gated_norm(norm: Any, x: Any, g: Any, *args: Any, **more: Any) -> Any:
    return (_scaled(x, norm.weight, norm.eps) * torch.nn.functional.silu(g.float())).to(x.dtype)


def _scaled(x: Any, weight: Any, eps: float) -> Any:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def _shared_expert(hidden: Any, weight: Any, shared: Any, out: Any) -> None:
    out += (hidden @ weight.view(-1, 1)).sigmoid() * shared


def _norms(q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, dim: int) -> tuple[Any, Any]:
    both = ((q, q_weight), (k, k_weight))
    q, k = (_scaled(each.reshape(-1, dim), weight + 1, eps).to(each.dtype) for each, weight in both)
    return q, k


def _gated_norms(
    q_gate: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, dim: int, heads: int
) -> tuple[Any, Any, Any]:  # fmt: skip
    q, gate = q_gate.reshape(-1, heads, 2 * dim).chunk(2, -1)
    return *_norms(q, k, q_weight, k_weight, eps, dim), gate.reshape(-1, dim).contiguous()


def _gate(x: Any, gate: Any) -> None:
    x.mul_(gate.reshape(x.shape).sigmoid())


def _unpacked(qkvz: Any, ba: Any, keys: int, values: int, dim: int, width: int) -> tuple[Any, Any, Any, Any]:
    mixed, z = qkvz.split([2 * keys * dim + values * width, values * width], -1)
    b, a = ba.chunk(2, -1)
    return mixed.contiguous(), z.reshape(-1, values, width).contiguous(), b.contiguous(), a.contiguous()


_KERNELS = {
    "fused_sigmoid_gating_delta_rule_update_cpu": of_tokens,
    "fused_gdn_gating_cpu": gates,
    "fused_qk_gemma_rmsnorm_cpu": _norms,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": _gated_norms,
    "fused_sigmoid_mul_cpu": _gate,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": _unpacked,
}
"""By the names of SGLang's operators."""
