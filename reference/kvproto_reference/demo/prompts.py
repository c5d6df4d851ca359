"""The batch of prompts that the demo sends."""

from pathlib import Path

import attrs

from ..data import documents, load_text
from ..errors import EngineError
from ..tokenizer import Tokenizer


@attrs.frozen(kw_only=True)
class Prompt:
    """A prompt, and how to sample its continuation."""

    name: str
    tokens: list[int] = attrs.field(repr=False)
    temperature: float = 0.0
    seed: int = 0


LONGEST_TOKEN = 8
"""Bytes that a token of English text has at most, on average."""


def default_prompts(page_size: int, tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts of several pages, of less than a page, ending on a page, sampled, and one whose text ends at once."""
    text = load_text()
    start = text.index("Alice was beginning")
    later = text.index("\n\n", start + 1500) + 2
    document = documents(text)[0]

    def cut(begin: int, length: int) -> list[int]:
        return tokenizer.encode(text[begin : begin + LONGEST_TOKEN * length].encode("ascii"))[:length]

    return [
        Prompt(name="several pages", tokens=cut(start, 13 * page_size + 5)),
        Prompt(name="shorter than a page", tokens=cut(start, max(page_size - 5, 1))),
        Prompt(name="ends on a page", tokens=cut(later, 6 * page_size)),
        Prompt(name="sampled, seed 7", tokens=cut(later + 40, 4 * page_size + 3), temperature=0.8, seed=7),
        Prompt(
            name="words of our own",
            tokens=tokenizer.encode(b"The Cheshire Cat said: the cache that you lost is not my"),
        ),
        Prompt(name="a whole document", tokens=tokenizer.encode(document.encode())),
    ]


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a file, separated by blank lines."""
    try:
        text = path.read_bytes()
    except OSError as e:
        raise EngineError(f"the prompt file {path} cannot be read: {e.strerror}") from e
    parts = [p.strip(b"\n") for p in text.replace(b"\r\n", b"\n").split(b"\n\n")]
    found = [p for p in parts if p.strip()]
    prompts = [Prompt(name=f"prompt {i}", tokens=tokenizer.encode(p)) for i, p in enumerate(found, 1)]
    if not prompts:
        raise EngineError(f"the prompt file {path} has no prompt in it; write prompts separated by blank lines")
    return prompts
