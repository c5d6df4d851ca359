"""The GQA and MLA decoders, hybrids of them, and heads: functions of a dict of weights, named as in checkpoints.

A rank holds its slice of each weight, and `total` sums the shares of a result over the ranks. Matrices are [in, out],
unlike in checkpoints: `turn` makes them so. Norms, rotations, scores and recurrences are float32, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from ..models import ModelConfig, MoeConfig
from ..models.mla import LATENT_EPS

__all__ = ["SAID", "block", "fuse", "head_block", "logits", "recurrent_block", "turn"]

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
_TURNED = {
    "q", "q_a", "k", "v", "kv_a", "o", *_BLOCKS, "output_gate", "decay", "strength", "out", "gate", "up", "down",
    "router", "fc", "proj", "head",
}  # fmt: skip
"""Last words of the names of matrices."""
SAID = "said"
"""The target's ids of the tokens that a head can propose [draft vocab], where it has a vocabulary of its own."""


def turn(name: str, weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The weight of this name as programs have it: a matrix [out, in] as [in, out].

    XLA reads it faster on the CPU, most of all in a step of one token.
    """
    matrix = weight.ndim == 2 and name.rsplit(".", 1)[-1] in _TURNED
    return np.ascontiguousarray(weight.T) if matrix else weight


def block(
    c: ModelConfig, w: Weights, x: Array, positions: Array, attend: Attend, total: Total
) -> tuple[Array, dict[str, Array]]:
    """Compute one layer of x [spans, n, hidden] at `positions` [spans, n]; returns the next x and new rows by part.

    The rows are [spans, n, KV heads, row_dim].
    """
    mixed, rows = _mixed(c, w, _rms_norm(x, w["attn_norm"], c.norm_eps), positions, attend, total)
    return _fed_forward(c, w, x + mixed, total), rows


def fuse(w: Weights, hidden: Array) -> Array:
    """Features [..., hidden] of a head of the target's hidden states [..., taps * width]."""
    return hidden @ w["fc"] if "fc" in w else hidden


def head_block(
    c: ModelConfig, w: Weights, embedded: Array, features: Array, positions: Array, attend: Attend, total: Total
) -> tuple[Array, dict[str, Array]]:
    """Compute a head (`models/head.py`) of token embeddings and features [spans, n, hidden]; returns as `block`."""
    x, eps = features, c.norm_eps
    read = jnp.concatenate((_rms_norm(embedded, w["embed_norm"], eps), _rms_norm(features, w["feature_norm"], eps)), -1)
    if "proj" in w:
        x = read @ w["proj"]
        read = _rms_norm(x, w["attn_norm"], eps)
    mixed, rows = _mixed(c, w, read, positions, attend, total)
    return _fed_forward(c, w, x + mixed, total), rows


def _mixed(
    c: ModelConfig, w: Weights, x: Array, positions: Array, attend: Attend, total: Total
) -> tuple[Array, dict[str, Array]]:
    """The attention of a layer on its normalised input [spans, n, inputs]."""
    angles = positions.astype(jnp.float32)[..., None, None] * jnp.array(c.rates, jnp.float32)
    turn = _Turn(jnp.cos(angles) * c.rope_gain, jnp.sin(angles) * c.rope_gain, c.rope_pairs)
    q, rows = (_gqa if c.kind == "gqa" else _mla)(c, w, x, turn)
    out = attend(q, rows)
    if c.kind == "mla":
        out = jnp.einsum("...hl,hvl->...hv", out, w["attn.v_up"])
    return total(out.reshape(*out.shape[:2], -1) @ w["attn.o"]), rows


def recurrent_block(
    c: ModelConfig, w: Weights, x: Array, real: Array, state: State, stops: Array, key_of: Sequence[int], total: Total
) -> tuple[Array, dict[str, Array]]:
    """Compute one recurrent layer of x [spans, n, hidden]; returns the next x and states [spans, m, ...] by part.

    `real` [spans, n] tells tokens from padding behind them. `state` [spans, ...] are the states before, and those
    returned are after `stops` [spans, m] tokens (0: padding). `key_of` is the key head of each value head.
    """
    mixed, states = _delta(c, w, _rms_norm(x, w["attn_norm"], c.norm_eps), real, state, stops, key_of)
    return _fed_forward(c, w, x + total(mixed @ w["attn.out"]), total), states


def _fed_forward(c: ModelConfig, w: Weights, x: Array, total: Total) -> Array:
    inner = _rms_norm(x, w["ffn_norm"], c.norm_eps)
    summand = _moe(c.moe, w, inner) if c.moe is not None and "ffn.router" in w else _swiglu(w, "ffn", inner)
    return x + total(summand)


def _delta(
    c: ModelConfig, w: Weights, x: Array, real: Array, state: State, stops: Array, key_of: Sequence[int]
) -> tuple[Array, dict[str, Array]]:
    """The gated delta net of `models/delta.py`, token by token: [spans, n, value heads * value_dim], and states."""
    sizes, (spans, n), kernel = c.delta_sizes, x.shape[:2], c.delta_sizes.kernel
    new = jnp.concatenate([x @ w[f"attn.{name}"] for name in _BLOCKS], -1)
    seen = jnp.concatenate((state["conv"], new), 1)
    taps = jnp.concatenate([w[f"attn.{name}_conv"] for name in _BLOCKS])
    mixed = jax.nn.silu(sum(seen[:, i : i + n] * taps[:, i] for i in range(kernel))).astype(jnp.float32)
    key = w["attn.query"].shape[1]
    q, k, v = (
        part.reshape(spans, n, -1, dim)
        for part, dim in zip(
            jnp.split(mixed, [key, 2 * key], -1), (sizes.key_dim, sizes.key_dim, sizes.value_dim), strict=True
        )
    )
    q, k = ((y / jnp.maximum(jnp.linalg.norm(y, axis=-1, keepdims=True), 1e-12))[:, :, list(key_of)] for y in (q, k))
    rate, shift = (w[f"attn.{name}"].astype(jnp.float32) for name in ("rate", "shift"))
    decays, strengths = ((x @ w[f"attn.{name}"]).astype(jnp.float32) for name in ("decay", "strength"))
    decays, strengths = -jnp.exp(rate) * jax.nn.softplus(decays + shift), jax.nn.sigmoid(strengths)
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
    out = _rms_norm(jnp.moveaxis(outs, 0, 1).astype(x.dtype), w["attn.out_norm"], c.norm_eps)
    gate = jax.nn.silu(x @ w["attn.output_gate"])
    last = stops[..., None] + jnp.arange(kernel - 1)
    return out.reshape(gate.shape) * gate, {"conv": seen[jnp.arange(spans)[:, None, None], last], "ssm": kept}


def logits(c: ModelConfig, w: Weights, x: Array) -> Array:
    """Float32 logits [n, vocab] of x [n, hidden] after the last layer.

    Tokens that a head cannot propose have -inf.
    """
    x = _rms_norm(x, w["norm"], c.norm_eps)
    found = (x @ w["head"] if "head" in w else x @ w["embed"].T).astype(jnp.float32)
    if SAID in w:
        found = jnp.full((*found.shape[:-1], c.vocab), -jnp.inf).at[..., w[SAID]].set(found)
    return found


class _Turn:
    """Rotary embedding at the positions of a step; its cosines and sines are [spans, n, 1, pairs]."""

    def __init__(self, cos: Array, sin: Array, pairs: bool) -> None:
        self._cos, self._sin, self._pairs = cos, sin, pairs

    def __call__(self, x: Array) -> Array:
        """Rotate x [spans, n, heads, dim], pairing neighbouring elements or the two halves."""
        first, second = (x[..., ::2], x[..., 1::2]) if self._pairs else jnp.split(x, 2, -1)
        turned = (first * self._cos - second * self._sin, second * self._cos + first * self._sin)
        whole = jnp.stack(turned, -1).reshape(x.shape) if self._pairs else jnp.concatenate(turned, -1)
        return whole.astype(x.dtype)


def _rms_norm(x: Array, gain: Array, eps: float) -> Array:
    exact = x.astype(jnp.float32)
    return (exact * lax.rsqrt(jnp.square(exact).mean(-1, keepdims=True) + eps) * gain).astype(x.dtype)


def _heads(w: Weights, name: str, x: Array, dim: int) -> Array:
    """Project x [spans, n, hidden] by weight `name`, and its bias if it has one, to [spans, n, heads, dim]."""
    flat = x @ w[name]
    flat = flat + w[name + "_bias"] if name + "_bias" in w else flat
    return flat.reshape(*x.shape[:2], -1, dim)


def _gqa(c: ModelConfig, w: Weights, x: Array, turn: _Turn) -> tuple[Array, dict[str, Array]]:
    q, k, v = (_heads(w, f"attn.{name}", x, c.head_dim) for name in "qkv")
    if c.qk_norm:
        q, k = (_rms_norm(y, w[f"attn.{name}_norm"], c.norm_eps) for y, name in ((q, "q"), (k, "k")))
    return turn(q), {"k": turn(k), "v": v}


def _mla(c: ModelConfig, w: Weights, x: Array, turn: _Turn) -> tuple[Array, dict[str, Array]]:
    squeezed = _rms_norm(x @ w["attn.q_a"], w["attn.q_a_norm"], LATENT_EPS) if c.q_rank else x
    q_nope, q_rope = jnp.split(_heads(w, "attn.q", squeezed, c.nope_dim + c.rope_dim), [c.nope_dim], -1)
    latent, k_rope = jnp.split((x @ w["attn.kv_a"])[..., None, :], [c.latent], -1)
    row = jnp.concatenate((_rms_norm(latent, w["attn.kv_norm"], LATENT_EPS), turn(k_rope)), -1)
    absorbed = jnp.einsum("...hd,hdl->...hl", q_nope, w["attn.k_up"])
    return jnp.concatenate((absorbed, turn(q_rope)), -1), {"latent": row}


def _swiglu(w: Weights, name: str, x: Array) -> Array:
    return (jax.nn.silu(x @ w[name + ".gate"]) * (x @ w[name + ".up"])) @ w[name + ".down"]


def _moe(m: MoeConfig, w: Weights, x: Array) -> Array:
    """The experts that each token chooses, and the one that all go through.

    A step of few tokens reads the weights of chosen experts alone. One of many, in which most experts are chosen by
    some token, runs all of them on all tokens, so that shapes do not depend on the choice; most weights are then 0.
    """
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = _route(m, w, tokens)
    gate, up, down = (w[f"ffn.experts.{name}"] for name in ("gate", "up", "down"))
    if chosen.size < m.experts:
        inner = [jnp.einsum("th,tkfh->tkf", tokens, each[chosen]) for each in (gate, up)]
        out = jnp.einsum("tkf,tkhf,tk->th", jax.nn.silu(inner[0]) * inner[1], down[chosen], weights)
    else:
        every = (jax.nn.one_hot(chosen, m.experts) * weights[..., None]).sum(-2)
        inner = [jnp.einsum("th,efh->tef", tokens, each) for each in (gate, up)]
        out = jnp.einsum("tef,ehf,te->th", jax.nn.silu(inner[0]) * inner[1], down, every)
    out = out.astype(x.dtype).reshape(x.shape)
    return out + _swiglu(w, "ffn.shared", x) if m.shared_ffn else out


def _route(m: MoeConfig, w: Weights, tokens: Array) -> tuple[Array, Array]:
    """Float32 weights and indices, both [tokens, top_k], of the experts that tokens [tokens, hidden] go to."""
    found = tokens.astype(jnp.float32) @ w["ffn.router"].astype(jnp.float32)
    scores = jax.nn.softmax(found) if m.scores == "softmax" else jax.nn.sigmoid(found)
    grouped = (scores + w.get("ffn.correction", 0.0)).reshape(len(tokens), m.groups, -1)
    best = lax.top_k(lax.top_k(grouped, m.group_best)[0].sum(-1), m.top_groups)[1]
    kept = jax.nn.one_hot(best, m.groups).any(-2)
    chosen = lax.top_k(jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape), m.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True) if m.normalize else weights
    return weights * m.scale, chosen
