"""Allocator, checkpoints, config, tokenizer and products."""

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto_reference import checkpoint
from kvproto_reference.cache import PageAllocator
from kvproto_reference.data import documents, load_text, passages
from kvproto_reference.errors import EngineError, OutOfPages
from kvproto_reference.models import Decoder, ModelConfig
from kvproto_reference.models.common import product
from kvproto_reference.presets import PRESETS
from kvproto_reference.tokenizer import EOS, decode, encode
from kvproto_reference.train import train

Make = Callable[[str, int], Decoder]


def test_allocator_gives_each_page_once_and_shuffled() -> None:
    allocator = PageAllocator(20, seed=4)
    pages = allocator.allocate(12) + allocator.allocate(8)
    assert sorted(pages) == list(range(20))
    assert pages != sorted(pages)
    assert pages == PageAllocator(20, seed=4).allocate(20) != PageAllocator(20, seed=5).allocate(20)
    assert allocator.available == 0
    with pytest.raises(OutOfPages, match="1 pages requested, 0 of 20"):
        allocator.allocate(1)
    allocator.free(pages[:3])
    assert allocator.available == 3
    assert set(allocator.allocate(3)) == set(pages[:3])


def test_double_free_is_refused_and_frees_nothing() -> None:
    allocator = PageAllocator(4)
    first, second = allocator.allocate(2)
    allocator.free([first])
    with pytest.raises(EngineError, match="not held"):
        allocator.free([second, first])
    with pytest.raises(EngineError, match="twice"):
        allocator.free([second, second])
    assert allocator.available == 3


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_checkpoint_round_trip(make: Make, tmp_path: Path, kind: str) -> None:
    model = make(kind, 3)
    checkpoint.save(tmp_path, model)
    loaded = checkpoint.load(tmp_path)
    assert loaded.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_checkpoint_errors_name_the_path(make: Make, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(EngineError, match=f"{missing} does not exist"):
        checkpoint.load(missing)
    with pytest.raises(EngineError, match=r"has no config\.json"):
        checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, make("gqa", 0))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(EngineError, match="cannot be read"):
        checkpoint.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"has no model\.safetensors"):
        checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, make("gqa", 0))
    (tmp_path / "config.json").write_text(make("mla", 0).config.to_json())
    with pytest.raises(EngineError, match="do not fit"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"kind": "gqa"}', "wrong fields"),
        ('{"kind": "mha", "hidden": 8, "layers": 1, "heads": 2, "ffn": 8}', "must be 'gqa' or 'mla'"),
        ('{"kind": "gqa", "hidden": 8, "layers": 1, "heads": 2, "ffn": 8}', "kv_heads"),
    ],
)
def test_bad_configs(text: str, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        ModelConfig.from_json(text)


def test_training_is_repeatable(tmp_path: Path) -> None:
    preset = attrs.evolve(PRESETS["draft-gqa"], steps=3)
    losses = [train("draft-gqa", preset, tmp_path / name) for name in ("one", "two")]
    assert losses[0] == losses[1]
    one, two = (checkpoint.load(tmp_path / name).state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_tokenizer() -> None:
    assert decode([*encode(b"a\xff"), EOS]) == b"a\xff"
    with pytest.raises(EngineError, match="257"):
        decode([257])


def test_documents_end_with_eos() -> None:
    text = load_text()
    parts = passages(text)
    whole = [part for part in parts if part[-1] == EOS]
    assert all([*encode(document.encode()), EOS] in whole for document in documents(text))
    assert 5 <= len(documents(text)) <= len(whole)
    assert max(map(len, documents(text))) <= 400


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans())
def test_products_of_few_rows(dims: list[int], width: int, out: int, bias: bool, double: bool) -> None:
    """[..., in] times [out, in], whichever comes first."""
    draw = torch.Generator().manual_seed(len(dims) + width + out)
    x, matrix, more = (torch.randn(*shape, generator=draw) for shape in ((*dims, width), (out, width), (out,)))
    x, matrix, more = (each.double() if double else each for each in (x, matrix, more))
    found = product(x, matrix, more if bias else None)
    assert (found.shape, found.is_contiguous()) == ((*dims, out), True)
    wanted = torch.einsum("...i,oi->...o", x.double(), matrix.double()) + (more.double() if bias else 0)
    assert torch.allclose(found.double(), wanted, atol=1e-4)
