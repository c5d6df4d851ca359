"""A prefill engine of chaos: it labels pages in chunks, hands them over, and blanks them as soon as they are free."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import attrs

from kvproto import KvprotoError, Pool, Request, Source, read_ticket
from kvproto.events import Event, Expired, Freed, PoolFree, Sent, Undelivered

from .book import Name, Shelf
from .engine import Engine, Setup, prompt_of, tokens_of
from .plan import Order
from .routing import Kept

__all__ = ["Prefill"]


@attrs.define(eq=False)
class Job:
    """One request."""

    name: Name
    order: Order
    request: Request
    shelf: Shelf
    """The shelf of the pool that its pages are in."""
    pages: list[int]
    done: int = 0
    """Chunks that are computed."""
    sent: int = 0
    over: bool = False


class Prefill(Engine):
    """One run of a prefill engine."""

    def __init__(self, conn: Connection, setup: Setup) -> None:
        super().__init__(conn, setup)
        self.door: Source = Source(setup.name, self.pool, setup.listen, setup.options())
        self.shelf = Shelf(self.pool, 1 + setup.number)
        self.jobs: dict[Request, Job] = {}
        self.kept = Kept(self.door, setup.broken)

    def on_request(self, name: Name, order: Order, ticket: Mapping[str, Any]) -> None:
        """Begin to compute a prompt."""
        try:
            shelf = self.shelf
            pages = shelf.take(order.tokens)
            request = self.door.request(read_ticket(ticket), prompt_of(order.number, order.tokens))
        except KvprotoError as error:
            self.say("refused", name, error.code.name)
            return
        if pages is None:
            request.fail("no pages are free")
        job = self.jobs[request] = Job(name, order, request, shelf, pages or [])
        if self.setup.broken == "crash" and order.number > 2:
            raise RuntimeError("this engine was built to crash")
        if pages is not None:
            self.after(order.chunks[0][0], lambda: self._compute(job))
        if order.fail is not None:
            self.after(order.fail, lambda: request.fail("its client is gone"))

    def _compute(self, job: Job) -> None:
        """Compute the next chunk."""
        if job.over:
            return
        first = job.order.chunks[job.done - 1][1] if job.done else 0
        end = job.order.chunks[job.done][1]
        job.done += 1
        job.shelf.write(job.name, job.pages, first, end)
        if self.setup.broken == "wrong byte" and job.order.number % 2 == 0:
            job.shelf.cells[0, 0][job.pages[0], 0, 0, 2] ^= 1
        if job.done < len(job.order.chunks):
            job.request.computed(job.shelf.tables(job.pages), end)
            self.after(job.order.chunks[job.done][0], lambda: self._compute(job))
            return
        job.request.finish(job.shelf.tables(job.pages))
        self.kept.keep(tokens_of(job.order.number, job.order.tokens))
        if self.setup.broken == "freed too early":
            job.shelf.free(job.pages)
            job.pages = []

    def hear(self, event: Event) -> None:
        match event:
            case Sent(request):
                self.jobs[request].sent += 1
                if self.jobs[request].sent > 1:
                    self.say("violation", "counted twice", f"{self.jobs[request].name} was sent twice")
            case PoolFree(withdrawal):
                self.free_pool(withdrawal)
            case Freed(request) | Undelivered(request) | Expired(request):
                job = self.jobs.pop(request, None)
                if job is None:
                    self.say("violation", "counted twice", f"{type(event).__name__} of a request that is over")
                    return
                job.over = True
                # what is written twice must still be there
                late = 1.0 if self.setup.broken == "write after arrival" else 0.0
                self.after(late, lambda: job.shelf.free(job.pages)) if late else job.shelf.free(job.pages)
                self.say("over", job.name, type(event).__name__)

    def on_status(self) -> None:
        """Say what is under way."""
        self.status([f"{job.name[0]}.{job.name[1]}" for job in self.jobs.values()], 0)
        self.say("keeps", self.kept.count())

    def look(self) -> None:
        super().look()
        self.kept.step()

    def use(self, pool: Pool) -> None:
        self.pool, self.shelf = pool, Shelf(pool, 1 + self.setup.number)

    def let_go(self) -> None:
        self.kept.close()
        self.jobs.clear()
