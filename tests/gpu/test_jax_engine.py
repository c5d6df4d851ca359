"""The JAX engine on GPUs, a rank on each: tokens of the torch engine on the CPU, over pools that transports register."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("jax", exc_type=ImportError)
from kvproto import Pool
from kvproto_reference import checkpoint
from kvproto_reference.engine.description import TARGET, Layout, shards
from kvproto_reference.engine.runner import Chunk
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError
from kvproto_reference.jax_engine.build import jax_hosted, jax_runner
from kvproto_reference.jax_engine.mesh import mesh_of
from kvproto_reference.jax_engine.runner import JaxRunner
from kvproto_reference.models import Dense, ModelConfig
from tests.reference.jax_engines import ALONE, CONTEXT, IDS, PAGE, PAGES, PAIR, SIZES, drawn, generate, one, stated

LAYOUTS = {1: [ALONE], 2: [PAIR, CONTEXT]}
"""By GPUs: of decode first, then of prefill."""


@pytest.mark.parametrize(("target", "draft"), [("gqa", "mla"), ("mla", "gqa")])
def test_tokens_are_those_of_the_torch_engine_on_the_cpu(target: str, draft: str, jax_gpus: range) -> None:
    """With two GPUs the target's tokens are dealt over them: DCP 2."""
    folders = checkpoint.CHECKPOINTS / f"target-{target}", checkpoint.CHECKPOINTS / f"draft-{draft}"
    layout = LAYOUTS[len(jax_gpus)][0]
    hosted = jax_hosted(folders, stated(*folders, layout), layout, PAGES, jax_gpus)
    assert [memory.device for pool in hosted.pools.values() for memory in pool.memories.values()] == list(jax_gpus)
    torchs = Undivided(*folders, page_size=PAGE)
    for request in generate(hosted.target, hosted.draft):
        expected = torchs.generate(bytes(request.prompt), max_new=24)
        assert request.generated == expected.tokens
        assert request.stats == expected.stats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of one layer."""
    made = tmp_path_factory.mktemp("tiny")
    drawn(ModelConfig(kind="gqa", kv_heads=2, head_dim=8, **SIZES | {"layers": 1}), made)
    return made


def raw(pool: Pool, part: str) -> torch.Tensor:
    """A view of what the one layer of the target has: float32 [rows of all pages, heads * dim]."""
    region, offset, shape, _ = pool.place(TARGET, 0, part)
    memory = torch.from_dlpack(pool.memories[region]).view(torch.uint8)
    return memory[offset : offset + math.prod(shape)].view(torch.float32).view(shape[0] * shape[1], -1)


def test_ranks_read_what_is_in_their_pools_and_write_their_rows_alone(folder: Path, jax_gpus: range) -> None:
    for layout in LAYOUTS[len(jax_gpus)]:
        runner, pools = one(folder, layout, 4, jax_gpus)
        check_rows(runner, pools, exact(folder))


def exact(folder: Path) -> npt.NDArray[np.float32]:
    """Logits of the eleventh token, by the torch model on the CPU."""
    model = checkpoint.load(folder)
    logits = model.forward(torch.tensor(IDS[:11]), torch.arange(11), Dense(model.config))
    found: npt.NDArray[np.float32] = logits[10].detach().numpy()
    return found


def check_rows(runner: JaxRunner, pools: Sequence[Pool], exact: npt.NDArray[np.float32]) -> None:
    """A step is right, reads what is in the pools then, and writes there the rows that it makes, and no others."""
    for pool in pools:
        for part in "kv":
            raw(pool, part).fill_(math.nan)
        torch.cuda.synchronize(pool.rank)
    pages = [5, 2, 9]
    runner.run([Chunk(IDS[:8], 0, pages)])
    step = Chunk(IDS[8:11], 8, pages)
    before = runner.run([step]).row(0)
    np.testing.assert_allclose(before, exact, atol=1e-4)
    for rank, pool in enumerate(pools):
        slots = shards(pool.geometry, rank)[TARGET].slots(np.array(pages), np.arange(11))
        for part in "kv":
            written = raw(pool, part).isfinite().all(1)
            assert written.nonzero().flatten().tolist() == sorted(slots[slots >= 0])
    values = raw(pools[-1], "v")
    kept = values.clone()
    values.zero_()
    torch.cuda.synchronize(values.device)
    assert np.abs(runner.run([step]).row(0) - before).max() > 1e-2
    values.copy_(kept)
    torch.cuda.synchronize(values.device)
    np.testing.assert_allclose(runner.run([step]).row(0), before, atol=1e-5)


def test_what_cannot_be_is_refused_by_name(folder: Path, jax_gpus: range) -> None:
    with pytest.raises(EngineError, match=r"a GPU of its own for each rank, not \[0, 0\]"):
        mesh_of(2, on=[0, 0])
    with pytest.raises(EngineError, match=r"not \[99\]"):
        mesh_of(1, on=[99])
    made = stated(folder, folder, Layout(tp=2))
    pools = [Pool.allocate(made, 4, rank=rank, device=device) for rank, device in ((0, None), (1, jax_gpus[0]))]
    with pytest.raises(EngineError, match="on one GPU, or all on the host"):
        jax_runner(folder, pools, TARGET, Layout(tp=2))
