"""An engine's pool, with memory of the host and storage behind it (draft): what is computed once is found again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy.typing as npt

from kvproto.pool import Pool
from kvproto.tiers.cache import Cache, Fetch, Keep, patience
from kvproto.tiers.components import components
from kvproto.tiers.copies import Copies
from kvproto.tiers.identity import Chain, namespace
from kvproto.tiers.lease import Lease
from kvproto.tiers.others import Others
from kvproto.tiers.places import open_store
from kvproto.tiers.shelf import Shelf
from kvproto.tiers.store import Store
from kvproto.transport.loading import pager

__all__ = ["Chain", "Fetch", "Keep", "Lease", "Tiers", "patience"]


class Tiers(Cache):
    """The pages of one rank: those of a request's `chain` are found by `open`, and kept by `Lease.leave`."""

    def __init__(
        self, pool: Pool, names: Mapping[str, str], *, page: int, host: int, storage: Path | str | Store | None = None,
        most: int = 0, ahead: Collection[str] = (), windows: Mapping[str, int] | None = None, keep: Keep = Keep.AT_ONCE,
        stream: int = 0,
    ) -> None:  # fmt: skip
        """`names` are what the pages are computed by (KVP-TIER-NAMESPACE), `page` tokens of a page, `host` pages there.

        `storage` is a folder, `lmdb:FOLDER`, the URL of an object store, or a store; it is kept to `most` bytes, 0: to
        any number. `ahead` are names of groups whose rows depend on the next token too, `windows` tokens by group name.
        Slot s of the pool is items [s * k, (s + 1) * k) of each group, as many as hold a page. Of a pool of a GPU,
        `stream` is the handle of the stream on which the engine computes. Raises LocalError for memory that cannot be
        had, PlanError for a page that cuts rows, OSError.
        """
        reach = {pool.group(name).id: tokens for name, tokens in (windows or {}).items()}
        layout = components(pool.geometry, pool.rank, page, [pool.group(name).id for name in ahead], reach)
        store = None if storage is None else open_store(storage)
        shelf = None if store is None else Shelf(store, layout, most * 9 // 10, most, look=False)
        copies = Copies(layout, pool.layout, pool.memories, host, pager(pool.memories, stream))
        others = None if store is None else Others(store, pool.geometry, pool.rank, layout)
        super().__init__(copies, shelf, keep, others=others)
        self.space = namespace(names)

    def chain(self, tokens: npt.ArrayLike) -> Chain:
        """The names of a prompt's pages, as far as its tokens are known; `Chain.extend` goes on."""
        made = Chain(self.space, self.device.layout.page)
        made.extend(tokens)
        return made
