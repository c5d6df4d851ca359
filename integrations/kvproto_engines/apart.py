"""Adapters and tenants of a request: what its prompt and the names of its pages have beside tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from kvproto import adapter_digest, tenant_digest

__all__ = ["names_of", "salts_of"]


def salts_of(adapter: str | None, images: Iterable[bytes], tenant: str | None) -> list[bytes]:
    """Salts of a prompt: of the adapter that is at a place, of images by their digests, and of the tenant.

    Raises LocalError(OUT_OF_RANGE) for a folder without an adapter.
    """
    own = [_digest_at(adapter)] if adapter else []
    return [*own, *images, *([tenant_digest(tenant)] if tenant else [])]


def names_of(adapter: str | None, tenant: str | None) -> dict[str, str]:
    """The same as names of pages (KVP-TIER-NAMESPACE)."""
    own = {"adapter": _digest_at(adapter).hex()} if adapter else {}
    return own | ({"salt": tenant} if tenant else {})


def _digest_at(place: str) -> bytes:
    """The digest of an adapter's folder, or of the name by which a hub has it, which both engines then use alike."""
    folder = Path(place)
    if not folder.is_dir():
        return hashlib.sha256(b"kvproto adapter's name 1\0" + place.encode(errors="surrogatepass")).digest()
    changed = tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()))
    return _digest_of(folder, changed)


@lru_cache(256)
def _digest_of(folder: Path, changed: tuple[tuple[str, int, int], ...]) -> bytes:
    """Read once, and again when a file has `changed`."""
    return adapter_digest(folder)
