"""Sizes and training lengths of the shipped checkpoints: targets, drafts, and heads of the targets."""

import attrs

from .models import DeltaConfig, ModelConfig, MoeConfig, WindowConfig
from .models.config import Kind


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
    "target-moe": Preset(
        config=ModelConfig(
            kind="mla",
            hidden=64,
            layers=3,
            heads=4,
            latent=32,
            rope_dim=8,
            nope_dim=16,
            v_dim=16,
            ffn=144,
            moe=MoeConfig(layers=(1, 2), experts=8, top_k=2, ffn=32, shared_ffn=48, normalize=True),
        ),
        steps=2400,
        seed=8,
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
    """One head to train; its hidden size is the target's, and a step sees about 1400 tokens of the shipped text."""

    target: str
    """A name of PRESETS or LARGE, or `smollm2`."""
    form: str = "eagle3"
    kind: Kind = "gqa"
    taps: tuple[int, ...] = (0, 1, 3)
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 160
    vocab: int = 56
    """Tokens that an EAGLE-3 head can propose: the most frequent ones of the text."""
    tied: bool = False
    """Whether it says tokens by its target's embedding, as an MTP layer does."""
    unrolled: int = 4
    """Tokens that it proposes one after another while it is trained, each from what it made of the one before."""
    steps: int = 1400
    rate: float = 4e-3
    matrix_rate: float = 0.06
    seed: int = 5


HEADS = {
    "eagle-mla": HeadPreset(target="target-mla"),
    "eagle-gqa": HeadPreset(target="target-gqa", seed=6),
    "eagle-moe": HeadPreset(target="target-moe", taps=(0, 1, 2), seed=9),
}

LARGE = {
    "target-small": Preset(
        config=ModelConfig(
            kind="mla", hidden=192, layers=6, heads=8, latent=64, rope_dim=16, nope_dim=32, v_dim=32, ffn=512
        ),
        steps=0,
        rate=2e-3,
        matrix_rate=0.02,
        seed=11,
    )
}
"""Models that a GPU trains, on text that SmolLM2 writes: `distill.py`."""
_SMOLLM2 = HeadPreset(
    target="smollm2",
    taps=(1, 14, 28),
    heads=9,
    kv_heads=3,
    ffn=1536,
    vocab=8192,
    tied=True,
    unrolled=3,
    rate=1e-3,
    matrix_rate=0.02,
)
_SMALL = HeadPreset(
    target="target-small", taps=(0, 2, 5), heads=8, kv_heads=4, ffn=384, vocab=96, rate=1e-3, matrix_rate=0.02
)
LARGE_HEADS = {
    "eagle-smollm2": _SMOLLM2,
    "mtp-smollm2": attrs.evolve(_SMOLLM2, form="mtp", ffn=1024),
    "eagle-small": _SMALL,
    "mtp-small": attrs.evolve(_SMALL, form="mtp", kind="mla"),
}
"""Heads that a GPU trains, on texts of their own targets."""
