"""A request at a prefill rank: from its arrival until nobody reads its pages any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from kvproto import KvprotoError, Prompt, Request, Source, Ticket
from kvproto.events import Event, Expired, Freed, Undelivered, Unwanted
from kvproto_sglang.state import State

__all__ = ["Sending", "stop_unwanted"]

_PATIENCE = 10.0
"""Seconds in which the copies of a request have to end whose pages SGLang takes back."""

Handoff = Mapping[str, Mapping[str, bytes]]


class Sending:
    """SGLang gives its pages chunk by chunk, those of the whole prompt from the first one on."""

    def __init__(self, source: Source, groups: Iterable[str]) -> None:
        """`groups` are those whose page table is the request's."""
        self.source, self._groups = source, tuple(groups)
        self._request: Request | None = None
        self.error: Exception | None = None
        self._pages: list[int] = []
        self._tokens = 0

    def begin(self, ticket: Ticket, prompt: Prompt) -> None:
        """Answer sinks from now on."""
        try:
            self._request = self.source.request(ticket, prompt)
        except KvprotoError as error:
            self.error = error

    def send(self, pages: Iterable[int], tokens: int, handoff: Callable[[], Handoff]) -> None:
        """So many more tokens are computed, in these pages; with the last of the prompt goes what `handoff` gives."""
        self._pages.extend(int(page) for page in pages)
        self._tokens += tokens
        request = self._request
        if request is None or request.done:
            return
        tables = dict.fromkeys(self._groups, self._pages)
        try:
            if self._tokens < len(request.prompt):
                request.computed(tables, self._tokens)
            else:
                request.finish(tables, handoff=handoff())
        except KvprotoError as error:
            self.error = error
            request.fail(error)

    @property
    def state(self) -> State:
        """WAITING until all is said; FAILED and SUCCESS only when nobody reads the pages."""
        request = self._request
        if request is None:
            return State.BOOTSTRAPPING if self.error is None else State.FAILED
        if not request.done:
            return State.TRANSFERRING if self._tokens >= len(request.prompt) else State.WAITING
        self.error = self.error or _error_of(request)
        return State.SUCCESS if self.error is None else State.FAILED

    def abort(self, reason: str) -> None:
        """Stop it, and wait until nobody reads its pages: SGLang reuses them when this returns."""
        request = self._request
        if request is None or request.done:
            self.error = self.error or RuntimeError(reason)
            return
        self.error = self.error or RuntimeError(reason)
        request.fail(reason)
        with contextlib.suppress(Exception):
            request.wait(_PATIENCE)


def _error_of(request: Request) -> Exception | None:
    """Why a request that is over was not handed over."""
    try:
        result = request.result
    except Exception as error:
        return error
    if isinstance(result, Expired):
        return RuntimeError("nobody fetched it before its deadline")
    if isinstance(result, Undelivered):
        return RuntimeError("; ".join(str(error) for error in result.lost.values()))
    if isinstance(result, Freed) and not result.routed:
        return RuntimeError("every engine that asked for it has aborted it or is gone")
    return None


def stop_unwanted(events: Iterable[Event]) -> None:
    """End requests whose sinks have all gone, so that SGLang need not compute them."""
    for event in events:
        if isinstance(event, Unwanted):
            event.request.release()
