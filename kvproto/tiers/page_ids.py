"""Page ids: a chain of digests over a namespace and the tokens of a prompt."""

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvproto.errors import U32, check_whole
from kvproto.wire.enums import KeyForm

_NAMESPACE, _PAGE = b"kvproto namespace 1\0", b"kvproto page 1\0"


def namespace(entries: Mapping[str, str]) -> bytes:
    """The digest of everything that computes the pages: 32 bytes (KVP-TIER-NAMESPACE)."""
    digest = hashlib.sha256(_NAMESPACE)
    any_text = "surrogatepass"  # a salt is a user's, and must not end its engine
    for name, value in sorted((name.encode(), value.encode(errors=any_text)) for name, value in entries.items()):
        digest.update(len(name).to_bytes(4, "little") + name + len(value).to_bytes(4, "little") + value)
    return digest.digest()


class Chain:
    """The ids of a prompt's pages, 32 bytes each, for the tokens that are known so far."""

    def __init__(self, space: bytes, page: int, tokens: npt.ArrayLike = ()) -> None:
        """`space` is the namespace, `page` the number of tokens in a page."""
        self.space, self.page = space, check_whole("page", page, 1, U32)
        self.own: list[bytes] = []
        """Ids of form OWN, one for each whole page."""
        self.ahead: list[bytes] = []
        """Ids of form AHEAD, one for each whole page that a known token follows."""
        self._rest = np.zeros(0, "<u8")
        self._tokens: list[npt.NDArray[np.uint64]] = []
        self.extend(tokens)

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Append the tokens that follow, whole numbers of 64 bits (KVP-TIER-ID)."""
        self._tokens.append(np.array(tokens, "<u8").reshape(-1))
        pending = np.concatenate([self._rest, self._tokens[-1]])
        first, page, raw = len(self.ahead), self.page, pending.tobytes()
        for i in range(len(self.own) - first, pending.size // page):
            self.own.append(self._id(KeyForm.OWN, first + i, raw[8 * i * page : 8 * (i + 1) * page]))
        whole = max(pending.size - 1, 0) // page
        for i in range(whole):
            self.ahead.append(self._id(KeyForm.AHEAD, first + i, raw[8 * i * page : 8 * (i + 1) * page + 8]))
        self._rest = pending[whole * page :].copy()

    def with_page(self, page: int) -> "Chain":
        """The same prompt in pages of `page` tokens."""
        return Chain(self.space, page, np.concatenate(self._tokens))

    def ids(self, form: KeyForm) -> list[bytes]:
        """The ids of one form (KVP-TIER-AHEAD)."""
        return self.ahead if form is KeyForm.AHEAD else self.own

    def previous(self, i: int) -> bytes:
        """The digest that the id of page i continues: the OWN id of the page before, or the namespace."""
        return self.own[i - 1] if i else self.space

    def _id(self, form: KeyForm, i: int, tokens: bytes) -> bytes:
        head = _PAGE + self.previous(i) + self.page.to_bytes(4, "little") + bytes((form,))
        return hashlib.sha256(head + tokens).digest()
