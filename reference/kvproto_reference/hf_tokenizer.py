"""Tokenizers of Hugging Face checkpoints: tokenizer.json."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from .errors import EngineError

try:
    import tokenizers
except ModuleNotFoundError as error:
    raise EngineError("tokenizer.json needs the package tokenizers; pip install kvproto-reference") from error


class HfTokenizer:
    """A tokenizer.json, whose ids must be below the model's `vocab`, with the tokens that end a text."""

    def __init__(self, path: Path, eos: frozenset[int], vocab: int) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise EngineError(f"tokenizer {path} cannot be read: {error}") from error
        self.name, self.eos = str(path), eos
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        highest = max([*ids.values(), *eos], default=0)
        if highest >= vocab:
            raise EngineError(f"tokenizer {path} has a token {highest}, the model a vocabulary of {vocab}")
        digest = hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()
        self.identity = f"{len(ids)} tokens {digest[:16]}"

    def encode(self, text: bytes) -> list[int]:
        """Token ids of a text in UTF-8, with what the file's post-processor adds, such as a BOS token."""
        try:
            return list(self._tokenizer.encode(text.decode()).ids)
        except UnicodeDecodeError as error:
            raise EngineError(f"the text is not UTF-8: {error}") from error

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Text of token ids in UTF-8, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True).encode()
