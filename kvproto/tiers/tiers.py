"""An engine's pool backed by host memory and storage (draft): pages that were computed before are found again."""

from collections.abc import Collection, Mapping
from pathlib import Path

from kvproto.rank.pool import Pool
from kvproto.tiers.host_cache import HostCache
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_cache import PageCache, WritePolicy
from kvproto.tiers.page_layout import page_layout
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.relayout import RelayoutReader
from kvproto.tiers.sealing import Seal
from kvproto.tiers.storage_io import StorageIO
from kvproto.tiers.store import Store, open_store
from kvproto.transport.loading import pager


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
        seal: Path | str | None = None,
    ) -> None:
        """Keep pages of `page` tokens in the pool, `host` of them in host memory, and others in `storage`.

        `names` state what computes the pages (KVP-TIER-NAMESPACE). `storage` is a folder, `packs:FOLDER`,
        the URL of an object store, or a Store, and holds at most `most` bytes (0: without limit). With
        `durable`, pages in files survive a loss of power once they are stored. `seal` is a file of keys, a line of 64
        hex digits each: pages are sealed with the first, and opened with any. `ahead` names the groups whose rows also
        depend on the next token, and `windows` states the window of a group in tokens. Slot s of the pool is items
        [s * k, (s + 1) * k) of each group, where k items hold a page. For a pool on a GPU, `stream` is the handle of
        the CUDA stream on which the engine computes. Raises LocalError for memory that cannot be allocated, PlanError
        for a page that cuts rows, and OSError.
        """
        reach = {pool.group(name).id: tokens for name, tokens in (windows or {}).items()}
        copies, pages = tier_parts(pool, page, host, storage, most, ahead, reach, stream, durable, seal)
        super().__init__(copies, StorageIO(pages) if pages else None, policy, names)


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
        seal: Path | str | None = None,
    ) -> None:
        """The host has room for one page at least; other arguments, and what is raised, are as of `Tiers`."""
        host = max(host_bytes // sum(page_layout(pool.geometry, pool.rank, page).lengths.values()), 1)
        copies, pages = tier_parts(pool, page, host, storage, most, ahead, {}, stream, durable, seal)
        super().__init__(copies, StorageIO(pages) if pages else None, names)


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
    seal: Path | str | None,
) -> tuple[HostCopies, PageStore | None]:
    """The copies between a pool and the host, and a page store that knows other layouts; arguments as of `Tiers`."""
    layout = page_layout(pool.geometry, pool.rank, page, [pool.group(name).id for name in ahead], reach)
    page_store = None
    if storage is not None:
        store, keys = open_store(storage, durable), Seal.read(seal) if seal else None
        page_store = PageStore(store, layout, most * 9 // 10, most, scan=False)
        page_store.seal, page_store.others = keys, RelayoutReader(store, pool.geometry, pool.rank, layout, keys)
    copies = HostCopies(layout, pool.layout, pool.memories, host, pager(pool.memories, stream))
    return copies, page_store
