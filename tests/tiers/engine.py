"""An engine that writes what it should have computed: bytes that depend on all tokens so far, by group."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvproto import Cache as Group
from kvproto import Parallel, lay_out
from kvproto.copying.program import CopyProgram, RankLayout
from kvproto.errors import LocalError
from kvproto.rank.pool import columns_without_gaps
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_cache import PageCache, PageLease, WritePolicy
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import page_layout
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.storage_io import StorageIO
from kvproto.transport.base import Paging, Regions
from kvproto.transport.memory import allocate
from kvproto.transport.shm.transport import HostPager
from kvproto.wire.enums import ErrorCode

PAGE = 4
"""Tokens; two items of the target's pool, one of the draft's."""


class Failing(HostPager):
    """Copies that fail while `fails`, and have written something then."""

    fails = False

    def copy(self, program: CopyProgram, sources: Regions, sinks: Regions) -> Paging:
        if not self.fails:
            return super().copy(program, sources, sinks)
        super().copy(program.select(layers=[0]), sources, sinks)
        raise LocalError(ErrorCode.TRANSPORT_FAILED, "copy", "all layers", "one")


class Engine:
    """A target and its draft on one rank, in pools of any order of axes, dealt or not."""

    def __init__(
        self,
        pages: int,
        slots: int,
        page_store: bool | PageStore = False,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        heads_first: bool = False,
        dcp: int = 1,
        store: object = None,
        draft: bool = True,
        reach: int = 0,
        pager: Callable[[], Failing] = Failing,
        **more: Any,
    ) -> None:
        """`reach`: tokens that the draft attends to, PAGE; 0: all. `more` is for `StorageIO`."""
        target = Group.gqa("target", 3, kv_heads=2, head_dim=3, page=2 // dcp)
        groups = [target.sharded() if dcp > 1 else target]
        if draft:
            groups.append(Group.gqa("draft", 1, kv_heads=1, head_dim=2, page=PAGE, model=1))
        self.geometry = lay_out(groups, Parallel(tp=dcp, dcp=dcp) if dcp > 1 else Parallel())
        columns, length = columns_without_gaps(
            self.geometry, dcp - 1, {0: 2 * pages, 1: pages} if draft else {0: 2 * pages}, heads_first
        )
        self.side, self.memory = RankLayout(self.geometry, dcp - 1, columns), allocate(length)
        self.layout = page_layout(self.geometry, dcp - 1, PAGE, [1] if draft else [], {1: reach} if reach else None)
        self.pager = pager()
        copies = HostCopies(self.layout, self.side, {0: self.memory}, slots, self.pager)
        io = StorageIO(PageStore(store, self.layout), **more) if store else None  # type: ignore[arg-type]
        self.cache = PageCache(copies, io, policy)

    def chain(self, *tokens: int) -> Chain:
        made = Chain(bytes(32), PAGE)
        made.extend(tokens)
        return made

    def right(self, chain: Chain, i: int) -> dict[int, bytes]:
        """The bytes of page i."""
        id = chain.ids(self.layout.form)[i]
        return {p.group: hashlib.shake_128(id + bytes((p.group,))).digest(p.length) for p in self.layout.components}

    def compute(self, chain: Chain, lease: PageLease, first: int, windows: int = 0) -> None:
        """Write pages from `first` on, as far as they have ids, into the pool; the draft's rows only from `windows` on."""
        for i in range(first, min(len(chain.ids(self.layout.form)), len(lease.slots))):
            for group, data in self.right(chain, i).items():
                there = group != 1 or i * PAGE >= windows
                self._rows(group, lease.slots[i], data if there else b"\xa5" * len(data))

    def there(self, slot: int) -> dict[int, bytes]:
        """What a page of the pool has."""
        return {part.group: self._rows(part.group, slot) for part in self.layout.components}

    def _rows(self, group: int, slot: int, data: bytes | None = None) -> bytes:
        """Rows of a page, in the order of storage: taken out by strides, or put in."""
        spec, share, columns = self.side.groups[group], self.side.shares[group], self.side.columns[group]
        count, out, at = self.layout.component(group).length // self.per_item(group), b"", 0
        for k in range(len(share.layers) * len(spec.parts)):
            part = k % len(spec.parts)
            lanes, size = sum(s.hi - s.lo for s in share.lanes if s.part == part), spec.parts[part].lane_bytes
            for item in range(slot * count, (slot + 1) * count):
                start = int(columns.offset[k]) + item * int(columns.item_stride[k])
                strides = int(columns.row_stride[k]), int(columns.lane_stride[k]), 1
                view = np.ndarray((spec.rows, lanes, size), np.uint8, np.from_dlpack(self.memory), start, strides)
                if data is not None:
                    view[:] = np.frombuffer(data, np.uint8, view.size, at).reshape(view.shape)
                    at += view.size
                out += view.tobytes()
        return out

    def per_item(self, group: int) -> int:
        spec, share = self.side.groups[group], self.side.shares[group]
        width = sum((s.hi - s.lo) * spec.parts[s.part].lane_bytes for s in share.lanes)
        return int(spec.rows * width * len(share.layers))

    def fetched(self, chain: Chain) -> int:
        """Pages that storage has given, however long it took."""
        fetch = self.cache.fetch(chain, float("inf"))
        while not fetch.over(0.0):
            continue
        return fetch.take()

    def turn(self, *tokens: int, step: bool = True, windows: int = 0, after: bool = False) -> PageLease:
        """A request from its beginning to its end, with `after` the step that copies its pages; its lease, which is over."""
        chain = self.chain(*tokens)
        lease = self.cache.open(chain, -(-len(tokens) // PAGE))
        assert lease is not None
        if step:
            self.cache.step()
        self.check(chain, lease)
        self.compute(chain, lease, lease.pages, windows)
        lease.leave(len(tokens) - 1, windows=windows)
        if after:
            self.cache.step()
        return lease

    def check(self, chain: Chain, lease: PageLease) -> None:
        """All pages that are said to be there are right, target and draft."""
        for i, slot in enumerate(lease.slots[: lease.pages]):
            right = self.right(chain, i)
            held = self.cache.device.groups(slot)
            assert 0 in held
            for group in held:
                assert self.there(slot)[group] == right[group]
        if lease.pages:
            last = self.cache.device.groups(lease.slots[lease.pages - 1])
            assert last == [part.group for part in self.layout.components], "a window ends with the last page"

    def check_bytes(self, chain: Chain, lease: PageLease) -> None:
        """All pages that are said to be there are right, be their copies over or not."""
        for i, slot in enumerate(lease.slots[: lease.pages]):
            assert self.there(slot) == self.right(chain, i)

    def forget(self) -> None:
        """Give up all pages of the device, and what they held where none is in use: nobody may find it by chance."""
        slots = self.cache.device.slots
        self.cache.device.evict(slots.count)
        if slots.free == slots.count:
            np.from_dlpack(self.memory).view(np.uint8)[:] = 0xA5

    def free(self) -> Sequence[int]:
        """Slots of both memories that are free once all that can be given up is."""
        found = []
        for index in (self.cache.device, self.cache.host):
            index.evict(index.slots.count)
            found.append(index.slots.free)
        return found
