"""The GQA and MLA decoders and hybrids of them, in float32: functions of a dict of weights, named as in checkpoints.

A rank holds its slice of each weight, and `total` sums the shares of a result over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..models import ModelConfig, MoeConfig
from ..models.mla import LATENT_EPS

__all__ = ["block", "logits", "recurrent_block"]

Array = jax.Array
Weights = Mapping[str, Array]
Attend = Callable[[Array, Mapping[str, Array]], Array]
"""Takes queries [spans, n, heads, row_dim] and new rows by part; returns [spans, n, own heads, value_dim]."""
Total = Callable[[Array], Array]
"""Sums an array over the ranks that share its result."""
State = Mapping[str, Array]
"""Of a recurrent layer by part: conv [spans, kernel - 1, channels], ssm [spans, value heads, key_dim, value_dim]."""
_BLOCKS = ("query", "key", "value")
"""Blocks of channels of the convolution."""


def block(
    c: ModelConfig, w: Weights, x: Array, positions: Array, attend: Attend, total: Total
) -> tuple[Array, dict[str, Array]]:
    """Compute one layer of x [spans, n, hidden] at `positions` [spans, n]; returns the next x and new rows by part.

    The rows are [spans, n, KV heads, row_dim].
    """
    angles = positions.astype(jnp.float32)[..., None, None] * jnp.array(c.rates, jnp.float32)
    turn = _Turn(jnp.cos(angles) * c.rope_gain, jnp.sin(angles) * c.rope_gain, c.rope_pairs)
    q, rows = (_gqa if c.kind == "gqa" else _mla)(c, w, _rms_norm(x, w["attn_norm"], c.norm_eps), turn)
    out = attend(q, rows)
    if c.kind == "mla":
        out = jnp.einsum("...hl,hvl->...hv", out, w["attn.v_up"])
    return _fed_forward(c, w, x + total(out.reshape(*out.shape[:2], -1) @ w["attn.o"].T), total), rows


def recurrent_block(
    c: ModelConfig, w: Weights, x: Array, real: Array, state: State, stops: Array, key_of: Sequence[int], total: Total
) -> tuple[Array, dict[str, Array]]:
    """Compute one recurrent layer of x [spans, n, hidden]; returns the next x and states [spans, m, ...] by part.

    `real` [spans, n] tells tokens from padding behind them. `state` [spans, ...] are the states before, and those
    returned are after `stops` [spans, m] tokens (0: padding). `key_of` is the key head of each value head.
    """
    mixed, states = _delta(c, w, _rms_norm(x, w["attn_norm"], c.norm_eps), real, state, stops, key_of)
    return _fed_forward(c, w, x + total(mixed @ w["attn.out"].T), total), states


def _fed_forward(c: ModelConfig, w: Weights, x: Array, total: Total) -> Array:
    inner = _rms_norm(x, w["ffn_norm"], c.norm_eps)
    summand = _moe(c.moe, w, inner) if c.moe is not None and "ffn.router" in w else _swiglu(w, "ffn", inner)
    return x + total(summand)


def _delta(
    c: ModelConfig, w: Weights, x: Array, real: Array, state: State, stops: Array, key_of: Sequence[int]
) -> tuple[Array, dict[str, Array]]:
    """The gated delta net of `models/delta.py`, token by token: [spans, n, value heads * value_dim], and states."""
    sizes, (spans, n), kernel = c.delta_sizes, x.shape[:2], c.delta_sizes.kernel
    new = jnp.concatenate([x @ w[f"attn.{name}"].T for name in _BLOCKS], -1)
    seen = jnp.concatenate((state["conv"], new), 1)
    taps = jnp.concatenate([w[f"attn.{name}_conv"] for name in _BLOCKS])
    mixed = jax.nn.silu(sum(seen[:, i : i + n] * taps[:, i] for i in range(kernel)))
    key = w["attn.query"].shape[0]
    q, k, v = (
        part.reshape(spans, n, -1, dim)
        for part, dim in zip(
            jnp.split(mixed, [key, 2 * key], -1), (sizes.key_dim, sizes.key_dim, sizes.value_dim), strict=True
        )
    )
    q, k = ((y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-12))[:, :, list(key_of)] for y in (q, k))
    decays = -jnp.exp(w["attn.rate"]) * jax.nn.softplus(x @ w["attn.decay"].T + w["attn.shift"])
    strengths = jax.nn.sigmoid(x @ w["attn.strength"].T)
    decays, strengths = (jnp.where(real[..., None], y, 0) for y in (decays, strengths))

    def token(carry: tuple[Array, Array], at: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        state, kept = carry
        count, q, k, v, decay, strength = at
        state = state * jnp.exp(decay)[..., None, None]
        added = strength[..., None] * (v - jnp.einsum("shkv,shk->shv", state, k))
        state = state + k[..., None] * added[..., None, :]
        kept = jnp.where((stops == count)[..., None, None, None], state[:, None], kept)
        return (state, kept), jnp.einsum("shkv,shk->shv", state, q)

    kept = jnp.zeros((spans, stops.shape[1], *state["ssm"].shape[1:]))
    each = [jnp.moveaxis(y, 1, 0) for y in (q * sizes.key_dim**-0.5, k, v, decays, strengths)]
    (_, kept), outs = lax.scan(token, (state["ssm"], kept), (jnp.arange(1, n + 1), *each))
    out = _rms_norm(jnp.moveaxis(outs, 0, 1), w["attn.out_norm"], c.norm_eps)
    gate = jax.nn.silu(x @ w["attn.output_gate"].T)
    last = stops[..., None] + jnp.arange(kernel - 1)
    return out.reshape(gate.shape) * gate, {"conv": seen[jnp.arange(spans)[:, None, None], last], "ssm": kept}


def logits(c: ModelConfig, w: Weights, x: Array) -> Array:
    """Logits [n, vocab] of x [n, hidden] after the last layer."""
    return _rms_norm(x, w["norm"], c.norm_eps) @ w.get("head", w["embed"]).T


class _Turn:
    """Rotary embedding at the positions of a step; its cosines and sines are [spans, n, 1, pairs]."""

    def __init__(self, cos: Array, sin: Array, pairs: bool) -> None:
        self._cos, self._sin, self._pairs = cos, sin, pairs

    def __call__(self, x: Array) -> Array:
        """Rotate x [spans, n, heads, dim], pairing neighbouring elements or the two halves."""
        first, second = (x[..., ::2], x[..., 1::2]) if self._pairs else jnp.split(x, 2, -1)
        turned = (first * self._cos - second * self._sin, second * self._cos + first * self._sin)
        return jnp.stack(turned, -1).reshape(x.shape) if self._pairs else jnp.concatenate(turned, -1)


def _rms_norm(x: Array, gain: Array, eps: float) -> Array:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * gain


def _heads(w: Weights, name: str, x: Array, dim: int) -> Array:
    """Project x [spans, n, hidden] by weight `name`, and its bias if it has one, to [spans, n, heads, dim]."""
    flat = x @ w[name].T + w.get(name + "_bias", 0.0)
    return flat.reshape(*x.shape[:2], -1, dim)


def _gqa(c: ModelConfig, w: Weights, x: Array, turn: _Turn) -> tuple[Array, dict[str, Array]]:
    q, k, v = (_heads(w, f"attn.{name}", x, c.head_dim) for name in "qkv")
    if c.qk_norm:
        q, k = (_rms_norm(y, w[f"attn.{name}_norm"], c.norm_eps) for y, name in ((q, "q"), (k, "k")))
    return turn(q), {"k": turn(k), "v": v}


def _mla(c: ModelConfig, w: Weights, x: Array, turn: _Turn) -> tuple[Array, dict[str, Array]]:
    squeezed = _rms_norm(x @ w["attn.q_a"].T, w["attn.q_a_norm"], LATENT_EPS) if c.q_rank else x
    q_nope, q_rope = jnp.split(_heads(w, "attn.q", squeezed, c.nope_dim + c.rope_dim), [c.nope_dim], -1)
    latent, k_rope = jnp.split((x @ w["attn.kv_a"].T)[..., None, :], [c.latent], -1)
    row = jnp.concatenate((_rms_norm(latent, w["attn.kv_norm"], LATENT_EPS), turn(k_rope)), -1)
    absorbed = jnp.einsum("...hd,hdl->...hl", q_nope, w["attn.k_up"])
    return jnp.concatenate((absorbed, turn(q_rope)), -1), {"latent": row}


def _swiglu(w: Weights, name: str, x: Array) -> Array:
    return (jax.nn.silu(x @ w[name + ".gate"].T) * (x @ w[name + ".up"].T)) @ w[name + ".down"].T


def _moe(m: MoeConfig, w: Weights, x: Array) -> Array:
    """Run every expert on every token, so that shapes do not depend on the routing; most weights are 0."""
    found = x @ w["ffn.router"].T
    scores = jax.nn.softmax(found) if m.scores == "softmax" else jax.nn.sigmoid(found)
    grouped = (scores + w.get("ffn.correction", 0.0)).reshape(*x.shape[:2], m.groups, -1)
    best = lax.top_k(lax.top_k(grouped, m.group_best)[0].sum(-1), m.top_groups)[1]
    kept = jax.nn.one_hot(best, m.groups).any(-2)
    chosen = lax.top_k(jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape), m.top_k)[1]
    weights = scores * jax.nn.one_hot(chosen, m.experts).any(-2)
    weights = weights / weights.sum(-1, keepdims=True) if m.normalize else weights
    gate, up = (jnp.einsum("snh,efh->snef", x, w[f"ffn.experts.{name}"]) for name in ("gate", "up"))
    out = jnp.einsum("snef,ehf,sne->snh", jax.nn.silu(gate) * up, w["ffn.experts.down"], weights * m.scale)
    return out + _swiglu(w, "ffn.shared", x) if m.shared_ffn else out
