"""The good paths, driven in each of the three ways."""

import asyncio
import gc
import select
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto import Fetch, Options, Pool, Prompt, Request, Sink, Source, new_ticket
from kvproto import events as told
from kvproto.asyncio import drive, wait
from kvproto.errors import ErrorCode, LocalError
from tests.errors import raises

from .doors import GEOMETRY, PAGES, PROMPT, STEPPED, Two, address_in, filled, left_over, rows, two

WAYS = [pytest.param(Options(), id="thread"), pytest.param(STEPPED, id="step")]


def hand_over(both: Two, table: list[int], pages: list[int], **fetch: Any) -> told.Arrived:
    request, found = both.asked(pages, **fetch)
    request.finish({"kv": table})
    both.until(lambda: found.done and request.done)
    assert isinstance(request.wait(0), told.Freed)
    return found.wait(0)


@pytest.mark.parametrize("options", WAYS)
def test_a_request_arrives(tmp_path: Path, options: Options) -> None:
    with two(tmp_path, options) as both:
        arrived = hand_over(both, [3, 1, 2], [9, 0, 5])
        assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))
        assert sum(arrived.bytes.values()) == len(PROMPT) * 2 * 2 * 2 * 4
        assert not arrived.finished
        assert list(arrived.checksums) == [(0, "kv")]


@pytest.mark.parametrize("options", WAYS)
def test_a_prefix_and_longer_tables(tmp_path: Path, options: Options) -> None:
    with two(tmp_path, options) as both:
        hand_over(both, [3, 1, 2, 7], [9, 0, 5, 6, 8], cached=5)
        assert not rows(both.sink.pool, [9, 0, 5], 0, 5).any()
        assert np.array_equal(rows(both.sink.pool, [9, 0, 5], 5), rows(both.source.pool, [3, 1, 2], 5))
        assert not both.sink.pool.array("kv", 0, "k")[[6, 8]].any()


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("pull", [False, True])
def test_push_and_pull(tmp_path: Path, options: Options, pull: bool) -> None:
    chosen = Options(thread=options.thread, pull=pull)
    with two(tmp_path, chosen) as both:
        hand_over(both, [3, 1, 2], [9, 0, 5])
        assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


@pytest.mark.parametrize("options", WAYS)
def test_requests_of_several_threads(tmp_path: Path, options: Options) -> None:
    """Each thread has pages of its own, and makes all calls about its requests."""
    arrived: list[told.Arrived | None] = []

    def engine(both: Two, pages: list[int]) -> None:
        for _ in range(4):
            ticket, over = new_ticket(both.source.name), threading.Semaphore(0)
            request, found = both.asked(pages, ticket)
            request.computed({"kv": [3, 1]}, 8)
            request.finish({"kv": [3, 1, 2]})
            request.add_done_callback(lambda _, over=over: over.release())  # type: ignore[misc]
            found.add_done_callback(lambda _, over=over: over.release())  # type: ignore[misc]
            assert over.acquire(timeout=30)
            assert over.acquire(timeout=30)
            arrived.append(found.result)

    with two(tmp_path, options) as both:
        tables = [list(range(at, at + 3)) for at in range(0, PAGES - 2, 3)]
        threads = [threading.Thread(target=engine, args=(both, pages)) for pages in tables]
        for thread in threads:
            thread.start()
        both.until(lambda: not any(thread.is_alive() for thread in threads))
        assert len(arrived) == 4 * len(tables)
        assert None not in arrived
        for pages in tables:
            assert np.array_equal(rows(both.sink.pool, pages), rows(both.source.pool, [3, 1, 2]))


def test_parts_that_are_computed_meanwhile(tmp_path: Path) -> None:
    with two(tmp_path, Options(part_bytes=1)) as both:
        request, found = both.asked([9, 0, 5])
        request.computed({"kv": [3]}, 4)
        both.until(lambda: rows(both.sink.pool, [9], 0, 4).all())
        assert not found.done
        request.computed({"kv": [3, 1]}, 8)
        request.finish({"kv": [3, 1, 2]})
        found.wait(10)
        assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))


def test_a_loop_of_one_s_own_sleeps_on_the_descriptor(tmp_path: Path) -> None:
    with two(tmp_path, STEPPED) as both:
        request, found = both.asked([9, 0, 5])
        request.finish({"kv": [3, 1, 2]})
        doors, turns = {door.fileno(): door for door in (both.source, both.sink)}, 0
        while not (found.done and request.done):
            timers = [t for door in doors.values() if (t := door.next_timer()) is not None]
            ready, _, _ = select.select(list(doors), [], [], min([*timers, 5.0]))
            for door in doors.values() if not ready else [doors[fd] for fd in ready]:
                door.step()
            turns += 1
            assert turns < 500


def test_beside_an_io_thread_the_descriptor_says_that_there_are_events(tmp_path: Path) -> None:
    """What came before the first question counts too; nothing is left to say once `events` was asked."""
    with two(tmp_path) as both:
        request = both.source.request(both.ticket, PROMPT)
        both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        request.finish({"kv": [3, 1, 2]})
        seen: list[told.Event] = []
        fd = both.sink.fileno()
        while not any(isinstance(event, told.Arrived) for event in seen):
            assert select.select([fd], [], [], 10)[0]
            seen += both.sink.events()
        assert any(isinstance(event, told.Connected) for event in seen)
        assert not select.select([fd], [], [], 0)[0]
        both.source.close()
        assert select.select([fd], [], [], 10)[0]


def test_a_sink_says_which_sources_answer(tmp_path: Path) -> None:
    with two(tmp_path) as both:
        both.until(lambda: both.sink.ready == {("prefill", 0)})
        both.sink.connect("prefill", 1, address=f"ipc://{tmp_path}/nobody")
        assert both.sink.ready == {("prefill", 0)}
        both.source.close()
        both.until(lambda: not both.sink.ready)


def test_asyncio(tmp_path: Path) -> None:
    async def main() -> told.Arrived:
        address = address_in(tmp_path)
        async with (
            drive(Source("prefill", filled(), address, STEPPED)) as source,
            drive(Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, STEPPED)) as sink,
        ):
            ticket = new_ticket("prefill")
            request = source.request(ticket, PROMPT)
            found = sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
            request.finish({"kv": [3, 1, 2]})
            arrived = await wait(found)
            await wait(request)
            assert np.array_equal(rows(sink.pool, [9, 0, 5]), rows(source.pool, [3, 1, 2]))
            return arrived

    before = left_over()
    assert asyncio.run(asyncio.wait_for(main(), 30)).bytes == {0: 320}
    assert left_over()[0] == before[0]


def test_asyncio_says_that_nothing_drives_a_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Awaiting it would never end."""
    monkeypatch.setattr("kvproto.asyncio._IDLE", 0.001)
    with two(tmp_path, Options(), STEPPED) as both:
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        with raises(LocalError, match="drive", code=ErrorCode.UNEXPECTED_MESSAGE, path="Sink 'decode'"):
            asyncio.run(asyncio.wait_for(wait(found), 30))


def test_asyncio_waits_for_a_sink_that_its_engine_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.asyncio._IDLE", 0.001)
    with two(tmp_path, STEPPED) as both:
        both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        both.sink.step()

        async def main() -> told.Arrived:
            arrived = asyncio.create_task(wait(found))
            while not arrived.done():
                both.source.step(0.001)
                both.sink.step(0.001)
                await asyncio.sleep(0)
            return arrived.result()

        assert asyncio.run(asyncio.wait_for(main(), 30)).bytes == {0: 320}


def test_asyncio_with_wrong_arguments(tmp_path: Path) -> None:
    async def enter(door: Any) -> None:
        async with drive(door):
            pass

    wrong: Any = 5
    with two(tmp_path) as both:
        for call, path in (
            (lambda: wait(wrong), "handle"),
            (lambda: enter(wrong), "rank"),
            (lambda: enter(both.sink), "drive"),
        ):
            with raises(LocalError, path=path):
                asyncio.run(call())
        hand_over(both, [3, 1, 2], [9, 0, 5])


def test_callbacks_come_where_the_options_say(tmp_path: Path) -> None:
    given: list[object] = []
    elsewhere = Options(callbacks=lambda call: given.append(call))
    with two(tmp_path, elsewhere) as both:
        over: list[object] = []
        request = both.source.request(both.ticket, PROMPT, on_free=over.append)
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}, on_done=over.append)
        request.finish({"kv": [3, 1, 2]})
        both.until(lambda: len(given) == 2)
        assert not over
        for call in given:
            call()  # type: ignore[operator]
        assert {type(each) for each in over} == {Fetch, Request}
        assert found in over


def test_callbacks_of_a_thread_come_outside_its_lock(tmp_path: Path) -> None:
    """A callback may call whatever it likes, a fetch included."""
    with two(tmp_path) as both:
        second = new_ticket("prefill")
        chained: list[Fetch] = []
        ended = threading.Event()

        def again(_: Fetch) -> None:
            chained.append(both.sink.fetch(second, PROMPT, {"kv": [10, 11, 12]}, on_done=lambda _: ended.set()))

        for ticket in (both.ticket, second):
            both.source.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
        both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]}, on_done=again)
        assert ended.wait(10)
        assert chained[0].wait(0).bytes == {0: 320}


@pytest.mark.parametrize("open_still", [True, False])
def test_a_callback_of_what_is_over_comes_at_once(tmp_path: Path, open_still: bool) -> None:
    """Not when the thread wakes for something else: that may be ten seconds later, and never once it has ended."""
    ended = threading.Event()
    with two(tmp_path) as both:
        both.source.request(both.ticket, PROMPT).finish({"kv": [3, 1, 2]})
        found = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        found.wait(10)
        if open_still:
            found.add_done_callback(lambda _: ended.set())
            assert ended.wait(5)
    found.add_done_callback(lambda _: ended.set())
    assert ended.wait(0)


def test_many_sources_to_one_sink(tmp_path: Path) -> None:
    names = ["red", "blue", "green"]
    sources = [Source(name, filled(), address_in(tmp_path, name)) for name in names]
    addresses = {name: address_in(tmp_path, name) for name in names}
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), addresses) as sink:
        found = []
        for n, source in enumerate(sources):
            ticket = new_ticket(source.name)
            source.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
            found.append(sink.fetch(ticket, PROMPT, {"kv": [3 * n, 3 * n + 1, 3 * n + 2]}))
        for n, fetch in enumerate(found):
            fetch.wait(10)
            held = rows(sink.pool, [3 * n, 3 * n + 1, 3 * n + 2])
            assert np.array_equal(held, rows(sources[n].pool, [3, 1, 2]))
        for source in sources:
            source.close()


def test_two_sinks_over_one_pool(tmp_path: Path) -> None:
    with two(tmp_path) as both, Sink("decode too", both.sink.pool, {"prefill": address_in(tmp_path)}) as other:
        hand_over(both, [3, 1, 2], [9, 0, 5])
        ticket = new_ticket("prefill")
        both.source.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
        other.fetch(ticket, PROMPT, {"kv": [10, 11, 12]}).wait(10)
        assert np.array_equal(rows(other.pool, [10, 11, 12]), rows(other.pool, [9, 0, 5]))


def test_a_pool_for_both_roles(tmp_path: Path) -> None:
    """An engine that prefills for others and decodes what others have prefilled."""
    with two(tmp_path) as both, Sink("prefill", both.source.pool, {"decode": address_in(tmp_path, "back")}) as back:
        hand_over(both, [3, 1, 2], [9, 0, 5])
        with Source("decode", both.sink.pool, address_in(tmp_path, "back")) as source:
            ticket = new_ticket("decode")
            source.request(ticket, PROMPT).finish({"kv": [9, 0, 5]})
            back.fetch(ticket, PROMPT, {"kv": [13, 14, 15]}).wait(10)
        assert np.array_equal(rows(back.pool, [13, 14, 15]), rows(back.pool, [3, 1, 2]))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def once(folder: Path) -> None:
        folder.mkdir(0o700)
        with two(folder) as both:
            hand_over(both, [3, 1, 2], [9, 0, 5])
            pools = both.source.pool, both.sink.pool
        for pool in pools:
            pool.close()

    once(tmp_path / "first")  # what is opened once in a process: ZeroMQ's, the clock's
    gc.collect()  # of other tests
    before = left_over()
    for n in range(3):
        once(tmp_path / str(n))
    assert left_over() == before


def test_prompts_are_the_same_in_each_form() -> None:
    assert Prompt([1, 2]).digest == Prompt(np.array([1, 2], np.int64)).digest == Prompt(iter((1, 2))).digest
    assert Prompt([1, 2]).digest != Prompt([1, 2], adapter="x").digest
