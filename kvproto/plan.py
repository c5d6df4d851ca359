"""Who sends what to whom: the intersection of what the source's ranks and the sink's ranks own.

The space is model x layer x part x lane x token class; a lane bound is in bytes along the part's lane axis, so that the
two sides may cut lanes differently. Nothing here knows a parallel size, an attention kind or an address.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from math import lcm

import attrs
import numpy as np

from kvproto.errors import PlanError
from kvproto.geometry import Geometry, Group
from kvproto.wire.enums import ErrorCode, FactRule, ItemKind
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

    def between(self, source: int, sink: int) -> tuple[Route, ...]:
        """Routes of one rank pair; their groups are the send flags."""
        return tuple(r for r in self.routes if r.source == source and r.sink == sink)

    def send_flags(self, source: int, sink: int) -> tuple[int, ...]:
        """Sink groups that `source` sends to `sink`."""
        return tuple(r.group for r in self.between(source, sink))

    def required(self, sink: int) -> tuple[int, ...]:
        """Source ranks whose answer `sink` awaits."""
        return tuple(sorted({r.source for r in self.routes if r.sink == sink}))

    def served(self, source: int) -> tuple[int, ...]:
        """Sink ranks that `source` answers, and that must release it."""
        return tuple(sorted({r.sink for r in self.routes if r.source == source}))


@attrs.frozen
class _Claim:
    rank: int
    group: Group
    lo: int
    hi: int
    cp_rank: int


_Claims = dict[tuple[int, str], dict[int, list[_Claim]]]
"""(model, part name) -> layer -> claims."""


def plan(source: Geometry, sink: Geometry) -> Plan:
    """The canonical plan; raises PlanError (class incompatible) with path, the source's value and the sink's."""
    check_facts(source, sink)
    have, want = _claims(source), _claims(sink)
    order = _layer_order(sink)
    boxes: dict[tuple[int, int, int], list[Box]] = defaultdict(list)
    rows: dict[tuple[int, int, int], list[tuple[int, ...]]] = defaultdict(list)
    for dst, index, part in [(g, i, p.name) for g in sink.groups for i, p in enumerate(g.parts)]:
        found = have.get((dst.model, part), {})
        alike: dict[tuple[tuple[_Claim, ...], tuple[_Claim, ...]], list[int]] = defaultdict(list)
        for layer, sinks in sorted(want.get((dst.model, part), {}).items()):
            if sinks[0].group.id != dst.id:
                continue
            sources = found.get(layer)
            if not sources:
                raise _missing(sink, dst.model, part, layer, bool(found))
            alike[tuple(sources), tuple(sinks)].append(layer)
        group_of = {layer: sources[0].group.id for layer, sources in found.items()}
        cells: _Cells = defaultdict(dict)
        for (sources_of, sinks_of), ids in alike.items():
            _check_pair(sources_of[0].group, dst, part)
            for key, spans in _elect(sources_of, sinks_of, ids, dst.model, order, sink.replica, part).items():
                cells[key].update(spans)
        for (a, b, c, d), spans in cells.items():
            for lo, hi, x, y in _merge(spans):
                rows[a, b, dst.id].append((a, b, dst.id, dst.model, lo, hi, index, x, y, c, d, sink.replica))
                # the digest does not know the source's groups; lowering does
                for id, run in groupby(range(lo, hi), group_of.__getitem__):
                    first, *others = run
                    boxes[a, b, dst.id].append(Box(dst.model, first, first + len(others) + 1, index, x, y, c, d, id))
    routes = (Route(*key, tuple(sorted(boxes[key])), _digest(rows[key])) for key in sorted(boxes))
    return Plan(tuple(routes), _digest([row for found_rows in rows.values() for row in found_rows]))


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
        values = [f.value if f else "(absent)" for f in (a, b)]
        if values[0] != values[1]:
            rule = min(f.rule for f in (a, b) if f)
            yield f"facts[{name}]", values[0], values[1], FactRule(rule)


def _claims(geometry: Geometry) -> _Claims:
    groups = {g.id: g for g in geometry.groups}
    claims: _Claims = defaultdict(lambda: defaultdict(list))
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            for span in share.lanes:
                part = group.parts[span.part]
                size = part.lane_bytes
                claim = _Claim(rank.rank, group, span.lo * size, span.hi * size, share.cp_rank)
                of_layer = claims[group.model, part.name]
                for layer in share.layers.tolist():
                    of_layer[layer].append(claim)
    return claims


def _layer_order(geometry: Geometry) -> dict[tuple[int, int, int], int]:
    """(rank, model, layer) -> its place among the rank's layers, by model and id."""
    models = {g.id: g.model for g in geometry.groups}
    order = {}
    for rank in geometry.ranks:
        own = sorted({(models[share.group], layer) for share in rank.owns for layer in share.layers.tolist()})
        order.update({(rank.rank, model, layer): i for i, (model, layer) in enumerate(own)})
    return order


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
    if a.encoding is not None and (src.rows, a.lane_bytes) != (dst.rows, b.lane_bytes):
        raise _incompatible(
            ErrorCode.LAYOUT_OPAQUE, f"{path}.rows", str(src.rows), str(dst.rows), "opaque items move whole"
        )


def _extent(lanes: int, size: int) -> str:
    return f"{lanes} lanes of {size} bytes"


def _live(group: Group) -> str:
    return str((group.live_rows or group.rows) if group.kind == ItemKind.SLOT else None)


_Cells = dict[tuple[int, int, int, int], dict[int, list[tuple[int, int]]]]
"""(source rank, sink rank, source class, sink class) -> layer -> lane byte intervals."""


def _elect(
    sources: tuple[_Claim, ...],
    sinks: tuple[_Claim, ...],
    layers: list[int],
    model: int,
    order: dict[tuple[int, int, int], int],
    ordinal: int,
    part: str,
) -> _Cells:
    """One source for every cell of every sink, spread by the rule of the spec."""
    cells: _Cells = defaultdict(lambda: defaultdict(list))
    cuts = sorted({x for claim in sources + sinks for x in (claim.lo, claim.hi)})
    pairs = _class_pairs(sources[0].group, sinks[0].group)
    for lo, hi in zip(cuts, cuts[1:], strict=False):
        have, want = _by_class(sources, lo, hi), _by_class(sinks, lo, hi)
        for c, d in pairs:
            needy, candidates = want.get(d, []), have.get(c, [])
            if needy and not candidates:
                where = f"groups[{sinks[0].group.name}].parts[{part}]"
                raise _incompatible(
                    ErrorCode.COVERAGE,
                    where,
                    f"no rank owns bytes {lo}..{hi} of cp rank {c}",
                    f"rank {needy[0]} needs them",
                    "state every rank in the Description",
                )
            for j, rank in enumerate(needy):
                for layer in layers:
                    place = order[rank, model, layer]
                    chosen = candidates[_candidate(len(candidates), len(needy), j, place, ordinal)]
                    cells[chosen, rank, c, d][layer].append((lo, hi))
    return cells


def _candidate(c: int, m: int, j: int, place: int, ordinal: int) -> int:
    """Index of the source for sink j of m: consecutive runs when sinks are many, layers dealt when they are few."""
    return j * c // m if m >= c else (place * m + j + ordinal) % c


def _by_class(claims: tuple[_Claim, ...], lo: int, hi: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for claim in claims:
        if claim.lo <= lo and hi <= claim.hi:
            found[claim.cp_rank].append(claim.rank)
    return {k: sorted(set(v)) for k, v in found.items()}


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


def _merge(spans: dict[int, list[tuple[int, int]]]) -> Iterator[tuple[int, int, int, int]]:
    """The unique form of a set of cells: per layer the longest lane intervals, then the longest runs of layers."""
    runs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for layer in sorted(spans):
        lanes = sorted(spans[layer])
        merged = [lanes[0]]
        for lo, hi in lanes[1:]:
            if lo == merged[-1][1]:
                merged[-1] = (merged[-1][0], hi)
            else:
                merged.append((lo, hi))
        for span in merged:
            runs[span].append(layer)
    for (lo, hi), layers in sorted(runs.items()):
        begin = 0
        for i in range(1, len(layers) + 1):
            if i == len(layers) or layers[i] != layers[i - 1] + 1:
                yield layers[begin], layers[i - 1] + 1, lo, hi
                begin = i


def _digest(rows: list[tuple[int, ...]]) -> bytes:
    return hashlib.sha256(np.array(sorted(rows), "<u8").tobytes()).digest()


def _missing(sink: Geometry, model: int, part: str, layer: int, part_known: bool) -> PlanError:
    group = next(g for g in sink.groups if g.model == model and any(p.name == part for p in g.parts))
    path = f"groups[{group.name}].parts[{part}]"
    if part_known:
        return _incompatible(
            ErrorCode.LAYER_MISSING,
            path,
            f"no layer {layer}",
            f"layer {layer} of model {model}",
            "serve the same layers",
        )
    return _incompatible(ErrorCode.PART_MISSING, path, "(absent)", f"model {model}", "serve the same models and caches")


def _incompatible(code: ErrorCode, path: str, mine: str, yours: str, advice: str) -> PlanError:
    """`mine` is the source's value, `yours` the sink's; the session turns them when the sink refuses."""
    return PlanError(code, path, mine, yours, advice)
