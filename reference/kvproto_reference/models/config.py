"""Sizes of one model, as stored in a checkpoint's config.json."""

import json
from collections.abc import Iterable
from typing import Any, Literal

import attrs

from ..errors import EngineError
from ..tokenizer import VOCAB
from .rope import plain_rates

Kind = Literal["gqa", "mla"]
KINDS = ("gqa", "mla")
FORMS = ("eagle3", "mtp")
SCORES = ("softmax", "sigmoid")
DTYPES = ("float32", "bfloat16", "float16")


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class MoeConfig:
    """Routed and shared experts (DeepSeek-V2, arXiv 2405.04434, 2.2.1; DeepSeek-V3, arXiv 2412.19437, 2.1.2)."""

    layers: tuple[int, ...] = attrs.field(converter=_ints)
    """Layers that have experts; the others are dense."""
    experts: int
    top_k: int
    ffn: int
    """Width of one routed expert."""
    shared_ffn: int = 0
    """Width of the expert that every token goes through; 0 if there is none."""
    scores: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    """Groups of experts that a token may choose from."""
    group_best: int = 1
    """A group ranks by the sum of this many of its best scores."""
    normalize: bool = False
    """Whether the weights of the chosen experts are normalized to sum to 1, before `scale`."""
    scale: float = 1.0
    correction: bool = False
    """Whether a bias is added to the scores for the choice of experts, but not for their weights."""

    def __attrs_post_init__(self) -> None:
        if self.scores not in SCORES:
            raise EngineError(f"moe config: scores must be one of {SCORES}, not {self.scores!r}")
        for name in ("experts", "top_k", "ffn", "groups", "top_groups", "group_best"):
            _check_positive("moe", name, getattr(self, name))
        each, rest = divmod(self.experts, self.groups)
        if rest or self.top_groups > self.groups or self.group_best > each or self.top_k > self.top_groups * each:
            raise EngineError(
                f"moe config: {self.top_k} of {self.experts} experts cannot be taken from {self.top_groups} of"
                f" {self.groups} groups that rank by their best {self.group_best}"
            )


@attrs.frozen(kw_only=True)
class DeltaConfig:
    """Gated delta nets (arXiv 2412.06464) in place of attention: recurrent layers."""

    layers: tuple[int, ...] = attrs.field(converter=_ints)
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int
    """Tokens that the convolution before the recurrence sees, of which a token itself is one."""

    def __attrs_post_init__(self) -> None:
        for name in ("key_heads", "key_dim", "value_heads", "value_dim"):
            _check_positive("delta", name, getattr(self, name))
        if self.kernel < 2 or self.value_heads % self.key_heads:
            raise EngineError(
                f"delta config: {self.value_heads} value heads must divide into {self.key_heads} key heads, and the"
                f" kernel have 2 tokens or more, not {self.kernel}"
            )


@attrs.frozen(kw_only=True)
class WindowConfig:
    """Layers that attend to the last tokens only."""

    layers: tuple[int, ...] = attrs.field(converter=_ints)
    tokens: int
    """The number of them, a token itself included."""

    def __attrs_post_init__(self) -> None:
        _check_positive("window", "tokens", self.tokens)


@attrs.frozen(kw_only=True)
class HeadConfig:
    """Inputs of a head from its target, and its vocabulary."""

    target: str
    """Fingerprint of the target's checkpoint."""
    width: int
    """The target's hidden size."""
    taps: tuple[int, ...] = attrs.field(converter=_ints)
    """Layers of the target whose hidden states it reads: an EAGLE-3 head a low, a middle and a high one."""
    vocab: int
    """Tokens that it can propose; `d2t` in its weights says which of the target's they are."""
    form: str = "eagle3"
    """One of FORMS; an MTP layer, `mtp`, reads the last layer."""

    def __attrs_post_init__(self) -> None:
        for name in ("width", "vocab"):
            _check_positive("head", name, getattr(self, name))
        if self.form not in FORMS:
            raise EngineError(f"head config: form must be one of {FORMS}, not {self.form!r}")
        if not self.taps or sorted({*self.taps}) != [*self.taps] or self.taps[0] < 0:
            raise EngineError(f"head config: taps must be layers of the target in ascending order, not {self.taps}")

    @property
    def hidden(self) -> int:
        """Elements of what it reads of a token: the hidden states of all taps."""
        return self.width * len(self.taps)


def _moe(value: Any) -> MoeConfig | None:
    return MoeConfig(**value) if isinstance(value, dict) else value


def _head(value: Any) -> HeadConfig | None:
    return HeadConfig(**value) if isinstance(value, dict) else value


def _delta(value: Any) -> DeltaConfig | None:
    return DeltaConfig(**value) if isinstance(value, dict) else value


def _window(value: Any) -> WindowConfig | None:
    return WindowConfig(**value) if isinstance(value, dict) else value


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Sizes of one model, in elements; fields of the other kind are 0. Raises EngineError for sizes that cannot be."""

    kind: Kind
    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int = VOCAB
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = True
    """Whether the embedding is also the output matrix."""
    qk_norm: bool = True
    qkv_bias: bool = False
    q_rank: int | None = None
    """Rank of the low-rank projection of MLA queries; None if there is none."""
    rope_rates: tuple[float, ...] = attrs.field(default=(), converter=_floats)
    """Radians per position of each rotary pair; empty for those of `rope_theta`."""
    rope_gain: float = 1.0
    """Factor of cosines and sines, and so of cached keys."""
    rope_pairs: bool = False
    """Whether neighbouring elements are rotated together, instead of those half a head apart."""
    score_factor: float = 1.0
    """Factor of attention scores in addition to head width ^ -0.5."""
    moe: MoeConfig | None = attrs.field(default=None, converter=_moe)
    head: HeadConfig | None = attrs.field(default=None, converter=_head)
    """Makes the model a draft that reads its target's hidden states (`Head`); `vocab` is the target's."""
    delta: DeltaConfig | None = attrs.field(default=None, converter=_delta)
    """Recurrent layers, which make the model a hybrid; the others have attention of `kind`."""
    window: WindowConfig | None = attrs.field(default=None, converter=_window)
    dtype: str = "float32"
    """Element type of weights and cache."""

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EngineError(f"model kind must be 'gqa' or 'mla', not {self.kind!r}")
        own = ("kv_heads", "head_dim") if self.kind == "gqa" else ("latent", "rope_dim", "nope_dim", "v_dim")
        for name in ("hidden", "layers", "heads", "ffn", "vocab", *own):
            _check_positive(f"{self.kind} model", name, getattr(self, name))
        if self.q_rank is not None:
            _check_positive(f"{self.kind} model", "q_rank", self.q_rank)
        if self.rotary_dim % 2:
            raise EngineError(f"{self.kind} model config: the rotary width {self.rotary_dim} must be even")
        if self.kind == "gqa" and self.heads % self.kv_heads:
            raise EngineError(f"gqa model config: {self.heads} heads do not divide into {self.kv_heads} KV heads")
        if self.head is not None and (self.layers != 1 or self.head.vocab > self.vocab):
            raise EngineError(
                f"head config: a head has 1 layer and at most the target's tokens, not {self.layers} layers and"
                f" {self.head.vocab} tokens of {self.vocab}"
            )
        self._check_layers()
        if self.dtype not in DTYPES:
            raise EngineError(f"{self.kind} model config: dtype must be one of {DTYPES}, not {self.dtype!r}")

    def _check_layers(self) -> None:
        """Raise EngineError for layers of a hybrid that are not there, or are two things."""
        recurrent = self.delta.layers if self.delta else ()
        named = [*recurrent, *(self.window.layers if self.window else ())]
        if len({*named}) < len(named) or not {*named} <= {*range(self.layers)}:
            raise EngineError(
                f"{self.kind} model config: each of delta and window names layers of its own, not {named}"
            )
        if not set(range(self.layers)) - set(named) and named:
            raise EngineError(f"{self.kind} model config: one layer at least has to attend to all tokens")

    @property
    def hybrid(self) -> bool:
        """Whether some of its layers are recurrent, or have a sliding window."""
        return self.delta is not None or self.window is not None

    @property
    def delta_sizes(self) -> DeltaConfig:
        """Sizes of its recurrent layers; raises EngineError for a model without."""
        if self.delta is None:
            raise EngineError("the model has no recurrent layers")
        return self.delta

    def reach(self, layer: int) -> int | None:
        """To how many of the last tokens a layer attends; None: to all."""
        return self.window.tokens if self.window is not None and layer in self.window.layers else None

    def row_layers(self, windowed: bool = False) -> list[int]:
        """The layers that store rows and attend to all tokens, or those with a sliding window."""
        rows = [layer for layer in range(self.layers) if not self.recurs(layer)]
        return [layer for layer in rows if (self.reach(layer) is not None) == windowed]

    def recurs(self, layer: int) -> bool:
        """Whether a layer has a recurrent state in place of rows."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def inputs(self) -> int:
        """Elements of a token's input to attention: twice `hidden` in an EAGLE-3 head, which joins two."""
        return 2 * self.hidden if self.head is not None and self.head.form == "eagle3" else self.hidden

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE rotates."""
        return self.head_dim if self.kind == "gqa" else self.rope_dim

    @property
    def rates(self) -> tuple[float, ...]:
        """Radians per position of each rotary pair."""
        return self.rope_rates or plain_rates(self.rotary_dim, self.rope_theta)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores in all."""
        width = self.head_dim if self.kind == "gqa" else self.nope_dim + self.rope_dim
        return float(self.score_factor * width**-0.5)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the cached tensors of one layer."""
        return ("k", "v") if self.kind == "gqa" else ("latent",)

    @property
    def row_dim(self) -> int:
        """Elements of one cached row of one KV head (gqa) or of the joint latent row (mla)."""
        return self.head_dim if self.kind == "gqa" else self.latent + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Elements of one head's attention output: the head's width (gqa) or the latent's (mla)."""
        return self.head_dim if self.kind == "gqa" else self.latent

    def to_json(self) -> str:
        """The config as JSON text."""
        return json.dumps(attrs.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """The config of a JSON text; raises EngineError."""
        return cls.from_fields(json_object(text))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "ModelConfig":
        """The config of the members of a JSON object; raises EngineError."""
        try:
            return cls(**fields)
        except TypeError as error:
            raise EngineError(f"model config has wrong fields: {error}") from error


def json_object(text: str) -> dict[str, Any]:
    """The members of the JSON object in a config file; raises EngineError."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise EngineError(f"model config is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise EngineError("model config must be a JSON object")
    return fields


def _check_positive(what: str, name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise EngineError(f"{what} config: {name} must be a positive integer, not {value!r}")
