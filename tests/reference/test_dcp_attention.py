"""Attention over dealt tokens against dense attention in float64, for any group, interleave, origin and batch."""

import math
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto import Cache, Group, Parallel, lay_out
from kvproto_reference.attention.batch import Batch, Span, batch_of
from kvproto_reference.attention.lse import Base2, Partial, merge
from kvproto_reference.attention.torch_kernel import TorchKernel
from kvproto_reference.cache import KVPool, Shard
from kvproto_reference.cache.windows import first_row, window_table
from kvproto_reference.errors import EngineError
from kvproto_reference.models import ModelConfig

from .engines import close

GQA = ModelConfig(kind="gqa", hidden=8, layers=1, heads=4, kv_heads=2, head_dim=8, ffn=8)
MLA = ModelConfig(kind="mla", hidden=8, layers=1, heads=4, latent=12, rope_dim=4, nope_dim=8, v_dim=6, ffn=8)
Deal = str | tuple[int, ...]
HEADS = {"gqa": [0, 0, 1, 1], "mla": [0, 0, 0, 0]}
CONFIGS = {"gqa": GQA, "mla": MLA}


def group_of(
    config: ModelConfig, ranks: int, interleave: int, page: int, origin: int = 0, deal: Deal = "cyclic"
) -> Group:
    """The target's group of an engine whose TP ranks are one DCP group."""
    made = (
        Cache.gqa("kv", 1, kv_heads=2, head_dim=8, page=page)
        if config.kind == "gqa"
        else Cache.mla("kv", 1, latent=12, rope=4, page=page)
    )
    sizes = Parallel(tp=ranks, dcp=ranks, interleave=interleave, origin=origin, deal=deal)
    return lay_out([made], sizes).groups[0]


@st.composite
def deals(draw: Any, ranks: int) -> Deal:
    """In turn, in a zigzag, or by any table."""
    if draw(st.booleans()):
        return str(draw(st.sampled_from(["cyclic", "zigzag"])))
    more = draw(st.lists(st.integers(0, ranks - 1), max_size=4))
    return tuple(draw(st.permutations([*range(ranks), *more])))


@attrs.frozen(eq=False)
class World:
    """Sequences with all their rows in order, and the step that computes the last `count` tokens of each."""

    config: ModelConfig
    group: Group
    lengths: list[int]
    counts: list[int]
    seed: int
    heads: list[int] | None = None
    """The KV head that each query head reads, unless it is as in HEADS."""
    reach: int | None = None
    """To how many of the last tokens a token attends; older rows are gone, as their pages are used again."""

    def __attrs_post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        heads = 2 if self.config.kind == "gqa" else 1
        rows = [[torch.randn(n, heads, self.config.row_dim, generator=draw) for n in self.lengths] for _ in "kv"]
        object.__setattr__(self, "k", rows[0])
        values = rows[1] if self.config.kind == "gqa" else rows[0]
        object.__setattr__(self, "v", [v[..., : self.config.value_dim] for v in values])
        tokens = sum(self.counts)
        object.__setattr__(self, "q", 3 * torch.randn(tokens, 4, self.config.row_dim, generator=draw))

    k: list[torch.Tensor] = attrs.field(init=False)
    v: list[torch.Tensor] = attrs.field(init=False)
    q: torch.Tensor = attrs.field(init=False)

    def dense(self) -> torch.Tensor:
        """Attention of every token of the step to all rows up to its own, in float64."""
        found, at = [], 0
        kv = self.heads or HEADS[self.config.kind]
        for k, v, n, count in zip(self.k, self.v, self.lengths, self.counts, strict=True):
            for i in range(count):
                bound = n - count + i + 1
                first = max(bound - (self.reach or bound), 0)
                keys, values = k[first:bound, kv].double(), v[first:bound, kv].double()
                scores = torch.einsum("hd,mhd->hm", self.q[at + i].double(), keys) * self.config.score_scale
                found.append(torch.einsum("hm,mhw->hw", scores.softmax(-1), values))
            at += count
        return torch.stack(found)

    def new(self) -> dict[str, torch.Tensor]:
        """The rows of the step's tokens by part."""
        rows = {
            name: torch.cat([r[n - c :] for r, n, c in zip(rows, self.lengths, self.counts, strict=True)])
            for name, rows in (("k", self.k), ("v", self.v))
        }
        return rows if self.config.kind == "gqa" else {"latent": rows["k"]}

    def rank(self, cp_rank: int, whole: bool) -> tuple[TorchKernel, Batch]:
        """One rank whose pool is NaN but for the rows that it owns; without the step's own unless `whole`."""
        shard = Shard(self.group, cp_rank)
        pool = KVPool.allocate(self.config, 40, self.group.rows)
        for tensor in pool.tensors.values():
            tensor.fill_(torch.nan)
        order = iter(np.random.default_rng(self.seed).permutation(40).tolist())
        spans = []
        for k, v, n, count in zip(self.k, self.v, self.lengths, self.counts, strict=True):
            first = 0 if self.reach is None else first_row(self.reach, n - count)
            own = [next(order) for _ in range(shard.pages(n) - (0 if self.reach is None else first // self.group.rows))]
            pages = window_table(own, shard.pages(n))
            spans.append(Span(n - count, count, pages))
            held = np.arange(first, n if whole else n - count)
            slots = torch.from_numpy(shard.slots(np.array(pages), held))
            for part, rows in (("k", k), ("v", v)) if self.config.kind == "gqa" else (("latent", k),):
                pool.tensors[0, part].flatten(0, 1)[slots[slots >= 0]] = rows[held][slots >= 0]
        batch = batch_of(spans, shard)
        heads = self.heads or HEADS[self.config.kind]
        kernel = TorchKernel(pool, heads, heads, self.reach)
        kernel.plan(batch)
        return kernel, batch


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest distance of a head's output, relative to its length."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@st.composite
def worlds(draw: Any) -> World:
    config = CONFIGS[draw(st.sampled_from(["gqa", "mla"]))]
    ranks = draw(st.integers(1, 8))
    run, page = draw(st.sampled_from([1, 2, 3, 4, 5, 16])), draw(st.sampled_from([1, 4, 7]))
    group = group_of(config, ranks, run, page, deal=draw(deals(ranks)))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    counts = [draw(st.integers(1, n)) for n in lengths] if draw(st.booleans()) else [1] * len(lengths)
    group = attrs.evolve(group, rows=max(group.rows, 4))  # forty pages hold any of these
    return World(config, group, lengths, counts, draw(st.integers(0, 999)))


@settings(max_examples=120, deadline=None)
@given(worlds())
def test_any_deal_is_dense_attention(world: World) -> None:
    """In one pass where every span is one token, else in a pass over the prefix and a causal one; and token by token."""
    wanted = world.dense()
    single = all(count == 1 for count in world.counts)
    over_pool, by_token = [], []
    for cp_rank in range(world.group.cp_size):
        kernel, batch = world.rank(cp_rank, whole=single)
        assert batch.whole == single
        over_pool.append(kernel.pool(0, world.q))
        by_token.append(world.rank(cp_rank, whole=True)[0].pool_by_token(0, world.q))
    if not single:
        over_pool.append(kernel.new(world.q, world.new()))
    assert error(merge(over_pool).out, wanted) < 1e-5
    assert error(merge(by_token).out, wanted) < 1e-5


def test_steps_that_can_be_captured_attend_alike_in_arrays_that_stay_where_they_are() -> None:
    """Steps with as many tokens, of sequences that grow, and with tables in which there is room for as many pages."""
    config, group = CONFIGS["mla"], group_of(CONFIGS["mla"], 3, 1, 4)
    pool = KVPool.allocate(config, 40, group.rows)
    for tensor in pool.tensors.values():
        tensor.normal_()
    kernel, plain = (TorchKernel(pool, HEADS["mla"], HEADS["mla"], fixed=fixed) for fixed in (True, False))
    tables, places = [list(range(n, 40, 5)) for n in range(3)], set()
    for step, lengths in enumerate([(1, 2, 30), (9, 70, 31), (80, 3, 1)]):
        q = torch.randn(3, len(HEADS["mla"]), config.row_dim)
        batch = batch_of([Span(n - 1, 1, t[: 5 + step]) for n, t in zip(lengths, tables, strict=True)], Shard(group, 1))
        assert plain.repeats(batch) is None
        assert kernel.repeats(batch) == 8
        for each in (kernel, plain):
            each.plan(batch)
        found, wanted = kernel.pool(0, q), plain.pool(0, q)
        assert torch.allclose(found.out, wanted.out, atol=1e-6)
        assert torch.allclose(found.lse, wanted.lse, atol=1e-6)
        places.add((*(t.data_ptr() for t in kernel._step.by_span), kernel._step.positions.data_ptr()))
    assert len(places) == 1
    chunk = batch_of([Span(0, 3, tables[0])], Shard(group, 1))
    assert kernel.repeats(chunk) is None


@settings(max_examples=120, deadline=None)
@given(worlds(), st.booleans())
def test_a_rank_that_has_all_rows_attends_in_one_pass(world: World, uneven: bool) -> None:
    """Also if one KV head has more query heads than another; rows of other sequences are NaN, and never read."""
    heads = [0, 1, 1, 1] if uneven and world.config.kind == "gqa" else None
    alone = attrs.evolve(world, group=group_of(world.config, 1, 1, world.group.rows), heads=heads)
    assert error(alone.rank(0, whole=True)[0].alone(0, alone.q), alone.dense()) < 1e-5


@settings(max_examples=120, deadline=None)
@given(worlds(), st.integers(1, 12))
def test_a_sliding_window_is_dense_attention_to_its_last_tokens(world: World, reach: int) -> None:
    """In one pass, as a rank with all rows attends; over the pool and the new tokens; and token by token."""
    near = attrs.evolve(world, group=group_of(world.config, 1, 1, world.group.rows), reach=reach)
    wanted, (kernel, _) = near.dense(), near.rank(0, whole=True)
    assert error(kernel.alone(0, near.q), wanted) < 1e-5
    assert error(kernel.pool_by_token(0, near.q).out, wanted) < 1e-5
    single = all(count == 1 for count in near.counts)
    before, _ = near.rank(0, whole=single)
    parts = [before.pool(0, near.q), *([] if single else [before.new(near.q, near.new())])]
    assert error(merge(parts).out, wanted) < 1e-5


def test_ranks_without_tokens_are_neutral() -> None:
    world = World(GQA, group_of(GQA, 8, 1, 4), [3], [1], 1)
    parts = [world.rank(r, whole=True)[0].pool(0, world.q) for r in range(8)]
    assert [bool(torch.isneginf(p.lse).all()) for p in parts] == [False] * 3 + [True] * 5
    assert not any(p.out.any() for p in parts[3:])
    assert error(merge(parts).out, world.dense()) < 1e-5
    nothing = merge(parts[3:])
    assert not nothing.out.any()
    assert torch.isneginf(nothing.lse).all()


def test_the_wrong_base_is_noticed() -> None:
    """Base-2 logarithms taken for natural ones pass a smoke test; this is what they do to an answer."""
    world = World(MLA, group_of(MLA, 3, 1, 4), [17, 9], [1, 1], 2)
    parts = [world.rank(r, whole=True)[0].pool(0, world.q) for r in range(3)]
    base2 = [Base2(p.out, p.lse / math.log(2), torch.ones(2)) for p in parts]
    right = merge([p.natural() for p in base2])
    assert error(right.out, world.dense()) < 1e-5
    assert error(merge([Partial(p.out, p.log2) for p in base2]).out, world.dense()) > 1e-2


def test_what_a_kernel_leaves_in_empty_rows_never_enters() -> None:
    out, some = torch.full((2, 4, 8), torch.nan), torch.tensor([False, True])
    out[1] = 1.0
    for left in (torch.nan, math.inf, 0.0, -3.0):
        part = Partial.of(out, torch.tensor([[left] * 4, [0.5] * 4]), some)
        assert torch.equal(merge([part, part]).out[0], torch.zeros(4, 8))
        close(merge([part, part]).out[1], torch.ones(4, 8))


def test_a_log_sum_exp_of_another_shape_or_type_is_refused() -> None:
    with pytest.raises(EngineError, match="float32"):
        Partial(torch.zeros(3, 4, 8), torch.zeros(3, 4, dtype=torch.bfloat16))
    with pytest.raises(EngineError, match="tokens, heads"):
        Partial(torch.zeros(3, 4, 8), torch.zeros(4, 3))


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 9), st.integers(1, 7), st.integers(1, 9), st.integers(0, 40), st.integers(0, 90), st.data())
def test_pages_slots_and_lengths_agree_with_counting(
    ranks: int, interleave: int, page: int, origin: int, more: int, data: st.DataObject
) -> None:
    group = group_of(MLA, ranks, interleave, page, origin, data.draw(deals(ranks)))
    length = origin + more
    shards = [Shard(group, r) for r in range(ranks)]
    runs = [*range(ranks)] if group.order is None else group.order.tolist()
    owner = [runs[((t - origin) // interleave) % len(runs)] for t in range(origin, length)]
    for rank, shard in enumerate(shards):
        mine = [t for t, who in zip(range(origin, length), owner, strict=True) if who == rank]
        assert shard.rows(np.array(length)) == len(mine)
        assert shard.pages(length) == -(-max((owner.count(r) for r in range(ranks)), default=0) // page)
        table = np.arange(100, 100 + shard.pages(length))
        slots = shard.slots(table, np.arange(origin, length))
        # a rank's tokens fill its pages in their order, without a gap
        assert slots[slots >= 0].tolist() == [100 * page + i for i in range(len(mine))]
        assert (np.arange(origin, length)[slots >= 0]).tolist() == mine
