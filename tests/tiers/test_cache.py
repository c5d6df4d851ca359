"""The cache over device, host and storage: right bytes of target and draft, copies in one go, exact release."""

import random
import sys
from pathlib import Path
from subprocess import PIPE, run
from threading import Event
from typing import Any
from weakref import ref

import pytest

from kvproto import Cache as Group
from kvproto import Parallel, lay_out
from kvproto.copying.program import RankLayout
from kvproto.errors import LocalError
from kvproto.rank.pool import columns_without_gaps
from kvproto.tiers.file_store import FileStore
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_cache import WritePolicy, patience
from kvproto.tiers.page_layout import page_layout
from kvproto.transport.memory import allocate
from kvproto.transport.shm.transport import HostPager
from tests.tiers.engine import PAGE, Engine
from tests.tiers.schedules import Faulty, Memory

A, B = tuple(range(9)), tuple(range(20, 33))
"""Prompts of two and of three pages, and a token more."""


@pytest.mark.parametrize("form", [{}, {"heads_first": True}, {"dcp": 2}, {"draft": False}])
def test_pages_come_back_from_the_host_as_they_were(form: dict[str, Any]) -> None:
    engine = Engine(8, 8, **form)
    assert engine.turn(*A).found == {"device": 0, "host": 0}
    assert engine.turn(*A).found == {"device": 2, "host": 0}
    engine.cache.step()
    engine.forget()
    assert engine.turn(*A).found == {"device": 0, "host": 2}
    assert engine.turn(*A, 9, 10, 11, 12).found == {"device": 2, "host": 0}
    engine.cache.step()
    assert list(engine.free()) == [8, 8]


@pytest.mark.parametrize("draft", [False, True])
def test_a_step_is_one_copy_each_way_whatever_there_is(draft: bool) -> None:
    engine = Engine(16, 16, draft=draft)
    for tokens in (A, B, (*A, *B)):
        engine.turn(*tokens, step=False)
    engine.cache.step()
    assert engine.cache.copies.programs == 1
    assert len(engine.cache.host.ids()) == 2 + 3 + 3
    engine.forget()
    chains = [engine.chain(*tokens) for tokens in (A, B, (*A, *B))]
    leases = [engine.cache.open(chain, len(chain.own)) for chain in chains]
    engine.cache.step()
    assert engine.cache.copies.programs == 2
    for chain, lease in zip(chains, leases, strict=True):
        assert lease is not None
        assert lease.ready
        engine.check(chain, lease)
        assert lease.pages == len(chain.ids(engine.layout.form))
        lease.leave()
    assert list(engine.free()) == [16, 16]


def test_what_two_prompts_share_is_copied_once() -> None:
    engine = Engine(8, 8)
    engine.turn(*A, step=False)
    engine.turn(*A, 50, 51, 52, 53, step=False)
    engine.cache.step()
    assert len(engine.cache.host.ids()) == 3
    assert engine.cache.copies.bytes == 3 * sum(part.length for part in engine.layout.components)


def test_pages_are_written_when_the_policy_says() -> None:
    engine = Engine(3, 8, policy=WritePolicy.SELECTIVE)
    engine.turn(*A, after=True)
    assert len(engine.cache.host.ids()) == 0
    engine.turn(*A, after=True)
    assert len(engine.cache.host.ids()) == 2
    engine = Engine(4, 8, policy=WritePolicy.WRITE_BACK)
    engine.turn(*A, after=True)
    assert engine.cache.copies.programs == 0
    engine.turn(*B)
    assert len(engine.cache.host.ids()) == 2
    assert engine.turn(*A).found == {"device": 0, "host": 2}


def test_a_page_that_is_given_up_goes_to_the_host_with_all_before_it() -> None:
    """The last page goes first, and nothing is found on the host whose previous page is not (KVP-TIER-PARENT)."""
    engine = Engine(4, 8, policy=WritePolicy.WRITE_BACK)
    engine.turn(*B)
    engine.turn(1, 2, 3, 4, 5)
    assert len(engine.cache.host.ids()) == 3
    assert engine.turn(*B).found == {"device": 2, "host": 1}


def test_a_request_that_finds_no_room_takes_nothing() -> None:
    engine = Engine(4, 4)
    lease = engine.cache.open(engine.chain(*A), 3)
    assert lease is not None
    assert engine.cache.open(engine.chain(*B), 3) is None
    lease.leave()
    lease.leave()
    assert list(engine.free()) == [4, 4]


def test_a_request_that_goes_before_its_pages_came_gives_all_back() -> None:
    engine = Engine(4, 4)
    engine.turn(*A, after=True)
    engine.forget()
    lease = engine.cache.open(engine.chain(*A), 3)
    assert lease is not None
    assert not lease.ready
    lease.leave(9)
    engine.cache.step()
    assert list(engine.free()) == [4, 4]


def test_a_copy_that_fails_shortens_a_hit() -> None:
    engine = Engine(8, 8)
    engine.turn(*A)
    engine.pager.fails = True
    engine.cache.step()
    assert len(engine.cache.host.ids()) == 0
    engine.pager.fails = False
    engine.turn(*A, after=True)
    engine.forget()
    engine.pager.fails = True
    lease = engine.turn(*A)
    assert lease.found == {"device": 0, "host": 0}
    assert engine.cache.counts["failed"] == 2
    engine.pager.fails = False
    engine.cache.step()
    assert engine.turn(*A).found == {"device": 2, "host": 0}
    engine.cache.step()
    assert list(engine.free()) == [8, 8]


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_whatever_was_left_is_found_where_the_host_has_room(policy: WritePolicy) -> None:
    """With little room on the device."""
    rng, engine = random.Random(policy.value), Engine(6, 200, policy=policy)
    seen: set[bytes] = set()
    for _ in range(60):
        tokens = tuple(rng.randrange(2) for _ in range(rng.choice((9, 13, 17))))
        ids = engine.chain(*tokens).ahead
        lease = engine.turn(*tokens, after=True)
        assert sum(lease.found.values()) == next((i for i, id in enumerate(ids) if id not in seen), len(ids))
        seen.update(ids)
    assert engine.cache.counts["host"] > 20
    assert list(engine.free()) == [6, 200]


@pytest.mark.parametrize("seed", range(6))
def test_what_was_used_last_is_found_whole_as_far_as_the_host_has_room(seed: int) -> None:
    """Of conversations that share nothing: all that went on since, and this one, fit on the host."""
    rng, engine, room = random.Random(seed), Engine(5, 12), 12
    sizes = [rng.randrange(1, 5) for _ in range(7)]
    recent: list[int] = []
    lost = 0
    for _ in range(60):
        who = rng.randrange(len(sizes))
        since = recent[recent.index(who) :] if who in recent else None
        found = sum(engine.turn(*[100 + who] * (4 * sizes[who] + 1)).found.values())
        engine.cache.step()
        if since is not None and sum(sizes[each] for each in since) <= room:
            assert found == sizes[who]
        lost += found < sizes[who]
        recent = [each for each in recent if each != who] + [who]
    assert lost > len(sizes), "some had to go"
    assert list(engine.free()) == [5, 12]


class Failing(Faulty):
    """Faults of a back end alone: the process lives."""

    def _end(self, fault: str) -> None:
        super()._end("fails" if fault.startswith("dies") else fault)


@pytest.mark.parametrize("seed", range(24))
def test_no_byte_is_wrong_and_every_slot_is_freed_once_whatever_fails(seed: int) -> None:
    """Requests that overlap, go early, find no room; copies and storage that fail; then all is given back."""
    rng = random.Random(seed)
    store = Failing(Memory(), rng, 0.1 if seed % 2 else 0.0)
    reach = rng.choice((0, PAGE))
    engine = Engine(
        rng.choice((5, 9)), rng.choice((3, 7, 40)), policy=rng.choice([*WritePolicy]), store=store, reach=reach
    )
    open_: list[tuple[Any, Any, int]] = []
    for _ in range(60):
        act = rng.random()
        engine.pager.fails = rng.random() < 0.1
        if act < 0.4:
            chain = engine.chain(*(rng.randrange(2) for _ in range(rng.choice((5, 9, 13)))))
            if reach and rng.random() < 0.3:
                for i in range(len(chain.ahead)):  # another engine keeps no windows but the last
                    right = engine.right(chain, i)
                    engine.cache.page_store.write(chain, i, right if rng.random() < 0.3 else {0: right[0]})  # type: ignore[union-attr]
            if rng.random() < 0.5:
                fetch = engine.cache.fetch(chain, float("inf"))
                while rng.random() < 0.9 and not fetch.over(0.0):
                    continue
                fetch.take()
            room = len(chain.own) + rng.randrange(2)
            lease = engine.cache.open(chain, room)
            if lease is not None:
                open_.append((chain, lease, rng.randrange(4 * room)))
        elif act < 0.6:
            engine.cache.step()
        elif open_:
            chain, lease, rows = open_.pop(rng.randrange(len(open_)))
            since = rng.choice((0, rng.randrange(14))) if reach else 0
            if lease.ready:
                engine.check(chain, lease)
                engine.compute(chain, lease, lease.pages, since)
            lease.leave(rows, windows=since)
    for _, lease, _ in open_:
        lease.leave()
        lease.leave()
    engine.pager.fails = False
    engine.cache.drain()
    for index in (engine.cache.device, engine.cache.host):
        assert not any(index.slots.pins[slot] for slot in range(index.slots.count))
    assert list(engine.free()) == [engine.cache.device.slots.count, engine.cache.host.slots.count]
    engine.cache.close()


def test_pages_come_from_files_to_another_engine(tmp_path: Path) -> None:
    first, second = (Engine(8, 8, store=FileStore(tmp_path)) for _ in range(2))
    first.turn(*B)
    first.cache.drain()
    assert first.cache.counts["stored"] == 3
    fetch = second.cache.fetch(second.chain(*B), float("inf"))
    while not fetch.over(0.0):
        continue
    assert fetch.take() == 3
    assert fetch.take() == 0
    assert second.turn(*B).found == {"device": 0, "host": 3}
    second.cache.drain()
    assert second.cache.counts["stored"] == 0, "they are there already"
    for engine in (first, second):
        engine.cache.close()
        assert list(engine.free()) == [8, 8]


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_a_page_without_its_window_is_not_given_one_on_its_way(policy: WritePolicy) -> None:
    """KVP-TIER-LENGTH: from storage to the device, to the host again and to another store, it lacks what it lacked."""
    first = Engine(8, 8, reach=PAGE, store=Memory(), policy=policy)
    chain = first.chain(*B)
    for i in range(3):
        data = first.right(chain, i)
        assert first.cache.page_store is not None
        assert first.cache.page_store.write(chain, i, data if i == 2 else {0: data[0]})
    assert first.fetched(chain) == 3
    assert first.turn(*B).found == {"device": 0, "host": 3}
    first.cache.host.evict(8)
    first.cache.page_store.store.data.clear()  # type: ignore[attr-defined]
    first.turn(*B)
    first.cache.drain()
    first.forget()
    first.cache.drain()
    assert [first.cache.host.groups(slot) for id in chain.ahead if (slot := first.cache.host.slot(id)) is not None] == [[0], [0], [0, 1]]  # fmt: skip
    assert [[*(first.cache.page_store.read(chain, i) or ())] for i in range(3)] == [[0], [0], [0, 1]]
    short = first.turn(*B[:9])
    assert short.found == {"device": 0, "host": 0}, "two pages cannot be used: the second lacks its window"
    first.cache.close()


@pytest.mark.parametrize("since", [1, PAGE, PAGE + 1, 2 * PAGE])
def test_a_window_that_was_received_from_some_token_on_is_kept_from_there(since: int) -> None:
    """KVP-TIER-LENGTH: a request goes on where its window is there, and what it computes completes the other pages."""
    engine = Engine(8, 8, reach=PAGE)
    engine.turn(*B, windows=since)
    chain, whole = engine.chain(*B), -(-since // PAGE)
    there = [slot for id in chain.ahead if (slot := engine.cache.device.slot(id)) is not None]
    assert [1 in engine.cache.device.groups(slot) for slot in there] == [i >= whole for i in range(3)]
    assert engine.turn(*B).found == {"device": 3, "host": 0}
    short = engine.turn(*B[: PAGE * whole + 1])
    assert short.found["device"] == 0, "the last of its pages lacks the window"
    assert engine.turn(*B[: PAGE * whole + 1]).found["device"] == whole
    engine.cache.close()


class Slow(Memory):
    """A back end that answers for some time, then no more until it is let go on."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left, self.go_on, self.waits = answers, Event(), Event()

    def get(self, key: str) -> bytes | None:
        self.left -= 1
        if self.left < 0:
            self.waits.set()
            self.go_on.wait()
        return super().get(key)


def test_a_storage_that_hangs_costs_its_pages_alone() -> None:
    """Of three pages two come in time: a manifest and two objects each."""
    store = Slow(1000)
    engine = Engine(8, 8, store=store, threads=1)
    engine.turn(*B)
    engine.cache.drain()
    engine.free()
    store.left = 6
    chain = engine.chain(*B)
    fetch = engine.cache.fetch(chain, deadline=5.0)
    store.waits.wait()
    while sum(future.done() for future in fetch._futures) < 2:
        continue
    assert not fetch.over(4.9)
    assert fetch.over(5.0)
    assert fetch.take() == 2
    assert engine.turn(*B).found == {"device": 0, "host": 2}
    store.go_on.set()
    engine.cache.drain()
    engine.cache.close()
    assert list(engine.free()) == [8, 8]


def test_nobody_waits_for_a_storage_that_hangs_until_it_is_back() -> None:
    """Neither a request that would wait for all, nor the end; pages that were on their way there are free again."""
    store = Slow(1000)
    engine = Engine(8, 8, store=store, threads=1, limit=1.0)
    engine.turn(*B)
    engine.cache.drain()
    engine.free()
    store.left = 2
    fetch = engine.cache.fetch(engine.chain(*B), float("inf"))
    while not fetch.over(0.0):
        continue
    assert store.waits.is_set()
    assert fetch.take() == 0
    assert engine.cache.fetch(engine.chain(*B), float("inf")).over(0.0), "it is not asked again"
    engine.turn(*B)
    engine.cache.drain()
    assert engine.cache.counts["not stored"] == 3
    assert list(engine.free()) == [8, 8]
    store.left = 1000
    store.go_on.set()
    while engine.cache.io.workers.hangs:  # type: ignore[union-attr]
        continue
    assert engine.fetched(engine.chain(*B)) == 3
    engine.cache.close()


def test_a_storage_that_hangs_in_a_write_keeps_what_is_written_and_no_more() -> None:
    store = Slow(1000)
    store.put = lambda key, data: Slow.get(store, key)  # type: ignore[assignment, method-assign]
    store.left = 0
    engine = Engine(8, 8, store=store, threads=1, limit=0.05)
    engine.turn(*B)
    engine.turn(*A)
    engine.cache.drain()
    assert store.waits.is_set()
    assert list(engine.free()) == [8, 5], "of one prompt, a page of which is being written"
    engine.cache.close()
    store.go_on.set()


HANGS = """
import sys
from threading import Event
from tests.tiers.engine import Engine
from tests.tiers.schedules import Memory
class Hangs(Memory):
    def put(self, key, data):
        print("hangs", flush=True)
        Event().wait()
engine = Engine(8, 8, store=Hangs(), limit=0.1)
engine.turn(*range(9))
engine.cache.drain()
if sys.argv[1] == "closes":
    engine.cache.close()
"""


@pytest.mark.parametrize("how", ["closes", "ends"])
def test_a_process_ends_while_its_storage_hangs(how: str) -> None:
    done = run([sys.executable, "-c", HANGS, how], stdout=PIPE, timeout=60, check=True)
    assert done.stdout.startswith(b"hangs")


def test_a_damaged_page_ends_what_is_fetched_and_the_next_turn_mends_it(tmp_path: Path) -> None:
    engine = Engine(8, 8, store=FileStore(tmp_path))
    engine.turn(*B)
    engine.cache.drain()
    engine.free()
    chain = engine.chain(*B)
    (torn,) = (tmp_path / "o").rglob(f"{chain.ahead[1].hex()}.*.1.*")
    torn.write_bytes(torn.read_bytes()[::-1])
    for pages in (1, 3):
        assert engine.fetched(chain) == pages
        assert engine.turn(*B).found == {"device": 0, "host": pages}
        engine.cache.drain()
        engine.free()
    engine.cache.close()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Group.mla("b", 1, latent=2, rope=2, page=2 * PAGE), "multiple of 8 rows"),
        (Group.window("b", [1], kv_heads=1, head_dim=2, ring_rows=8), "rows of tokens"),
    ],
    ids=["half a page of the pool", "a ring"],
)
def test_what_has_no_whole_items_for_a_page_is_refused(other: Group, says: str) -> None:
    geometry = lay_out([Group.gqa("a", 1, kv_heads=1, head_dim=2, page=PAGE), other], Parallel())
    columns, length = columns_without_gaps(geometry, 0, {0: 2, 1: 2})
    with pytest.raises(LocalError, match=says):
        HostCopies(
            page_layout(geometry, 0, PAGE), RankLayout(geometry, 0, columns), {0: allocate(length)}, 2, HostPager()
        )


def test_patience_grows_with_the_prompt() -> None:
    assert [patience(tokens) for tokens in (0, 1024, 4096)] == [1.0, 1.25, 2.0]


def test_a_cache_that_is_closed_holds_no_memory_of_the_host() -> None:
    """Not until somebody collects it: what an engine keeps may be most of a machine."""
    engine = Engine(4, 4)
    weak = [ref(memory) for memory in engine.cache.copies.memory.values()]
    engine.cache.close()
    assert [each() for each in weak] == [None, None]
