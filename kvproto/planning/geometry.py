"""Descriptions of ownership, in the classes of the wire: constructors and invariants."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvproto.errors import PlanError
from kvproto.planning import conversion, limits
from kvproto.planning.kinds import KINDS
from kvproto.planning.parts import ALIASES
from kvproto.wire import decode_struct, encode_struct
from kvproto.wire.enums import DType, ErrorCode, FactRule, ItemKind, word
from kvproto.wire.messages import Fact, Geometry, Group, LaneSpan, Owns, Part, Rank

__all__ = [
    "Fact", "Geometry", "Group", "LaneSpan", "Owns", "Part", "Rank", "column_names", "decode_geometry", "digest",
    "encode_geometry", "facts", "gqa", "handoff", "lane_bytes", "mla", "owns", "validate",
]  # fmt: skip


def gqa(
    id: int, name: str, model: int, kv_heads: int, head_bytes: int, page_size: int, dtype: DType = DType.F32, **own: Any
) -> Group:
    """Paged K and V of multi-head or grouped-query attention: a lane of `head_bytes` for each KV head."""
    parts = tuple(Part(name=p, dtype=dtype, lanes=kv_heads, lane_bytes=head_bytes) for p in ("k", "v"))
    return _group(id, name, model, ItemKind.PAGE, page_size, parts, **own)


def mla(id: int, name: str, model: int, row_bytes: int, page_size: int, dtype: DType = DType.F32, **more: Any) -> Group:
    """Paged latent of multi-head latent attention, rope part included: one lane of `row_bytes`."""
    parts = (Part(name="latent", dtype=dtype, lanes=1, lane_bytes=row_bytes),)
    return _group(id, name, model, ItemKind.PAGE, page_size, parts, **more)


def handoff(id: int, name: str, parts: Mapping[str, tuple[DType, int]]) -> Group:
    """Bytes that Done carries, such as the first token: part name to element type and length in bytes."""
    stated = tuple(Part(name=n, dtype=d, lanes=1, lane_bytes=size) for n, (d, size) in parts.items())
    return _group(id, name, 0, ItemKind.HANDOFF, 1, stated)


def _group(id: int, name: str, model: int, kind: ItemKind, rows: int, parts: tuple[Part, ...], **more: Any) -> Group:
    defaults = {"tokens_per_row": 1, "cp_size": 1, "interleave": 1, "origin": 0}
    return Group(id=id, name=name, model=model, kind=kind, rows=rows, parts=parts, **(defaults | more))


def owns(group: Group, layers: Iterable[int], lanes: Sequence[tuple[int, int]] | None = None, cp_rank: int = 0) -> Owns:
    """A rank's share: layer ids and lane intervals in local order (the same for each part; all lanes by default)."""
    spans = tuple(
        LaneSpan(part=p, lo=lo, hi=hi)
        for p, part in enumerate(group.parts)
        for lo, hi in (lanes if lanes is not None else [(0, part.lanes)])
    )
    return Owns(group=group.id, layers=np.fromiter(layers, np.uint32), cp_rank=cp_rank, lanes=spans)


def facts(equal: Mapping[str, str], warn: Mapping[str, str] | None = None) -> tuple[Fact, ...]:
    """Facts of rules EQUAL and WARN, in canonical order; spec/v1/registry/facts.toml has their names."""
    rows = [(n, v, FactRule.EQUAL) for n, v in equal.items()] + [(n, v, FactRule.WARN) for n, v in (warn or {}).items()]
    return tuple(Fact(name=n, value=v, rule=r) for n, v, r in sorted(rows))


def encode_geometry(geometry: Geometry) -> bytes:
    """Canonical bytes of a Description, over which `digest` is taken."""
    return encode_struct(geometry)


def decode_geometry(data: bytes | memoryview) -> Geometry:
    """Decode and validate a Description; raises WireError, or PlanError of code BAD_GEOMETRY."""
    if len(data) > limits.MAX_GEOMETRY:
        raise _bad("geometry", f"at most {limits.MAX_GEOMETRY} bytes", str(len(data)))
    geometry = decode_struct(Geometry, data)
    _check(geometry)
    return geometry


def digest(data: bytes | memoryview) -> bytes:
    """SHA-256 of a Description's geometry bytes."""
    return hashlib.sha256(data).digest()


def lane_bytes(part: Part) -> int:
    """Bytes of a lane of the whole part; `part` may be a section of it (clause KVP-GEO-SECTIONS)."""
    return part.lane_bytes if part.whole is None else part.whole


def column_names(group: Group) -> list[str]:
    """Names of a layer's columns: the part's, and for a section its bytes too, such as `latent[0:1024]`."""
    return [
        p.name if lane_bytes(p) == p.lane_bytes else f"{p.name}[{p.at or 0}:{(p.at or 0) + p.lane_bytes}]"
        for p in group.parts
    ]


def validate(geometry: Geometry) -> None:
    """Raise WireError or PlanError(BAD_GEOMETRY) if a Description contradicts itself (clauses KVP-GEO-*)."""
    encode_struct(geometry)  # which raises WireError if a field or a rule of a map is wrong
    _check(geometry)


def _check(geometry: Geometry) -> None:
    """The same for a Description whose single fields are known to be valid, as after decoding."""
    groups = {g.id: g for g in geometry.groups}
    _check_size(geometry, groups)
    for i, group in enumerate(geometry.groups):
        _check_group(group, f"groups[{i}]")
    held: dict[tuple[int, str, int], int] = {}
    for i, rank in enumerate(geometry.ranks):
        for j, share in enumerate(rank.owns):
            path = f"ranks[{i}].owns[{j}]"
            if share.group not in groups:
                raise _bad(f"{path}.group", "one of the groups", str(share.group))
            _check_owns(groups[share.group], share, path)
            for part in groups[share.group].parts:
                for layer in share.layers.tolist():
                    key = (groups[share.group].model, part.name, layer)
                    if held.setdefault(key, share.group) != share.group:
                        raise _bad(f"{path}.layers", "each layer and part in one group", f"layer {layer} twice")
            if len(held) > limits.MAX_LAYERS:
                raise _bad(f"{path}.layers", f"at most {limits.MAX_LAYERS} layers times parts", "more")


def _check_size(geometry: Geometry, groups: Mapping[int, Group]) -> None:
    """Raise BAD_GEOMETRY for a Description that is larger than any fleet needs (KVP-GEO-SIZE)."""
    orders = [g.order for g in geometry.groups if g.order is not None]
    claims = [sum(_intervals(groups.get(share.group), share) for share in rank.owns) for rank in geometry.ranks]
    for path, most, of, number in (
        ("groups", limits.MAX_PARTS, "parts", sum(len(g.parts) for g in geometry.groups)),
        ("groups", limits.MAX_RUNS, "runs in orders", sum(map(len, orders))),
        ("ranks", limits.MAX_RANKS, "ranks", len(geometry.ranks)),
        ("ranks", limits.MAX_CLAIMS, "layers times intervals", sum(claims)),
        ("ranks", limits.MAX_RANK_CLAIMS, "layers times intervals on one rank", max(claims, default=0)),
    ):
        if number > most:
            raise _bad(path, f"at most {most} {of}", str(number))


def _check_group(group: Group, path: str) -> None:
    _check_sections(group, path)
    plain = (group.model, group.rows, group.tokens_per_row, *(p.lanes for p in group.parts))
    sections = any(lane_bytes(p) != p.lane_bytes for p in group.parts)
    if not KINDS[group.kind].has_memory and (sections or plain != (0, 1, 1, *(1 for _ in group.parts))):
        lanes = f"lanes {[p.lanes for p in group.parts]}" + ", in sections" * sections
        shape = f"model {group.model}, {group.rows} rows, {lanes}"
        raise _bad(f"{path}.kind", "hand-off data of model 0, one row, parts of one lane", shape)
    if group.partial and not (KINDS[group.kind].paged or KINDS[group.kind].wraps):
        raise _bad(f"{path}.partial", "rows of tokens, in pages or rings", ItemKind(group.kind).name)
    for at, mine, yours in conversion.flaws(group):
        raise _bad(f"{path}.{at}", mine, yours)
    stated: dict[str, str] = {}
    for part in group.parts:
        other = stated.setdefault(ALIASES.get(part.name, part.name), part.name)
        if other != part.name:
            raise _bad(f"{path}.parts", "each part once, by its name in the registry", f"{other} and {part.name}")
    cut = group.interleave % group.tokens_per_row or group.origin % group.tokens_per_row
    if group.cp_size > 1 and (not KINDS[group.kind].paged or cut):
        raise _bad(f"{path}.interleave", "pages, and whole rows in each run", f"{group.interleave} tokens")
    if group.cp_size > 1:
        _check_deal(group, path)


def _check_deal(group: Group, path: str) -> None:
    runs, at = group.cp_size, f"{path}.cp_size"
    if group.order is not None:
        runs, at = group.order.size, f"{path}.order"
        taken = np.unique(group.order)
        if taken.size != group.cp_size or taken[-1] >= group.cp_size:
            came = f"{taken.size} cp ranks, {taken[-1]} the highest"
            raise _bad(at, f"runs of each of the {group.cp_size} cp ranks, and of no other", came)
    if runs * group.interleave > limits.MAX_DEAL:
        raise _bad(at, f"at most {limits.MAX_DEAL} tokens in one deal", str(runs * group.interleave))


def _check_sections(group: Group, path: str) -> None:
    """Raise BAD_GEOMETRY unless the parts of one name are sections that tile a lane, one after the other."""
    last: dict[str, int] = {}
    for j, part in enumerate(group.parts):
        at, before = f"{path}.parts[{j}]", group.parts[last[part.name]] if part.name in last else part
        begin = (before.at or 0) + before.lane_bytes if part.name in last else 0
        for name, mine, yours in (
            ("dtype", word(DType, before.dtype), word(DType, part.dtype)),
            ("lanes", before.lanes, part.lanes),
            ("whole", lane_bytes(before), lane_bytes(part)),
            ("at", begin, part.at or 0),
            ("encoding", None, part.encoding if lane_bytes(part) != part.lane_bytes else None),
        ):
            if mine != yours:
                raise _bad(f"{at}.{name}", f"{mine}, as this is a section of {part.name}", str(yours))
        last[part.name] = j
    for name, j in last.items():
        end, whole = (group.parts[j].at or 0) + group.parts[j].lane_bytes, lane_bytes(group.parts[j])
        if end != whole:
            raise _bad(f"{path}.parts[{j}].whole", f"{end}, where the last section of {name} ends", str(whole))


def _intervals(group: Group | None, share: Owns) -> int:
    """Layers times lane intervals of a share; a section has one interval for each lane."""
    apart = {i for i, p in enumerate(group.parts) if lane_bytes(p) != p.lane_bytes} if group else set()
    return share.layers.size * sum(span.hi - span.lo if span.part in apart else 1 for span in share.lanes)


def _check_owns(group: Group, share: Owns, path: str) -> None:
    if not KINDS[group.kind].has_memory and share.layers.tolist() != [0]:
        raise _bad(f"{path}.layers", "layer 0 of hand-off data", f"layers {share.layers.tolist()[:8]}")
    if share.cp_rank >= group.cp_size:
        raise _bad(f"{path}.cp_rank", f"below {group.cp_size}", str(share.cp_rank))
    for k, span in enumerate(share.lanes):
        at = f"{path}.lanes[{k}]"
        if span.part >= len(group.parts):
            raise _bad(f"{at}.part", f"below {len(group.parts)}", str(span.part))
        if span.hi > group.parts[span.part].lanes:
            raise _bad(f"{at}.hi", f"at most {group.parts[span.part].lanes}", str(span.hi))
    by_part: dict[int, list[tuple[int, int]]] = {}
    for span in share.lanes:
        by_part.setdefault(span.part, []).append((span.lo, span.hi))
    for p in range(len(group.parts)):
        spans = sorted(by_part.get(p, ()))
        if not spans or any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)):
            wanted = f"disjoint spans of each part, at least one for {group.parts[p].name}"
            raise _bad(f"{path}.lanes", wanted, str(spans))
    if flaw := conversion.share_flaw(group, share, by_part):
        raise _bad(f"{path}.{flaw[0]}", *flaw[1:])


def _bad(path: str, mine: str, yours: str) -> PlanError:
    return PlanError(ErrorCode.BAD_GEOMETRY, path, mine, yours, "correct the Description")
