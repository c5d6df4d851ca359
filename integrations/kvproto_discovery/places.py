"""Directories as settings and command lines name them, such as "dns:prefill=prefill-{0-3}.prefill:7100"."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

from kvproto.errors import KvprotoError, bad
from kvproto.net import check_public
from kvproto.wire.plain import read_file
from kvproto_discovery.dns import Dns
from kvproto_discovery.etcd import Etcd
from kvproto_discovery.following import Directory, FoundSources

__all__ = ["SCHEMES", "directory_of", "etcd_of", "read_found"]

SCHEMES = ("dns:", "etcd:")
"""Beginnings of texts that name a directory."""


def read_found(places: str, keys: str | Path | None = None) -> FoundSources:
    """The sources that "dns:..." or "etcd:..." names, to be followed; `keys` is a file of public keys, one a line.

    With DNS all sources have the one key of that file. Sources in etcd state theirs, and those whose key is not in the
    file are never dialled. Raises LocalError(OUT_OF_RANGE).
    """
    allowed = None if keys is None else _keys(Path(keys))
    if places.startswith("dns:") and allowed is not None and len(allowed) != 1:
        raise bad("source_keys", "one key, which all sources have that DNS names", str(len(allowed)), "use etcd")
    return FoundSources(directory_of(places, allowed[0] if allowed else None), allowed)


def directory_of(places: str, key: str | None = None) -> Directory:
    """The directory that a text names; raises LocalError(OUT_OF_RANGE).

    `dns:ENGINE=HOST:PORT`, several with commas between, where HOST may have a range in it, as prefill-{0-3}.prefill;
    `etcd:URL`, of several members with commas between, then perhaps `?prefix=...&ca=...&cert=...&key=...`.
    """
    if places.startswith("etcd:"):
        return etcd_of(places)
    if not places.startswith("dns:"):
        raise bad("sources", "dns:ENGINE=HOST:PORT or etcd:URL", repr(places), "correct it")
    named = [each.partition("=") for each in places.removeprefix("dns:").split(",")]
    if any(not engine or not host for engine, _, host in named) or len({engine for engine, *_ in named}) < len(named):
        raise bad("sources", "dns:ENGINE=HOST:PORT, each engine once", repr(places), "correct it")
    return Dns({engine: host for engine, _, host in named}, key)


def etcd_of(places: str) -> Etcd:
    """The etcd that `etcd:URL` names; raises LocalError(OUT_OF_RANGE)."""
    urls, _, query = places.removeprefix("etcd:").partition("?")
    more = dict(parse_qsl(query))
    if not places.startswith("etcd:") or (unknown := more.keys() - {"prefix", "ca", "cert", "key"}):
        yours = repr(sorted(unknown)[0]) if places.startswith("etcd:") else repr(places)
        raise bad("etcd", "etcd:URL?prefix=...&ca=...&cert=...&key=...", yours, "correct it")
    return Etcd(urls.split(","), **more)


def _keys(file: Path) -> list[str]:
    """The public keys in a file; raises LocalError(OUT_OF_RANGE)."""
    try:
        lines = [line.strip() for line in read_file(file).decode().splitlines()]
    except (OSError, ValueError, KvprotoError) as error:
        raise bad("source_keys", "a file of public keys, one a line", f"{file}: {error}", "correct it") from None
    keys = [line for line in lines if line and not line.startswith("# ")]
    for key in keys:
        check_public(f"source_keys {file}", key)
    if not keys:
        raise bad("source_keys", "a public key in the file", f"none in {file}", "copy them from public.key")
    return keys
