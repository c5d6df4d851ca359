"""TP ranks give what one rank gives, and each holds the KV heads it says."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kvproto_reference import checkpoint
from kvproto_reference.engine import KVPool, ModelRunner, PageAllocator, SpeculativeDecoder, prefill
from kvproto_reference.engine import Sequence as Request
from kvproto_reference.errors import EngineError
from kvproto_reference.models import SOLO, Decoder, ModelConfig, TensorParallel, kv_head_range
from tests.processes import all_end_well, imported

imported(__name__)
PROMPT = [(5 * i * i + i) % 257 for i in range(21)]
CASES = (("target-gqa", "draft-mla"), ("target-mla", "draft-gqa"))


def runner(folder: Path, tp: TensorParallel) -> ModelRunner:
    model = checkpoint.load(folder, tp)
    return ModelRunner(model, KVPool.allocate(model.config, 8, 8, tp), 8)


def generate(target: ModelRunner, draft: ModelRunner) -> list[int]:
    pages = PageAllocator(8).allocate(6)
    sequence = Request(prompt=PROMPT, max_new=16, target_pages=pages, draft_pages=pages)
    prefill(sequence, target, draft, 8)
    decoder = SpeculativeDecoder(target, draft)
    while not sequence.finished:
        decoder.step(sequence)
    return sequence.generated


def work(rank: int, size: int, folders: dict[str, Path], out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=size)
    tp = TensorParallel(rank, size)
    for target_name, draft_name in CASES:
        target, draft = runner(folders[target_name], tp), runner(folders[draft_name], tp)
        logits = target.run(PROMPT, 0, [5, 1, 3])
        pool = {key: tensor.clone() for key, tensor in target.pool.tensors.items()}
        result = {"logits": logits, "pool": pool, "tokens": generate(target, draft)}
        torch.save(result, out / f"{target_name}-{draft_name}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_match_one_rank(folders: dict[str, Path], tmp_path: Path, size: int) -> None:
    all_end_well(work, *((rank, size, folders, tmp_path) for rank in range(size)))
    for target_name, draft_name in CASES:
        target = runner(folders[target_name], SOLO)
        logits = target.run(PROMPT, 0, [5, 1, 3])
        pool = {key: tensor.clone() for key, tensor in target.pool.tensors.items()}
        tokens = generate(target, runner(folders[draft_name], SOLO))
        ranks = [torch.load(tmp_path / f"{target_name}-{draft_name}-{rank}.pt") for rank in range(size)]
        for rank, result in enumerate(ranks):
            torch.testing.assert_close(result["logits"], logits, atol=1e-4, rtol=0)
            torch.testing.assert_close(result["logits"], ranks[0]["logits"], atol=0, rtol=0)
            assert result["tokens"] == tokens
            lo, hi = kv_head_range(target.model.config, rank, size)
            for key, mine in result["pool"].items():
                assert mine.shape[2] == hi - lo
                torch.testing.assert_close(mine, pool[key][:, :, lo:hi], atol=1e-4, rtol=0)


def test_kv_heads_replicate_in_runs() -> None:
    config = ModelConfig(kind="gqa", hidden=8, layers=1, heads=8, kv_heads=2, head_dim=2, ffn=8)
    assert [kv_head_range(config, rank, 8) for rank in range(8)] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert [kv_head_range(config, rank, 2) for rank in range(2)] == [(0, 1), (1, 2)]
    assert kv_head_range(config, 0, 1) == (0, 2)


def test_uneven_shares() -> None:
    config = ModelConfig(kind="gqa", hidden=8, layers=1, heads=6, kv_heads=2, head_dim=2, ffn=7)
    assert [kv_head_range(config, rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [kv_head_range(config, rank, 5) for rank in range(5)] == [(0, 1), (0, 1), (0, 1), (1, 2), (1, 2)]
    wide = ModelConfig(kind="gqa", hidden=8, layers=1, heads=8, kv_heads=4, head_dim=2, ffn=8)
    assert [kv_head_range(wide, rank, 3) for rank in range(3)] == [(0, 1), (1, 3), (2, 4)]
    with pytest.raises(EngineError, match="heads 6 are too few for TP 7"):
        Decoder(config, TensorParallel(0, 7))
    with pytest.raises(EngineError, match="rank 2"):
        TensorParallel(2, 2)
