"""A request at a decode rank: from its arrival until its pages hold the prompt, or nobody writes them any more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import attrs

from kvproto import Fetch, KvprotoError, Prompt, Sink, Ticket
from kvproto.events import Arrived
from kvproto_sglang.state import State

__all__ = ["Receiving"]

_HOLE = -1
"""In place of a page into which nothing is fetched."""
_PADDING = 0
"""The page that SGLang gives to no request."""


class Receiving:
    """Nothing here waits."""

    def __init__(self, sink: Sink, groups: Iterable[str], page: int) -> None:
        """`groups` are those whose page table is the request's, in pages of `page` tokens."""
        self.sink, self._groups, self._page = sink, tuple(groups), page
        self.error: Exception | None = None
        self._about: tuple[Ticket, Prompt] | None = None
        self._resolved = False
        self._fetch: Fetch | None = None

    def begin(self, ticket: Ticket, prompt: Prompt) -> None:
        """What is to be fetched."""
        self._about = ticket, prompt

    def resolve(self, replica: int | None) -> None:
        """SGLang knows which replica computes it; None: the one that the ticket names."""
        if self._about is not None and replica is not None:
            ticket, prompt = self._about
            self._about = attrs.evolve(ticket, replica=replica), prompt
        self._resolved = True

    def fetch(self, pages: Iterable[int], cached: int) -> None:
        """Fetch all tokens but the first `cached`, which fill pages, into these pages."""
        if self.error is not None or self._about is None:
            return
        table = [_HOLE] * (cached // self._page) + [int(page) for page in pages]
        self._begin(table, cached)

    def _begin(self, table: list[int], cached: int) -> None:
        assert self._about is not None
        try:
            tables = dict.fromkeys(self._groups, table)
            self._fetch = self.sink.fetch(*self._about, tables, cached=cached)
        except KvprotoError as error:
            self.error = error

    @property
    def state(self) -> State:
        """FAILED only when nobody writes the pages."""
        fetch = self._fetch
        if fetch is None:
            if self.error is not None:
                return State.FAILED
            return State.WAITING if self._resolved else State.BOOTSTRAPPING
        if not fetch.done:
            return State.TRANSFERRING
        if self.arrived is not None:
            return State.SUCCESS if self.error is None else State.FAILED
        return State.FAILED if fetch.pages_free else State.TRANSFERRING

    @property
    def arrived(self) -> Arrived | None:
        """What came, once all is there."""
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
            prompt = self._about[1]
            pages = [_HOLE] * (len(prompt) // self._page) + [_PADDING]
            tables = dict.fromkeys(self._groups, pages)
            with contextlib.suppress(KvprotoError):
                self.sink.fetch(*self._about, tables, cached=len(prompt))
        self.error = self.error or RuntimeError(reason)
        if self._fetch is not None:
            self._fetch.abort(reason)
