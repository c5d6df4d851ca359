"""The caches of spec/v1/parts.md, "Caches of 2026", from one engine to another: bytes that say what they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto import Cache, DType, Geometry, LocalError, Options, Parallel, Pool, Prompt, lay_out
from kvproto.errors import PlanError, RemoteError
from kvproto.planning.kinds import KINDS
from kvproto.planning.plan import plan
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

from .doors import Two
from .test_layouts import handing

TOKENS, PAGES, POISON = 45, 24, 0xEE
PROMPT = Prompt(range(TOKENS))
WAYS = [pytest.param(Options(thread=False, pull=pull, verify="pages"), id=["push", "pull"][pull]) for pull in (0, 1)]
U8, LAYERS, FOURS, EIGHTS, SPARSE = DType.U8, range(6), (2, 4), (3, 5), (4,)
FINAL = len(LAYERS)
"""The id of what the final norm makes of the last layer's hidden state."""


def compressed(side: int) -> list[Cache]:
    """Like DeepSeek V4: rows of 4 and of 8 tokens, and the windows in a ring at one side and in pages at the other."""
    rows, latent = [16, 40][side], {"latent": (U8, 1, 24)}
    window = {"window_latent": (U8, 1, (16, 8) if side else 24)}
    windows = (
        Cache.paged("windows", LAYERS, parts=window, page=4)
        if side
        else Cache.ring("windows", LAYERS, parts=window, ring_rows=16)
    )
    return [
        windows,
        Cache.paged("c4", FOURS, parts=latent, page=rows, tokens_per_row=4),
        Cache.paged("c8", EIGHTS, parts=latent, page=[8, 16][side], tokens_per_row=8),
        Cache.paged("i4", FOURS, parts={"index": (U8, 1, 8), "index_scale": (U8, 1, 4)}, page=16, tokens_per_row=4),
        Cache.ring("s4", FOURS, parts={"compress_state": (U8, 1, 32)}, ring_rows=[8, 16][side]),
        Cache.ring("si4", FOURS, parts={"index_compress_state": (U8, 1, 16)}, ring_rows=[16, 8][side]),
        Cache.ring("s8", EIGHTS, parts={"compress_state": (U8, 1, 20)}, ring_rows=8),
    ]


def indexed(side: int) -> list[Cache]:
    """Like MiniMax-M3: index keys of one layer beside K and V of all."""
    return [
        Cache.gqa("kv", LAYERS, kv_heads=2, head_dim=4, page=[4, 8][side], dtype=U8),
        Cache.paged("index", SPARSE, parts={"index": (U8, 1, 8)}, page=[8, 4][side]),
    ]


def pending(side: int) -> list[Cache]:
    """Like Qwen4-Exp: keys that wait to be pooled, their positions and the last tokens, which are of no layer."""
    return [
        Cache.gqa("kv", LAYERS, kv_heads=2, head_dim=4, page=[4, 8][side], dtype=U8),
        Cache.paged("pooled", SPARSE, parts={"index": (U8, 2, 8)}, page=8, tokens_per_row=4),
        Cache.ring("keys", SPARSE, parts={"pending_index": (U8, 2, 8)}, ring_rows=[4, 8][side]),
        Cache.ring("positions", 1, parts={"pending_position": (U8, 1, 24)}, ring_rows=[4, 8][side]),
        Cache.state("ple", [1], parts={"ple_conv": (U8, 6, 1)}, rows=3, scratch_rows=side),
        Cache.state("ngram", 1, parts={"ngram": (U8, 1, 8)}, rows=2),
    ]


def hidden(side: int) -> list[Cache]:
    """K and V, and what three layers and the final norm hand to a draft."""
    return [
        Cache.gqa("kv", LAYERS, kv_heads=2, head_dim=4, page=4, dtype=U8),
        Cache.paged("for draft", [1, 3, 4, FINAL], parts={"hidden_rows": (U8, 1, 12)}, page=[4, 16][side]),
    ]


def looped(side: int) -> list[Cache]:
    """A layer, two layers that are passed three times, and a layer: eight caches of four layers."""
    return [Cache.gqa("kv", 1 + 2 * 3 + 1, kv_heads=2, head_dim=4, page=[4, 8][side], dtype=U8)]


MODELS: dict[str, Any] = {make.__name__: make for make in (compressed, indexed, pending, hidden, looped)}
BEGINS = {"windows": TOKENS - 12, "s4": 40, "si4": 40, "s8": 40, "keys": 44, "positions": 44}
"""From which token on the sink needs rows, of windows and of the inputs of rows that are not complete."""


def labels(part: str, layer: int, row: int, size: int) -> Any:
    """The bytes of one row of one part and layer, unlike those of any other."""
    return np.random.default_rng([*part.encode(), layer, row]).integers(0, POISON, size, np.uint8)


class Engine:
    """A pool, the pages that a request has in it, and where its rows lie."""

    def __init__(self, geometry: Geometry, seed: int) -> None:
        self.pool, self.geometry = Pool.allocate(geometry, PAGES), geometry
        random = np.random.default_rng(seed)
        self.pages = {g.name: random.permutation(PAGES)[: self._items(g)].tolist() for g in geometry.groups}

    @staticmethod
    def _items(group: Any) -> int:
        return -(-TOKENS // group.tokens_per_row // group.rows) if KINDS[group.kind].paged else 1

    def arrays(self) -> dict[tuple[str, int, str], tuple[Any, Any]]:
        """By group, layer and part: the group, and the part's array, of sections all in a row."""
        return {
            (g.name, int(layer), part): (g, [self.pool.array(g.name, int(layer), n) for n in names])
            for g, share in zip(self.geometry.groups, self.geometry.ranks[0].owns, strict=True)
            for layer in share.layers
            for part, names in _columns(g).items()
        }

    def row(self, group: Any, arrays: Any, row: int) -> Any:
        """The bytes of a row: of a section after the other."""
        table, paged = self.pages[group.name], KINDS[group.kind].paged
        at = (table[row // group.rows] if paged else table[0], row % group.rows)
        return [array[at] for array in arrays]


def _columns(group: Any) -> Mapping[str, list[str]]:
    sections = [p for p in group.parts if p.whole]
    if not sections:
        return {p.name: [p.name] for p in group.parts}
    return {sections[0].name: [f"{p.name}[{p.at or 0}:{(p.at or 0) + p.lane_bytes}]" for p in sections]}


def rows_of(group: Any) -> range:
    """The rows that a request has, whole ones alone."""
    if KINDS[group.kind].is_state:
        return range(group.live_rows)
    return range(BEGINS.get(group.name, 0) // group.tokens_per_row, TOKENS // group.tokens_per_row)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_each_row_arrives_where_it_belongs(tmp_path: Path, options: Options, model: str) -> None:
    """KVP-PLAN-EXACT, and nothing else is written."""
    here, there = (Engine(lay_out(MODELS[model](side)), side) for side in (0, 1))
    for group, arrays in here.arrays().values():
        for array in arrays:
            array[:] = POISON - 1 - group.id
    for (_, layer, part), (group, arrays) in here.arrays().items():
        for row in rows_of(group):
            parts = here.row(group, arrays, row)
            made = labels(part, layer, row, sum(p.size for p in parts))
            for p, cut in zip(parts, np.split(made, np.cumsum([p.size for p in parts])[:-1]), strict=True):
                p[...] = cut.reshape(p.shape)
    for _, arrays in there.arrays().values():
        for array in arrays:
            array[:] = POISON
    with handing(tmp_path, here.pool, there.pool, options) as both:
        fetched(both, here, there)
    for (_, layer, part), (group, arrays) in there.arrays().items():
        for row in rows_of(group):
            parts = there.row(group, arrays, row)
            came = np.concatenate([p.ravel() for p in parts])
            assert np.array_equal(came, labels(part, layer, row, came.size)), (part, layer, row)
            for p in parts:
                p[...] = POISON
        assert all((array == POISON).all() for array in arrays), (part, layer)


def fetched(both: Two, here: Engine, there: Engine) -> None:
    request = both.source.request(both.ticket, PROMPT)
    cached = {name: begin for name, begin in BEGINS.items() if name in there.pages}
    fetch = both.sink.fetch(both.ticket, PROMPT, there.pages, cached=cached)
    request.finish(here.pages)
    both.until(lambda: fetch.done)
    fetch.wait(0)


@pytest.mark.parametrize("model", MODELS)
def test_the_same_caches_are_planned_between_unequal_ranks(model: str) -> None:
    """Each byte once, from two pipeline stages of two ranks to three ranks, and back."""
    stages = {"looped": (3, 5)}.get(model, (3, 4) if model == "hidden" else (3, 3))
    depth = sum(stages)
    wide = lay_out(MODELS[model](0), Parallel(tp=2, pp=2, stages=stages), depth=depth)
    flat = lay_out(MODELS[model](1), Parallel(tp=3), depth=depth)
    for source, sink in ((wide, flat), (flat, wide)):
        found = plan(source, sink)
        moved = {
            (route.sink, route.group, box.part, layer): 0
            for route in found.routes
            for box in route.boxes
            for layer in range(box.layer_lo, box.layer_hi)
        }
        for route in found.routes:
            for box in route.boxes:
                for layer in range(box.layer_lo, box.layer_hi):
                    moved[route.sink, route.group, box.part, layer] += box.hi - box.lo
        assert moved == wanted(sink)


def wanted(sink: Geometry) -> dict[tuple[int, int, int, int], int]:
    """The bytes of a row that each rank owns, by group, part and layer."""
    groups, found = {g.id: g for g in sink.groups}, dict[tuple[int, int, int, int], int]()
    for rank in sink.ranks:
        for share in rank.owns:
            parts = groups[share.group].parts
            first = {p.name: i for i, p in reversed([*enumerate(parts)])}
            for layer in share.layers.tolist():
                for span in share.lanes:
                    key = rank.rank, share.group, first[parts[span.part].name], layer
                    found[key] = found.get(key, 0) + (span.hi - span.lo) * parts[span.part].lane_bytes
    return found


def test_what_is_of_no_layer_may_be_on_each_stage() -> None:
    """The ring of positions, which layers of both stages read; other state of no layer is on the first."""
    caches = pending(0)
    caches[3] = caches[3].on_each_stage()
    ranks = lay_out(caches, Parallel(pp=2), depth=6).ranks
    held = [{share.group: share.layers.tolist() for share in rank.owns} for rank in ranks]
    assert [of.get(3) for of in held] == [[0], [0]]
    assert [of.get(5) for of in held] == [[0], None]


def test_a_number_that_means_no_layer_is_not_layer_0() -> None:
    """KVP-GEO-W-LAYERS: two makers who do not keep to it are told, and neither gets what is not its own."""
    kv, *_, ngram = pending(0)
    theirs = Cache.state("ngram", [2**32 - 1], parts={"ngram": (U8, 1, 8)}, rows=2)
    with raises(PlanError, code=ErrorCode.LAYER_MISSING, path="groups[ngram].parts[ngram]"):
        plan(lay_out([kv, ngram]), lay_out([kv, theirs]))


def test_two_latents_of_one_name_are_refused_with_the_name_to_use() -> None:
    """The window's and the whole context's, of one layer: the advice names the part, and then a draft."""
    two = [
        Cache.paged("windows", 2, parts={"latent": (U8, 1, 24)}, page=4),
        Cache.compressed("c4", 2, dim=24, tokens_per_row=4, page_rows=4, dtype=U8),
    ]
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE, path="specs[1]") as refused:
        lay_out(two)
    assert "the window's is 'window_latent' and the whole context's 'latent'" in refused.value.advice
    assert "model=1" in refused.value.advice
    two[0] = Cache.paged("windows", 2, parts={"window_latent": (U8, 1, 24)}, page=4)
    assert len(lay_out(two).groups) == 2


def test_rows_of_several_tokens_fill_whole_pages() -> None:
    with raises(LocalError, path="Cache.page", mine="a multiple of 4, the tokens of a row"):
        Cache.paged("c4", 2, parts={"latent": (U8, 1, 24)}, page=6, tokens_per_row=4)


def test_a_sink_that_leaves_one_of_two_latents_is_refused_unless_it_says_so(tmp_path: Path) -> None:
    """KVP-PLAN-LEFT, at the door: before a byte moves, with what is left and what to say."""
    options = Options(thread=False)
    caches = compressed(1)
    here = Engine(lay_out(caches), 0)
    some = caches[:1]
    with (
        handing(tmp_path, here.pool, Engine(lay_out(some), 1).pool, options) as both,
        raises(RemoteError, code=ErrorCode.PART_MISSING, path="groups[windows].parts[window_latent]") as refused,
    ):
        fetched(both, here, Engine(lay_out(some), 1))
    assert "compress_state, index, index_compress_state, index_scale, latent" in refused.value.mine
    left = ["compress_state", "index", "index_compress_state", "index_scale", "latent"]
    there = Engine(lay_out(some, without=left), 1)
    with handing(tmp_path, here.pool, there.pool, options) as both:
        fetched(both, here, there)
