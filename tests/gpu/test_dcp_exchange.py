"""Exchanges of a DCP group between two GPUs, a process each: NCCL and mapped memory, against float64 attention."""

import os
import socket
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kvproto_reference.attention import cuda_exchange
from kvproto_reference.attention.cuda_exchange import PackedAllToAll, PeerMapped
from kvproto_reference.attention.exchange import AllGather, AllToAll
from kvproto_reference.attention.flashinfer_kernel import kernel_of
from kvproto_reference.attention.lse import Base2, Partial
from kvproto_reference.errors import EngineError
from tests.gpu.shards import CONFIGS, Sequences, deal, error
from tests.gpu.test_dcp_attention import PAGES, poison

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WAYS: list[tuple[type, bool]] = [
    (way, replicated) for way in (AllGather, AllToAll, PackedAllToAll, PeerMapped) for replicated in (False, True)
]


def on_gpus(check: Callable[[int], None], gpus: Sequence[int] = (0, 1), back_end: str = "nccl") -> None:
    """Call `check(rank)` in a process for each of these GPUs."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    mp.spawn(_run, (check, gpus, back_end, port), nprocs=len(gpus))


def _run(rank: int, check: Callable[[int], None], gpus: Sequence[int], back_end: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(gpus[rank])
    dist.init_process_group(back_end, rank=rank, world_size=len(gpus))
    check(rank)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # captured collectives keep their communicator from being taken down


def _attend(rank: int) -> None:
    device = torch.device("cuda", rank)
    name = "flashinfer" if find_spec("flashinfer") else "torch"
    made: dict[Any, Any] = {way: way[0](2, dist.group.WORLD, way[1]) for way in WAYS}
    for kind in CONFIGS:
        for lengths, count in (((1, 2, 17, 300, 2049), 1), ((40, 1030), 5)):
            some = Sequences.random(kind, lengths, count, device)
            heads = some.config.heads
            pool, batch = some.rank(deal(PAGES[kind], 2, 1), rank)
            kernel = kernel_of(name, pool, [0] * heads, [0] * (heads // 2))
            kernel.plan(batch)
            mine = slice(rank * heads // 2, (rank + 1) * heads // 2)
            exact = some.exact()[:, mine]
            for (way, replicated), exchange in made.items():
                q = some.q if replicated else some.q[:, mine].contiguous()
                poison()
                part = exchange.merge(kernel.pool(0, exchange.queries(q))).natural()
                if not batch.whole:
                    from kvproto_reference.attention.lse import merge

                    part = merge([part, kernel.new(exchange.own(q), some.new()).natural()])
                worst = error(part.out, exact)
                assert worst < 5e-3, (kind, count, way, replicated, worst)
                exchange.check()


def test_every_exchange_gives_attention_over_all_tokens() -> None:
    on_gpus(_attend)


def _replay(rank: int) -> None:
    device = torch.device("cuda", rank)
    exchange = PeerMapped(2, dist.group.WORLD)
    read = torch.ones(9, dtype=torch.int32, device=device)
    out, log2 = torch.empty(9, 8, 128, dtype=torch.bfloat16, device=device), torch.empty(9, 8, device=device)
    q = torch.empty(9, 4, 128, dtype=torch.bfloat16, device=device)

    def step() -> tuple[torch.Tensor, Partial]:
        together = exchange.queries(q)
        return together, exchange.merge(Base2(out, log2, read))

    step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together, found = step()
    for turn in range(300):
        dice = torch.Generator().manual_seed(turn)
        outs, logs = torch.randn(2, 9, 8, 128, generator=dice).bfloat16(), 5 * torch.randn(2, 9, 8, generator=dice)
        queries = torch.randn(2, 9, 4, 128, generator=dice).bfloat16()
        for place, value in ((out, outs[rank]), (log2, logs[rank]), (q, queries[rank])):
            place.copy_(value)
        graph.replay()
        weight = torch.softmax(logs.double() * 0.6931471805599453, 0)[..., None]
        exact = (outs.double() * weight).sum(0)[:, rank * 4 : rank * 4 + 4]
        assert error(found.out.cpu(), exact) < 5e-3
        assert torch.equal(together.cpu(), torch.cat(list(queries), 1))
        if turn % 50 == rank:
            torch.cuda._sleep(20_000_000)  # one rank is late
    exchange.check()


def test_mapped_memory_replays_in_a_graph() -> None:
    on_gpus(_replay)


def _late(rank: int) -> None:
    cuda_exchange.PATIENCE = 0.5
    device = torch.device("cuda", rank)
    exchange = PeerMapped(2, dist.group.WORLD)
    found = Base2(
        torch.ones(1, 8, 128, dtype=torch.bfloat16, device=device), torch.ones(1, 8, device=device),
        torch.ones(1, dtype=torch.int32, device=device),
    )  # fmt: skip
    exchange.merge(found)
    torch.cuda.synchronize()
    exchange.check()
    dist.barrier()
    if rank == 0:
        exchange.merge(found)  # the other does not come
        torch.cuda.synchronize()
    dist.barrier()
    exchange.merge(found)  # whoever launches next fails at once
    torch.cuda.synchronize()
    with pytest.raises(EngineError, match="did not come"):
        exchange.check()


def test_a_rank_that_does_not_come_fails_the_step_on_all() -> None:
    on_gpus(_late)


def _share(rank: int) -> None:
    with pytest.raises(EngineError, match="share a GPU"):
        PeerMapped(2, dist.group.WORLD)


def test_ranks_that_share_a_gpu_are_refused() -> None:
    on_gpus(_share, (0, 0), "gloo")
