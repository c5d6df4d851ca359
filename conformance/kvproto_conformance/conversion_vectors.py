"""Makes vectors/conversion.json, the formulas by the suite's own arithmetic: `python -m kvproto_conformance.conversion_vectors`.

The cases of plans with a conversion are made by `plan_vectors`.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.wire.enums import DType
from kvproto_conformance.conversion import convert
from kvproto_conformance.suites import MADE, text

FILE = MADE / "conversion.json"
EXACT, PLAN, BOTH = "KVP-CNV-EXACT", "KVP-CNV-PLAN", "KVP-CNV-BOTH"
STATED, LANES = "KVP-CNV-STATED", "KVP-CNV-LANES"
SCALES = "KVP-CNV-SCALES"
FIT, ALIKE = "KVP-PLAN-FIT", "KVP-PLAN-EXACT"
"""Clauses of the core, by which planners without the extension are asked too: the fields may be ignored."""
Pair = tuple[Geometry, Geometry]
Case = tuple[str, str, Pair, list[str], str]
ON = ["CONVERT"]


def _bf16(*bits: int) -> bytes:
    return struct.pack(f"<{len(bits)}H", *bits)


def _f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _formulas() -> Iterator[tuple[str, str, bytes, bytes, int, str]]:
    """Id, dtype of the lane, the lane, its scales, blocks, note."""
    rng = random.Random(4)
    one = _f32(1.0)
    ties = [struct.unpack("<f", _f32(x))[0] for x in (8.5, 9.5, 17, 19, 2**-10, 3 * 2**-10, 0.0078125 * 1.5)]
    halves = _bf16(*(struct.unpack("<I", _f32(x))[0] >> 16 for x in ties))
    yield "ties", "BF16", halves, one, 1, "halfway between two F8E4M3, subnormal ones too: to the even one"
    yield (
        "greatest",
        "BF16",
        _bf16(0x43E0, 0x43E8, 0x43F0, 0xC3E8, 0x7F7F, 0x7F80, 0xFF80),
        one,
        1,
        "448, beyond it, and infinity",
    )
    yield (
        "nan-and-zero",
        "BF16",
        _bf16(0x7FC0, 0xFFC1, 0x7F81, 0x0000, 0x8000, 0x0001, 0x8001),
        one,
        1,
        "NaN is 0x7F; zero has a sign",
    )
    yield (
        "divided",
        "BF16",
        _bf16(*(rng.randrange(0x3C00, 0x4300) for _ in range(32))),
        _f32(0.0123),
        1,
        "divided, not multiplied by a reciprocal",
    )
    some = _bf16(*(rng.choice((0, 0x8000)) | rng.randrange(0x3A00, 0x4200) for _ in range(32)))
    yield "head", "BF16", some, b"", 1, "one scale of a lane"
    yield "blocks", "BF16", some, b"", 4, "four scales of a lane, each of eight elements"
    yield "zeros", "BF16", _bf16(*[0, 0x8000] * 4), b"", 1, "nothing but zeros: the least scale"
    yield "tiny", "BF16", _bf16(0x0001, 0x8001, 0x0080, 0x0D00), b"", 1, "subnormal numbers, which nobody flushes"
    yield "infinite", "BF16", _bf16(0x4000, 0x7F80, 0xBF80, 0x7FC0), b"", 1, "the scale is that of the finite elements"
    yield "no-finite", "BF16", _bf16(0x7F80, 0xFF80, 0x7FC0, 0x7F80), b"", 2, "no finite element at all"
    codes = bytes(range(256))
    for scale, id in (
        (1.0, "codes"),
        (0.0123, "codes-scaled"),
        (3e38, "codes-of-a-large-scale"),
        (2.0**-126, "codes-of-a-small-scale"),
    ):
        yield id, "F8E4M3", codes, _f32(scale), 1, "every F8E4M3"
    yield (
        "blocks-back",
        "F8E4M3",
        bytes(rng.randrange(256) for _ in range(32)),
        _f32(0.5, 0.01, 3.3, 2.0**-120),
        4,
        "four blocks",
    )


def made() -> str:
    """The text of the file."""
    rows = []
    for id, dtype, data, scales, blocks, note in _formulas():
        name = "e4m3_tensor" if scales and blocks == 1 else "e4m3_block"
        asked = {"conversion": name, "dtype": dtype, "data": data.hex(), "scales": scales.hex(), "blocks": str(blocks)}
        rows.append({"id": id, "clause": EXACT, **asked, "expected": convert(asked), "note": note})
    return text("convert", rows)


# plans


def engine(
    dtype: DType, *names: str, tp: int = 1, block: int | None = None, page: int = 16, layers: Any = 2
) -> Geometry:
    """A GQA cache of four heads that states these conversions."""
    return lay_out([cache("kv", dtype, *names, block=block, page=page, layers=layers)], Parallel(tp=tp))


def cache(name: str, dtype: DType, *names: str, block: int | None = None, page: int = 16, layers: Any = 2) -> Cache:
    """The same cache, before it is laid out."""
    of = Cache.gqa(name, layers, kv_heads=4, head_dim=64, page=page, dtype=dtype, scale_block=block)
    stated: Any = {"k": [0.5, 0.25], "v": 0.5} if "e4m3_tensor" in names and dtype == DType.F8E4M3 else None
    return of.converts(*names, scales=stated)


BF16, FP8 = DType.BF16, DType.F8E4M3
BLOCK, TENSOR = "e4m3_block", "e4m3_tensor"


def cases() -> Iterator[Case]:
    """All cases of vectors/plan/conversion.json."""
    head = engine(FP8, BLOCK, tp=4, block=64)
    yield (
        "narrow-2-4",
        PLAN,
        (engine(BF16, BLOCK, tp=2), head),
        ON,
        "scales that no source has, made where they are wanted",
    )
    yield "wide-4-2", PLAN, (head, engine(BF16, BLOCK, tp=2)), ON, "scales that no sink wants, read by the conversion"
    yield (
        "blocks-8-3",
        PLAN,
        (engine(BF16, BLOCK, tp=8), engine(FP8, BLOCK, tp=3, block=16, page=64)),
        ON,
        "more ranks than heads",
    )
    for id, pair in (("narrow", (2, 1)), ("wide", (1, 4))):
        sides = engine(BF16, TENSOR, tp=pair[0]), engine(FP8, TENSOR, tp=pair[1])
        yield (
            f"tensor-{id}",
            PLAN,
            sides if id == "narrow" else (sides[1], sides[0]),
            ON,
            "scales that the Description states",
        )
    latent: dict[str, Any] = {"latent": 512, "rope": 64, "page": 64}
    mla = [
        lay_out([Cache.mla("kv", 3, **latent).converts(BLOCK)], Parallel(tp=4)),
        lay_out([Cache.mla("kv", 3, dtype=FP8, scale_block=64, **latent).converts(BLOCK)], Parallel(tp=2)),
    ]
    yield "latent-4-2", PLAN, (mla[0], mla[1]), ON, "one lane like any other, dealt by layers"
    both = engine(BF16, TENSOR, BLOCK, tp=2)
    yield "either", PLAN, (both, engine(FP8, TENSOR)), ON, "a source that states both, to one"
    yield "or-other", PLAN, (both, head), ON, "and to the other"
    mixed = lay_out([cache("first", BF16, layers=[0]), cache("rest", FP8, BLOCK, block=64, layers=[1])])
    apart = lay_out([cache("a", BF16, BLOCK, layers=[0]), cache("b", BF16, BLOCK, layers=[1])])
    yield "layers-apart", PLAN, (apart, mixed), ON, "layer 0 as it is, layer 1 converted"
    yield "refused-layers-together", BOTH, (engine(BF16, BLOCK), mixed), ON, "one group is in one form"
    yield from _refused(head)
    yield from _stated(head)


def _refused(head: Geometry) -> Iterator[Case]:
    """Pairs that do not both say so, which planners without the extension refuse too."""
    plain = engine(BF16, tp=2)
    yield "not-chosen", FIT, (engine(BF16, BLOCK, tp=2), head), [], "stated by both, but feature CONVERT is not chosen"
    yield "chosen-not-stated", BOTH, (plain, head), ON, "stated by the sink alone"
    yield "another", BOTH, (engine(BF16, TENSOR, tp=2), head), ON, "two conversions of the same dtypes"
    yield (
        "unknown-name",
        FIT,
        (engine(BF16, tp=2), _with(head, x_conversions=("acme.next",))),
        [],
        "names of later versions",
    )
    yield (
        "equal-dtypes",
        ALIKE,
        (engine(BF16, BLOCK, tp=2), plain),
        [],
        "what is stated changes no plan that needs no conversion",
    )
    yield "equal-dtypes-chosen", PLAN, (head, head), ON, "nor if CONVERT is chosen"
    one = engine(FP8, TENSOR)
    for id, bits in (("of-one-layer", [0.5, 0.125]), ("of-all", [0.125]), ("of-two-in-one", [0.5])):
        there = _with(one, x_scales=np.array(bits, np.float32).view(np.uint32))
        yield f"refused-scales-{id}", SCALES, (one, there), ON, "bytes of one dtype that mean other numbers"
    same = _with(one, 1, x_scales=np.array([0.5, 0.5, 0.25], np.float32).view(np.uint32))
    yield "equal-scales", SCALES, (one, same), ON, "one scale for all layers, and the same for each of two"
    other = lay_out([Cache.gqa("kv", 2, kv_heads=4, head_dim=128, page=16).converts(BLOCK)])
    yield "refused-elements", PLAN, (other, head), ON, "heads of another number of elements"


def _with(geometry: Geometry, index: int = 0, **changes: Any) -> Geometry:
    (group,) = geometry.groups
    parts = tuple(attrs.evolve(p, **changes) if i == index else p for i, p in enumerate(group.parts))
    return attrs.evolve(geometry, groups=(attrs.evolve(group, parts=parts),))


def _stated(head: Geometry) -> Iterator[Case]:
    """Parts that cannot have what they state."""
    tensor, bf16 = engine(FP8, TENSOR, tp=4), engine(BF16, BLOCK, tp=4)
    one = np.array([0x3F800000], np.uint32)
    for id, bad, note in (
        ("dtype", _with(bf16, dtype=DType.F16), "a dtype that is neither form"),
        ("encoding", _with(head, encoding="tiled.4"), "bytes that strides do not describe"),
        ("section", _with(head, whole=64), "a section, even of the whole"),
        ("half", _with(bf16, lane_bytes=127), "half an element"),
        ("two", _with(head, x_conversions=(BLOCK, TENSOR)), "two narrow forms of one part"),
        ("no-scales", _with(tensor, x_conversions=(BLOCK,), x_scales=None), "no part that scales it"),
        ("uneven", _with(head, 2, lane_bytes=12), "three scales of 64 elements"),
        ("scales-dtype", _with(head, 2, dtype=DType.U32), "scales of another dtype"),
        ("wide-scales", _with(head, dtype=BF16), "a wide part that is scaled"),
        ("unstated", _with(tensor, x_scales=None), "scales that are not stated"),
        ("stated-twice", _with(head, x_scales=one), "scales in a part, and stated"),
        ("stated-wide", _with(engine(BF16, TENSOR, tp=4), x_scales=one), "scales of a wide part"),
        ("zero", _with(tensor, x_scales=one * 0), "a scale of 0"),
        (
            "subnormal",
            _with(tensor, x_scales=np.array([0x3F800000, 0x7FFFFF], np.uint32)),
            "a scale that may be flushed",
        ),
        ("infinite", _with(tensor, x_scales=np.array([0x7F800000], np.uint32)), "a scale that is no number"),
        ("negative", _with(tensor, x_scales=one | np.uint32(1 << 31)), "a scale below 0"),
    ):
        yield f"bad-{id}", STATED, (bad, bf16), ON, note
    share = head.ranks[1].owns[0]
    swapped = tuple(attrs.evolve(s, lo=s.lo + 1, hi=s.hi + 1) if s.part == 2 else s for s in share.lanes)
    ranks = list(head.ranks)
    ranks[1] = attrs.evolve(ranks[1], owns=(attrs.evolve(share, lanes=swapped),))
    yield "bad-lanes", LANES, (attrs.evolve(head, ranks=tuple(ranks)), bf16), ON, "scales of other heads than its own"
    far = attrs.evolve(tensor.ranks[0].owns[0], layers=np.array([0, 2], np.uint32))
    ranks = [attrs.evolve(tensor.ranks[0], owns=(far,)), *tensor.ranks[1:]]
    yield "bad-layers", LANES, (attrs.evolve(tensor, ranks=tuple(ranks)), bf16), ON, "two scales, and none for layer 2"


if __name__ == "__main__":
    FILE.write_text(made())
