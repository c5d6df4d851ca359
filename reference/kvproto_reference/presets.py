"""Sizes and training lengths of the four shipped checkpoints."""

import attrs

from .models import ModelConfig


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
