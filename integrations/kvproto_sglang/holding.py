"""Rows of a prefill engine's requests that were given up: SGLang gets each back once nobody reads its pages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvproto_engines.given_up import PATIENCE, GivenUp
from kvproto_sglang.sending import Sending

__all__ = ["Holding"]

logger = logging.getLogger("sglang.kvproto")


class Holding:
    """Releases that wait.

    Schedulers of an engine's ranks allocate alike, so all ranks hold the same requests and release each in one step:
    every request that was given up is held, whether or not this rank's pages are read, until all ranks' are not.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._given_up = GivenUp[int](logger, patience)
        self._releases: dict[int, tuple[Any, Callable[[], object]]] = {}
        """By the identity of SGLang's request: the request, and what releases its row."""

    def __len__(self) -> int:
        return len(self._releases)

    def __contains__(self, request: Any) -> bool:
        return id(request) in self._releases

    def keep(self, request: Any, sending: Sending, release: Callable[[], object]) -> None:
        """Have `release` called when nobody reads the pages of a request; a second release of it is the same one."""
        if request not in self:
            self._releases[id(request)] = request, release
            self._given_up.add(id(request), str(request.rid), lambda: sending.unread)

    def settle(self, agree: Callable[[list[bool]], list[bool]]) -> None:
        """Release what nobody reads; `agree` says of each flag whether all ranks have it."""
        held = list(self._releases)
        if not held:
            return
        for key, free in zip(held, agree([self._given_up.free(key) for key in held]), strict=True):
            if free:
                _, release = self._releases.pop(key)
                self._given_up.forget(key)
                release()
