"""An engine's geometry in a few lines: a `Cache` for each cache, and `lay_out` over its parallel ranks.

Parallel sizes end here: a Description states layers, lanes and token shares, and planning knows nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import attrs

from kvproto.errors import LocalError, check_type
from kvproto.planning import geometry as g
from kvproto.planning.cache import BYTES, Block, Cache
from kvproto.planning.geometry import Geometry, LaneSpan, Owns, Rank
from kvproto.planning.kinds import kind_of
from kvproto.wire.enums import ErrorCode, FactRule
from kvproto.wire.messages import Fact

__all__ = ["BYTES", "Block", "Cache", "Parallel", "lay_out"]


@attrs.frozen
class Parallel:
    """How an engine divides its ranks; rank = (pp * cp + cp_rank) * tp + tp_rank."""

    tp: int = 1
    """Tensor parallel: KV heads, latents and states."""
    pp: int = 1
    """Pipeline parallel: layers of the target; a draft is on the last stage."""
    cp: int = 1
    """Context parallel: tokens, over ranks of their own (prefill)."""
    dcp: int = 1
    """Decode context parallel: tokens, over the TP ranks that would otherwise hold the same heads."""
    interleave: int = 1
    """Consecutive tokens that one cp or dcp rank takes."""
    origin: int = 0
    """First token that is dealt, to cp rank 0; requests begin there or later."""
    stages: tuple[int, ...] | None = None
    """Layers of each pipeline stage; by default equal, the first stages one more."""

    def check(self) -> None:
        """Raise LocalError for sizes that no engine can have."""
        for name in ("tp", "pp", "cp", "dcp", "interleave"):
            if getattr(self, name) < 1:
                raise _bad(name, "at least 1", getattr(self, name))
        if self.origin < 0:
            raise _bad("origin", "at least 0", self.origin)
        if self.tp % self.dcp:
            raise _bad("dcp", f"a divisor of tp {self.tp}", self.dcp)
        if self.cp > 1 and self.dcp > 1:
            raise _bad("dcp", "1 with cp above 1: tokens are dealt once", self.dcp)
        if self.stages is not None and (len(self.stages) != self.pp or min(self.stages) < 0):
            raise _bad("stages", f"layers of {self.pp} stages", self.stages)

    def bounds(self, depth: int) -> list[tuple[int, int]]:
        """Layers [lo, hi) of each stage of a target of `depth` layers."""
        counts = self.stages or [depth // self.pp + (i < depth % self.pp) for i in range(self.pp)]
        if sum(counts) != depth:
            raise _bad("stages", f"{depth} layers in all", tuple(counts))
        return list(pairwise(accumulate(counts, initial=0)))


def lay_out(
    specs: Sequence[Cache], parallel: Parallel | None = None, replica: int = 0,
    facts: Mapping[str, str] | None = None, depth: int | None = None,
) -> Geometry:  # fmt: skip
    """The Geometry of one replica; group ids count up. `depth`: layers of the target, where the last have no cache.

    `facts` are compared for equality by the other side. Raises LocalError: no layer or lane is nobody's.
    """
    for i, spec in enumerate(specs):
        check_type(f"specs[{i}]", spec, Cache, "a kvproto.Cache", "Cache.mamba1, mamba2, gdn return two: unpack")
    names = [spec.group.name for spec in specs]
    if again := [name for i, name in enumerate(names) if name in names[:i]]:
        raise _bad("specs", "names that differ", f"{again[0]!r} twice")
    if parallel is not None:
        check_type("parallel", parallel, Parallel, "a kvproto.Parallel")
    sizes = parallel or Parallel()
    sizes.check()
    dealt = sizes.cp if sizes.cp > 1 else sizes.dcp
    made = []
    for id, spec in enumerate(specs):
        _check(spec, id, depth)
        group = attrs.evolve(spec.group, id=id)
        if dealt > 1 and _dealt(spec):
            group = attrs.evolve(group, cp_size=dealt, interleave=sizes.interleave, origin=sizes.origin)
        made.append(attrs.evolve(spec, group=group))
    bounds = sizes.bounds(depth or max((max(s.layers) + 1 for s in specs if _deep(s)), default=sizes.pp))
    ranks: list[Rank] = []
    for stage in bounds:
        for cp in range(sizes.cp):
            for tp in range(sizes.tp):
                last = stage is bounds[-1]
                shares = [s for spec in made if (s := _share(spec, stage, last, cp, tp, sizes)) is not None]
                ranks.append(Rank(rank=len(ranks), owns=tuple(shares)))
    named = tuple(Fact(name=n, value=v, rule=FactRule.EQUAL) for n, v in sorted((facts or {}).items()))
    return Geometry(replica=replica, facts=named, groups=tuple(spec.group for spec in made), ranks=tuple(ranks))


def _check(spec: Cache, id: int, depth: int | None) -> None:
    """Raise LocalError where some layers or lanes of a cache would be nobody's."""
    path = f"specs[{id}]"
    if not spec.layers:
        raise _bad(f"{path}.layers", "one at least", "none")
    if depth and _deep(spec) and max(spec.layers) >= depth:
        raise _bad(f"{path}.layers", f"below depth {depth}", max(spec.layers))
    for part, blocks in zip(spec.group.parts, spec.blocks, strict=True):
        if sum(b.lanes for b in blocks) != part.lanes or any(b.unit < 1 or b.lanes % b.unit for b in blocks):
            raise _bad(f"{path}.blocks[{part.name}]", f"whole units, {part.lanes} lanes in all", blocks)


def _deep(spec: Cache) -> bool:
    """Whether pipeline stages divide its layers: those of a draft, and hand-off data, are on the last."""
    return spec.group.model == 0 and kind_of(spec.group).has_memory


def _dealt(spec: Cache) -> bool:
    """Whether context-parallel ranks deal out a cache's tokens."""
    return (spec.group.model == 0 and kind_of(spec.group).paged) if spec.dealt is None else spec.dealt


def _share(spec: Cache, stage: tuple[int, int], last: bool, cp: int, tp: int, sizes: Parallel) -> Owns | None:
    """What one rank owns of a group; None where its stage has none of the layers."""
    layers = [i for i in spec.layers if (stage[0] <= i < stage[1] if _deep(spec) else last)]
    if not layers:
        return None
    dealt = _dealt(spec)
    ranks, rank = (sizes.tp // sizes.dcp, tp // sizes.dcp) if dealt else (sizes.tp, tp)
    spans = []
    for p, blocks in enumerate(spec.blocks):
        start = 0
        for block in blocks:
            lo, hi = block.cut(rank, ranks)
            spans.append(LaneSpan(part=p, lo=start + lo, hi=start + hi))
            start += block.lanes
    cp_rank = (cp if sizes.cp > 1 else tp % sizes.dcp) if dealt else 0
    return attrs.evolve(g.owns(spec.group, layers), lanes=tuple(spans), cp_rank=cp_rank)


def _bad(path: str, mine: str, yours: object) -> LocalError:
    return LocalError(ErrorCode.OUT_OF_RANGE, path, mine, str(yours))
