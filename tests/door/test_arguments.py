"""What a stranger passed by mistake: each call refuses it at once, naming the argument, and the door goes on for all others."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvproto
from kvproto.errors import KvprotoError, RemoteError
from kvproto.observability.records import record_of
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

from .doors import GEOMETRY, PAGES, PROMPT, STEPPED, Two, address_in, filled, rows, two
from .test_bad_input import HANDED, NHD, refused, shared, still_works


@pytest.fixture
def both(tmp_path: Path) -> Any:
    with two(tmp_path) as made:
        yield made


PAGES_OF = {"kv": [9, 0, 5]}
CALLS: dict[str, tuple[Callable[[Two], Any], str, list[str]]] = {
    "a list for a prompt, at the sink": (lambda b: b.sink.fetch(b.ticket, [1, 2], PAGES_OF), "prompt", ["Prompt", "got list"]),
    "a list for a prompt, at the source": (lambda b: b.source.request(b.ticket, [1, 2]), "prompt", ["Prompt", "got list"]),
    "a dict for a ticket": (
        lambda b: b.sink.fetch(kvproto.write_ticket(b.ticket), PROMPT, PAGES_OF), "ticket", ["got dict", "read_ticket"]),
    "a dict for a ticket, at the source": (
        lambda b: b.source.request(kvproto.write_ticket(b.ticket), PROMPT), "ticket", ["got dict", "read_ticket"]),
    "a list for pages": (lambda b: b.sink.fetch(b.ticket, PROMPT, [9, 0, 5]), "pages", ["mapping", "got list"]),
    "a fraction of a token": (lambda b: b.sink.fetch(b.ticket, PROMPT, PAGES_OF, tokens=1.5), "tokens", ["1.5"]),
    "a truth for a number": (lambda b: b.sink.fetch(b.ticket, PROMPT, PAGES_OF, cached=True), "cached", ["True"]),
    "a fraction that is cached": (lambda b: b.sink.fetch(b.ticket, PROMPT, PAGES_OF, cached={"kv": 0.5}), 'cached["kv"]', ["0.5"]),
    "a callback that is none": (lambda b: b.sink.fetch(b.ticket, PROMPT, PAGES_OF, on_done=3), "callback", ["int"]),
    "a name that is none": (lambda b: b.sink.connect(5, address="ipc:///x/y"), "engine", ["got int"]),
    "an address that is none": (lambda b: b.sink.connect("prefill", address=Path("/x")), "address", ["str", "Path"]),
    "a replica that is none": (lambda b: b.sink.disconnect("prefill", "0"), "replica", ["got str"]),
    "pages of a source's request": (lambda b: b.source.request(b.ticket, PROMPT).finish([1, 2]), "pages", ["got list"]),
    "layers that are no pair": (
        lambda b: b.source.request(b.ticket, PROMPT).computed({"kv": [1]}, 4, layers=1), "layers", ["(lo, hi)"]),
    "an event object": (
        lambda b: b.source.request(b.ticket, PROMPT).finish({"kv": [1, 2, 3]}, after=object()), "after", ["object"]),
    "an event for memory of the host": (
        lambda b: b.source.request(b.ticket, PROMPT).finish({"kv": [1, 2, 3]}, after=12345), "after", ["host", "12345"]),
    "an event for memory of the host, while prefill runs": (
        lambda b: b.source.request(b.ticket, PROMPT).computed({"kv": [1]}, 4, after=12345), "after", ["host", "12345"]),
    "a timeout that is none": (lambda b: b.source.request(b.ticket, PROMPT).wait("x"), "timeout", ["seconds", "got str"]),
    "a reason that is none": (lambda b: b.source.request(b.ticket, PROMPT).fail(None), "reason", ["NoneType"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(both: Two, name: str) -> None:
    call, path, words = CALLS[name]
    refused(lambda: call(both), ErrorCode.OUT_OF_RANGE, path, *words)
    still_works(both)


MADE: dict[str, tuple[Callable[[str], Any], str]] = {
    "no pool": (lambda at: kvproto.Source("prefill", GEOMETRY, at), "pool"),  # type: ignore[arg-type]
    "no pool, at a sink": (lambda at: kvproto.Sink("decode", None), "pool"),  # type: ignore[arg-type]
    "no options": (lambda at: kvproto.Source("prefill", filled(), at, {"pull": True}), "options"),  # type: ignore[arg-type]
    "no name": (lambda at: kvproto.Source(None, filled(), at), "name"),  # type: ignore[arg-type]
    "an address that is none": (lambda at: kvproto.Source("prefill", filled(), 5), "listen"),  # type: ignore[arg-type]
    "an address that may not be used": (lambda at: kvproto.Source("prefill", filled(), "tcp://0.0.0.0:5"), "listen"),
    "an address of a source that may not": (lambda at: kvproto.Sink("d", filled(), {"p": "tcp://0.0.0.0:5"}), 'sources["p"]'),
    "a page of no tokens": (lambda at: kvproto.Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=0), "Cache.page"),
    "no heads": (lambda at: kvproto.Cache.gqa("kv", 2, kv_heads=0, head_dim=4, page=4), "Cache.kv_heads"),
    "a dtype that is none": (lambda at: kvproto.Cache.mla("kv", 2, latent=4, rope=0, page=4, dtype="bf16"), "Cache.dtype"),  # type: ignore[arg-type]
    "half an element": (lambda at: kvproto.Cache.handoff("first", {"token": (kvproto.DType.F32, 6)}), 'Cache.parts["token"]'),
    "sources in a list": (lambda at: kvproto.Sink("decode", filled(), [at]), "sources"),  # type: ignore[arg-type]
    "a source's rank left open": (lambda at: kvproto.Sink("decode", filled(), {"prefill": at + "{rank}"}), 'sources["prefill"]'),
    "a length that is no whole number": (lambda at: kvproto.allocate(1e6), "length"),  # type: ignore[arg-type]
    "no bytes": (lambda at: kvproto.allocate(0), "length"),
    "fewer than no bytes": (lambda at: kvproto.allocate(-1), "length"),
    "a device that is no number": (lambda at: kvproto.allocate(1, device="cuda"), "device"),  # type: ignore[arg-type]
    "transports that are none": (lambda at: kvproto.Options(transports=5), "Options.transports"),  # type: ignore[arg-type]
    "a transport that is none": (lambda at: kvproto.Options(transports=[5]), "Options.transports"),  # type: ignore[list-item]
    "words for an axis that are none": (lambda at: kvproto.Pool(GEOMETRY, {"kv": []}, axes={"kv": 5}), 'axes["kv"]'),  # type: ignore[dict-item]
    "no geometry": (lambda at: kvproto.Pool([1], {}), "geometry"),  # type: ignore[arg-type]
    "tensors in a list": (lambda at: kvproto.Pool(GEOMETRY, []), "tensors"),  # type: ignore[arg-type]
    "an adapter that is none": (lambda at: kvproto.Prompt([1], adapter=None), "Prompt.adapter"),  # type: ignore[arg-type]
    "an engine without a name": (lambda at: kvproto.new_ticket(""), "engine"),
    "an engine that is none": (lambda at: kvproto.new_ticket(None), "engine"),  # type: ignore[arg-type]
    "a replica below zero": (lambda at: kvproto.new_ticket("prefill", -1), "replica"),
    "a ticket that is none": (lambda at: kvproto.write_ticket({}), "ticket"),  # type: ignore[arg-type]
    "a ticket's form that is none": (lambda at: kvproto.read_ticket([1]), "ticket"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_is_made(tmp_path: Path, name: str) -> None:
    call, path = MADE[name]
    refused(lambda: call(address_in(tmp_path)), ErrorCode.OUT_OF_RANGE, path)
    with kvproto.Source("prefill", filled(), address_in(tmp_path)):
        pass  # nothing is left of it


def test_a_ticket_as_text() -> None:
    ticket = kvproto.new_ticket("prefill")
    assert kvproto.read_ticket(json.dumps(kvproto.write_ticket(ticket))) == ticket


def test_hand_off_that_is_no_bytes(tmp_path: Path) -> None:
    with kvproto.Source("prefill", kvproto.Pool.allocate(HANDED, 4), address_in(tmp_path)) as source:
        request = source.request(kvproto.new_ticket("prefill"), kvproto.Prompt([1]))
        wrong: Any = {"first": {"token": np.zeros(4, np.uint8)}}
        refused(
            lambda: request.finish({"kv": [0]}, handoff=wrong), ErrorCode.OUT_OF_RANGE, 'handoff["first"]["token"]',
            "4 bytes", "numpy.ndarray",
        )  # fmt: skip


@pytest.mark.parametrize("options", [kvproto.Options(), STEPPED], ids=["thread", "step"])
def test_a_posted_call_that_fails_costs_nobody_else_anything(tmp_path: Path, options: kvproto.Options) -> None:
    """A defect inside one request ends that request: the node, and the requests of others, go on."""
    with two(tmp_path, options) as both:
        other = both.sink.fetch(both.ticket, PROMPT, {"kv": [10, 11, 12]})
        request, mine = both.source.request(both.ticket, PROMPT), kvproto.new_ticket("prefill")
        broken = both.source.request(mine, PROMPT)

        def fails() -> None:
            raise ZeroDivisionError("inside a request")

        broken._post(fails, at_once=False)
        with pytest.raises(ZeroDivisionError):
            both.ends(broken)
        request.finish({"kv": [3, 1, 2]})
        assert both.ends(other).bytes == {0: 320}


def test_page_tables_of_one_request_agree(both: Two) -> None:
    """What was computed into one page cannot be finished in another."""
    request = both.source.request(both.ticket, PROMPT)
    request.computed({"kv": [3, 1, 0, 0]}, 6)
    refused(lambda: request.finish({"kv": [3, 4, 2]}), ErrorCode.BAD_GRANT, 'pages["kv"][1]', "page 1", "page 4")
    refused(lambda: request.computed({"kv": [5, 1, 2]}, 10), ErrorCode.BAD_GRANT, 'pages["kv"][0]', "page 3", "page 5")
    found = both.sink.fetch(both.ticket, PROMPT, PAGES_OF)
    request.finish({"kv": [3, 1, 2]})
    found.wait(10)
    assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


def test_tokens_computed_only_rise(both: Two) -> None:
    """Of each layer: a layer may be behind another one."""
    request = both.source.request(both.ticket, PROMPT)
    request.computed({"kv": [3, 1]}, 8, layers=(0, 1))
    request.computed({"kv": [3]}, 4, layers=(1, 2))
    refused(lambda: request.computed({"kv": [3]}, 4, layers=(0, 1)), ErrorCode.BAD_GRANT, "tokens", "8 or more", "4")
    refused(lambda: request.computed({"kv": [3]}, 4), ErrorCode.BAD_GRANT, "tokens", "8 or more", "4")
    request.computed({"kv": [3, 1]}, 8)
    found = both.sink.fetch(both.ticket, PROMPT, PAGES_OF)
    request.finish({"kv": [3, 1, 2]})
    found.wait(10)


def test_pages_that_another_fetch_writes(both: Two) -> None:
    """Also through another Sink over the same pool; an end that is proven frees them."""
    first = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
    again = kvproto.new_ticket("prefill")
    said = ("page 0", "another fetch")
    refused(lambda: both.sink.fetch(again, PROMPT, {"kv": [1, 2, 0]}), ErrorCode.ITEM_ALIAS, 'pages["kv"][2]', *said)
    with kvproto.Sink("decode beside", both.sink.pool, {"prefill": both.sink._node.sources["prefill", 0][0]}) as other:
        refused(lambda: other.fetch(again, PROMPT, {"kv": [1, 0, 2]}), ErrorCode.ITEM_ALIAS, 'pages["kv"][1]', *said)
    both.sink.fetch(again, PROMPT, {"kv": [1, 2, 3]}).abort()
    first.abort()
    both.until(lambda: first.done and first.pages_free)
    still_works(both)  # into pages 9, 0, 5
    still_works(both)


def test_one_source_over_a_pool(tmp_path: Path) -> None:
    pool = filled()
    with kvproto.Source("prefill", pool, address_in(tmp_path)):
        refused(
            lambda: kvproto.Source("again", pool, address_in(tmp_path, "again")), ErrorCode.UNEXPECTED_MESSAGE, "pool",
            "Source 'prefill'",
        )  # fmt: skip
    with kvproto.Source("again", pool, address_in(tmp_path, "again")):
        pass


def test_an_expanded_tensor() -> None:
    wide = np.lib.stride_tricks.as_strided(shared((PAGES, 4, 2, 4)), NHD, (0, 8, 4, 1))
    refused(lambda: kvproto.Pool(GEOMETRY, {"kv": [wide] * 2}), ErrorCode.BAD_COLUMNS, 'tensors["kv"][0]', "expanded")


def test_element_types() -> None:
    """A float16 tensor is no bfloat16 cache; integers stand for the bits of any type."""
    half = kvproto.lay_out([kvproto.Cache.gqa("kv", 1, kv_heads=2, head_dim=4, page=4, dtype=kvproto.DType.BF16)])
    given = {"kv": {"k": shared(NHD, np.float16), "v": shared(NHD, np.float16)}}
    refused(lambda: kvproto.Pool(half, given), ErrorCode.BAD_COLUMNS, 'tensors["kv"]["k"]', "BF16", "F16")
    kvproto.Pool(half, {"kv": {p: shared((*NHD[:-1], 8)) for p in "kv"}}).close()
    kvproto.Pool(half, {"kv": {p: shared(NHD, np.int16) for p in "kv"}}).close()
    right = kvproto.lay_out([kvproto.Cache.gqa("kv", 1, kv_heads=2, head_dim=4, page=4, dtype=kvproto.DType.F16)])
    kvproto.Pool(right, given).close()


def test_a_request_that_nobody_wants_any_more(both: Two) -> None:
    """The source hears of an abort while it computes."""
    request = both.source.request(both.ticket, PROMPT)
    found = both.sink.fetch(both.ticket, PROMPT, PAGES_OF)
    both.until(lambda: sum(isinstance(e, kvproto.events.Connected) for e in both.told) == 2)
    request.computed({"kv": [3]}, 4)
    found.abort()
    both.until(lambda: found.pages_free)
    unwanted = both.until(lambda: [e for e in both.told if isinstance(e, kvproto.events.Unwanted)])
    assert unwanted == [kvproto.events.Unwanted(request)]
    request.fail("the client is gone")
    still_works(both)


def test_an_error_of_the_peer_reads_from_here(both: Two) -> None:
    both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1]}, tokens=6)
    found = both.sink.fetch(both.ticket, PROMPT, PAGES_OF)
    with pytest.raises(RemoteError) as caught:
        found.wait(10)
    for words in ("the peer expected 6, from this side it got 10", "reported by ", "prefill", "finish(tokens=...)"):
        assert words in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    still_works(both)


def test_a_source_that_never_comes_ends_by_the_deadline(tmp_path: Path) -> None:
    with kvproto.Sink("decode", kvproto.Pool.allocate(GEOMETRY, PAGES), {"prefill": address_in(tmp_path)}) as sink:
        found = sink.fetch(kvproto.new_ticket("prefill", deadline=0.05), PROMPT, PAGES_OF)
        with raises(KvprotoError, match=r"no answer to Hello from .*prefill", code=ErrorCode.DEADLINE):
            found.wait(10)
        assert found.pages_free


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    """The other rank runs, and is not blamed."""
    address = str(address_in(tmp_path)) + "-{rank}"
    halves = kvproto.lay_out(
        [kvproto.Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=kvproto.DType.U8)], kvproto.Parallel(tp=2)
    )
    with (
        kvproto.Source("prefill", kvproto.Pool.allocate(halves, PAGES, rank=0), address) as source,
        kvproto.Sink(
            "decode", kvproto.Pool.allocate(GEOMETRY, PAGES), {"prefill": address.format(rank=0)}, STEPPED
        ) as sink,
    ):
        both = Two(source, sink)
        sink.fetch(kvproto.new_ticket("prefill"), PROMPT, {"kv": [1, 2, 3]})
        (link,) = sink._node._links.values()
        both.until(lambda: len(link.endpoint.sessions) == 2 and len(link.endpoint.hindrances(None)) == 1)
        found = sink.fetch(kvproto.new_ticket("prefill", deadline=0.01), PROMPT, PAGES_OF)
        both.until(lambda: found.done)
        (lost,) = [e for e in both.told if isinstance(e, kvproto.events.Lost)]
        assert lost.error.code == ErrorCode.DEADLINE
        assert f"no answer to Hello from prefill rank 1 at {address.format(rank=1)}:" in lost.error.advice
        assert "prefill-0" not in lost.error.advice
        assert "prefill rank 1 at ipc://(hidden)" in record_of(lost)["error"]


@pytest.mark.parametrize(("replica", "named"), [(0, "prefill"), (1, "prefill replica 1")])
def test_an_engine_that_never_answers_is_named_by_its_name_and_address(
    replica: int, named: str, tmp_path: Path
) -> None:  # fmt: skip
    """A record hides the address, and still says which engine it is."""
    address = address_in(tmp_path)
    with kvproto.Sink(
        "decode", kvproto.Pool.allocate(GEOMETRY, PAGES), {("prefill", replica): address}, STEPPED
    ) as sink:
        found = sink.fetch(kvproto.new_ticket("prefill", replica, deadline=0.01), PROMPT, PAGES_OF)
        told: list[kvproto.events.Event] = []
        while not found.done:
            told += sink.step(0.005)
        (lost,) = [e for e in told if isinstance(e, kvproto.events.Lost)]
        assert f"no answer to Hello from {named} at {address}" in lost.error.advice
        assert f"from {named} at ipc://(hidden)" in record_of(lost)["error"]


def test_another_engine_at_the_address(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    with (
        kvproto.Source("somebody else", filled(), address),
        kvproto.Sink("decode", kvproto.Pool.allocate(GEOMETRY, PAGES), {"prefill": address}) as sink,
    ):
        found = sink.fetch(kvproto.new_ticket("prefill"), PROMPT, PAGES_OF)
        with raises(KvprotoError, match="somebody else", code=ErrorCode.WRONG_PEER):
            found.wait(10)
        assert not [e for e in sink.events() if isinstance(e, kvproto.events.Connected)]
