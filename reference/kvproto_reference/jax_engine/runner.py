"""Runs one model over the pools of all ranks of an engine; schedulers see the interface of the torch engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import jax
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvproto import Pool

from ..attention.batch import Batch
from ..cache.sharding import Ints, Shard
from ..cache.states import StateRecord, Stops
from ..cache.windows import check_window, window_table
from ..engine.runner import Chunk, Computed, Logits, Runner, assemble
from ..errors import EngineError
from ..models import ModelConfig
from .apart import told_of_others
from .attention import Attention, Heads, Reads
from .mesh import DEALT, EVERYWHERE, RANKS, placed
from .pool import RankPools, RankStates, host_tensor, numpy_of
from .programs import ALL, NEAR, RECURRENT, Given, Made, Piece, Programs

__all__ = ["JaxLogits", "JaxRunner", "Stage"]


class JaxLogits(Logits):
    """Logits [n or more, vocab] and most likely tokens [n or more] on the devices; all after the first n is padding."""

    def __init__(self, made: Made, count: int, taps: Sequence[jax.Array], cells: Ints) -> None:
        """`taps` [spans, n, ...] are hidden states of the step's tokens, which are in these cells of its grids."""
        (self._values, self._best, self._out), self._count = made.logits, count
        self._taps, self._cells = taps, cells

    def best(self) -> npt.NDArray[np.int64]:
        return np.asarray(self._best)[: self._count].astype(np.int64)

    def row(self, index: int) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.asarray(self._values)[: self._count][index].astype(np.float64)
        return found

    @property
    def hidden(self) -> Tensor | None:
        if self._out is not None:
            return host_tensor(self._out)[: self._count]
        if not self._taps:
            return None
        return torch.cat([host_tensor(taps).flatten(0, 1)[self._cells] for taps in self._taps], -1)


@attrs.frozen(eq=False)
class Stage:
    """A pipeline stage of a model: its layers on some ranks, each of which has a device of the mesh."""

    programs: Programs
    heads: Heads
    top: Mapping[str, jax.Array]
    layers: Mapping[int, Mapping[str, jax.Array]]
    """Weights of its layers."""
    pools: Mapping[str, RankPools]
    """By kind of layer, ALL or NEAR."""
    states: RankStates | None
    ranks: tuple[int, ...]
    """The ranks of the engine."""


@attrs.frozen(eq=False)
class _Reads:
    """The arrays of a step over the pools of one kind of layer, on the host, and where its rows go."""

    reads: Reads
    places: list[tuple[Ints, Ints]]
    """The last argument of `RankPools.write`."""


@attrs.frozen(eq=False)
class _Step:
    """The arrays of a step on the host."""

    tokens: npt.NDArray[np.int32]
    of: Mapping[str, _Reads]
    """By kind of layer."""
    wanted: Ints
    """Tokens whose logits are wanted, counted along the spans, with padding behind them."""
    count: int
    """Their number without padding."""
    cells: Ints
    """The cell of each token, counted along the spans."""
    features: npt.NDArray[Any] | None
    """For a head [spans, n, width]."""
    stops: npt.NDArray[np.int32]
    """After which tokens recurrent states are wanted [spans, m], padded with 0."""

    @property
    def spans(self) -> int:
        """The number of spans, padding included."""
        return len(self.stops)


class JaxRunner(Runner):
    """Runs a JAX model on all ranks of an engine."""

    def __init__(
        self,
        config: ModelConfig,
        stages: Sequence[Stage],
        chunks: Sequence[tuple[int, Sequence[int]]],
        shards: Sequence[Shard],
        taps: Sequence[int] = (),
    ) -> None:
        """`chunks` are stages and their layers, in order; `shards` those of the ranks of a stage.

        Steps keep the hidden states of the layers `taps`, for a head.
        """
        self._config, self._stages, self._shards, self._taps = config, stages, shards, taps
        self._chunks = [(stages[number], tuple(layers)) for number, layers in chunks]
        self._record = StateRecord(shards[0].span) if config.delta is not None else None
        self._stops: list[tuple[Chunk, Stops]] = []
        self._tried: dict[int, tuple[RankStates, Mapping[str, jax.Array]]] = {}
        """By layer: the states after the proposals of the last step, among others."""
        self._pieces: dict[tuple[tuple[int, ...], bool, bool, bool], tuple[Piece, dict[str, jax.Array]]] = {}
        """Pieces that programs compute of a step, with the first pages of their pools."""

    @property
    def shard(self) -> Shard:
        return self._shards[0]

    @property
    def vocab(self) -> int:
        return self._config.vocab

    @property
    def ahead(self) -> int:
        return 0 if self._config.head is None else 1

    @property
    def windowed(self) -> bool:
        return self._config.window is not None

    @property
    def record(self) -> StateRecord | None:
        return self._record

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> JaxLogits:
        with told_of_others():
            return self._run(chunks, computed)

    def _run(self, chunks: Sequence[Chunk], computed: Computed | None) -> JaxLogits:
        step, fuses = self._step(chunks), chunks[0].hidden is not None
        x: Any = step.tokens
        taps = list[jax.Array]()
        given: Given | None = None
        at: Stage | None = None
        self._tried = {}
        for stage, layers, begins, ends in self._runs(computed is not None):
            if given is None or at is not stage:
                at, given = stage, self._given(stage, step)
                x = placed(stage.programs.mesh, x, stage.programs.tokens)
            piece, firsts = self._piece(stage, layers, begins, ends, fuses)
            made = stage.programs.run(piece, given._replace(
                layers=[stage.layers[layer] for layer in layers],
                pools={kind: stage.pools[kind].read(some) for kind, some in self._with_rows(layers).items()},
                firsts=firsts,
                states=self._before(stage, layers, step),
                x=x,
            ))  # fmt: skip
            x = made.x
            taps += [] if made.taps is None else [made.taps]
            self._store(stage, layers, step, made)
            if computed is not None:
                for layer in layers:
                    computed(layer)
        for chunk, stops in self._stops:
            for count in stops.sure:
                self.arrived(chunk.pages, chunk.start + count)
        return JaxLogits(made, step.count, taps, step.cells)

    def settle(self, kept: Sequence[int]) -> None:
        record = self._record
        if record is None:
            return
        for i, ((chunk, stops), count) in enumerate(zip(self._stops, kept, strict=True)):
            settled = record.settled(chunk.start, len(chunk.tokens), chunk.proposed, count)
            which = [*stops.sure, *stops.proposed]
            places = [(i, which.index(stop), record.item(chunk.pages, chunk.start + stop)) for stop in settled]
            for layer, (pool, states) in self._tried.items():
                pool.write(layer, states, places)
            for stop in settled:
                record.arrived(chunk.pages, chunk.start + stop)
        self._stops, self._tried = [], {}

    def clear(self, pages: Sequence[int]) -> None:
        for stage in self._stages:
            for pool in stage.pools.values():
                pool.clear(pages)

    def move(self, pools: Mapping[int, Pool]) -> None:
        """Go on with other pools, by rank of the engine; what the present ones hold is forgotten."""
        for stage in self._stages:
            own = [pools[rank] for rank in stage.ranks if rank in pools]
            for pool in stage.pools.values():
                pool.move(own)
            if stage.states is not None:
                stage.states.move(own)
        self._pieces = {}
        if self._record is not None:
            self._record.after.clear()

    def _runs(self, watched: bool) -> Iterator[tuple[Stage, tuple[int, ...], bool, bool]]:
        """The pieces of a step, each a program: a stage and its layers, and whether it begins or ends the step."""
        if watched:
            yield self._chunks[0][0], (), True, False
        last = len(self._chunks) - 1
        for nth, (stage, layers) in enumerate(self._chunks):
            for some in ((layer,) for layer in layers) if watched else (layers,):
                yield stage, some, not watched and nth == 0, not watched and nth == last
        if watched:
            yield self._chunks[last][0], (), False, True

    def _kind(self, layer: int) -> str:
        if self._config.recurs(layer):
            return RECURRENT
        return ALL if self._config.reach(layer) is None else NEAR

    def _with_rows(self, layers: Sequence[int]) -> dict[str, list[int]]:
        """The layers among these that have rows, by kind."""
        found: dict[str, list[int]] = {}
        for layer in layers:
            if not self._config.recurs(layer):
                found.setdefault(self._kind(layer), []).append(layer)
        return found

    def _piece(
        self, stage: Stage, layers: tuple[int, ...], begins: bool, ends: bool, fuses: bool
    ) -> tuple[Piece, dict[str, jax.Array]]:
        """A program's piece of a step, and the first page of each layer and part in its pools, by kind."""
        key = layers, begins, ends, fuses
        if key not in self._pieces:
            at = {kind: stage.pools[kind].at(some) for kind, some in self._with_rows(layers).items()}
            firsts = placed(stage.programs.mesh, {kind: pages for kind, (_, pages) in at.items()}, EVERYWHERE)
            arrays = {kind: iter(of) for kind, (of, _) in at.items()}
            kinds = tuple(self._kind(layer) for layer in layers)
            taps = tuple(nth for nth, layer in enumerate(layers) if layer in self._taps)
            which = tuple(next(arrays[kind]) for kind in kinds if kind != RECURRENT)
            self._pieces[key] = Piece(kinds, which, taps, begins, ends, fuses), firsts
        return self._pieces[key]

    def _given(self, stage: Stage, step: _Step) -> Given:
        """The arguments of a stage's programs that are the same for all its layers."""
        mesh, nothing = stage.programs.mesh, dict[str, Any]()
        where = RANKS, stage.programs.tokens, EVERYWHERE
        host = {kind: of.reads for kind, of in step.of.items()}, step.features, (step.stops, step.wanted)
        reads, features, (stops, wanted) = (placed(mesh, *each) for each in zip(host, where, strict=True))
        x: Any = step.tokens  # until a piece has its own
        return Given(stage.top, (), stage.heads, nothing, nothing, reads, (), stops, x, features, wanted)

    def _before(self, stage: Stage, layers: Sequence[int], step: _Step) -> Any:
        """The states of recurrent layers with which a step goes on."""
        if stage.states is None:
            return []
        sources = [stops.source for _, stops in self._stops]
        found = [stage.states.read(layer, sources, step.spans) for layer in layers if self._config.recurs(layer)]
        return placed(stage.programs.mesh, found, RANKS)

    def _store(self, stage: Stage, layers: Sequence[int], step: _Step, made: Made) -> None:
        """Write the rows that a program has made, and the states up to the first proposal of each sequence."""
        for kind, some in self._with_rows(layers).items():
            stage.pools[kind].write(some, made.rows[kind], step.of[kind].places)
        recurrent = [layer for layer in layers if self._config.recurs(layer)]
        if stage.states is None or self._record is None:
            return
        places = [
            (i, nth, self._record.item(chunk.pages, chunk.start + count))
            for i, (chunk, stops) in enumerate(self._stops)
            for nth, count in enumerate(stops.sure)
        ]
        for layer, states in zip(recurrent, made.states, strict=True):
            stage.states.write(layer, states, places)
            self._tried[layer] = stage.states, states

    def _stopping(self, chunks: Sequence[Chunk], spans: int) -> npt.NDArray[np.int32]:
        """Begin with the states of a step; returns after which tokens they are wanted [spans, m], padded with 0."""
        record = self._record
        if record is None:
            return np.zeros((spans, 0), np.int32)
        self._stops = [(c, record.step(c.pages, c.start, len(c.tokens), c.proposed)) for c in chunks]
        most = _power(max(len(stops.sure) + len(stops.proposed) for _, stops in self._stops))
        counts = np.zeros((spans, most), np.int32)
        for row, (_, stops) in zip(counts, self._stops, strict=False):
            row[: len(stops.sure) + len(stops.proposed)] = stops.sure + stops.proposed
        return counts

    def _near(self, chunk: Chunk) -> Chunk:
        """The same tokens, with the page table of layers with a sliding window."""
        window, page = self._config.window, self.shard.group.rows
        check_window(chunk.window, window.tokens if window else 0, page, chunk.start, chunk.stop)
        return attrs.evolve(chunk, pages=window_table(chunk.window, self.shard.pages(chunk.stop)))

    def _step(self, chunks: Sequence[Chunk]) -> _Step:
        """Assemble a step; raises EngineError for a page outside the pools or a token outside the vocabulary.

        Spans, tokens and pages are padded to powers of two, so that few programs are compiled.
        """
        programs = self._stages[0].programs
        made = [assemble(chunks, shard, whole=False) for shard in self._shards]
        batches, (_, tokens, wanted) = [each for each, _, _ in made], made[0]
        if tokens.min() < 0 or tokens.max() >= self.vocab:  # XLA would clamp them silently
            raise EngineError(f"tokens must be of a vocabulary of {self.vocab}, not {tokens.min()} to {tokens.max()}")
        dealt, ranks = programs.tokens == DEALT, len(made)
        lead = range(0, ranks, ranks // self.shard.count if dealt else ranks)  # together, these compute all of the step
        which = [np.flatnonzero(b.slots >= 0) if dealt else np.arange(b.tokens) for b in batches]
        grid = _Grid.of(which, batches[0], programs.small)
        cells = np.zeros(len(tokens), np.int64)
        for nth, rank in enumerate(lead):
            cells[grid.which[rank]] = nth * grid.size + grid.cells[rank]
        most = grid.shape[0] * (grid.shape[1] * len(lead) if any(chunk.every for chunk in chunks) else 1)
        of = {ALL: self._reads(ALL, chunks, grid, batches)}
        if self.windowed:
            near = [self._near(chunk) for chunk in chunks]
            of[NEAR] = self._reads(NEAR, near, grid, [assemble(near, shard, whole=False)[0] for shard in self._shards])
        return _Step(
            tokens=np.concatenate([grid.fill(rank, tokens, 0) for rank in lead]),
            of=of,
            wanted=np.pad(cells[wanted], (0, most - len(wanted))),
            count=len(wanted),
            cells=cells,
            features=_features(chunks, cells, grid.shape) if self.ahead else None,
            stops=self._stopping(chunks, grid.shape[0]),
        )

    def _reads(self, kind: str, chunks: Sequence[Chunk], grid: _Grid, batches: Sequence[Batch]) -> _Reads:
        """The rows that ranks read and write in the pools of one kind of layer."""
        for stage in self._stages:
            for chunk in chunks:
                stage.pools[kind].check(chunk.pages[: self.shard.pages(chunk.stop)])
        attention = self._stages[0].programs.attention
        by_token = isinstance(attention, Attention) and attention.by_token
        read = [self.shard.pages(chunk.stop if by_token else chunk.start) for chunk in chunks]
        table = np.zeros((grid.shape[0], _power(max(read), PAGES) if max(read) else 0), np.int32)
        for row, chunk, pages in zip(table, chunks, read, strict=False):
            row[:pages] = chunk.pages[:pages]
        beyond, by_rank = np.iinfo(np.int32).max, cast(Callable[[Sequence[npt.NDArray[Any]]], Any], np.stack)

        def each(values: Sequence[npt.NDArray[Any]], rest: int) -> Any:
            """Lay out the values [tokens of the step] of every rank in its grid [spans, n]."""
            return by_rank([grid.fill(rank, of, rest) for rank, of in enumerate(values)])

        reads = Reads(
            each([b.positions for b in batches], -1),
            by_rank([table] * len(batches)),
            by_rank([np.pad(b.bounds, (0, grid.shape[0] - len(chunks))) for b in batches]),
            each([b.token_bounds for b in batches], 0),
            each([np.where(b.slots < 0, beyond, b.token_bounds - 1) for b in batches], beyond),
        )
        return _Reads(reads, [grid.stored(rank, b.slots) for rank, b in enumerate(batches)])


def _features(chunks: Sequence[Chunk], cells: Ints, shape: tuple[int, int]) -> npt.NDArray[Any]:
    """The features that a head reads of each token, in its cell [spans, n, width]; all chunks have the same kind."""
    made = [chunk.made for chunk in chunks if chunk.made is not None]
    found = numpy_of(torch.cat(made or [chunk.hidden for chunk in chunks if chunk.hidden is not None]).cpu())
    out = np.zeros((shape[0] * shape[1], found.shape[-1]), found.dtype)
    out[cells] = found
    return out.reshape(*shape, -1)


@attrs.frozen(eq=False)
class _Grid:
    """The grid [spans, n] of each rank, in which the tokens that it computes are laid out."""

    which: Sequence[Ints]
    """The tokens that each rank computes, counted along the step."""
    cells: Sequence[Ints]
    """The cells of those tokens in each rank's grid, counted along its spans."""
    shape: tuple[int, int]

    @classmethod
    def of(cls, which: Sequence[Ints], batch: Batch, small: bool) -> _Grid:
        """Grids of one shape for all ranks, with room for the most tokens of one span that a rank computes.

        A model that is not `small` has shapes of its own for one span, and for a few tokens.
        """
        span = np.repeat(np.arange(len(batch.spans)), np.diff(batch.starts))
        nth = [np.arange(len(mine)) - np.searchsorted(span[mine], span[mine]) for mine in which]
        longest = 1 + max(int(places.max(initial=0)) for places in nth)
        longest = 1 if longest == 1 else _power(longest, TOKENS if small else TOKENS // 2)
        cells = [span[mine] * longest + places for mine, places in zip(which, nth, strict=True)]
        least = SPANS if longest <= TOKENS and (small or len(batch.spans) > 1) else 1
        return cls(which, cells, (_power(len(batch.spans), least), longest))

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
