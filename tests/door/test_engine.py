"""What an engine's own thread may rely on while it computes."""

import gc
import pydoc
import re
from pathlib import Path

import attrs
import pytest

from kvproto import Options, Request
from kvproto import events as told

from .doors import PROMPT, STEPPED, Two, left_over, rows, two

IN_PARTS = Options(thread=False, part_bytes=1)


def test_computed_copies_nothing_in_the_thread_of_the_engine(tmp_path: Path) -> None:
    with two(tmp_path, IN_PARTS) as both:
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        request = both.source.request(both.ticket, PROMPT)
        request.computed({"kv": [3]}, 4)
        both.until(lambda: rows(both.sink.pool, [9], 0, 4).all())
        request.computed({"kv": [3, 1]}, 8)
        assert not rows(both.sink.pool, [9, 0], 4, 8).any()
        both.until(lambda: rows(both.sink.pool, [9, 0], 4, 8).all())
        assert not found.done


@pytest.mark.parametrize("options", [Options(), STEPPED])
def test_a_request_that_is_over_takes_further_words_without_harm(tmp_path: Path, options: Options) -> None:
    with two(tmp_path, options) as both:
        request, found = both.asked([9, 0, 5])
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: found.done and request.done)
        request.computed({"kv": [3]}, 4)
        request.finish({"kv": [3, 1, 2]})
        request.fail("too late")
        assert isinstance(request.wait(0), told.Freed)


def test_one_transport_may_be_named_as_it_is() -> None:
    assert Options(transports="shm").transports == ("shm",)


@pytest.mark.parametrize("finished", [False, True])
def test_a_rank_that_takes_part_in_no_transfer_releases_its_request(tmp_path: Path, finished: bool) -> None:
    with two(tmp_path, Options()) as both:
        request = both.source.request(both.ticket, PROMPT)
        request.finish({"kv": [3, 1, 2]}) if finished else request.computed({"kv": [3]}, 4)
        request.release()
        over = request.wait(5)
        assert isinstance(over, told.Freed)
        assert over.routed == ()


def begun_and_left(both: Two) -> Request:
    """A request of which the sink has the first page when it says Goodbye."""
    request = both.source.request(both.ticket, PROMPT)
    both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
    request.computed({"kv": [3]}, 4)
    both.until(lambda: rows(both.sink.pool, [9], 0, 4).all())
    both.sink.close()
    while not any(isinstance(e, told.Unwanted) for e in both.source.step(0.005)):
        pass
    return request


def test_a_request_that_the_sink_has_not_acknowledged_is_not_freed_as_if_it_had(tmp_path: Path) -> None:
    with two(tmp_path, IN_PARTS) as both:
        request = begun_and_left(both)
        request.finish({"kv": [3, 1, 2]})
        over = request.wait(10)
        assert isinstance(over, told.Undelivered)
        assert (over.routed, [e.code.name for e in over.lost.values()]) == ((0,), ["PEER_LOST"])


def test_goodbye_unmaps_the_memory_of_a_peer_whose_transfer_is_open(tmp_path: Path) -> None:
    with two(tmp_path, IN_PARTS) as both:
        gc.collect()  # what earlier tests have left
        before = left_over()[3]
        request = begun_and_left(both)
        assert left_over()[3] == before
        assert not request.done


@pytest.mark.parametrize("cls", [Options, told.Arrived, told.Sent, told.Undelivered])
def test_help_says_what_each_field_is(cls: type) -> None:
    said = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    known = {"fetch", "request", "sink"}  # their types say it
    assert all(re.search(rf" {field.name}: [A-Z]", said) for field in attrs.fields(cls) if field.name not in known)
