"""The batch of prompts that the demo sends."""

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from ..chat import ChatTemplate
from ..data import documents, load_text, paragraphs
from ..engine.images import Image
from ..engine.sampling import SamplingParams
from ..engine.sequence import IMAGE
from ..errors import EngineError
from ..models.encoder import EncoderConfig
from ..tokenizer import Tokenizer


@attrs.frozen(kw_only=True)
class Prompt:
    """A prompt, and how to sample its continuation."""

    name: str
    tokens: list[int] = attrs.field(repr=False)
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    said: str = ""
    """The user's words, if a chat template made the prompt from them."""
    images: tuple[Image, ...] = ()
    """The images that its IMAGE tokens stand for, in turn."""
    adapter: str = ""
    """The LoRA adapter with which it is to be answered; empty for none."""
    cache_salt: str = ""
    """The tenant whose it is, if pages are not to be shared with others."""


CHATS = (
    "What is the capital of France?",
    "How many days are in a week?",
    "{story}\n\nWhere does the Rabbit go at the end?",
    "What is photosynthesis? Answer in one sentence.",
    "Write one sentence about autumn.",
    "Write a haiku about the sea.",
)
"""Default prompts for a model that was trained to chat; {story} is the first page of Alice in Wonderland."""
_DRAWN = SamplingParams(temperature=0.8, seed=7)
LONGEST_TOKEN = 8
"""Bytes of text to encode for each token wanted: more than a token of English text has on average."""


def default_prompts(page_size: int, tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts of several pages, below a page, ending on a page, sampled, and one whose text is complete already."""
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
        Prompt(name="sampled, seed 7", tokens=cut(later + 40, 4 * page_size + 3), sampling=_DRAWN),
        Prompt(
            name="words of our own",
            tokens=tokenizer.encode(b"The Cheshire Cat said: the cache that you lost is not my"),
        ),
        Prompt(name="a whole document", tokens=tokenizer.encode(document.encode())),
    ]


def image_prompts(config: EncoderConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts with images: two that differ in nothing but the image, one with two images, and one without any."""
    red, blue, small = _disc((200, 40, 40), 6, 8), _disc((40, 40, 200), 6, 8), _disc((40, 160, 40), 3, 5)

    def prompt(name: str, *images: Image) -> Prompt:
        tokens = tokenizer.encode(b"Alice was beginning to get very tired of sitting by her sister: ")
        for image in images:
            tokens += [IMAGE] * config.rows(*image.pixels.shape[:2]) + tokenizer.encode(b" and so ")
        return Prompt(name=name, tokens=tokens, images=images)

    return [
        prompt("a red disc", red),
        prompt("a blue disc", blue),
        prompt("small, then red", small, red),
        prompt("no image"),
    ]


def _disc(colour: tuple[int, int, int], tall: int, wide: int) -> Image:
    """A disc on a pale ground, of so many patches of 8 pixels."""
    height, width = 8 * tall, 8 * wide
    y, x = np.mgrid[:height, :width]
    inside = (y - height / 2) ** 2 + (x - width / 2) ** 2 < (height / 3) ** 2
    return Image(np.where(inside[..., None], colour, (230, 225, 210)).astype(np.uint8))


def default_chats(tokenizer: Tokenizer, template: ChatTemplate) -> list[Prompt]:
    """CHATS as prompts; the one with the story is longer than a step of prefill."""
    story = "\n\n".join(part.replace("\n", " ") for part in paragraphs(load_text())[1:4])
    return chats([said.format(story=story) for said in CHATS], tokenizer, template)


def read_prompts(path: Path, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> list[Prompt]:
    """The prompts of a file, separated by blank lines; with a template, each is what a user says.

    Raises EngineError for a file that cannot be read, is empty or, with a template, is not UTF-8.
    """
    try:
        text = path.read_bytes()
    except OSError as e:
        raise EngineError(f"the prompt file {path} cannot be read: {e.strerror}") from e
    parts = [p.strip(b"\n") for p in text.replace(b"\r\n", b"\n").split(b"\n\n")]
    found = [p for p in parts if p.strip()]
    if not found:
        raise EngineError(f"the prompt file {path} has no prompt in it; write prompts separated by blank lines")
    if template is None:
        return [Prompt(name=f"prompt {i}", tokens=tokenizer.encode(p)) for i, p in enumerate(found, 1)]
    try:
        return chats([p.decode() for p in found], tokenizer, template)
    except UnicodeDecodeError as e:
        raise EngineError(f"the prompt file {path} is not UTF-8: {e}") from e


def chats(said: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate) -> list[Prompt]:
    """Conversations of one turn each."""
    return [
        Prompt(name=f"chat {i}", tokens=tokenizer.encode(template.prompt(text).encode()), said=text)
        for i, text in enumerate(said, 1)
    ]
