"""Pools over any layout, against the engine's own view of its tensors; and page tables against counting."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto import Cache, DType, KvprotoError, Pool, allocate, lay_out
from kvproto.copying.grants import items_needed
from kvproto.planning.geometry import Geometry, Rank, gqa, owns
from kvproto.rank.page_tables import PageRules, grants_of

WORDS = ("layer", "part", "page", "token", "head", "dim")


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Geometry, Any, str, dict[tuple[int, str], np.ndarray[Any, Any]]]:
    """A geometry, what an engine passes, its axes, and by layer and part the array [page, token, head, byte] that it means."""
    layers, pages, tokens, heads, dim = (draw(st.integers(1, 3)) for _ in range(5))
    joint, stacked = draw(st.booleans()), draw(st.booleans())
    words = [w for w in draw(st.permutations(WORDS[:5])) if (w != "part" or joint) and (w != "layer" or stacked)]
    words.append("dim")
    size = {"layer": layers, "part": 2, "page": pages, "token": tokens, "head": heads, "dim": dim}
    geometry = lay_out([Cache.gqa("kv", layers, kv_heads=heads, head_dim=dim, page=tokens, dtype=DType.U8)])
    wanted: dict[tuple[int, str], np.ndarray[Any, Any]] = {}

    def tensor() -> np.ndarray[Any, Any]:
        padded = [size[w] + (draw(st.integers(0, 2)) if w != "dim" else 0) for w in words]
        gap = draw(st.integers(0, 3))  # after the head's bytes
        whole = np.from_dlpack(allocate(int(np.prod(padded[:-1])) * (dim + gap)))
        whole[:] = np.random.default_rng(len(wanted)).integers(0, 256, whole.shape, np.uint8)
        return whole.reshape(*padded[:-1], dim + gap)[tuple(slice(size[w]) for w in words)]

    def means(array: np.ndarray[Any, Any], layer: int, part: str) -> None:
        taken = array
        left = list(words)
        for word, index in (("layer", layer), ("part", "kv".index(part))):
            if word in left:
                taken = np.take(taken, [index], left.index(word)).squeeze(left.index(word))
                left.remove(word)
        wanted[layer, part] = taken.transpose([left.index(w) for w in ("page", "token", "head", "dim")])

    per_part: dict[str, Any] = {}
    for part in ["kv"] if joint else ["k", "v"]:
        per_part[part] = tensor() if stacked else [tensor() for _ in range(layers)]
        for layer in range(layers):
            for p in part:
                means(per_part[part] if stacked else per_part[part][layer], layer, p)
    return geometry, per_part["kv"] if joint else per_part, " ".join(words), wanted


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_a_pool_sees_what_the_engine_means(
    made: tuple[Geometry, Any, str, dict[tuple[int, str], np.ndarray[Any, Any]]],
) -> None:
    geometry, given_tensors, axes, wanted = made
    pool = Pool(geometry, {"kv": given_tensors}, axes=axes)
    for (layer, part), array in wanted.items():
        assert np.array_equal(pool.array("kv", layer, part), array)


@settings(max_examples=300, deadline=None)
@given(
    cp_size=st.integers(1, 5), interleave=st.integers(1, 9), page=st.integers(1, 8), tokens=st.integers(1, 120),
    part=st.floats(0, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_pages_of_a_fetch(cp_size: int, interleave: int, page: int, tokens: int, part: float, seed: int) -> None:
    """What is trimmed off a page table, by counting tokens one by one; clause KVP-GRANT-COUNT."""
    cached = int(part * tokens)
    group = gqa(0, "kv", 0, 1, 4, page, cp_size=cp_size, interleave=interleave)
    ranks = tuple(Rank(rank=r, owns=(owns(group, [0], cp_rank=r),)) for r in range(cp_size))
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=ranks)
    for rank in range(cp_size):
        mine = [t for t in range(tokens) if (t // interleave) % cp_size == rank]
        wanted = sorted({i // page for i, t in enumerate(mine) if t >= cached})
        have = -(-len(mine) // page)
        table = np.random.default_rng(seed).permutation(200)[: have + 3]
        rules = PageRules(Pool.allocate(geometry, 200, rank=rank).layout)
        grant = grants_of(rules, {"kv": table}, cached, tokens)[0]
        assert grant.items is not None
        assert grant.items.tolist() == table[wanted].tolist()
        assert (grant.first, grant.count, grant.valid) == (cached, tokens - cached, tokens)
        assert items_needed(group, rank, cached, tokens - cached) == len(wanted)
        if have:
            with pytest.raises(KvprotoError, match=f"{have} pages"):
                grants_of(rules, {"kv": table[: have - 1]}, cached, tokens)
