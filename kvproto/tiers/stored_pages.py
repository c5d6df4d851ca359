"""Pages in storage behind an engine's own pool of the host, as SGLang's HiCache has one; calls return when it is done.

Any number of threads may call: one puts pages while another gets some.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy.typing as npt

from kvproto.errors import check_whole
from kvproto.rank.pool import Pool
from kvproto.tiers.manifest import Data
from kvproto.tiers.page_ids import Chain, namespace
from kvproto.tiers.store import BatchStore, Store
from kvproto.tiers.tiers import tier_parts
from kvproto.tiers.workers import Workers

BATCH = 32
"""Pages that are copied together, in each direction."""
_CUT = 256 << 20
"""Most bytes of pages in other layouts that were counted and are kept until they are got."""


class StoredPages:
    """The pages of one rank's pool in storage; slot s of the pool is items [s * k, (s + 1) * k) of each group."""

    def __init__(
        self,
        pool: Pool,
        names: Mapping[str, str],
        *,
        page: int,
        storage: Path | str | Store,
        most: int = 0,
        ahead: Collection[str] = (),
        durable: bool = False,
        seal: Path | str | None = None,
    ) -> None:
        """The arguments, and what is raised, are those of `Tiers`."""
        copies, pages = tier_parts(pool, page, 2 * BATCH, storage, most, ahead, {}, 0, durable, seal)
        assert pages is not None
        assert pages.others is not None
        self.copies, self.page_store, self._others = copies, pages, pages.others
        self.layout, self.space, self._names = copies.layout, namespace(names), dict(names)
        self._workers = Workers(4, float("inf"), 1 << 30)
        self._getting, self._putting, self._copying, self._cutting = Lock(), Lock(), Lock(), Lock()
        self._cut: OrderedDict[bytes, Mapping[int, bytes]] = OrderedDict()
        """Pages in other layouts that were counted, cut for ours, by id."""
        self._most_cut = max(_CUT // max(sum(self.layout.lengths.values()), 1), 1)
        store = pages.store
        self._together = min(store.batch if isinstance(store, BatchStore) else 1, BATCH)
        if most:
            self._workers.submit(pages.scan)
        self._others.publish_geometry()

    def space_of(self, more: Mapping[str, str]) -> bytes:
        """The namespace of requests that have these names, too, such as `salt`."""
        return namespace({**self._names, **more})

    def chain(self, tokens: npt.ArrayLike) -> Chain:
        """The ids of the pages that hold these token ids, [tokens]; `Chain.extend` adds tokens."""
        return Chain(self.space, self.layout.page, tokens)

    def count(self, chain: Chain, first: int, last: int) -> int:
        """Count the pages of [first, last) that there are, from the first on, in our layout and then in others."""
        check_whole("last", last, first, len(chain.ids(self.layout.form)))
        found = first
        while found < last and self.page_store.holds(chain, found):
            found += 1
        while found < last and self._cut_page(chain, found) is not None:
            found += 1
        return found - first

    def _cut_page(self, chain: Chain, i: int) -> Mapping[int, bytes] | None:
        """Page i as others have it, cut for us: what was cut is kept, the least recently cut goes."""
        ids = chain.ids(self.layout.form)
        with self._cutting:
            if ids[i] in self._cut:
                return self._cut[ids[i]]
            found: list[dict[int, bytes]] = []
            with suppress(OSError):
                found = self._others.read(chain, i)
            for id, data in zip(ids[i:], found[: self._most_cut], strict=False):
                self._cut[id] = data
            while len(self._cut) > self._most_cut:
                self._cut.popitem(last=False)
        return found[0] if found else None

    def get(self, chain: Chain, first: int, slots: Sequence[int]) -> int:
        """Read pages from page `first` on into these slots of the pool; how many, from the first on, are there now."""
        done = 0
        with self._getting:
            while done < len(slots):
                wanted = slots[done : done + BATCH]
                reads = [self._workers.submit(self._read, chain, first + done + i, i) for i in range(len(wanted))]
                whole = [read.result() for read in reads]
                count = whole.index(False) if False in whole else len(whole)
                if count:
                    with self._copying:
                        self.copies.to_pool(range(count), wanted[:count]).wait()
                done += count
                if count < len(wanted):
                    break
        return done

    def _read(self, chain: Chain, i: int, slot: int) -> bool:
        """Read page i into a slot of the host."""
        room = self.copies.page(slot)
        data: Mapping[int, Data] | None = self.page_store.read(chain, i, buffers=room)
        if data is None:
            data = self._cut_page(chain, i)
        if data is None or not self.layout.required <= data.keys():
            return False
        for group, view in room.items():
            if data.get(group) is not view:
                view[:] = data.get(group, bytes(len(view)))
        return True

    def put(self, chain: Chain, first: int, slots: Sequence[int]) -> list[bool]:
        """Write pages from page `first` on, which these slots of the pool hold; which of them are kept."""
        kept: list[bool] = []
        with self._putting:
            for at in range(0, len(slots), BATCH):
                wanted = slots[at : at + BATCH]
                here = range(BATCH, BATCH + len(wanted))
                with self._copying:
                    self.copies.to_host(wanted, here).wait()
                pages = [(chain, first + at + i, self.copies.page(slot)) for i, slot in enumerate(here)]
                for begin in range(0, len(pages), self._together):
                    kept += self.page_store.write_all(pages[begin : begin + self._together])
        return kept

    def close(self) -> None:
        """Wait for calls, and free the memory."""
        with self._getting, self._putting:
            self._workers.close(10.0)
            self.copies.close()
