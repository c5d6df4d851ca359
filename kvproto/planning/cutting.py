"""Possible senders and receivers of bytes: what both sides own, cut into pieces (spec/v1/planning.md, steps 1 to 3)."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.errors import PlanError
from kvproto.planning.arrays import merged_intervals, stretch_bounds
from kvproto.planning.compare import check_pair
from kvproto.planning.deals import runs, shared_classes
from kvproto.planning.election import Layers, PieceTable, Ranks, ShareTable, elect
from kvproto.planning.geometry import Geometry, Group, lane_bytes
from kvproto.planning.limits import MAX_CLASS_PAIRS, MAX_PIECES, MAX_RUNS
from kvproto.wire.enums import ErrorCode

_SHOWN = 8
"""Intervals, or lists of them, that an error shows."""


class OwnedInterval(NamedTuple):
    """One lane interval that a rank owns of a part, in bytes [lo, hi), with its layers and its share of the tokens."""

    rank: int
    group: Group
    lo: int
    hi: int
    cp_rank: int
    layers: tuple[tuple[int, int], ...]
    """Intervals of layers, ascending."""


OwnedIntervals = dict[tuple[int, str], list[OwnedInterval]]
"""By model and part name."""


def owned_intervals(geometry: Geometry) -> OwnedIntervals:
    """The lane intervals that the ranks of a Description own, by model and part name."""
    groups = {g.id: g for g in geometry.groups}
    owned: OwnedIntervals = defaultdict(list)
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            layers = _layer_intervals(share.layers)
            for span in share.lanes:
                part = group.parts[span.part]
                of_part, size = owned[group.model, part.name], lane_bytes(part)
                if size == part.lane_bytes:
                    bounds = [(span.lo * size, span.hi * size)]
                else:  # a section has bytes in each lane, which lie apart
                    begins = range(span.lo * size + (part.at or 0), span.hi * size + (part.at or 0), size)
                    bounds = [(begin, begin + part.lane_bytes) for begin in begins]
                of_part += [OwnedInterval(rank.rank, group, lo, hi, share.cp_rank, layers) for lo, hi in bounds]
    return owned


def _layer_intervals(layers: npt.NDArray[Any]) -> Layers:
    """Ascending layer ids [n] as intervals [lo, hi)."""
    lo, hi = int(layers[0]), int(layers[-1]) + 1
    if hi - lo == layers.size:
        return ((lo, hi),)
    first, last = stretch_bounds(layers[1:] - layers[:-1] == 1)
    return tuple(zip(layers[first].tolist(), (layers[last].astype(np.int64) + 1).tolist(), strict=True))


CommonLayers = tuple[tuple[OwnedInterval, ...], tuple[OwnedInterval, ...], Layers]
"""Intervals of the source, intervals of the sink, and the layers that all of their ranks own."""


def common_layers(sources: list[OwnedInterval], sinks: list[OwnedInterval]) -> dict[int, list[CommonLayers]]:
    """By the sink's group id: sets of its layers that the same intervals of both sides have, with these intervals."""
    sides = _by_layers(sources), _by_layers(sinks)
    cuts = sorted({bound for side in sides for layers in side for interval in layers for bound in interval})
    spans: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for span, have, want in zip(pairwise(cuts), *(_holders(side, cuts) for side in sides), strict=False):
        if want:
            spans[have, want].append(span)
    of_source, of_sink = ([*side.values()] for side in sides)
    common: dict[int, list[CommonLayers]] = defaultdict(list)
    for (have, want), intervals in spans.items():
        owned = tuple(sources[n] for n in sorted(n for k in have for n in of_source[k]))
        wanted = tuple(sinks[n] for n in sorted(n for k in want for n in of_sink[k]))
        common[wanted[0].group.id].append((owned, wanted, tuple(merged_intervals(intervals))))
    return common


def _by_layers(owned: list[OwnedInterval]) -> dict[Layers, list[int]]:
    """The indices of owned intervals, by their layers."""
    indices: dict[Layers, list[int]] = defaultdict(list)
    for n, interval in enumerate(owned):
        indices[interval.layers].append(n)
    return indices


def _holders(by_layers: dict[Layers, list[int]], cuts: list[int]) -> list[tuple[int, ...]]:
    """For each interval of layers that begins at a cut: the places in `by_layers` of the sets that contain it."""
    at = {cut: i for i, cut in enumerate(cuts)}
    holders: list[list[int]] = [[] for _ in cuts]
    for k, layers in enumerate(by_layers):
        for lo, hi in layers:
            for i in range(at[lo], at[hi]):
                holders[i].append(k)
    return [*map(tuple, holders)]


Family = tuple[tuple[OwnedInterval, ...], tuple[OwnedInterval, ...]]
"""Intervals of source ranks and of sink ranks that own exactly the same ones."""


def opaque_families(
    sources: tuple[OwnedInterval, ...], sinks: tuple[OwnedInterval, ...], part: str
) -> Iterator[Family]:
    """Families of an opaque part: ranks with the same intervals in order; raises LAYOUT_OPAQUE (KVP-PLAN-OPAQUE)."""
    have, want = _by_spans(sources), _by_spans(sinks)
    for spans, needy in sorted(want.items()):
        if spans not in have:
            where = f"groups[{sinks[0].group.name}].parts[{part}]"
            theirs = str(sorted(have)[:_SHOWN])
            raise PlanError(ErrorCode.LAYOUT_OPAQUE, where, theirs, str(spans[:_SHOWN]), "divide opaque parts alike")
        yield tuple(have[spans]), tuple(needy)


def _by_spans(owned: tuple[OwnedInterval, ...]) -> dict[tuple[tuple[int, int], ...], list[OwnedInterval]]:
    """The intervals of the ranks that own exactly the same lanes, by these lanes."""
    by_rank: dict[int, list[OwnedInterval]] = defaultdict(list)
    for interval in owned:
        by_rank[interval.rank].append(interval)
    families: dict[tuple[tuple[int, int], ...], list[OwnedInterval]] = defaultdict(list)
    for intervals in by_rank.values():
        families[tuple((interval.lo, interval.hi) for interval in intervals)] += intervals
    return families


_COLUMNS = ("<i8", "<i8", "<u8", "<u8", "<i8", "<i8", "<i8", "<i8", "<i8")
"""Dtypes of the columns of `PieceTable`: places on a lane axis may need 64 bits."""


class _Meeting(NamedTuple):
    """Cp ranks of two groups that share rows."""

    numbers: tuple[Counter[int], Counter[int]]
    """For each cp rank of the source the number of those of the sink, and the other way round."""
    sources: dict[int, list[int]]
    """For each cp rank of the sink, those of the source, ascending."""

    @classmethod
    def of(cls, src: Group, dst: Group) -> "_Meeting":
        pairs = shared_classes(src, dst)
        sources: dict[int, list[int]] = defaultdict(list)
        for c, d in pairs:
            sources[d].append(c)
        return cls((Counter(c for c, _ in pairs), Counter(d for _, d in pairs)), sources)


@attrs.define(eq=False)
class Cutter:
    """Cuts the intervals of both sides into pieces that the same ranks own throughout, and bounds their number."""

    _rows: list[tuple[int, ...]] = attrs.field(factory=list)
    """The pieces, each with the values of the columns of `PieceTable`."""
    _layers: list[Layers] = attrs.field(factory=list)
    _sets: list[Ranks] = attrs.field(factory=list)
    _numbers: dict[Ranks, int] = attrs.field(factory=dict)
    """The index in `_sets` of each set of ranks."""
    _compared: set[tuple[int, int, int]] = attrs.field(factory=set)
    """The ids of both groups, and the index of the part."""
    _meetings: dict[tuple[int, int], _Meeting] = attrs.field(factory=dict)
    """By the ids of both groups."""
    _runs: int = 0
    _pieces: int = 0

    def elect(self, ordinal: int, features: Collection[int]) -> tuple[PieceTable, ShareTable]:
        """All pieces, and who reads them from whom; `ordinal` is the sink's replica."""
        columns = list(zip(*self._rows, strict=True)) or [()] * len(_COLUMNS)
        pieces = PieceTable(*(np.array(column, kind) for column, kind in zip(columns, _COLUMNS, strict=True)))
        return pieces, elect(pieces, self._layers, self._sets, ordinal, features)

    def pair(self, src: Group, dst: Group, index: int) -> None:
        """Compare the sink's part with the source's and find token classes that share rows; raises as `check_pair`."""
        if (src.id, dst.id, index) in self._compared:
            return
        self._compared.add((src.id, dst.id, index))
        check_pair(src, dst, dst.parts[index].name)
        if (src.id, dst.id) not in self._meetings:
            if src.cp_size * dst.cp_size > MAX_CLASS_PAIRS:
                path, advice = f"groups[{dst.name}].cp_size", f"at most {MAX_CLASS_PAIRS} pairs of cp ranks"
                raise PlanError(ErrorCode.ROW_MISMATCH, path, str(src.cp_size), str(dst.cp_size), advice)
            self._runs += sum(runs(g) for g in (src, dst) if g.cp_size > 1)
            if self._runs > MAX_RUNS:
                raise _too_large(dst, index, f"at most {MAX_RUNS} runs", self._runs, "deal fewer groups, in fewer runs")
            self._meetings[src.id, dst.id] = _Meeting.of(src, dst)

    def cut(self, part: int, families: Iterable[tuple[Family, Layers]]) -> None:
        """Add the pieces of one part after `pair`; raises TOO_LARGE (KVP-PLAN-SIZE) or COVERAGE (KVP-PLAN-COVER)."""
        counted = []
        for family, layers in families:
            bounds = sorted({bound for side in family for interval in side for bound in (interval.lo, interval.hi)})
            self._pieces += self._count(family, part, bounds) * sum(hi - lo for lo, hi in layers)
            counted.append((family, layers, bounds))
        if self._pieces > MAX_PIECES:
            dst, advice = counted[0][0][1][0].group, "state fewer ranks, intervals or layers"
            raise _too_large(dst, part, f"at most {MAX_PIECES} pieces", self._pieces, advice)
        for family, layers, bounds in counted:
            self._add(family, layers, part, bounds)

    def _count(self, family: Family, part: int, cuts: list[int]) -> int:
        """The pieces of both sides' intervals in one layer (KVP-PLAN-SIZE)."""
        src, dst = (side[0].group for side in family)
        meeting, lane = self._meetings[src.id, dst.id], _smaller_lane(src, dst, part)
        at = {cut: i for i, cut in enumerate(cuts)}
        number = 0
        for side, times in zip(family, meeting.numbers, strict=True):
            for interval in side:
                pieces = at[interval.hi] - at[interval.lo]
                lanes = -(-interval.hi // lane) - interval.lo // lane if lane else 0
                number += (pieces + lanes) * times[interval.cp_rank]
        return number

    def _add(self, family: Family, layers: Layers, part: int, cuts: list[int]) -> None:
        sources, sinks = family
        dst = sinks[0].group
        meeting = self._meetings[sources[0].group.id, dst.id]
        have, want = self._ranks_by_cut(sources, cuts), self._ranks_by_cut(sinks, cuts)
        number = len(self._layers)
        self._layers.append(layers)
        for i, (lo, hi) in enumerate(pairwise(cuts)):
            for d, needy in want[i].items():
                for c in meeting.sources[d]:
                    candidates = have[i].get(c)
                    if candidates is None:
                        mine = f"no rank of cp rank {c} owns bytes {lo}..{hi} of {_text(layers)}"
                        yours, advice = f"rank {self._sets[needy][0]} needs them", "state every rank in the Description"
                        raise PlanError(ErrorCode.COVERAGE, _where(dst, part), mine, yours, advice)
                    self._rows.append((dst.id, part, lo, hi, c, d, number, candidates, needy))

    def _ranks_by_cut(self, owned: tuple[OwnedInterval, ...], cuts: list[int]) -> list[dict[int, int]]:
        """For each interval between two cuts: the index of the set of ranks that own it, by cp rank."""
        at = {cut: i for i, cut in enumerate(cuts)}
        ranks: list[dict[int, set[int]]] = [defaultdict(set) for _ in cuts]
        for interval in owned:
            for i in range(at[interval.lo], at[interval.hi]):
                ranks[i][interval.cp_rank].add(interval.rank)
        return [{cp_rank: self._numbered(tuple(sorted(of))) for cp_rank, of in row.items()} for row in ranks]

    def _numbered(self, ranks: Ranks) -> int:
        number = self._numbers.setdefault(ranks, len(self._sets))
        if number == len(self._sets):
            self._sets.append(ranks)
        return number


def _smaller_lane(src: Group, dst: Group, part: int) -> int:
    """Bytes of the smaller lanes if lanes of the two sides differ; else 0."""
    name = dst.parts[part].name
    sizes = [lane_bytes(next(p for p in group.parts if p.name == name)) for group in (src, dst)]
    return min(sizes) if sizes[0] != sizes[1] else 0


def _too_large(dst: Group, part: int, mine: str, number: int, advice: str) -> PlanError:
    return PlanError(ErrorCode.TOO_LARGE, _where(dst, part), mine, str(number), advice)


def _where(dst: Group, part: int) -> str:
    return f"groups[{dst.name}].parts[{dst.parts[part].name}]"


def _text(layers: Layers) -> str:
    """Layers in words."""
    one = len(layers) == 1 and layers[0][1] - layers[0][0] == 1
    spans = ", ".join(f"{lo}-{hi - 1}" if hi - lo > 1 else str(lo) for lo, hi in layers)
    return f"layer{'s' * (not one)} {spans}"
