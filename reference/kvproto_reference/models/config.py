"""Sizes of one model, as stored in a checkpoint's config.json."""

import json
from typing import Literal

import attrs

from ..errors import EngineError
from ..tokenizer import VOCAB

Kind = Literal["gqa", "mla"]


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Sizes of one model; fields of the other kind stay 0, dims count float32 elements."""

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

    def __attrs_post_init__(self) -> None:
        if self.kind not in ("gqa", "mla"):
            raise EngineError(f"model kind must be 'gqa' or 'mla', not {self.kind!r}")
        own = ("kv_heads", "head_dim") if self.kind == "gqa" else ("latent", "rope_dim", "nope_dim", "v_dim")
        for name in ("hidden", "layers", "heads", "ffn", "vocab", *own):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise EngineError(f"{self.kind} model config: {name} must be a positive integer, not {value!r}")
        if self.rotary_dim % 2:
            raise EngineError(f"{self.kind} model config: the rotary width {self.rotary_dim} must be even")
        if self.kind == "gqa" and self.heads % self.kv_heads:
            raise EngineError(f"gqa model config: {self.heads} heads do not divide into {self.kv_heads} KV heads")

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE turns."""
        return self.head_dim if self.kind == "gqa" else self.rope_dim

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the cached tensors of one layer."""
        return ("k", "v") if self.kind == "gqa" else ("latent",)

    @property
    def row_dim(self) -> int:
        """Elements of one cached row of one KV head (gqa) or of the joint latent row (mla)."""
        return self.head_dim if self.kind == "gqa" else self.latent + self.rope_dim

    def to_json(self) -> str:
        """The config as JSON text."""
        return json.dumps(attrs.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """The config read from JSON text."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise EngineError(f"model config is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise EngineError("model config must be a JSON object")
        try:
            return cls(**fields)
        except TypeError as error:
            raise EngineError(f"model config has wrong fields: {error}") from error
