"""A model with cross-attention: pools of both kinds of rows in the same layers, and what moved where."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvproto import Cache, DType, Options, Pool, Prompt, Sink, Source, lay_out
from kvproto.planning.geometry import Geometry

from .doors import address_in

TOKENS, IMAGES = 21, (9, 4)
"""Of the prompt, and positions of its two images."""
LAYERS = {"self": 3, "cross": 3, "encoder": 1}
PARTS = {"self": ("k", "v"), "cross": ("cross_k", "cross_v"), "encoder": ("embedding",)}
POISON = 0xA5
ENDS = {"self": TOKENS, "cross": sum(IMAGES), "encoder": sum(IMAGES)}
TABLES = {"self": [5, 3, 1, 6, 2, 7], "cross": [4, 1, 2, 5], "encoder": [2, 0, 3, 1]}
"""Of a source, with pages of 4 rows."""
OURS = {"self": [1, 4, 0], "cross": [2, 3], "encoder": [0, 4]}
"""Of a sink, with pages of 8."""


def prompt(*images: int) -> Prompt:
    return Prompt(range(TOKENS), axes={"image": sum(images)})


def engine(page: int, axis: str = "image") -> Geometry:
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 4, "page": page, "dtype": DType.U8}
    return lay_out([
        Cache.gqa("self", LAYERS["self"], **sizes),
        Cache.cross("cross", LAYERS["cross"], axis=axis, **sizes),
        Cache.encoder("encoder", dim=6, page=page, dtype=DType.U8, axis=axis),
    ])  # fmt: skip


def places() -> list[tuple[str, int, str]]:
    return [(name, layer, part) for name, layers in LAYERS.items() for layer in range(layers) for part in PARTS[name]]


class Both:
    """A source and a sink."""

    def __init__(self, source: Source, sink: Sink) -> None:
        self.source, self.sink = source, sink
        for n, place in enumerate(places()):
            array = source.pool.array(*place)
            array[:] = np.random.default_rng(n).integers(0, POISON, array.shape, np.uint8)
            sink.pool.array(*place)[:] = POISON

    def turn(self) -> None:
        """A turn of both, which have no threads."""
        for door in (self.source, self.sink):
            door.step(0.005)

    def rows(self, place: tuple[str, int, str]) -> tuple[Any, Any]:
        """Every row of the sink's pages, and what should be there of the source's."""
        ours = self.sink.pool.array(*place)[OURS[place[0]]]
        theirs = self.source.pool.array(*place)[TABLES[place[0]]]
        return ours.reshape(-1, *ours.shape[2:]), theirs.reshape(-1, *theirs.shape[2:])

    def check(self, ends: dict[str, int], first: dict[str, int]) -> None:
        """Rows [first, end) of each group have arrived, and no other row was written."""
        for place in places():
            ours, theirs = self.rows(place)
            lo, hi = first.get(place[0], 0), ends[place[0]]
            assert np.array_equal(ours[lo:hi], theirs[lo:hi]), place
            assert (ours[:lo] == POISON).all(), place
            assert (ours[hi:] == POISON).all(), place


@contextmanager
def both(folder: Path, give: Options | None = None, take: Options | None = None, axis: str = "image") -> Iterator[Both]:
    """Both in this process; the sink's other axis may have another name."""
    address = address_in(folder)
    with (
        Source("prefill", Pool.allocate(engine(4), 8), address, give) as source,
        Sink("decode", Pool.allocate(engine(8, axis), 5), {"prefill": address}, take or give) as sink,
    ):
        yield Both(source, sink)
