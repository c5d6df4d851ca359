"""Requests that an engine has given up, until it is proven that nobody reads their pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["PATIENCE", "GivenUp"]

Key = TypeVar("Key", bound=Hashable)

PATIENCE = 10.0
"""Seconds after which the log says that pages are still held. They are, however long it takes."""


class GivenUp(Generic[Key]):
    """The requests, by a key of the engine's choice. Nothing here waits, and no time that passes is proof."""

    def __init__(self, logger: logging.Logger, patience: float = PATIENCE) -> None:
        self._logger, self._patience = logger, patience
        self._requests: dict[Key, tuple[str, Callable[[], bool], float]] = {}
        self._said: set[Key] = set()

    def add(self, key: Key, name: str, proven: Callable[[], bool]) -> None:
        """Hold a request that was given up; `proven` says whether nobody reads its pages any more."""
        self._requests[key] = name, proven, time.monotonic()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def free(self, key: Key) -> bool:
        """Whether it is proven that nobody reads the pages of a request; if that takes long, the log says so once."""
        name, proven, since = self._requests[key]
        if proven():
            return True
        if key not in self._said and time.monotonic() - since >= self._patience:
            self._said.add(key)
            self._logger.warning(
                "request %s was given up %.0f s ago, and its pages may still be read: they stay held until it is "
                "proven that nobody does", name, time.monotonic() - since,
            )  # fmt: skip
        return False

    def forget(self, key: Key) -> None:
        """Drop a request whose pages were given back."""
        del self._requests[key]
        self._said.discard(key)
