"""Sizes and training lengths of the shipped checkpoints: targets, drafts, and EAGLE-3 heads of the targets."""

import attrs

from .models import DeltaConfig, ModelConfig, WindowConfig


@attrs.frozen(kw_only=True)
class Preset:
    """One checkpoint to train; a step sees about 3000 tokens."""

    config: ModelConfig
    steps: int
    rate: float = 4e-3
    matrix_rate: float = 0.06
    seed: int = 1


PRESETS: dict[str, Preset] = {
    "target-mla": Preset(
        config=ModelConfig(
            kind="mla", hidden=64, layers=4, heads=4, latent=32, rope_dim=8, nope_dim=16, v_dim=16, ffn=144
        ),
        steps=1200,
    ),
    "target-gqa": Preset(
        config=ModelConfig(kind="gqa", hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=160),
        steps=1500,
        seed=2,
    ),
    "target-hybrid": Preset(
        config=ModelConfig(
            kind="gqa",
            hidden=64,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=16,
            ffn=144,
            delta=DeltaConfig(layers=(0, 2), key_heads=2, key_dim=16, value_heads=4, value_dim=16, kernel=4),
            window=WindowConfig(layers=(1,), tokens=48),
        ),
        steps=1200,
        seed=7,
    ),
    "draft-mla": Preset(
        config=ModelConfig(
            kind="mla", hidden=48, layers=2, heads=4, latent=24, rope_dim=8, nope_dim=12, v_dim=12, ffn=112
        ),
        steps=2000,
        seed=3,
    ),
    "draft-gqa": Preset(
        config=ModelConfig(kind="gqa", hidden=48, layers=2, heads=4, kv_heads=2, head_dim=12, ffn=112),
        steps=2000,
        seed=4,
    ),
}


@attrs.frozen(kw_only=True)
class HeadPreset:
    """One EAGLE-3 head to train; its hidden size is the target's, and a step sees about 1400 tokens."""

    target: str
    """A name of PRESETS."""
    taps: tuple[int, ...] = (0, 1, 3)
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 160
    vocab: int = 56
    """Tokens that it can propose: the most frequent ones of the text."""
    unrolled: int = 4
    """Tokens that it proposes one after another while it is trained, each from what it made of the one before."""
    steps: int = 1400
    rate: float = 4e-3
    matrix_rate: float = 0.06
    seed: int = 5


HEADS = {"head-mla": HeadPreset(target="target-mla"), "head-gqa": HeadPreset(target="target-gqa", seed=6)}
