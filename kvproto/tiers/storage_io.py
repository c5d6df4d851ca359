"""Pages on their way between the host and storage, by threads, as far as storage keeps up."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from math import inf
from threading import Lock

from kvproto.tiers.index import Hit
from kvproto.tiers.manifest import Data
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_store import BufferPool, PageBuffers, PageStore
from kvproto.tiers.store import BatchStore
from kvproto.tiers.workers import Workers

_BATCH_BYTES = 64 << 20
"""Most bytes that are written in one call, so that a slow disk is not taken for one that hangs."""


class StorageIO:
    """A page store, and the threads that read and write it. While a call hangs, storage is not used."""

    def __init__(self, pages: PageStore, threads: int = 4, most: int = 1024, limit: float = 10.0) -> None:
        """At most `most` pages may be on their way, and further ones are not stored.

        Storage hangs if a call takes more than `limit` seconds: until it returns, nothing waits for storage or uses it.
        """
        self.pages, self.limit = pages, limit
        self.workers = Workers(threads, limit, most)
        if pages.others:
            self.workers.submit(pages.others.publish_geometry)
        self._scanning = Workers(1, inf, 1) if pages.high else None
        if self._scanning:
            self._scanning.submit(pages.scan)
        length = sum(pages.layout.lengths.values())
        batch = pages.store.batch if isinstance(pages.store, BatchStore) else 1
        self._together = max(min(batch, _BATCH_BYTES // max(length, 1)), 1)
        """The most pages that a call writes."""
        self.buffers = BufferPool(pages.layout)
        self._writes: list[tuple[Hit, list[Future[bool]]]] = []

    @property
    def busy(self) -> bool:
        """Whether pages are on their way to storage."""
        return bool(self._writes)

    def write(self, hit: Hit, chain: Chain, pages: Iterable[tuple[int, Mapping[int, Data]]]) -> None:
        """Have threads write pages of a prompt, which `hit` pins meanwhile; a rank may have nothing of a page."""
        gather, write, most = self.workers.gather, self.pages.write_all, self._together
        self._writes.append((hit, [gather(write, (chain, i, data), most) for i, data in pages if data]))

    def collect(self) -> int:
        """Unpin pages whose writes are over, or are dropped because storage hangs; returns how many pages it keeps."""
        if self.workers.hangs:
            self.workers.drop()
        waiting, stored = [], 0
        for hit, futures in self._writes:
            if all(future.done() for future in futures):
                hit.close()
                stored += sum(future.result() for future in futures if not future.cancelled())
            else:
                waiting.append((hit, futures))
        self._writes = waiting
        return stored

    def wait(self) -> bool:
        """Wait for all writes that are on their way; returns False if storage hangs."""
        wait_for([future for _, futures in self._writes for future in futures], self.limit)
        return not self.workers.hangs

    def close(self) -> None:
        """Wait for calls that are running, unless storage hangs."""
        if self._scanning:
            self._scanning.close(0.0)
        self.workers.close(self.limit)


class StorageRead:
    """A read of a prompt's pages from storage to the host."""

    def __init__(
        self,
        io: StorageIO | None,
        chain: Chain,
        pages: range,
        deadline: float,
        put_on_host: Callable[[Chain, int, Sequence[Mapping[int, Data]]], int],
    ) -> None:
        self._io, self._chain, self._first, self.deadline = io, chain, pages.start, deadline
        self._stop, self._put_on_host = pages.stop, put_on_host
        self._left, self._lock, self._end, self._rest_from = len(pages), Lock(), pages.stop, -1
        self._buffers: list[PageBuffers] | None = []
        """Buffers with pages that were read and not taken; None once they have been taken."""
        self._rest: list[dict[int, bytes]] = []
        """Pages in other layouts, from the first page on that is not there in ours."""
        self._futures = [io.workers.submit(self._read, i) for i in pages] if io else []

    def over(self, now: float) -> bool:
        """Whether the read is over: complete, past its deadline by the engine's clock `now`, or storage hangs."""
        if now >= self.deadline or all(future.done() for future in self._futures):
            return True
        return self._io is None or self._io.workers.hangs

    def take(self) -> int:
        """End the read, and put the pages that have come on the host, from the first on; returns how many."""
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
            return self._put_on_host(self._chain, self._first, came)
        finally:
            with self._lock:
                taken, self._buffers = self._buffers, None
            if self._io:
                for buffers in taken or ():
                    self._io.buffers.give_back(buffers)

    def _read(self, i: int) -> dict[int, Data] | None:
        """Read page i in a thread, unless one before it is missing; the last call reads the rest in other layouts."""
        assert self._io is not None
        buffers = self._io.buffers.take() if i < self._stop else None
        data = None if buffers is None else self._io.pages.read(self._chain, i, buffers=buffers)
        with self._lock:
            if data is None:
                self._stop = min(self._stop, i)
            if buffers is not None and data is not None and self._buffers is not None:
                self._buffers.append(buffers)
                buffers = None
            self._left -= 1
            others = None if self._left or self._stop == self._end else self._io.pages.others
        if buffers is not None:  # nothing was read into them, or the read has ended
            self._io.buffers.give_back(buffers)
        if others:
            with suppress(OSError):
                first = self._stop
                self._rest, self._rest_from = others.read(self._chain, first), first
        return data
