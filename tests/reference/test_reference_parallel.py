"""TP and DCP ranks give what one rank gives, and each holds the KV heads and tokens that it says."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from kvproto import lay_out
from kvproto_reference import checkpoint
from kvproto_reference.attention.exchange import AllGather, AllToAll
from kvproto_reference.attention.lse import Partial, merge
from kvproto_reference.cache import KVPool, PageAllocator
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.description import Layout, cache, shards
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.runner import Chunk, TorchRunner
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.speculative import SpeculativeDecoder
from kvproto_reference.engine.world import World
from kvproto_reference.errors import EngineError
from kvproto_reference.models import Decoder, ModelConfig, TensorParallel, kv_head_range
from tests.processes import all_end_well, imported

from .engines import close

imported(__name__)

PROMPTS = [[(5 * i * i + i) % 257 for i in range(n)] for n in (21, 1, 9)]
CASES = (("target-gqa", "draft-mla"), ("target-mla", "draft-gqa"))
LAYOUTS = {
    "tp 2": Layout(tp=2),
    "tp 3": Layout(tp=3),
    "tp 4": Layout(tp=4),
    "dcp 2": Layout(tp=2, dcp=2),
    "tp 4, dcp 2, interleave 3, gathered": Layout(tp=4, dcp=2, interleave=3, exchange="ag_rs"),
    "dcp 4, wide, draft dealt": Layout(tp=4, dcp=4, interleave=16, draft_sharded=True),
    "dcp 4 in a zigzag, queries everywhere": Layout(tp=4, dcp=4, interleave=2, deal="zigzag", replicate_q=True),
    "tp 4, dcp 2, queries everywhere, gathered": Layout(tp=4, dcp=2, replicate_q=True, exchange="ag_rs"),
}
PAGE, PAGES = 8, 24


Among = dist.ProcessGroup | None


def runner(folder: Path, model: int, layout: Layout, tp: TensorParallel, among: Among) -> TorchRunner:
    loaded = checkpoint.load(folder, layout.place(model, tp))
    stated = lay_out([cache(model, loaded.config, layout, PAGE)], layout.parallel)
    (shard,) = shards(stated, tp.rank).values()
    pool = KVPool.allocate(loaded.config, PAGES, PAGE, loaded.tp)
    for tensor in pool.tensors.values():
        tensor.fill_(torch.nan)  # a row that is read and is not this rank's, or not yet written, spoils everything
    return torch_runner(loaded, pool, shard, among, layout.exchange)


def generate(target: TorchRunner, draft: TorchRunner) -> list[list[int]]:
    """A batch of requests, prefilled in pieces and decoded together."""
    pages = [PageAllocator(PAGES, seed) for seed in (1, 2)]
    requests = [TokenSequence(prompt=prompt, max_new=12) for prompt in PROMPTS]
    prefiller, decoder = Prefiller(target, draft, 10), SpeculativeDecoder(target, draft)
    for request in requests:
        need = len(request.prompt) + 11
        request.tables = [
            free.allocate(model.shard.pages(need)) for free, model in zip(pages, (target, draft), strict=True)
        ]
        prefiller.add(request)
    while prefiller.busy:
        prefiller.step()
    while not all(request.finished for request in requests):
        decoder.step(requests)
    return [request.generated for request in requests]


def logits(target: TorchRunner) -> torch.Tensor:
    """Of a prompt in one step, of more of it on top, and of single tokens of two sequences."""
    ids = PROMPTS[0]
    runs = [
        [Chunk(ids[:13], 0, [5, 1, 3], every=True)],
        [Chunk(ids[13:17], 13, [5, 1, 3], every=True), Chunk(ids[:5], 0, [7], every=True)],
        [Chunk(ids[17:18], 17, [5, 1, 3]), Chunk(ids[5:6], 5, [7])],
    ]
    return torch.cat([target.run(chunks).values for chunks in runs])


def results(folders: dict[str, Path], layout: Layout, tp: TensorParallel, among: Among = None) -> list[dict[str, Any]]:
    found = []
    for target_name, draft_name in CASES:
        target = runner(folders[target_name], 0, layout, tp, among)
        told = {"logits": logits(target), "pool": target.attention.pool.tensors}
        target, draft = (runner(folders[n], i, layout, tp, among) for i, n in enumerate((target_name, draft_name)))
        found.append({**told, "tokens": generate(target, draft)})
    return found


def exchanged(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Both exchanges give this rank's heads of the merge of all ranks; some shards are empty, and one row of all."""
    everywhere = []
    for other in range(size):
        draw = torch.Generator().manual_seed(other)
        out, lse = torch.randn(5, 2 * size, 6, generator=draw), 3 * torch.randn(5, 2 * size, generator=draw)
        some = torch.arange(5) % size != other
        everywhere.append(
            Partial.of(torch.where(some[:, None, None], out, torch.nan), lse, some & (torch.arange(5) > 0))
        )
    wanted = merge(everywhere)
    for exchange in (AllGather(size, group), AllToAll(size, group)):
        mine = exchange.merge(everywhere[rank])
        close(mine.out, wanted.out[:, 2 * rank : 2 * rank + 2])
        close(mine.lse, wanted.lse[:, 2 * rank : 2 * rank + 2])
        assert not mine.out[0].any()
        assert torch.isneginf(mine.lse[0]).all()


def work(rank: int, folders: dict[str, Path], out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=4)
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    for size, group in groups.items():
        if rank < size:
            exchanged(rank, size, group)
    for name, layout in LAYOUTS.items():
        among = World(rank, 4, dist.group.WORLD).among([range(4)[i : i + layout.dcp] for i in range(0, 4, layout.dcp)])
        if rank < layout.tp:
            found = results(folders, layout, TensorParallel(rank, layout.tp, groups[layout.tp]), among)
            torch.save(found, out / f"{name}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    """What each rank found, by layout."""
    out = tmp_path_factory.mktemp("ranks")
    all_end_well(work, *((rank, folders, out) for rank in range(4)))
    return {
        name: [torch.load(out / f"{name}-{rank}.pt") for rank in range(layout.tp)] for name, layout in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> list[dict[str, Any]]:
    """What one rank finds."""
    return results(folders, Layout(), TensorParallel())


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_match_one_rank(
    ranks: dict[str, list[list[dict[str, Any]]]], alone: list[dict[str, Any]], folders: dict[str, Path], name: str
) -> None:
    layout = LAYOUTS[name]
    for case, one in enumerate(alone):
        config = checkpoint.load_config(folders[CASES[case][0]])
        stated = lay_out([cache(0, config, layout, PAGE)], layout.parallel)
        for rank in range(layout.tp):
            found, place = ranks[name][rank][case], layout.place(0, TensorParallel(rank, layout.tp))
            close(found["logits"], one["logits"], 1e-4)
            close(found["logits"], ranks[name][0][case]["logits"], 0)
            assert found["tokens"] == one["tokens"]
            # each token that the rank owns lies where the owner function says, and nothing lies elsewhere
            lo, hi = kv_head_range(config, place)
            (shard,) = shards(stated, rank).values()
            positions = torch.arange(18).numpy()
            slots = torch.from_numpy(shard.slots(torch.tensor([5, 1, 3]).numpy(), positions))
            whole = torch.from_numpy(shards(lay_out([cache(0, config, Layout(), PAGE)]), 0)["target"].slots(
                torch.tensor([5, 1, 3]).numpy(), positions))  # fmt: skip
            for key, tensor in found["pool"].items():
                assert tensor.shape[2] == hi - lo
                mine, theirs = (rows.flatten(0, 1) for rows in (tensor, one["pool"][key]))
                close(mine[slots[slots >= 0]], theirs[whole[slots >= 0], lo:hi], 1e-4)
            assert int((slots >= 0).sum()) == shard.rows(torch.tensor(18).numpy())


def test_kv_heads_replicate_in_runs() -> None:
    config = ModelConfig(kind="gqa", hidden=8, layers=1, heads=8, kv_heads=2, head_dim=2, ffn=8)

    def ranges(size: int, dcp: int = 1) -> list[tuple[int, int]]:
        return [kv_head_range(config, TensorParallel(rank, size, dcp=dcp)) for rank in range(size)]

    assert ranges(8) == [(0, 1)] * 4 + [(1, 2)] * 4
    assert ranges(2) == [(0, 1), (1, 2)]
    assert ranges(1) == [(0, 2)]
    assert ranges(8, dcp=4) == ranges(8)
    assert ranges(8, dcp=8) == [(0, 2)] * 8
    assert ranges(4, dcp=2) == [(0, 1)] * 2 + [(1, 2)] * 2


def test_uneven_shares() -> None:
    config = ModelConfig(kind="gqa", hidden=8, layers=1, heads=6, kv_heads=2, head_dim=2, ffn=7)

    def ranges(config: ModelConfig, size: int) -> list[tuple[int, int]]:
        return [kv_head_range(config, TensorParallel(rank, size)) for rank in range(size)]

    assert ranges(config, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert ranges(config, 5) == [(0, 1), (0, 1), (0, 1), (1, 2), (1, 2)]
    assert ranges(attrs.evolve(config, heads=8, kv_heads=4), 3) == [(0, 1), (1, 3), (2, 4)]
    with pytest.raises(EngineError, match="heads 6 are too few for TP 7"):
        Decoder(config, TensorParallel(0, 7))
    with pytest.raises(EngineError, match="rank 2"):
        TensorParallel(2, 2)
    with pytest.raises(EngineError, match="groups of 3 do not divide 4"):
        TensorParallel(0, 4, dcp=3)
    with pytest.raises(EngineError, match="4 ranks do not divide 6 heads"):
        Decoder(config, TensorParallel(0, 4, dcp=2))
