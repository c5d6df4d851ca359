"""The mapping faults of the field, a test each; tools/prove/bugs.toml plants the faulty rules.

Every value of a source pool is the name of its own global coordinate; after the hand-over each value of every sink pool
is compared.
"""

from collections.abc import Sequence

import attrs
import numpy as np

from kvproto.copying.execute import execute
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.planning.deals import owned_before, owner
from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import DType

TOKENS = 23
"""Of the request, at the source."""
_UNWRITTEN = -1


def name_of(model: int, layer: int, part: str, token: int, lane: int) -> int:
    return ((((model * 64 + layer) * 256 + ord(part[0])) * 1024 + token) * 64) + lane


class Memory:
    """A rank's pool of 8-byte lanes, its items in an order of its own."""

    def __init__(self, geometry: Geometry, rank: int, first: int, count: int, filled: bool) -> None:
        groups = {g.id: g for g in geometry.groups}
        share_of = next(r for r in geometry.ranks if r.rank == rank)
        need = {o.group: items_needed(groups[o.group], o.cp_rank, first, count) for o in share_of.owns}
        columns, length = columns_without_gaps(geometry, rank, {g: n + 2 for g, n in need.items()})
        self.side = RankLayout(geometry, rank, columns)
        self.data = np.full(length, 0xFF, np.uint8)
        self.windows = {g: Window(first, count, (np.arange(n)[::-1] * 5 + 3) % (n + 2)) for g, n in need.items()}
        for g, n in need.items():  # a permutation for every n?
            if len(set(self.windows[g].items.tolist())) < n:
                self.windows[g] = Window(first, count, np.arange(n)[::-1] + 1)
        if filled:
            for at, name in self.places():
                self.data[at : at + 8].view(np.int64)[0] = name

    def places(self) -> list[tuple[int, int]]:
        """(byte, name) of every value of the window that the rank owns."""
        found = []
        for share in next(r for r in self.side.geometry.ranks if r.rank == self.side.rank).owns:
            group, columns, window = (
                self.side.groups[share.group],
                self.side.columns[share.group],
                self.windows[share.group],
            )
            base = owned_before(group, share.cp_rank, window.first) // group.rows
            for token in range(window.first, window.first + window.count):
                if int(owner(group, np.array([token]))[0]) != share.cp_rank:
                    continue
                head, row = divmod(owned_before(group, share.cp_rank, token), group.rows)
                item = int(window.items[head - base])
                for i, layer in enumerate(share.layers.tolist()):
                    for p, part in enumerate(group.parts):
                        k = i * len(group.parts) + p
                        lanes = [x for s in share.lanes if s.part == p for x in range(s.lo, s.hi)]
                        for n, lane in enumerate(lanes):
                            at = columns.offset[k] + item * columns.item_stride[k] + row * columns.row_stride[k]
                            at += n * columns.lane_stride[k]
                            found.append((int(at), name_of(group.model, layer, part.name, token, lane)))
        return found


def hand_over(source: Geometry, sink: Geometry, first: int = 0, count: int = TOKENS, held: int = TOKENS) -> int:
    """Run the whole plan for tokens [first, first + count) of `held`; every value of every sink is right. Returns the bytes."""
    made = plan(source, sink)
    here = {r.rank: Memory(source, r.rank, 0, held, True) for r in source.ranks}
    there = {r.rank: Memory(sink, r.rank, first, count, False) for r in sink.ranks}
    moved = 0
    for a, b in sorted({(r.source, r.sink) for r in made.routes}):
        program = Pair(made.between(a, b), here[a].side, there[b].side).lower(here[a].windows, there[b].windows)
        moved += execute(program, {0: memoryview(here[a].data)}, {0: memoryview(there[b].data)})
    for rank, memory in there.items():
        wanted = np.full(memory.data.size // 8, _UNWRITTEN, np.int64)
        for at, name in memory.places():
            wanted[at // 8] = name
        wrong = np.flatnonzero(wanted != memory.data.view(np.int64))
        assert not wrong.size, f"sink rank {rank}: {wrong.size} of {wanted.size} values are wrong"
    return moved


def heads(number: int, page: int = 4, layers: int | Sequence[int] = 2, model: int = 0) -> Cache:
    """A GQA cache whose heads are 8 bytes."""
    return Cache.gqa("heads", layers, kv_heads=number, head_dim=2, page=page, dtype=DType.F32, model=model)


def latent(layers: int = 4, page: int = 4) -> Cache:
    return Cache.mla("latent", layers, latent=1, rope=1, page=page, dtype=DType.F32)


def test_heads_dropped() -> None:
    """Sizes that do not divide: every head arrives, from the rank that has it."""
    for number, sink, source in (
        (12, 4, 6),
        (6, 2, 3),
        (12, 3, 4),
        (24, 4, 6),
        (12, 6, 4),
        (6, 3, 2),
        (12, 4, 3),
        (24, 6, 4),
    ):
        moved = hand_over(lay_out([heads(number)], Parallel(tp=source)), lay_out([heads(number)], Parallel(tp=sink)))
        assert moved == number * 8 * 2 * 2 * TOKENS


def test_replicas_written_again() -> None:
    """A latent that sixteen ranks hold arrives once at each sink."""
    moved = hand_over(lay_out([latent()], Parallel(tp=16)), lay_out([latent()], Parallel(tp=2)))
    assert moved == 2 * 4 * TOKENS * 8


def test_empty_ranks_shadow() -> None:
    """Only ranks 1 and 2 of the source hold heads (the upper and the lower half); the others hold the target alone."""
    both = [latent(), heads(2, model=1)]
    source = lay_out(both, Parallel(tp=4))
    none = source.ranks[0].owns[:1]
    low, high = source.ranks[0].owns[1], source.ranks[3].owns[1]
    owns = (none, (none[0], high), (none[0], low), none)
    ranks = tuple(attrs.evolve(r, owns=o) for r, o in zip(source.ranks, owns, strict=True))
    hand_over(attrs.evolve(source, ranks=ranks), lay_out(both, Parallel(tp=2)))


def test_draft_shards_lost() -> None:
    """MLA target, whole on each rank; GQA draft, a head on each: one sink rank needs the draft of all four."""
    both = [latent(), heads(4, layers=1, model=1)]
    source, sink = lay_out(both, Parallel(tp=4)), lay_out(both, Parallel(tp=1))
    hand_over(source, sink)
    assert [plan(source, sink).send_flags(p, 0) for p in range(4)] == [(0, 1)] * 4


def test_v_over_k() -> None:
    """The source states V before K."""
    parts = dict.fromkeys(("v", "k"), (DType.F32, 2, 8))
    hand_over(lay_out([Cache.paged("kv", 2, parts=parts, page=4)]), lay_out([heads(2)]))


def test_layers_by_position() -> None:
    """Stages of 1, 3 and 2 layers to stages of 2 and 4: layers pair by id."""
    source = lay_out([heads(2, layers=6)], Parallel(pp=3, stages=(1, 3, 2)))
    hand_over(source, lay_out([heads(2, layers=6)], Parallel(pp=2, stages=(2, 4))))


def test_pages_by_count() -> None:
    """A prefix hit at the sink and a source that holds more: items pair by token, with other page sizes too."""
    for first, count in ((0, 23), (8, 15), (4, 11), (5, 9), (0, 4), (22, 1)):
        for here, there in ((4, 4), (4, 8), (8, 4), (1, 4), (4, 1), (3, 5)):
            hand_over(lay_out([heads(1, here)]), lay_out([heads(1, there)]), first, count)


def test_pages_of_a_long_prompt_by_count() -> None:
    """The same with more pages than are lowered one by one."""
    for here, there in ((4, 4), (4, 8), (1, 4)):
        hand_over(lay_out([heads(1, here)]), lay_out([heads(1, there)]), 16, 280, held=300)


def test_tokens_by_position() -> None:
    """Prefill CP 2, interleave 3, to decode DCP 4, interleave 2, and back."""
    dealt = lay_out([latent()], Parallel(cp=2, interleave=3)), lay_out([latent()], Parallel(tp=4, dcp=4, interleave=2))
    for source, sink in (dealt, dealt[::-1]):
        hand_over(source, sink, 5, 17)


def test_tokens_by_a_table() -> None:
    """A zigzag of CP 2 to a zigzag of DCP 4 in other runs, and to shares of unequal size, both ways."""
    zigzag = lay_out([latent()], Parallel(cp=2, interleave=3, deal="zigzag"))
    for sizes in (
        Parallel(tp=4, dcp=4, interleave=2, deal="zigzag"),
        Parallel(tp=2, dcp=2, interleave=2, deal=(0, 1, 1)),
    ):
        for source, sink in ((zigzag, lay_out([latent()], sizes)), (lay_out([latent()], sizes), zigzag)):
            hand_over(source, sink, 5, 17)
