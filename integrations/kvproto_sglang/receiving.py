"""A request at a decode rank: from its arrival until its pages hold the prompt, or nobody writes them any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvproto import Fetch, KvprotoError, Prompt, Sink, Ticket
from kvproto.events import Arrived
from kvproto_sglang.pools.stated import HOLE, Table
from kvproto_sglang.state import State

__all__ = ["Receiving"]


class Receiving:
    """Nothing here waits."""

    def __init__(self, sink: Sink, tables: Mapping[str, Table], page: int) -> None:
        """`tables` says by group name what its page table is; the request's pages are of `page` tokens."""
        self.sink, self._tables, self._page = sink, dict(tables), page
        self.error: Exception | None = None
        self._about: tuple[Ticket, Prompt] | None = None
        self._end, self._resolved = 0, False
        self._fetch: Fetch | None = None
        self._due: tuple[Callable[[], bool], dict[str, list[int]], dict[str, int]] | None = None
        """The condition on which the fetch begins, its page tables, and the first tokens that it wants, by group."""

    def begin(self, ticket: Ticket, prompt: Prompt, tokens: int) -> None:
        """Note what is to be fetched: so many tokens of the prompt."""
        self._about, self._end = (ticket, prompt), tokens

    def resolve(self, replica: int | None) -> None:
        """SGLang knows which replica computes it; None: the one that the ticket names."""
        if self._about is not None and replica is not None:
            ticket, prompt = self._about
            self._about = attrs.evolve(ticket, replica=replica), prompt
        self._resolved = True

    def fetch(self, pages: Any, cached: int, states: Any = None, ready: Callable[[], bool] = lambda: True) -> None:
        """Fetch all tokens but the first `cached`, which fill pages, into these pages, and the `states` into theirs.

        They are named to nobody before `ready`: until then the GPU may write them.
        """
        if self.error is not None or self._about is None:
            return
        tokens = self._end
        table = [HOLE] * (cached // self._page) + [int(page) for page in pages]
        try:
            tables = {name: each.of(table, states, tokens) for name, each in self._tables.items()}
            first = {name: each.wanted(states, tokens, cached) for name, each in self._tables.items()}
        except ValueError as error:
            self.error = error
            return
        self._due = ready, tables, first
        self._begin()

    def _begin(self) -> None:
        if self._due is None or self._about is None or not self._due[0]():
            return
        _, tables, first = self._due
        self._due = None
        try:
            self._fetch = self.sink.fetch(*self._about, tables, cached=first, tokens=self._end)
        except KvprotoError as error:
            self.error = error

    @property
    def state(self) -> State:
        """FAILED only when nobody writes the pages."""
        self._begin()
        fetch = self._fetch
        if fetch is None:
            if self.error is not None:
                return State.FAILED
            if self._due is not None:
                return State.TRANSFERRING
            return State.WAITING if self._resolved else State.BOOTSTRAPPING
        if not fetch.done:
            return State.TRANSFERRING
        if self.arrived is not None:
            return State.SUCCESS if self.error is None else State.FAILED
        return State.FAILED if fetch.pages_free else State.TRANSFERRING

    @property
    def arrived(self) -> Arrived | None:
        """The result of the fetch, once all is there."""
        if self._fetch is None or not self._fetch.done:
            return None
        try:
            return self._fetch.result
        except Exception as error:
            self.error = self.error or error
            return None

    @property
    def pages_free(self) -> bool:
        """Whether nobody writes its pages."""
        fetch = self._fetch
        return fetch is None or (fetch.done and (self.arrived is not None or fetch.pages_free))

    def abort(self, reason: str) -> None:
        """Stop it; of one that was not begun its source is told that nothing is needed, so that it keeps no pages."""
        if self._fetch is None and self.error is None and self._about is not None and self._resolved:
            self._due = None
            tables = {name: table.nothing(self._end) for name, table in self._tables.items()}
            with contextlib.suppress(KvprotoError):
                self.sink.fetch(*self._about, tables, cached=self._end, tokens=self._end)
        self.error = self.error or RuntimeError(reason)
        if self._fetch is not None:
            self._fetch.abort(reason)
