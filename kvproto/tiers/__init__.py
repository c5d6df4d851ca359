"""Cached pages of target and draft as one object, from the device to storage (spec/v1/tiers.md, draft).

A page goes from the device through the host to storage, and back:

* `tiers`, `page_cache`: the engine's calls, leases of pages, and which pages move in a step.
* `host_cache`: the pages on the host and in storage, also for an engine that owns the pages of its pool.
* `page_ids`, `page_layout`: the ids of a prompt's pages, and the components of a page.
* `index`: the pages that are on the device, and those that are on the host.
* `host_copies`: copies between the device and the host.
* `stored_pages`: storage alone, for an engine that has a host pool of its own.
* `storage_io`, `workers`: threads between the host and storage.
* `page_store`, `manifest`: pages as keys and bytes in a store, checked at every read.
* `store`, with `file_store`, `pack_store`, `object_store`: the back ends.
* `relayout`: pages in storage that other geometries wrote.
* `fsck`: the check behind `kvproto tiers`.
"""

from kvproto.tiers.index import Hit
from kvproto.tiers.page_cache import PageLease, WritePolicy, patience
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.storage_io import StorageRead
from kvproto.tiers.stored_pages import StoredPages
from kvproto.tiers.tiers import HostTiers, Tiers

__all__ = ["Chain", "Hit", "HostTiers", "PageLease", "StorageRead", "StoredPages", "Tiers", "WritePolicy", "patience"]
