"""Sealed pages: objects in storage that only whoever has the operator's key can read, or make (`kvproto[seal]`)."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from threading import local
from typing import Any

from kvproto.errors import LocalError, bad
from kvproto.net.keys import read_guarded
from kvproto.tiers.manifest import SEAL, Data
from kvproto.tiers.page_layout import PageLayout
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Component, Manifest

_MARK = b"kvproto seal 1\0"
_RANDOM, _BODY, _TAG = slice(0, 32), slice(32, -16), slice(-16, None)
_ADVICE = "write 64 hex digits, such as `openssl rand -hex 32` prints, the newest key first"


class Seal:
    """The keys of an operator: the first seals, and all open what they have sealed."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Each key has 32 bytes; raises LocalError without its library, and for other lengths."""
        if not keys or {*map(len, keys)} != {32}:
            raise bad("seal", "keys of 32 bytes", [len(key) for key in keys], _ADVICE)
        try:
            import_module("cryptography")
        except ImportError as error:
            raise LocalError(ErrorCode.TRANSPORT_FAILED, "seal", "pip install 'kvproto[seal]'", f"{error}") from error
        self._keys = {hashlib.sha256(_MARK + key).digest()[:8]: key for key in keys}
        self.name = next(iter(self._keys))
        """The name of the key that seals, 8 bytes."""
        self._space_key, self._scratch = lru_cache(1024)(self._derive), local()

    @classmethod
    def read(cls, place: Path | str) -> "Seal":
        """The keys in a file that only its owner can read, a line of hex digits each; raises LocalError."""
        lines = read_guarded(Path(place), "a file with keys", _ADVICE, secret=True).decode("latin-1").split()
        try:
            return cls([bytes.fromhex(line) for line in lines])
        except ValueError:
            raise bad(str(place), "hex digits", "other text", _ADVICE) from None

    def __contains__(self, name: bytes | None) -> bool:
        return name is not None and bytes(name) in self._keys

    def seal(self, space: bytes, id: bytes, layout: PageLayout, data: Mapping[int, Data]) -> dict[int, Data]:
        """The objects of a page with these bytes, by group, each with random bytes of its own (KVP-TIER-SEAL)."""
        objects: dict[int, Data] = {}
        for group, plain in data.items():
            sealed = memoryview(bytearray(len(plain) + SEAL))
            sealed[_RANDOM] = secrets.token_bytes(32)
            cipher = self._cipher(self.name, space, bytes(sealed[_RANDOM])).encryptor()
            cipher.authenticate_additional_data(_header(self.name, id, layout.geometry, group, len(plain)))
            cipher.update_into(plain, sealed[_BODY])
            cipher.finalize()
            sealed[_TAG], objects[group] = cipher.tag, sealed
        return objects

    def scratch(self, length: int) -> memoryview:
        """Memory of this thread for a sealed object, until it is called again."""
        if len(getattr(self._scratch, "room", b"")) < length:
            self._scratch.room = memoryview(bytearray(length))
        room: memoryview = self._scratch.room
        return room[:length]

    def open(self, manifest: Manifest, component: Component, sealed: Data, room: memoryview | None) -> Data | None:
        """The bytes of an object, in `room` if there is one; None for what was not sealed as this (KVP-TIER-OPEN)."""
        from cryptography.exceptions import InvalidTag

        name, sealed = bytes(manifest.seal or b""), memoryview(sealed)
        room = memoryview(bytearray(component.length)) if room is None else room
        cipher = self._cipher(name, bytes(manifest.namespace), bytes(sealed[_RANDOM]), bytes(sealed[_TAG])).decryptor()
        place = bytes(manifest.id), bytes(manifest.geometry), component.group, component.length
        cipher.authenticate_additional_data(_header(name, *place))
        cipher.update_into(sealed[_BODY], room)
        try:
            cipher.finalize()
        except InvalidTag:
            return None
        return room

    def _derive(self, name: bytes, space: bytes) -> bytes:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(hashes.SHA256(), 32, None, _MARK + space).derive(self._keys[name])

    def _cipher(self, name: bytes, space: bytes, random: bytes, tag: bytes | None = None) -> Any:
        """AES-GCM with the key of one object."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

        key = HKDFExpand(hashes.SHA256(), 44, _MARK + random).derive(self._space_key(name, space))
        return Cipher(algorithms.AES(key[:32]), modes.GCM(key[32:], tag))


def _header(name: bytes, id: bytes, geometry: bytes, group: int, length: int) -> bytes:
    """The bytes that a seal covers beside the object's: the page, and one of its groups."""
    return _MARK + name + id + geometry + group.to_bytes(4, "little") + length.to_bytes(8, "little")
