"""Runs one model over the pools of all ranks of an engine; schedulers see the interface of the torch engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import numpy as np
import numpy.typing as npt

from ..attention.batch import Batch
from ..cache.sharding import Ints, Shard
from ..cache.states import StateRecord, Stops
from ..cache.windows import check_window, window_table
from ..engine.runner import Chunk, Computed, Logits, Runner, assemble
from ..errors import EngineError
from .attention import Attention, Heads, Reads
from .mesh import DEALT, EVERYWHERE, by_rank, placed
from .pool import RankPools, RankStates
from .programs import Programs

__all__ = ["JaxLogits", "JaxRunner"]


class JaxLogits(Logits):
    """Logits [n or more, vocab] and most likely tokens [n or more] on the devices; all after the first n is padding."""

    def __init__(self, values: jax.Array, best: jax.Array, count: int) -> None:
        self._values, self._best, self._count = values, best, count

    def best(self) -> npt.NDArray[np.int64]:
        return np.asarray(self._best)[: self._count].astype(np.int64)

    def row(self, index: int) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.asarray(self._values)[: self._count][index].astype(np.float64)
        return found


@attrs.frozen(eq=False)
class _Step:
    """The arrays of a step on the devices, and where its rows go in the pools."""

    tokens: jax.Array
    reads: Reads
    wanted: jax.Array
    """Tokens whose logits are wanted, counted along the spans, with padding behind them."""
    count: int
    """How many they are without padding."""
    places: list[tuple[Ints, Ints]]
    """The argument of `RankPools.write`."""


class JaxRunner(Runner):
    """Runs a JAX model on all ranks of an engine."""

    def __init__(
        self,
        programs: Programs,
        weights: Mapping[str, jax.Array],
        heads: Heads,
        pools: RankPools,
        shards: Sequence[Shard],
        windows: tuple[Programs, RankPools] | None = None,
        states: RankStates | None = None,
    ) -> None:
        """`windows` and `states` are of a hybrid's layers with a sliding window, and of its recurrent ones."""
        self._windows, self._states = windows, states
        self._stops: list[tuple[Chunk, Stops]] = []
        self._tried: dict[int, dict[str, jax.Array]] = {}
        """By layer: the states after the proposals of the last step, among others."""
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
        step, config = self._step(chunks, self._pools), self._programs.config
        every, window = (self._programs, self._pools, step), None
        if self._windows is not None:
            window = (*self._windows, self._step([self._windowed(chunk) for chunk in chunks], self._windows[1]))
        counts = self._begin(chunks, step.reads.bounds.shape[1])
        x = self._programs.embed(self._top, step.tokens)
        for layer, weights in enumerate(self._layers):
            if config.recurs(layer):
                x = self._recur(layer, weights, x, step, counts)
            else:
                programs, pools, own = window if window is not None and config.reach(layer) is not None else every
                x, rows = programs.layer(weights, self._heads, pools.read(layer), own.reads, x)
                pools.write(layer, rows, own.places)
            if computed is not None:
                computed(layer)
        for chunk, stops in self._stops:
            for count in stops.sure:
                self.arrived(chunk.pages, chunk.start + count)
        return JaxLogits(*self._programs.head(self._top, x, step.wanted), step.count)

    @property
    def windowed(self) -> bool:
        return self._windows is not None

    @property
    def record(self) -> StateRecord | None:
        return None if self._states is None else self._states.record

    def settle(self, kept: Sequence[int]) -> None:
        if self._states is None:
            return
        record = self._states.record
        for i, ((chunk, stops), count) in enumerate(zip(self._stops, kept, strict=True)):
            settled = record.settled(chunk.start, len(chunk.tokens), chunk.proposed, count)
            which = [*stops.sure, *stops.proposed]
            places = [(i, which.index(stop), record.item(chunk.pages, chunk.start + stop)) for stop in settled]
            for layer, states in self._tried.items():
                self._states.write(layer, states, places)
            for stop in settled:
                record.arrived(chunk.pages, chunk.start + stop)
        self._stops, self._tried = [], {}

    def _begin(self, chunks: Sequence[Chunk], spans: int) -> npt.NDArray[np.int32]:
        """Begin with the states of a step; returns after which tokens they are wanted [spans, m], padded with 0."""
        self._tried, record = {}, self.record
        if record is None:
            return np.zeros((spans, 0), np.int32)
        self._stops = [(c, record.step(c.pages, c.start, len(c.tokens), c.proposed)) for c in chunks]
        most = _power(max(len(stops.sure) + len(stops.proposed) for _, stops in self._stops))
        counts = np.zeros((spans, most), np.int32)
        for row, (_, stops) in zip(counts, self._stops, strict=False):
            row[: len(stops.sure) + len(stops.proposed)] = stops.sure + stops.proposed
        return counts

    def _recur(
        self, layer: int, weights: Mapping[str, jax.Array], x: jax.Array, step: _Step, counts: npt.NDArray[np.int32]
    ) -> jax.Array:
        """Compute a recurrent layer, and store its states up to the first proposal of each sequence."""
        assert self._states is not None
        before = self._states.read(layer, [stops.source for _, stops in self._stops], len(counts))
        at = placed(self._programs.mesh, counts, EVERYWHERE)
        x, states = self._programs.recurrent(weights, before, at, step.reads, x)
        item = self._states.record.item
        self._states.write(layer, states, [
            (i, nth, item(chunk.pages, chunk.start + count))
            for i, (chunk, stops) in enumerate(self._stops)
            for nth, count in enumerate(stops.sure)
        ])  # fmt: skip
        self._tried[layer] = states
        return x

    def _windowed(self, chunk: Chunk) -> Chunk:
        """The same tokens, with the page table of layers with a sliding window."""
        window, page = self._programs.config.window, self.shard.group.rows
        check_window(chunk.window, window.tokens if window else 0, page, chunk.start, chunk.stop)
        return attrs.evolve(chunk, pages=window_table(chunk.window, self.shard.pages(chunk.stop)))

    def clear(self, pages: Sequence[int]) -> None:
        self._pools.clear(pages)

    def _step(self, chunks: Sequence[Chunk], pools: RankPools) -> _Step:
        """Assemble a step over these pools.

        Spans, tokens and pages are padded to powers of two, so that few programs are compiled. Raises EngineError for a
        page outside the pools or a token outside the vocabulary.
        """
        made = [assemble(chunks, shard, whole=False) for shard in self._shards]
        batches, (_, tokens, wanted) = [each for each, _, _ in made], made[0]
        for chunk in chunks:
            pools.check(chunk.pages[: self.shard.pages(chunk.stop)])
        if tokens.min() < 0 or tokens.max() >= self.vocab:  # XLA would clamp them silently
            raise EngineError(f"tokens must be of a vocabulary of {self.vocab}, not {tokens.min()} to {tokens.max()}")
        dealt, ranks = self._programs.tokens == DEALT, len(made)
        lead = range(0, ranks, ranks // self.shard.count if dealt else ranks)  # together, these compute all of the step
        grid = _Grid.of([np.flatnonzero(b.slots >= 0) if dealt else np.arange(b.tokens) for b in batches], batches[0])

        attention = self._programs.attention
        by_token = isinstance(attention, Attention) and attention.by_token
        read = [self.shard.pages(chunk.stop if by_token else chunk.start) for chunk in chunks]
        table = np.zeros((grid.shape[0], _power(max(read), PAGES) if max(read) else 0), np.int32)
        for row, chunk, pages in zip(table, chunks, read, strict=False):
            row[:pages] = chunk.pages[:pages]
        mesh, beyond = self._programs.mesh, np.iinfo(np.int32).max

        def each(values: Sequence[npt.NDArray[Any]], rest: int) -> jax.Array:
            """Lay out the values [tokens of the step] of every rank in its grid [spans, n]."""
            return by_rank(mesh, [grid.fill(rank, of, rest) for rank, of in enumerate(values)])

        reads = Reads(
            each([b.positions for b in batches], -1),
            by_rank(mesh, [table] * ranks),
            by_rank(mesh, [np.pad(b.bounds, (0, grid.shape[0] - len(chunks))) for b in batches]),
            each([b.token_bounds for b in batches], 0),
            each([np.where(b.slots < 0, beyond, b.token_bounds - 1) for b in batches], beyond),
        )
        cells = np.zeros(len(tokens), np.int64)
        for nth, rank in enumerate(lead):
            cells[grid.which[rank]] = nth * grid.size + grid.cells[rank]
        most = grid.shape[0] * (grid.shape[1] * len(lead) if any(chunk.every for chunk in chunks) else 1)
        return _Step(
            tokens=placed(mesh, np.concatenate([grid.fill(rank, tokens, 0) for rank in lead]), self._programs.tokens),
            reads=reads,
            wanted=placed(mesh, np.pad(cells[wanted], (0, most - len(wanted))), EVERYWHERE),
            count=len(wanted),
            places=[grid.stored(rank, b.slots) for rank, b in enumerate(batches)],
        )


@attrs.frozen(eq=False)
class _Grid:
    """The grid [spans, n] of each rank, in which the tokens that it computes are laid out."""

    which: Sequence[Ints]
    """The tokens that each rank computes, counted along the step."""
    cells: Sequence[Ints]
    """The cells of those tokens in each rank's grid, counted along its spans."""
    shape: tuple[int, int]

    @classmethod
    def of(cls, which: Sequence[Ints], batch: Batch) -> _Grid:
        """Grids of one shape for all ranks, with room for the most tokens of one span that a rank computes."""
        span = np.repeat(np.arange(len(batch.spans)), np.diff(batch.starts))
        nth = [np.arange(len(mine)) - np.searchsorted(span[mine], span[mine]) for mine in which]
        longest = 1 + max(int(places.max(initial=0)) for places in nth)
        longest = 1 if longest == 1 else _power(longest, TOKENS)
        cells = [span[mine] * longest + places for mine, places in zip(which, nth, strict=True)]
        return cls(which, cells, (_power(len(batch.spans), SPANS if longest <= TOKENS else 1), longest))

    @property
    def size(self) -> int:
        """The number of cells, padding included."""
        return self.shape[0] * self.shape[1]

    def fill(self, rank: int, values: npt.NDArray[Any], rest: int) -> npt.NDArray[np.int32]:
        """A rank's grid [spans, n] of values [tokens of the step], padded with `rest`."""
        out = np.full(self.shape, rest, np.int32)
        out.flat[self.cells[rank]] = values[self.which[rank]]
        return out

    def stored(self, rank: int, slots: Ints) -> tuple[Ints, Ints]:
        """Cells and slots of the tokens that a rank stores, for `RankPools.write`; `slots` [tokens of the step]."""
        mine = slots[self.which[rank]]
        return self.cells[rank][mine >= 0], mine[mine >= 0]


SPANS, TOKENS, PAGES = 4, 8, 8
"""The least numbers that are padded to: spans unless they are long, tokens of a span if several, and pages."""


def _power(count: int, least: int = 1) -> int:
    """The least power of two that is at least `count` and `least`, itself one."""
    return max(least, 1 << (count - 1).bit_length())
