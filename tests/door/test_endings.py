"""Requests that their engine gives up after prefill, and I/O threads that end by what a callback does."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvproto import KvprotoError, LocalError, Options, Prompt, Request, Sink, new_ticket
from kvproto.events import Freed
from kvproto.wire.enums import ErrorCode
from tests.door.doors import PROMPT, STEPPED, Two, two
from tests.door.test_inline import FRAME, PAGES, large
from tests.errors import raises

SOON = 20.0
"""Seconds in which something must happen."""


def prefilled(both: Two) -> tuple[Request, Any]:
    """A request that a sink waits for, and whose prefill is over; from now on the sink says nothing."""
    request, fetch = both.asked([9, 0, 5], new_ticket("prefill"))
    both.until(lambda: request.state is not None and request.state.asking())
    request.finish({"kv": [3, 1, 2]})
    for _ in range(5):
        both.source.step(0.002)
    assert not request.done
    return request, fetch


def test_a_request_that_is_copied_fails_at_once_beside_a_silent_sink(tmp_path: Path) -> None:
    """Nothing reads its pages, as the copy is over: the answer of the sink is not awaited."""
    with two(tmp_path, STEPPED) as both:
        request, fetch = prefilled(both)
        request.fail("the engine needs its pages")
        both.source.step(0.0)
        assert request.done
        assert isinstance(request.result, Freed)
        both.until(lambda: fetch.done)
        assert fetch.result is not None  # its bytes had arrived


def test_a_stream_that_waits_for_its_sink_is_stopped(tmp_path: Path) -> None:
    """A sink that grants no more credit holds pages no longer than until the engine gives the request up."""
    both = large(tmp_path, 4 * FRAME)
    with both.source, both.sink:
        prompt, pages = Prompt(range(PAGES * 64)), {"kv": list(range(PAGES))}
        request, fetch = both.source.request(both.ticket, prompt), both.sink.fetch(both.ticket, prompt, pages)
        both.until(lambda: request.state is not None and request.state.asking())
        request.finish(pages)
        for _ in range(50):
            both.source.step(0.0)
        assert not request.done
        request.fail("the engine needs its pages")
        for _ in range(5):
            both.source.step(0.0)
        assert isinstance(request.result, Freed)
        with pytest.raises(KvprotoError, match="needs its pages"):
            both.ends(fetch)
        both.until(lambda: fetch.pages_free)


def test_a_failed_request_costs_the_next_nothing(tmp_path: Path) -> None:
    with two(tmp_path, STEPPED) as both:
        request, _ = prefilled(both)
        request.fail("given up")
        after, fetch = both.asked([6, 7, 8], new_ticket("prefill"))
        after.finish({"kv": [3, 1, 2]})
        both.until(lambda: fetch.done and after.done and request.done)
        assert fetch.result is not None


def leave(_: object) -> None:
    sys.exit(3)


def ended(sink: Sink) -> None:
    """Every call raises the error that ended the thread, and no source is ready."""
    with raises(LocalError, code=ErrorCode.ABORTED):
        sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [6, 7, 8]})
    with pytest.raises(LocalError):
        sink.drain()
    assert sink.ready == frozenset()


@pytest.mark.parametrize(
    ("callback", "ends"),
    [(leave, {"code": ErrorCode.ABORTED}), (lambda _: None, {"path": "Options.callbacks"})],
    ids=["one that exits", "an executor that was shut down"],
)
def test_callbacks_that_end_a_thread_end_all_handles(tmp_path: Path, callback: Any, ends: dict[str, Any]) -> None:
    pool = None if callback is leave else ThreadPoolExecutor(1)
    with two(tmp_path, Options(), Options(callbacks=pool and pool.submit)) as both:
        both.until(lambda: both.sink.ready)
        other = both.sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [6, 7, 8]})
        request, first = both.asked([9, 0, 5], on_done=callback)
        if pool is not None:
            pool.shutdown()
        request.finish({"kv": [3, 1, 2]})
        assert first.wait(SOON) is not None
        with raises(LocalError, **ends) as caught:
            other.wait(SOON)
        assert ("SystemExit" in caught.value.yours) == (callback is leave)
        ended(both.sink)
