"""The steps between a model's products as kernels of FlashInfer, against torch's in float32; tensors are strided as models'."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvproto_reference.models import Decoder, Dense, FusedOps, ModelConfig, Ops
from kvproto_reference.models.rope import plain_rates

pytestmark = pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")
GPU = torch.device("cuda", 0)
TOKENS = [1, 7, 64]
ROUNDING = 2.0**-7
"""Two of bfloat16's roundings."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=GPU, dtype=torch.bfloat16, generator=torch.Generator(GPU).manual_seed(len(shape)))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("tokens", TOKENS)
def test_norms(tokens: int) -> None:
    x, summand, gain = drawn(tokens, 4096), drawn(tokens, 4096) / 3, drawn(4096)
    close(FusedOps().norm(x, gain, 1e-5), Ops().norm(x.float(), gain.float(), 1e-5))
    total, normed = Ops().add_norm(x.float(), summand.float(), gain.float(), 1e-5)
    found = FusedOps().add_norm(x, summand, gain, 1e-5)
    close(found[0], total)
    close(found[1], normed)


@pytest.mark.parametrize("tokens", TOKENS)
def test_norms_of_some_columns(tokens: int) -> None:
    whole = drawn(tokens, 40, 128)
    for part in whole.split_with_sizes([32, 8], dim=-2):
        close(FusedOps().norm(part, drawn(128), 1e-6), Ops().norm(part.float(), drawn(128).float(), 1e-6))


@pytest.mark.parametrize("tokens", TOKENS)
def test_gates(tokens: int) -> None:
    both = drawn(tokens, 2 * 1408)
    close(FusedOps().gated(both), Ops().gated(both.float()))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_rotations(tokens: int, pairs: bool) -> None:
    """Of queries and keys side by side, as GQA has them, and of the ends of rows, as MLA has them."""
    rates = torch.tensor(plain_rates(64, 10000.0), device=GPU)
    positions = torch.arange(tokens, device=GPU) * 1000 + 5
    for whole, q, k in (
        (drawn(tokens, 48, 64), slice(0, 32), slice(32, 40)),
        (drawn(tokens, 17, 192), slice(0, 16), slice(16, 17)),
    ):
        parts = [whole[:, heads, -64:] for heads in (q, k)]
        exact, given = Ops(), FusedOps()
        wanted = exact.rope(*(p.float() for p in parts), exact.table(positions, rates, 1.25, pairs), pairs)
        rest = whole[..., :-64].clone(), whole[:, k.stop :].clone()
        found = given.rope(*parts, given.table(positions, rates, 1.25, pairs), pairs)
        for mine, theirs in zip(found, wanted, strict=True):
            close(mine, theirs)
        assert torch.equal(whole[..., :-64], rest[0])
        assert torch.equal(whole[:, k.stop :], rest[1])


GQA = ModelConfig(
    kind="gqa", hidden=512, layers=2, heads=8, kv_heads=2, head_dim=64, ffn=1024, vocab=256, tied=False, qk_norm=True,
    dtype="bfloat16",
)  # fmt: skip
MLA = ModelConfig(
    kind="mla", hidden=512, layers=2, heads=4, q_rank=128, latent=512, rope_dim=64, nope_dim=64, v_dim=64, ffn=1024,
    vocab=256, tied=False, dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("config", [GQA, MLA], ids=["gqa", "mla"])
@torch.inference_mode()
def test_models(config: ModelConfig) -> None:
    """Logits differ by rounding, as those of two types do."""
    torch.manual_seed(0)
    model = Decoder(config)
    tokens, positions = torch.arange(40, device=GPU) * 5 % 256, torch.arange(40, device=GPU)
    model = model.to(GPU)
    exact = model.forward(tokens, positions, Dense(config))
    model = model.to(torch.bfloat16)
    model.rates = torch.tensor(config.rates, device=GPU)
    model.join()
    plain = model.forward(tokens, positions, Dense(config))
    model.use(FusedOps())
    fused = model.forward(tokens, positions, Dense(config))
    off = [((logits - exact).norm() / exact.norm()).item() for logits in (plain, fused)]
    assert off[1] < 0.05
    assert off[1] < 1.5 * off[0]
