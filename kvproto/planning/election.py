"""Who could send each byte to whom: what both sides own, cut into pieces (spec/v1/planning.md, step 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import attrs
import numpy.typing as npt

from kvproto.planning.compare import incompatible
from kvproto.planning.deals import shared_classes
from kvproto.planning.geometry import Geometry, Group, LaneSpan, Part, lane_bytes
from kvproto.planning.limits import MAX_CLASS_PAIRS, MAX_LAYER_PIECES, MAX_PIECES
from kvproto.planning.spreading import Layers, Piece, Ranks, joined
from kvproto.wire.enums import ErrorCode

__all__ = ["Claim", "Claims", "Cutter", "alike", "claims_of", "class_pairs", "whole"]


_SHOWN = 8
"""Intervals, or lists of them, that an error shows."""


@attrs.frozen
class Claim:
    """One lane interval that a rank owns of a part, in bytes [lo, hi), with its layers and its share of the tokens."""

    rank: int
    group: Group
    lo: int
    hi: int
    cp_rank: int
    layers: tuple[tuple[int, int], ...]
    """Intervals of layers, ascending."""


Claims = dict[tuple[int, str], list[Claim]]
"""(model, part name) -> claims."""


def claims_of(geometry: Geometry) -> Claims:
    groups = {g.id: g for g in geometry.groups}
    claims: Claims = defaultdict(list)
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            layers = _intervals(share.layers)
            for span in share.lanes:
                part = group.parts[span.part]
                found = claims[group.model, part.name]
                for lo, hi in _bytes_of(part, span):
                    found.append(Claim(rank.rank, group, lo, hi, share.cp_rank, layers))
    return claims


def _bytes_of(part: Part, span: LaneSpan) -> Iterator[tuple[int, int]]:
    """Bytes [lo, hi) of the lane axis of the whole part; those of a section lie apart, in each lane."""
    size = lane_bytes(part)
    if size == part.lane_bytes:
        yield span.lo * size, span.hi * size
        return
    for lane in range(span.lo, span.hi):
        begin = lane * size + (part.at or 0)
        yield begin, begin + part.lane_bytes


def _intervals(numbers: npt.NDArray[Any]) -> Layers:
    """Ascending numbers [n] as intervals [lo, hi)."""
    lo, hi = int(numbers[0]), int(numbers[-1]) + 1
    return ((lo, hi),) if hi - lo == numbers.size else tuple(joined((n, n + 1) for n in numbers.tolist()))


Alike = tuple[tuple[Claim, ...], tuple[Claim, ...], Layers]


def alike(sources: list[Claim], sinks: list[Claim]) -> dict[int, list[Alike]]:
    """Sets of the sink's layers that the same claims own on both sides, with these claims, by the sink's group."""
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
    found: dict[int, list[Alike]] = defaultdict(list)
    for (a, b), layers in alike.items():
        some = tuple(sources[n] for n in a), tuple(sinks[n] for n in b), tuple(joined(layers))
        found[sinks[b[0]].group.id].append(some)
    return found


def whole(
    sources: tuple[Claim, ...], sinks: tuple[Claim, ...], part: str
) -> Iterator[tuple[tuple[Claim, ...], tuple[Claim, ...]]]:
    """Families of an opaque part, which moves whole: sinks and sources that own the same intervals in the same order.

    Raises LAYOUT_OPAQUE (KVP-PLAN-OPAQUE).
    """
    families: tuple[dict[tuple[tuple[int, int], ...], list[Claim]], ...] = ({}, {})
    for found, claims in zip(families, (sources, sinks), strict=True):
        owned: dict[int, list[Claim]] = defaultdict(list)
        for claim in claims:
            owned[claim.rank].append(claim)
        for some in owned.values():
            found.setdefault(tuple((claim.lo, claim.hi) for claim in some), []).extend(some)
    have, want = families
    for spans, needy in sorted(want.items()):
        if spans not in have:
            where = f"groups[{sinks[0].group.name}].parts[{part}]"
            theirs = str(sorted(have)[:_SHOWN])
            raise incompatible(ErrorCode.LAYOUT_OPAQUE, where, theirs, str(spans[:_SHOWN]), "divide opaque parts alike")
        yield tuple(have[spans]), tuple(needy)


@attrs.define(eq=False)
class Cutter:
    """Cuts what both sides claim into pieces that the same ranks own throughout, and counts them."""

    pieces: list[Piece] = attrs.field(factory=list)
    _number: int = 0
    _in_layers: int = 0

    def cut(
        self, sources: tuple[Claim, ...], sinks: tuple[Claim, ...], layers: Layers, part: int,
        pairs: tuple[tuple[int, int], ...],
    ) -> None:  # fmt: skip
        """Add the pieces of claims of the same layers; `part` is an index at the sink, `pairs` are `class_pairs`.

        Raises COVERAGE (KVP-PLAN-COVER) or TOO_LARGE (KVP-PLAN-SIZE).
        """
        cuts = sorted({x for claim in sources + sinks for x in (claim.lo, claim.hi)})
        dst = sinks[0].group
        at = {x: i for i, x in enumerate(cuts)}
        number = sum(at[claim.hi] - at[claim.lo] for claim in sources + sinks) + len(cuts) * len(pairs)
        where = f"groups[{dst.name}].parts[{dst.parts[part].name}]"
        self._number += number
        self._in_layers += number * sum(hi - lo for lo, hi in layers)
        for came, most, of in ((self._number, MAX_PIECES, ""), (self._in_layers, MAX_LAYER_PIECES, " times layers")):
            if came > most:
                mine, advice = f"at most {most} pieces{of}", "cut lanes at fewer places"
                raise incompatible(ErrorCode.TOO_LARGE, where, mine, str(came), advice)
        have, want = _by_cut(sources, cuts), _by_cut(sinks, cuts)
        for i, (lo, hi) in enumerate(pairwise(cuts)):
            for c, d in pairs:
                needy, candidates = want[i].get(d, ()), have[i].get(c, ())
                if needy and not candidates:
                    mine = f"no rank of cp rank {c} owns bytes {lo}..{hi} of {_text(layers)}"
                    yours, advice = f"rank {needy[0]} needs them", "state every rank in the Description"
                    raise incompatible(ErrorCode.COVERAGE, where, mine, yours, advice)
                if needy:
                    self.pieces.append(Piece(dst.id, part, lo, hi, c, d, layers, candidates, needy))


def _text(layers: Layers) -> str:
    """Layers for people."""
    one = len(layers) == 1 and layers[0][1] - layers[0][0] == 1
    spans = ", ".join(f"{lo}-{hi - 1}" if hi - lo > 1 else str(lo) for lo, hi in layers)
    return f"layer{'s' * (not one)} {spans}"


def _by_cut(claims: tuple[Claim, ...], cuts: list[int]) -> list[dict[int, Ranks]]:
    """For each interval between two cuts: the ranks that own it, ascending, by cp rank."""
    at = {x: i for i, x in enumerate(cuts)}
    found: list[dict[int, set[int]]] = [defaultdict(set) for _ in cuts]
    for claim in claims:
        for i in range(at[claim.lo], at[claim.hi]):
            found[i][claim.cp_rank].add(claim.rank)
    return [{k: tuple(sorted(v)) for k, v in row.items()} for row in found]


def class_pairs(src: Group, dst: Group) -> tuple[tuple[int, int], ...]:
    """Pairs (source cp rank, sink cp rank) that share a row at all. Raises ROW_MISMATCH (KVP-PLAN-DEALS)."""
    if src.cp_size == dst.cp_size == 1:
        return ((0, 0),)
    if src.cp_size * dst.cp_size > MAX_CLASS_PAIRS:
        path, advice = f"groups[{dst.name}].cp_size", f"at most {MAX_CLASS_PAIRS} pairs of cp ranks"
        raise incompatible(ErrorCode.ROW_MISMATCH, path, str(src.cp_size), str(dst.cp_size), advice)
    return shared_classes(src, dst)
