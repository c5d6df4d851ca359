"""The pages in which the sliding windows of a sequence move: as many as a step needs at once, used in turn.

Page i of the sequence is `own[i % len(own)]`, so a page is used again when the window has left it. A sequence may as
well own a page for each of its own: then all of them stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import EngineError
from ..models import ModelConfig

__all__ = ["check_window", "first_row", "needed", "window_table"]


def first_row(reach: int, position: int) -> int:
    """The first position whose row the token at `position` attends to."""
    return max(position - reach + 1, 0)


def needed(config: ModelConfig, page: int, most: int) -> int:
    """Pages of `page` tokens that a sequence owns, if a step adds at most `most` tokens; 0 without sliding windows."""
    return -(-(config.window.tokens - 2 + most) // page) + 1 if config.window is not None else 0


def window_table(own: Sequence[int], pages: int) -> list[int]:
    """The page table of the first `pages` pages of a sequence, of which only the last `len(own)` hold their rows."""
    return [own[i % len(own)] for i in range(pages)] if own else []


def check_window(own: Sequence[int], reach: int, page: int, start: int, stop: int) -> None:
    """Raise EngineError if rows that the tokens [start, stop) attend to, or write, would share a page."""
    at_once = (stop - 1) // page - first_row(reach, start) // page + 1
    if at_once > len(own):
        raise EngineError(
            f"a window of {reach} tokens needs {at_once} pages for positions {start} to {stop - 1}, not {len(own)}"
        )
