"""What a sink says of its sources: ready or not, greeted again for as long as they are connected, told of once."""

from collections.abc import Callable
from pathlib import Path

import pytest

import kvproto.session.source_endpoint
import kvproto.sink.node
import kvproto.source.node
from kvproto import KvprotoError, Options, Pool, Sink, Source, new_ticket
from kvproto.errors import DeviceFault, LocalError
from kvproto.events import Arrived, Connected, Disconnected, Event, Refused
from kvproto.session import limits
from kvproto.sink.node import SinkNode
from kvproto.wire.enums import ErrorCode
from tests.door.doors import GEOMETRY, PAGES, PROMPT, STEPPED, Two, address_in, filled, two
from tests.node.nodes import ahead

PREFILL = ("prefill", 0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are greeted again at once, and so is what gets no answer."""
    monkeypatch.setattr(limits, "RESEND", 0.02)
    monkeypatch.setattr(kvproto.sink.node, "_AGAIN", 0.001)
    monkeypatch.setattr(kvproto.sink.node, "_LONGEST", 0.01)


def decode(address: str, options: Options = STEPPED) -> Sink:
    return Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, options)


def until(sink: Sink, condition: Callable[[], object], *sources: Source) -> list[Event]:
    """Turns until it is true; the sink's events."""
    events: list[Event] = []
    for _ in range(4000):
        for source in sources:
            source.step(0.0)
        events += sink.step(0.002)
        if condition():
            return events
    raise AssertionError(events)


def test_pages_that_hold_a_request_are_free(tmp_path: Path) -> None:
    with two(tmp_path, STEPPED) as both:
        request, fetch = both.asked([9, 0, 5])
        assert not fetch.pages_free
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: fetch.done)
        assert isinstance(fetch.result, Arrived)
        assert fetch.pages_free


def test_a_source_that_starts_late_is_ready_without_a_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long after the sink has given up its first Hello; what that came to is reported once."""
    monkeypatch.setattr(limits, "PATIENCE", 0.01)
    with decode(address_in(tmp_path)) as sink:
        greeted = sink._node._links[PREFILL]
        events = until(sink, lambda: sink._node._links[PREFILL] is not greeted and sink._node._links[PREFILL].over)
        events += [event for _ in range(50) for event in sink.step(0.002)]
        assert [type(event) for event in events] == [Disconnected]
        monkeypatch.undo()
        with Source("prefill", filled(), address_in(tmp_path), STEPPED) as source:
            until(sink, lambda: sink.ready == {PREFILL}, source)


def test_a_source_that_restarts_is_ready_again_without_a_fetch(tmp_path: Path) -> None:
    with decode(address_in(tmp_path)) as sink:
        for _ in range(3):
            with Source("prefill", filled(), address_in(tmp_path), STEPPED) as source:
                events = until(sink, lambda: sink.ready, source)
                assert any(isinstance(event, Connected) for event in events)
            events = until(sink, lambda: not sink.ready)
            assert sum(isinstance(event, Disconnected) for event in events) == 1


def test_a_source_that_is_not_eagerly_greeted_waits_for_a_fetch(tmp_path: Path) -> None:
    with decode(address_in(tmp_path), Options(thread=False, eager=False)) as sink:
        for _ in range(2):
            with Source("prefill", filled(), address_in(tmp_path), STEPPED) as source:
                both = Two(source, sink)
                both.turn(20)
                assert not sink.ready
                fetch = sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
                source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
                both.until(lambda fetch=fetch: fetch.done)
                assert sink.ready
            until(sink, lambda: not sink.ready)


def test_a_source_that_refuses_is_told_of_once(tmp_path: Path) -> None:
    """However often it is greeted; once it agrees, it is ready."""
    source = Source("other", filled(), address_in(tmp_path), STEPPED)
    with decode(address_in(tmp_path)) as sink:
        links = set[object]()
        events = until(sink, lambda: links.add(sink._node._links[PREFILL]) or len(links) > 5, source)
        refused = [event for event in events if isinstance(event, Refused)]
        assert [event.error.code for event in refused] == [ErrorCode.WRONG_PEER]
        source.close()
        with Source("prefill", filled(), address_in(tmp_path), STEPPED) as right:
            until(sink, lambda: sink.ready, right)


def test_a_source_that_is_disconnected_is_not_greeted_again(tmp_path: Path) -> None:
    with two(tmp_path, STEPPED) as both:
        both.until(lambda: both.sink.ready)
        both.sink.disconnect("prefill")
        both.turn(50)
        assert not both.sink.ready
        assert not both.source._node.endpoint.sessions


def test_a_sink_that_has_ended_is_ready_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(node: SinkNode, ready: object) -> list[object]:
        raise DeviceFault(LocalError(ErrorCode.TRANSPORT_FAILED, "", "copy", "CUDA_ERROR_ILLEGAL_ADDRESS", ""))

    with two(tmp_path, STEPPED) as both:
        both.until(lambda: both.sink.ready)
        with monkeypatch.context() as patch:
            patch.setattr(SinkNode, "turn", fault)
            with pytest.raises(DeviceFault):
                both.sink.step(0.0)
        assert not both.sink.ready
    with two(tmp_path, STEPPED) as both:
        both.until(lambda: both.sink.ready)
        both.sink.close()
        assert not both.sink.ready


def test_a_fetch_that_no_source_has_accepted_survives_a_stop_of_this_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVP-SES-LOST: the source has given the session up, which the sink learns only from what it asks next."""
    with two(tmp_path, STEPPED) as both:
        both.until(lambda: both.sink.ready)
        with monkeypatch.context() as patch:
            for seconds in (6, 40, 80):
                ahead(patch, seconds, kvproto.source.node)
                for _ in range(3):
                    both.source.step(0.0)
        assert not both.source._node.endpoint.sessions
        tickets = [new_ticket("prefill") for _ in range(3)]
        tables = [[9, 0, 5], [1, 2, 3], [4, 6, 7]]
        fetches = [both.sink.fetch(t, PROMPT, {"kv": p}) for t, p in zip(tickets, tables, strict=True)]
        fetches[2].abort()
        for ticket in tickets:
            both.source.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
        both.until(lambda: all(fetch.done for fetch in fetches))
        assert all(isinstance(fetch.result, Arrived) for fetch in fetches[:2])
        with pytest.raises(KvprotoError, match="ABORTED"):
            fetches[2].wait(0)
        both.until(lambda: fetches[2].pages_free)
        assert both.sink.quarantined == {}


def test_of_two_sinks_of_one_name_the_survivor_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are told; the earlier one is served again, without a fetch, when the later one has ended."""
    monkeypatch.setattr(limits, "PING_SILENCE", 0.05)
    address, refused = address_in(tmp_path), list[Refused]()
    with Source("prefill", filled(), address, STEPPED) as source, decode(address) as first:
        until(first, lambda: first.ready, source)
        with decode(address) as second:
            until(second, lambda: second.ready, source)
            for _ in range(4000):
                events = [*source.step(0.0), *first.step(0.002)]
                refused += [event for event in events if isinstance(event, Refused)]
                if len({event.by_us for event in refused}) == 2:
                    break
            assert {event.by_us for event in refused} == {True, False}
            assert {event.error.code for event in refused} == {ErrorCode.SUPERSEDED}
            assert all("a name or replica of its own" in str(event.error) for event in refused)
            assert not first.ready
            until(second, lambda: second.ready, source)
        until(first, lambda: first.ready, source)
        both = Two(source, first)
        request, fetch = both.asked([9, 0, 5])
        request.finish({"kv": [3, 1, 2]})
        both.ends(fetch)


@pytest.mark.parametrize(
    ("options", "transports", "feature"),
    [
        (STEPPED, ("shm",), "VERIFY"),
        (Options(thread=False, transports="inline"), ("inline",), "INLINE"),
        (Options(thread=False, pull=True), ("shm",), "PULL"),
    ],
)
def test_a_session_says_its_version_features_and_transports(
    tmp_path: Path, options: Options, transports: tuple[str, ...], feature: str
) -> None:
    address = address_in(tmp_path)
    with Source("prefill", filled(), address, options) as source, decode(address, options) as sink:
        events = [*until(sink, lambda: sink.ready, source), *sink.step(0.0)]
        (connected,) = [event for event in events if isinstance(event, Connected)]
    assert (connected.version, connected.transports) == ("1.0", transports)
    assert feature in connected.features


def test_a_source_that_is_left_when_idle_serves_what_is_under_way(tmp_path: Path) -> None:
    """It gets nothing new; Goodbye comes after the last fetch."""
    with two(tmp_path, STEPPED) as both:
        both.until(lambda: both.sink.ready)
        request, fetch = both.asked([9, 0, 5])
        both.sink.disconnect("prefill", idle=True)
        both.turn(20)
        assert both.sink.ready == {PREFILL}
        with pytest.raises(LocalError, match="WRONG_PEER"):
            both.sink.fetch(kvproto.new_ticket("prefill"), PROMPT, {"kv": [1, 2, 3]})
        request.finish({"kv": [3, 1, 2]})
        both.ends(fetch)
        both.until(lambda: not both.sink.ready and not both.sink.sources)


def test_a_source_that_is_connected_again_is_not_left(tmp_path: Path) -> None:
    with two(tmp_path, STEPPED) as both:
        both.until(lambda: both.sink.ready)
        request, fetch = both.asked([9, 0, 5])
        both.sink.disconnect("prefill", idle=True)
        both.sink.connect("prefill", address=address_in(tmp_path))
        request.finish({"kv": [3, 1, 2]})
        both.ends(fetch)
        both.turn(20)
        assert both.sink.ready == {PREFILL}


def test_a_sink_without_any_source_is_not_ready(tmp_path: Path) -> None:
    with kvproto.Sink("decode", filled(), None, STEPPED) as sink:
        assert sink.unready == "it is connected to no source"
    with kvproto.Sink("decode", filled(), None, Options(thread=False, eager=False)) as sink:
        assert not sink.unready


def test_a_source_that_drains_is_not_ready_without_a_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-SES-DRAINING: it leaves a sink that needs nothing more, and refuses to be greeted."""
    monkeypatch.setattr(kvproto.session.source_endpoint, "_LEAVES", 0.01)
    with two(tmp_path, STEPPED) as both:
        both.until(lambda: both.sink.ready)
        both.source.drain()
        until(both.sink, lambda: "DRAINING" in both.sink.unready, both.source)
        assert not both.sink.ready
        assert both.source.drained


def test_a_source_that_drains_serves_what_was_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvproto.session.source_endpoint, "_LEAVES", 0.01)
    with two(tmp_path, STEPPED) as both:
        both.until(lambda: both.sink.ready)
        request, fetch = both.asked([9, 0, 5])
        both.turn(20)
        both.source.drain()
        both.turn(50)
        assert both.sink.ready
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: fetch.done)
        assert isinstance(fetch.result, Arrived)
        until(both.sink, lambda: not both.sink.ready, both.source)
