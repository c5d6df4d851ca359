"""Gated delta nets: recurrent layers that keep one state for each request, which every token changes.

Yang et al., arXiv 2412.06464; convolution, norms and gates are those of Qwen3-Next.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Attention, Recurrence, State
from .common import join, split_heads, weight
from .config import ModelConfig
from .lora import NONE, Adapted
from .ops import Stepping, Table
from .parallel import TensorParallel, delta_heads, key_head_of

CHUNK = 64
"""Tokens that are computed by matrix products at a time."""


class DeltaNet(Stepping, Recurrence):
    """One layer; value heads are divided over ranks, and a rank has the key heads that its value heads need."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: int) -> None:
        super().__init__()
        sizes = config.delta_sizes
        self.sizes, self.tp, self.layer, self.eps = sizes, tp, layer, config.norm_eps
        keys, values = delta_heads(config, tp)
        self.key_heads, self.value_heads = keys.stop - keys.start, values.stop - values.start
        self._key_of = key_head_of(config, tp)
        key, value, hidden = self.key_heads * sizes.key_dim, self.value_heads * sizes.value_dim, config.hidden
        self.query, self.key, self.value = weight(key, hidden), weight(key, hidden), weight(value, hidden)
        self.decay, self.strength = weight(self.value_heads, hidden), weight(self.value_heads, hidden)
        self.query_conv, self.key_conv = weight(key, sizes.kernel), weight(key, sizes.kernel)
        self.value_conv = weight(value, sizes.kernel)
        self.rate = nn.Parameter(torch.zeros(self.value_heads))
        # Some heads forget slowly, some soon. On "meta" torch would import sympy for it, which takes a second.
        self.shift = nn.Parameter(torch.linspace(-5, -1, self.value_heads, device="cpu"))
        self.output_gate = weight(value, hidden)
        self.out_norm = nn.Parameter(torch.ones(sizes.value_dim))
        self.out = weight(hidden, value)
        self._whole: Tensor | None = None

    def join(self) -> None:
        """See `Decoder.join`."""
        self._whole = join(*self._projections)

    @property
    def _projections(self) -> tuple[nn.Parameter, ...]:
        return self.query, self.key, self.value, self.decay, self.strength

    def forward(self, x: Tensor, table: Table, attention: Attention, adapted: Adapted = NONE) -> Tensor:
        """x [..., n, hidden] -> [..., n, hidden], summed over ranks; no adapter changes it."""
        weights = torch.cat(self._projections) if self._whole is None else self._whole
        mixed = attention.recur(self.layer, self, F.linear(x, weights))
        gate = split_heads(F.linear(x, self.output_gate), self.value_heads)
        out = self.ops.norm(mixed, self.out_norm, self.eps) * F.silu(gate)
        return self.tp.all_reduce(F.linear(out.flatten(-2), self.out))

    def begin(self, inputs: Tensor) -> State:
        sizes, leading = self.sizes, inputs.shape[:-2]
        channels = 2 * len(self.query) + len(self.value)
        return {
            "conv": inputs.new_zeros(*leading, sizes.kernel - 1, channels),
            "ssm": inputs.new_zeros(
                *leading, self.value_heads, sizes.key_dim, sizes.value_dim, dtype=torch.float32
            ),
        }  # fmt: skip

    def run(self, state: State, inputs: Tensor, after: Sequence[int]) -> tuple[Tensor, list[State]]:
        key, value, heads = len(self.query), len(self.value), self.value_heads
        new, decay, strength = inputs.split_with_sizes([2 * key + value, heads, heads], -1)
        seen = torch.cat((state["conv"], new), -2)
        taps = torch.cat((self.query_conv, self.key_conv, self.value_conv))
        count, kernel = inputs.shape[-2], self.sizes.kernel
        convolved = torch.stack([seen[..., i : i + count, :] * taps[:, i] for i in range(kernel)]).sum(0)
        q, k, v = F.silu(convolved).float().split_with_sizes([key, key, value], -1)
        q, k = (F.normalize(split_heads(x, self.key_heads), dim=-1)[..., self._key_of, :] for x in (q, k))
        decays = -self.rate.float().exp() * F.softplus(decay.float() + self.shift.float())
        found = delta_rule(
            state["ssm"], q * self.sizes.key_dim**-0.5, k, split_heads(v, heads), decays, strength.float().sigmoid(),
            after,
        )  # fmt: skip
        out, states = found
        inputs_before = [seen[..., n : n + kernel - 1, :] for n in after]
        return out.to(inputs.dtype), [
            {"conv": conv, "ssm": ssm} for conv, ssm in zip(inputs_before, states, strict=True)
        ]


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor, strengths: Tensor, after: Iterable[int]
) -> tuple[Tensor, list[Tensor]]:
    """Outputs [..., n, heads, value] and the states after these numbers of tokens, ascending.

    Each token has S = exp(decay) S, then S = S + strength k (v - S^T k)^T, and the output S^T q. state [..., heads,
    key, value]; q, k [..., n, heads, key]; v [..., n, heads, value]; decays, strengths [..., n, heads]. Of a chunk,
    what the tokens add to the state solves a triangular system (arXiv 2412.06464, 3.3).
    """
    count, wanted = q.shape[-3], {*after}
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    decays, strengths = decays.transpose(-2, -1), strengths.transpose(-2, -1)
    outs, states = [], []
    for lo, hi in pairwise(sorted({0, count, *range(0, count, CHUNK), *wanted})):
        queries, keys, values = (x[..., lo:hi, :] for x in (q, k, v))
        total, strength = decays[..., lo:hi].cumsum(-1), strengths[..., lo:hi, None]
        since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # what is left at i of token j
        grown = total.exp()[..., None]
        system = (strength * since * (keys @ keys.mT)).tril(-1) + torch.eye(hi - lo, device=q.device)
        added = torch.linalg.solve_triangular(
            system, strength * (values - grown * (keys @ state)), upper=False, unitriangular=True
        )
        outs.append(grown * (queries @ state) + (since * (queries @ keys.mT)) @ added)
        state = grown[..., -1:, :] * state + (keys * since[..., -1, :, None]).mT @ added
        if hi in wanted:
            states.append(state)
    return torch.cat(outs, -2).transpose(-3, -2), states
