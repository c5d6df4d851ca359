"""A decode engine of chaos: it fetches into pages that were just freed, and checks all pages after each step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import attrs

from kvproto import Fetch, Geometry, KvprotoError, Options, Pool, Seed, Sink, read_ticket
from kvproto.events import Arrived, Event, Lost, PagesFree, PagesWanted, PoolFree
from kvproto.rank.handles import Withdrawal

from .book import Book, Name, Shelf
from .engine import PAGES, Engine, Setup, prompt_of, tokens_of
from .labels import GROUP, PAGE
from .plan import Order
from .routing import Router

__all__ = ["Decode"]


@attrs.define(eq=False)
class Job:
    """One request."""

    name: Name
    order: Order
    fetch: Fetch
    book: Book
    """The book of the pool that its pages are in."""
    pages: list[int]
    hold: int = -1
    """Steps for which an arrived request is still kept."""
    over: bool = False


class Decode(Engine):
    """One run of a decode engine."""

    def __init__(self, conn: Connection, setup: Setup) -> None:
        super().__init__(conn, setup)
        self._sources = {name: Seed(*place) for name, place in setup.sources.items()}
        self.door: Sink = Sink(setup.name, self.pool, self._sources, setup.options())
        self.book = self.shelf = Book(self.pool, 0x80 + setup.number)
        self.jobs: dict[Fetch, Job] = {}
        self._kept: list[Job] = []
        self.router = Router(setup.name, setup.routed, Options(keys=setup.keys, thread=setup.thread), self.after)

    def on_fetch(self, name: Name, order: Order, ticket: Mapping[str, Any]) -> None:
        """Fetch a prompt's cache."""
        book = self.book
        pages = book.take(order.tokens) if order.named == "at once" else []
        if pages is None:
            self.say("lost", name, "no pages", "")
            return
        prompt = prompt_of(order.number, order.tokens, order.other_prompt)
        table = book.tables(pages) if pages else None
        cached = order.cached if pages else 0
        book.write(name, pages, 0, cached)
        book.grant(name, pages)
        try:
            fetch = self.door.fetch(read_ticket(ticket), prompt, table, cached=cached, spans=order.named == "spans")
        except KvprotoError as error:
            book.free(pages)
            self.say("lost", name, f"refused {error.code.name}", str(error))
            return
        job = self.jobs[fetch] = Job(name, order, fetch, book, pages)
        if order.abort is not None:
            self.after(order.abort, lambda: self._abort(job))

    def _name(self, job: Job, count: int) -> None:
        """Name up to `count` pages, once that many are free; if the fetch is over they are freed again."""
        if job.over or count <= len(job.pages):
            return
        more = job.book.take((count - len(job.pages)) * PAGE)
        if more is None:
            self.after(0.02, lambda: self._name(job, count))
            return
        job.book.grant(job.name, more)
        if job.fetch.grant(job.book.tables([*job.pages, *more])):
            job.pages += more
        else:
            job.book.free(more)

    def on_abort_all(self) -> None:
        """Abort all requests, as if every client were gone."""
        for job in list(self.jobs.values()):
            self._abort(job)

    def on_move(self) -> None:
        """Move to other memory; what is under way ends in the old memory."""
        self._move(self.pool.geometry)

    def on_caches(self, seconds: float) -> None:
        if seconds:
            super().on_caches(seconds)
        else:
            self._move(self.other_caches())

    def _move(self, geometry: Geometry) -> None:
        if not self.door.asleep:
            pool = Pool.allocate(geometry, PAGES)
            self.retire(self.door.move(pool))
            self.use(pool)

    def use(self, pool: Pool) -> None:
        self.pool = pool
        self.book = self.shelf = Book(pool, 0x80 + self.setup.number)

    def retire(self, withdrawal: Withdrawal) -> None:
        super().retire(withdrawal)
        for job in self._kept:
            self._free(job)
        self._kept.clear()

    def in_use(self, shelf: Shelf) -> list[tuple[Name, str]]:
        jobs = [job for job in self.jobs.values() if job.book is shelf]
        return [(job.name, f"{job.fetch!r}, {'lost' if job.over else 'not over'}, {job.order}") for job in jobs]

    def _abort(self, job: Job) -> None:
        """Abort a request, as if its client were gone."""
        if not job.over:
            job.fetch.abort("its client is gone")
            if self.setup.broken == "no proof" and not job.over:
                job.over = True
                self._free(self.jobs.pop(job.fetch))

    def on_reconnect(self, source: str) -> None:
        """Disconnect from a prefill engine, and connect again."""
        self.door.disconnect(source)
        seed = self._sources[source]
        self.door.connect(source, address=seed.address, key=seed.key)
        self.router.reopen()

    def on_find(self, orders: Mapping[str, tuple[int, int]]) -> None:
        """Say what the router knows of prompts, given as (number, tokens) by the engine that should have them."""
        self.say("found", self.router.find({engine: tokens_of(*order) for engine, order in orders.items()}))

    def hear(self, event: Event) -> None:
        match event:
            case Arrived(fetch):
                self._arrived(fetch)
                if self.setup.broken == "counted twice" and self.jobs:
                    self._arrived(fetch)
            case Lost(fetch, error, proven):
                job = self.jobs.get(fetch)
                if job is None or job.over:
                    if self.setup.broken == "no proof":
                        return
                    self.say("violation", "counted twice", f"{error.code.name} of a request that is over")
                    return
                job.over = True
                job.book.lost(job.name, proven)
                self.say("lost", job.name, error.code.name, str(error))
                if proven:
                    self._free(self.jobs.pop(fetch))
            case PagesWanted(fetch, _, pages):
                if fetch in self.jobs:
                    self._name(self.jobs[fetch], pages[GROUP])
            case PoolFree(withdrawal):
                self.free_pool(withdrawal)
            case PagesFree(fetch):
                job = self.jobs.pop(fetch, None)
                if job is not None:
                    job.book.lost(job.name, True)
                    self.say("proven", job.name)
                    self._free(job)

    def _arrived(self, fetch: Fetch) -> None:
        if self.setup.broken == "hang":
            return
        job = self.jobs.pop(fetch, None)
        if job is None or job.over:
            self.say("violation", "counted twice", "a request that is over has arrived")
            return
        job.over, job.hold = True, job.order.hold
        self.find(job.book.arrived(job.name, job.pages, job.order.tokens))
        self.say("arrived", job.name)
        self._kept.append(job)
        if self.setup.broken == "leak":
            os.dup(0)

    def _free(self, job: Job) -> None:
        job.book.free(job.pages)

    def look(self) -> None:
        """Check all pages, and free those of requests that are over."""
        super().look()
        self.router.step()
        for job in self._kept:
            job.hold -= 1
            if job.hold < 0:
                self._free(job)
        self._kept = [job for job in self._kept if job.hold >= 0]

    def on_status(self) -> None:
        """Say what is under way, and what waits for proof."""
        waiting = [f"{job.name[0]}.{job.name[1]}" for job in self.jobs.values() if not job.over]
        self.status(waiting, sum(self.door.quarantined.values()))

    def let_go(self) -> None:
        self.router.close()
        self.look()
        self.jobs.clear()
        self._kept.clear()
