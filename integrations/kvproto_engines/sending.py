"""A worker that prefills: its requests at the Source, from their tickets until their blocks are free."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvproto import KvprotoError, Request, Source
from kvproto.events import Expired, Undelivered
from kvproto_engines.given_up import PATIENCE, GivenUp
from kvproto_engines.orders import Orders, Table, Tables

__all__ = ["Sending", "Unread"]


class Unread(NamedTuple):
    """The number of workers that say it, by the number of a preemption."""

    free: dict[int, int]
    """Nobody reads the blocks any more."""
    busy: dict[int, int]
    """Somebody may; said once."""


class Sending:
    """Requests of one rank. Nothing here waits for a peer."""

    def __init__(
        self,
        source: Source,
        tables: Mapping[str, Table],
        logger: logging.Logger,
        patience: float = PATIENCE,
    ) -> None:
        """`tables` says by group name what its page table is; `patience` is `GivenUp`'s."""
        self.source, self._tables, self._logger = source, tables, logger
        self._preempted = GivenUp[int](logger, patience)
        self._busy: set[int] = set()
        """Preemptions whose blocks were said to be read still."""
        self._requests: dict[str, Request] = {}
        self._held: set[str] = set()
        self._over: set[str] = set()
        self._taken: dict[str, tuple[int, ...]] = {}
        self._events: dict[str, list[Any]] = {}
        """Kept while copies may wait for them."""

    def preempt(self, orders: Orders) -> None:
        """Stop reading blocks that the scheduler wants back; held until all workers have said `Unread.free`."""
        for number, name in orders.preempted.items():
            request, _ = self._requests.pop(name, None), self._events.pop(name, None)
            if request is not None and not request.done:
                request.fail("preempted: its blocks were needed")
            self._preempted.add(number, name, lambda request=request: request is None or request.done)  # type: ignore[misc]

    def unread(self) -> Unread:
        """Preemptions whose blocks nobody reads any more since the last call, and those that somebody still may."""
        free = [number for number in self._preempted if self._preempted.free(number)]
        for number in free:
            self._preempted.forget(number)
        busy = set(self._preempted) - self._busy
        self._busy = (self._busy | busy) - set(free)
        return Unread(dict.fromkeys(free, 1), dict.fromkeys(sorted(busy), 1))

    def take(self, orders: Orders) -> None:
        """Expect sinks for new requests, and end those that will not be computed."""
        for name, (ticket, prompt) in orders.requests.items():
            try:
                self._requests[name] = self.source.request(ticket, prompt)
            except KvprotoError as error:
                self._logger.error("request %s is not handed over: %s", name, error)
        for name, reason in orders.failed.items():
            if name in self._requests:
                self._requests[name].fail(reason)
        for name, routed in orders.taken.items():
            if name in self._requests and self.source.pool.rank not in routed:
                self._requests[name].release()

    def computed(self, orders: Orders, stream: Any = None) -> None:
        """After a forward: what is in the blocks once the work queued in this stream of the GPU is done."""
        event = stream.record_event() if stream is not None and orders.computed else None
        after = event.cuda_event if event is not None else None
        for each in orders.computed:
            request = self._requests.get(each.request)
            if request is None or request.done:
                continue
            self._events.setdefault(each.request, []).append(event)
            since = {group: table.since(each.tables) for group, table in self._tables.items() if table.window}
            try:
                if each.last:
                    request.finish(self._pages(each.tables), tokens=each.tokens, after=after, since=since)
                elif not since:  # blocks that a window leaves are reused while later chunks are computed
                    request.computed(self._pages(each.tables), each.tokens, after=after)
            except KvprotoError as error:
                self._logger.error("request %s is not handed over: %s", each.request, error)
                request.fail(error)

    def _pages(self, tables: Tables) -> dict[str, list[int]]:
        return {group: table.of(tables) for group, table in self._tables.items()}

    def freed(self, orders: Orders) -> set[str]:
        """Finished requests whose blocks nobody reads any more."""
        self._held.update(orders.held)
        for name, request in self._requests.items():
            if request.done and name not in self._over:
                self._over.add(name)
                self._events.pop(name, None)
                self._log(name, request)
        free = {name for name in self._held if name not in self._requests or name in self._over}
        for name in free:
            self._requests.pop(name, None)
        self._held -= free
        self._over -= free
        return free

    def _log(self, name: str, request: Request) -> None:
        """Say how a request ended, where it did not go well, and which ranks took part."""
        try:
            result = request.result
        except Exception as error:
            self._logger.error("request %s is not handed over: %s", name, error)
            return
        if isinstance(result, Expired):
            self._logger.warning("nobody fetched request %s in time: its blocks are free", name)
        elif isinstance(result, Undelivered):
            self._logger.warning("request %s was not handed over: %s", name, "; ".join(map(str, result.lost.values())))
        if result is not None and not isinstance(result, Expired) and result.routed:
            self._taken[name] = result.routed

    def taken(self) -> dict[str, tuple[int, ...]]:
        """Requests that were handed over since the last call, and the source ranks that did so."""
        found, self._taken = self._taken, {}
        return found
