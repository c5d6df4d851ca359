"""Pages that are named when they are of use, from door to door: at the end of prefill, or piece by piece while it runs."""

import asyncio
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvproto.session.limits
from kvproto import Cache, DType, Options, Parallel, Pool, Sink, lay_out, new_ticket
from kvproto.asyncio import drive, wait
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.events import Arrived, Connected, Lost, PagesWanted
from kvproto.rank.registration import features_of
from kvproto.transport.inline.transport import InlineTransport
from kvproto.wire.enums import ErrorCode, Feature
from tests.errors import raises

from .claims import NOBODY, PAGE, TOKENS, Claims, Run, claims
from .doors import GEOMETRY, PROMPT, STEPPED, address_in, rows, two

WAYS = {
    "push": Options(thread=False, part_bytes=1, first_part_ratio=0),
    "at the end": Options(thread=False),
    "pull": Options(thread=False, pull=True),
    "inline": Options(thread=False, transports=[InlineTransport()]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spans", [False, True])
def test_pages_are_claimed_when_they_are_of_use(tmp_path: Path, way: str, spans: bool) -> None:
    """KVP-INT-WRITE, KVP-SPN-WHOLE: every kind of items; none before it is wanted."""
    with claims(tmp_path, WAYS[way]) as both:
        run = Run(both, TOKENS, spans, claim=lambda wanted: run.give(wanted))
        both.until(lambda: both.of(Connected))
        held = []
        for tokens in (7, 20, 33):
            run.compute(tokens)
            pages = -(-tokens // PAGE["sink"]) if spans and way == "push" else 0
            both.until(lambda pages=pages: len(run.ours.get("kv", [])) >= pages)
            both.turn(8)
            held.append(len(run.ours.get("kv", [])) - pages)
            both.untouched()
        assert held == [0, 0, 0]
        assert not run.ours.get("state")
        run.finish()
        both.until(lambda: run.fetch.done and run.request.done)
        assert run.fetch.wait(0).handoff == {"first": {"token": b"0123"}}
        run.arrived()
        both.untouched()
        assert not both.of(Lost)


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("ring", [5, 8, 16])
def test_a_ring_of_another_size(tmp_path: Path, ring: int, spans: bool) -> None:
    with claims(tmp_path, ring=max(ring, 8)) as both:
        run = Run(both, TOKENS, spans, claim=lambda wanted: run.give(wanted), late=True)
        for tokens in range(ring, TOKENS, ring):
            run.compute(tokens)
            both.turn()
        run.finish()
        both.until(lambda: run.fetch.done)
        run.fetch.wait(0)


def test_pages_by_events_and_not_yet(tmp_path: Path) -> None:
    """What a scheduler without a callable does; the pages of another request come free first."""
    with claims(tmp_path, pages=7) as both:
        first, second = Run(both, TOKENS, True), Run(both, TOKENS, True)
        first.compute(20)
        second.compute(20)
        both.until(lambda: len(both.of(PagesWanted)) == 2)
        wanted = {event.fetch: event for event in both.of(PagesWanted)}
        assert wanted[first.fetch].pages == {"kv": 3, "rows": 3, "ring": 0, "state": 0, "seen": 0}
        assert first.fetch.grant(first.give(wanted[first.fetch]))
        first.finish()
        second.finish()
        both.until(lambda: both.of(PagesWanted)[-1].tokens == TOKENS and len(both.of(PagesWanted)) == 4)
        last = {event.fetch: event for event in both.of(PagesWanted)}
        assert last[second.fetch].pages == {"kv": 5, "rows": 5, "ring": 1, "state": 1, "seen": 2}
        assert first.fetch.grant(first.give(last[first.fetch]))
        first.arrives()
        assert second.give(last[second.fetch]) is None
        first.back()
        assert second.fetch.grant(second.give(last[second.fetch]))
        second.arrives()
        both.untouched()


def test_the_same_with_an_io_thread(tmp_path: Path) -> None:
    """The callable runs in the I/O thread; a thread of the engine may grant as well."""
    asked: list[Any] = []
    with two(tmp_path, Options(part_bytes=1, first_part_ratio=0)) as both:
        granted = threading.Event()
        request = both.source.request(both.ticket, PROMPT)
        found = both.sink.fetch(
            both.ticket, PROMPT, spans=True, claim=lambda wanted: [asked.append(wanted), granted.set()][0]
        )
        request.computed({"kv": [3]}, 4)
        assert granted.wait(10)
        assert threading.current_thread().name != "kvproto Sink 'decode'"
        assert found.grant({"kv": [9]})
        request.computed({"kv": [3, 1]}, 8)
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: asked[-1].tokens == len(PROMPT))
        assert found.grant({"kv": [9, 0, 5]})
        found.wait(10)
        assert (rows(both.sink.pool, [9, 0, 5]) == rows(both.source.pool, [3, 1, 2])).all()


def test_the_same_in_asyncio(tmp_path: Path) -> None:
    async def run() -> None:
        options = Options(thread=False, part_bytes=1, first_part_ratio=0)
        with two(tmp_path, options) as both:
            async with drive(both.source), drive(both.sink):
                pages: list[int] = []

                def give(wanted: PagesWanted) -> dict[str, list[int]]:
                    assert asyncio.get_running_loop()
                    pages.extend([9, 0, 5][len(pages) : wanted.pages["kv"]])
                    return {"kv": pages}

                request = both.source.request(both.ticket, PROMPT)
                found = both.sink.fetch(both.ticket, PROMPT, claim=give, spans=True)
                request.computed({"kv": [3, 1]}, 7)
                request.finish({"kv": [3, 1, 2]})
                await asyncio.wait_for(wait(found), 10)
                assert (rows(both.sink.pool, pages) == rows(both.source.pool, [3, 1, 2])).all()

    asyncio.run(run())


def test_a_rank_without_hand_off_data_grants_its_own_pages(tmp_path: Path) -> None:
    """The first token is on the last pipeline stage, and this is the first."""
    caches = [
        Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=DType.U8),
        Cache.handoff("first", {"token": (DType.U8, 4)}),
    ]
    first = Pool.allocate(lay_out(caches, Parallel(pp=2)), 16, rank=0)
    with Sink("decode", first, {"prefill": address_in(tmp_path)}, STEPPED) as sink:
        assert sink.fetch(new_ticket("prefill"), PROMPT).grant({"kv": [1, 2, 3]})


# what goes wrong


def test_an_exception_of_the_callable_ends_its_fetch_alone(tmp_path: Path) -> None:
    def fail(wanted: PagesWanted) -> None:
        raise MemoryError("no blocks")

    with claims(tmp_path) as both:
        bad, good = Run(both, TOKENS, False, claim=fail), Run(both, TOKENS, False, claim=lambda w: good.give(w))
        bad.finish()
        good.finish()
        both.until(lambda: bad.fetch.done and good.fetch.done)
        with pytest.raises(LocalError, match="MemoryError: no blocks") as raised:
            bad.fetch.wait(0)
        assert (raised.value.code, raised.value.path, bad.fetch.pages_free) == (ErrorCode.ABORTED, "claim", True)
        good.arrived()


BAD: dict[str, tuple[dict[str, Any], ErrorCode, str]] = {
    "too few": ({"kv": [1]}, ErrorCode.BAD_GRANT, 'pages["kv"]'),
    "no such group": ({"v": [1]}, ErrorCode.BAD_GRANT, "pages"),
    "none": ({}, ErrorCode.BAD_GRANT, "pages"),
    "beyond the pool": ({"kv": [1, 2, 99]}, ErrorCode.OUT_OF_REGION, 'pages["kv"][2]'),
    "twice": ({"kv": [1, 2, 2]}, ErrorCode.ITEM_ALIAS, 'pages["kv"]'),
    "another's": ({"kv": [1, 2, 9]}, ErrorCode.ITEM_ALIAS, 'pages["kv"][2]'),
    "other pages than before": ({"kv": [2, 1, 3]}, ErrorCode.BAD_GRANT, 'pages["kv"][0]'),
}


@pytest.mark.parametrize("bad", BAD)
def test_pages_that_cannot_be_are_refused_and_good_ones_are_taken(tmp_path: Path, bad: str) -> None:
    with two(tmp_path, Options(thread=False)) as both:
        request = both.source.request(both.ticket, PROMPT)
        found = both.sink.fetch(both.ticket, PROMPT)
        other = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 10, 11]})
        if bad == "other pages than before":
            assert found.grant({"kv": [1]}, 4)
        pages, code, path = BAD[bad]
        with raises(LocalError, code=code, path=path):
            found.grant(pages)
        other.abort()
        both.until(lambda: other.done)
        assert not found.done
        assert found.grant({"kv": [1, 2, 3]})
        request.finish({"kv": [3, 1, 2]})
        both.ends(found)
        assert (rows(both.sink.pool, [1, 2, 3]) == rows(both.source.pool, [3, 1, 2])).all()


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    with two(tmp_path, Options(thread=False)) as both:
        for more, path in (({"claim": 3}, "claim"), ({"spans": 1}, "spans")):
            with raises(LocalError, path=path):
                both.sink.fetch(both.ticket, PROMPT, **more)
        for more, path in (({"claim": print}, "claim"), ({"spans": True}, "spans")):
            with raises(LocalError, path=path):
                both.sink.fetch(both.ticket, PROMPT, {"kv": [1, 2, 3]}, **more)
        found = both.sink.fetch(both.ticket, PROMPT)
        with raises(LocalError, path="tokens"):
            found.grant({"kv": [1, 2, 3]}, 11)


@pytest.mark.parametrize("granted", [False, True])
def test_an_aborted_fetch_gives_back_what_it_was_granted(tmp_path: Path, granted: bool) -> None:
    """KVP-END-REUSE: pages that were never granted need no proof; a grant that comes late is not taken."""
    with claims(tmp_path) as both:
        run = Run(both, TOKENS, True)
        run.compute(20)
        both.until(lambda: both.of(PagesWanted))
        if granted:
            assert run.fetch.grant(run.give(both.of(PagesWanted)[0]))
            both.turn()
        run.fetch.abort()
        both.until(lambda: run.fetch.done)
        assert run.fetch.pages_free
        assert not any(both.sink.quarantined.values())
        assert not run.fetch.grant({"kv": [1, 2, 3]}, 20)
        run.back()
        run = Run(both, TOKENS, True, claim=lambda wanted: run.give(wanted))
        run.finish()
        run.arrives()


def test_a_source_that_is_gone_keeps_what_was_granted_in_quarantine(tmp_path: Path) -> None:
    """KVP-END-REUSE: granted pages alone are counted."""
    with claims(tmp_path) as both:
        run = Run(both, TOKENS, True)
        run.compute(12)
        both.until(lambda: both.of(PagesWanted))
        assert run.fetch.grant(run.give(both.of(PagesWanted)[0]))
        both.until(lambda: (both.sink_rows["kv", 0, "k"][run.ours["kv"]] != NOBODY).any())
        both.source._node.endpoint.goodbye("over")
        both.source._node._flush()
        both.until(lambda: run.fetch.done)
        assert not run.fetch.pages_free
        assert {g: n for g, n in both.sink.quarantined.items() if n} == {"kv": 2, "rows": 2}


def test_an_intent_that_is_never_granted_ends_with_its_ticket(tmp_path: Path) -> None:
    """KVP-TKT-DEADLINE."""
    with two(tmp_path, Options(thread=False)) as both:
        ticket = new_ticket("prefill", deadline=0.3)
        request = both.source.request(ticket, PROMPT)
        found = both.sink.fetch(ticket, PROMPT)
        request.finish({"kv": [3, 1, 2]})
        with pytest.raises(RemoteError) as lost:
            both.ends(found)
        assert (lost.value.code, found.pages_free) == (ErrorCode.DEADLINE, True)


@pytest.mark.parametrize("missing", [{Feature.SPANS}, {Feature.SPANS, Feature.INTENT}])
@pytest.mark.parametrize("pull", [False, True])
def test_a_peer_that_knows_less_is_served_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: set[Feature], pull: bool
) -> None:
    """KVP-NEG-UNUSED: pages are wanted at the end of prefill, or before the Transfer."""

    def less(*args: Any) -> tuple[Feature, ...]:
        return tuple(f for f in features_of(*args) if f not in missing)

    monkeypatch.setattr("kvproto.source.node.features_of", less)
    with claims(tmp_path, Options(thread=False, pull=pull, part_bytes=1, first_part_ratio=0)) as both:
        both.until(lambda: bool(both.sink.ready))
        run = Run(both, TOKENS, True, claim=lambda wanted: run.give(wanted))
        run.compute(20)
        both.turn(20)
        assert bool(run.ours) == (Feature.INTENT in missing)
        run.finish()
        run.arrives()
        assert [event.tokens for event in both.of(PagesWanted)] == [TOKENS]


def test_an_intent_outlives_a_move_and_not_a_sleep(tmp_path: Path) -> None:
    """KVP-EPO-FREE, KVP-INT-WRITE: pages are of the pool of the fetch; it is free once the fetch is over."""
    with two(tmp_path, Options(thread=False)) as both:
        request = both.source.request(both.ticket, PROMPT)
        found, pool = both.sink.fetch(both.ticket, PROMPT), both.sink.pool
        both.until(lambda: [e for e in both.told if isinstance(e, Connected)])
        both.turn(20)
        withdrawal = both.sink.move(Pool.allocate(GEOMETRY, 16))
        both.turn(20)
        assert not withdrawal.done
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: [e for e in both.told if isinstance(e, PagesWanted)])
        assert found.grant({"kv": [9, 0, 5]})
        both.until(lambda: found.done and withdrawal.done)
        found.wait(0)
        assert (rows(pool, [9, 0, 5]) == rows(both.source.pool, [3, 1, 2])).all()
        ticket = new_ticket("prefill")
        request = both.source.request(ticket, PROMPT)
        found = both.sink.fetch(ticket, PROMPT)
        both.turn()
        both.sink.sleep()
        with raises(KvprotoError, code=ErrorCode.POOL_MOVED):
            both.ends(found)
        assert not found.grant({"kv": [9, 0, 5]})


# any order of events


STEPS = st.lists(
    st.tuples(st.sampled_from(["compute", "finish", "grant", "ahead", "abort", "turn", "new"]), st.integers(0, 9)),
    min_size=5, max_size=40,
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 99), loss=st.sampled_from([0.0, 0.2]), pages=st.integers(6, 14))
def test_any_order_of_events(steps: list[tuple[str, int]], seed: int, loss: float, pages: int) -> None:
    """KVP-INT-WRITE, KVP-SPN-WHOLE: free pages are never written, and what arrives is what was computed."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(kvproto.session.limits, "RESEND", 0.01)
        with claims(Path(folder), pages=pages) as both:
            lossy(both, random.Random(seed), loss)
            for what, number in steps:
                step(both, what, number)
                for run in both.runs:
                    settle(run)
                both.untouched()
            end(both)


def lossy(both: Claims, dice: random.Random, loss: float) -> None:
    """Frames of transfers are lost, either way."""

    def losing(send: Any) -> Any:
        return lambda *frame: (bool(both.runs) and dice.random() < loss) or send(*frame)

    for carrier in (both.source._node._listener, both.sink._node._dialer):
        carrier.send = losing(carrier.send)  # type: ignore[method-assign]


def step(both: Claims, what: str, number: int) -> None:
    live = [run for run in both.runs if not run.fetch.done]
    if what == "new" or not live:
        if len(both.runs) < 3:
            Run(both, 9 + 4 * number, bool(number % 3), late=True)
        return
    run = live[number % len(live)]
    if what == "compute" and not run.finished:
        run.compute(min(run.tokens, run.computed + 1 + number))
    elif what == "finish" and not run.finished:
        run.finish()
    elif what == "grant":
        wanted = [event for event in both.of(PagesWanted) if event.fetch is run.fetch]
        if wanted and (pages := run.give(wanted[-1])) is not None:
            run.fetch.grant(pages)
    elif what == "ahead":
        tokens = min(run.tokens, run.computed + number)
        if both.here.grow(run.ours, run.fetch.lengths(tokens)):
            run.fetch.grant(run.ours, tokens)
    elif what == "abort" and number < 2:
        run.fetch.abort()
    for _ in range(number):
        both.turn()


def settle(run: Run) -> None:
    """What the engine does with a fetch that is over."""
    if run.fetch.done and not run.given_back:
        try:
            assert isinstance(run.fetch.wait(0), Arrived)
            run.arrived()
        except KvprotoError:
            if not run.fetch.pages_free:
                return
        run.back()


def end(both: Claims) -> None:
    """Everything goes to its end."""
    for run in both.runs:
        if not run.finished and not run.request.done:
            run.finish()

    def over() -> bool:
        for run in both.runs:
            if not run.fetch.done and both.here.grow(run.ours, run.fetch.lengths(run.tokens)):
                run.fetch.grant(run.ours, run.tokens)
            settle(run)
        both.untouched()
        return all(run.given_back for run in both.runs)

    both.until(over)


def test_pages_are_asked_for_and_the_fetch_is_lost_in_one_turn(tmp_path: Path) -> None:
    """The source says that prefill is over, and Goodbye, before the sink has a turn."""
    with two(tmp_path, STEPPED) as both:
        request = both.source.request(both.ticket, PROMPT)
        fetch = both.sink.fetch(both.ticket, PROMPT)
        both.until(lambda: both.sink.ready and both.sink._node._links["prefill", 0].endpoint.transfers)
        both.turn(5)
        request.finish({"kv": [3, 1, 2]})
        both.source.step()
        both.source.close()
        told: list[object] = []
        while not fetch.done:
            told += both.sink.step(0.01)
        assert [type(each).__name__ for each in told if getattr(each, "fetch", None) is fetch] == [
            "PagesWanted",
            "Lost",
        ]


def test_pages_are_named_while_a_pool_moves(tmp_path: Path) -> None:
    """The stream goes into the pool that the request was asked for in, whatever the source holds of the next one."""
    with two(tmp_path, WAYS["inline"]) as both:
        both.until(lambda: both.sink.ready)
        made = new_ticket("prefill")
        request, fetch = both.source.request(made, PROMPT), both.sink.fetch(made, PROMPT)
        request.finish({"kv": [3, 4, 5]})
        both.until(lambda: [event for event in both.told if isinstance(event, PagesWanted)])
        old, moved = both.sink.pool, both.sink.move(Pool.allocate(GEOMETRY, 16))
        both.told += both.sink.step(0)  # the source has not heard of it yet
        fetch.grant({"kv": [6, 7, 8]})
        both.until(lambda: fetch.done and moved.done)
        fetch.wait(0)
        assert (rows(old, [6, 7, 8]) == rows(both.source.pool, [3, 4, 5])).all()


def test_pages_that_are_granted_while_an_offer_is_given_back_are_not_read(tmp_path: Path) -> None:
    with two(tmp_path, Options(thread=False, pull=True)) as both:
        request = both.source.request(both.ticket, PROMPT)
        wanted: list[object] = []
        found = both.sink.fetch(both.ticket, PROMPT, claim=lambda pages: wanted.append(pages))
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: wanted)
        found.abort()
        found.grant({"kv": [1, 2, 3]})
        with raises(KvprotoError, code=ErrorCode.ABORTED):
            both.ends(found)
