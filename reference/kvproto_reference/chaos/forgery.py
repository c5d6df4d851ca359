"""Memory that an attacker offers in a Register: an unsealed file, to be shortened once a peer has mapped it."""

from __future__ import annotations

import os
import secrets
from typing import Any

import attrs
import msgpack

from kvproto.wire import encode
from kvproto.wire import messages as m
from kvproto.wire.enums import Transport

from .proxy import Passing, read

__all__ = ["Forgery"]


class Forgery:
    """Replaces the memory of the next Register, and is shortened when that is answered."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(16)
        self._fd: int | None = None
        self.taken: bool | None = None
        """Whether a holder has mapped it."""

    def frame(self, one: Passing) -> bytes:
        """The frame that passes; the first Register gets other memory."""
        said = read(one.frame) if one.name in ("Register", "Registered", "Refused") else None
        if (
            isinstance(said, m.Register)
            and self._fd is None
            and any(bytes(h.data) for r in said.regions for h in r.handles)
        ):
            self._fd = os.memfd_create(f"kvproto-{self._nonce}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, max(region.length for region in said.regions))
            return encode(attrs.evolve(said, regions=tuple(self._other(region) for region in said.regions)))
        if isinstance(said, m.Registered | m.Refused) and self._fd is not None and self.taken is None:
            self.taken = isinstance(said, m.Registered)
            os.ftruncate(self._fd, 0)
        return one.frame

    def _other(self, region: Any) -> Any:
        data = msgpack.packb([os.getpid(), self._fd, self._nonce, 0])
        some = (attrs.evolve(h, data=data) if h.transport == Transport.SHM else h for h in region.handles)
        return attrs.evolve(region, handles=tuple(some))

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
