"""An adapter as engines need one: they step, and nothing here ever waits for a peer. `python examples/adapter.py`

`Prefill` and `Decode` are what a scheduler calls: `add` when a request comes, `step` in each of its steps, `abort` when
the client is gone. docs/your-engine.md goes through them line by line.
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
    [Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=PAGE, dtype=DType.F32)], facts={"weights": "example, revision 1"}
)


def open_pool() -> tuple[Engine, Pool]:
    """An engine whose caches lie in memory that kvproto can share, and the pool that says where."""
    engine = Engine(allocate(BYTES))
    return engine, Pool(GEOMETRY, {"kv": engine.layers}, axes="part page token head dim")


@dataclass
class Job:
    """A request inside one of the two engines."""

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
        """A request comes. It is told before it is computed: a sink that asks for it now is answered."""
        try:
            job.request = self.source.request(job.ticket, Prompt(job.tokens))
        except KvprotoError as error:  # of this request alone
            job.error = str(error)
            return
        if self.engine.free < -(-len(job.tokens) // PAGE):
            job.request.fail("no free pages")
            return
        job.pages = self.engine.take(len(job.tokens))
        self.jobs.append(job)

    def abort(self, job: Job) -> None:
        """The client is gone; the pages come back in `step`, when nobody reads them any more."""
        if job.request is not None:
            job.request.fail("the client is gone")

    def step(self) -> None:
        """Compute a chunk of one prompt and say so; take pages back."""
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
    """The engine that goes on from there."""

    def __init__(self, address: str) -> None:
        self.engine, pool = open_pool()
        self.sink = Sink("decode", pool, {"prefill": address})
        self.waiting: list[Job] = []
        self.fetching: list[Job] = []
        self.running: list[Job] = []
        self.failed: list[Job] = []

    def add(self, job: Job) -> None:
        """A request comes; `pages` and `done` say what a prefix cache holds of it already."""
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """The client is gone; a job that is being fetched ends in `step`, when nobody writes its pages any more."""
        if job.fetch is not None:
            job.fetch.abort("the client is gone")
        elif job in self.waiting:
            self.waiting.remove(job)
            self.engine.release(job.pages)

    def step(self) -> None:
        """Begin fetches that there are pages for, and see which are over."""
        while self.waiting and self.engine.free >= self._lacks(self.waiting[0]):
            job = self.waiting.pop(0)
            job.pages += self.engine.take(PAGE * self._lacks(job))
            try:
                job.fetch = self.sink.fetch(job.ticket, Prompt(job.tokens), {"kv": job.pages}, cached=job.done)
            except KvprotoError as error:  # nothing was begun
                self._lost(job, error)
            else:
                self.fetching.append(job)
        for job in list(self.fetching):
            if job.fetch is None or not job.fetch.done:
                continue
            try:
                assert job.fetch.result is not None
            except KvprotoError as error:
                if job.fetch.pages_free:  # else a peer might still write them
                    self.fetching.remove(job)
                    self._lost(job, error)
            else:
                self.fetching.remove(job)
                job.done = len(job.tokens)
                self.running.append(job)

    def _lacks(self, job: Job) -> int:
        """Pages that it needs beside those that it has."""
        return -(-len(job.tokens) // PAGE) - len(job.pages)

    def _lost(self, job: Job, error: KvprotoError) -> None:
        job.error = str(error)
        self.engine.release(job.pages)
        self.failed.append(job)


def main() -> None:
    """Three requests: one whose first 32 tokens decode has already, one that is aborted, and one more."""
    address = f"ipc://{tempfile.mkdtemp()}/prefill"
    prefill, decode = Prefill(address), Decode(address)
    whole = decode.engine.free
    with prefill.source, decode.sink:
        long, short = list(range(100, 190)), list(range(7, 57))
        held = decode.engine.prefill(long[:32])  # what an earlier request left in the prefix cache
        jobs = []
        for tokens, pages, done in ((long, held, 32), (short[::-1], [], 0), (short, [], 0)):
            ticket = new_ticket("prefill")  # the router's
            prefill.add(Job(ticket, tokens))
            jobs.append(Job(ticket, tokens, list(pages), done))
            decode.add(jobs[-1])
        decode.step()
        decode.abort(jobs[1])
        while prefill.jobs or decode.waiting or decode.fetching:
            select.select([prefill.source.fileno(), decode.sink.fileno()], [], [], 0.01)
            for event in (*prefill.source.events(), *decode.sink.events()):
                if type(event).__name__ in ("Disconnected", "Refused", "Suspected", "ProtocolError"):
                    print(event)  # an engine writes these into its log
            prefill.step()
            decode.step()
        for job in decode.running:
            assert decode.engine.holds(job.tokens, job.pages)
            decode.engine.release(job.pages)
    assert (prefill.engine.free, decode.engine.free) == (whole, whole)
    print(f"{len(decode.running)} arrived, {len(decode.failed)} ended: {decode.failed[0].error}")


if __name__ == "__main__":
    main()
