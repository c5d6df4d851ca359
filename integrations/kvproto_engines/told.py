"""Lines of an engine's log about a hand-over."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvproto import Request
from kvproto.events import Event, Expired, Freed, Undelivered, Unwanted

__all__ = ["error_of", "follow", "stop_unwanted"]

_FOLLOWED = ("declined", "disconnected", "protocol_error", "refused", "suspected")
"""The records of `kvproto.events` that are worth saying, by name."""


class _Passing(logging.Handler):
    """Passes records of `kvproto.events` on to an engine's logger."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on, in the thread in which it happens."""
        if vars(record).get("event") in _FOLLOWED:
            self._logger.warning("kvproto: %s", record.getMessage())


def follow(logger: logging.Logger) -> None:
    """Warn of what an operator should know as it happens, also while the engine has no request."""
    events = logging.getLogger("kvproto.events")
    if not any(isinstance(each, _Passing) for each in events.handlers):
        events.addHandler(_Passing(logger))
    if events.level == logging.NOTSET:
        events.setLevel(logging.INFO)


def error_of(request: Request) -> Exception | None:
    """The reason that a request that is over was not handed over; None if it was."""
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
    """End requests whose sinks have all gone, so that the engine need not compute them."""
    for event in events:
        if isinstance(event, Unwanted):
            event.request.release()
