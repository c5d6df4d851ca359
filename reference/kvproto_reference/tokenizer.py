"""Tokens of a text; the shipped checkpoints use bytes: ids 0..255 are the bytes themselves, 256 ends a text."""

from collections.abc import Iterable
from typing import Protocol

from .errors import EngineError

EOS = 256
VOCAB = 257


class Tokenizer(Protocol):
    """A tokenizer, as far as the engines and the demo need one."""

    @property
    def name(self) -> str:
        """A name for messages."""
        ...

    @property
    def identity(self) -> str:
        """A digest; equal for two tokenizers whose ids all stand for the same tokens."""
        ...

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a text."""
        ...

    def encode(self, text: bytes) -> list[int]:
        """Token ids of a text in UTF-8, as a model expects them of a prompt."""
        ...

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Text of token ids, without the tokens that end it."""
        ...


class ByteTokenizer:
    """One token for each byte."""

    name = identity = "bytes+eos256"
    eos = frozenset({EOS})

    def encode(self, text: bytes) -> list[int]:
        """The bytes as token ids; any bytes will do."""
        return encode(text)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes."""
        return decode(tokens)


BYTES = ByteTokenizer()


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


def check_agreement(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise EngineError unless the draft's tokens are the target's."""
    if target.identity != draft.identity:
        raise EngineError(
            f"the draft's tokens ({draft.name}: {draft.identity}) are not the target's ({target.name}:"
            f" {target.identity}); choose a draft of the target's family"
        )
