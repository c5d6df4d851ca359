"""A request at a prefill rank: from its arrival until nobody reads its pages any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvproto import KvprotoError, Prompt, Request, Source, Ticket
from kvproto_engines.told import error_of
from kvproto_sglang.pools.stated import Table
from kvproto_sglang.state import State

__all__ = ["Sending"]


class Sending:
    """SGLang gives its pages chunk by chunk, those of the whole prompt from the first one on. Nothing here waits."""

    def __init__(self, source: Source, tables: Mapping[str, Table]) -> None:
        """`tables` says by group name what its page table is."""
        self.source, self._tables = source, dict(tables)
        self._early = all(table.paged for table in tables.values())
        self._request: Request | None = None
        self.error: Exception | None = None
        self._pages: list[int] = []
        self._tokens = self._end = 0
        self._events: list[Any] = []
        """Kept while copies may wait for them."""

    def begin(self, ticket: Ticket, prompt: Prompt, tokens: int) -> None:
        """Answer sinks from now on; so many tokens of the prompt will be computed."""
        self._end = tokens
        try:
            self._request = self.source.request(ticket, prompt)
        except KvprotoError as error:
            self.error = error

    def send(self, pages: Any, tokens: int, handoff: Callable[[], Any], states: Any = None, event: Any = None) -> None:
        """So many more tokens are computed, in these pages; with the last of the prompt goes what `handoff` gives.

        With the last, too, SGLang names the items of the `states`. Where there are some, all is handed over with them,
        as windows leave pages, and a state is that of the last token. After this `event` of a GPU the pages are there.
        """
        self._pages.extend(int(page) for page in pages)
        self._tokens += tokens
        request, count = self._request, self._tokens
        if request is None or request.done:
            return
        if not (last := count >= self._end) and not self._early:
            return
        self._events.append(event)
        after = event.cuda_event if event is not None else None
        try:
            tables = {name: table.of(self._pages, states, count) for name, table in self._tables.items()}
            if last:
                since = {name: first for name, table in self._tables.items() if (first := table.first(states, count))}
                request.finish(tables, tokens=count, handoff=handoff(), after=after, since=since)
            else:
                request.computed(tables, count, after=after)
        except (KvprotoError, ValueError) as error:
            self.error = error
            request.fail(str(error) if isinstance(error, ValueError) else error)

    @property
    def state(self) -> State:
        """WAITING until all is said; FAILED and SUCCESS only when nobody reads the pages."""
        request = self._request
        if request is None:
            return State.BOOTSTRAPPING if self.error is None else State.FAILED
        if not request.done:
            return State.TRANSFERRING if self._tokens >= self._end else State.WAITING
        self._events.clear()
        self.error = self.error or error_of(request)
        return State.SUCCESS if self.error is None else State.FAILED

    @property
    def unread(self) -> bool:
        """Whether it is proven that nobody reads its pages."""
        return self._request is None or self._request.done

    def abort(self, reason: str) -> None:
        """Stop it. Its pages may be read until it is `unread`, so `Holding` keeps them from SGLang."""
        request, self.error = self._request, self.error or RuntimeError(reason)
        if request is not None and not request.done:
            request.fail(reason)
