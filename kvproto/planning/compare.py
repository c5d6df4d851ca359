"""Comparison of two Descriptions, of facts and parts; `mine` is the source's, which sessions swap for the sink."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import attrs
import numpy as np

from kvproto.errors import PlanError
from kvproto.planning.cache import BITS
from kvproto.planning.conversion import converted, name_of, names_of, scaled_by, scales_of, shared_name
from kvproto.planning.deals import deal_text, same_deal
from kvproto.planning.geometry import Geometry, Group, Part, lane_bytes
from kvproto.planning.kinds import KINDS, axis_of
from kvproto.planning.parts import CONVERSIONS, SHARE_OF
from kvproto.wire.enums import DType, ErrorCode, FactRule, ItemKind, word
from kvproto.wire.messages import UIntArray

COMPARED = ("weights.target", "tokenizer", "rope.target", "kv_scales.target")
"""Facts, by their names in the registry, that both sides should state; a draft has those of the target too."""
_ABSENT = "(absent)"
_LONGEST = 80
_KEYS = {"facts": "name", "groups": "name", "parts": "name", "ranks": "rank", "owns": "group"}
"""The field by which the elements of a list in a Description are told apart."""


def differences(source: Geometry, sink: Geometry) -> list[tuple[str, str, str]]:
    """Differences that two sides have paired with: (path, the source's value, the sink's) of facts, dtypes, layers."""
    facts = [d[:3] for d in _fact_differences(source, sink) if d[3] == FactRule.WARN]
    there = converted(source, sink)
    dtypes = [
        (f"groups[{group.name}].parts[{part.name}].dtype", word(DType, part.dtype), word(DType, other.dtype))
        for group, to in zip(source.groups, there.groups, strict=True)
        for part, other in ((p, o) for p in group.parts for o in to.parts if p.name == o.name and p.dtype != o.dtype)
    ]
    return [*facts, *dtypes, *_scaled_by_one(source, sink), *_left_out(there, sink)]


def _scaled_by_one(source: Geometry, sink: Geometry) -> Iterator[tuple[str, str, str]]:
    """The parts of which one side alone states the scales, once for each group of the sink."""
    for dst, part in ((g, p) for g in sink.groups for p in g.parts):
        of = (p for g in source.groups if g.model == dst.model for p in g.parts)
        theirs = {p.x_scales is None for p in of if (p.name, p.dtype) == (part.name, part.dtype)}
        if theirs == {part.x_scales is not None}:
            sides = ("scales", _ABSENT) if part.x_scales is None else (_ABSENT, "scales")
            yield f"groups[{dst.name}].parts[{part.name}].x_scales", *sides


def _left_out(source: Geometry, sink: Geometry) -> Iterator[tuple[str, str, str]]:
    offered, taken = _held(source), _held(sink)
    models = {group.model for group in sink.groups}
    for (model, name), layers in offered.items():
        lacking = layers - taken.get((model, name), set())
        if lacking and model in models:
            group = next(g for g in source.groups if g.model == model and name in {name_of(p.name) for p in g.parts})
            some = "" if lacking == layers else f" of {len(layers)}"
            what = f"{len(lacking)}{some} layers, from {min(lacking)} on" if min(lacking) >= 0 else "hand-off data"
            yield f"groups[{group.name}].parts[{name}]", what, "none of them"


def _held(geometry: Geometry) -> dict[tuple[int, str], set[int]]:
    """The layers of each part that some rank owns, by model and registered name; -1 for what has no layers."""
    groups, held = {group.id: group for group in geometry.groups}, dict[tuple[int, str], set[int]]()
    for share in (share for rank in geometry.ranks for share in rank.owns):
        group = groups[share.group]
        for part in {span.part for span in share.lanes}:
            layers = share.layers.tolist() or [-1]
            held.setdefault((group.model, name_of(group.parts[part].name)), set()).update(layers)
    return held


@lru_cache(64)
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """One tuple for all events that hold these names, as an engine may leave thousands of events unread."""
    return names


def unstated(source: Geometry, sink: Geometry) -> tuple[str, ...]:
    """The registered facts that should be compared but that neither side states."""
    models = {g.model: "target" if g.model == 0 else f"draft{g.model if g.model > 1 else ''}" for g in sink.groups}
    small = {models[g.model] for g in sink.groups for part in g.parts if BITS.get(part.dtype, 16) < 16}
    names = []
    for name in COMPARED:
        base, dot, _ = name.partition(".")
        of = [model for _, model in sorted(models.items()) if base != "kv_scales" or model in small]
        names += [f"{base}.{model}" for model in of] if dot else [name]
    stated = {fact.name for side in (source, sink) for fact in side.facts}
    return _shared(tuple(name for name in names if name not in stated))


def check_facts(source: Geometry, sink: Geometry) -> None:
    """Raise IDENTITY_MISMATCH for the first fact of rule EQUAL that differs."""
    for path, mine, yours, rule in _fact_differences(source, sink):
        if rule == FactRule.EQUAL:
            raise PlanError(ErrorCode.IDENTITY_MISMATCH, path, mine, yours, "load the same model on both sides")


def _fact_differences(source: Geometry, sink: Geometry) -> Iterator[tuple[str, str, str, FactRule]]:
    mine, yours = ({f.name: f for f in g.facts} for g in (source, sink))
    for name in sorted(mine | yours):
        a, b = mine.get(name), yours.get(name)
        if a is None or b is None or a.value != b.value:
            values = [f.value if f else _ABSENT for f in (a, b)]
            rule = min(f.rule for f in (a, b) if f)
            yield f"facts[{name}]", values[0], values[1], FactRule(rule)


def first_difference(one: Geometry, other: Geometry) -> tuple[str, str, str]:
    """The first difference of two Descriptions that differ, as (path, the value of `one`, the value of `other`)."""
    for path, a, b, _ in _fact_differences(one, other):
        return path, a, b
    return next(_differing("", one, other), ("digest", "one", "another"))


def _differing(path: str, a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    """The values that differ between two parts of a Description, in the order of its fields."""
    if a is None or b is None or not attrs.has(type(a)):
        if not np.array_equal(a, b):
            yield path, _brief(a), _brief(b)
        return
    for name in (field.name for field in attrs.fields(type(a))):
        mine, yours, at = getattr(a, name), getattr(b, name), f"{path}.{name}".lstrip(".")
        if not isinstance(mine, tuple) or not isinstance(yours, tuple):
            yield from _differing(at, mine, yours)
            continue
        key = _KEYS.get(name)
        ours, theirs = ({getattr(e, key) if key else i: e for i, e in enumerate(es)} for es in (mine, yours))
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            yield from _differing(f"{at}[{name}]", ours.get(name), theirs.get(name))


def _brief(value: Any) -> str:
    """A value as text for people; of a struct, only that it is stated."""
    if value is None or attrs.has(type(value)):
        return _ABSENT if value is None else "(stated)"
    text = str(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def check_pair(src: Group, dst: Group, name: str) -> None:
    """Raise KIND_, AXIS_, DTYPE_, LANE_, ROW_MISMATCH or LAYOUT_OPAQUE if the part of that name cannot be mapped."""
    a, b = (next(p for p in group.parts if p.name == name) for group in (src, dst))
    path = f"groups[{dst.name}]"
    at, sizes = f"{path}.parts[{name}]", (lane_bytes(a), lane_bytes(b))
    opaque = any(part.encoding for part in dst.parts)
    if src.kind != dst.kind and (opaque or dst.kind not in KINDS[src.kind].maps_to):
        mine, yours = ItemKind(src.kind).name, ItemKind(dst.kind).name
        advice = "keep the cache in items of one kind on both sides" + ", as opaque items move whole" * opaque
        raise PlanError(ErrorCode.KIND_MISMATCH, f"{path}.kind", mine, yours, advice)
    for code, where, mine, yours in (
        (ErrorCode.AXIS_MISMATCH, f"{path}.axis", axis_of(src), axis_of(dst)),
        (ErrorCode.DTYPE_MISMATCH, f"{at}.dtype", word(DType, a.dtype), word(DType, b.dtype)),
        (ErrorCode.LANE_MISMATCH, f"{at}.lanes", _extent(a), _extent(b)),
        (ErrorCode.ROW_MISMATCH, f"{path}.tokens_per_row", str(src.tokens_per_row), str(dst.tokens_per_row)),
        (ErrorCode.ROW_MISMATCH, f"{path}.live_rows", _live(src), _live(dst)),
        (ErrorCode.ROW_MISMATCH, f"{path}.partial", str(bool(src.partial)), str(bool(dst.partial))),
        (ErrorCode.LAYOUT_OPAQUE, f"{at}.encoding", str(a.encoding), str(b.encoding)),
    ):
        same = a.lanes * sizes[0] == b.lanes * sizes[1] if code == ErrorCode.LANE_MISMATCH else mine == yours
        if not same:
            raise PlanError(code, where, mine, yours, _advice(code, src, dst, name))
    if max(sizes) % min(sizes):
        mine, yours = map(str, sizes)
        raise PlanError(ErrorCode.LANE_MISMATCH, f"{at}.lane_bytes", mine, yours, "use an integer multiple")
    if opaque:
        deals = [
            f"{g.rows} rows" + f" of {p.lane_bytes} bytes a lane" * (a.encoding is not None) + deal_text(g)
            for g, p in ((src, a), (dst, b))
        ]
        if deals[0] != deals[1] or not same_deal(src, dst):
            advice = "items of a group with an opaque part move whole: page and deal all its parts alike"
            raise PlanError(ErrorCode.LAYOUT_OPAQUE, f"{path}.rows", deals[0], deals[1], advice)


def check_scales(src: Group, dst: Group, index: int, layers: Iterable[tuple[int, int]]) -> None:
    """Raise DTYPE_MISMATCH if both sides state scales of a part, and other ones of a layer (KVP-CNV-SCALES)."""
    part = dst.parts[index]
    stated = [p.x_scales for p in (*src.parts, part) if p.name == part.name and p.dtype == part.dtype]
    if any(scales is None for scales in stated) or len(stated) < 2:
        return
    for layer in (layer for lo, hi in layers for layer in range(lo, hi)):
        here, there = (_scale(scales, layer) for scales in (stated[0], stated[-1]) if scales is not None)
        if here != there:
            path = f"groups[{dst.name}].parts[{part.name}].x_scales"
            advice = "codes of one scale mean other numbers by another: serve one checkpoint's scales on both sides"
            mine, yours = (f"{value:.9g} of layer {layer}" for value in (here, there))
            raise PlanError(ErrorCode.DTYPE_MISMATCH, path, mine, yours, advice)


def _scale(scales: UIntArray, layer: int) -> float:
    return float(scales[layer if scales.size > 1 else 0].astype(np.uint32).view(np.float32))


def _advice(code: ErrorCode, src: Group, dst: Group, name: str) -> str:
    """Advice about a part that differs, with the conversions that its narrow form can have and who states which."""
    at = [next(i for i, p in enumerate(group.parts) if p.name == name) for group in (src, dst)]
    a, b = src.parts[at[0]], dst.parts[at[1]]
    rows = [form for form, row in CONVERSIONS.items() if {a.dtype, b.dtype} == {*row[:2]}]
    if code != ErrorCode.DTYPE_MISMATCH or not rows:
        return "make the two sides equal"
    if shared := shared_name(a, b):
        return f"both state {shared}: choose feature CONVERT too, over a transport that converts (check --convert)"
    elements = {lane_bytes(p) * 8 // BITS[p.dtype] for p in (a, b)}
    if len(elements) > 1 or a.encoding or b.encoding:
        sizes = " and of ".join(map(str, sorted(elements)))
        return f"make the two sides equal: rows of {sizes} elements do not convert"
    group, i = (src, at[0]) if a.dtype == CONVERSIONS[rows[0]][1] else (dst, at[1])
    there = [form for form in rows if CONVERSIONS[form][2] == (scales_of(group, i) is not None)]
    sides = (f"{side} states {', '.join(names_of(p)) or 'none'}" for side, p in (("the source", a), ("the sink", b)))
    return f"make the two sides equal, or state {', '.join(there)} on both (Cache.converts): {', '.join(sides)}"


def _extent(part: Part) -> str:
    return f"{part.lanes} lanes of {lane_bytes(part)} bytes"


def _live(group: Group) -> str:
    return str((group.live_rows or group.rows) if KINDS[group.kind].is_state else None)


def missing(group: Group, part: str, layer: int, known: Collection[str]) -> PlanError:
    """The error for a part or layer that the source lacks; `known` are the names of its parts of that model."""
    path = f"groups[{group.name}].parts[{part}]"
    if part in known:
        mine, yours, advice = (
            f"no layer {layer}",
            f"layer {layer} of model {group.model}",
            f"state {part} of the same layers on both sides",
        )
        return PlanError(ErrorCode.LAYER_MISSING, path, mine, yours, advice)
    for other in known:
        if name_of(other) == name_of(part):
            advice = f"both are {name_of(part)} in the registry of parts: state that name on both sides"
            return PlanError(ErrorCode.PART_MISSING, path, other, part, advice)
        if name_of(part) == SHARE_OF.get(name_of(other)) or name_of(other) == SHARE_OF.get(name_of(part)):
            share, whole = sorted((name_of(other), name_of(part)), key=lambda name: name not in SHARE_OF)
            advice = (
                f"{share} is the registered name of a share of {whole}: keep it alike on both sides, or as a section"
            )
            return PlanError(ErrorCode.PART_MISSING, path, other, part, advice)
    advice = "serve the same models and caches"
    if group.model and not known:
        advice += ", or choose feature COLD_DRAFT on both sides, with which a draft starts cold (Options.cold_draft)"
    mine = f"{', '.join(sorted(known))} of model {group.model}" if known else "(absent)"
    return PlanError(ErrorCode.PART_MISSING, path, mine, f"{part} of model {group.model}", advice)


def left_behind(group: Group, part: str, lost: Mapping[str, int], taken: Collection[str]) -> PlanError:
    """The error for a part that the sink takes without others of its layers (KVP-PLAN-LEFT); `lost`: their layers.

    `taken` are the names of all parts that the sink takes of that model.
    """
    names, layer = ", ".join(sorted(lost)), min(lost.values())
    mine, yours = f"{names} beside {part} in layer {layer}", f"{part} without {names}"
    advice = "parts of a layer mean nothing without each other: take them too"
    if needed := [name for name in sorted(lost) if scaled_by(name) in {*map(name_of, taken)}]:
        advice = f"values mean nothing without their scales: take {', '.join(needed)} too, or state one conversion"
        advice += " on both sides, if one of them has no scales (Cache.converts)"
    elif shares := [name for name in sorted(lost) if SHARE_OF.get(name_of(name)) in {*map(name_of, taken)}]:
        advice = f"a part means nothing without its share: take {', '.join(shares)} too"
    else:
        advice += f"; a sink that does not need them says so: lay_out(..., without={sorted(lost)!r})"
    return PlanError(ErrorCode.PART_MISSING, f"groups[{group.name}].parts[{part}]", mine, yours, advice)
