"""What a user can get wrong: each is an error that names the argument, what was expected and what came; then all goes on."""

import gc
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvproto import (
    Cache,
    DType,
    Fetch,
    LocalError,
    Options,
    Parallel,
    Pool,
    Prompt,
    Request,
    Sink,
    Source,
    allocate,
    lay_out,
    new_ticket,
    read_ticket,
    tenant_digest,
    write_ticket,
)  # fmt: skip
from kvproto.errors import KvprotoError
from kvproto.events import Declined
from kvproto.tiers.page_ids import namespace
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

from .doors import GEOMETRY, PAGES, PROMPT, STEPPED, Two, address_in, filled, rows, two

NHD = (PAGES, 4, 2, 4)


def shared(shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.from_dlpack(allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize))
    made: np.ndarray[Any, Any] = found.view(dtype).reshape(shape)
    return made


def refused(call: Callable[[], object], code: ErrorCode, path: str, *words: str) -> str:
    """The error's text, which names the argument and says what was expected and what came."""
    with pytest.raises(LocalError) as caught:
        call()
    error = caught.value
    assert (error.code, error.path) == (code, path), error
    assert error.mine, error
    assert error.yours, error
    for word in words:
        assert word in str(error), error
    return str(error)


POOLS: dict[str, tuple[Callable[[], Any], str, ErrorCode, str, list[str]]] = {
    "a group that is not there": (lambda: {}, "", ErrorCode.BAD_COLUMNS, "tensors", ["kv"]),
    "a group of another name": (
        lambda: {"kv": None, "vk": None}, "", ErrorCode.BAD_COLUMNS, "tensors", ["vk"]),
    "too few layers": (lambda: {"kv": {"k": [shared(NHD)], "v": [shared(NHD)]}}, "page token head dim",
                       ErrorCode.BAD_COLUMNS, 'tensors["kv"]["k"]', ["2 tensors", "got 1"]),
    "a part that is not there": (lambda: {"kv": {"k": [shared(NHD)] * 2}}, "page token head dim", ErrorCode.BAD_COLUMNS,
                                 'tensors["kv"]', ["['k', 'v']"]),
    "no tensor": (lambda: {"kv": [[1, 2], [3, 4]]}, "page token head dim", ErrorCode.BAD_COLUMNS, 'tensors["kv"][0]', ["__dlpack__"]),
    "too few axes": (lambda: {"kv": [shared((2, PAGES, 4, 8))] * 2}, "part page token head dim", ErrorCode.BAD_COLUMNS,
                     'tensors["kv"][0]', ["5 axes", "(2, 16, 4, 8)"]),
    "tokens and heads in the wrong order": (
        lambda: {"kv": [shared((2, *NHD)) for _ in "ab"]}, "part page head token dim", ErrorCode.BAD_COLUMNS,
        'tensors["kv"][0] axis "token"', ["expected 4 tokens and 2 heads, got 2 tokens and 4 heads", '"part page token head dim"']),
    "pages of another length": (
        lambda: {"kv": [shared((2, PAGES, 8, 2, 4)) for _ in "ab"]}, "part page token head dim", ErrorCode.BAD_COLUMNS,
        'tensors["kv"][0] axis "token"', ["expected 4, the rows of an item of the Cache, got 8"]),
    "another number of heads": (
        lambda: {"kv": [shared((2, PAGES, 4, 1, 4)) for _ in "ab"]}, "part page token head dim", ErrorCode.BAD_COLUMNS,
        'tensors["kv"][0] axis "head"', ["expected 2, the heads of this rank by the geometry, got 1"]),
    "another head dimension": (lambda: {"kv": [shared((2, PAGES, 4, 2, 8)) for _ in "ab"]}, "part page token head dim",
                               ErrorCode.BAD_COLUMNS, 'tensors["kv"][0] axis "dim"', ["4 bytes", "8 elements of 1 bytes"]),
    "K without V": (lambda: {"kv": [shared(NHD)] * 2}, "page token head dim", ErrorCode.BAD_COLUMNS,
                    'tensors["kv"][0] axis "dim"', ["4 + 4 bytes", '{"k": [...], "v": [...]}']),
    "another element type": (lambda: {"kv": [shared((2, *NHD), np.float32) for _ in "ab"]}, "part page token head dim",
                             ErrorCode.BAD_COLUMNS, 'tensors["kv"][0]', ["elements of U8, as the Cache says, got F32"]),
    "a tensor of no memory": (
        lambda: {"kv": [torch.zeros((2, *NHD), dtype=torch.uint8, device="meta") for _ in "ab"]},
        "part page token head dim", ErrorCode.BAD_COLUMNS, 'tensors["kv"][0]', ["one on meta"]),
    "gaps inside a head": (lambda: {"kv": [shared((2, *NHD[:-1], 8))[..., ::2] for _ in "ab"]}, "part page token head dim",
                           ErrorCode.BAD_COLUMNS, 'tensors["kv"][0] axis "dim"', ["stride of 2 bytes"]),
    "strides that run backwards": (lambda: {"kv": [shared((2, *NHD))[:, ::-1] for _ in "ab"]}, "part page token head dim",
                                   ErrorCode.BAD_COLUMNS, 'tensors["kv"][0]', ["strides"]),
    "layers with unlike numbers of pages": (
        lambda: {"kv": [shared((2, *NHD)), shared((2, 9, *NHD[1:]))]}, "part page token head dim", ErrorCode.BAD_COLUMNS,
        'tensors["kv"][1]', ["16 pages", "9 pages"]),
    "a word that is no axis": (lambda: {"kv": [shared(NHD)] * 2}, "page token heads dim", ErrorCode.BAD_COLUMNS,
                               'tensors["kv"] axes', ["page token heads dim"]),
    "private memory": (lambda: {"kv": [np.zeros((2, *NHD), np.uint8)] * 2}, "part page token head dim", ErrorCode.NO_TRANSPORT,
                       'tensors["kv"][0]', ["kvproto.allocate"]),
    "one tensor for two layers": (
        lambda: {"kv": [shared((2, *NHD))] * 2}, "part page token head dim", ErrorCode.BAD_COLUMNS, 'tensors["kv"]', ["one address"]),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_tensors(name: str) -> None:
    tensors, axes, code, path, words = POOLS[name]
    refused(lambda: Pool(GEOMETRY, tensors(), axes=axes or "page token head dim"), code, path, *words)


@pytest.mark.parametrize(
    "name", ["too few layers", "a part that is not there", "pages of another length", "another number of heads"]
)
def test_tensors_whose_axes_are_right_are_not_told_to_name_them(name: str) -> None:
    tensors, axes, _, _, _ = POOLS[name]
    with pytest.raises(LocalError) as caught:
        Pool(GEOMETRY, tensors(), axes=axes)
    assert not caught.value.advice


@pytest.mark.parametrize("axes", [{"kvv": "page head token dim"}, {"kv": "page token head dim", "kvv": "page"}, {}])
def test_axes_by_the_name_of_another_group(axes: dict[str, str]) -> None:
    """A name that is wrong must not leave the tensors to the default, in which bytes could be wrong in silence."""
    tensors = {"kv": {"k": [shared(NHD)] * 2, "v": [shared(NHD)] * 2}}
    refused(
        lambda: Pool(GEOMETRY, tensors, axes=axes),
        ErrorCode.BAD_COLUMNS,
        "axes",
        "the groups ['kv']",
        str(sorted({"kv"} ^ axes.keys())),
    )


def test_memory_that_no_machine_has() -> None:
    """The kernel would grant it page by page, and then kill this process or another."""
    refused(lambda: allocate(1 << 50), ErrorCode.TRANSPORT_FAILED, "length", str(1 << 50), "make the pools smaller")
    refused(lambda: Pool.allocate(GEOMETRY, 1 << 45), ErrorCode.TRANSPORT_FAILED, "pages", "make the pools smaller")
    refused(lambda: Pool.allocate(GEOMETRY, 1.5), ErrorCode.BAD_COLUMNS, "pages", "got float")  # type: ignore[arg-type]


def test_a_grant_for_a_fetch_that_has_pages(both: Two) -> None:
    found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
    refused(lambda: found.grant({"kv": [1, 2, 3]}), ErrorCode.UNEXPECTED_MESSAGE, "grant", "name the pages once")
    both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
    found.wait(10)
    assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


def test_pool_calls() -> None:
    pool = filled()
    refused(lambda: Pool(GEOMETRY, {}, rank=3), ErrorCode.BAD_COLUMNS, "rank", "[0]", "3")
    refused(lambda: Pool.allocate(GEOMETRY, 0), ErrorCode.BAD_COLUMNS, "pages", "kv")
    refused(lambda: Pool.allocate(GEOMETRY, {"vk": 3}), ErrorCode.BAD_COLUMNS, "pages", "vk")
    refused(lambda: pool.array("vk", 0, "k"), ErrorCode.BAD_COLUMNS, "group", "vk")
    refused(lambda: pool.array("kv", 2, "k"), ErrorCode.BAD_COLUMNS, "kv", "layer 2")
    refused(lambda: pool.array("kv", 0, "q"), ErrorCode.BAD_COLUMNS, "kv", "part 'q'")


def test_layouts() -> None:
    cache = Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4)
    refused(lambda: lay_out([cache], Parallel(tp=4, dcp=3)), ErrorCode.OUT_OF_RANGE, "dcp", "3")
    refused(lambda: lay_out([cache], Parallel(tp=0)), ErrorCode.OUT_OF_RANGE, "tp", "0")
    twice = [cache, Cache.mla("kv", 1, latent=4, rope=4, page=4, model=1)]
    refused(lambda: lay_out(twice), ErrorCode.OUT_OF_RANGE, "specs", "'kv' twice")
    wrong: Any = [cache, (cache, cache)]
    refused(lambda: lay_out(wrong), ErrorCode.OUT_OF_RANGE, "specs[1]", "Cache", "tuple")
    draft = Cache.gqa("draft", 1, kv_heads=2, head_dim=4, page=4)
    refused(
        lambda: lay_out([cache, draft]), ErrorCode.OUT_OF_RANGE, "specs[1]", "'k' of layer 0, as 'kv' has", "model=1"
    )
    wrong = {"a": 1}
    refused(lambda: lay_out([cache], facts=wrong), ErrorCode.OUT_OF_RANGE, "facts['a']", "a str", "got int")
    refused(lambda: lay_out([cache], warn=wrong), ErrorCode.OUT_OF_RANGE, "warn['a']", "a str", "got int")
    wrong = {"tp": 2}
    refused(lambda: lay_out([cache], wrong), ErrorCode.OUT_OF_RANGE, "parallel", "Parallel", "dict")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("verify", "page"),
        ("spread", "least"),
        ("part_bytes", 0),
        ("lease", 0),
        ("quarantine", 1.5),
        ("first_part_ratio", -1),
        ("lease", "long"),
        ("part_bytes", 1.5),
        ("part_bytes", True),
        ("lease", None),
        ("ticket_wait", 0),
        ("ticket_wait", "1"),
    ],
)
def test_options(field: str, value: Any) -> None:
    refused(lambda: Options(**{field: value}), ErrorCode.OUT_OF_RANGE, f"Options.{field}", str(value))


def test_options_that_name_no_transport(tmp_path: Path) -> None:
    said = refused(
        lambda: Source("prefill", filled(), address_in(tmp_path), Options(transports=("pigeon",))),
        ErrorCode.NO_TRANSPORT, "Options.transports", "pigeon",
    )  # fmt: skip
    assert "shm" in said
    with Source("prefill", filled(), address_in(tmp_path)):
        pass  # the address is free again


def test_a_transport_that_cannot_serve_the_memory(tmp_path: Path) -> None:
    pool = filled()
    with raises(KvprotoError, code=ErrorCode.NO_TRANSPORT, path="Options.transports") as caught:
        Source("prefill", pool, address_in(tmp_path), Options(transports=("cuda",)))
    assert "host" in str(caught.value).lower()
    assert "pip install" not in str(caught.value), "no library would help"
    pool.close()


def test_a_transport_that_nobody_has_is_refused_before_anything_is_opened() -> None:
    refused(lambda: Options(transports="warp"), ErrorCode.NO_TRANSPORT, "Options.transports", "shm", "warp")


@pytest.mark.parametrize(
    ("tokens", "path"),
    [([], "Prompt.tokens"), ([[1]], "Prompt.tokens"), ([1.5], "Prompt.tokens"), ([3, -1], "Prompt.tokens[1]"),
     ([1 << 32], "Prompt.tokens[0]"), ("text", "Prompt.tokens"), (5, "Prompt.tokens"), (None, "Prompt.tokens"),
     ([True, False], "Prompt.tokens")],
)  # fmt: skip
def test_prompts(tokens: Any, path: str) -> None:
    refused(lambda: Prompt(tokens), ErrorCode.OUT_OF_RANGE, path)


@pytest.mark.parametrize("tokens", [[0, 5, (1 << 32) - 1], [True, 5], [5, True], [np.int64(7), 8]])
def test_prompts_of_lists_are_those_of_arrays(tokens: list[int]) -> None:
    prompt = Prompt(tokens)
    assert prompt.tokens.dtype == np.uint32
    assert prompt.tokens.tolist() == np.array(tokens).tolist()
    assert prompt.digest == Prompt(np.array(tokens)).digest == Prompt(tuple(tokens)).digest


def test_salts() -> None:
    refused(lambda: Prompt([1], salts=[b"short"]), ErrorCode.OUT_OF_RANGE, "Prompt.salts[0]", "32 bytes", "5 bytes")


@pytest.mark.parametrize("deadline", [0, -1, 1e10, float("nan")])
def test_deadlines(deadline: float) -> None:
    refused(lambda: new_ticket("prefill", deadline=deadline), ErrorCode.OUT_OF_RANGE, "deadline")


def test_text_that_is_no_ticket_reads_as_a_sentence() -> None:
    with pytest.raises(KvprotoError, match="at ticket: expected JSON, got other text: Expecting value"):
        read_ticket("nope")


def test_tickets_travel_as_json() -> None:
    ticket = new_ticket("prefill")
    assert read_ticket(write_ticket(ticket)) == ticket
    for form in ({}, {"key": 1}, {**write_ticket(ticket), "surprise": 1}):
        with pytest.raises(KvprotoError) as caught:
            read_ticket(form)
        assert caught.value.path


NAMED = '{"key": "' + "00" * 16 + '", "engine": "prefill", '
TEXTS: dict[str, tuple[str | bytes, ErrorCode]] = {
    "no JSON": ("{", ErrorCode.BAD_TYPE),
    "no UTF-8": (b'{"key": "\xff"}', ErrorCode.BAD_TYPE),
    "a key twice": ('{"key": "00", "key": "11"}', ErrorCode.REPEATED),
    "no number": ('{"key": "00", "replica": NaN}', ErrorCode.OUT_OF_RANGE),
    "a number that no float holds": ('{"key": "00", "replica": 1e999}', ErrorCode.OUT_OF_RANGE),
    "digits without end": (NAMED + '"replica": ' + "9" * 4000 + "}", ErrorCode.BAD_TYPE),
    "deep": ("[" * 2000 + "]" * 2000, ErrorCode.TOO_DEEP),
    "a little deep": ("[" * 20 + "]" * 20, ErrorCode.TOO_DEEP),
    "long": ('{"key": "' + "0" * 5000 + '"}', ErrorCode.TOO_LARGE),
    "half a character": (NAMED.replace("prefill", "\\ud800") + '"replica": "0"}', ErrorCode.BAD_TEXT),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_no_router_wrote(text: str) -> None:
    """A ticket comes from beside the prompt, over the network: a hostile one is refused by code and path."""
    ticket = write_ticket(new_ticket("prefill"))
    given, code = TEXTS[text]
    with raises(KvprotoError, code=code) as caught:
        read_ticket(given)
    assert caught.value.path.startswith("ticket") or caught.value.path in ticket
    assert read_ticket(json.dumps(ticket)) == read_ticket(ticket)


FETCHES: dict[str, tuple[dict[str, Any], ErrorCode, str, list[str]]] = {
    "too few pages": ({"pages": {"kv": [1, 2]}}, ErrorCode.BAD_GRANT, 'pages["kv"]', ["3 pages", "got 2"]),
    "a page that the pool has not": (
        {"pages": {"kv": [1, 2, 16]}},
        ErrorCode.OUT_OF_REGION,
        'pages["kv"][2]',
        ["0 to 15", "got 16"],
    ),
    "a negative page": ({"pages": {"kv": [1, -2, 3]}}, ErrorCode.OUT_OF_REGION, 'pages["kv"][1]', ["got -2"]),
    "a page twice": ({"pages": {"kv": [1, 2, 1]}}, ErrorCode.ITEM_ALIAS, 'pages["kv"]', ["twice"]),
    "pages that are no integers": ({"pages": {"kv": [1.0, 2.0, 3.0]}}, ErrorCode.BAD_GRANT, 'pages["kv"]', ["float64"]),
    "pages in two dimensions": ({"pages": {"kv": [[1, 2, 3]]}}, ErrorCode.BAD_GRANT, 'pages["kv"]', ["(1, 3)"]),
    "no pages of the group": ({"pages": {}}, ErrorCode.BAD_GRANT, "pages", ["kv"]),
    "a group that is not there": ({"pages": {"kv": [1, 2, 3], "vk": [1]}}, ErrorCode.BAD_GRANT, "pages", ["'vk'"]),
    "more cached than there is": ({"cached": 11}, ErrorCode.BAD_GRANT, 'cached["kv"]', ["0 to 10", "got 11"]),
    "cached of a group that is not there": ({"cached": {"vk": 3}}, ErrorCode.BAD_GRANT, "cached", ["vk"]),
    "more tokens than the prompt": ({"tokens": 11}, ErrorCode.OUT_OF_RANGE, "tokens", ["1 to 10", "got 11"]),
    "no tokens": ({"tokens": 0}, ErrorCode.OUT_OF_RANGE, "tokens", ["got 0"]),
}


@pytest.fixture
def both(tmp_path: Path) -> Any:
    with two(tmp_path) as made:
        yield made


def still_works(both: Two) -> None:
    ticket = new_ticket("prefill")
    both.source.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
    both.sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]}).wait(10)
    assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


def test_a_prefix_that_ends_inside_a_row_of_several_tokens(tmp_path: Path) -> None:
    """The row is not complete at the sink, and would not be sent: it is refused, as for `partial` groups."""
    geometry = lay_out([Cache.compressed("c4", 1, dim=8, tokens_per_row=4, page_rows=4, dtype=DType.U8)])
    pools, address = [Pool.allocate(geometry, 2) for _ in range(2)], address_in(tmp_path)
    with Source("prefill", pools[0], address) as source, Sink("decode", pools[1], {"prefill": address}) as sink:
        ticket, prompt, pages = new_ticket("prefill"), Prompt(range(16)), {"c4": [0]}
        for cached in (5, 15):
            fetch = partial(sink.fetch, ticket, prompt, pages, cached=cached)
            refused(fetch, ErrorCode.BAD_GRANT, 'cached["c4"]', "a multiple of 4", "or 16", f"got {cached}")
        source.request(ticket, prompt).finish(pages)
        assert sink.fetch(ticket, prompt, pages, cached=4).wait(10).bytes == {0: 24}


@pytest.mark.parametrize("name", FETCHES)
def test_fetches(both: Two, name: str) -> None:
    arguments, code, path, words = FETCHES[name]
    given = {"pages": {"kv": [9, 0, 5]}} | arguments
    pages = given.pop("pages")
    refused(lambda: both.sink.fetch(both.ticket, PROMPT, pages, **given), code, path, *words)
    still_works(both)


def test_a_ticket_of_another_engine(both: Two) -> None:
    other = new_ticket("someone else")
    refused(lambda: both.source.request(other, PROMPT), ErrorCode.WRONG_PEER, "ticket", "someone else", "prefill")
    fetch, advice = lambda: both.sink.fetch(other, PROMPT, {"kv": [1, 2, 3]}), "name it in `sources`"
    refused(fetch, ErrorCode.WRONG_PEER, "ticket", "someone else", advice)
    replica = new_ticket("prefill", replica=4)
    refused(lambda: both.source.request(replica, PROMPT), ErrorCode.WRONG_PEER, "ticket", "replica 4")
    still_works(both)


def test_a_ticket_that_is_used_twice_at_the_source(both: Two) -> None:
    request = both.source.request(both.ticket, PROMPT)
    refused(lambda: both.source.request(both.ticket, PROMPT), ErrorCode.TICKET_USED, "ticket")
    request.finish({"kv": [3, 1, 2]})
    both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}).wait(10)
    request.wait(10)
    refused(lambda: both.source.request(both.ticket, PROMPT), ErrorCode.TICKET_USED, "ticket")
    still_works(both)


def test_a_ticket_that_is_used_twice_at_the_sink(both: Two) -> None:
    """Clause KVP-TKT-USED: one ticket, one sequence."""
    request, first = both.asked([9, 0, 5])
    again = both.sink.fetch(both.ticket, PROMPT, {"kv": [10, 11, 12]})
    request.finish({"kv": [3, 1, 2]})
    first.wait(10)
    with raises(KvprotoError, code=ErrorCode.TICKET_USED) as caught:
        again.wait(10)
    said = "the peer expected only sequence 1, which uses it, from this side it got sequence 2"
    assert said in str(caught.value)
    both.until(lambda: again.pages_free)
    still_works(both)


def test_a_prompt_that_differs(both: Two) -> None:
    """Clause KVP-TKT-CONTENT."""
    request = both.source.request(both.ticket, PROMPT)
    found = both.sink.fetch(both.ticket, Prompt(range(1, 11)), {"kv": [9, 0, 5]})
    with raises(KvprotoError, code=ErrorCode.CONTENT_MISMATCH) as caught:
        found.wait(10)
    assert f"expected a prompt of {len(PROMPT)} tokens, digest " in str(caught.value)
    assert "from this side it got one fetched up to token 10, digest " in str(caught.value)
    assert "tokens, adapter, salts or lengths of axes differ" in caught.value.advice
    assert found.pages_free
    told = both.until(lambda: [e for e in both.told if isinstance(e, Declined)])
    assert [(e.request, e.peer, e.error.code) for e in told] == [(request, "decode rank 0", caught.value.code)]
    assert not request.done
    request.fail("nobody needs it")
    still_works(both)


def test_a_request_at_the_source(both: Two) -> None:
    request = both.source.request(both.ticket, PROMPT)
    refused(lambda: request.finish({"kv": [3, 1]}), ErrorCode.BAD_GRANT, 'pages["kv"]', "3 pages", "got 2")
    refused(lambda: request.finish({"vk": [3, 1]}), ErrorCode.BAD_GRANT, "pages", "vk")
    refused(lambda: request.finish({"kv": [3, 1, 99]}), ErrorCode.OUT_OF_REGION, 'pages["kv"][2]', "99")
    refused(lambda: request.finish({"kv": [3, 1, 2]}, tokens=11), ErrorCode.OUT_OF_RANGE, "tokens", "11")
    refused(lambda: request.computed({"kv": [3]}, 5), ErrorCode.BAD_GRANT, 'pages["kv"]')
    refused(lambda: request.computed({"kv": [3]}, 4, model=2), ErrorCode.OUT_OF_RANGE, "model", "2")
    refused(lambda: request.computed({"kv": [3]}, 4, layers=(1, 9)), ErrorCode.OUT_OF_RANGE, "layers", "(1, 9)")
    refused(
        lambda: request.finish({"kv": [3, 1, 2]}, handoff={"first": {"token": b"1"}}),
        ErrorCode.OUT_OF_RANGE,
        "handoff",
        "first",
    )
    found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
    request.finish({"kv": [3, 1, 2]})
    found.wait(10)
    request.wait(10)


def test_a_request_that_is_finished_twice(both: Two) -> None:
    request = both.source.request(both.ticket, PROMPT)
    request.finish({"kv": [3, 1, 2]})
    with pytest.raises(LocalError, match="finish"):
        request.finish({"kv": [4, 5, 6]})
    with pytest.raises(LocalError, match="finish"):
        request.computed({"kv": [4, 5, 6]}, 10)
    both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}).wait(10)
    assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


HANDED = lay_out(
    [
        Cache.gqa("kv", 1, kv_heads=1, head_dim=4, page=4, dtype=DType.U8),
        Cache.handoff("first", {"token": (DType.U8, 4)}),
    ]
)


def test_hand_off_data(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    with (
        Source("prefill", Pool.allocate(HANDED, 4), address) as source,
        Sink("decode", Pool.allocate(HANDED, 4), {"prefill": address}) as sink,
    ):
        ticket, prompt = new_ticket("prefill"), Prompt([1, 2])
        request = source.request(ticket, prompt)
        path = 'handoff["first"]["token"]'
        refused(lambda: request.finish({"kv": [0]}), ErrorCode.OUT_OF_RANGE, path, "4 bytes", "nothing")
        wrong = {"first": {"token": b"12345"}}
        refused(lambda: request.finish({"kv": [0]}, handoff=wrong), ErrorCode.OUT_OF_RANGE, path, "5 bytes")
        extra = {"first": {"token": b"1234", "more": b""}}
        refused(lambda: request.finish({"kv": [0]}, handoff=extra), ErrorCode.OUT_OF_RANGE, 'handoff["first"]', "more")
        request.finish({"kv": [0]}, handoff={"first": {"token": b"1234"}}, finished=True)
        arrived = sink.fetch(ticket, prompt, {"kv": [2]}).wait(10)
        assert arrived.handoff == {"first": {"token": b"1234"}}
        assert arrived.finished


def test_addresses(tmp_path: Path) -> None:
    pool, free = filled(), address_in(tmp_path)
    open_ = tmp_path / "open"
    open_.mkdir(mode=0o755)
    for address, word in [
        ("carrier pigeon", "ipc:// or tcp://"), ("ipc://@abstract", "abstract"), ("tcp://999.1.1.1:5", "CURVE keys"), ("tcp://10.0.0.1:5", "CURVE keys"), (f"ipc://{open_}/x", "0700"),
        (f"ipc://{tmp_path}/none/x", "existing"), (f"ipc://{tmp_path}/{'x' * 120}", "107 bytes"),
    ]:  # fmt: skip
        with pytest.raises(LocalError, match=word):
            Source("prefill", pool, address)
        with pytest.raises(LocalError, match=word):
            Sink("decode", pool, {"prefill": address})
    with Source("prefill", pool, free), pytest.raises(LocalError, match=r"OUT_OF_RANGE at listen: .* in use"):
        Source("again", pool, free)
    wide = Pool.allocate(lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4)], Parallel(tp=2)), 4)
    with pytest.raises(LocalError, match="rank"):
        Source("prefill", wide, free)
    pool.close()


def test_names(tmp_path: Path) -> None:
    for name in ("", "x" * 1000, "\ud800"):
        with raises(LocalError, path="name"):
            Source(name, filled(), address_in(tmp_path))
        with raises(LocalError, path="engine"):
            new_ticket(name)


def test_a_tenant_of_half_a_character_is_a_tenant_like_others() -> None:
    """JSON may contain it, and it must not end the engine of its user."""
    assert tenant_digest("\ud800") != tenant_digest("\ud801")
    assert namespace({"salt": "\ud800"}) != namespace({"salt": "\ud801"})
    refused(lambda: Prompt([1], axes={"\ud800": 1}), ErrorCode.OUT_OF_RANGE, "Prompt.axes", "UTF-8")


def test_ways_of_driving(tmp_path: Path) -> None:
    with two(tmp_path) as both, pytest.raises(LocalError, match="thread=False"):
        both.source.step()
    with two(tmp_path, STEPPED) as both:
        both.source.step(0.001)
        with pytest.raises(TimeoutError):
            both.source.request(both.ticket, PROMPT).wait(0.01)


def test_a_pool_that_is_freed_while_in_use(tmp_path: Path) -> None:
    pool = filled()
    with Source("prefill", pool, address_in(tmp_path)):
        refused(pool.close, ErrorCode.UNEXPECTED_MESSAGE, "Pool.close", "Source 'prefill'")
    pool.close()
    pool.close()
    with pytest.raises(LocalError, match="closed"):
        Source("prefill", pool, address_in(tmp_path))


def test_a_pool_that_arrays_use_is_freed_once_they_are_gone() -> None:
    """Those that lie in a circle, such as the frames of an error, need not be waited for."""
    pool = filled()
    array = pool.array("kv", 0, "k")
    with pytest.raises(BufferError):
        pool.close()
    circle: list[Any] = [array]
    circle.append(circle)
    gc.disable()
    try:
        del array, circle
        pool.close()
    finally:
        gc.enable()
    with pytest.raises(LocalError, match="closed"):
        pool._use("Sink 'decode'")


def test_a_fetch_that_failed_holds_nothing_of_whoever_asked_for_its_result(tmp_path: Path) -> None:
    """Each call raises another error, for one that is raised holds the frames that it passes."""
    pool = filled()

    def asked(fetch: Fetch) -> str:
        array = pool.array("kv", 0, "k")
        with pytest.raises(KvprotoError) as found:
            _ = fetch.result
        assert array.size
        return str(found.value)

    with Sink("decode", filled(), {"prefill": address_in(tmp_path)}) as sink:
        fetch = sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [0, 1, 2]})
        fetch.abort("nobody wants it")
        with pytest.raises(KvprotoError):
            fetch.wait(10)
        assert asked(fetch) == asked(fetch)
        pool.close()


def test_handles_after_close(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        request, found = both.asked([9, 0, 5])
        waiting = threading.Thread(target=_wait_in_vain, args=(found,))
        waiting.start()
        both.sink.close()
        waiting.join(10)
        assert not waiting.is_alive()
    for handle in (request, found):
        assert handle.done
        with pytest.raises(LocalError, match="closed"):
            handle.wait()
    found.abort()
    calls = (lambda: both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}), both.source.fileno, both.sink.next_timer)
    for call in calls:
        with pytest.raises(LocalError, match="closed"):
            call()
    with pytest.raises(LocalError, match="closed"):
        both.source.request(new_ticket("prefill"), PROMPT)
    with pytest.raises(LocalError, match=r"over|closed"):
        request.finish({"kv": [3, 1, 2]})


def _wait_in_vain(handle: Fetch) -> None:
    with pytest.raises(KvprotoError):
        handle.wait(30)


def test_callbacks_that_raise(both: Two, caplog: pytest.LogCaptureFixture) -> None:
    """What they raise is logged, and costs nobody anything."""
    ended = threading.Event()

    def fails(handle: Fetch | Request) -> None:
        ended.set()
        raise ZeroDivisionError("of the engine")

    both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
    found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}, on_done=fails)
    assert found.wait(10).bytes == {0: 320}
    assert ended.wait(10)
    still_works(both)
    assert "ZeroDivisionError: of the engine" in caplog.text


def test_close_from_a_callback(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        closed = threading.Event()

        def close(_: Fetch) -> None:
            both.sink.close()
            closed.set()

        both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
        both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}, on_done=close)
        assert closed.wait(10)
        both.sink.pool.close()


@pytest.mark.parametrize("options", [Options(), STEPPED], ids=["thread", "step"])
def test_a_callback_that_waits_for_another_request(tmp_path: Path, options: Options) -> None:
    """From the I/O thread itself nothing would ever arrive: an error says so, at once."""
    with two(tmp_path, options) as both:
        said: list[object] = []
        other = both.sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [10, 11, 12]})

        def wait(_: Fetch) -> None:
            try:
                other.wait(5)
            except (KvprotoError, TimeoutError) as error:
                said.append(error)

        both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
        both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}, on_done=wait)
        both.until(lambda: said)
        assert isinstance(said[0], LocalError)
        assert "callback" in str(said[0])
