"""Byte-level tokens: ids 0..255 are the bytes themselves, 256 ends a text."""

from collections.abc import Iterable

from .errors import EngineError

EOS = 256
VOCAB = 257


def encode(text: bytes) -> list[int]:
    """Token ids of a byte string, without EOS."""
    return list(text)


def decode(tokens: Iterable[int]) -> bytes:
    """Bytes of token ids; EOS is left out."""
    ids = list(tokens)
    for token in ids:
        if not 0 <= token < VOCAB:
            raise EngineError(f"token id {token} is outside 0..{VOCAB - 1}")
    return bytes(token for token in ids if token != EOS)
