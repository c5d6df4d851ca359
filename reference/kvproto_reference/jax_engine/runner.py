"""Runs one model over the pools of all ranks of an engine; the scheduler's side is that of the torch engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import numpy as np
import numpy.typing as npt

from ..cache.sharding import Ints, Shard
from ..engine.runner import Chunk, Computed, Logits, Runner, assemble
from ..errors import EngineError
from .attention import Heads, Reads
from .mesh import by_rank, everywhere
from .pool import RankPools
from .programs import Programs

__all__ = ["JaxLogits", "JaxRunner"]


class JaxLogits(Logits):
    """Logits [n or more, vocab] and the most likely tokens, on the devices; padding follows the n."""

    def __init__(self, values: jax.Array, best: jax.Array, count: int) -> None:
        self._values, self._best, self._count = values, best, count

    def best(self) -> npt.NDArray[np.int64]:
        return np.asarray(self._best)[: self._count].astype(np.int64)

    def row(self, index: int) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.asarray(self._values)[: self._count][index].astype(np.float64)
        return found


@attrs.frozen(eq=False)
class _Step:
    """The arrays of a step on the devices, and where the host puts its rows."""

    tokens: jax.Array
    positions: jax.Array
    reads: Reads
    wanted: jax.Array
    count: int
    """Of the wanted."""
    places: list[tuple[Ints, Ints]]
    """See `RankPools.write`."""


class JaxRunner(Runner):
    """A JAX model on all ranks of an engine."""

    def __init__(
        self, programs: Programs, weights: Mapping[str, jax.Array], heads: Heads, pools: RankPools,
        shards: Sequence[Shard],
    ) -> None:  # fmt: skip
        self._programs, self._heads, self._pools, self._shards = programs, heads, pools, shards
        self._top = {name: weight for name, weight in weights.items() if not name.startswith("layers.")}
        starts = [f"layers.{layer}." for layer in range(programs.config.layers)]
        self._layers = [{n.removeprefix(s): w for n, w in weights.items() if n.startswith(s)} for s in starts]

    @property
    def shard(self) -> Shard:
        return self._shards[0]

    @property
    def vocab(self) -> int:
        return self._programs.config.vocab

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> JaxLogits:
        step = self._step(chunks)
        x = self._programs.embed(self._top, step.tokens)
        for layer, weights in enumerate(self._layers):
            pool = self._pools.read(layer)
            x, rows = self._programs.layer(weights, self._heads, pool, step.reads, x, step.positions)
            self._pools.write(layer, rows, step.places)
            if computed is not None:
                computed(layer)
        return JaxLogits(*self._programs.head(self._top, x, step.wanted), step.count)

    def _step(self, chunks: Sequence[Chunk]) -> _Step:
        """Spans, tokens, pages and wanted tokens are padded to powers of two, so that few programs compile."""
        made = [assemble(chunks, shard, whole=False) for shard in self._shards]
        batch, tokens, wanted = made[0]
        for chunk in chunks:
            self._pools.check(chunk.pages[: self.shard.pages(chunk.stop)])
        if tokens.min() < 0 or tokens.max() >= self.vocab:  # XLA would take others in their place
            raise EngineError(f"tokens must be of a vocabulary of {self.vocab}, not {tokens.min()} to {tokens.max()}")
        lengths = np.diff(batch.starts)
        longest = 1 if lengths.max() == 1 else _power(int(lengths.max()), TOKENS)
        shape = _power(len(chunks), SPANS if longest <= TOKENS else 1), longest
        cells = np.concatenate([span * shape[1] + np.arange(length) for span, length in enumerate(lengths)])

        def grid(values: npt.NDArray[Any], rest: int = 0) -> npt.NDArray[np.int32]:
            """[tokens] -> [spans, n]."""
            out = np.full(shape, rest, np.int32)
            out.flat[cells] = values
            return out

        by_token = self._programs.attention.by_token
        read = [self.shard.pages(chunk.stop if by_token else chunk.start) for chunk in chunks]
        table = np.zeros((shape[0], _power(max(read), PAGES) if max(read) else 0), np.int32)
        for row, chunk, pages in zip(table, chunks, read, strict=False):
            row[:pages] = chunk.pages[:pages]
        mesh, beyond = self._programs.mesh, np.iinfo(np.int32).max
        most = shape[0] * (shape[1] if any(chunk.every for chunk in chunks) else 1)
        batches = [each for each, _, _ in made]
        reads = Reads(
            by_rank(mesh, [table] * len(made)),
            by_rank(mesh, [np.pad(b.bounds, (0, shape[0] - len(chunks))) for b in batches]),
            by_rank(mesh, [grid(b.token_bounds) for b in batches]),
            by_rank(mesh, [grid(np.where(b.slots < 0, beyond, b.token_bounds - 1), beyond) for b in batches]),
        )
        return _Step(
            tokens=everywhere(mesh, grid(tokens)),
            positions=everywhere(mesh, grid(batch.positions)),
            reads=reads,
            wanted=everywhere(mesh, np.pad(cells[wanted], (0, most - len(wanted)))),
            count=len(wanted),
            places=[(cells[b.slots >= 0], b.slots[b.slots >= 0]) for b in batches],
        )


SPANS, TOKENS, PAGES = 4, 8, 8
"""The least powers of two that are padded to: spans unless they are long, tokens of a span if several, and pages."""


def _power(count: int, least: int = 1) -> int:
    """The power of two at or above `count` and `least`."""
    return max(least, 1 << (count - 1).bit_length())
