"""Pools that go to sleep, wake and move: who is asked, what ends, what goes on, and when memory is free."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import kvproto
from kvproto.asyncio import drive, wait
from kvproto.events import Arrived, PoolFree
from kvproto.rank import registration
from kvproto.session.table import SessionState
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import ErrorCode, Feature
from tests.door.doors import GEOMETRY, PAGES, PROMPT, STEPPED, Two, address_in, filled, places, rows, two
from tests.errors import raises

HERE, THERE = [3, 4, 5], [6, 7, 8]
WAYS = {
    "stepped": kvproto.Options(thread=False),
    "thread": kvproto.Options(),
    "pull": kvproto.Options(thread=False, pull=True),
    "inline": kvproto.Options(thread=False, transports=["inline"]),
    "part by part": kvproto.Options(thread=False, part_bytes=1),
}


def another(pages: int = PAGES) -> kvproto.Pool:
    return kvproto.Pool.allocate(GEOMETRY, pages)


def hand_over(pair: Two, table: list[int] = THERE) -> None:
    """A request arrives, in the pool of its sink."""
    made = kvproto.new_ticket("prefill")
    request = pair.source.request(made, PROMPT)
    request.finish({"kv": HERE})
    fetch = pair.sink.fetch(made, PROMPT, {"kv": table})
    pair.ends(fetch)
    assert np.array_equal(rows(pair.sink.pool, table), rows(pair.source.pool, HERE))
    pair.until(lambda: request.done)


def sessions(pair: Two) -> list[int]:
    """Those that the source has."""
    return list(pair.source._node.endpoint.sessions)


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    with two(tmp_path, WAYS[request.param]) as made:
        yield made


def test_a_sink_sleeps_and_wakes_with_other_memory(pair: Two) -> None:
    """KVP-EPO-FREE, KVP-EPO-RISE: the session goes on; the memory is free at once, as nothing is under way."""
    hand_over(pair)
    old, before = pair.sink.pool, sessions(pair)
    sleeping = pair.sink.sleep()
    assert pair.sink.asleep
    with pytest.raises(kvproto.LocalError):
        old.close()
    assert isinstance(pair.ends(sleeping), PoolFree)
    old.close()
    pair.sink.wake(another())
    hand_over(pair)
    assert pair.sink.pool is not old
    assert sessions(pair) == before
    assert not [e for e in pair.told if type(e).__name__ in ("Disconnected", "Refused", "ProtocolError")]


def test_a_source_sleeps_and_wakes_with_other_memory(pair: Two) -> None:
    """KVP-EPO-MOVED: what it had ends with POOL_MOVED, and new requests are of the new memory."""
    hand_over(pair)
    made = kvproto.new_ticket("prefill")
    request = pair.source.request(made, PROMPT)
    request.computed({"kv": HERE}, 4)
    fetch = pair.sink.fetch(made, PROMPT, {"kv": THERE})
    pair.until(lambda: fetch.began and request._rank is pair.source)
    old = pair.source.pool
    sleeping = pair.source.sleep()
    pair.until(lambda: fetch.done and request.done and sleeping.done)
    with raises(kvproto.RemoteError, code=ErrorCode.POOL_MOVED):
        fetch.wait(0)
    assert fetch.pages_free
    old.close()
    pair.source.wake(filled())
    hand_over(pair)


def test_what_is_under_way_ends_in_the_old_pool_when_a_sink_moves(pair: Two) -> None:
    """KVP-EPO-RISE."""
    hand_over(pair)
    request, fetch = pair.asked(THERE, kvproto.new_ticket("prefill"))
    pair.until(lambda: not pair.sink._node._links["prefill", 0]._waiting)
    old = pair.sink.pool
    moved = pair.sink.move(another())
    hand_over(pair, [1, 2, 3])
    assert not moved.done
    assert moved.holders
    request.finish({"kv": HERE})
    pair.until(lambda: fetch.done and moved.done)
    assert isinstance(fetch.wait(0), Arrived)
    assert np.array_equal(rows(old, THERE), rows(pair.source.pool, HERE))
    old.close()


def test_fetches_under_way_end_with_pool_moved(pair: Two) -> None:
    """KVP-EPO-MOVED, KVP-END-REUSE."""
    hand_over(pair)
    made = kvproto.new_ticket("prefill")
    pair.source.request(made, PROMPT).computed({"kv": HERE}, 4)
    fetch = pair.sink.fetch(made, PROMPT, {"kv": THERE})
    sleeping = pair.sink.sleep("the trainer wants the memory")
    pair.until(lambda: fetch.done and sleeping.done)
    with raises(kvproto.RemoteError, match="the trainer wants the memory", code=ErrorCode.POOL_MOVED):
        fetch.wait(0)
    assert fetch.pages_free
    pair.sink.wake(another())
    hand_over(pair)


def test_both_sides_sleep_and_wake_many_times(pair: Two) -> None:
    """More often than a session has epochs at once (KVP-EPO-LIMIT)."""
    hand_over(pair)
    for n in range(12):
        ends = [door.sleep() for door in ((pair.sink, pair.source), (pair.source, pair.sink))[n % 2]]
        pair.until(lambda ends=ends: all(end.done for end in ends))
        for end in ends:
            end.pool.close()
        pair.sink.wake(another(PAGES + n))
        pair.source.wake(filled(PAGES + n))
        hand_over(pair)
    assert len(pair.source._node.memory._mapped) == 1


def test_the_same_pool_wakes_again(pair: Two) -> None:
    """Nobody has taken its memory; an Offer that overtakes its Registered need not come again (KVP-PUL-EARLY)."""
    hand_over(pair)
    for door in (pair.sink, pair.source):
        pool, sleeping = door.pool, door.sleep()
        door.wake(pool)
        hand_over(pair)
        pair.until(lambda sleeping=sleeping: sleeping.done)


def test_calls_that_need_a_pool_or_need_none(tmp_path: Path) -> None:
    with two(tmp_path, STEPPED) as pair:
        for door in (pair.sink, pair.source):
            with raises(kvproto.LocalError, code=ErrorCode.UNEXPECTED_MESSAGE):
                door.wake(another())
            door.sleep()
            with raises(kvproto.LocalError, code=ErrorCode.UNEXPECTED_MESSAGE):
                door.sleep()
        with pytest.raises(kvproto.LocalError) as fetch:
            pair.sink.fetch(pair.ticket, PROMPT, {"kv": THERE})
        with pytest.raises(kvproto.LocalError) as request:
            pair.source.request(pair.ticket, PROMPT)
        assert fetch.value.code == request.value.code == ErrorCode.POOL_MOVED
        with pytest.raises(kvproto.LocalError):
            pair.sink.move(another())
        pair.sink.wake(another())
        pair.source.wake(filled())
        hand_over(pair)


def test_pools_that_cannot_take_the_place(tmp_path: Path) -> None:
    closed = another()
    closed.close()
    with two(tmp_path, STEPPED) as pair:
        for wrong in ("no pool", closed):
            with pytest.raises(kvproto.LocalError):
                pair.sink.move(wrong)  # type: ignore[arg-type]
        hand_over(pair)


@pytest.mark.parametrize("without", ["source", "sink"])
@pytest.mark.parametrize("pull", [False, True])
def test_a_peer_without_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, pull: bool) -> None:
    """KVP-EPO-FREE: the session ends once its transfers are over, and another is opened."""
    real = registration.features_of

    def fewer(*given: Any, **named: Any) -> Any:
        return tuple(f for f in real(*given, **named) if f != Feature.EPOCHS)

    monkeypatch.setattr(f"kvproto.{without}.node.features_of", fewer)
    with two(tmp_path, attrs.evolve(STEPPED, pull=pull)) as pair:
        hand_over(pair)
        request, fetch = pair.asked(THERE, kvproto.new_ticket("prefill"))
        pair.until(lambda: not pair.sink._node._links["prefill", 0]._waiting)
        moved = pair.sink.move(another())
        hand_over(pair)
        request.finish({"kv": HERE})
        pair.until(lambda: fetch.done and moved.done)
        fetch.wait(0)
        for door in (pair.sink, pair.source):
            sleeping = door.sleep()
            pair.until(lambda sleeping=sleeping: sleeping.done)
            pair.settle()  # the other has heard Goodbye, which would end what it asks for meanwhile
            door.wake(filled())
            hand_over(pair)


def test_a_sink_that_connects_while_a_source_sleeps_and_one_that_sleeps_first(tmp_path: Path) -> None:
    for pull in (False, True):
        options = attrs.evolve(STEPPED, pull=pull)
        address = address_in(tmp_path, f"late-{pull}")
        with kvproto.Source("prefill", filled(), address, options) as source:
            source.sleep()
            with kvproto.Sink("decode", another(), {}, options) as sink:
                pair = Two(source, sink)
                sink.sleep()
                sink.connect("prefill", address=address)
                pair.turn()
                sink.wake(another())
                pair.turn(20)
                source.wake(filled())
                hand_over(pair)


def test_a_fetch_that_waits_for_its_source_writes_no_pool_that_has_moved(tmp_path: Path) -> None:
    """KVP-EPO-FREE: the source comes when the memory may be free already."""
    address, old = address_in(tmp_path), another()
    with kvproto.Sink("decode", old, {"prefill": address}, STEPPED) as sink:
        made = kvproto.new_ticket("prefill")
        fetch = sink.fetch(made, PROMPT, {"kv": THERE})
        moved = sink.move(another())
        with kvproto.Source("prefill", filled(), address, STEPPED) as source:
            source.request(made, PROMPT).finish({"kv": HERE})
            pair = Two(source, sink)
            pair.until(lambda: moved.done and fetch.done)
            with raises(kvproto.KvprotoError, code=ErrorCode.POOL_MOVED):
                fetch.wait(0)
            hand_over(pair)
            assert not rows(old, THERE).any()


def test_in_an_event_loop(tmp_path: Path) -> None:
    async def run() -> None:
        address = address_in(tmp_path)
        async with (
            drive(kvproto.Source("prefill", filled(), address, STEPPED)) as source,
            drive(kvproto.Sink("decode", another(), {"prefill": address}, STEPPED)) as sink,
        ):
            for _ in range(2):
                made = kvproto.new_ticket("prefill")
                source.request(made, PROMPT).finish({"kv": HERE})
                await wait(sink.fetch(made, PROMPT, {"kv": THERE}))
                assert np.array_equal(rows(sink.pool, THERE), rows(source.pool, HERE))
                sleeping = sink.sleep()
                assert isinstance(await wait(sleeping), PoolFree)
                sleeping.pool.close()
                sink.wake(another())
                ended = source.sleep()
                await wait(ended)
                source.wake(filled())

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_withdrawal_calls_back_and_close_ends_it(tmp_path: Path) -> None:
    heard: list[kvproto.Withdrawal] = []
    with two(tmp_path, STEPPED) as pair:
        hand_over(pair)
        sleeping = pair.sink.sleep()
        sleeping.add_done_callback(heard.append)
        pair.until(lambda: heard)
        assert heard == [sleeping]
        assert [e.withdrawal for e in pair.told if isinstance(e, PoolFree)] == [sleeping]
        pair.sink.wake(another())
        hand_over(pair)
        last = pair.sink.sleep()
        pair.sink.close()
        with pytest.raises(kvproto.LocalError):
            last.wait(0)
        last.pool.close()


class Held(ShmTransport):
    """Copies that are under way until the test says so."""

    held = False

    def start(self, moves: Any) -> Any:
        made = super().start(moves)
        return Copy(self, made) if self.held else made


class Copy:
    stream = None

    def __init__(self, transport: Held, made: Any) -> None:
        self.transport, self.bytes = transport, made.bytes

    @property
    def done(self) -> bool:
        return not self.transport.held

    def stop(self) -> Any:
        from kvproto.wire.enums import Proof

        return None if self.transport.held else Proof.PROVEN


@pytest.mark.parametrize("who", ["sink", "source", "move"])
def test_memory_is_not_free_while_a_copy_is_held_up(tmp_path: Path, who: str) -> None:
    """KVP-EPO-UNMAP, KVP-EPO-FREE: neither Abort nor Unregister nor time frees what a copy still touches."""
    transport = Held()
    polled = attrs.evolve(transport.capabilities, poll_interval=1e-3)
    transport.capabilities = polled
    with two(tmp_path, attrs.evolve(STEPPED, transports=[transport]), STEPPED) as pair:
        hand_over(pair)
        transport.held = True
        made = kvproto.new_ticket("prefill")
        pair.source.request(made, PROMPT).finish({"kv": HERE})
        fetch = pair.sink.fetch(made, PROMPT, {"kv": THERE})
        pair.until(lambda: pair.source._node._copies.under_way)
        calls = {"sink": pair.sink.sleep, "source": pair.source.sleep, "move": lambda: pair.sink.move(another())}
        end = calls[who]()
        pair.turn(60)
        assert not end.done
        assert end.holders
        with pytest.raises(TimeoutError, match="held by"):
            end.wait(0)
        transport.held = False
        pair.until(lambda: end.done and fetch.done)


def serve_and_hang(address: str, ready: Any) -> None:
    """A source whose copies never end."""
    transport = Held()
    transport.capabilities = attrs.evolve(transport.capabilities, poll_interval=1e-3)
    transport.held = True
    with kvproto.Source("prefill", filled(), address, attrs.evolve(STEPPED, transports=[transport])) as source:
        ready.send("listening")
        for _ in range(2):
            made = ready.recv()
            source.request(made, PROMPT).finish({"kv": HERE})
        while True:
            source.step(0.01)


def test_a_holder_that_is_killed_while_unregister_waits(tmp_path: Path) -> None:
    """KVP-EPO-FREE: a stopped one holds the memory for as long as it likes; its death is proof."""
    address = address_in(tmp_path)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve_and_hang, args=(address, theirs), daemon=True)
    process.start()
    try:
        assert ours.recv() == "listening"
        with kvproto.Sink("decode", another(), {"prefill": address}, STEPPED) as sink:
            tickets = [kvproto.new_ticket("prefill") for _ in range(2)]
            for made in tickets:
                ours.send(made)
            fetches = [sink.fetch(made, PROMPT, {"kv": t}) for made, t in zip(tickets, (HERE, THERE), strict=True)]
            link = sink._node._links["prefill", 0]
            asked = link.endpoint.transfers
            while len(asked) < 2 or not all(transfer.accepted for transfer in asked):
                sink.step(0.01)
            sleeping = sink.sleep()
            os.kill(process.pid or 0, signal.SIGSTOP)
            for _ in range(20):
                sink.step(0.005)
            assert sleeping.holders
            assert not sleeping.done
            sink.wake(another())
            os.kill(process.pid or 0, signal.SIGKILL)
            assert isinstance(sleeping.wait(20), PoolFree)
            assert all(fetch.pages_free for fetch in fetches)
            sleeping.pool.close()
    finally:
        process.kill()
        process.join()


# caches that change


def layers(count: int) -> Any:
    """The cache of a model of so many layers; a draft is a second model."""
    caches = [kvproto.Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=kvproto.DType.U8)]
    if count > 2:
        caches.append(
            kvproto.Cache.gqa("draft", count - 2, kv_heads=2, head_dim=4, page=4, dtype=kvproto.DType.U8, model=1)
        )
    return kvproto.lay_out(caches)


def with_draft(fill: bool = False) -> kvproto.Pool:
    """A pool of an engine whose draft is loaded."""
    pool = kvproto.Pool.allocate(layers(3), PAGES)
    if fill:
        for n, group in enumerate(("kv", "draft")):
            for part in ("k", "v"):
                array = pool.array(group, 0, part)
                array[:] = np.random.default_rng(n).integers(1, 256, array.shape, np.uint8)
    return pool


def hand_over_both(pair: Two) -> None:
    """A request of target and draft arrives."""
    made = kvproto.new_ticket("prefill")
    pair.source.request(made, PROMPT).finish({"kv": HERE, "draft": HERE})
    fetch = pair.sink.fetch(made, PROMPT, {"kv": THERE, "draft": THERE})
    pair.ends(fetch)
    for group in ("kv", "draft"):
        for part in ("k", "v"):
            there, here = (pool.array(group, 0, part) for pool in (pair.sink.pool, pair.source.pool))
            assert np.array_equal(there[THERE[0]], here[HERE[0]])


@pytest.mark.parametrize("first", ["sink", "source"])
def test_a_draft_is_loaded_and_unloaded(pair: Two, first: str) -> None:
    """KVP-DSC-AGAIN, at the door: both sides sleep, and wake with a draft and then without, whoever is first.

    The session goes on where both fit at any time: a source has the draft first and lets go of it last.
    """
    hand_over(pair)
    for draft in (True, False):
        before = sessions(pair)
        ends = [pair.sink.sleep(), pair.source.sleep()]
        pair.until(lambda ends=ends: all(end.done for end in ends))
        pools = (with_draft(), with_draft(fill=True)) if draft else (another(), filled())
        doors = list(zip((pair.sink, pair.source), pools, strict=True))
        for door, pool in doors if first == "sink" else doors[::-1]:
            door.wake(pool)
            pair.settle()
        (hand_over_both if draft else hand_over)(pair)
        assert (sessions(pair)[-1:] == before[-1:]) == ((first == "source") == draft)


def test_a_sink_moves_to_a_pool_of_other_caches(pair: Two) -> None:
    """KVP-DSC-AGAIN: what is under way ends by the old plan, in the old pool."""
    hand_over(pair)
    made = kvproto.new_ticket("prefill")
    whole = with_draft(fill=True)
    end = pair.source.sleep()
    pair.until(lambda: end.done)
    pair.source.wake(whole)
    pair.until(lambda: planned(pair))
    hand_over_target(pair)
    request, fetch = pair.asked(THERE, made)
    pair.until(lambda: not pair.sink._node._links["prefill", 0]._waiting)
    moved, old = pair.sink.move(with_draft()), pair.sink.pool
    hand_over_both(pair)
    request.finish({"kv": HERE, "draft": HERE})
    pair.until(lambda: fetch.done and moved.done)
    fetch.wait(0)
    assert np.array_equal(moved.pool.array("kv", 0, "k")[THERE[0]], whole.array("kv", 0, "k")[HERE[0]])
    assert old is not moved.pool


def draft_first() -> kvproto.Pool:
    """A pool whose draft comes before the target, so that its groups have other ids."""
    gqa = kvproto.Cache.gqa
    draft = gqa("draft", 1, kv_heads=2, head_dim=4, page=4, dtype=kvproto.DType.U8, model=1)
    return filled(
        geometry=kvproto.lay_out([draft, gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=kvproto.DType.U8)])
    )


def test_fetches_that_cross_a_change_of_the_sources_caches_go_on(pair: Two) -> None:
    """KVP-TRN-CHANGED, KVP-TKT-CHANGED: asked for before it sleeps, while it does, and when the sink knows nothing yet."""
    hand_over(pair)
    tickets = [kvproto.new_ticket("prefill") for _ in range(3)]
    tables = [[page, 8 + page, 12 + page] for page in range(3)]

    def fetch(n: int) -> kvproto.Fetch:
        return pair.sink.fetch(tickets[n], PROMPT, {"kv": tables[n]})

    fetches = [fetch(0)]
    pair.settle()
    end = pair.source.sleep()
    pair.until(lambda: end.done)
    fetches.append(fetch(1))
    pair.settle()
    pair.source.wake(draft_first())
    fetches.append(fetch(2))
    requests = [pair.source.request(each, PROMPT) for each in tickets]
    for request in requests:
        request.finish({"kv": HERE, "draft": HERE})
    pair.until(lambda: all(each.done for each in (*fetches, *requests)))
    for each, table in zip(fetches, tables, strict=True):
        each.wait(0)
        assert np.array_equal(rows(pair.sink.pool, table), rows(pair.source.pool, HERE))
    assert pair.sink.quarantined == {}


def test_pages_of_a_pool_that_was_taken_back_are_named_in_vain(pair: Two) -> None:
    """Whatever the caches of the next pool are: the request is over."""
    end = pair.source.sleep()
    pair.until(lambda: end.done)
    pair.source.wake(with_draft(fill=True))
    request = pair.source.request(kvproto.new_ticket("prefill"), PROMPT)
    last = pair.source.sleep()
    pair.until(lambda: last.done)
    pair.source.wake(filled())
    tables = {"kv": HERE, "draft": HERE}
    request.computed(tables, 4)
    request.finish(tables)
    pair.until(lambda: request.done)


def test_caches_change_while_a_register_is_mapped(tmp_path: Path) -> None:
    """KVP-REG-DIGESTS: nobody works out where rows of the old plan lie in the new pool."""
    with two(tmp_path, STEPPED) as pair:
        node, held = pair.source._node, threading.Event()

        def state() -> list[SessionState]:
            return [session.state for session in node.endpoint.sessions.values()]

        pair.until(lambda: state() == [SessionState.DESCRIBED])
        node._background.defer(lambda: held.wait(60), lambda done: None)
        pair.until(lambda: state() == [SessionState.REGISTERING])
        end = pair.source.sleep()
        pair.until(lambda: end.done)
        pair.source.wake(draft_first())
        held.set()
        pair.settle()
        made = kvproto.new_ticket("prefill")
        pair.source.request(made, PROMPT).finish({"kv": HERE, "draft": HERE})
        fetch = pair.sink.fetch(made, PROMPT, {"kv": THERE})
        pair.ends(fetch)
        assert np.array_equal(rows(pair.sink.pool, THERE), rows(pair.source.pool, HERE))


def planned(pair: Two) -> bool:
    """Whether the sink is ready under the source's Description of now."""
    endpoint, stated = pair.sink._node._links["prefill", 0].endpoint, pair.source._node.endpoint.stated
    found = [s for s in list(endpoint.sessions.values()) if s.open and s._described is not None]
    return endpoint.ready and [s.described.of_source.version for s in found] == [stated.version]


def hand_over_target(pair: Two) -> None:
    made = kvproto.new_ticket("prefill")
    pair.source.request(made, PROMPT).finish({"kv": HERE, "draft": HERE})
    fetch = pair.sink.fetch(made, PROMPT, {"kv": THERE})
    pair.ends(fetch)


def test_a_source_gains_a_rank(tmp_path: Path) -> None:
    """KVP-DSC-AGAIN: Describe says where the new rank listens, and the session with the other goes on."""
    address = address_in(tmp_path, "prefill-{rank}")
    caches = [kvproto.Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=kvproto.DType.U8)]
    both = kvproto.lay_out(caches, kvproto.Parallel(tp=2))

    def of_two(rank: int) -> kvproto.Pool:
        pool = kvproto.Pool.allocate(both, PAGES, rank=rank)
        for place in places():
            pool.array(*place)[:] = 1 + rank
        return pool

    with (
        kvproto.Source("prefill", filled(), address, STEPPED) as source,
        kvproto.Sink("decode", another(), {"prefill": address.format(rank=0)}, STEPPED) as sink,
    ):
        pair = Two(source, sink)
        hand_over(pair)
        before, end = sessions(pair), source.sleep()
        pair.until(lambda: end.done)
        with kvproto.Source("prefill", of_two(1), address, STEPPED) as added:
            source.wake(of_two(0))
            made = kvproto.new_ticket("prefill")
            for each in (source, added):
                each.request(made, PROMPT).finish({"kv": HERE})
            pair.settle()
            fetch = sink.fetch(made, PROMPT, {"kv": THERE})
            pair.until(lambda: (added.step(0.001) and fetch.done) or fetch.done)
            fetch.wait(0)
            assert sink.pool.array("kv", 0, "k")[THERE[0]].tolist() == [[[1] * 4, [2] * 4]] * 4
            assert sessions(pair) == before
