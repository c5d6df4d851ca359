"""An engine's geometry: `lay_out` puts caches on its parallel ranks, whose sizes no other module knows."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from types import NoneType

import attrs
import numpy as np

from kvproto.errors import LocalError, RemoteError, bad, check_type, check_whole
from kvproto.planning import geometry as g
from kvproto.planning.cache import BITS, Block, Cache, bytes_of
from kvproto.planning.conversion import name_of, scaled_by
from kvproto.planning.geometry import Geometry, Group, LaneSpan, Owns, Rank
from kvproto.planning.kinds import KINDS, TOKENS, axis_of
from kvproto.planning.limits import MAX_RANKS
from kvproto.planning.parts import PARTS
from kvproto.wire.enums import ErrorCode

__all__ = ["BITS", "DEALS", "Block", "Cache", "Parallel", "bytes_of", "lay_out"]

DEALS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "cyclic": lambda ranks: tuple(range(ranks)),
    "zigzag": lambda ranks: (*range(ranks), *reversed(range(ranks))),
}
"""By the name of a deal: the cp rank of each run until they repeat, for a number of ranks."""


@attrs.frozen
class Parallel:
    """Division of an engine into ranks; rank = (pp * cp + cp_rank) * tp + tp_rank.

    With cp and dcp of 1 each rank stores every token, and interleave, origin and deal have no effect, so that one
    configuration serves any number of ranks.
    """

    tp: int = 1
    """Tensor-parallel size, which divides KV heads and states; latents are whole on every rank."""
    pp: int = 1
    """Pipeline-parallel size, which divides the target's layers; a draft is on the last stage."""
    cp: int = 1
    """Context-parallel size (prefill), which divides tokens over additional ranks."""
    dcp: int = 1
    """Decode-context-parallel size, which divides tokens over TP ranks that would otherwise hold the same heads."""
    interleave: int = 1
    """Consecutive tokens that one cp or dcp rank takes at a time."""
    origin: int = 0
    """The first token that is dealt; requests begin there or later."""
    stages: tuple[int, ...] | None = None
    """Layers of each pipeline stage, or of each chunk if `virtual`; by default as even as can be, larger first."""
    virtual: int = 1
    """Virtual stages: chunks of layers that each pipeline rank holds; chunk i is on stage i mod pp."""
    deal: str | tuple[int, ...] = "cyclic"
    """The cp or dcp rank of each run of `interleave` tokens: a name of `DEALS`, or the ranks until they repeat."""

    def check(self, of: str = "") -> None:
        """Raise LocalError(OUT_OF_RANGE) for sizes that no engine can have; `of` goes before names of arguments."""
        for name in ("tp", "pp", "cp", "dcp", "interleave"):
            check_whole(of + name, getattr(self, name), 1)
        check_whole(f"{of}virtual", self.virtual, 1, _MOST_CHUNKS)
        if (ranks := self.tp * self.pp * self.cp) > MAX_RANKS:
            raise bad(
                f"{of}tp", f"at most {MAX_RANKS} ranks in all", f"tp {self.tp}, pp {self.pp}, cp {self.cp}: {ranks}"
            )
        check_whole(f"{of}origin", self.origin, 0, (1 << 64) - 1)
        if self.tp % self.dcp:
            raise bad(f"{of}dcp", f"a divisor of tp {self.tp}", self.dcp)
        if self.cp > 1 and self.dcp > 1:
            raise bad(f"{of}dcp", "1 with cp above 1: tokens are dealt once", self.dcp)
        if self.stages is not None:
            chunks = self.pp * self.virtual
            for count in self.stages:
                check_whole(f"{of}stages", count, 0)
            if len(self.stages) != chunks:
                raise bad(f"{of}stages", f"layers of {chunks} stages", self.stages)
        self.order(of)

    def bounds(self, depth: int, of: str = "") -> list[tuple[int, int]]:
        """Layers [lo, hi) of each stage of a model of `depth` layers, or of each chunk if `virtual` is above 1."""
        chunks = self.pp * self.virtual
        counts = self.stages or [depth // chunks + (i < depth % chunks) for i in range(chunks)]
        if sum(counts) != depth:
            raise bad(f"{of}stages", f"{depth} layers in all", tuple(counts))
        return list(pairwise(accumulate(counts, initial=0)))

    def order(self, of: str = "") -> tuple[int, ...] | None:
        """The cp rank of each run until they repeat; None if ranks take one each in turn. Raises LocalError."""
        ranks = self.cp if self.cp > 1 else self.dcp
        check_type(f"{of}deal", self.deal, (str, tuple, list), _A_DEAL)
        if isinstance(self.deal, str):
            if self.deal not in DEALS:
                raise bad(f"{of}deal", _A_DEAL, repr(self.deal), _NO_TABLE)
            order = DEALS[self.deal](ranks)
        else:
            order = tuple(check_whole(f"{of}deal", rank, 0) for rank in self.deal)
            if set(order) != set(range(ranks)):
                one = "runs of rank 0 alone, as neither cp nor dcp is above 1"
                many = f"runs of each of the ranks 0 to {ranks - 1}, and of no other"
                raise bad(f"{of}deal", one if ranks == 1 else many, order)
        return None if ranks == 1 or order == DEALS["cyclic"](ranks) else order


_MOST_CHUNKS = 1 << 10
"""Chunks of layers that one pipeline rank may hold."""
_A_DEAL = f"{', '.join(repr(name) for name in DEALS)}, or the cp rank of each run"
_NO_TABLE = (
    "who stores a token follows from its position alone: a zigzag whose chunks are a share of each request's length is"
    " no such deal, store by chunks of a fixed length; contiguous shares of a greatest length L are 'cyclic' with"
    " interleave L / ranks"
)


def lay_out(
    specs: Sequence[Cache],
    parallel: Parallel | None = None,
    replica: int = 0,
    facts: Mapping[str, str] | None = None,
    depth: int | None = None,
    warn: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> Geometry:
    """The Geometry of one replica of an engine; the id of each cache's group is its index in `specs`.

    The peer must state equal `facts`. It may state other values for the facts in `warn`: the two still connect, and
    `Connected.warnings` lists the differences. `depth` is the number of layers of the target model; pass it only if its
    last layers have no cache, as otherwise the caches show it. `without` names parts that a sink does not need although
    the source has them in layers that the sink takes, such as "v" where K is also V (KVP-PLAN-LEFT). Raises LocalError
    unless each layer and lane has an owner and the result is a Description that `validate` accepts.
    """
    check_type("specs", specs, Sequence, "a list of kvproto.Cache")
    for i, spec in enumerate(specs):
        check_type(f"specs[{i}]", spec, Cache, "a kvproto.Cache", "Cache.mamba1, mamba2, gdn return two: unpack")
    names = [spec.group.name for spec in specs]
    if again := [name for i, name in enumerate(names) if name in names[:i]]:
        raise bad("specs", "names that differ", f"{again[0]!r} twice")
    if parallel is not None:
        check_type("parallel", parallel, Parallel, "a kvproto.Parallel")
    sizes = parallel or Parallel()
    sizes.check()
    for i, spec in enumerate(specs):
        _check(spec, f"specs[{i}]", depth)
    _check_apart(specs)
    _check_scales(specs)
    for path, stated in (("facts", facts), ("warn", warn)):
        check_type(path, stated, (Mapping, NoneType), "a mapping of the name of a fact to its value")
        for name, value in (stated or {}).items():
            check_type(path, name, str, "names of facts, each a str")
            check_type(f"{path}[{name!r}]", value, str, "the value as text, a str")
    check_type("without", without, (list, tuple, set, frozenset), "a list of names of parts")
    for name in without:
        check_type("without", name, str, "names of parts, each a str")
        if name_of(name) not in PARTS and "." not in name:
            raise bad("without", "names of parts (spec/v1/parts.md), or of a vendor's: with a dot", repr(name))
        if held := [p.name for spec in specs for p in spec.group.parts if scaled_by(name) == name_of(p.name)]:
            raise bad("without", f"no scales of {held[0]}, which means nothing without them", repr(name))
    placed = [_placed(specs, id, sizes, depth) for id in range(len(specs))]
    ranks = [
        tuple(share for _, share_of in placed if (share := share_of(stage, nth)) is not None)
        for stage in range(sizes.pp)
        for nth in range(sizes.cp * sizes.tp)
    ]
    geometry = Geometry(
        replica=replica,
        facts=g.facts(facts or {}, warn),
        groups=tuple(group for group, _ in placed),
        ranks=tuple(Rank(rank=i, owns=shares) for i, shares in enumerate(ranks)),
        without=tuple(sorted(without)) or None,
    )
    try:
        g.validate(geometry)
    except RemoteError as error:
        raise LocalError(error.code, error.path, error.mine, error.yours, error.advice) from None
    return geometry


_Share = Callable[[int, int], Owns | None]
"""The share of the nth rank of a pipeline stage; None if it has no layers, or the rank does not hold the cache."""


def _placed(specs: Sequence[Cache], id: int, engine: Parallel, depth: int | None) -> tuple[Group, _Share]:
    """A cache on the ranks of an engine."""
    spec, path = specs[id], f"specs[{id}]"
    sizes, group, dealt = _own(spec, path, engine), attrs.evolve(spec.group, id=id), _dealt(spec)
    number, held = sizes.cp if sizes.cp > 1 else sizes.dcp, sizes.cp * sizes.tp
    if number > 1 and dealt:
        for name in ("interleave", "origin"):
            if getattr(sizes, name) % group.tokens_per_row:
                whole = f"a multiple of {group.tokens_per_row} tokens, a row of {group.name!r}"
                advice = f"deal whole rows, all caches' or by Cache.over({name}=), or store this cache replicated()"
                raise bad(name, whole, getattr(sizes, name), advice)
        order = None if (runs := sizes.order()) is None else np.array(runs, np.uint32)
        interleave, origin = sizes.interleave, sizes.origin
        group = attrs.evolve(group, cp_size=number, interleave=interleave, origin=origin, order=order)
    stages: list[tuple[int, ...]] = [spec.layers if spec.everywhere else () for _ in range(engine.pp)]
    if _staged(spec) and not spec.everywhere:
        deep = [s for s in specs if s.group.model == spec.group.model and _staged(s)]
        all_ = depth if depth and not spec.group.model else max(max(s.layers) for s in deep) + 1
        bounds = sizes.bounds(all_, f"{path}.over." if spec.own else "")
        for stage in range(engine.pp):
            chunks = bounds[stage :: engine.pp]
            stages[stage] = tuple(i for i in spec.layers if any(lo <= i < hi for lo, hi in chunks))
    elif not spec.everywhere:
        stages[-1] = spec.layers

    def share(stage: int, nth: int) -> Owns | None:
        nth = nth * held // (engine.cp * engine.tp) if spec.copies else nth
        if not stages[stage] or nth >= held:
            return None
        cp, tp = divmod(nth, sizes.tp)
        ranks, rank = (sizes.tp // sizes.dcp, tp // sizes.dcp) if dealt else (sizes.tp, tp)
        spans = []
        for p, blocks in enumerate(spec.blocks):
            start = 0
            for block in blocks:
                lo, hi = block.cut(rank, ranks)
                spans.append(LaneSpan(part=p, lo=start + lo, hi=start + hi))
                start += block.lanes
        cp_rank = (cp if sizes.cp > 1 else tp % sizes.dcp) if dealt else 0
        return attrs.evolve(g.owns(group, stages[stage]), lanes=tuple(spans), cp_rank=cp_rank)

    return group, share


def _own(spec: Cache, path: str, engine: Parallel) -> Parallel:
    """The sizes of one cache: its own, and otherwise the engine's. Raises LocalError."""
    if not spec.own:
        return engine
    base = engine if _dealt(spec) else attrs.evolve(engine, dcp=1, deal="cyclic")
    sizes = attrs.evolve(base, **dict(spec.own))
    sizes.check(f"{path}.over.")
    ranks, held = engine.cp * engine.tp, sizes.cp * sizes.tp
    if held > ranks or (spec.copies and ranks % held):
        wanted = f"cp * tp {'a divisor of' if spec.copies else 'at most'} {ranks}, the ranks of a pipeline stage"
        raise bad(f"{path}.over", wanted, f"cp {sizes.cp}, tp {sizes.tp}")
    return sizes


def _check(spec: Cache, path: str, depth: int | None) -> None:
    """Raise LocalError if some layers or lanes of a cache would have no owner."""
    if not spec.layers:
        raise bad(f"{path}.layers", "at least one", "none")
    for layer in spec.layers:
        check_whole(f"{path}.layers", layer, 0)
    if depth and _deep(spec) and max(spec.layers) >= depth:
        raise bad(f"{path}.layers", f"below depth {depth}", max(spec.layers))
    for part, blocks in zip(spec.group.parts, spec.blocks, strict=True):
        if sum(b.lanes for b in blocks) != part.lanes or any(b.unit < 1 or b.lanes % b.unit for b in blocks):
            raise bad(f"{path}.blocks[{part.name}]", f"whole units, {part.lanes} lanes in all", blocks)


def _check_apart(specs: Sequence[Cache]) -> None:
    """Raise LocalError if two caches have the same part of the same layer of a model."""
    held: dict[tuple[int, str, int], int] = {}
    for i, spec in enumerate(specs):
        group = spec.group
        for part in dict.fromkeys(part.name for part in group.parts):
            for layer in spec.layers:
                first = held.setdefault((group.model, part, layer), i)
                if first != i:
                    other = specs[first].group.name
                    mine = f"parts and layers that no other cache of model {group.model} has"
                    yours = f"{part!r} of layer {layer}, as {other!r} has"
                    raise bad(f"specs[{i}]", mine, yours, _apart(group, part))


def _apart(group: Group, part: str) -> str:
    """Advice about a part that two caches of one layer have."""
    if not KINDS[group.kind].has_memory:
        return "give the parts of hand-off data names that differ"
    other = f"the window's is {_WINDOWS[part]!r} and the whole context's {part!r}" if part in _WINDOWS else "see"
    two = f"if the layer has two such caches, name them by what they are ({other}: spec/v1/parts.md, Caches of 2026)"
    return f"{two}; if {group.name!r} is a draft's, pass it model=1, or 2 for the second draft"


_WINDOWS = {part: f"window_{part}" for part in PARTS if f"window_{part}" in PARTS}
"""The part of layers that attend to a window, by the part of the whole context, where one layer may have both."""


def _check_scales(specs: Sequence[Cache]) -> None:
    """Raise LocalError for scales of a cache whose values no cache has, or whose last row would not move with them."""
    stated = {
        (spec.group.model, name_of(part.name), layer): spec.group
        for spec in specs
        for part in spec.group.parts
        for layer in spec.layers
    }
    valued = {model for model, name, _ in stated if not scaled_by(name)}
    for group, part, layers in ((spec.group, part, spec.layers) for spec in specs for part in spec.group.parts):
        of, path = scaled_by(part.name), f"{group.name!r}.parts[{part.name}]"
        for layer in layers if of else ():
            values = stated.get((group.model, of or "", layer))
            if values is None and group.model in valued:
                there = sorted({name for model, name, at in stated if (model, at) == (group.model, layer)})
                advice = f"state what they scale too, or scales of what is there (of a latent: {_OF_LATENT})"
                yours = f"{', '.join(there)}, no {of}"
                raise LocalError(ErrorCode.PART_MISSING, path, f"{of} of layer {layer}, which it scales", yours, advice)
            if values and group.tokens_per_row > values.tokens_per_row and not group.partial:
                mine = f"a partial group, as a row stands for {group.tokens_per_row} tokens and one of {of} for fewer"
                advice = f"the scale of a page that is not full would stay behind: use Cache.page_scales ({_OF_LATENT})"
                raise LocalError(ErrorCode.ROW_MISMATCH, path, mine, "whole rows alone", advice)


_OF_LATENT = 'of="latent"'


def _deep(spec: Cache) -> bool:
    """Whether pipeline stages divide its layers; a draft and hand-off data are on the last stage."""
    return spec.group.model == 0 and KINDS[spec.group.kind].has_memory


def _staged(spec: Cache) -> bool:
    """The same, and also true of a draft that names its own stages."""
    return _deep(spec) or "stages" in dict(spec.own)


def _dealt(spec: Cache) -> bool:
    """Whether context-parallel ranks deal out a cache's tokens."""
    if spec.dealt is not None:
        return spec.dealt
    return spec.group.model == 0 and KINDS[spec.group.kind].paged and axis_of(spec.group) == TOKENS
