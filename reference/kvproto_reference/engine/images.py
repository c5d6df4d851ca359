"""Images of prompts: what identifies them, which tokens their rows replace, and what hands the rows over."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvproto import Cache, Geometry, Parallel, Pool, Prompt, lay_out

from ..cache import PageAllocator, Shard
from ..cache.memory import shareable
from ..errors import EngineError
from ..models import ModelConfig
from ..models.encoder import EncoderConfig
from .description import DTYPES
from .sequence import IMAGE, TokenSequence

AXIS, ROWS = "image", "image rows"
"""The axis of images, all of a request in turn, and the group of the rows that an encoder makes of them."""
PAGE = 16
RUN = 4
"""Rows of a page, and consecutive ones that one encoder rank hands over."""


@attrs.frozen(eq=False)
class Image:
    """Pixels, uint8 [height, width, 3]."""

    pixels: npt.NDArray[np.uint8] = attrs.field(repr=False)

    @property
    def digest(self) -> bytes:
        """SHA-256 of its size and its pixels, 32 bytes: what tells it from other images of as many rows."""
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).digest()

    def to_word(self) -> dict[str, Any]:
        """The image as JSON."""
        return {"shape": self.pixels.shape, "data": base64.b64encode(self.pixels.tobytes()).decode()}

    @classmethod
    def of_word(cls, word: Mapping[str, Any]) -> "Image":
        """The image of `to_word`; raises EngineError if it has not the bytes that its size says."""
        data, shape = np.frombuffer(base64.b64decode(word["data"]), np.uint8), tuple(word["shape"])
        if len(shape) != 3 or shape[2] != 3 or data.size != np.prod(shape):
            raise EngineError(f"an image of shape {shape} came with {data.size} bytes: send height * width * 3 of them")
        return cls(data.reshape(shape))


def expected(sequence: TokenSequence) -> Prompt:
    """The prompt as prefill asks an encoder for it: the axis has a position for each of its IMAGE tokens."""
    return Prompt(sequence.prompt, salts=sequence.images, axes={AXIS: sequence.prompt.count(IMAGE)})


def shown(tokens: Sequence[int], images: Sequence[Image], config: EncoderConfig) -> Prompt:
    """The prompt as an encoder has it, which sees the images: it differs from `expected` if one is of another size.

    Raises EngineError for an image that is not made of whole patches.
    """
    rows = sum(config.rows(*image.pixels.shape[:2]) for image in images)
    return Prompt(tokens, salts=[image.digest for image in images], axes={AXIS: rows})


class RowPool:
    """Pages of image rows on one rank, in which it has all of them or, as an encoder, the rows that it hands over."""

    def __init__(
        self, config: EncoderConfig, target: ModelConfig, parallel: Parallel, rank: int, pages: int, replica: int = 0
    ) -> None:
        """With `parallel.dcp`, ranks have RUN rows in turn; otherwise each has all of them."""
        dealt = parallel.dcp > 1
        cache = Cache.encoder(ROWS, dim=config.width, page=PAGE, dtype=DTYPES[target.dtype], axis=AXIS)
        cache = cache.sharded() if dealt else cache
        self.geometry: Geometry = lay_out([cache], parallel, replica, {"weights.encoder": config.fingerprint()})
        dtype = getattr(torch, target.dtype)
        length = pages * PAGE * config.width * dtype.itemsize
        self.tensor = shareable(length, torch.device("cpu")).view(dtype).view(pages, PAGE, 1, config.width)
        self.pool = Pool(self.geometry, {ROWS: {"embedding": [self.tensor]}}, rank=rank, axes="page token head dim")
        self.shard = Shard(self.geometry.groups[0], rank if dealt else 0)
        self.pages = PageAllocator(pages)

    def check(self, prompt: Prompt) -> None:
        """Raise EngineError for a prompt with more rows than there will ever be pages for."""
        need, have = self.shard.pages(prompt.axes[AXIS]), len(self.tensor)
        if need > have:
            raise EngineError(f"the images need {need} pages of rows, the pool has {have}: send fewer, or smaller ones")

    def take(self, prompt: Prompt) -> list[int] | None:
        """Pages for the rows of a prompt; None while too few are free."""
        need = self.shard.pages(prompt.axes[AXIS])
        return self.pages.allocate(need) if need <= self.pages.available else None

    def write(self, table: Sequence[int], rows: Tensor) -> None:
        """Store those of the rows [n, width] that are this rank's."""
        slots = self.shard.slots(np.array(table), np.arange(len(rows)))
        mine = torch.from_numpy(np.flatnonzero(slots >= 0))
        self.tensor.flatten(0, 2)[torch.from_numpy(slots)[mine]] = rows[mine].to(self.tensor.dtype)

    def read(self, table: Sequence[int], rows: int) -> Tensor:
        """The first rows [n, width] of a page table, in memory of their own, on a rank that has all."""
        return self.tensor[list(table)].flatten(0, 2)[:rows]
