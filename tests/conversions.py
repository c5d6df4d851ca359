"""A cache in BF16 and in FP8, by an oracle that knows no strides and takes its rounding from torch."""

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvproto import Cache, DType, Parallel, lay_out
from kvproto.copying.grants import items_needed
from kvproto.copying.program import Window
from kvproto.planning.geometry import Geometry
from tests.pools import allocate, column, contents

HEADS, DIM, LAYERS, TOKENS = 4, 32, 3, 29
POISON = 0xA5
SCALES = {"k": [0.011, 0.25, 3.0], "v": [0.02]}
Array = npt.NDArray[Any]


# the oracle: torch's rounding to F8E4M3 and BF16, and the formulas of conversion.md in its float32


def narrow(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """F8E4M3 codes of BF16 values [..., element], with a scale [..., 1]."""
    y = x.float() / scale
    codes = y.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(y.isnan(), torch.tensor(0x7F, dtype=torch.uint8), codes)


def made_scale(x: torch.Tensor) -> torch.Tensor:
    size = torch.where(x.float().isfinite(), x.float().abs(), torch.zeros(()))
    return size.amax(-1, keepdim=True).clamp(min=2.0**-100) / 448


def wide(codes: torch.Tensor, scale: torch.Tensor) -> Array:
    """Bits of BF16."""
    y = codes.view(torch.float8_e4m3fn).float() * scale
    bits: Array = y.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return np.where(y.isnan().numpy(), np.uint16(0x7FC0), bits)


def as_bf16(bits: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


# engines of both dtypes


@attrs.frozen
class Engine:
    """One side: how it keeps the cache, and on how many ranks."""

    form: str
    """bf16, or the conversion by which its cache is FP8."""
    tp: int
    page: int
    blocks: int = 1

    def cache(self, *names: str) -> Cache:
        """The cache, which states these conversions; an FP8 cache states its own."""
        shape: dict[str, Any] = {"kv_heads": HEADS, "head_dim": DIM, "page": self.page}
        if self.form == "bf16":
            return Cache.gqa("kv", LAYERS, **shape).converts(*names)
        block = DIM // self.blocks if self.form == "e4m3_block" else None
        cache = Cache.gqa("kv", LAYERS, dtype=DType.F8E4M3, scale_block=block, **shape)
        return cache.converts(self.form, scales=None if block else SCALES)

    def geometry(self, *names: str) -> Geometry:
        return lay_out([self.cache(*names)], Parallel(tp=self.tp))


def values() -> Array:
    """The whole cache of the model as BF16 bits [part, layer, token, head, element]."""
    rng = np.random.default_rng(5)
    x = torch.from_numpy(
        rng.standard_normal((2, LAYERS, TOKENS, HEADS, DIM))
        * 10.0 ** rng.integers(-3, 3, (2, LAYERS, TOKENS, HEADS, 1))
    )
    bits: Array = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    bits[0, 1, 4, 2, 7], bits[1, 0, 11, 3, :] = 0x7F80, 0
    return bits


def whole(engine: Engine, bits: Array) -> dict[str, Array]:
    """The same in the form of an engine: bytes [layer, token, head, byte] by part."""
    if engine.form == "bf16":
        return {"k": bits[0].view(np.uint8), "v": bits[1].view(np.uint8)}
    found = {}
    for name, of_part in zip("kv", bits, strict=True):
        if engine.form == "e4m3_tensor":
            stated = SCALES[name] * (LAYERS // len(SCALES[name]))
            scale = torch.tensor(np.float32(stated)).reshape(LAYERS, 1, 1, 1)
            found[name] = narrow(as_bf16(of_part), scale).numpy()
            continue
        x = as_bf16(of_part).reshape(LAYERS, TOKENS, HEADS, engine.blocks, -1)
        found[name] = narrow(x, made_scale(x)).reshape(LAYERS, TOKENS, HEADS, DIM).numpy()
        found[f"{name}_scale"] = made_scale(x)[..., 0].numpy().view(np.uint8)
    return found


def widened(engine: Engine, held: dict[str, Array]) -> dict[str, Array]:
    """BF16 bytes of what an FP8 engine has."""
    found = {}
    for name in "kv":
        codes = torch.from_numpy(held[name])
        if engine.form == "e4m3_tensor":
            scale = torch.tensor(np.float32(SCALES[name] * (LAYERS // len(SCALES[name])))).reshape(LAYERS, 1, 1, 1)
        else:
            codes = codes.reshape(LAYERS, TOKENS, HEADS, engine.blocks, -1)
            scale = torch.from_numpy(held[f"{name}_scale"].view(np.float32))[..., None]
        found[name] = wide(codes, scale).reshape(LAYERS, TOKENS, HEADS, DIM).view(np.uint8)
    return found


@attrs.frozen(eq=False)
class Rank:
    """A pool whose items are in disorder, and what a request has there."""

    engine: Engine
    rank: int
    geometry: Geometry
    pool: Any
    items: Array

    @classmethod
    def of(cls, engine: Engine, geometry: Geometry, rank: int) -> "Rank":
        room = 2 * items_needed(geometry.groups[0], 0, 0, TOKENS)
        pool = allocate(geometry, rank, {0: room})
        contents(pool)[:] = POISON
        items = np.random.default_rng(rank).permutation(room)[: room // 2]
        return cls(engine, rank, geometry, pool, items.astype(np.uint32))

    @property
    def window(self) -> Window:
        return Window(0, TOKENS, self.items)

    def places(self) -> Iterator[tuple[str, int, int, Array]]:
        """Of each part, layer and token: the bytes [head of this rank, byte] in the pool."""
        for part, layer in itertools.product(self.geometry.groups[0].parts, range(LAYERS)):
            held = column(self.pool, 0, layer, part.name)
            for token in range(TOKENS):
                yield part.name, layer, token, held[self.items[token // self.engine.page], token % self.engine.page]

    def heads(self) -> slice:
        return slice(HEADS * self.rank // self.engine.tp, HEADS * (self.rank + 1) // self.engine.tp)

    def fill(self, held: dict[str, Array], tokens: int = TOKENS, layers: tuple[int, int] | None = None) -> None:
        for part, layer, token, place in self.places():
            if token < tokens and layer in range(*(layers or (0, LAYERS))):
                place[:] = held[part][layer, token, self.heads()]

    def wrong(self, held: dict[str, Array]) -> list[tuple[str, int, int]]:
        """Places that differ from the oracle; and whether any other byte was written."""
        found = [
            (part, layer, token)
            for part, layer, token, place in self.places()
            if not np.array_equal(place, held[part][layer, token, self.heads()])
        ]
        written = contents(self.pool).copy()
        for _, _, _, place in self.places():
            place[:] = POISON
        if (contents(self.pool) != POISON).any():
            found.append(("elsewhere", 0, 0))
        contents(self.pool)[:] = written
        return found


WORLDS = [
    (Engine("bf16", 2, 4), Engine("e4m3_block", 4, 16)),
    (Engine("bf16", 4, 16), Engine("e4m3_block", 1, 4, blocks=4)),
    (Engine("bf16", 1, 8), Engine("e4m3_tensor", 2, 4)),
    (Engine("e4m3_block", 2, 16), Engine("bf16", 4, 4)),
    (Engine("e4m3_block", 4, 4, blocks=2), Engine("bf16", 2, 8)),
    (Engine("e4m3_tensor", 2, 4), Engine("bf16", 1, 8)),
]


def told(source: Engine, sink: Engine) -> tuple[Geometry, Geometry]:
    """Descriptions that state the conversion of the pair."""
    (name,) = {source.form, sink.form} - {"bf16"}
    return source.geometry(name), sink.geometry(name)
