"""Replicas that share experts write what one engine writes, whether the others have requests or not."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kvproto import lay_out
from kvproto_reference import checkpoint
from kvproto_reference.cache import KVPool, PageAllocator
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.description import Layout, cache, shards
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.runner import Runner
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.speculative import SpeculativeDecoder
from kvproto_reference.engine.world import World
from kvproto_reference.models import Decoder, ExpertParallel, ModelConfig, MoeConfig, TensorParallel
from tests.processes import all_end_well, imported

from .engines import close

imported(__name__)

RANKS, TURNS = 4, 30
SIZES = {"hidden": 32, "heads": 4, "latent": 12, "rope_dim": 4, "nope_dim": 8, "v_dim": 6, "ffn": 48}
MOE = MoeConfig(layers=(1, 2), experts=6, top_k=2, ffn=10, shared_ffn=12, scores="sigmoid", normalize=True)
CONFIGS = [
    ModelConfig(kind="mla", layers=3, moe=MOE, **SIZES),  # type: ignore[arg-type]
    ModelConfig(kind="mla", layers=1, **SIZES),  # type: ignore[arg-type]
]
TENSOR_PARALLEL = {"DP 4": 1, "DP 2 of TP 2": 2}
PROMPTS = [[], [[3, 14, 15, 92, 65]], [[35, 89], [79] * 23, [32, 38, 46]], [[(7 * i * i) % 257 for i in range(40)]]]
"""Of each rank's replica; one with two ranks has those of two."""
ROWS = [(0, 2, 3, 0, 5, 1), (0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (3, 0, 0, 0, 0, 4)]
"""How many rows each rank has for each expert."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target with experts, and a draft without."""
    root, found = tmp_path_factory.mktemp("models"), []
    for seed, config in enumerate(CONFIGS):
        torch.manual_seed(seed)
        found.append(root / str(seed))
        checkpoint.save(found[-1], Decoder(config))
    return found


def runner(folder: Path, model: int, tp: TensorParallel) -> Runner:
    loaded = checkpoint.load(folder, tp)
    (shard,) = shards(
        lay_out([cache(model, loaded.config, Layout(tp=tp.size), 8)], Layout(tp=tp.size).parallel), 0
    ).values()
    return torch_runner(loaded, KVPool.allocate(loaded.config, 40, 8, tp), shard)


def served(folders: list[Path], place: TensorParallel, prompts: list[list[int]], begins: int = 0) -> list[list[int]]:
    """What a replica writes to its prompts, which come at a turn of their own: with a step or none, as it needs."""
    target = runner(folders[0], 0, place)
    draft = runner(folders[1], 1, TensorParallel(place.rank, place.size, place.group))
    requests = [TokenSequence(prompt=prompt, max_new=12) for prompt in prompts]
    prefiller, decoder = Prefiller(target, draft, 16), SpeculativeDecoder(target, draft)
    pages = [PageAllocator(40, seed) for seed in (1, 2)]
    for request in requests:
        request.tables = [free.allocate(-(-len(request.prompt) // 8) + 3) for free in pages]
        prefiller.add(request)
    for turn in range(TURNS):
        if turn >= begins and prefiller.busy:
            prefiller.step()
        elif turn >= begins and not all(request.finished for request in requests):
            decoder.step(requests)
        target.idle()
    assert all(request.finished for request in requests)
    return [request.generated for request in requests]


def of_replica(replica: int, tp: int) -> list[list[int]]:
    return [prompt for some in PROMPTS[replica * tp : (replica + 1) * tp] for prompt in some]


def work(rank: int, folders: list[Path], out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=RANKS)
    found: dict[str, object] = {"ran": exchanged(rank)}
    for name, tp in TENSOR_PARALLEL.items():
        groups = [dist.new_group([*range(first, first + tp)]) for first in range(0, RANKS, tp)]
        replica, place = divmod(rank, tp)
        world = World(place, tp, groups[replica], (), replica, RANKS // tp, dist.group.WORLD)
        parallel = TensorParallel(place, tp, world.group, experts=world.experts(tp))
        found[name] = served(folders, parallel, of_replica(replica, tp), begins=3 * replica)
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


def exchanged(rank: int) -> list[int]:
    """Expert e adds e to its rows; returns how many rows each of this rank's experts saw."""
    shared, counts, saw = ExpertParallel(rank, RANKS, dist.group.WORLD), torch.tensor(ROWS[rank]), list[int]()
    first = shared.share(len(counts)).start
    rows = 100 * rank + torch.arange(2.0 * counts.sum()).view(-1, 2)

    def experts(some: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
        saw.extend(each.tolist())
        return some + (torch.arange(len(each)) + first).repeat_interleave(each)[:, None]

    close(shared.run(experts, rows, counts), rows + torch.arange(len(counts)).repeat_interleave(counts)[:, None])
    assert [shared.step(runs) for runs in (False, rank == 2, True)] == [False, True, True]
    return saw


@pytest.fixture(scope="module")
def ranks(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[list[int]]]]:
    """What each rank found."""
    out = tmp_path_factory.mktemp("ranks")
    all_end_well(work, *((rank, models, out) for rank in range(RANKS)))
    return [torch.load(out / f"{rank}.pt") for rank in range(RANKS)]


def test_a_row_goes_to_the_one_rank_with_its_expert(ranks: list[dict[str, list[int]]]) -> None:
    assert [count for found in ranks for count in found["ran"]] == [sum(each) for each in zip(*ROWS, strict=True)]


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_replicas_write_what_one_engine_writes(
    ranks: list[dict[str, list[list[int]]]], models: list[Path], name: str
) -> None:
    tp = TENSOR_PARALLEL[name]
    alone = [served(models, TensorParallel(), of_replica(replica, tp)) for replica in range(RANKS // tp)]
    assert [found[name] for found in ranks] == [alone[rank // tp] for rank in range(RANKS)]
    assert len({token for tokens in alone[-1] for token in tokens}) > 3


@pytest.mark.parametrize("size", [2, 4, 6])
def test_shares_of_all_ranks_are_the_experts(models: list[Path], size: int) -> None:
    whole = checkpoint.state(models[0])
    parts = [checkpoint.state(models[0], TensorParallel(experts=ExpertParallel(r, size))) for r in range(size)]
    for name, weights in whole.items():
        if ".experts." in name:
            assert torch.equal(torch.cat([part[name] for part in parts]), weights)
        else:
            assert all(torch.equal(part[name], weights) for part in parts)
