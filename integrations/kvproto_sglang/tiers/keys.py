"""HiCache's keys of pages made page ids of kvproto, so that other engines find the pages (spec/v1/tiers.md, Identity).

HiCache gives storage keys, not tokens: what was hashed is remembered, so that the prompt of a key is known. Keys of
drafts that look ahead are ids of form AHEAD; their chain goes on with those of form OWN.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.tiers import Chain

__all__ = ["KEYS", "Keys", "PageKeys"]


@attrs.frozen
class _Hashed:
    """A page.

    Fields:
        before: Key of the page before it, or a namespace.
        own: Its id of form OWN.
        tokens: Its own, and with a draft that looks ahead the next one.
    """

    before: bytes
    own: bytes
    tokens: npt.NDArray[np.uint64]


class PageKeys:
    """Of one rank. Any thread may call."""

    def __init__(self, space: bytes, page: int, most: int = 1 << 16) -> None:
        """`space` is the namespace of requests without names of their own; `most` pages are remembered."""
        self.space, self.page, self._most = space, page, most
        self._hashed: OrderedDict[bytes, _Hashed] = OrderedDict()
        self._lock = Lock()

    def of(self, tokens: Sequence[int] | npt.NDArray[Any], count: int, prior: bytes | None, ahead: bool) -> list[bytes]:
        """Keys of `count` tokens by their pages, after the page of key `prior`, or in the namespace that it is.

        With `ahead`, one more token follows. A page that is not whole has a key that no page has in storage.
        """
        before, keys = self.space if prior is None else prior, list[bytes]()
        given = np.asarray(tokens, np.uint64)
        for begin in range(0, count, self.page):
            own = given[begin : begin + self.page + ahead]
            if len(own) < self.page + ahead or begin + self.page > count:
                keys.append(hashlib.sha256(b"kvproto part of a page\0" + before + own.tobytes()).digest())
                break
            with self._lock:
                previous = self._hashed.get(before)
                chain = Chain(before if previous is None else previous.own, self.page, own)
                (key,) = chain.ahead if ahead else chain.own
                self._hashed[key] = _Hashed(before, chain.own[0], own.copy())
                self._hashed.move_to_end(key)
                if len(self._hashed) > self._most:
                    self._hashed.popitem(last=False)
            keys.append(key)
            before = key
        return keys

    def chain(self, keys: Sequence[bytes]) -> tuple[Chain, int] | None:
        """The prompt up to the last of these keys, which follow one another, and the number of the page of the first.

        None for a key that was not hashed here, or so long ago that it is forgotten.
        """
        pages, key = list[_Hashed](), keys[-1]
        with self._lock:
            while (hashed := self._hashed.get(key)) is not None:
                pages.append(hashed)
                self._hashed.move_to_end(key)
                key = hashed.before
        if len(pages) < len(keys):
            return None
        chain = Chain(key, self.page)
        chain.extend(
            np.concatenate([*(each.tokens[: self.page] for each in reversed(pages)), pages[0].tokens[self.page :]])
        )
        return chain, len(pages) - len(keys)


class Keys:
    """The functions that hash pages in this process: SGLang's own, until a back end is open."""

    def __init__(self) -> None:
        self.pages: PageKeys | None = None
        self._space_of: Callable[[Mapping[str, str]], bytes] = lambda more: b""

    def open(self, pages: PageKeys, space_of: Callable[[Mapping[str, str]], bytes]) -> None:
        """`space_of` is the namespace of requests that have these names, too."""
        self.pages, self._space_of = pages, space_of

    def close(self) -> None:
        self.pages = None

    def of(self, tokens: Any, count: int, prior: bytes | None, ahead: bool, page: int | None) -> str | list[str]:
        """As SGLang's own: the key of each page, or without `page` the key of all tokens, which are one."""
        assert self.pages is not None
        keys = [key.hex() for key in self.pages.of(tokens, count, prior, ahead)]
        return keys if page is not None else keys[-1] if keys else ""

    def seed(self, extra_key: str | None, cache_salt: str | None) -> str | None:
        """The namespace of a request; None: that of all others. An `extra_key` may be a user's, and is no digest."""
        own = None if extra_key is None else f"sglang {extra_key}"
        more = {name: value for name, value in (("adapter", own), ("salt", cache_salt)) if value is not None}
        return self._space_of(more).hex() if more else None

    def chain(self, keys: Sequence[str]) -> tuple[Chain, int] | None:
        """As `PageKeys.chain`."""
        return None if self.pages is None else self.pages.chain([bytes.fromhex(key) for key in keys])


KEYS = Keys()
"""The keys of this process: SGLang's hooks know no object."""
