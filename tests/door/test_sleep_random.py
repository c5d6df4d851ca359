"""Fetches, aborts, sleeps, wakes and moves in any order: bytes come to pages that name their owner, and nothing is lost for good."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto import Fetch, KvprotoError, Options, Pool, Prompt, Withdrawal, new_ticket
from kvproto.wire.enums import ErrorCode
from tests.door.doors import GEOMETRY, PAGE, PAGES, Two, places, two

SHORT = Prompt(range(PAGE))
"""One page."""
CALLS = (
    "fetch",
    "fetch",
    "compute",
    "abort",
    "sink sleeps",
    "sink wakes",
    "sink moves",
    "source sleeps",
    "source wakes",
    "turn",
)
NOBODY = 0
ENDS = {ErrorCode.POOL_MOVED, ErrorCode.ABORTED, ErrorCode.BAD_GRANT}


def label(pool: Pool, page: int, byte: int) -> None:
    """Write who owns a page."""
    for place in places():
        pool.array(*place)[page] = byte


@attrs.define(eq=False)
class Job:
    """A request: the page that it is fetched into, and the byte that it is made of."""

    fetch: Fetch
    request: Any
    pool: Pool
    page: int
    byte: int
    computed: bool = False


class World:
    """A pair, and what ought to be in each page of the sink's pools."""

    def __init__(self, pair: Two) -> None:
        self.pair, self.jobs = pair, list[Job]()
        self.ends: list[Withdrawal] = []
        self.byte = 0
        self.free = list(range(PAGES))
        self.kept: dict[int, int] = {}
        """What is in pages of the pool that have arrived, by page."""

    def fetch(self) -> None:
        pair = self.pair
        if pair.sink.asleep or pair.source.asleep or not self.free:
            return
        self.byte = self.byte % 250 + 1
        made, page = new_ticket("prefill"), self.free.pop()
        request = pair.source.request(made, SHORT)
        label(pair.sink.pool, page, 255)
        fetch = pair.sink.fetch(made, SHORT, {"kv": [page]})
        self.jobs.append(Job(fetch, request, pair.sink.pool, page, self.byte))

    def compute(self) -> None:
        """Prefill of the oldest request is over; a page of the source holds one request at a time."""
        for job in self.jobs:
            if not job.computed and not job.request.done and not self.pair.source.asleep:
                page = self.byte_page(job)
                if any(
                    other.computed and not other.request.done and self.byte_page(other) == page for other in self.jobs
                ):
                    continue
                label(self.pair.source.pool, page, job.byte)
                job.request.finish({"kv": [page]})
                job.computed = True
                return

    @staticmethod
    def byte_page(job: Job) -> int:
        return job.byte % PAGES

    def abort(self) -> None:
        if self.jobs:
            self.jobs[0].fetch.abort()

    def sleeps(self, door: Any) -> None:
        if not door.asleep:
            self.ends.append(door.sleep())
            if door is self.pair.sink:
                self.kept.clear()

    def wakes(self, door: Any) -> None:
        if door.asleep:
            door.wake(Pool.allocate(GEOMETRY, PAGES))
            if door is self.pair.sink:
                self.free = list(range(PAGES))

    def moves(self) -> None:
        if not self.pair.sink.asleep:
            self.ends.append(self.pair.sink.move(Pool.allocate(GEOMETRY, PAGES)))
            self.kept.clear()
            self.free = list(range(PAGES))

    def do(self, call: str) -> None:
        who, _, what = call.partition(" ")
        if what == "moves":
            self.moves()
        elif what:
            getattr(self, what)(getattr(self.pair, who))
        elif who != "turn":
            getattr(self, who)()
        self.pair.turn()
        self.look()

    def look(self) -> None:
        """What has arrived is what its request is made of, and nothing else has touched a page that was kept."""
        for job in [job for job in self.jobs if job.fetch.done and job.request.done]:
            self.jobs.remove(job)
            lost = job.fetch._error
            if isinstance(lost, KvprotoError):
                assert lost.code in ENDS, lost
                assert job.fetch.pages_free
            else:
                assert all((job.pool.array(*place)[job.page] == job.byte).all() for place in places())
                if job.pool is self.pair.sink.pool and not self.pair.sink.asleep:
                    self.kept[job.page] = job.byte
                    continue
            if job.pool is self.pair.sink.pool:
                self.free.append(job.page)
        for page, byte in self.kept.items():
            assert all((self.pair.sink.pool.array(*place)[page] == byte).all() for place in places())
        for end in [end for end in self.ends if end.done]:
            self.ends.remove(end)
            assert not [job for job in self.jobs if job.pool is end.pool and not job.fetch.done]
            if end.pool not in (self.pair.sink.pool, self.pair.source.pool):
                for job in self.jobs:
                    job.pool = None if job.pool is end.pool else job.pool  # type: ignore[assignment]
                end.pool.close()


@pytest.mark.parametrize(
    "way",
    [Options(thread=False), Options(thread=False, pull=True), Options(thread=False, transports=["inline"])],
    ids=["push", "pull", "inline"],
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.sampled_from(CALLS), min_size=5, max_size=40))
def test_any_order(tmp_path_factory: pytest.TempPathFactory, way: Options, calls: list[str]) -> None:
    """KVP-EPO-FREE, KVP-EPO-MOVED, KVP-TRN-AGREE, KVP-END-REUSE."""
    folder: Path = tmp_path_factory.mktemp("random")
    with two(folder, way) as pair:
        world = World(pair)
        for call in calls:
            world.do(call)
        for door in (pair.sink, pair.source):
            world.wakes(door)
        for job in world.jobs:
            job.fetch.abort()
            job.request.fail("over")

        def settled() -> bool:
            world.look()
            return not world.jobs and not world.ends

        pair.until(settled)
        world.fetch()
        world.compute()
        pair.until(settled)
        assert np.any(pair.sink.pool.array(*places()[0]))
