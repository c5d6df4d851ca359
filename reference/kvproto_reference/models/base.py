"""Protocols of a model, for the engine, and of the attention that stores rows, for a model's layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import EngineError
from .common import attend
from .config import ModelConfig
from .lora import NONE, Adapted
from .ops import Ops
from .parallel import SOLO, Pipeline, TensorParallel, kv_head_of

Rows = Mapping[str, Tensor]
"""New rows [tokens, KV heads, row_dim] by part: k and v, or latent."""
State = Mapping[str, Tensor]
"""State of one recurrent layer by part: conv [..., kernel - 1, channels], ssm [..., heads, key_dim, value_dim]."""


class Recurrence(Protocol):
    """The change of a recurrent layer's state by its tokens; leading batch dims are allowed."""

    def begin(self, inputs: Tensor) -> State:
        """The state before the first token; `inputs` are as in `run`."""
        ...

    def run(self, state: State, inputs: Tensor, after: Sequence[int]) -> tuple[Tensor, list[State]]:
        """Advance a state by `inputs` [..., n, width] of n tokens: outputs [..., n, heads, value_dim], and states.

        The states are those after so many of the tokens as `after` says, ascending.
        """
        ...


class Attention(Protocol):
    """Attention of a model's layers, whatever the cache and however many ranks share it."""

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        """Store the new rows of a layer, and attend to all rows up to each token.

        q [tokens, heads, row_dim] of the heads that the rank projects -> [tokens, own heads, value_dim].
        """
        ...

    def recur(self, layer: int, rule: Recurrence, inputs: Tensor) -> Tensor:
        """Let new tokens go on from the state of a recurrent layer, and store what they make of it.

        inputs [tokens, width] -> [tokens, own heads, value_dim]. Raises EngineError where no states are stored.
        """
        raise EngineError("this attention stores no recurrent states")


class Taps:
    """Collects what some layers hand to the next one, with its residual added."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self._found: dict[int, Tensor] = {}

    def put(self, layer: int, x: Tensor) -> None:
        """Keep x [..., hidden], if it is of one of these layers; the next layer may overwrite it."""
        if layer in self.layers:
            self._found[layer] = x.clone()

    def spread(self, stages: Pipeline, like: Tensor) -> None:
        """Bring what other pipeline stages have collected, which is shaped as `like`."""
        for layer in self.layers:
            own = self._found.get(layer)
            self._found[layer] = stages.everywhere(torch.empty_like(like) if own is None else own, stages.holder(layer))

    @property
    def hidden(self) -> Tensor:
        """[..., layers * hidden], the layers in their order."""
        return torch.cat([self._found[layer] for layer in self.layers], -1)


class Cached(Protocol):
    """A model whose KV rows live outside of it."""

    @property
    def config(self) -> ModelConfig:
        """Full sizes, before any TP cut."""
        ...

    @property
    def tp(self) -> TensorParallel:
        """Place of this model in its TP group."""
        ...

    def use(self, ops: Ops) -> None:
        """Use these ops for the steps between matrix products."""
        ...


class Model(Cached, Protocol):
    """A causal language model."""

    def idle(self) -> None:
        """Take part in the steps that other replicas run, until none of them has another one."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        computed: Callable[[int], None] | None = None,
        wanted: Tensor | None = None,
        taps: Taps | None = None,
        seen: tuple[Tensor, Tensor] | None = None,
        adapted: Adapted = NONE,
    ) -> Tensor:
        """Float32 logits [n, vocab] of tokens [n] int64 at positions [n] int64.

        `computed` is called with each layer once its rows are written, on a GPU in stream order. `wanted` [m] names the
        tokens whose logits are; all by default. `taps` collect hidden states of all tokens. `seen` are tokens [k], and
        what the model reads in place of their embeddings [k, hidden]. `adapted` has the adapters of these tokens.
        """
        ...


class Dense(Attention):
    """Attention of a single forward from position 0 on, without a cache; leading batch dims are allowed."""

    def __init__(self, config: ModelConfig, tp: TensorParallel = SOLO) -> None:
        self._config, self._width = config, config.value_dim
        self._kv_of = torch.tensor(kv_head_of(config, tp, tp.share(config.heads)))

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        k = rows["k"] if "k" in rows else rows["latent"]
        v = rows.get("v", k)  # the whole row, as the fused kernel needs equal widths
        heads = self._kv_of.to(q.device)
        reach, scale = self._config.reach(layer), self._config.score_scale
        return attend(q, k[..., heads, :], v[..., heads, :], scale, reach)[..., : self._width]

    def recur(self, layer: int, rule: Recurrence, inputs: Tensor) -> Tensor:
        return rule.run(rule.begin(inputs), inputs, ())[0]
