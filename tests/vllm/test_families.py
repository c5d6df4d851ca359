"""Every cache of a family moves between engines with other ranks, blocks and layouts, over poisoned memory, byte by byte."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvproto import Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto.catalog.models import describe
from kvproto.wire.enums import ItemKind
from kvproto_engines.memory import ShareableMemory
from kvproto_vllm.caches import Layers, Stated, state
from kvproto_vllm.states import states
from tests.vllm.backends import indexer_k_quant_and_cache
from tests.vllm.families import FAMILIES, Held, States, specification

ROOT = Path(__file__).resolve().parents[2]
TOKENS, POISON = 267, 0xEE


@attrs.frozen
class Setup:
    """Sizes of an engine: ranks, tokens of a block, and the axes of its memory from the outermost to the innermost."""

    ranks: int
    block: int
    order: str
    seed: int = 0


def label(cache: int, layer: int, part: int, head: int, row: int, size: int) -> torch.Tensor:
    """Bytes that say where they belong."""
    number = (cache * 7919 + layer * 104729 + part * 1299709 + head * 15485863 + row * 2654435761) & 0xFFFFFFFF
    at = torch.arange(size)
    return (((number >> (8 * (at % 4))) ^ (at * 29)) & 0xFF).to(torch.uint8)


class Rows:
    """Layers of one specification on a rank, whose rows are of tokens."""

    def __init__(self, number: int, held: Held, setup: Setup, rank: int) -> None:
        self.number, self.held, self.setup, self.heads = number, held, setup, held.heads_of(rank, setup.ranks)
        self.block = held.block or setup.block
        self.blocks = 3 if held.ring else -(-TOKENS // self.block) + 2
        lanes = len(self.heads) if held.heads else held.lanes
        dtype, size = held.fields["dtype"], held.fields["head_size"] + held.fields["head_size_v"]
        self.rows = held.ring or self.block // held.tokens
        self.spec = specification(held.kind, held.fields | {"block_size": self.block, "num_kv_heads": lanes})
        cell = held.fields.get("state_content_bytes") or size * dtype.itemsize
        sizes = {"L": len(held.layers), "B": self.blocks, "H": lanes, "N": self.rows * held.cells, "C": cell}
        order = setup.order.replace("NHC", "HNC") if held.flat else setup.order
        strides, step = dict[str, int](), 1
        for axis in reversed(order):
            strides[axis] = step
            step = step * sizes[axis] + 64 * dtype.itemsize * (axis == order[order.index("B") + 1])  # blocks are padded
        with ShareableMemory(torch.int8):
            raw = torch.zeros(step, dtype=torch.int8).view(torch.uint8).fill_(POISON)
        shape = [[of[axis] for axis in "BHNC"] for of in (sizes, strides)]
        self.raw = [torch.as_strided(raw, *shape, n * strides["L"]) for n in range(len(held.layers))]
        self.tensors = [each.view(dtype) for each in self.raw]
        self.memory = raw

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
        with ShareableMemory(torch.int8):
            raw = torch.zeros(len(held.layers) * self.blocks * (sum(sizes) + 16) * 4, dtype=torch.int8)
        raw.view(torch.uint8).fill_(POISON)
        self.memory, words = raw.view(torch.uint8), raw.view(torch.float32)
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


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's function that stores keys of an index."""
    made = SimpleNamespace(indexer_k_quant_and_cache=indexer_k_quant_and_cache)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=made))


def setups(family: list[Held | States]) -> tuple[Setup, Setup]:
    """Two engines that differ in all that engines may differ in."""
    long = any(isinstance(held, Held) and held.tokens > 16 for held in family)
    return Setup(2, 256 if long else 16, "LBHNC", 1), Setup(1, 128 if long else 48, "BLNHC", 2)


@pytest.mark.parametrize("turned", [False, True], ids=["TP 2 to 1", "TP 1 to 2"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_all_caches_of_a_family_move_between_unequal_engines(name: str, turned: bool, tmp_path: Path) -> None:
    family = FAMILIES[name]
    sizes = setups(family)[:: -1 if turned else 1]
    one, two, wanted = (Engine(family, each) for each in (*sizes, sizes[1]))
    one.put()
    prompt, ticket, place = Prompt(range(TOKENS + 1)), new_ticket("p"), f"ipc://{tmp_path}/p-{{rank}}"
    firsts = two.by_group(lambda cache: first_of(cache.held))
    with ExitStack() as doors:
        sources = [doors.enter_context(Source("p", pool, place)) for pool in one.pools]
        sinks = [doors.enter_context(Sink("d", pool, {"p": place.format(rank=0)})) for pool in two.pools]
        requests = [source.request(ticket, prompt) for source in sources]
        fetches = [
            sink.fetch(ticket, prompt, two.by_group(lambda cache: cache.table()), cached=firsts, tokens=TOKENS)
            for sink in sinks
        ]
        since = {name: first for name, first in firsts.items() if first}
        for request in requests:
            request.finish(one.by_group(lambda cache: cache.table()), tokens=TOKENS, since=since)
        for fetch in fetches:
            fetch.wait(30)
    wanted.put()
    for got, expected in zip(two.caches, wanted.caches, strict=True):
        for cache, other in zip(got, expected, strict=True):
            assert torch.equal(cache.memory, other.memory), cache.held


def plain_of(cache: Any, held: Held) -> Any:
    """The same cache as an engine may state it that keeps windows in rings, and pages of 32 rows."""
    rings = {"kind": ItemKind.RING, "rows": held.ring or held.window or 32}
    pages = {"kind": ItemKind.PAGE, "rows": 32}
    return attrs.evolve(cache, group=attrs.evolve(cache.group, **(rings if held.ring or held.window else pages)))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_rows_of_a_family_reach_an_engine_of_another_kind(name: str, tmp_path: Path) -> None:
    rows = [held for held in FAMILIES[name] if isinstance(held, Held)]
    one = Engine(rows, setups(rows)[0])
    one.put()
    made = [stated(n, cache, one.caches[0][n].setup)[0].cache for n, cache in enumerate(one.caches[0])]
    geometry = lay_out([plain_of(*pair) for pair in zip(made, rows, strict=True)])
    pool = Pool.allocate(geometry, {each.group.name: -(-TOKENS // 32) + 1 for each in made})
    items = {
        group.name: [1] if group.kind == ItemKind.RING else list(range(1, -(-TOKENS // group.tokens_per_row // 32) + 1))
        for group in pool.layout.groups.values()
    }
    prompt, ticket, place = Prompt(range(TOKENS + 1)), new_ticket("p"), f"ipc://{tmp_path}/p-{{rank}}"
    firsts = {each.group.name: first_of(held) for each, held in zip(made, rows, strict=True)}
    with ExitStack() as doors:
        sources = [doors.enter_context(Source("p", each, place)) for each in one.pools]
        sink = doors.enter_context(Sink("d", pool, {"p": place.format(rank=0)}))
        requests = [source.request(ticket, prompt) for source in sources]
        fetch = sink.fetch(ticket, prompt, items, cached=firsts, tokens=TOKENS)
        since = {name: first for name, first in firsts.items() if first}
        for request in requests:
            request.finish(one.by_group(lambda cache: cache.table()), tokens=TOKENS, since=since)
        fetch.wait(30)
    for (number, held), cache in zip(enumerate(rows), made, strict=True):
        group = next(each for each in pool.layout.groups.values() if each.name == cache.group.name)
        for layer, (n, part) in itertools.product(held.layers, enumerate(group.parts)):
            array = pool.array(group.name, layer, part.name)
            for row, head in itertools.product(
                range(-(-firsts[group.name] // held.tokens), TOKENS // held.tokens), range(held.heads or 1)
            ):
                item = 1 if group.kind == ItemKind.RING else 1 + row // 32
                wanted = label(number, layer, n, head, row, part.lane_bytes)
                assert array[item, row % group.rows, head].tobytes() == wanted.numpy().tobytes(), (
                    held,
                    layer,
                    part,
                    row,
                )


def cells() -> list[list[str]]:
    """The rows of the table of families in the page of what was tried."""
    text = (ROOT / "docs/compatibility.md").read_text().split("## Families of models")[1].split("\n## ")[0]
    rows = [line.strip("| \n").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in [*row, "", ""][:4]] for row in rows[1:]]


def test_the_table_of_families_names_what_is_moved_and_no_more() -> None:
    assert {name for _, _, moved, _ in cells() for name in moved.split("; ")} == set(FAMILIES)


def test_the_table_of_families_names_pairs_of_engines() -> None:
    for family, _, _, ran_ in cells():
        if ran_:
            module, title = ran_.split(": ", 1)
            pairs = importlib.import_module(f"tools.engines.{module.strip('`')}").PAIRS
            assert any(title in pair.title for pair in pairs), family


def test_the_table_of_families_names_files_that_are_described() -> None:
    for _, file, _, _ in cells():
        if file:
            assert describe(json.loads((ROOT / f"examples/configs/{file.strip('`')}.json").read_text()))


def test_the_page_counts_its_families() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    assert f"Of {sum(bool(moved) for _, _, moved, _ in cells())} families every cache" in page
    assert f"Of these, {sum(bool(ran_) for *_, ran_ in cells())} also ran end to end" in page
