"""An engine's pool backed by host memory and storage (draft): pages that were computed before are found again."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy.typing as npt

from kvproto.observability.counts import MetricSample, sample
from kvproto.rank.pool import Pool
from kvproto.tiers.host_cache import HostCache
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.index import Index
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
        copies, pages, others = tier_parts(pool, page, host, storage, most, ahead, reach, stream, durable)
        super().__init__(copies, pages, policy, others=others)
        self._pool = pool
        self.space = namespace(names)

    def chain(self, tokens: npt.ArrayLike) -> Chain:
        """The ids of the pages that hold these token ids, [tokens]; `Chain.extend` adds tokens."""
        return chain_of(self.space, self.device.layout.page, tokens)

    def metrics(self, engine: str) -> list[MetricSample]:
        """The metrics of tiers (spec/v1/metrics.md), for `Collector(lambda: tiers.metrics("prefill"))`; thread-safe."""
        return _metrics(self, self._pool, engine, {"device": self.device, "host": self.host})


class HostTiers(HostCache):
    """The host and storage behind a pool whose pages the engine itself gives to requests, as vLLM and SGLang do.

    `fetch` brings the pages of a `chain` to the host and `find` pins them there; `load` copies them into slots of
    the pool, and `save` keeps what slots hold. `step` is called once per step of the engine.
    """

    def __init__(
        self,
        pool: Pool,
        names: Mapping[str, str],
        *,
        page: int,
        host_bytes: int,
        storage: Path | str | Store | None = None,
        most: int = 0,
        ahead: Collection[str] = (),
        stream: int = 0,
        durable: bool = False,
    ) -> None:
        """The host has room for one page at least; other arguments, and what is raised, are as of `Tiers`."""
        host = max(host_bytes // sum(page_layout(pool.geometry, pool.rank, page).lengths.values()), 1)
        copies, pages, others = tier_parts(pool, page, host, storage, most, ahead, {}, stream, durable)
        super().__init__(copies, pages, others=others)
        self._pool, self._names = pool, dict(names)
        self.space = namespace(names)

    def chain(self, tokens: npt.ArrayLike, **more: str) -> Chain:
        """The ids of the pages that hold these token ids, [tokens]; `more` are names of a request, such as `salt`."""
        space = namespace(self._names | more) if more else self.space
        return chain_of(space, self.host.layout.page, tokens)

    def metrics(self, engine: str) -> list[MetricSample]:
        """The metrics of tiers (spec/v1/metrics.md), for `Collector(lambda: tiers.metrics("prefill"))`; thread-safe."""
        return _metrics(self, self._pool, engine, {"host": self.host})


def tier_parts(
    pool: Pool,
    page: int,
    host: int,
    storage: Path | str | Store | None,
    most: int,
    ahead: Collection[str],
    reach: Mapping[int, int],
    stream: int,
    durable: bool,
) -> tuple[HostCopies, PageStore | None, RelayoutReader | None]:
    """The copies between a pool and the host, a page store, and a reader of other layouts; arguments as of `Tiers`."""
    layout = page_layout(pool.geometry, pool.rank, page, [pool.group(name).id for name in ahead], reach)
    page_store, others = None, None
    if storage is not None:
        store = open_store(storage, durable)
        page_store = PageStore(store, layout, most * 9 // 10, most, scan=False)
        others = RelayoutReader(store, pool.geometry, pool.rank, layout)
    copies = HostCopies(layout, pool.layout, pool.memories, host, pager(pool.memories, stream))
    return copies, page_store, others


def chain_of(space: bytes, page: int, tokens: npt.ArrayLike) -> Chain:
    """The ids of the pages that hold these token ids."""
    chain = Chain(space, page)
    chain.extend(tokens)
    return chain


def _metrics(cache: HostCache, pool: Pool, engine: str, tiers: Mapping[str, Index]) -> list[MetricSample]:
    base = {"engine": engine, "replica": str(pool.geometry.replica), "rank": str(pool.rank), "role": "tiers"}
    names = {group.id: group.name for group in pool.geometry.groups}
    pages, stored = dict(cache.counts), dict(cache.page_store.counts) if cache.page_store else {}
    counts = pages | {what: stored.get(what, 0) for what in _OF_STORAGE}
    samples = [
        sample(base, "kvproto_tier_pages_total", (what,), counts.get(what.replace("_", " "), 0)) for what in _PAGES
    ]
    for what, count in (("copy", pages.get("failed", 0)), ("storage", stored.get("failed", 0))):
        samples.append(sample(base, "kvproto_tier_failures_total", (what,), count))
    for (way, group), moved in dict(cache.moved).items():
        samples.append(sample(base, "kvproto_tier_bytes_total", (way, names[group]), moved))
    for tier, index in tiers.items():
        for state, count in index.slots.counts().items():
            samples.append(sample(base, "kvproto_tier_slots", (tier, state.name.lower()), count))
        for group, count in index.page_counts().items():
            samples.append(sample(base, "kvproto_tier_held_pages", (tier, names[group]), count))
    return samples
