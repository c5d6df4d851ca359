"""Pages of vLLM's CPU back end: the order of their elements is measured, and stated so that any other layout meets it."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

import kvproto
from kvproto import DType, LocalError, Pool, Prompt, RemoteError, Sink, Source, lay_out, new_ticket
from kvproto.copying import execute
from kvproto_engines.memory import ShareableMemory
from kvproto_engines.pages import Half, cache_of, half_of, measured, views_of

LAYERS, HEADS, DIM, BLOCKS, TOKENS = 2, 2, 8, 6, 45
ORDERS: dict[str, Any] = {
    "rows": lambda tokens, t, d: t * DIM + d,
    "transposed": lambda tokens, t, d: d * tokens + t,
    "pairs": lambda tokens, t, d: d // 2 * tokens * 2 + t * 2 + d % 2,
    "tiles": lambda tokens, t, d: t // 8 * 8 * DIM + d * 8 + t % 8,
}
"""Where element d of token t lies in a half of a page."""


def positions(order: str, tokens: int) -> Any:
    t, d = np.meshgrid(np.arange(tokens), np.arange(DIM), indexing="ij")
    return ORDERS[order](tokens, t, d)


def halves(k: str, v: str, tokens: int) -> dict[str, Half]:
    return {part: half_of(positions(order, tokens), part) for part, order in (("k", k), ("v", v))}


@pytest.mark.parametrize(
    ("order", "sections", "row"),
    [
        ("rows", ((0, 8, 0),), 8),
        ("transposed", tuple((d, d + 1, d * 16) for d in range(8)), 1),
        ("pairs", tuple((d, d + 2, d * 16) for d in range(0, 8, 2)), 2),
        ("tiles", (), 0),
    ],
)
def test_an_order_is_sections_where_tokens_lie_equally_far_apart(order: str, sections: Any, row: int) -> None:
    found = half_of(positions(order, 16), "x")
    assert (found.sections, found.row) == (sections, row)


def test_encodings_are_equal_where_orders_are() -> None:
    names = {order: half_of(positions(order, 16), "x").encoding for order in ORDERS}
    assert len(set(names.values())) == len(ORDERS)
    assert names["tiles"] == half_of(positions("tiles", 16), "x").encoding


def test_an_order_is_measured_by_numbers_that_any_element_type_holds() -> None:
    wanted, largest = positions("transposed", 64), 0

    def pack(numbers: Any) -> Any:
        nonlocal largest
        largest = max(largest, int(numbers.max()))
        page = np.zeros(2 * numbers.size, np.int64)
        page[wanted] = page[numbers.size + positions("rows", 64)] = numbers
        return page

    found = measured(pack, 64, DIM, "x")
    assert {part: half.row for part, half in found.items()} == {"k": 1, "v": DIM}
    assert largest < 1 << 7


def test_a_page_that_loses_elements_is_no_order() -> None:
    with pytest.raises(ValueError, match="each element of k once"):
        measured(lambda numbers: np.zeros(2 * numbers.size, np.int64), 16, DIM, "x")


def pool(orders: tuple[str, str], tokens: int, encoded: bool = False) -> tuple[Pool, list[torch.Tensor]]:
    """Pages in these orders of K and V, in memory as the connector has vLLM allocate it."""
    size = LAYERS * BLOCKS * HEADS * tokens * 2 * DIM * 4
    with ShareableMemory(torch.int8):
        raw = torch.zeros(size, dtype=torch.int8, device="cpu")
    tensors = list(raw.view(torch.float32).view(LAYERS, BLOCKS, HEADS, tokens, 2 * DIM))
    stated = halves(*orders, tokens)
    stated = {part: half.whole(DIM) for part, half in stated.items()} if encoded else stated
    cache = cache_of("kv", range(LAYERS), HEADS, tokens, DType.F32, 4, stated, encoded)
    return Pool(lay_out([cache]), {"kv": views_of(tensors, stated)}, axes="page head token dim"), tensors


def elements(tensors: list[torch.Tensor], orders: tuple[str, str], tokens: int, table: list[int]) -> Any:
    """[layer, part, head, token, dim] of the tokens of a request, by the orders alone."""
    made = np.empty((LAYERS, 2, HEADS, len(table) * tokens, DIM), np.float32)
    for layer, tensor in enumerate(tensors):
        for part, order in enumerate(orders):
            half = tensor.numpy().reshape(BLOCKS, HEADS, 2, -1)[table, :, part]
            made[layer, part] = half[:, :, positions(order, tokens)].transpose(1, 0, 2, 3).reshape(HEADS, -1, DIM)
    return made[:, :, :, :TOKENS]


def hand_over(source: Pool, sink: Pool, tmp_path: Any, tables: tuple[list[int], list[int]]) -> None:
    prompt, ticket, place = Prompt(range(TOKENS)), new_ticket("prefill"), f"ipc://{tmp_path}/p"
    with Source("prefill", source, place) as one, Sink("decode", sink, {"prefill": place}) as two:
        request = one.request(ticket, prompt)
        fetch = two.fetch(ticket, prompt, {"kv": tables[1]})
        request.finish({"kv": tables[0]})
        fetch.wait(20)


@pytest.mark.parametrize(
    ("source", "sink", "blocks"),
    [
        (("transposed", "rows"), ("transposed", "rows"), (16, 16)),
        (("transposed", "rows"), ("rows", "rows"), (16, 32)),
        (("pairs", "pairs"), ("transposed", "rows"), (32, 16)),
        (("rows", "rows"), ("pairs", "transposed"), (32, 16)),
    ],
)
def test_packed_pages_meet_any_order_and_page_size(
    source: tuple[str, str], sink: tuple[str, str], blocks: tuple[int, int], tmp_path: Any
) -> None:
    (from_, mine), (to, theirs) = pool(source, blocks[0]), pool(sink, blocks[1])
    for n, tensor in enumerate(mine):
        tensor.copy_(torch.from_numpy(np.random.default_rng(n).random(tensor.shape, np.float32)))
    tables = [[4, 0, 2][: -(-TOKENS // block)] for block in blocks]
    hand_over(from_, to, tmp_path, (tables[0], tables[1]))
    sent = elements(mine, source, blocks[0], tables[0])
    assert np.array_equal(sent, elements(theirs, sink, blocks[1], tables[1]))


@pytest.mark.parametrize("dim", [64, 128])
def test_heads_as_wide_as_those_of_real_models(dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Each of their elements is a section."""
    monkeypatch.setattr(sys.modules[__name__], "DIM", dim)
    test_packed_pages_meet_any_order_and_page_size(("transposed", "rows"), ("rows", "rows"), (16, 32), tmp_path)


def test_sections_that_lie_equally_far_apart_are_copied_and_summed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A transposed K has an operation for each of its elements: a prompt took a second, a call of numpy for each."""
    monkeypatch.setattr(sys.modules[__name__], "DIM", 64)
    views, made = 0, execute._view

    def counted(*of: Any) -> Any:
        nonlocal views
        views += 1
        return made(*of)

    monkeypatch.setattr(execute, "_view", counted)
    (from_, mine), (to, theirs) = (pool(("transposed", "rows"), 16) for _ in range(2))
    for tensor in mine:
        tensor.copy_(torch.rand(tensor.shape))
    hand_over(from_, to, tmp_path, ([0, 1, 2], [0, 1, 2]))
    assert all(torch.equal(a[:2], b[:2]) for a, b in zip(mine, theirs, strict=True))
    passes, lengths = 4, 2  # copies look at both sides and sums at one; whole pages and the last one
    assert 0 < views <= passes * lengths * LAYERS * 2 * HEADS < LAYERS * HEADS * 64


def test_an_order_without_strides_moves_whole_between_equal_pages(tmp_path: Any) -> None:
    (from_, mine), (to, theirs) = (pool(("tiles", "tiles"), 16, encoded=True) for _ in range(2))
    for tensor in mine:
        tensor.copy_(torch.rand(tensor.shape))
    hand_over(from_, to, tmp_path, ([3, 1, 5], [0, 2, 4]))
    assert all(torch.equal(a[[3, 1, 5]], b[[0, 2, 4]]) for a, b in zip(mine, theirs, strict=True))


def test_an_order_without_strides_meets_no_other(tmp_path: Any) -> None:
    (from_, _), (to, _) = pool(("tiles", "tiles"), 16, encoded=True), pool(("rows", "rows"), 16)
    with pytest.raises(RemoteError, match="LAYOUT_OPAQUE"):
        hand_over(from_, to, tmp_path, ([0, 1, 2], [0, 1, 2]))


def test_other_tensors_are_allocated_as_ever() -> None:
    with ShareableMemory(torch.int8):
        other = torch.zeros(64, dtype=torch.float32)
    with pytest.raises(LocalError, match="NO_TRANSPORT"):
        Pool(
            lay_out([kvproto.Cache.gqa("kv", 1, kv_heads=1, head_dim=8, page=1, dtype=DType.F32)]),
            {"kv": other.view(4, 1, 1, 16)},
        )
