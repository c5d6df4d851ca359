"""Who sends what to whom: the intersection of what the source's ranks and the sink's ranks own.

The space is model x layer x part x lane x token class; a lane bound is in bytes along the part's lane axis, so that the
two sides may cut lanes differently. Nothing here knows a parallel size, an attention kind or an address.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from math import lcm

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.errors import PlanError
from kvproto.planning.geometry import Geometry, Group
from kvproto.planning.kinds import kind_of
from kvproto.wire.enums import ErrorCode, FactRule, Feature, ItemKind
from kvproto.wire.messages import RouteRef

__all__ = ["Box", "Plan", "Route", "differences", "plan"]


_LARGEST_PERIOD = 1 << 22
"""Rows after which both token deals repeat, at most."""


@attrs.frozen(order=True)
class Box:
    """Layers [layer_lo, layer_hi) of one part, bytes [lo, hi) of its lane axis, rows of one token class."""

    model: int
    layer_lo: int
    layer_hi: int
    part: int
    """Index into the sink group's parts."""
    lo: int
    hi: int
    source_class: int
    """cp rank at the source."""
    sink_class: int
    """cp rank at the sink."""
    source_group: int
    """The source's group id; not part of the digest."""


@attrs.frozen
class Route:
    """What one source rank sends to one sink rank of one group."""

    source: int
    sink: int
    group: int
    """The sink's group id."""
    boxes: tuple[Box, ...]
    digest: bytes

    @property
    def ref(self) -> RouteRef:
        """The form that Register carries."""
        return RouteRef(group=self.group, digest=self.digest)


@attrs.frozen
class Plan:
    """Routes from one source replica to one sink replica, ordered by source, sink, group."""

    routes: tuple[Route, ...]
    digest: bytes
    cold: tuple[int, ...] = ()
    """Draft models that start without their cache, both sides having agreed to that."""

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], tuple[Route, ...]]:
        found: dict[tuple[int, int], list[Route]] = defaultdict(list)
        for route in self.routes:
            found[route.source, route.sink].append(route)
        return {key: tuple(routes) for key, routes in found.items()}

    def between(self, source: int, sink: int) -> tuple[Route, ...]:
        """Routes of one rank pair; their groups are the send flags."""
        return self._pairs.get((source, sink), ())

    def send_flags(self, source: int, sink: int) -> tuple[int, ...]:
        """Sink groups that `source` sends to `sink`."""
        return tuple(r.group for r in self.between(source, sink))

    def required(self, sink: int) -> tuple[int, ...]:
        """Source ranks whose answer `sink` awaits."""
        return tuple(sorted(a for a, b in self._pairs if b == sink))

    def served(self, source: int) -> tuple[int, ...]:
        """Sink ranks that `source` answers, and that must release it."""
        return tuple(sorted(b for a, b in self._pairs if a == source))


@attrs.frozen
class _Claim:
    """What one rank owns of a part: bytes [lo, hi) of the lane axis, one share of the tokens, some layers."""

    rank: int
    group: Group
    lo: int
    hi: int
    cp_rank: int
    layers: tuple[tuple[int, int], ...]
    """Intervals of layers, ascending."""


_Claims = dict[tuple[int, str], list[_Claim]]
"""(model, part name) -> claims."""
_Layers = tuple[tuple[int, int], ...]
_Key = tuple[int, int, int, int]
"""(source rank, sink rank, source class, sink class)"""
_Places = dict[tuple[int, int], tuple[int, npt.NDArray[np.int64]]]
"""(rank, group id) -> place of its first layer, and its layers."""
_Cells = dict[_Key, list[tuple[int, int, _Layers]]]
"""Lane byte intervals and the layers that they are of."""


def plan(source: Geometry, sink: Geometry, features: Collection[int] = ()) -> Plan:
    """The canonical plan; raises PlanError (class incompatible) with path, the source's value and the sink's.

    features: those of the session that change it, SPREAD_ONE and COLD_DRAFT. Clauses KVP-PLAN-*.
    """
    check_facts(source, sink)
    have, want = _claims(source), _claims(sink)
    cold = _cold(source, sink) if Feature.COLD_DRAFT in features else ()
    places = {} if Feature.SPREAD_ONE in features else _places(sink)
    boxes: dict[tuple[int, int, int], list[Box]] = defaultdict(list)
    rows: dict[tuple[int, int, int], list[tuple[int, ...]]] = defaultdict(list)
    for dst, index, part in [(g, i, p.name) for g in sink.groups for i, p in enumerate(g.parts)]:
        if dst.model in cold:
            continue
        found = have.get((dst.model, part), [])
        mine = [c for c in want.get((dst.model, part), ()) if c.group.id == dst.id]
        cells: _Cells = defaultdict(list)
        for sources, sinks, layers in _alike(found, mine):
            if not sources:
                raise _missing(dst, part, layers[0][0], bool(found))
            _check_pair(sources[0].group, dst, part)
            for some, needy in _whole(sources, sinks, part) if dst.parts[index].encoding else [(sources, sinks)]:
                _elect(some, needy, layers, places, sink.replica, part, cells)
        homes = sorted(
            (lo, hi, c.group.id) for c in {(c.group.id, c.layers): c for c in found}.values() for lo, hi in c.layers
        )
        for (a, b, c, d), spans in cells.items():
            for lo, hi, x, y in _merge(spans):
                rows[a, b, dst.id].append((a, b, dst.id, dst.model, lo, hi, index, x, y, c, d, sink.replica))
                # the digest does not know the source's groups; lowering does
                for from_, to, id in _homes(homes, lo, hi):
                    boxes[a, b, dst.id].append(Box(dst.model, from_, to, index, x, y, c, d, id))
    routes = (Route(*key, tuple(sorted(boxes[key])), _digest(rows[key])) for key in sorted(boxes))
    return Plan(tuple(routes), _digest([row for found_rows in rows.values() for row in found_rows]), cold)


def _whole(
    sources: tuple[_Claim, ...], sinks: tuple[_Claim, ...], part: str
) -> Iterator[tuple[tuple[_Claim, ...], tuple[_Claim, ...]]]:
    """An opaque part moves whole: sinks, and the sources that own the very same intervals in the same order."""
    owned: tuple[dict[int, list[tuple[int, int]]], ...] = ({}, {})
    for held, claims in zip(owned, (sources, sinks), strict=True):
        for claim in claims:
            held.setdefault(claim.rank, []).append((claim.lo, claim.hi))
    for spans in sorted({tuple(v) for v in owned[1].values()}):
        some = tuple(c for c in sources if tuple(owned[0][c.rank]) == spans)
        if not some:
            theirs = sorted({tuple(v) for v in owned[0].values()})
            where = f"groups[{sinks[0].group.name}].parts[{part}]"
            raise _incompatible(ErrorCode.LAYOUT_OPAQUE, where, str(theirs), str(spans), "divide opaque parts alike")
        yield some, tuple(c for c in sinks if tuple(owned[1][c.rank]) == spans)


def _homes(homes: list[tuple[int, int, int]], lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """Layers [lo, hi) cut where the source keeps them in another group."""
    while lo < hi:
        end, id = max((end, id) for start, end, id in homes if start <= lo < end)
        yield lo, min(end, hi), id
        lo = end


def _cold(source: Geometry, sink: Geometry) -> tuple[int, ...]:
    """Draft models of the sink of which the source has nothing at all."""
    known = {g.model for g in source.groups}
    return tuple(sorted({g.model for g in sink.groups if g.model} - known))


def differences(source: Geometry, sink: Geometry) -> list[tuple[str, str, str]]:
    """Facts of rule WARN that differ: path, the source's value, the sink's."""
    return [d[:3] for d in _fact_differences(source, sink) if d[3] == FactRule.WARN]


def check_facts(source: Geometry, sink: Geometry) -> None:
    """Raise IDENTITY_MISMATCH for the first fact of rule EQUAL that differs."""
    for path, mine, yours, rule in _fact_differences(source, sink):
        if rule == FactRule.EQUAL:
            raise _incompatible(ErrorCode.IDENTITY_MISMATCH, path, mine, yours, "load the same model on both sides")


def _fact_differences(source: Geometry, sink: Geometry) -> Iterator[tuple[str, str, str, FactRule]]:
    mine, yours = ({f.name: f for f in g.facts} for g in (source, sink))
    for name in sorted(mine | yours):
        a, b = mine.get(name), yours.get(name)
        if a is None or b is None or a.value != b.value:
            values = [f.value if f else "(absent)" for f in (a, b)]
            rule = min(f.rule for f in (a, b) if f)
            yield f"facts[{name}]", values[0], values[1], FactRule(rule)


def _claims(geometry: Geometry) -> _Claims:
    groups = {g.id: g for g in geometry.groups}
    claims: _Claims = defaultdict(list)
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            layers = _intervals(share.layers.astype(np.int64))
            for span in share.lanes:
                part = group.parts[span.part]
                size = part.lane_bytes
                claim = _Claim(rank.rank, group, span.lo * size, span.hi * size, share.cp_rank, layers)
                claims[group.model, part.name].append(claim)
    return claims


def _intervals(numbers: npt.NDArray[np.int64]) -> _Layers:
    """Ascending numbers as intervals [lo, hi)."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts, ends = numbers[[0, *breaks]], numbers[[*(breaks - 1), -1]] + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def _alike(
    sources: list[_Claim], sinks: list[_Claim]
) -> Iterator[tuple[tuple[_Claim, ...], tuple[_Claim, ...], _Layers]]:
    """Layers that the same ranks own in the same way on both sides, as far as the sink has them."""
    cuts = sorted({x for claim in (*sources, *sinks) for interval in claim.layers for x in interval})
    at = {x: i for i, x in enumerate(cuts)}
    owners: tuple[list[list[int]], ...] = ([[] for _ in cuts], [[] for _ in cuts])
    for side, claims in enumerate((sources, sinks)):
        for n, claim in enumerate(claims):
            for lo, hi in claim.layers:
                for i in range(at[lo], at[hi]):
                    owners[side][i].append(n)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for i, (a, b) in enumerate(zip(*owners, strict=True)):
        if b:
            alike[tuple(a), tuple(b)].append((cuts[i], cuts[i + 1]))
    for (a, b), layers in alike.items():
        yield tuple(sources[n] for n in a), tuple(sinks[n] for n in b), tuple(layers)


def _places(geometry: Geometry) -> _Places:
    """All layers that a rank owns, group after group, are its places in order."""
    found: _Places = {}
    for rank in geometry.ranks:
        start = 0
        for share in rank.owns:
            found[rank.rank, share.group] = start, share.layers.astype(np.int64)
            start += share.layers.size
    return found


def _check_pair(src: Group, dst: Group, name: str) -> None:
    """Raise where a paired part cannot be mapped."""
    a, b = (next(p for p in group.parts if p.name == name) for group in (src, dst))
    path = f"groups[{dst.name}]"
    at = f"{path}.parts[{name}]"
    for code, where, mine, yours in (
        (ErrorCode.KIND_MISMATCH, f"{path}.kind", ItemKind(src.kind).name, ItemKind(dst.kind).name),
        (ErrorCode.DTYPE_MISMATCH, f"{at}.dtype", a.dtype.name, b.dtype.name),
        (ErrorCode.LANE_MISMATCH, f"{at}.lanes", _extent(a.lanes, a.lane_bytes), _extent(b.lanes, b.lane_bytes)),
        (ErrorCode.ROW_MISMATCH, f"{path}.tokens_per_row", str(src.tokens_per_row), str(dst.tokens_per_row)),
        (ErrorCode.ROW_MISMATCH, f"{path}.live_rows", _live(src), _live(dst)),
        (ErrorCode.LAYOUT_OPAQUE, f"{at}.encoding", str(a.encoding), str(b.encoding)),
    ):
        same = a.lanes * a.lane_bytes == b.lanes * b.lane_bytes if code == ErrorCode.LANE_MISMATCH else mine == yours
        if not same:
            raise _incompatible(code, where, mine, yours, "make the two sides equal")
    if max(a.lane_bytes, b.lane_bytes) % min(a.lane_bytes, b.lane_bytes):
        raise _incompatible(
            ErrorCode.LANE_MISMATCH, f"{at}.lane_bytes", str(a.lane_bytes), str(b.lane_bytes), "use an integer multiple"
        )
    if a.encoding is not None:
        deals = [
            f"{g.rows} rows of {p.lane_bytes} bytes a lane"
            + (f", dealt {g.cp_size} x {g.interleave} from {g.origin}" * (g.cp_size > 1))
            for g, p in ((src, a), (dst, b))
        ]
        if deals[0] != deals[1]:
            advice = "opaque items move whole: page and deal them alike"
            raise _incompatible(ErrorCode.LAYOUT_OPAQUE, f"{path}.rows", deals[0], deals[1], advice)


def _extent(lanes: int, size: int) -> str:
    return f"{lanes} lanes of {size} bytes"


def _live(group: Group) -> str:
    return str((group.live_rows or group.rows) if kind_of(group).is_state else None)


def _elect(
    sources: tuple[_Claim, ...],
    sinks: tuple[_Claim, ...],
    layers: _Layers,
    places: _Places,
    ordinal: int,
    part: str,
    cells: _Cells,
) -> None:
    """One source for every cell of every sink, spread by the rule of the spec; no places: never dealt by layer."""
    cuts = sorted({x for claim in sources + sinks for x in (claim.lo, claim.hi)})
    pairs = _class_pairs(sources[0].group, sinks[0].group)
    have, want = _by_cut(sources, cuts), _by_cut(sinks, cuts)
    numbers = np.concatenate([np.arange(lo, hi) for lo, hi in layers])
    dealt: dict[tuple[int, int, int, int], list[_Layers]] = {}
    for i, (lo, hi) in enumerate(zip(cuts, cuts[1:], strict=False)):
        for c, d in pairs:
            needy, candidates = want[i].get(d, ()), have[i].get(c, ())
            if needy and not candidates:
                where = f"groups[{sinks[0].group.name}].parts[{part}]"
                raise _incompatible(
                    ErrorCode.COVERAGE,
                    where,
                    f"no rank owns bytes {lo}..{hi} of cp rank {c}",
                    f"rank {needy[0]} needs them",
                    "state every rank in the Description",
                )
            few, many = len(candidates), len(needy)
            for j, rank in enumerate(needy):
                if many >= few or not places:
                    cells[candidates[j * few // many], rank, c, d].append((lo, hi, layers))
                    continue
                key = (rank, few, many, j)
                if key not in dealt:
                    start, held = places[rank, sinks[0].group.id]
                    turn = ((start + np.searchsorted(held, numbers)) * many + j + ordinal) % few
                    dealt[key] = [_intervals(some) if (some := numbers[turn == k]).size else () for k in range(few)]
                for source, share in zip(candidates, dealt[key], strict=True):
                    if share:
                        cells[source, rank, c, d].append((lo, hi, share))


def _by_cut(claims: tuple[_Claim, ...], cuts: list[int]) -> list[dict[int, list[int]]]:
    """For each interval between cuts: cp rank -> the ranks that own it, ascending."""
    at = {x: i for i, x in enumerate(cuts)}
    found: list[dict[int, set[int]]] = [defaultdict(set) for _ in cuts]
    for claim in claims:
        for i in range(at[claim.lo], at[claim.hi]):
            found[i][claim.cp_rank].add(claim.rank)
    return [{k: sorted(v) for k, v in row.items()} for row in found]


def _class_pairs(src: Group, dst: Group) -> list[tuple[int, int]]:
    """Pairs of cp ranks that share a row at all."""
    if src.cp_size == dst.cp_size == 1:
        return [(0, 0)]
    step = src.tokens_per_row
    runs = [g.interleave // step if g.cp_size > 1 else 1 for g in (src, dst)]
    start = max(g.origin for g in (src, dst)) // step
    period = lcm(src.cp_size * runs[0], dst.cp_size * runs[1])
    if period > _LARGEST_PERIOD:
        deals = [f"{g.cp_size} ranks of {g.interleave} tokens" for g in (src, dst)]
        path = f"groups[{dst.name}].interleave"
        advice = "use interleaves with a small common multiple"
        raise _incompatible(ErrorCode.ROW_MISMATCH, path, deals[0], deals[1], advice)
    rows = np.arange(period, dtype=np.int64)
    # rows from the later origin on, counted from each side's own, modulo its deal: an origin may be beyond int64
    turns = [
        (rows + (start - g.origin // step) % (run * g.cp_size)) // run % g.cp_size
        for g, run in zip((src, dst), runs, strict=True)
    ]
    both = np.unique(turns[0] * dst.cp_size + turns[1])
    return [divmod(int(x), dst.cp_size) for x in both]


def _merge(spans: list[tuple[int, int, _Layers]]) -> Iterator[tuple[int, int, int, int]]:
    """The unique form of a set of cells: per layer the longest lane intervals, then the longest runs of layers."""
    if len({layers for _, _, layers in spans}) == 1:
        pieces = [(interval, [(lo, hi) for lo, hi, _ in spans]) for interval in spans[0][2]]
    else:
        cuts = sorted({x for _, _, layers in spans for interval in layers for x in interval})
        at = {x: i for i, x in enumerate(cuts)}
        lanes: list[list[tuple[int, int]]] = [[] for _ in cuts]
        for lo, hi, layers in spans:
            for a, b in layers:
                for i in range(at[a], at[b]):
                    lanes[i].append((lo, hi))
        pieces = [((a, b), lanes[i]) for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)) if lanes[i]]
    runs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for interval, found in pieces:
        for span in _joined(sorted(found)):
            runs[span].append(interval)
    for (lo, hi), of_layers in sorted(runs.items()):
        for a, b in _joined(of_layers):
            yield a, b, lo, hi


def _joined(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending intervals, those that touch made one."""
    made: list[tuple[int, int]] = []
    for lo, hi in intervals:
        if made and made[-1][1] == lo:
            made[-1] = (made[-1][0], hi)
        else:
            made.append((lo, hi))
    return made


def _digest(rows: list[tuple[int, ...]]) -> bytes:
    return hashlib.sha256(np.array(sorted(rows), "<u8").tobytes()).digest()


def _missing(group: Group, part: str, layer: int, part_known: bool) -> PlanError:
    path = f"groups[{group.name}].parts[{part}]"
    if part_known:
        mine, yours, advice = f"no layer {layer}", f"layer {layer} of model {group.model}", "serve the same layers"
        return _incompatible(ErrorCode.LAYER_MISSING, path, mine, yours, advice)
    advice = "serve the same models and caches"
    return _incompatible(ErrorCode.PART_MISSING, path, "(absent)", f"model {group.model}", advice)


def _incompatible(code: ErrorCode, path: str, mine: str, yours: str, advice: str) -> PlanError:
    """`mine` is the source's value, `yours` the sink's; the session turns them when the sink refuses."""
    return PlanError(code, path, mine, yours, advice)
