"""Cached pages of target and draft as one object, from the device to storage (spec/v1/tiers.md, draft)."""

from kvproto.tiers.page_cache import PageLease, StorageRead, WritePolicy, patience
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.tiers import Tiers

__all__ = ["Chain", "PageLease", "StorageRead", "Tiers", "WritePolicy", "patience"]
