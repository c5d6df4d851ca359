"""A worker that decodes: its fetches at the Sink, until their blocks hold the prompt or nothing writes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvproto import Fetch, KvprotoError, Sink
from kvproto_engines.orders import Load, Orders, Table

__all__ = ["Loading"]


class Loading:
    """Fetches of one rank. Nothing here waits."""

    def __init__(
        self, sink: Sink | None, tables: Mapping[str, Table], logger: logging.Logger, whole: bool = True
    ) -> None:
        """`tables` says by group name what its page table is; `whole`: blocks are for other requests' prefixes too.

        An engine that only prefills has no sink. It fails the requests that want it to fetch, and fetches none.
        """
        self.sink, self._tables, self._logger = sink, tables, logger
        self._whole = whole
        self._fetches: dict[str, Fetch] = {}
        self._failed, self._aborted = set[str](), set[str]()  # of those under way, which nobody wants any more

    def take(self, orders: Orders) -> None:
        """Begin and stop fetches."""
        for load in orders.loads:
            try:
                self._fetches[load.request] = self._fetch(load)
            except KvprotoError as error:
                self._fail(load.request, error)
        for load in orders.spared:
            try:
                self._fetch(load)
            except KvprotoError as error:
                self._logger.warning(
                    "request %s: its source cannot be told that nothing is needed: %s", load.request, error
                )
        for name, (reason, _) in orders.refused.items():
            self._fail(name, reason)
        for name in orders.aborted:
            if name in self._fetches:
                self._aborted.add(name)
                self._fetches[name].abort("the request was aborted")

    def _fetch(self, load: Load) -> Fetch:
        nothing = [0] * load.tokens  # what no token is fetched into may be any page
        pages = {group: table.of(load.tables) if load.tables else nothing for group, table in self._tables.items()}
        following = 0 if self._whole else load.tokens
        cached = {
            group: max(load.cached, table.since(load.tables, following) if load.tables else 0)
            for group, table in self._tables.items()
        }
        assert self.sink is not None
        late = [group for group, table in self._tables.items() if table.ring]
        return self.sink.fetch(load.ticket, load.prompt, pages, cached=cached, tokens=load.tokens, late=late)

    def _fail(self, name: str, reason: object) -> None:
        say = self._logger.info if name in self._aborted else self._logger.error
        say("request %s could not be fetched: %s", name, reason)
        self._failed.add(name)

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose fetches are over since the last call, and those among them that failed.

        One that failed is not over before nothing writes its blocks any more.
        """
        done = set()
        for name, fetch in self._fetches.items():
            if not fetch.done:
                continue
            try:
                assert fetch.result is not None
            except Exception as error:
                if not fetch.pages_free:
                    continue
                self._fail(name, error)
            done.add(name)
        for name in done:
            del self._fetches[name]
        failed, self._failed, self._aborted = self._failed, set(), self._aborted - done
        return done | failed, failed
