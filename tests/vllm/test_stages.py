"""Engines of several ranks, of which each has a part: pipeline stages with a draft, and context-parallel ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvproto import LocalError, Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto.errors import ErrorCode
from kvproto_engines.memory import ShareableMemory
from kvproto_engines.stages import Key, Share, alone, in_step, joined, titles_of
from kvproto_vllm.pools.caches import Stated, state
from kvproto_vllm.specs import dealt
from tests.vllm.backends import DIM, HEADS, LATENT, LAYERS, TOKENS, Backend

TARGET, DRAFT = Backend(), Backend("BHNC", name="FLASHINFER")
KEYS: list[Key] = [("flash_attn", 0, 0, "target"), ("flashinfer", 0, 1, "draft")]


class Meeting:
    """What stages give each other, each in a thread of its own."""

    def __init__(self, stages: int) -> None:
        self._barrier, self._given = Barrier(stages, timeout=10), [None] * stages

    def of(self, stage: int) -> Callable[[Any], list[Any]]:
        def gather(given: Any) -> list[Any]:
            self._barrier.wait()
            self._given[stage] = given
            self._barrier.wait()
            return list(self._given)

        return gather


def stated(backend: Backend, title: str, ids: list[int], model: int = 0) -> Stated:
    """Layers of a back end, by the numbers that they have in their engine."""
    layers = backend.layers(backend.tensors("cpu")[: len(ids)])
    return state(attrs.evolve(layers, title=title, ids=ids, names=layers.names[: len(ids)], model=model), True)


def shares(*stages: list[tuple[Key, Stated]]) -> list[list[Share]]:
    return [[Share(key, [one.cache], [(float(i), 2.0)], "") for key, one in stage] for i, stage in enumerate(stages)]


def filled(tensors: list[torch.Tensor], layers: range) -> None:
    for layer, tensor in zip(layers, tensors, strict=True):
        dice = torch.Generator().manual_seed(layer)
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=dice).to(tensor.dtype))


def test_stages_hand_over_to_one_rank(tmp_path: Path) -> None:
    """Two stages of which the last has the draft, and an engine of one rank: each layer comes from its own stage."""
    first = [(KEYS[0], stated(TARGET, "flash_attn", [0, 1]))]
    last = [(KEYS[0], stated(TARGET, "flash_attn", [2])), (KEYS[1], stated(DRAFT, "flashinfer 1", [0], 1))]
    both = joined(shares(first, last))
    caches = [cache for key in KEYS for cache in both[key].caches]
    assert [(cache.layers, cache.group.model) for cache in caches] == [((0, 1, 2), 0), ((0,), 1)]
    assert both[KEYS[0]].scales == [(0.0, 2.0), (1.0, 2.0)]
    split = lay_out(caches, Parallel(pp=2, stages=(2, 1)), depth=3)
    whole = [stated(TARGET, "flash_attn", [0, 1, 2]), stated(DRAFT, "flashinfer 1", [0], 1)]
    names, address = [each.cache.group.name for each in whole], f"ipc://{tmp_path}/{{rank}}"
    sources = []
    for rank, stage in enumerate((first, last)):
        tensors = {one.cache.group.name: one.tensors for _, one in stage}
        filled([each for _, one in stage for each in one.tensors], range(10 * rank, 10 * rank + 2))
        pool = Pool(split, tensors, rank=rank, axes="page head token dim")
        sources.append((Source("prefill", pool, address), {name: [3, 1, 4, 0, 2] for name in tensors}))
    tensors = {each.cache.group.name: each.tensors for each in whole}
    pool = Pool(lay_out([each.cache for each in whole]), tensors, axes="page head token dim")
    prompt, ticket = Prompt(range(TOKENS)), new_ticket("prefill")
    with Sink("decode", pool, {"prefill": address.format(rank=0)}) as sink:
        requests = [source.request(ticket, prompt) for source, _ in sources]
        fetch = sink.fetch(ticket, prompt, {name: [0, 4, 1, 3, 5] for name in names})
        for request, (_, pages) in zip(requests, sources, strict=True):
            request.finish(pages)
        fetch.wait(20)
    sent = [*first[0][1].tensors, *last[0][1].tensors, *last[1][1].tensors]
    for mine, theirs in zip(sent, [*whole[0].tensors, *whole[1].tensors], strict=True):
        rows = [tensor[pages].transpose(1, 2).flatten(0, 1)[:TOKENS] for tensor, pages in
                ((mine, [3, 1, 4, 0, 2]), (theirs, [0, 4, 1, 3, 5]))]  # fmt: skip
        assert rows[0].any()
        assert torch.equal(*rows)
    for source, _ in sources:
        source.close()


def test_titles_are_alike_on_all_stages() -> None:
    """Kinds are numbered in the order in which stages name them, whichever stage has them."""
    other: Key = ("flash_attn", 1, 0, "window")
    stages = [[KEYS[0], other], [other, KEYS[1]]]
    assert list(titles_of(key for stage in stages for key in stage).values()) == [
        "flash_attn", "flash_attn 1", "flashinfer 2",
    ]  # fmt: skip


def test_stages_that_differ_are_refused() -> None:
    """A kind of layers that one stage stores in other pages, and an error of one stage, which all of them raise."""
    other = stated(attrs.evolve(TARGET, block=32, kernel=32), "flash_attn", [2])
    with pytest.raises(LocalError, match=r"as layers .0, 1. of another pipeline stage"):
        joined(shares([(KEYS[0], stated(TARGET, "flash_attn", [0, 1]))], [(KEYS[0], other)]))
    meeting = Meeting(2)

    def stage(number: int) -> str:
        def make() -> int:
            if number:
                raise LocalError(ErrorCode.BAD_COLUMNS, "layer", "pages", "none")
            return number

        try:
            return str(in_step(meeting.of(number), make))
        except LocalError as error:
            return error.path

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(stage, range(2))) == ["layer", "layer"]
    assert in_step(alone, lambda: 3) == [3]


@pytest.mark.parametrize("backend", [attrs.evolve(TARGET, name="FLASH_ATTN"), Backend(mla=True, name="FLASHMLA")])
@pytest.mark.parametrize("interleave", [1, 8])
def test_context_parallel_ranks_fetch_their_tokens(backend: Backend, interleave: int, tmp_path: Path) -> None:
    """Token t is on rank t // interleave % 2, at the place where vLLM's kernels write it."""
    title = backend.name.lower()
    one, two = (stated(backend, title, list(range(LAYERS))) for _ in range(2))
    heads = 1 if backend.mla else HEADS
    source = Pool(lay_out([one.cache]), {title: one.tensors}, axes="page head token dim")
    filled(one.tensors, range(LAYERS))
    spec, ranks = SimpleNamespace(dcp_sharded=True), 2 * heads
    sizes = Parallel(tp=ranks, dcp=2, interleave=interleave)
    geometry = lay_out([dealt(two.cache, spec, 2)], sizes)
    address, prompt, ticket = f"ipc://{tmp_path}/p", Prompt(range(TOKENS)), new_ticket("prefill")
    table = [2, 0, 1]
    with Source("prefill", source, address) as here:
        request = here.request(ticket, prompt)
        held, sinks = [], []
        for rank in range(ranks):
            width = LATENT if backend.mla else 2 * DIM
            with ShareableMemory(torch.int8):
                memory = torch.zeros(LAYERS * backend.blocks * backend.block * width * 2, dtype=torch.int8)
            held.append(list(memory.view(torch.bfloat16).view(LAYERS, backend.blocks, 1, backend.block, width)))
            pool = Pool(geometry, {title: held[-1]}, rank=rank, axes="page head token dim")
            sinks.append(Sink("decode", pool, {"prefill": address}))
        fetches = [sink.fetch(ticket, prompt, {title: table}) for sink in sinks]
        request.finish({title: [3, 1, 4, 0, 2]})
        for fetch in fetches:
            fetch.wait(20)
        for sink in sinks:
            sink.close()
    for rank, tensors in enumerate(held):
        head = rank // 2 if heads > 1 else 0
        for mine, theirs in zip(one.tensors, tensors, strict=True):
            for token in range(TOKENS):
                # vLLM's block table: virtual blocks of 2 * block tokens, and the local row in them
                virtual, offset = divmod(token, 2 * backend.block)
                if offset // interleave % 2 == rank % 2:
                    row = offset // (2 * interleave) * interleave + offset % interleave
                    page, at = divmod(token, backend.block)
                    got = theirs[table[virtual], 0, row]
                    assert torch.equal(got, mine[[3, 1, 4, 0, 2][page], head, at])


def test_dealt_by_what_the_engine_says() -> None:
    """A layer that vLLM keeps whole on every rank is stated so; a release that does not say is refused."""
    cache = stated(TARGET, "flash_attn", [0]).cache
    assert dealt(cache, SimpleNamespace(), 1) == cache
    assert [dealt(cache, SimpleNamespace(dcp_sharded=says), 2).dealt for says in (True, False)] == [True, False]
    with pytest.raises(LocalError, match="which layers it deals"):
        dealt(cache, SimpleNamespace(), 2)
