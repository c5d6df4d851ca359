"""Bytes inside the session, from door to door: any credit, late windows, two writers at once, sinks that do not read."""

import gc
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto import Cache, DType, Options, Pool, Prompt, Sink, Source, lay_out, new_ticket
from kvproto.errors import LocalError
from kvproto.session.inline import SinkInline
from kvproto.transport.base import Exposure, StreamDelivery
from kvproto.transport.inline.transport import FRAME, WINDOW, InlineTransport
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import ErrorCode, Transport

from .doors import PROMPT, Two, address_in, rows, two
from .keyed import keyed
from .late import TABLES, gone, late


def inline(window: int = WINDOW, **more: Any) -> Options:
    return Options(transports=[InlineTransport(window)], **more)


@pytest.mark.parametrize("window", [1, 100, WINDOW])
@pytest.mark.parametrize("thread", [False, True])
def test_a_request_arrives_whatever_credit_allows(tmp_path: Path, window: int, thread: bool) -> None:
    """The sink's window is not the source's."""
    with two(tmp_path, inline(thread=thread), inline(window, thread=thread)) as both:
        request, found = both.asked([9, 0, 5], cached=3)
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: found.done and request.done)
        assert list(found.wait(0).checksums) == [(0, "kv")]
        assert np.array_equal(rows(both.sink.pool, [9, 0, 5], 3), rows(both.source.pool, [3, 1, 2], 3))
        assert not rows(both.sink.pool, [9, 0, 5], 0, 3).any()


class _Broken(PackedStream):
    """One that cannot write its pages."""

    def unpack(self, offset: int, data: Any) -> Any:
        super().unpack(offset, data)
        raise LocalError(ErrorCode.TRANSPORT_FAILED, "", "pages that can be written", "none")


class _BrokenInline(InlineTransport):
    def expose(self, memory: Any, *more: Any) -> Exposure:
        made, own = super().expose(memory, *more), {id: each.buffer for id, each in memory.items()}
        return attrs.evolve(
            made, packed=StreamDelivery(made.packed.receiver, lambda program: _Broken(program, "sink", own))
        )


def test_the_error_of_a_lost_request_keeps_no_page_in_use(tmp_path: Path) -> None:
    """A pool can be freed once its Sink is closed, whoever still holds the handle."""
    gc.disable()
    try:
        with two(tmp_path, inline(), Options(transports=[_BrokenInline()])) as both:
            both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
            found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
            with pytest.raises(LocalError, match="pages that can be written"):
                found.wait(10)
        both.sink.pool.close()
    finally:
        gc.enable()
    assert found.done


def test_a_source_that_is_closed_in_mid_stream_lets_go_of_its_pool(tmp_path: Path) -> None:
    """The sink grants a byte and reads no more: the stream waits for credit when its Source is closed."""
    gc.disable()
    try:
        with two(tmp_path, inline(thread=False), inline(1, thread=False)) as both:
            both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
            both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
            both.until(lambda: both.source._node._copies.under_way)
            both.source.close()
            both.source.pool.close()
    finally:
        gc.enable()


def test_over_tcp_with_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.source.node.default", lambda memory: InlineTransport())
    monkeypatch.setattr("kvproto.sink.node.default", lambda memory: InlineTransport())
    with keyed(tmp_path) as (both, _, _):
        request, found = both.asked([9, 0, 5])
        request.finish({"kv": [3, 1, 2]})
        both.ends(found)
        assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


@pytest.mark.parametrize("first", ["inline", "shm"])
def test_the_first_transport_that_works_is_taken(tmp_path: Path, first: str) -> None:
    """KVP-REG-INLINE: not inline, where the source does not offer the feature."""
    theirs = Options(transports=[InlineTransport(), "shm"], thread=False)
    ours = Options(transports=first, thread=False)
    with two(tmp_path, ours, theirs) as both:
        request, found = both.asked([9, 0, 5])
        request.finish({"kv": [3, 1, 2]})
        both.ends(found)
        (peer,) = both.source._node.memory._mapped.values()
        wanted = Transport.INLINE if first == "inline" else Transport.SHM
        assert peer.transport.capabilities.code == wanted
        assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


def test_a_window_begins_where_its_rows_are(tmp_path: Path) -> None:
    """KVP-GRANT-LATE: the first Data says where."""
    with late(tmp_path, inline(), inline(100)) as both:
        (request,), found = both.begin(late=["window"])
        request.computed(TABLES, 20, since={"window": 12})
        request.finish({**TABLES, "window": gone(TABLES["window"], 4)}, since={"window": 18})
        assert found.wait(20).since == {"window": 18}
        both.check({"full": 0, "window": 18})


LARGE = lay_out([Cache.gqa("kv", 4, kv_heads=2, head_dim=64, page=64, dtype=DType.U8)])
"""64 KiB a page."""
PAGES = 64


def large(folder: Path, window: int) -> Two:
    address, options = address_in(folder), inline(window, thread=False)
    source = Source("prefill", Pool.allocate(LARGE, PAGES), address, options)
    sink = Sink("decode", Pool.allocate(LARGE, PAGES), {"prefill": address}, options)
    for layer in range(4):
        source.pool.array("kv", layer, "k")[:] = layer + 1
    return Two(source, sink)


def test_a_sink_that_does_not_read_bounds_what_a_source_holds(tmp_path: Path) -> None:
    """KVP-INL-CREDIT: no more than the window is packed, however often the source has a turn."""
    both = large(tmp_path, 4 * FRAME)
    with both.source, both.sink:
        prompt = Prompt(range(PAGES * 64))
        request, found = both.source.request(both.ticket, prompt), both.sink.fetch(both.ticket, prompt, _all())
        request.finish(_all())
        launches = both.source._node._copies.under_way
        both.until(lambda: launches)
        stream = launches[0].copying.stream
        (session,) = both.sink._node._links["prefill", 0].endpoint.sessions.values()
        assert stream is not None
        assert isinstance(session.delivery, SinkInline)
        came, end = session.delivery._came, time.monotonic() + 20
        while PAGES * (64 << 10) - stream.left < came.total:  # credit may be on its way
            both.source.step()
            assert time.monotonic() < end
        for _ in range(50):
            both.source.step()
        assert came.bytes < PAGES * (64 << 10) - stream.left == came.total <= came.bytes + 4 * FRAME
        both.ends(found)
        assert all((both.sink.pool.array("kv", n, "k") == n + 1).all() for n in range(4))


def test_a_short_request_does_not_wait_behind_a_long_one(tmp_path: Path) -> None:
    """KVP-INL-TURN: of the same session."""
    both = large(tmp_path, 4 * FRAME)
    with both.source, both.sink:
        long, short, ticket = Prompt(range(48 * 64)), Prompt(range(64, 128)), new_ticket("prefill")
        first = both.source.request(both.ticket, long), both.sink.fetch(both.ticket, long, {"kv": list(range(48))})
        first[0].finish({"kv": list(range(48))})
        both.until(lambda: both.source._node._copies.under_way)
        second = both.source.request(ticket, short), both.sink.fetch(ticket, short, {"kv": [50]})
        second[0].finish({"kv": [50]})
        both.until(lambda: second[1].done)
        assert not first[1].done
        both.until(lambda: first[1].done)
        for _, found in (first, second):
            found.wait(0)


def _all() -> dict[str, list[int]]:
    return {"kv": list(range(PAGES))}
