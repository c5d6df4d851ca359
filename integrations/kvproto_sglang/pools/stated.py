"""Groups that are stated of a pool, its owner, and which pages of a request stand in the page table of each group.

SGLang says a request's pages chunk by chunk. With the last chunk it says of each component of its state which items are
the request's: pages of a sliding window, from the first one that the window needs, or the slot of a recurrent state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from kvproto import Cache, LocalError
from kvproto.errors import ErrorCode

__all__ = ["HOLE", "PADDING", "Owner", "Stated", "Table", "refused"]

HOLE = -1
"""In place of a page that a request does not have."""
PADDING = 0
"""The page, and the slot, that SGLang gives to no request."""


@attrs.frozen
class Table:
    """The page table of a group.

    Fields:
        page: Tokens of a page.
        component: Which component of SGLang's state its items are; None: the pages of the request.
        slot: Whether its one item is the state of a request.
        window: Tokens before the next one that a window needs, where its first page may be filled in part; else 0.
        split: Pages of this table in a page that SGLang names.
        most: How many of the numbers that SGLang names are items; 0: all.
        ring: Rows of the ring that each page of the component has, `within` tokens long: a page of this table is as
            many rows of it, and the last two of a prompt are live. 0: pages are not in rings.
    """

    page: int = 1
    component: int | None = None
    slot: bool = False
    window: int = 0
    split: int = 1
    most: int = 0
    ring: int = 0
    within: int = 0

    @property
    def paged(self) -> bool:
        """Whether it is the pages of the request, which are known while the prompt is computed."""
        return self.component is None

    def of(self, pages: Sequence[int], states: Sequence[Any] | None, tokens: int) -> list[int]:
        """The items of a request of so many tokens; raises ValueError for a state that SGLang did not name."""
        if self.component is None:
            return self._parts([int(page) for page in pages])[: -(-tokens // self.page)]
        found = self._items(states, tokens)
        return found if self.slot else [HOLE] * (-(-tokens // self.page) - len(found)) + found

    def first(self, states: Sequence[Any] | None, tokens: int) -> int:
        """The first token that has a page of a window; 0 for other groups."""
        if self.component is None or self.slot:
            return 0
        return (-(-tokens // self.page) - len(self._items(states, tokens))) * self.page

    def wanted(self, states: Sequence[Any] | None, tokens: int, cached: int) -> int:
        """The first token that decode needs, where it has `cached` ones already."""
        first = max(cached, self.first(states, tokens))
        return max(first, tokens - self.window) if self.window else first

    def nothing(self, tokens: int) -> list[int]:
        """A table for a fetch of no tokens."""
        return [PADDING] if self.slot else [HOLE] * (tokens // self.page) + [PADDING]

    def _items(self, states: Sequence[Any] | None, tokens: int) -> list[int]:
        assert self.component is not None
        if states is None or (named := states[self.component]) is None:
            raise ValueError(f"SGLang named no items of component {self.component} of the request's state")
        flat = [np.ravel(each) for each in named]
        found = [int(item) for item in np.concatenate(flat)] if flat else []
        return self._in_rings(found, tokens) if self.ring else found[: self.most or None]

    def _in_rings(self, pages: list[int], tokens: int) -> list[int]:
        """The items of the last two pages of this table that are in the rings of `pages`, the last ones of a prompt."""
        first, parts = (-(-tokens // self.within) - len(pages)) * self.within, self.ring // self.page
        live = range(max(tokens // self.page - 1, first // self.page, 0), -(-tokens // self.page))
        return [pages[(n * self.page - first) // self.within] * parts + n % parts for n in live]

    def _parts(self, pages: list[int]) -> list[int]:
        if self.split == 1:
            return pages
        parts = range(self.split)
        return [HOLE if page == HOLE else page * self.split + n for page in pages for n in parts]


@attrs.frozen
class Stated:
    """A group of a pool.

    Fields:
        tensors: Of each layer, or such by part.
        axes: Of the tensors, in the words of `kvproto.Pool`.
        component: The type of SGLang's state component that it is, or is described by; else nothing.
        beside: The type of another component that the same items are named by; else nothing.
        repeats: Whether SGLang names the component once more for a draft.
        scaled: Whether numbers of the checkpoint scale its elements.
        order: How a matrix lies, where engines differ under the same shape.
    """

    cache: Cache
    tensors: Any
    axes: str
    table: Table
    component: str = ""
    beside: str = ""
    repeats: bool = False
    scaled: bool = False
    order: str = ""


def of(number: int) -> str:
    """The name of a model of an engine, as facts have it."""
    return ("target", "draft")[min(number, 1)] + (str(number) if number > 1 else "")


@attrs.frozen
class Owner:
    """The model that a pool is of, and its layers.

    Fields:
        number: 0 the target, 1 its draft, 2 and more the other layers of one that predicts several tokens.
        model: SGLang's ModelConfig.
        tp: Ranks that divide the heads, or where `dcp` of them deal the tokens, those and the heads.
        ids: Layers of a pool that counts its own from 0; None: as the pool says.
        windowed: Whether they have a sliding window.
    """

    number: int
    title: str
    model: Any
    tp: int
    ids: Sequence[int] | None = None
    windowed: bool = False
    dcp: int = 1

    @property
    def dealt(self) -> bool:
        """Whether its tokens are dealt: a draft's never are."""
        return self.dcp > 1 and not self.number

    @property
    def of(self) -> str:
        return of(self.number)

    def within(self, ids: Sequence[int], windowed: bool = False) -> Owner:
        """The same for some layers."""
        return attrs.evolve(self, ids=ids, windowed=windowed, title=self.title + " window" * windowed)

    def layers(self, pool: Any) -> Sequence[int]:
        """Their numbers."""
        ids = range(pool.start_layer, pool.start_layer + pool.layer_num) if self.ids is None else self.ids
        if len(ids) != pool.layer_num:
            raise refused("layers", f"{len(ids)} in a pool", str(pool.layer_num))
        return ids

    def heads(self, held: int) -> int:
        """KV heads of all ranks, of which this one holds so many."""
        if self.dcp > 1 and not self.dealt:  # it holds those of all ranks that deal the target's tokens
            raise refused(f"KV pool of the {self.of}", "a latent, where ranks deal the target's tokens", "heads")
        model, tp = self.model, self.tp // self.dcp
        total = int(model.get_swa_num_kv_heads(1) if self.windowed else model.get_total_num_kv_heads())
        if held != max(1, total // tp) or (total > tp and total % tp):
            raise refused("KV heads", f"{total} divided by {tp} ranks", f"{held} on a rank")
        return total


def refused(path: str, mine: str, yours: str) -> LocalError:
    """An error of what this back end does not state."""
    return LocalError(ErrorCode.BAD_COLUMNS, path, mine, yours, "docs/sglang-reference.md: what is stated")
