"""A small vision encoder: the patches of an image become rows of the target's width, in tensor-parallel ranks."""

import hashlib
import math
from collections.abc import Iterable, Mapping

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import EngineError
from .parallel import SOLO, TensorParallel


@attrs.frozen(kw_only=True)
class EncoderConfig:
    """Sizes of an encoder, and the seed of its weights: it is not trained, so that it has no file."""

    width: int
    """Elements of a row: the hidden size of the target."""
    patch: int = 8
    """Pixels of a patch, in each direction."""
    hidden: int = 64
    heads: int = 4
    layers: int = 2
    seed: int = 0

    def weights(self) -> dict[str, Tensor]:
        """All weights, undivided, drawn with deviation in^-0.5: matrices [out, in] by name."""
        drawn, hidden = torch.Generator().manual_seed(self.seed), self.hidden
        shapes = {
            "patch": (hidden, 3 * self.patch**2),
            "place": (hidden, 4 * len(_WAVES)),
            "rows": (self.width, hidden),
        }
        for layer in range(self.layers):
            shapes |= {f"{layer}.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
            shapes |= {f"{layer}.up": (4 * hidden, hidden), f"{layer}.down": (hidden, 4 * hidden)}
        return {name: torch.randn(shape, generator=drawn) * shape[1] ** -0.5 for name, shape in shapes.items()}

    def fingerprint(self) -> str:
        """A digest of sizes and weights, 64 hexadecimal digits: the fact by which engines compare their encoders."""
        digest = hashlib.sha256(repr(self).encode())
        for weight in self.weights().values():
            digest.update(weight.numpy().tobytes())
        return digest.hexdigest()

    def rows(self, height: int, width: int) -> int:
        """Rows of an image of so many pixels; raises EngineError if patches do not fill it."""
        if min(height, width) < self.patch or height % self.patch or width % self.patch:
            raise EngineError(
                f"an image of {height} x {width} pixels is not made of patches of {self.patch} x {self.patch}: scale it"
                f" to multiples of {self.patch}"
            )
        return (height // self.patch) * (width // self.patch)


_WAVES = 2.0 ** -torch.arange(4)
"""Frequencies by which a patch knows its place."""


class Encoder:
    """An encoder on one TP rank, which has a share of the heads and of the feed-forward blocks."""

    def __init__(self, config: EncoderConfig, tp: TensorParallel = SOLO) -> None:
        """Raises EngineError for more ranks than heads."""
        if tp.size > config.heads:
            raise EngineError(f"the encoder has {config.heads} heads, too few for TP {tp.size}: lower it")
        self.config, self.tp = config, tp
        dim = config.hidden // config.heads
        heads, ffn = tp.share(config.heads), tp.share(4 * config.hidden)
        mine = {**dict.fromkeys("qkvo", slice(heads.start * dim, heads.stop * dim)), "up": ffn, "down": ffn}
        self._weights = {name: _cut(name.partition(".")[2], weight, mine) for name, weight in config.weights().items()}
        self._heads = tp.width(config.heads)

    def rows(self, images: Iterable[npt.NDArray[np.uint8]]) -> Tensor | None:
        """Rows [n, width] of all images uint8 [height, width, 3] of a prompt, in turn; None without any."""
        with torch.no_grad():
            made = [self.forward(torch.from_numpy(pixels.copy())) for pixels in images]
        return torch.cat(made) if made else None

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [height, width, 3] -> rows float32 [patches, width], line by line, the same on all ranks.

        All ranks call it together; raises EngineError if patches do not fill the image.
        """
        config, weights = self.config, self._weights
        height, width, _ = pixels.shape
        count, side = config.rows(height, width), config.patch
        tall, wide = height // side, width // side
        patches = pixels.view(tall, side, wide, side, 3).transpose(1, 2).reshape(count, -1)
        x = (patches / 127.5 - 1) @ weights["patch"].t() + _places(tall, wide) @ weights["place"].t()
        for layer in range(config.layers):
            own = {name: weights[f"{layer}.{name}"] for name in ("q", "k", "v", "o", "up", "down")}
            normed = _norm(x)
            q, k, v = ((normed @ own[n].t()).view(count, self._heads, -1).transpose(0, 1) for n in "qkv")
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(count, -1)
            x = x + self.tp.all_reduce(mixed @ own["o"].t())
            x = x + self.tp.all_reduce(F.gelu(_norm(x) @ own["up"].t()) @ own["down"].t())
        return _norm(x) @ weights["rows"].t()


def _cut(name: str, weight: Tensor, mine: Mapping[str, slice]) -> Tensor:
    """A rank's share of a weight: of what it puts out, or for "o" and "down" of what it takes in."""
    if name not in mine:
        return weight
    return weight[:, mine[name]] if name in ("o", "down") else weight[mine[name]]


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _places(tall: int, wide: int) -> Tensor:
    """Sines and cosines of where each patch is [tall * wide, 4 * waves]."""
    lines, columns = (torch.arange(n)[:, None] * math.pi / 2 * _WAVES for n in (tall, wide))
    down, across = lines.repeat_interleave(wide, 0), columns.repeat(tall, 1)
    return torch.cat((down.sin(), down.cos(), across.sin(), across.cos()), 1)
