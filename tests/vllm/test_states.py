"""States as vLLM's layers allocate them, a block each: stated from shapes, and handed over between any two sizes and orders."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvproto import LocalError, Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto_engines.loading import Loading
from kvproto_engines.memory import ShareableMemory
from kvproto_engines.orders import Computed, Load, Orders, Table
from kvproto_engines.sending import Sending
from kvproto_vllm.pools.caches import Layers
from kvproto_vllm.pools.states import order_of, states
from tests.door.doors import PROMPT, STEPPED

LAYERS, BLOCKS, KERNEL = 2, 5, 4
LOGGER = logging.getLogger("engine")
HEADS, DIM, GROUPS, WIDTH, CHANNELS = 4, 8, 2, 6, 16
LAST = len(PROMPT) - 1

SHAPES: dict[str, list[tuple[tuple[str, int], ...]]] = {
    "MAMBA2": [
        (("conv", HEADS * DIM), ("conv", GROUPS * WIDTH), ("conv", GROUPS * WIDTH)),
        (("lanes", HEADS), ("whole", DIM), ("whole", WIDTH)),
    ],
    "GDN_ATTN": [
        (("conv", GROUPS * WIDTH), ("conv", GROUPS * WIDTH), ("conv", HEADS * DIM)),
        (("lanes", HEADS), ("whole", DIM), ("whole", WIDTH)),
    ],
    "SHORT_CONV": [(("conv", CHANNELS),)],
    "MAMBA1": [(("conv", CHANNELS),), (("lanes", CHANNELS), ("whole", WIDTH))],
    "LINEAR": [(("lanes", HEADS), ("whole", DIM), ("whole", DIM))],
}
"""What a model's states are, over all ranks; the blocks of a convolution are divided each on its own."""


OURS = {"KDA": "GDN_ATTN"}
"""Kinds that vLLM keeps under the name of another."""
SHAPES["KDA"] = [(("conv", HEADS * DIM),) * 3, (("lanes", HEADS), ("whole", DIM), ("whole", DIM))]


class Engine:
    """States of all layers on each rank of an engine, in blocks of memory with a gap, whose elements name themselves."""

    def __init__(self, kind: str, ranks: int, rows_first: bool, filled: bool) -> None:
        self.kind, self.ranks, self.rows_first = kind, ranks, rows_first
        self.tensors = [[self._layer(layer, rank, filled) for layer in range(LAYERS)] for rank in range(ranks)]
        made = [states(self.layers(rank), rows_first) for rank in range(ranks)]
        geometry = lay_out([each.cache for each in made[0]], Parallel(tp=ranks))
        self.names = [each.cache.group.name for each in made[0]]
        axes = "page head token dim"
        self.pools = [
            Pool(geometry, {one.cache.group.name: one.tensors for one in each}, rank=rank, axes=axes)
            for rank, each in enumerate(made)
        ]

    def layers(self, rank: int, **other: Any) -> Layers:
        spec = type("MambaSpec", (), {})()
        spec.__dict__ |= {
            "mamba_type": SimpleNamespace(name=OURS.get(self.kind, self.kind)), "mamba_cache_mode": "none", "num_speculative_blocks": 0,
        } | other  # fmt: skip
        return Layers(
            title="state", layer=None, backend=f"{self.kind}_ATTN", spec=spec, names=["model.layers.0.mixer"],
            ids=[1, 3], tensors=self.tensors[rank], heads=1, ranks=self.ranks, blocks=BLOCKS, computed=torch.float32, stored="auto",
            scales=[(1.0, 1.0)] * LAYERS,
        )  # fmt: skip

    def _layer(self, layer: int, rank: int, filled: bool) -> list[torch.Tensor]:
        """One allocation a layer: of each block the states one after the other, and a gap."""
        whole = [self.whole(n, layer) for n in range(len(SHAPES[self.kind]))]
        parts = [self._share(n, each, rank) for n, each in enumerate(whole)]
        sizes = [part[0].numel() for part in parts]
        stride = sum(sizes) + 16
        with ShareableMemory(torch.int8):
            raw = torch.zeros(stride * BLOCKS * 4, dtype=torch.int8).view(torch.float32)
        made = []
        for n, part in enumerate(parts):
            inner = torch.empty(part.shape[1:]).stride()
            made.append(torch.as_strided(raw, part.shape, (stride, *inner), sum(sizes[:n])))
            if filled:
                made[-1].copy_(part)
        return made

    def whole(self, n: int, layer: int) -> torch.Tensor:
        """State n of a layer over all ranks, [block, row or nothing, ...]: each element by its own place."""
        axes = SHAPES[self.kind][n]
        if axes[0][0] == "conv":
            shape = [BLOCKS, KERNEL - 1, sum(length for _, length in axes)]
        else:
            shape = [BLOCKS, *(length for _, length in axes)]
        return torch.arange(torch.Size(shape).numel()).float().view(shape) + 1 + 10_000 * n + 100_000 * layer

    def _share(self, n: int, whole: torch.Tensor, rank: int) -> torch.Tensor:
        axes = SHAPES[self.kind][n]
        if axes[0][0] != "conv":
            return whole.chunk(self.ranks, 1)[rank]
        blocks = whole.split([length for _, length in axes], 2)
        mine = torch.cat([block.chunk(self.ranks, 2)[rank] for block in blocks], 2)
        return mine if self.rows_first else mine.transpose(1, 2).contiguous()

    def expected(self, rank: int, layer: int, n: int, slot: int) -> torch.Tensor:
        return self._share(n, self.whole(n, layer), rank)[slot]


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize(
    ("ranks", "rows_first"), [((1, 1), (True, True)), ((2, 1), (True, False)), ((1, 2), (False, True))]
)
def test_a_state_moves_between_any_two_sizes_and_orders(
    kind: str, ranks: tuple[int, int], rows_first: tuple[bool, bool], tmp_path: Path
) -> None:
    one, two = (Engine(kind, *each, filled=n == 0) for n, each in enumerate(zip(ranks, rows_first, strict=True)))
    prompt, ticket, slots = Prompt(range(9)), new_ticket("p"), (3, 1)
    place = f"ipc://{tmp_path}/p-{{rank}}"
    sources = [Source("p", pool, place) for pool in one.pools]
    sinks = [Sink("d", pool, {"p": place.format(rank=0)}) for pool in two.pools]
    try:
        requests = [source.request(ticket, prompt) for source in sources]
        fetches = [sink.fetch(ticket, prompt, {name: [slots[1]] for name in two.names}, tokens=8) for sink in sinks]
        for request in requests:
            request.finish({name: [slots[0]] for name in one.names}, tokens=8)
        for fetch in fetches:
            fetch.wait(20)
    finally:
        for door in (*sinks, *sources):
            door.close()
    for rank, layer, n in ((r, i, n) for r in range(ranks[1]) for i in range(LAYERS) for n in range(len(SHAPES[kind]))):
        tensor = two.tensors[rank][layer][n]
        assert torch.equal(tensor[slots[1]], two.expected(rank, layer, n, slots[0])), (rank, layer, n)
        assert not tensor[[0, 2, 3, 4]].any()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("mamba_cache_mode", "align", "--no-enable-prefix-caching"),
        ("num_speculative_blocks", 3, "3 blocks for drafts"),
        ("mamba_type", SimpleNamespace(name="RWKV"), "rwkv"),
        ("mamba_type", SimpleNamespace(name="SHORT_CONV"), "as they are alone"),
        ("tp_replicated", True, "do not divide"),
    ],
)
def test_states_that_are_not_known_are_refused_by_name(field: str, value: Any, says: str) -> None:
    engine = Engine("MAMBA2", 1, True, False)
    with pytest.raises(LocalError, match=says):
        states(engine.layers(0, **{field: value}), True)


def test_an_order_that_shapes_do_not_tell_is_a_fact() -> None:
    assert order_of(Engine("GDN_ATTN", 1, True, False).layers(0)) == "key, value"
    assert order_of(Engine("LINEAR", 1, True, False).layers(0)) == "key, value"
    assert order_of(Engine("MAMBA2", 1, True, False).layers(0)) == ""


def test_the_table_of_a_state_is_its_first_block() -> None:
    assert Table(1, state=True).of(([1, 2, 3], [7, 8])) == [7]


@pytest.mark.parametrize("cached", [0, 4])
def test_a_worker_fetches_a_state_though_tokens_are_there(cached: int, tmp_path: Path) -> None:
    one, two = (Engine("MAMBA2", 1, True, filled) for filled in (True, False))
    tables, place = {name: Table(1, state=True) for name in one.names}, f"ipc://{tmp_path}/p"
    sending = Sending(Source("p", one.pools[0], place, STEPPED), tables, LOGGER)
    sink = Sink("d", two.pools[0], {"p": place}, STEPPED)
    loading = Loading(sink, tables, LOGGER)
    ticket, done = new_ticket("p"), set[str]()
    sending.take(Orders(requests={"a": (ticket, PROMPT)}))
    sending.computed(Orders(computed=[Computed("a", LAST, ([1, 2], [3, 4]), True)]))
    loading.take(Orders(loads=[Load("a", ticket, PROMPT, ([5, 6], [2, 0]), cached, LAST)]))
    for _ in range(2000):
        sending.source.step(0.005)
        sink.step(0.005)
        over, failed = loading.results()
        assert not failed
        if done := done | over:
            break
    sink.close()
    sending.source.close()
    assert done
    assert torch.equal(two.tensors[0][0][1][2], one.expected(0, 0, 1, 3))
