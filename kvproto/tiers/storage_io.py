"""Pages on their way between the host and storage, by threads, as far as storage keeps up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from math import inf
from threading import Lock

from kvproto.tiers.buffer_pool import BufferPool, PageBuffers
from kvproto.tiers.index import Hit
from kvproto.tiers.manifest import Data
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.relayout import RelayoutReader
from kvproto.tiers.store import Grouped
from kvproto.tiers.workers import Workers

__all__ = ["StorageIO", "StorageRead"]

_GROUP_BYTES = 64 << 20
"""Bytes that are written in one call at most, so that a slow disk is not taken for one that hangs."""


class StorageIO:
    """A shelf, and the threads that read and write it. Where a call hangs, nothing more is asked of it meanwhile."""

    def __init__(
        self, page_store: PageStore, threads: int, most: int, limit: float, others: RelayoutReader | None = None
    ) -> None:
        """`most` pages may be under way; a call hangs that takes more than `limit` seconds."""
        self.page_store, self.limit, self.others = page_store, limit, others
        self.workers = Workers(threads, limit, most)
        if others:
            self.workers.submit(others.publish_geometry)
        self._looking = Workers(1, inf, 1) if page_store.high else None
        if self._looking:
            self._looking.submit(page_store.look)
        length = sum(part.length for part in page_store.layout.parts)
        group = page_store.store.group if isinstance(page_store.store, Grouped) else 1
        self._together = max(min(group, _GROUP_BYTES // max(length, 1)), 1)
        """How many pages a call writes at most."""
        self.rooms = BufferPool(page_store.layout)
        self._stores: list[tuple[Hit, list[Future[bool]]]] = []

    @property
    def busy(self) -> bool:
        """Whether pages are on their way to storage."""
        return bool(self._stores)

    def store(self, hit: Hit, chain: Chain, pages: Iterable[tuple[int, Mapping[int, Data]]]) -> None:
        """Write pages, which `hit` pins."""
        write, most = self.page_store.write_all, self._together
        self._stores.append((hit, [self.workers.gather(write, (chain, i, data), most) for i, data in pages]))

    def reap(self) -> int:
        """Let go of pages that storage has done with, or has no use for while it hangs; how many it keeps."""
        if self.workers.hangs:
            self.workers.drop()
        waiting, stored = [], 0
        for hit, futures in self._stores:
            if all(future.done() for future in futures):
                hit.close()
                stored += sum(future.result() for future in futures if not future.cancelled())
            else:
                waiting.append((hit, futures))
        self._stores = waiting
        return stored

    def wait(self) -> bool:
        """Until storage has all that is on its way; False if it hangs."""
        wait_for([future for _, some in self._stores for future in some], self.limit)
        return not self.workers.hangs

    def close(self) -> None:
        """End, after what runs, unless it hangs."""
        if self._looking:
            self._looking.close(0.0)
        self.workers.close(self.limit)


class StorageRead:
    """Pages of a prompt that come from storage to the host."""

    def __init__(
        self, storing: StorageIO | None, chain: Chain, pages: range, deadline: float,
        arrived: Callable[[Chain, int, Sequence[Mapping[int, Data]]], int],
    ) -> None:  # fmt: skip
        self._storing, self._chain, self._first, self.deadline = storing, chain, pages.start, deadline
        self._stop, self._arrived = pages.stop, arrived
        self._left, self._lock, self._end, self._rest_from = len(pages), Lock(), pages.stop, -1
        self._rooms: list[PageBuffers] | None = []
        """In which there are pages that nobody has taken yet; None once they have been taken."""
        self._rest: list[dict[int, bytes]] = []
        """Of other geometries, from the first page on that is not there in ours."""
        self._futures = [storing.workers.submit(self._read, i) for i in pages] if storing else []

    def over(self, now: float) -> bool:
        """Whether nobody need wait any longer, at this time of the engine's clock; nobody does where storage hangs."""
        if now >= self.deadline or all(future.done() for future in self._futures):
            return True
        return self._storing is None or self._storing.workers.hangs

    def take(self) -> int:
        """Put what has come on the host, from the first page on, and end; how many pages. The rest is dropped."""
        came, futures = list[Mapping[int, Data]](), self._futures
        self._futures, self._stop = [], 0
        for future in futures:
            data = future.result() if future.done() and not future.cancelled() else None
            if data is None:
                break
            came.append(data)
        for future in futures:
            future.cancel()
        if self._first + len(came) == self._rest_from:
            came += self._rest
        try:
            return self._arrived(self._chain, self._first, came)
        finally:
            with self._lock:
                rooms, self._rooms = self._rooms, None
            for room in rooms or ():
                self._give(room)

    def _read(self, i: int) -> dict[int, Data] | None:
        """In a thread: page i, unless one before it is missing; the last of all asks others for what is missing."""
        assert self._storing is not None
        room = self._storing.rooms.take() if i < self._stop else None
        data = None if room is None else self._storing.page_store.read(self._chain, i, room=room)
        with self._lock:
            if data is None:
                self._stop = min(self._stop, i)
            if room is not None and data is not None and self._rooms is not None:
                self._rooms.append(room)
                room = None
            self._left -= 1
            others = None if self._left or self._stop == self._end else self._storing.others
        if room is not None:  # nobody uses what is there
            self._give(room)
        if others:
            with suppress(OSError):
                first = self._stop
                self._rest, self._rest_from = others.read(self._chain, first), first
        return data

    def _give(self, room: PageBuffers) -> None:
        assert self._storing is not None
        self._storing.rooms.give(room)
