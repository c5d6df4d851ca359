"""Every cache of a family moves between engines with other ranks, blocks and layouts, over poisoned memory, byte by byte."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvproto import LocalError, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto.wire.enums import ItemKind
from kvproto_catalog.models import describe
from kvproto_engines.loading import Loading
from kvproto_engines.orders import Load, Orders, Table
from tests.cases import sampled
from tests.vllm.backends import indexer_k_quant_and_cache
from tests.vllm.families import F8, FAMILIES, WINDOW, Held, row
from tests.vllm.family_engines import TOKENS, Engine, Rows, first_of, hand_over, label, setups, stated

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's function that stores keys of an index."""
    made = SimpleNamespace(indexer_k_quant_and_cache=indexer_k_quant_and_cache)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=made))


@pytest.mark.parametrize(("name", "sizes"), sampled(FAMILIES, ["TP 2 to 1", "TP 1 to 2"], every=2))
def test_all_caches_of_a_family_move_between_unequal_engines(name: str, sizes: str, tmp_path: Path) -> None:
    one, two = setups(FAMILIES[name])
    pair = (two, one) if sizes == "TP 1 to 2" else (one, two)
    assert not hand_over(FAMILIES[name], pair, f"ipc://{tmp_path}/p-{{rank}}")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (row("FLASHINFER_MLA_SPARSE_DSV4", [0], 512, dtype=F8, tokens_per_state=4), "FLASHINFER_MLA_SPARSE_DSV4, 512 bytes"),
        (row("DEEPSEEK_V4_INDEXER", [0], 96, tokens_per_state=4), "DEEPSEEK_V4_INDEXER, 96 bytes of torch.uint8"),
        (row("ROCM_FLASHMLA_SPARSE_DSV4", [0], 584, tokens_per_state=4), "tokens_per_state: expected 1, got 4 in MLAAttentionSpec"),
        (row("ROCM_FLASHMLA_SPARSE_DSV4", [0], 584, model_version="deepseek_v4"), "model_version: expected None, got deepseek_v4"),
        (row("ANOTHER_TAIL", [0], 512, kind="CircularBufferSpec", ring=8), "a back end that is known, got CircularBufferSpec"),
        (row(WINDOW, [0], 200, dtype=F8, kind="SlidingWindowMLASpec", sliding_window=64), "DEEPSEEK_SPARSE_SWA, 200 bytes"),
    ],
    ids=["latents with one scale", "an index of another size", "compressed rows on ROCm", "a model on ROCm", "a ring", "a window"],
)  # fmt: skip
def test_rows_that_are_not_known_are_refused_by_name(wrong: Held, says: str) -> None:
    setup = setups([wrong])[0]
    with pytest.raises(LocalError, match=says):
        stated(0, Rows(0, wrong, setup, 0), setup)


@pytest.mark.parametrize("rows", [(8, 16), (16, 8)], ids=["8 to 16", "16 to 8"])
def test_a_worker_fetches_rings_of_other_lengths(rows: tuple[int, int], tmp_path: Path) -> None:
    """As of an engine that speculates and one that does not."""
    held = FAMILIES["DeepSeek V4.1"][4]
    assert isinstance(held, Held)
    one, two, wanted = (
        Engine([attrs.evolve(held, ring=n, block=n)], setups([held])[1]) for n in (*rows, rows[1])
    )  # fmt: skip
    one.put()
    wanted.caches[0][0].put([2], TOKENS - min(rows))
    (group,), place, prompt, ticket = two.groups[0], f"ipc://{tmp_path}/p", Prompt(range(TOKENS + 1)), new_ticket("p")
    with Source("p", one.pools[0], place) as source, Sink("d", two.pools[0], {"p": place}) as sink:
        request = source.request(ticket, prompt)
        loading = Loading(sink, {group: Table(0, state=True, ring=True)}, logging.getLogger("engine"))
        loading.take(Orders(loads=[Load("a", ticket, prompt, ([2],), 0, TOKENS)]))
        request.finish({group: one.caches[0][0].table()}, tokens=TOKENS)
        request.wait(20)
    assert torch.equal(two.caches[0][0].memory, wanted.caches[0][0].memory)


def test_a_window_that_is_computed_again_is_refused() -> None:
    """After a prefix hit of vLLM's own, rows of such a window are neither there nor fetched."""
    window = FAMILIES["DeepSeek V4.1"][0]
    assert isinstance(window, Held)
    again, setup = attrs.evolve(window, fields=window.fields | {"bounded_replay": True}), setups([window])[0]
    with pytest.raises(LocalError, match=r"got bounded_replay \(start it with --no-swa-bounded-replay"):
        stated(0, Rows(0, again, setup, 0), setup)


def test_pages_between_those_of_other_layers_are_refused() -> None:
    """Rows in planes need a block in one piece."""
    apart = setups(FAMILIES["DeepSeek V4"])[0]
    index = FAMILIES["DeepSeek V4"][3]
    assert isinstance(index, Held)
    cache = Rows(0, attrs.evolve(index, flat=False), attrs.evolve(apart, order="BNLHC"), 0)
    with pytest.raises(LocalError, match="pages without gaps"):
        stated(0, cache, apart)


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
            for at, head in itertools.product(
                range(-(-firsts[group.name] // held.tokens), TOKENS // held.tokens), range(held.heads or 1)
            ):
                item = 1 if group.kind == ItemKind.RING else 1 + at // 32
                wanted = label(number, layer, n, head, at, part.lane_bytes)
                assert array[item, at % group.rows, head].tobytes() == wanted.numpy().tobytes(), (
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
