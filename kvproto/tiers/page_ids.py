"""What a cached page is called: a chain of digests over a namespace and the tokens of the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvproto.errors import U32, check_whole
from kvproto.wire.enums import KeyForm

__all__ = ["Chain", "namespace"]

_NAMESPACE, _PAGE = b"kvproto namespace 1\0", b"kvproto page 1\0"


def namespace(entries: Mapping[str, str]) -> bytes:
    """Digest of what pages are computed by: 32 bytes (KVP-TIER-NAMESPACE)."""
    digest = hashlib.sha256(_NAMESPACE)
    for name, value in sorted((name.encode(), value.encode()) for name, value in entries.items()):
        digest.update(len(name).to_bytes(4, "little") + name + len(value).to_bytes(4, "little") + value)
    return digest.digest()


class Chain:
    """The ids of a prompt's pages, each of 32 bytes, as far as tokens are known."""

    def __init__(self, space: bytes, page: int) -> None:
        """`space` is the namespace, `page` the tokens of a page."""
        self.space, self.page = space, check_whole("page", page, 1, U32)
        self.own: list[bytes] = []
        """Of whole pages, form OWN."""
        self.ahead: list[bytes] = []
        """Of whole pages of which the next token is known, form AHEAD."""
        self._rest = np.zeros(0, "<u8")
        self._tokens: list[npt.NDArray[np.uint64]] = []

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Go on with the tokens that follow, whole numbers of 64 bits (KVP-TIER-ID)."""
        self._tokens.append(np.array(tokens, "<u8").reshape(-1))
        data = np.concatenate([self._rest, self._tokens[-1]])
        first, page, raw = len(self.ahead), self.page, data.tobytes()
        for i in range(len(self.own) - first, data.size // page):
            self.own.append(self._id(KeyForm.OWN, first + i, raw[8 * i * page : 8 * (i + 1) * page]))
        whole = max(data.size - 1, 0) // page
        for i in range(whole):
            self.ahead.append(self._id(KeyForm.AHEAD, first + i, raw[8 * i * page : 8 * (i + 1) * page + 8]))
        self._rest = data[whole * page :].copy()

    def of(self, page: int) -> Chain:
        """The same prompt in pages of another length."""
        made = Chain(self.space, page)
        made.extend(np.concatenate([*self._tokens, self._rest[:0]]))
        return made

    def ids(self, form: KeyForm) -> list[bytes]:
        """Those of a form (KVP-TIER-AHEAD)."""
        return self.ahead if form is KeyForm.AHEAD else self.own

    def previous(self, i: int) -> bytes:
        """What the id of page i follows: the OWN id of the page before, or the namespace."""
        return self.own[i - 1] if i else self.space

    def _id(self, form: KeyForm, i: int, tokens: bytes) -> bytes:
        head = _PAGE + self.previous(i) + self.page.to_bytes(4, "little") + bytes((form,))
        return hashlib.sha256(head + tokens).digest()
