"""Prompts that routers go by: a prefill engine of chaos keeps and announces them, a decode engine's router listens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvproto import Cache, DType, Finder, KvprotoError, Options, Pool, Source, Tiers, lay_out
from kvproto.wire.enums import Tier

from .labels import PAGE

__all__ = ["Kept", "Router"]

_ROWS = Cache.gqa("kept", 1, kv_heads=1, head_dim=2, page=PAGE, dtype=DType.U8)
_NAMES = {"weights.target": "labels", "rope.target": "none", "dtype.target": "U8"}
_DEVICE, _HOST = 32, 24
"""Pages of both tiers; a prompt has up to 24, so that most pages are soon evicted."""


class Kept:
    """Pages of prompts in memory of their own next to an engine's pool, which no peer reaches."""

    def __init__(self, door: Source, broken: str) -> None:
        self._pool = Pool.allocate(lay_out([_ROWS]), _DEVICE)
        self._tiers = Tiers(self._pool, _NAMES, page=PAGE, host=_HOST)
        self._pages: dict[bytes, Tier | None] = {}
        door.tell(self._tiers)
        self._tiers.subscribe(self._pages.update)
        if broken == "stale":
            self._tiers._listeners.pop(0)

    def keep(self, tokens: Any) -> None:
        """Keep the whole pages of a prompt, if there is room."""
        lease = self._tiers.open(self._tiers.chain(tokens), -(-len(tokens) // PAGE))
        if lease is not None:
            self._tiers.step()
            lease.leave(len(tokens))

    def step(self) -> None:
        """Advance copies, and announce what changed."""
        self._tiers.step()

    def count(self) -> int:
        """Number of pages that are kept on any tier."""
        return sum(tier is not None for tier in self._pages.values())

    def close(self) -> None:
        """Release the memory."""
        self._tiers.close()
        self._pool.close()


class Router:
    """A decode engine's knowledge of the prefill engines' pages, like a router's."""

    def __init__(self, name: str, sources: Mapping[str, tuple[str, str]], options: Options, again: Callable[..., None]):
        """`sources` has addresses and keys by engine; `again(seconds, call)` calls later."""
        self._name, self._options, self._again = name, options, again
        self._engines = {address: engine for engine, (address, _) in sources.items()}
        self._keys: dict[str, str | None] = dict(sources.values())
        self._finder: Finder | None = None
        self._ended = False
        self._open()

    def _open(self) -> None:
        if self._ended or self._finder is not None:
            return
        try:
            self._finder = Finder(self._keys, f"{self._name}-router", self._options)
        except KvprotoError:  # descriptors are short
            self._again(0.05, self._open)

    def reopen(self) -> None:
        """Forget everything, and connect again."""
        if self._finder is not None:
            self._finder.close()
            self._finder = None
        self._open()

    def step(self) -> None:
        """Take a turn, unless a thread does."""
        if self._finder is not None and not (self._ended or self._options.thread):
            self._finder.step()

    def find(self, tokens: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """By engine, if it is known: how many tokens of its prompt it has, and how many pages it has announced."""
        finder = self._finder
        return {
            engine: (held.tokens, held.pages)
            for engine, prompt in tokens.items()
            if finder is not None
            for held in finder.find(prompt)
            if self._engines[held.address] == engine
        }

    def close(self) -> None:
        """Say Goodbye."""
        self._ended = True
        if self._finder is not None:
            self._finder.close()
