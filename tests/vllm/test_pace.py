"""The pace of a worker's steps: `kvproto_engines.pace`."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproto import Fetch, Options, Request, Sink, Source, new_ticket
from kvproto_engines.pace import Pace
from tests.door.doors import PROMPT, filled

TABLE, PAGES, LONG = [3, 1, 2], [5, 6, 7], 60.0


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[Source, Sink]]:
    place, options = f"ipc://{tmp_path}/p", Options(transports=["shm"])
    with Source("p", filled(), place, options) as source, Sink("d", filled(), {"p": place}, options) as sink:
        yield source, sink


def begun(engines: tuple[Source, Sink], pace: Pace) -> tuple[Request, Fetch]:
    source, sink = engines
    ticket = new_ticket("p")
    request, fetch = source.request(ticket, PROMPT), sink.fetch(ticket, PROMPT, {"kv": PAGES})
    pace.begun(request)
    pace.begun(fetch)
    return request, fetch


def rested(pace: Pace) -> float:
    """Seconds of a rest."""
    began = time.monotonic()
    pace.rest()
    return time.monotonic() - began


def test_a_rest_ends_with_a_fetch(engines: tuple[Source, Sink]) -> None:
    pace = Pace(LONG)
    request, fetch = begun(engines, pace)
    request.finish({"kv": TABLE})
    assert rested(pace) < LONG
    assert fetch.done


def test_a_fetch_that_ended_before_is_not_waited_for(engines: tuple[Source, Sink]) -> None:
    pace, (_, sink) = Pace(LONG), engines
    request, fetch = begun(engines, pace)
    ticket = new_ticket("p")
    pace.begun(sink.fetch(ticket, PROMPT, {"kv": [0, 1, 2]}))  # goes on
    request.finish({"kv": TABLE})
    fetch.wait()
    assert rested(pace) < LONG


def test_a_request_that_nobody_fetches_is_not_waited_for(engines: tuple[Source, Sink]) -> None:
    pace = Pace(LONG)
    pace.begun(engines[0].request(new_ticket("p"), PROMPT))
    assert rested(pace) < LONG


def test_threads_switch_often_while_transfers_are_under_way(engines: tuple[Source, Sink]) -> None:
    usual, pace = sys.getswitchinterval(), Pace(LONG)
    request, fetch = begun(engines, pace)
    assert sys.getswitchinterval() < usual
    request.finish({"kv": TABLE})
    request.wait()
    fetch.wait()
    until = time.monotonic() + LONG
    while not pace.idle:  # the callbacks of both follow their ends
        assert time.monotonic() < until
    assert sys.getswitchinterval() == usual
