"""An adapter of both roles, for the caches of a framework (`live_torch.py`, `live_jax.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_cache import EngineCache
from live_sink import Decode
from live_source import Prefill


class Either:
    """An adapter of both roles; the first question says which."""

    def __init__(self, cache: Callable[..., EngineCache]) -> None:
        self._cache, self._adapter = cache, None

    def on_open(self, ask: dict[str, Any]) -> Any:
        adapter: Any = {"source": Prefill, "sink": Decode}[ask["role"]](self._cache)
        found = adapter.on_open(ask)
        self._adapter = adapter
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)
