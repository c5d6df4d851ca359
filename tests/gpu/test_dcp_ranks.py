"""Decode on several GPUs, steps captured with their collectives: TP and DCP over NCCL and over mapped memory."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from kvproto_reference import checkpoint
from kvproto_reference.attention.exchange import ON_CUDA
from kvproto_reference.cache import KVPool, Shard
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.captured import CapturedRunner
from kvproto_reference.engine.runner import Chunk
from kvproto_reference.models import Decoder, ModelConfig, TensorParallel
from tests.gpu.shards import CONFIGS, deal
from tests.gpu.test_dcp_exchange import on_gpus

FOUND = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(FOUND < 2, reason="needs two GPUs")
MODELS: dict[str, ModelConfig] = {
    "gqa": attrs.evolve(CONFIGS["gqa"], hidden=256, layers=3, heads=16, ffn=256, vocab=64),
    "mla": attrs.evolve(CONFIGS["mla"], hidden=256, layers=3, heads=16, ffn=256, vocab=64),
}
PAGE, PAGES = 16, 24
PROMPTS = ([(5 * i) % 64 for i in range(70)], [9, 8, 7], [(11 * i) % 64 for i in range(33)])
TABLES = ([5, 1, 3, 8, 2, 9, 0], [7, 4], [11, 12, 6, 13])
WAYS = [("ag_rs", False), ("a2a", True), ("a2a_packed", False), ("peer", False), ("peer", True)]
"""Exchanges, and whether every rank projects all queries."""


def steps(
    folder: Path, place: TensorParallel, exchange: str, back_end: str, dtype: str, captured: bool
) -> list[torch.Tensor]:
    """Logits of decode steps, the first of three sequences and the last of one, after their prompts."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = checkpoint.load(folder, place, dtype=dtype, device=device)
    pool = KVPool.allocate(model.config, PAGES, PAGE, place, device)
    for tensor in pool.tensors.values():
        tensor.fill_(torch.nan)  # a row that is read before it is written spoils everything
    shard = Shard(deal(PAGE, place.dcp, 1), place.cp_rank)
    among = None
    if place.dcp > 1:
        ranks = range(place.size)
        groups = [dist.new_group(list(ranks[n : n + place.dcp])) for n in ranks[:: place.dcp]]
        among = groups[place.rank // place.dcp]
    runner = torch_runner(model, pool, shard, among, exchange, back_end=back_end, captured=captured)
    assert isinstance(runner, CapturedRunner) == captured
    for ids, table in zip(PROMPTS, TABLES, strict=True):
        runner.run([Chunk(ids, 0, table)])
    found = []
    for step in range(24):
        some = range(3) if step < 20 else range(1)
        chunks = [Chunk([(3 * step + s) % 64], len(PROMPTS[s]) + step, TABLES[s]) for s in some]
        found.append(runner.run(chunks).values.double().cpu())
    runner.close()
    return found


def _compare(folder: Path, dcp: int, back_end: str, dtype: str, rank: int) -> None:
    size, worst = dist.get_world_size(), 1e-4 if dtype == "float32" else 3e-2
    exact = steps(folder, TensorParallel(), "a2a", "torch", "float32", captured=False)
    for exchange, replicated in WAYS:
        if exchange in ON_CUDA and dtype == "float32":
            continue
        place = TensorParallel(rank, size, dist.group.WORLD, dcp, replicated)
        for ours, one in zip(steps(folder, place, exchange, back_end, dtype, True), exact, strict=True):
            off = float(((ours - one).norm(dim=-1) / one.norm(dim=-1)).max())
            assert off < worst, (exchange, replicated, off)
            first = ours.cuda()
            dist.broadcast(first, 0)
            assert torch.equal(first.cpu(), ours), (exchange, replicated)


def _folder(tmp_path: Path, kind: str, vocab: int = 64) -> Path:
    torch.manual_seed(3)
    checkpoint.save(tmp_path / kind, Decoder(attrs.evolve(MODELS[kind], dtype="float32", vocab=vocab)))
    return tmp_path / kind


SIZES = [(2, 2), (4, 2), (4, 4)]
"""TP and DCP."""


@pytest.mark.parametrize(("tp", "dcp"), SIZES)
@pytest.mark.parametrize(
    ("back_end", "dtype"), [("torch", "float32"), ("torch", "bfloat16"), ("flashinfer", "bfloat16")]
)
@pytest.mark.parametrize("kind", MODELS)
def test_captured_ranks_find_what_one_finds(
    tmp_path: Path, kind: str, back_end: str, dtype: str, tp: int, dcp: int
) -> None:
    if tp > FOUND or find_spec(back_end) is None:
        pytest.skip(f"needs {tp} GPUs and {back_end}")
    on_gpus(partial(_compare, _folder(tmp_path, kind), dcp, back_end, dtype), range(tp))


DEMOS = [
    (2, "--model mla --draft-model gqa --dcp 2"),
    (2, "--model gqa --draft-model gqa --dcp 2 --exchange ag_rs --replicate-q --draft-sharded"),
    (2, "--model mla --draft-model gqa --dcp 2 --exchange peer --dtype bfloat16 --speculate 0"),
    (2, "--model mla --draft-model mla --dcp 2 --exchange a2a_packed --dtype bfloat16"),
    (4, "--model mla --draft-model gqa --dcp 4"),
    (4, "--model gqa --draft-model mla --dcp 2 --exchange peer --dtype bfloat16"),
]
"""TP of decode, and what else."""


@pytest.mark.parametrize(("tp", "options"), DEMOS, ids=[f"tp {tp} {options}" for tp, options in DEMOS])
def test_the_demo_decodes_in_graphs_on_all_gpus_what_one_engine_decodes(tp: int, options: str) -> None:
    """Prefill is on two of the GPUs; tokens, checksums and acceptance are one engine's."""
    if tp > FOUND:
        pytest.skip(f"needs {tp} GPUs")
    _demo(f"--decode-tp {tp} {options}")


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")
def test_the_demo_decodes_in_graphs_by_flashinfer_what_one_engine_decodes(tmp_path: Path) -> None:
    models = f"--model {_folder(tmp_path, 'mla', 257)} --draft-model {_folder(tmp_path, 'gqa', 257)}"
    _demo(f"{models} --decode-tp 2 --dcp 2 --exchange peer --dtype bfloat16 --back-end flashinfer")


def _demo(options: str) -> None:
    command = [sys.executable, "-m", "kvproto_reference.demo", "--transport", "cuda", "--json", "--max-new", "24"]
    command += ["--captured", *options.split()]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    assert json.loads(done.stdout)["identical"]
