"""An adapter for engines that step: nothing here ever waits for a peer. `python examples/adapter.py`

A scheduler calls `Prefill` and `Decode`: `add` when a request arrives, `step` in each of its steps, `abort` when the
client is gone. docs/your-engine.md explains them.
"""

from __future__ import annotations

import select
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine import BYTES, PAGE, Engine

from kvproto import (
    Cache,
    DType,
    Fetch,
    KvprotoError,
    Pool,
    Prompt,
    Request,
    Sink,
    Source,
    Ticket,
    allocate,
    lay_out,
    new_ticket,
)

CHUNK = 24
"""Tokens that a step computes."""
GEOMETRY = lay_out(
    [Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=PAGE, dtype=DType.F32)],
    facts={"weights.target": "example, revision 1"},
)


def open_pool() -> tuple[Engine, Pool]:
    """An engine whose caches are in memory that kvproto can share, and the pool that says where."""
    engine = Engine(allocate(BYTES))
    return engine, Pool(GEOMETRY, {"kv": engine.layers}, axes="part page token head dim")


@dataclass
class Job:
    """A request in one of the two engines."""

    ticket: Ticket
    tokens: Sequence[int]
    pages: list[int] = field(default_factory=list)
    done: int = 0
    """Tokens whose rows are in its pages."""
    request: Request | None = None
    fetch: Fetch | None = None
    error: str = ""


class Prefill:
    """The engine that computes prompts."""

    def __init__(self, address: str) -> None:
        self.engine, pool = open_pool()
        self.source = Source("prefill", pool, address)
        self.jobs: list[Job] = []

    def add(self, job: Job) -> None:
        """Accept a request. kvproto learns of it before it is computed, so a sink that asks for it now is answered."""
        try:
            job.request = self.source.request(job.ticket, Prompt(job.tokens))
        except KvprotoError as error:  # concerns this request alone
            job.error = str(error)
            return
        if self.engine.free < -(-len(job.tokens) // PAGE):
            job.request.fail("no free pages")
            return
        job.pages = self.engine.take(len(job.tokens))
        self.jobs.append(job)

    def abort(self, job: Job) -> None:
        """The client is gone; `step` frees the pages when nobody reads them any more."""
        if job.request is not None:
            job.request.fail("the client is gone")

    def step(self) -> None:
        """Compute a chunk of one prompt and report it; free the pages of finished requests."""
        for job in self.jobs:
            if job.request is not None and not job.request.done and job.done < len(job.tokens):
                self._compute(job, job.request)
                break
        for job in [job for job in self.jobs if job.request is not None and job.request.done]:
            self.engine.release(job.pages)
            self.jobs.remove(job)

    def _compute(self, job: Job, request: Request) -> None:
        stop = min(job.done + CHUNK, len(job.tokens))
        self.engine.compute(job.tokens, job.pages, job.done, stop)
        job.done = stop
        try:
            if stop < len(job.tokens):
                request.computed({"kv": job.pages}, stop)
            else:
                request.finish({"kv": job.pages})
        except KvprotoError as error:
            job.error = str(error)
            request.fail(error)


class Decode:
    """The engine that continues them."""

    def __init__(self, address: str) -> None:
        self.engine, pool = open_pool()
        self.sink = Sink("decode", pool, {"prefill": address})
        self.waiting: list[Job] = []
        self.fetching: list[Job] = []
        self.running: list[Job] = []
        self.failed: list[Job] = []

    def add(self, job: Job) -> None:
        """Accept a request; `pages` and `done` say what a prefix cache already holds of it."""
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """The client is gone; a job that is being fetched ends in `step`, when nobody writes its pages any more."""
        if job.fetch is not None:
            job.fetch.abort("the client is gone")
        elif job in self.waiting:
            self.waiting.remove(job)
            self.engine.release(job.pages)

    def step(self) -> None:
        """Start the fetches that have enough pages, and see which have finished."""
        while self.waiting and self.engine.free >= self._lacks(self.waiting[0]):
            job = self.waiting.pop(0)
            job.pages += self.engine.take(PAGE * self._lacks(job))
            try:
                job.fetch = self.sink.fetch(job.ticket, Prompt(job.tokens), {"kv": job.pages}, cached=job.done)
            except KvprotoError as error:  # nothing has started
                self._lost(job, error)
            else:
                self.fetching.append(job)
        for job in list(self.fetching):
            if job.fetch is None or not job.fetch.done:
                continue
            try:
                assert job.fetch.result is not None
            except KvprotoError as error:
                if job.fetch.pages_free:  # otherwise a peer might still write them
                    self.fetching.remove(job)
                    self._lost(job, error)
            else:
                self.fetching.remove(job)
                job.done = len(job.tokens)
                self.running.append(job)

    def _lacks(self, job: Job) -> int:
        """How many more pages it needs."""
        return -(-len(job.tokens) // PAGE) - len(job.pages)

    def _lost(self, job: Job, error: KvprotoError) -> None:
        job.error = str(error)
        self.engine.release(job.pages)
        self.failed.append(job)


def main() -> None:
    """Three requests: one whose first 32 tokens decode already has, one that is aborted, and one more."""
    address = f"ipc://{tempfile.mkdtemp()}/prefill"
    prefill, decode = Prefill(address), Decode(address)
    whole = decode.engine.free
    with prefill.source, decode.sink:
        long, short = list(range(100, 190)), list(range(7, 57))
        held = decode.engine.prefill(long[:32])  # what an earlier request left in the prefix cache
        asked, jobs = [], []
        for tokens, pages, done in ((long, held, 32), (short[::-1], [], 0), (short, [], 0)):
            ticket = new_ticket("prefill")  # the router does this
            asked.append(Job(ticket, tokens))
            prefill.add(asked[-1])
            jobs.append(Job(ticket, tokens, list(pages), done))
            decode.add(jobs[-1])
        decode.step()
        decode.abort(jobs[1])
        prefill.abort(asked[1])  # the router tells both: prefill may not have heard of the fetch yet
        while prefill.jobs or decode.waiting or decode.fetching:
            select.select([prefill.source.fileno(), decode.sink.fileno()], [], [], 0.01)
            for event in (*prefill.source.events(), *decode.sink.events()):
                if type(event).__name__ in ("Disconnected", "Refused", "Suspected", "ProtocolError"):
                    print(event)  # an engine logs these
            prefill.step()
            decode.step()
        for job in decode.running:
            assert decode.engine.holds(job.tokens, job.pages)
            decode.engine.release(job.pages)
    assert (prefill.engine.free, decode.engine.free) == (whole, whole)
    print(f"{len(decode.running)} arrived, {len(decode.failed)} ended: {decode.failed[0].error}")


if __name__ == "__main__":
    main()
