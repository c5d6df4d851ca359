"""`Options.debug_pages`: an engine that changes a page after `finish` is told which, and one that keeps them is not."""

import logging
from pathlib import Path

import attrs
import pytest

from kvproto import KvprotoError, Options
from kvproto.events import Freed, Undelivered
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

from .doors import PAGE, PROMPT, two

WAYS = [
    pytest.param(Options(), id="thread"),
    pytest.param(Options(thread=False), id="step"),
    pytest.param(Options(pull=True), id="pull"),
    pytest.param(Options(transports="inline", verify=False), id="inline"),
]
WHERE = "layer 1, page 2 of the request, item 2 of the pool; 1 in all"


@pytest.mark.parametrize("options", WAYS)
def test_a_page_that_changes_after_finish_is_named_at_both_sides(
    tmp_path: Path, options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    with two(tmp_path, attrs.evolve(options, debug_pages=True), options) as both:
        request = both.source.request(both.ticket, PROMPT)
        request.finish({"kv": [3, 1, 2]})
        both.source.pool.array("kv", 1, "v")[2, 1] ^= 1
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        both.until(lambda: found.done and request.done)
        with raises(KvprotoError, match=WHERE, code=ErrorCode.VERIFY_FAILED):
            found.wait(0)
        over = request.wait(0)
        assert isinstance(over, Undelivered)
        assert WHERE in str(over.lost[0])
    assert [WHERE in said.getMessage() for said in caplog.records if said.levelno == logging.ERROR] == [True]


@pytest.mark.parametrize("options", WAYS)
def test_rows_that_are_not_the_requests_may_change(tmp_path: Path, options: Options) -> None:
    """A row behind the prompt in its last page, a page of another request, and a page that was given up."""
    with two(tmp_path, attrs.evolve(options, debug_pages=True), options) as both:
        request = both.source.request(both.ticket, PROMPT)
        request.finish({"kv": [-1, 1, 2]}, since=PAGE)
        for page, row in ((2, 2), (4, 0), (3, 0)):
            both.source.pool.array("kv", 1, "v")[page, row] ^= 1
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}, cached=PAGE)
        both.until(lambda: found.done and request.done)
        found.wait(0)
        assert isinstance(request.wait(0), Freed)


def test_without_it_the_sink_gets_the_changed_page_and_nobody_is_told(tmp_path: Path) -> None:
    """A checksum of a transfer compares both sides after the copy: what changes before is copied faithfully."""
    with two(tmp_path, Options(verify="pages")) as both:
        request = both.source.request(both.ticket, PROMPT)
        request.finish({"kv": [3, 1, 2]})
        both.source.pool.array("kv", 1, "v")[2, 1] ^= 1
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        both.until(lambda: found.done and request.done)
        found.wait(0)
        assert isinstance(request.wait(0), Freed)
