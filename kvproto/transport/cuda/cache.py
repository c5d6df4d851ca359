"""Results that are computed once for the operations of a rank pair, and kept for as long as those live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["PerProgramCache"]

T = TypeVar("T")


class PerProgramCache(Generic[T]):
    """Keeps what `make` returns for an array of operations, told apart by its identity, and something else.

    Not what holds the array itself: it would never be let go.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, Hashable], T] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, ops: npt.NDArray[np.void], rest: Hashable, make: Callable[[], T]) -> T:
        """The one of these; raises what `make` raises, and keeps nothing then."""
        key: tuple[int, Hashable] = id(ops), rest
        if key not in self._made:
            self._made[key] = make()
            gone: Any = weakref.finalize(ops, self._made.pop, key, None)
            gone.atexit = False
        return self._made[key]

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()
