"""Engines that hold a family's caches as vLLM does, in poisoned memory, whose rows say where they belong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from kvproto import Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto_engines.memory import ShareableMemory
from kvproto_vllm.pools.caches import Layers, Stated, state
from kvproto_vllm.pools.states import states
from tests.vllm.families import Held, States, specification

TOKENS, POISON = 267, 0xEE
Views = Callable[[Held, Any, "Setup", int, torch.Tensor], list[torch.Tensor]]
"""The tensors of layers [block, head, row, element] in this memory: of a specification, and so many blocks."""


@attrs.frozen
class Setup:
    """Sizes of an engine, and how it makes specifications and tensors.

    Fields:
        order: Axes of its memory, from the outermost to the innermost.
        seed: Of its block tables.
    """

    ranks: int
    block: int
    order: str
    seed: int
    make: Callable[[str, dict[str, Any]], Any]
    views: Views


def label(cache: int, layer: int, part: int, head: int, row: int, size: int) -> torch.Tensor:
    """Bytes that say where they belong."""
    number = (cache * 7919 + layer * 104729 + part * 1299709 + head * 15485863 + row * 2654435761) & 0xFFFFFFFF
    at = torch.arange(size)
    return (((number >> (8 * (at % 4))) ^ (at * 29)) & 0xFF).to(torch.uint8)


def poisoned(size: int) -> torch.Tensor:
    """So many bytes that other processes can map."""
    with ShareableMemory(torch.int8):
        return torch.zeros(size, dtype=torch.int8).view(torch.uint8).fill_(POISON)


def by_strides(held: Held, spec: Any, setup: Setup, blocks: int, memory: torch.Tensor) -> list[torch.Tensor]:
    """Tensors in the order of axes that the setup has, with a gap behind each block."""
    fields, dtype = held.fields, held.fields["dtype"]
    cell = fields.get("state_content_bytes") or (fields["head_size"] + fields["head_size_v"]) * dtype.itemsize
    rows = held.ring or spec.block_size // held.tokens
    sizes = {"L": len(held.layers), "B": blocks, "H": spec.num_kv_heads, "N": rows * held.cells, "C": cell}
    order = setup.order.replace("NHC", "HNC") if held.flat else setup.order
    strides, step = dict[str, int](), 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * sizes[axis] + 64 * dtype.itemsize * (axis == order[order.index("B") + 1])
    shape = [[of[axis] for axis in "BHNC"] for of in (sizes, strides)]
    assert step <= len(memory)
    return [torch.as_strided(memory, *shape, n * strides["L"]).view(dtype) for n in range(len(held.layers))]


class Rows:
    """Layers of one specification on a rank, whose rows are of tokens."""

    def __init__(self, number: int, held: Held, setup: Setup, rank: int) -> None:
        self.number, self.held, self.setup, self.heads = number, held, setup, held.heads_of(rank, setup.ranks)
        self.block = held.block or setup.block
        self.blocks, self.rows = (
            3 if held.ring else -(-TOKENS // self.block) + 2,
            held.ring or self.block // held.tokens,
        )
        lanes = len(self.heads) if held.heads else held.lanes
        self.spec = setup.make(held.kind, held.fields | {"block_size": self.block, "num_kv_heads": lanes})
        cell = (held.fields["head_size"] + held.fields["head_size_v"]) * held.fields["dtype"].itemsize
        self.memory = poisoned(len(held.layers) * self.blocks * (self.rows * held.cells * lanes * (cell + 64) + 4096))
        self.tensors = setup.views(held, self.spec, setup, self.blocks, self.memory)
        self.raw = [each.view(torch.uint8) for each in self.tensors]

    def put(self, table: list[int], first: int) -> None:
        """Write the labels of rows of tokens from the first on."""
        held, rows = self.held, range(-(-first // self.held.tokens), TOKENS // self.held.tokens)
        for (layer, into), row in itertools.product(enumerate(self.raw), rows):
            block, at = table[0 if held.ring else row // self.rows], row % self.rows
            for here, head in enumerate(self.heads):
                for part, (begin, size) in enumerate(held.places(at, self.rows)):
                    mark = label(self.number, held.layers[layer], part, head, row, size)
                    cell = into[block].view(-1) if held.flat else into[block, here, at]
                    cell[begin : begin + size] = mark

    def table(self) -> list[int]:
        """Blocks of the request, in the order of its tokens; those that a window has left are block 0."""
        blocks = torch.randperm(self.blocks - 1, generator=torch.Generator().manual_seed(self.setup.seed)) + 1
        if self.held.ring:
            return blocks[:1].tolist()
        gone = first_of(self.held) // self.block
        return [0] * gone + blocks[gone : -(-TOKENS // self.block)].tolist()


def first_of(held: Held | States) -> int:
    """The first token that is handed over."""
    if isinstance(held, States):
        return 0
    span = held.ring or held.window - 1 if held.ring or held.window else TOKENS
    return max(0, TOKENS - span)


class Slots:
    """Layers of states on a rank: of a block the inputs of a convolution, then a matrix."""

    def __init__(self, number: int, held: States, setup: Setup, rank: int) -> None:
        self.held, self.setup, self.number, self.rank, self.blocks = held, setup, number, rank, 3
        self.ranks = 1 if held.whole else setup.ranks
        shares = [self._share(0, kind) for kind in self._kinds()]
        shapes, sizes = [share.shape for share in shares], [share.numel() for share in shares]
        self.memory = poisoned(len(held.layers) * self.blocks * (sum(sizes) + 16) * 4)
        words = self.memory.view(torch.float32)
        self.tensors: list[Any] = []
        for layer in range(len(held.layers)):
            at, made = layer * self.blocks * (sum(sizes) + 16), []
            for shape, size in zip(shapes, sizes, strict=True):
                strides = sum(sizes) + 16, *torch.empty(shape).stride()
                made.append(torch.as_strided(words, (self.blocks, *shape), strides, at))
                at += size
            self.tensors.append(made)
        fields = {
            "mamba_type": SimpleNamespace(name=held.kind),
            "mamba_cache_mode": "none",
            "num_speculative_blocks": 0,
        }
        self.spec = specification("MambaSpec", fields | {"tp_replicated": held.whole})

    def _kinds(self) -> list[str]:
        return ["conv"] * bool(self.held.conv) + ["ssm"] * bool(self.held.ssm)

    def _share(self, layer: int, kind: str) -> torch.Tensor:
        """What this rank has of the state of a layer over all ranks, whose numbers name their places."""
        shape = [self.held.rows, sum(self.held.conv)] if kind == "conv" else list(self.held.ssm)
        start = 1 + 1000 * layer + 100 * self.number + 10 * (kind == "ssm")
        whole, own = start + torch.arange(torch.Size(shape).numel()).view(shape) % 8191, self.rank % self.ranks
        if kind == "ssm":
            return whole.float().chunk(self.ranks)[own]
        return torch.cat([block.chunk(self.ranks, 1)[own] for block in whole.float().split(list(self.held.conv), 1)], 1)

    def put(self, table: list[int], first: int) -> None:
        """Write the state of the request."""
        for layer, kind in itertools.product(range(len(self.tensors)), self._kinds()):
            tensor = self.tensors[layer][kind == "ssm" and bool(self.held.conv)]
            tensor[table[0]] = self._share(layer, kind)

    def table(self) -> list[int]:
        return [1 + self.setup.seed % 2]


class Engine:
    """All caches of a family on each rank of an engine."""

    def __init__(self, family: list[Held | States], setup: Setup) -> None:
        self.family, ranks = family, range(setup.ranks)
        self.caches = [
            [
                Slots(n, held, setup, rank) if isinstance(held, States) else Rows(n, held, setup, rank)
                for n, held in enumerate(family)
            ]
            for rank in ranks
        ]
        made = [[stated(n, cache, setup) for n, cache in enumerate(each)] for each in self.caches]
        self.groups = [[one.cache.group.name for one in each] for each in made[0]]
        geometry = lay_out([one.cache for each in made[0] for one in each], Parallel(tp=setup.ranks))
        self.pools = [
            Pool(geometry, {one.cache.group.name: one.tensors for each in made[rank] for one in each}, rank=rank,
                 axes="page head token dim")
            for rank in ranks
        ]  # fmt: skip

    def put(self) -> None:
        for each in self.caches:
            for cache in each:
                cache.put(cache.table(), first_of(cache.held))

    def by_group(self, of: Any) -> dict[str, Any]:
        """What `of` says of each cache, by the names of its groups."""
        pairs = zip(self.groups, self.caches[0], strict=True)
        return {name: of(cache) for names, cache in pairs for name in names}


def stated(number: int, cache: Any, setup: Setup) -> list[Stated]:
    """Statements of the connector about these layers."""
    held = cache.held
    layers = Layers(
        title=f"cache {number}", layer=SimpleNamespace(**getattr(held, "layer", {})), backend=getattr(held, "backend", ""),
        spec=cache.spec, names=[f"model.layers.{n}.{getattr(held, 'name', 'mixer')}" for n in held.layers],
        ids=list(held.layers), tensors=cache.tensors, heads=getattr(held, "heads", 1) or 1, ranks=setup.ranks,
        blocks=cache.blocks, computed=torch.bfloat16, stored="auto", scales=[(1.0, 1.0)] * len(held.layers),
        model=held.model,
    )  # fmt: skip
    return states(layers, True) if isinstance(held, States) else [state(layers, True)]


def setups(
    family: list[Held | States], make: Callable[[str, dict[str, Any]], Any] = specification, views: Views = by_strides
) -> tuple[Setup, Setup]:
    """Two engines that differ in all that engines may differ in."""
    long = any(isinstance(held, Held) and held.tokens > 16 for held in family)
    sizes = ((2, 256 if long else 16, "LBHNC", 1), (1, 128 if long else 48, "BLHNC", 2))
    one, two = (Setup(*each, make, views) for each in sizes)
    return one, two


def hand_over(family: list[Held | States], sizes: tuple[Setup, Setup], place: str) -> list[Held | States]:
    """Hand a request over from an engine of the first setup to one of the second: the layers whose memory is not then
    as it is wanted, byte by byte.
    """
    one, two, wanted = (Engine(family, each) for each in (*sizes, sizes[1]))
    one.put()
    wanted.put()
    prompt, ticket = Prompt(range(TOKENS + 1)), new_ticket("p")
    firsts = two.by_group(lambda cache: first_of(cache.held))
    with ExitStack() as doors:
        sources = [doors.enter_context(Source("p", pool, place)) for pool in one.pools]
        sinks = [doors.enter_context(Sink("d", pool, {"p": place.format(rank=0)})) for pool in two.pools]
        requests = [source.request(ticket, prompt) for source in sources]
        tables = two.by_group(lambda cache: cache.table())
        fetches = [sink.fetch(ticket, prompt, tables, cached=firsts, tokens=TOKENS) for sink in sinks]
        since = {name: first for name, first in firsts.items() if first}
        for request in requests:
            request.finish(one.by_group(lambda cache: cache.table()), tokens=TOKENS, since=since)
        for fetch in fetches:
            fetch.wait(60)
    pairs = zip(itertools.chain(*two.caches), itertools.chain(*wanted.caches), strict=True)
    return [got.held for got, other in pairs if not torch.equal(got.memory, other.memory)]
