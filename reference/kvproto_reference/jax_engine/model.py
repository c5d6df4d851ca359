"""The GQA and MLA decoders in float32, as functions of a dict of weights that are named as in checkpoints.

A rank holds its slice of each weight, and `total` sums the shares of a result over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ..models import ModelConfig, MoeConfig
from ..models.mla import LATENT_EPS

__all__ = ["block", "logits"]

Array = jax.Array
Weights = Mapping[str, Array]
Attend = Callable[[Array, Mapping[str, Array]], Array]
"""Takes queries [spans, n, heads, row_dim] and new rows by part; returns [spans, n, own heads, value_dim]."""
Total = Callable[[Array], Array]
"""Sums an array over the ranks that share its result."""


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
    x = x + total(out.reshape(*out.shape[:2], -1) @ w["attn.o"].T)
    inner = _rms_norm(x, w["ffn_norm"], c.norm_eps)
    summand = _moe(c.moe, w, inner) if c.moe is not None and "ffn.router" in w else _swiglu(w, "ffn", inner)
    return x + total(summand), rows


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
