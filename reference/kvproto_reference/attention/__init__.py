"""Attention over paged pools, whole or dealt over decode-context-parallel ranks."""
