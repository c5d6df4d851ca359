"""An engine's pool backed by host memory and storage (draft): pages that were computed before are found again."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy.typing as npt

from kvproto.observability.counts import MetricSample, sample
from kvproto.rank.pool import Pool
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_cache import PageCache, WritePolicy
from kvproto.tiers.page_ids import Chain, namespace
from kvproto.tiers.page_layout import page_layout
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.relayout import RelayoutReader
from kvproto.tiers.store import Store, open_store
from kvproto.transport.loading import pager

_OF_STORAGE = "missed", "damaged", "evicted"
_PAGES = "device", "host", "new", "fetched", "stored", "not_kept", "not_stored", *_OF_STORAGE
"""Label values of `kvproto_tier_pages_total`."""


class Tiers(PageCache):
    """The pages of one rank: `open` finds the pages of a request's `chain`, and `PageLease.leave` keeps them."""

    def __init__(
        self,
        pool: Pool,
        names: Mapping[str, str],
        *,
        page: int,
        host: int,
        storage: Path | str | Store | None = None,
        most: int = 0,
        ahead: Collection[str] = (),
        windows: Mapping[str, int] | None = None,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        stream: int = 0,
        durable: bool = False,
    ) -> None:
        """Keep pages of `page` tokens in the pool, `host` of them in host memory, and others in `storage`.

        `names` state what computes the pages (KVP-TIER-NAMESPACE). `storage` is a folder, `packs:FOLDER`,
        the URL of an object store, or a Store, and holds at most `most` bytes (0: without limit). With
        `durable`, pages in files survive a loss of power once they are stored. `ahead` names the groups whose rows also
        depend on the next token, and `windows` states the window of a group in tokens. Slot s of the pool is items
        [s * k, (s + 1) * k) of each group, where k items hold a page. For a pool on a GPU, `stream` is the handle of
        the CUDA stream on which the engine computes. Raises LocalError for memory that cannot be allocated, PlanError
        for a page that cuts rows, and OSError.
        """
        reach = {pool.group(name).id: tokens for name, tokens in (windows or {}).items()}
        layout = page_layout(pool.geometry, pool.rank, page, [pool.group(name).id for name in ahead], reach)
        page_store, others = None, None
        if storage is not None:
            store = open_store(storage, durable)
            page_store = PageStore(store, layout, most * 9 // 10, most, scan=False)
            others = RelayoutReader(store, pool.geometry, pool.rank, layout)
        copies = HostCopies(layout, pool.layout, pool.memories, host, pager(pool.memories, stream))
        super().__init__(copies, page_store, policy, others=others)
        self._geometry, self._rank = pool.geometry, pool.rank
        self.space = namespace(names)

    def chain(self, tokens: npt.ArrayLike) -> Chain:
        """The ids of the pages that hold these token ids, [tokens]; `Chain.extend` adds tokens."""
        chain = Chain(self.space, self.device.layout.page)
        chain.extend(tokens)
        return chain

    def metrics(self, engine: str) -> list[MetricSample]:
        """The metrics of tiers (spec/v1/metrics.md), for `Collector(lambda: tiers.metrics("prefill"))`; thread-safe."""
        base = {"engine": engine, "replica": str(self._geometry.replica), "rank": str(self._rank), "role": "tiers"}
        names = {group.id: group.name for group in self._geometry.groups}
        pages, stored = dict(self.counts), dict(self.page_store.counts) if self.page_store else {}
        counts = pages | {what: stored.get(what, 0) for what in _OF_STORAGE}
        samples = [
            sample(base, "kvproto_tier_pages_total", (what,), counts.get(what.replace("_", " "), 0)) for what in _PAGES
        ]
        for what, count in (("copy", pages.get("failed", 0)), ("storage", stored.get("failed", 0))):
            samples.append(sample(base, "kvproto_tier_failures_total", (what,), count))
        for (way, group), moved in dict(self.moved).items():
            samples.append(sample(base, "kvproto_tier_bytes_total", (way, names[group]), moved))
        for tier, index in (("device", self.device), ("host", self.host)):
            for state, count in index.slots.counts().items():
                samples.append(sample(base, "kvproto_tier_slots", (tier, state.name.lower()), count))
            for group, count in index.page_counts().items():
                samples.append(sample(base, "kvproto_tier_held_pages", (tier, names[group]), count))
        return samples
