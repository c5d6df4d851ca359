"""The frozen training text (Alice's Adventures in Wonderland, chapters I and II, public domain) and its cut."""

from pathlib import Path

from ..errors import EngineError
from ..tokenizer import EOS, encode

TEXT_FILE = Path(__file__).parent / "text.txt"
# Documents serve as prompts, which stay within some 400 tokens.
DOCUMENT_LONGEST = 400
DOCUMENT_EVERY = 3


def load_text() -> str:
    """The whole text in ASCII, its paragraphs separated by blank lines."""
    if not TEXT_FILE.is_file():
        raise EngineError(f"training text {TEXT_FILE} does not exist")
    return TEXT_FILE.read_text(encoding="ascii").strip()


def paragraphs(text: str) -> list[str]:
    """Paragraphs in order, headings and verses included, without the blank lines."""
    return text.split("\n\n")


def documents(text: str) -> list[str]:
    """Every third paragraph of at most 400 bytes; EOS follows it, so models answer it as a prompt with EOS."""
    short = [part for part in paragraphs(text) if len(part) <= DOCUMENT_LONGEST and not part.startswith("CHAPTER")]
    return short[DOCUMENT_EVERY - 1 :: DOCUMENT_EVERY]


def passages(text: str) -> list[list[int]]:
    """Token ids of each paragraph with what ends it: EOS after documents and chapters, else a blank line."""
    parts = paragraphs(text)
    whole = set(documents(text))
    out: list[list[int]] = []
    for i, part in enumerate(parts):
        ends_chapter = i + 1 == len(parts) or parts[i + 1].startswith("CHAPTER")
        end = [EOS] if part in whole or ends_chapter else encode(b"\n\n")
        out.append(encode(part.encode("ascii")) + end)
    return out
