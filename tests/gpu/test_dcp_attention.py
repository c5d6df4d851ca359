"""FlashInfer's kernels and the merge kernels on one GPU: all ranks of a DCP group in turn, against float64 attention.

Rows that a rank was not given are NaN, and so is the memory that outputs come from.
"""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvproto_reference.attention.flashinfer_kernel import FlashInferKernel, kernel_of
from kvproto_reference.attention.lse import Base2, Found
from kvproto_reference.attention.merge_kernels import MergeKernels, base2
from kvproto_reference.attention.torch_kernel import TorchKernel
from kvproto_reference.cache import KVPool
from kvproto_reference.errors import EngineError
from tests.gpu.shards import CONFIGS, Sequences, deal, error

GPU = torch.device("cuda", 0)
needs_flashinfer = pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")
LENGTHS = (1, 2, 17, 300, 2049, 777)
"""Less than N too, so that some shards are empty."""
PAGES = {"gqa": 16, "mla": 64}


def poison() -> None:
    """NaN into memory that torch hands out next."""
    sizes = [1 << 12] * 64 + [1 << 17] * 32 + [1 << 23] * 4
    filled = [torch.full((size,), float("nan"), device=torch.cuda.current_device()) for size in sizes]
    del filled


def undivided(some: Sequences, kernel: type = FlashInferKernel) -> Tensor:
    return merged(some, 1, 1, kernel)


def merged(
    some: Sequences, size: int, interleave: int, kernel: type = FlashInferKernel, by_token: bool = False
) -> Tensor:
    """Attention of the whole group, as its ranks compute and merge it, all on this GPU."""
    config, page = some.config, PAGES[some.config.kind]
    heads, width = config.heads, config.value_dim
    found: list[Found] = []
    for rank in range(size):
        pool, batch = some.rank(deal(page, size, interleave), rank)
        back_end = kernel(pool, [0] * heads, [0] * heads)
        back_end.plan(batch)
        poison()
        found.append(back_end.pool_by_token(0, some.q) if by_token else back_end.pool(0, some.q))
        new = None if batch.whole else back_end.new(some.q, some.new())
    parts: list[Found] = [base2(part) for part in found]
    if size > 1:  # each rank packs a chunk for each, and merges what it was sent
        kernels = MergeKernels(GPU, torch.bfloat16, width, size)
        tokens, each = len(some.q), heads // size
        poison()
        chunks = torch.empty(size, size, kernels.chunk(tokens * each), dtype=torch.uint8, device=GPU)
        for rank, part in enumerate(parts):
            kernels.pack(part, chunks[rank])
        own = [kernels.merge(kernels.unpack(chunks[:, rank].contiguous(), tokens, each)) for rank in range(size)]
        out, lse = torch.cat([p.out for p in own], 1), torch.cat([p.lse for p in own], 1)
        parts = [Base2(out, lse / torch.log(torch.tensor(2.0)), torch.ones(tokens, dtype=torch.int32, device=GPU))]
    if new is not None:
        return MergeKernels(GPU, torch.bfloat16, width, 2).merge([*parts, new]).out
    return parts[0].out


@needs_flashinfer
@pytest.mark.parametrize("interleave", [1, 3, 16])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", CONFIGS)
def test_decode(kind: str, size: int, interleave: int) -> None:
    some = Sequences.random(kind, LENGTHS, 1, GPU, seed=size)
    exact = some.exact()
    alone = error(undivided(some), exact)
    assert alone < 5e-3
    assert error(merged(some, size, interleave), exact) < min(5e-3, 1.4 * alone)


@needs_flashinfer
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_several_tokens(kind: str, size: int) -> None:
    """One pass over what was committed before, one over the new tokens; some sequences have nothing committed."""
    some = Sequences.random(kind, (5, 6, 40, 1030), 5, GPU, seed=size)
    exact = some.exact()
    assert error(merged(some, size, 1), exact) < min(5e-3, 1.4 * error(undivided(some), exact))


@needs_flashinfer
@pytest.mark.parametrize("kind", CONFIGS)
def test_by_token_is_what_one_pass_is(kind: str) -> None:
    some = Sequences.random(kind, (1, 33, 500), 1, GPU)
    assert error(merged(some, 2, 1, by_token=True), some.exact()) < 5e-3


@needs_flashinfer
@pytest.mark.parametrize("kind", CONFIGS)
def test_log_sum_exps_are_those_of_the_torch_back_end(kind: str) -> None:
    some = Sequences.random(kind, (1, 33, 500), 1, GPU)
    pool, batch = some.rank(deal(PAGES[kind], 2, 1), 1)
    lses = []
    for kernel in (FlashInferKernel, TorchKernel):
        back_end = kernel(pool, [0] * some.config.heads, [0] * some.config.heads)
        back_end.plan(batch)
        lses.append(back_end.pool(0, some.q).natural().lse)
    torch.testing.assert_close(*lses, atol=2e-2, rtol=0)
    assert torch.isneginf(lses[0][0]).all()  # one token, which the other rank stores


def test_a_wrong_base_is_seen() -> None:
    some = Sequences.random("gqa", (70,), 1, GPU)
    found = []
    for rank in range(2):
        pool, batch = some.rank(deal(16, 2, 64), rank)
        kernel = TorchKernel(pool, [0] * 16, [0] * 16)
        kernel.plan(batch)
        found.append(kernel.pool(0, some.q).natural())
    kernels = MergeKernels(GPU, torch.bfloat16, 128, 2)
    assert error(kernels.merge(found).out, some.exact()) < 5e-3
    read = torch.ones(1, dtype=torch.int32, device=GPU)
    assert error(kernels.merge([Base2(p.out, p.lse, read) for p in found]).out, some.exact()) > 5e-3


@pytest.mark.parametrize("lse", [float("nan"), float("inf"), float("-inf"), 3.0])
def test_nothing_read_is_selected_away(lse: float) -> None:
    """Whatever stands in an output and a log-sum-exp for which nothing was read."""
    kernels = MergeKernels(GPU, torch.bfloat16, 128, 2)
    good = torch.randn(3, 2, 128, device=GPU).bfloat16()
    some = Base2(good, torch.randn(3, 2, device=GPU), torch.ones(3, dtype=torch.int32, device=GPU))
    nothing = Base2(
        good * float("nan"), torch.full((3, 2), lse, device=GPU), torch.zeros(3, dtype=torch.int32, device=GPU)
    )
    assert torch.equal(kernels.merge([nothing, some]).out, good)
    empty = kernels.merge([nothing, nothing])
    assert (empty.out == 0).all()
    assert torch.isneginf(empty.lse).all()


@needs_flashinfer
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_captured_step_runs_again_after_another_plan(kind: str) -> None:
    steps = [Sequences.random(kind, lengths, 1, GPU, seed=7) for lengths in ((300, 20, 4000), (301, 1, 70), (1, 1, 1))]
    group, heads = deal(PAGES[kind], 1, 1), [0] * CONFIGS[kind].heads
    most = steps[0].rank(group, 0)[0]
    kernel = FlashInferKernel(most, heads, heads, fixed=True)
    kernel.plan(steps[0].rank(group, 0)[1])
    q = steps[0].q.clone()
    kernel.pool(0, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel.pool(0, q)
    for some in steps:
        pool, batch = some.rank(group, 0)
        for key, tensor in pool.tensors.items():
            most.tensors[key][: len(tensor)] = tensor
        kernel.plan(batch)
        q.copy_(some.q)
        found.out.fill_(float("nan"))
        graph.replay()
        assert error(found.out, some.exact()) < 5e-3


@needs_flashinfer
def test_heads_that_do_not_share_kv_heads_evenly_are_refused() -> None:
    pool = KVPool.allocate(CONFIGS["gqa"], 2, 16, device=GPU)
    with pytest.raises(EngineError, match="evenly"):
        FlashInferKernel(pool, [0, 0, 1], [0])


def test_without_flashinfer_torch_attends_and_says_so() -> None:
    pool = KVPool.allocate(CONFIGS["gqa"], 2, 16)  # on the host
    with pytest.warns(RuntimeWarning, match="back end torch"):
        assert isinstance(kernel_of("flashinfer", pool, [0], [0]), TorchKernel)
