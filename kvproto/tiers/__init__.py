"""Cached pages of target and draft as one object, from the device to storage (spec/v1/tiers.md, draft)."""
