"""The same cache in two layouts, through a Source and a Sink: every byte arrives, and nothing else is written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto import Cache, DType, LocalError, Options, Pool, Prompt, Sink, Source, allocate, lay_out, new_ticket
from kvproto.errors import RemoteError
from kvproto.session import limits
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

from .doors import Two, address_in

TOKENS, PAGES, POISON = 27, 10, 0xEE
PROMPT = Prompt(range(TOKENS))
WAYS = [
    pytest.param(Options(thread=False, pull=pull, verify="pages", debug_pages=True), id="pull" if pull else "push")
    for pull in (False, True)
]
LATENT = {"latent": 12, "rope": 4, "dtype": DType.U8}


@contextmanager
def handing(folder: Path, here: Pool, there: Pool, options: Options) -> Iterator[Two]:
    address = address_in(folder)
    with (
        Source("prefill", here, address, options) as source,
        Sink("decode", there, {"prefill": address}, options) as sink,
    ):
        yield Two(source, sink)


def hand_over(both: Two, tables: tuple[dict[str, Any], dict[str, Any]], **fetch: Any) -> Any:
    request = both.source.request(both.ticket, PROMPT)
    found = both.sink.fetch(both.ticket, PROMPT, tables[1], **fetch)
    request.finish(tables[0])
    both.until(lambda: found.done)
    return found.wait(0)


def noisy(pool: Pool, layers: Sequence[int], *names: str) -> None:
    for layer in layers:
        for n, name in enumerate(names):
            array = pool.array("kv", layer, name)
            array[:] = np.random.default_rng([layer, n]).integers(0, 256, array.shape, np.uint8)


def poisoned(pool: Pool, layers: Sequence[int], *names: str) -> None:
    for layer in layers:
        for name in names:
            pool.array("kv", layer, name)[:] = POISON


SECTIONS = {True: ("latent[0:12]", "latent[12:16]"), False: ("latent",)}


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("split", [True, False])
def test_a_latent_in_two_buffers_and_in_one(tmp_path: Path, options: Options, split: bool) -> None:
    here, there = (
        Pool.allocate(lay_out([Cache.mla("kv", 2, page=page, split=apart, **LATENT)]), PAGES)
        for page, apart in ((4, split), (8, not split))
    )
    noisy(here, range(2), *SECTIONS[split])
    poisoned(there, range(2), *SECTIONS[not split])
    tables = {"kv": [3, 1, 2, 7, 9, 4, 5]}, {"kv": [5, 0, 9, 2]}
    with handing(tmp_path, here, there, options) as both:
        hand_over(both, tables, cached=5)
        at = np.arange(TOKENS)
        for layer in range(2):
            sent, came = (
                np.concatenate(
                    [p.array("kv", layer, n)[np.array(table["kv"])[at // page], at % page] for n in names], axis=-1
                )
                for p, table, page, names in (
                    (here, tables[0], 4, SECTIONS[split]),
                    (there, tables[1], 8, SECTIONS[not split]),
                )
            )
            assert np.array_equal(sent[5:], came[5:])
            assert (came[:5] == POISON).all()


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("rings", ["source", "sink"])
def test_a_ring_and_pages(tmp_path: Path, options: Options, rings: str) -> None:
    """The last 10 tokens, from a ring of 12 rows to pages of 4, and from pages to a ring of 10."""
    ring = {"kv_heads": 2, "head_dim": 4, "dtype": DType.U8}
    sides = {
        True: lambda rows: Cache.window("kv", 1, ring_rows=rows, **ring),
        False: lambda _: Cache.gqa("kv", 1, page=4, **ring),
    }
    here, there = (Pool.allocate(lay_out([sides[rings == who](n)]), PAGES) for who, n in (("source", 12), ("sink", 10)))
    noisy(here, [0], "k", "v")
    poisoned(there, [0], "k", "v")
    table, slot = [3, 1, 2, 7, 9, 4, 5], [6]
    tables = ({"kv": slot}, {"kv": table}) if rings == "source" else ({"kv": table}, {"kv": slot})
    at = np.arange(TOKENS - 10, TOKENS)
    with handing(tmp_path, here, there, options) as both:
        hand_over(both, tables, cached=TOKENS - 10)
        places = {
            who: (6, at % n) if rings == who else (np.array(table)[at // 4], at % 4)
            for who, n in (("source", 12), ("sink", 10))
        }
        for part in ("k", "v"):
            came = there.array("kv", 0, part)
            assert np.array_equal(came[places["sink"]], here.array("kv", 0, part)[places["source"]])
            came[places["sink"]] = POISON
            assert (came == POISON).all()


def test_a_ring_that_has_forgotten_is_refused(tmp_path: Path) -> None:
    """KVP-GRANT-HELD: with the number; with `late`, what the ring still holds comes."""
    size = {"kv_heads": 2, "head_dim": 4, "dtype": DType.U8}
    here = Pool.allocate(lay_out([Cache.window("kv", 1, ring_rows=12, **size)]), PAGES)
    there = Pool.allocate(lay_out([Cache.gqa("kv", 1, page=4, **size)]), PAGES)
    noisy(here, [0], "k", "v")
    with handing(tmp_path, here, there, Options(thread=False)) as both:
        tables = {"kv": [6]}, {"kv": [3, 1, 2, 7, 9, 4, 5]}
        with raises(RemoteError, code=ErrorCode.NOT_HELD, path="grants[0].first") as refused:
            hand_over(both, tables)
        assert "15" in refused.value.mine
        both.ticket = new_ticket("prefill")
        assert hand_over(both, tables, late=True).since == {"kv": TOKENS - 12}
        at = np.arange(TOKENS - 12, TOKENS)
        came = there.array("kv", 0, "k")[np.array(tables[1]["kv"])[at // 4], at % 4]
        assert np.array_equal(came, here.array("kv", 0, "k")[6, at % 12])


def tensors(number: int) -> list[Any]:
    found = [np.from_dlpack(allocate(PAGES * 64)).reshape(PAGES, 4, 1, 16) for _ in range(number)]
    for n, tensor in enumerate(found):
        tensor[:] = np.random.default_rng(n).integers(0, 256, tensor.shape, np.uint8)
    return found


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("stated", [(0, 1), (0, 1, 2, 3)])
def test_layers_that_share_a_cache(tmp_path: Path, options: Options, stated: tuple[int, ...]) -> None:
    """Layers 2 and 3 of the source read the caches of 0 and 1; the sink states those alone, or a copy for each layer."""
    own = tensors(2)
    here = Pool(lay_out([Cache.mla("kv", 4, page=4, **LATENT)]), {"kv": [*own, *own]}, shared=True)
    there = Pool.allocate(lay_out([Cache.mla("kv", stated, page=4, **LATENT)], depth=4), PAGES)
    with handing(tmp_path, here, there, options) as both:
        hand_over(both, ({"kv": [3, 1, 2, 7, 9, 4, 5]}, {"kv": [5, 0, 9, 2, 1, 7, 8]}))
        at = np.arange(TOKENS)
        for layer in stated:
            came = there.array("kv", layer, "latent")[np.array([5, 0, 9, 2, 1, 7, 8])[at // 4], at % 4]
            assert np.array_equal(came, own[layer % 2][np.array([3, 1, 2, 7, 9, 4, 5])[at // 4], at % 4])


@pytest.mark.parametrize("options", [Options(), Options(pull=True)], ids=["push", "pull"])
def test_scales_of_pages_come_with_the_rows_that_they_scale(options: Options, tmp_path: Path) -> None:
    """Rows and scales that begin apart would leave a page with another's scale: refused at both doors, by name."""
    heads = {"kv_heads": 2, "head_dim": 4}
    caches = [Cache.gqa("kv", 1, page=4, dtype=DType.U8, **heads), Cache.page_scales("sc", 1, kv_heads=2, page=4)]
    here, there = (Pool.allocate(lay_out(caches), PAGES) for _ in "ab")
    mine, yours = [3, 1, 2, 7, 9, 4, 5], [5, 0, 9, 2, 1, 7, 8]
    tables = {"kv": mine, "sc": mine}, {"kv": yours, "sc": yours}
    for name, part in (("kv", "k"), ("kv", "v"), ("sc", "k_scale"), ("sc", "v_scale")):
        array = here.array(name, 0, part)
        array[:] = np.random.default_rng(1).integers(1, 256, array.shape, np.uint8)
    with handing(tmp_path, here, there, options) as both:
        for cached in ({"kv": 5, "sc": 8}, {"kv": 5}, {"kv": 4, "sc": 8}, {"kv": 8, "sc": 4}):
            with raises(LocalError, code=ErrorCode.BAD_GRANT, path='cached["sc"]') as refused:
                both.sink.fetch(both.ticket, PROMPT, tables[1], cached=cached)
            assert refused.value.advice == f"fetch both from token {min(cached['kv'], cached.get('sc', 0)) // 4 * 4} on"
        with raises(LocalError, code=ErrorCode.BAD_GRANT, path="late"):
            both.sink.fetch(both.ticket, PROMPT, tables[1], late=["kv"])
        request = both.source.request(both.ticket, PROMPT)
        found = both.sink.fetch(both.ticket, PROMPT, tables[1], late=True)
        with raises(LocalError, code=ErrorCode.BAD_GRANT, path='since["sc"]'):
            request.finish(tables[0], since={"kv": 5, "sc": 8})
        request.finish(tables[0], since=5)
        assert found.wait(10).since == {"kv": 5, "sc": 4}
        request.wait(10)
        for part in ("k_scale", "v_scale"):
            came, sent = there.array("sc", 0, part), here.array("sc", 0, part)
            assert np.array_equal(came[yours[1:]], sent[mine[1:]])
            assert not came[yours[0]].any()


def test_layers_that_overlap_in_part(tmp_path: Path) -> None:
    """They are refused by the tensors' names; those that interleave in any way that strides can say are not."""
    geometry = lay_out([Cache.mla("kv", 2, page=4, **LATENT)])
    whole = np.from_dlpack(allocate(2 * PAGES * 64))
    for begin, shared in ((32, False), (32, True), (PAGES * 64 - 1, False)):
        both = [whole[at : at + PAGES * 64].reshape(PAGES, 4, 1, 16) for at in (0, begin)]
        with raises(LocalError, code=ErrorCode.BAD_COLUMNS, path='tensors["kv"][1]') as refused:
            Pool(geometry, {"kv": both}, shared=shared)
        assert 'tensors["kv"][0]' in refused.value.mine
    Pool(geometry, {"kv": [whole[at : at + PAGES * 64].reshape(PAGES, 4, 1, 16) for at in (0, PAGES * 64)]}).close()
    # layers in each row and in each page; K and V in each row of a page that is padded
    Pool(geometry, {"kv": whole.reshape(PAGES, 4, 2, 16)}, axes="page token layer dim").close()
    Pool(geometry, {"kv": whole.reshape(PAGES, 2, 4, 16)}, axes="page layer token dim").close()
    heads = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=2, page=4, dtype=DType.U8)])
    padded = np.lib.stride_tricks.as_strided(whole, (PAGES, 2, 4, 2, 2, 2), (100, 48, 10, 5, 2, 1))
    Pool(heads, {"kv": padded}, axes="page layer token part head dim").close()
    crossed = np.lib.stride_tricks.as_strided(whole, padded.shape, (100, 48, 10, 3, 2, 1))
    with pytest.raises(LocalError, match="some of the same bytes"):
        Pool(heads, {"kv": crossed}, axes="page layer token part head dim")


def test_more_allocations_than_a_register_may_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-REG-MANY: the engine hears of it when it makes its pool, and not from each of its peers."""
    monkeypatch.setattr(limits, "MAX_REGIONS", 3)
    geometry = lay_out([Cache.gqa("kv", 2, kv_heads=1, head_dim=4, page=4, dtype=DType.U8)])
    shape = PAGES, 4, 1, 4
    parts = {name: [np.from_dlpack(allocate(16 * PAGES)).reshape(shape) for _ in range(2)] for name in ("k", "v")}
    with raises(LocalError, code=ErrorCode.TOO_LARGE, path="tensors"):
        Pool(geometry, {"kv": parts})
    monkeypatch.setattr(limits, "MAX_REGIONS", 4)
    Pool(geometry, {"kv": parts})


@pytest.mark.parametrize(
    ("word", "strides"), [("page", (32, 16, 8, 1)), ("token", (64, 8, 8, 1)), ("head", (64, 16, 4, 1))]
)
def test_neighbours_that_overlap(word: str, strides: tuple[int, ...]) -> None:
    geometry = lay_out([Cache.paged("kv", 1, parts={"acme.x": (DType.U8, 2, 8)}, page=4)])
    whole = np.from_dlpack(allocate(PAGES * 64))
    given = np.lib.stride_tricks.as_strided(whole, (PAGES, 4, 2, 8), strides)
    with raises(LocalError, code=ErrorCode.BAD_COLUMNS, path=f'tensors["kv"][0] axis "{word}"'):
        Pool(geometry, {"kv": [given]})


def test_a_sink_states_layers_that_share_a_cache_once(tmp_path: Path) -> None:
    own = tensors(1)
    pool = Pool(lay_out([Cache.mla("kv", 2, page=4, **LATENT)]), {"kv": own * 2}, shared=True)
    with raises(LocalError, code=ErrorCode.ITEM_ALIAS, path="pool") as refused:
        Sink("decode", pool, {"prefill": address_in(tmp_path)})
    assert "the layer that writes it" in refused.value.advice


def test_scales_of_pages_are_fetched_from_where_a_page_begins(tmp_path: Path) -> None:
    """KVP-GRANT-ROW: the sink's own call says so, and the last page, which is not full, comes with its scale."""
    caches = [Cache.mla("kv", 1, page=4, **LATENT), Cache.page_scales("scales", 1, of="latent", page=4)]
    here, there = (Pool.allocate(lay_out(caches), PAGES) for _ in "ab")
    array = here.array("scales", 0, "latent_scale")
    array[:] = np.random.default_rng(1).integers(0, 256, array.shape, np.uint8)
    mine, yours = [3, 1, 2, 7, 9, 4, 5], [5, 0, 9, 2, 1, 7, 8]
    tables = {"kv": mine, "scales": mine}, {"kv": yours, "scales": yours}
    with handing(tmp_path, here, there, Options(thread=False)) as both:
        with raises(LocalError, code=ErrorCode.BAD_GRANT, path='cached["scales"]'):
            both.sink.fetch(both.ticket, PROMPT, tables[1], cached=5)
        hand_over(both, tables, cached=4)
        came = there.array("scales", 0, "latent_scale")
        assert np.array_equal(came[yours[1:]], array[mine[1:]])
        assert not came[yours[0]].any()
