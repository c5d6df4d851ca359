"""The paged, chunked forward gives what the training forward gives."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvproto_reference.cache import KVPool, PageAllocator
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.errors import EngineError
from kvproto_reference.models import Decoder, Dense, TensorParallel

from .engines import Alone, close

Make = Callable[[str, int], Decoder]
KINDS = ("gqa", "mla")


def tokens(n: int) -> list[int]:
    return [(7 * i * i + 3 * i) % 257 for i in range(n)]


def full(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits [n, vocab] of the batched forward that training uses."""
    batch = torch.tensor([ids, ids[::-1]])
    return model.forward(batch, torch.arange(len(ids)), Dense(model.config))[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 8, 9, 64])
def test_chunks_match_full_forward(make: Make, kind: str, chunk: int) -> None:
    model, ids = make(kind, 0), tokens(41)
    runner = Alone.of(model, 12, 8)
    pages = PageAllocator(12, seed=3).allocate(6)
    logits = torch.cat([runner.run(ids[i : i + chunk], i, pages) for i in range(0, len(ids), chunk)])
    close(logits, full(model, ids), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [15, 16, 17])
def test_page_boundaries(make: Make, kind: str, length: int) -> None:
    model, ids = make(kind, 0), tokens(length)
    runner = Alone.of(model, 4, 8)
    last = runner.prefill(ids, PageAllocator(4, seed=1).allocate(3), 5)
    close(last, full(model, ids)[-1], 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_do_not_disturb_each_other(make: Make, kind: str) -> None:
    model, ids, other = make(kind, 0), tokens(20), tokens(40)[20:]
    runner = Alone.of(model, 6, 8)
    allocator = PageAllocator(6)
    mine, theirs = allocator.allocate(3), allocator.allocate(3)
    runner.prefill(ids[:10], mine, 4)
    runner.prefill(other, theirs, 6)
    logits = runner.run(ids[10:], 10, mine)
    close(logits, full(model, ids)[10:], 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_moved_rows_continue_in_other_pages_and_page_size(make: Make, kind: str) -> None:
    model, ids = make(kind, 0), tokens(30)
    source, goal = KVPool.allocate(model.config, 8, 8), KVPool.allocate(model.config, 9, 4)
    old, new = PageAllocator(8, seed=1).allocate(4), PageAllocator(9, seed=2).allocate(8)
    Alone.of(model, 8, 8, source).prefill(ids[:21], old, 6)
    for key, tensor in source.tensors.items():
        for position in range(21):
            goal.tensors[key][new[position // 4], position % 4] = tensor[old[position // 8], position % 8]
    logits = Alone.of(model, 9, 4, goal).run(ids[21:], 21, new)
    close(logits, full(model, ids)[21:], 1e-4)


def test_a_pool_has_a_tensor_for_each_layer_and_part_and_wrap_shares_memory(make: Make) -> None:
    gqa, mla = make("gqa", 0).config, make("mla", 0).config
    shapes = {
        key: tuple(tensor.shape) for key, tensor in KVPool.allocate(gqa, 5, 8, TensorParallel(3, 4)).tensors.items()
    }
    assert list(shapes.items()) == [((layer, part), (6, 8, 1, 8)) for layer in (0, 1) for part in ("k", "v")]
    latents = KVPool.allocate(mla, 5, 8, TensorParallel(1, 2)).tensors
    assert {key: tuple(tensor.shape) for key, tensor in latents.items()} == {
        (0, "latent"): (6, 8, 1, 16),
        (1, "latent"): (6, 8, 1, 16),
    }
    arrays = {key: np.zeros(tensor.shape, np.float32) for key, tensor in KVPool.allocate(gqa, 5, 8).tensors.items()}
    pool = KVPool.wrap(gqa, {key: torch.from_numpy(array) for key, array in arrays.items()})
    Alone.of(make("gqa", 0), 5, 8, pool).run([1, 2, 3], 0, [4])
    assert all((array[4, :3] != 0).any() and not array[4, 3:].any() for array in arrays.values())


def test_misuse_is_refused(make: Make) -> None:
    model = make("gqa", 0)
    pool = KVPool.allocate(model.config, 2, 8)
    runner = Alone.of(model, 2, 8, pool)
    with pytest.raises(EngineError, match="needs 2 pages, not 1"):
        runner.run(tokens(9), 0, [1])
    with pytest.raises(EngineError, match="outside a pool"):
        runner.run(tokens(3), 0, [2])
    with pytest.raises(EngineError, match="no chunk"):
        runner.run([], 0, [1])
    with pytest.raises(EngineError, match="chunk"):
        Prefiller(runner.runner, None, 0)
    with pytest.raises(EngineError, match="at least one span"):
        runner.runner.run([])
    with pytest.raises(EngineError, match="pages of 8"):
        Alone.of(model, 2, 16, pool)
    with pytest.raises(EngineError, match="another model"):
        Alone.of(make("mla", 0), 2, 8, pool)
    with pytest.raises(EngineError, match="needs tensors"):
        KVPool.wrap(model.config, {})
    with pytest.raises(EngineError, match="float32"):
        KVPool.wrap(model.config, {key: tensor.double() for key, tensor in pool.tensors.items()})
