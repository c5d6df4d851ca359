"""Conversions between the two forms of a part, as Descriptions state them (spec/v1/conversion.md)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

import attrs
import numpy as np

from kvproto.planning.arrays import IntArray
from kvproto.planning.kinds import KINDS
from kvproto.planning.parts import ALIASES, CONVERSIONS, SCALES
from kvproto.wire.enums import DType
from kvproto.wire.messages import Geometry, Group, Owns, Part, UIntArray

SIZE = {DType.BF16: 2, DType.F8E4M3: 1, DType.F32: 4}
"""Bytes of an element of each dtype that conversions read or write."""


class Made(IntEnum):
    """The result of a conversion."""

    NARROW = 1
    SCALES = 2
    WIDE = 3


@attrs.frozen(eq=False)
class Conversion:
    """The source of the lanes of one part of the sink."""

    made: Made
    part: int
    """Index of the part that is converted, in the source's group."""
    scales: int | None
    """Index of the part that scales it there, which is read too."""
    blocks: int
    """Scales of a lane; 0 if they are stated."""
    stated: IntArray | None
    """Scales of each layer, or of all, as bits of float32; None: they are in a part."""


def conversion(src: Group, dst: Group, index: int) -> Conversion | None:
    """The conversion that makes a part of the sink's group out of the source's; None if bytes move as they are."""
    wanted, parts = dst.parts[index], {part.name: i for i, part in enumerate(src.parts)}
    if wanted.name not in parts:
        scaled = next(part for i, part in enumerate(dst.parts) if scales_of(dst, i) == index)
        return Conversion(Made.SCALES, parts[scaled.name], None, wanted.lane_bytes // SIZE[DType.F32], None)
    i = parts[wanted.name]
    part = src.parts[i]
    name = None if part.dtype == wanted.dtype else shared_name(part, wanted)
    if name is None:
        return None
    widens = part.dtype != CONVERSIONS[name][0]
    narrow, group, at = (part, src, i) if widens else (wanted, dst, index)
    scales = scales_of(group, at) if CONVERSIONS[name][2] else None
    blocks = 0 if scales is None else group.parts[scales].lane_bytes // SIZE[DType.F32]
    stated = narrow.x_scales.astype(np.int64) if scales is None and narrow.x_scales is not None else None
    return Conversion(Made.WIDE if widens else Made.NARROW, i, scales if widens else None, blocks, stated)


_FORMS = {dtype for *forms, _ in CONVERSIONS.values() for dtype in forms}


def stating(group: Group, names: tuple[str, ...], scales: Mapping[str, float | Sequence[float]]) -> Group:
    """The same group, whose values of a dtype that is a form state these conversions, and these scales by part."""
    parts = [
        part
        if part.dtype not in _FORMS or part.name in SCALES or not KINDS[group.kind].has_memory
        else attrs.evolve(part, x_conversions=names or None, x_scales=_bits(scales.get(part.name)))
        for part in group.parts
    ]
    return attrs.evolve(group, parts=tuple(parts))


def _bits(scales: float | Sequence[float] | None) -> UIntArray | None:
    return None if scales is None else np.atleast_1d(np.asarray(scales, np.float32)).view(np.uint32)


def names_of(part: Part) -> list[str]:
    """The conversions of the table that a part states."""
    return [name for name in part.x_conversions or () if name in CONVERSIONS]


def shared_name(a: Part, b: Part) -> str | None:
    """The conversion between two parts of different dtypes that both state, if there is one."""
    shared = (name for name in names_of(a) if name in names_of(b))
    return next((name for name in shared if {a.dtype, b.dtype} == {*CONVERSIONS[name][:2]}), None)


def scales_of(group: Group, index: int) -> int | None:
    """The part of a group that by its registered name scales the part of that index."""
    return _scaling(group).get(name_of(group.parts[index].name))


def _scaling(group: Group) -> dict[str | None, int]:
    """Indices of parts that scale others, by the registered names of these."""
    return {scaled_by(part.name): i for i, part in reversed([*enumerate(group.parts)])}


def scaled_by(part: str) -> str | None:
    """The registered name of the part that a part of this name scales; None if it is not a scale."""
    return SCALES.get(name_of(part))


def name_of(part: str) -> str:
    """The registered name behind an alias, or else `part` itself."""
    return ALIASES.get(part, part)


def flaws(group: Group) -> Iterator[tuple[str, str, str]]:
    """Faults of what the parts of a group state: path, what it should be, and what came (KVP-CNV-STATED)."""
    scaling = _scaling(group)
    for j, part in enumerate(group.parts):
        names, stated = names_of(part), part.x_scales
        narrow = [name for name in names if part.dtype == CONVERSIONS[name][1]]
        i = scaling.get(name_of(part.name))
        by_part = bool(narrow) and CONVERSIONS[narrow[0]][2]
        plain = (part.encoding, part.at, part.whole) == (None, None, None) and KINDS[group.kind].has_memory
        odd = not narrow and (part.lane_bytes % SIZE[DType.BF16] > 0 or i is not None)
        for field, good, mine in (
            ("conversions", all(part.dtype in CONVERSIONS[name][:2] for name in names), "a dtype of its forms"),
            ("conversions", plain or not names, "rows in memory, without encoding or sections"),
            ("conversions", not (names and odd), "whole elements, and no part that scales a wide one"),
            ("conversions", len(narrow) < 2, "one conversion to a narrow form"),
            ("conversions", not by_part or (i is not None and _fit(part, group.parts[i])), _FITTING.format(part.name)),
            (
                "scales",
                (stated is not None) == (bool(narrow) and not by_part),
                "scales of a narrow part that states them",
            ),
            ("scales", stated is None or _normal(stated), "bits of normal float32 numbers above 0"),
        ):
            if not good:
                yield f"parts[{j}].x_{field}", mine, f"{', '.join(names) or 'none'} of {part.name}, dtype {part.dtype}"


_FITTING = "a part of F32 that scales {}, with its lanes and a divisor of its elements"


def _fit(part: Part, scales: Part) -> bool:
    number, rest = divmod(scales.lane_bytes, SIZE[DType.F32])
    alike = (scales.dtype, scales.lanes, scales.whole) == (DType.F32, part.lanes, None)
    return alike and not rest and not part.lane_bytes % number


def _normal(bits: UIntArray) -> bool:
    return bool(((bits >= 1 << 23) & (bits < 0xFF << 23)).all())


def share_flaw(group: Group, share: Owns, lanes: Mapping[int, object]) -> tuple[str, str, str] | None:
    """The first fault of a share whose lanes of each part are known, as `flaws` states it (KVP-CNV-LANES)."""
    scaling = _scaling(group)
    for j, part in enumerate(group.parts):
        i, last = scaling.get(name_of(part.name)), int(share.layers[-1])
        if i is not None and names_of(part) and lanes[j] != lanes[i]:
            return "lanes", f"the lanes of {part.name} for its scales too, in their order", str(lanes[i])
        if part.x_scales is not None and 1 < part.x_scales.size <= last:
            return "layers", f"layers that {part.name} has scales of: {part.x_scales.size}", str(last)
    return None


def converted(source: Geometry, sink: Geometry) -> Geometry:
    """The source with each part in the form in which the sink takes it (KVP-CNV-PLAN)."""
    if not any(part.x_conversions for group in source.groups for part in group.parts):
        return source
    held, changed = (_layers(source), _layers(sink)), {}
    for src in source.groups:
        taken = [
            g for g in sink.groups if g.model == src.model and held[0].get(src.id, set()) & held[1].get(g.id, set())
        ]
        if new := _in_forms_of(src, taken):
            changed[src.id] = new
    if not changed:
        return source
    groups = tuple(changed[g.id][0] if g.id in changed else g for g in source.groups)
    ranks = tuple(
        attrs.evolve(r, owns=tuple(_share(o, changed[o.group][1]) if o.group in changed else o for o in r.owns))
        for r in source.ranks
    )
    return attrs.evolve(source, groups=groups, ranks=ranks)


def _layers(geometry: Geometry) -> dict[int, set[int]]:
    """The layers of each group that some rank owns."""
    held: dict[int, set[int]] = {}
    for share in (share for rank in geometry.ranks for share in rank.owns):
        held.setdefault(share.group, set()).update(share.layers.tolist())
    return held


def _in_forms_of(src: Group, taken: Iterable[Group]) -> tuple[Group, list[int]] | None:
    """A group in the forms of the sink's groups, and for each of its parts that whose lanes it has; None: as it is."""
    parts, added, left = dict(enumerate(src.parts)), list[tuple[Part, int]](), set[int | None]()
    for i, part in enumerate(src.parts):
        wanted = ((dst, j) for dst in taken for j, other in enumerate(dst.parts) if other.name == part.name)
        for dst, j in wanted:
            other, rule = dst.parts[j], conversion(src, dst, j)
            if rule is None:
                continue
            size = part.lane_bytes // SIZE[DType(part.dtype)] * SIZE[DType(other.dtype)]
            parts[i] = attrs.evolve(part, dtype=other.dtype, lane_bytes=size)
            left.add(rule.scales)
            scales = scales_of(dst, j)
            if rule.made == Made.NARROW and rule.stated is None and scales is not None:
                added.append((dst.parts[scales], i))
            break
    if not left:
        return None
    kept = [(part, i) for i, part in parts.items() if i not in left]
    kept += [(attrs.evolve(part, lanes=parts[i].lanes), i) for part, i in added]
    return attrs.evolve(src, parts=tuple(part for part, _ in kept)), [i for _, i in kept]


def _share(share: Owns, lanes_of: list[int]) -> Owns:
    spans = [attrs.evolve(span, part=p) for p, i in enumerate(lanes_of) for span in share.lanes if span.part == i]
    return attrs.evolve(share, lanes=tuple(spans))
