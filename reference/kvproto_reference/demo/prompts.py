"""The batch of prompts that the demo sends."""

from pathlib import Path

import attrs

from ..data import documents, load_text
from ..errors import EngineError
from ..tokenizer import encode


@attrs.frozen(kw_only=True)
class Prompt:
    """One request of the router."""

    name: str
    tokens: list[int] = attrs.field(repr=False)
    temperature: float = 0.0
    seed: int = 0


def default_prompts(page_size: int) -> list[Prompt]:
    """Several pages; shorter than a page; ending on a page; sampled; and one that ends at once."""
    text = load_text()
    start = text.index("Alice was beginning")
    later = text.index("\n\n", start + 1500) + 2
    document = documents(text)[0]
    return [
        Prompt(name="several pages", tokens=_cut(text, start, 13 * page_size + 5)),
        Prompt(name="shorter than a page", tokens=_cut(text, start, max(page_size - 5, 1))),
        Prompt(name="ends on a page", tokens=_cut(text, later, 6 * page_size)),
        Prompt(name="sampled, seed 7", tokens=_cut(text, later + 40, 4 * page_size + 3), temperature=0.8, seed=7),
        Prompt(name="words of our own", tokens=encode(b"The Cheshire Cat said: the cache that you lost is not my")),
        Prompt(name="a whole document", tokens=encode(document.encode())),
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file, parted by blank lines."""
    try:
        text = path.read_bytes()
    except OSError as e:
        raise EngineError(f"the prompt file {path} cannot be read: {e.strerror}") from e
    parts = [p.strip(b"\n") for p in text.replace(b"\r\n", b"\n").split(b"\n\n")]
    prompts = [Prompt(name=f"prompt {i}", tokens=encode(p)) for i, p in enumerate((p for p in parts if p.strip()), 1)]
    if not prompts:
        raise EngineError(f"the prompt file {path} has no prompt in it; write prompts parted by blank lines")
    return prompts


def _cut(text: str, start: int, length: int) -> list[int]:
    return encode(text[start : start + length].encode("ascii"))
