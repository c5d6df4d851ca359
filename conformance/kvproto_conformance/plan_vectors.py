"""Makes vectors/plan/ by the suite's own planner: `python -m kvproto_conformance.plan_vectors`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np

from kvproto.planning.geometry import Geometry, Group, LaneSpan, Rank, facts, gqa, handoff, mla, owns
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.wire import to_json
from kvproto.wire.enums import DType, ItemKind
from kvproto.wire.messages import Part
from kvproto_catalog.config import draft_of
from kvproto_catalog.models import PRESETS, describe
from kvproto_conformance import conversion_vectors, deals_vectors
from kvproto_conformance.checking import beyond
from kvproto_conformance.codec import Refusal
from kvproto_conformance.planner import plan
from kvproto_conformance.suites import MADE, text

Pair = tuple[Geometry, Geometry]
Case = tuple[str, str, Pair, list[str], str]
"""Id, clause, source and sink, features, note."""
FOLDER = MADE / "plan"
EXACT = "KVP-PLAN-EXACT"


def engine(*shares: tuple[Group, int, Any], ranks: int, replica: int = 0) -> Geometry:
    """Every rank owns all layers of each group; lanes by a function of the rank: None for all of them."""
    groups = tuple(g for g, _, _ in shares)
    made = (
        Rank(rank=r, owns=tuple(owns(g, range(layers), lanes and lanes(r)) for g, layers, lanes in shares))
        for r in range(ranks)
    )
    return Geometry(replica=replica, facts=(), groups=groups, ranks=tuple(made))


def heads(number: int, ranks: int) -> Any:
    """KV heads of a rank: a share of them, or one that consecutive ranks hold alike."""

    def lanes(rank: int) -> list[tuple[int, int]]:
        lo = number * rank // ranks
        return [(lo, max(number * (rank + 1) // ranks, lo + 1))]

    return lanes


def gqa_engine(number: int, ranks: int, layers: int = 2) -> Geometry:
    """A GQA cache of `number` heads."""
    return engine((gqa(0, "target", 0, number, 128, 16), layers, heads(number, ranks)), ranks=ranks)


def mixed(ranks: int, layers: int = 4, replica: int = 0) -> Geometry:
    """An MLA target and a GQA draft of 8 heads."""
    target, draft = mla(0, "target", 0, 1152, 64), gqa(1, "draft", 1, 8, 256, 64)
    return engine((target, layers, None), (draft, 1, heads(8, ranks)), ranks=ranks, replica=replica)


def stages(split: list[int], heads_: int = 2) -> Geometry:
    """Pipeline stages of so many layers each."""
    group, first, made = gqa(0, "target", 0, heads_, 128, 16), 0, []
    for rank, layers in enumerate(split):
        made.append(Rank(rank=rank, owns=(owns(group, range(first, first + layers)),)))
        first += layers
    return Geometry(replica=0, facts=(), groups=(group,), ranks=tuple(made))


def cases() -> Iterator[Case]:
    """All cases of plan.json."""
    yield from _replicas()
    yield from _head_counts()
    yield from _stages()
    yield from _drafts()
    yield from _models()
    yield from _kinds()
    yield from _lanes()
    yield from _refusals()
    yield from _two_faults()
    yield from _left()
    yield from _opaque()
    yield from _misfits()


def _replicas() -> Iterator[Case]:
    """Caches that several ranks hold alike: who sends them."""
    yield (
        "mla-gqa-8-4", EXACT, (mixed(8), mixed(4)), [],
        "draft shards are lost where the target alone decides who sends",
    )  # fmt: skip
    yield (
        "mla-gqa-8-4-one", "KVP-PLAN-SPREAD", (mixed(8), mixed(4)), ["SPREAD_ONE"],
        "the same, replicas read from the lowest",
    )  # fmt: skip
    yield (
        "mla-gqa-8-4-few", "KVP-PLAN-FEW", (mixed(8), mixed(4)), ["FEW_SOURCES"],
        "the same, and at most twice the load",
    )  # fmt: skip
    few = [mixed(8, 61), mixed(3, 61)]
    yield "mla-gqa-8-3-few", "KVP-PLAN-FEW", (few[0], few[1]), ["FEW_SOURCES"], "each sink rank has two runs"
    both = ["SPREAD_ONE", "FEW_SOURCES"]
    yield "mla-gqa-8-3-both", "KVP-PLAN-SPREAD", (few[0], few[1]), both, "SPREAD_ONE decides where both are chosen"
    for replica in (1, 2, 7):
        yield (
            f"mla-gqa-8-4-replica-{replica}", EXACT, (mixed(8), mixed(4, replica=replica)), [],
            "another sink replica starts its deal elsewhere",
        )  # fmt: skip
    yield "mla-16-1", EXACT, (mixed(16), mixed(1)), [], "a replicated latent was written by every rank that holds it"
    yield "mla-1-16", EXACT, (mixed(1), mixed(16)), [], "one source, many sinks"


def _head_counts() -> Iterator[Case]:
    """Numbers of heads and ranks that do not divide each other."""
    for number, d, p in ((12, 4, 6), (6, 2, 3), (12, 3, 4), (24, 4, 6), (12, 6, 4), (6, 3, 2), (12, 4, 3), (24, 6, 4)):
        yield (
            f"heads-{number}-{p}-{d}", EXACT, (gqa_engine(number, p), gqa_engine(number, d)), [],
            "ranks that do not divide: heads were dropped, or a key was missing",
        )  # fmt: skip
    for number, p, d in ((5, 3, 2), (7, 2, 5), (9, 4, 6), (2, 8, 4), (2, 4, 8), (1, 8, 3), (3, 8, 5), (4, 16, 1)):
        yield (
            f"heads-{number}-{p}-{d}", EXACT, (gqa_engine(number, p), gqa_engine(number, d)), [],
            "uneven shares; more ranks than heads, replicated in consecutive runs",
        )  # fmt: skip


def _stages() -> Iterator[Case]:
    """Pipeline stages that do not match."""
    yield (
        "stages-7-8", EXACT, (stages([7, 8]), stages([15])), [],
        "uneven stages: V of layer 0 was written over K of the last",
    )  # fmt: skip
    yield "stages-8-7-to-5-5-5", EXACT, (stages([8, 7]), stages([5, 5, 5])), [], "stages that do not match"
    yield "stages-to-more", EXACT, (stages([15]), stages([4, 4, 4, 3])), [], "one rank to four stages"


def _drafts() -> Iterator[Case]:
    """Drafts that one side lacks."""
    draft_more = engine((gqa(0, "target", 0, 2, 128, 16), 2, None), (gqa(1, "draft", 1, 2, 128, 16), 2, None), ranks=1)
    yield (
        "draft-of-decode-alone", "KVP-PLAN-FIT", (gqa_engine(2, 1), draft_more), [],
        "V of the target was written over K of the draft",
    )  # fmt: skip
    yield (
        "draft-cold", "KVP-PLAN-COLD", (gqa_engine(2, 1), draft_more), ["COLD_DRAFT"],
        "both agreed that the draft starts cold",
    )  # fmt: skip
    alone = gqa_engine(2, 1)
    yield (
        "draft-of-no-rank", "KVP-PLAN-FIT", (attrs.evolve(alone, groups=draft_more.groups), draft_more), [],
        "a part that the source states and no rank of it owns is one that it lacks",
    )  # fmt: skip
    yield (
        "draft-cold-unowned", "KVP-PLAN-COLD", (alone, attrs.evolve(alone, groups=draft_more.groups)), ["COLD_DRAFT"],
        "a draft that no sink rank owns anything of does not start at all",
    )  # fmt: skip
    ordered = attrs.evolve(alone.groups[0], order=np.array([1, 0, 5], dtype=np.uint32))
    yield (
        "order-of-no-deal", "KVP-DCP-ONE", (attrs.evolve(alone, groups=(ordered,)), alone), [],
        "one cp rank has all tokens, whatever order it states",
    )  # fmt: skip
    yield "draft-of-prefill-alone", EXACT, (draft_more, gqa_engine(2, 1)), [], "what the sink does not have is not sent"


def _models() -> Iterator[Case]:
    """Well-known models, and deals of their tokens."""
    for name, sizes in (
        ("deepseek-v3-eagle3", (8, 4)),
        ("deepseek-v3-nextn", (8, 2)),
        ("llama-3-70b", (8, 4)),
        ("qwen3-235b-a22b", (8, 16)),
    ):
        config, *drafts = PRESETS[name]
        small = [{**c, "num_hidden_layers": min(int(c["num_hidden_layers"]), 6)} for c in (config, *drafts)]
        pair = tuple(describe(small[0], small[1:], Parallel(tp=tp)) for tp in sizes)
        yield f"{name}-{sizes[0]}-{sizes[1]}", EXACT, (pair[0], pair[1]), [], "a well-known shape, six layers of it"
    assert draft_of(PRESETS["deepseek-v3"][0])
    hybrid = {
        **PRESETS["nemotron-h-8b"][0], "hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 4,
        "n_groups": 1, "ssm_state_size": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    for p, d in ((4, 2), (2, 4), (3, 2)):
        pair_ = describe(hybrid, (), Parallel(tp=p)), describe(hybrid, (), Parallel(tp=d))
        yield (
            f"mamba2-one-group-{p}-{d}", EXACT, pair_, [],
            "x of the conv state is cut by heads, B and C of the one group are on every rank",
        )  # fmt: skip
    for deal, other in (
        ((2, 4, 16), (8, 2, 1)),
        ((1, 4, 4), (2, 2, 6)),
        ((1, 3, 2), (1, 1, 1)),
        ((1, 1, 1), (4, 4, 1)),
    ):
        config = {**PRESETS["deepseek-v3"][0], "num_hidden_layers": 2}
        source = describe(config, (), Parallel(tp=deal[0], cp=deal[1], interleave=deal[2]))
        sink = describe(config, (), Parallel(tp=other[0], dcp=other[1], interleave=other[2]))
        yield (
            f"cp-{deal[1]}x{deal[2]}-dcp-{other[1]}x{other[2]}", EXACT, (source, sink), [],
            "tokens dealt over ranks on both sides, interleaves apart",
        )  # fmt: skip


def _kinds() -> Iterator[Case]:
    """Rings, rows of several tokens, hand-offs, and other axes than tokens."""
    ring = attrs.evolve(gqa(0, "window", 0, 2, 64, 8), kind=ItemKind.RING)
    yield (
        "ring-8-16", EXACT, (engine((ring, 2, None), ranks=1), engine((attrs.evolve(ring, rows=16), 2, None), ranks=2)),
        [], "each side states its own ring",
    )  # fmt: skip
    compressed = [
        attrs.evolve(
            mla(i, f"c{step}", 0, 576, 64),
            tokens_per_row=step,
            parts=(Part(name=f"c{step}", dtype=DType.BF16, lanes=1, lane_bytes=576),),
        )
        for i, step in enumerate((4, 128))
    ]
    four, two = (engine(*((g, 2, None) for g in compressed), ranks=n) for n in (4, 2))
    yield "compressed-4-128", EXACT, (four, two), [], "rows that cover 4 and 128 tokens"
    fine = attrs.evolve(gqa(0, "target", 0, 8, 32, 16))
    yield (
        "lanes-cut-finer", EXACT, (engine((fine, 2, heads(8, 4)), ranks=4), gqa_engine(2, 2)), [],
        "one side's lane is four of the other's",
    )  # fmt: skip
    first = handoff(1, "first token", {"token": (DType.U32, 4)})
    with_first = [engine((gqa(0, "target", 0, 2, 128, 16), 2, heads(2, n)), (first, 1, None), ranks=n) for n in (2, 1)]
    yield (
        "hand-off", EXACT, (with_first[0], with_first[1]), [],
        "first tokens are a group: they make a route of their own",
    )  # fmt: skip
    for axis, tp, dcp in (("image", 2, 1), ("audio", 4, 2)):
        caches = [
            Cache.gqa("self", 4, kv_heads=4, head_dim=64, page=16),
            Cache.cross("cross", [1, 3], kv_heads=4, head_dim=64, page=8, axis=axis),
            Cache.encoder("encoder", dim=256, page=1, axis=axis),
        ]
        pair = lay_out(caches, Parallel(tp=4)), lay_out(caches, Parallel(tp=tp, dcp=dcp, interleave=4))
        yield f"cross-4-{tp}-{axis}", EXACT, pair, [], "K and V of what an encoder saw are dealt over no tokens"
    images, sounds = (lay_out([Cache.encoder("encoder", dim=256, page=1, axis=axis)]) for axis in ("image", "audio"))
    yield "refused-axes", "KVP-PLAN-FIT", (images, sounds), [], "positions of images to those of sound"


def _lanes() -> Iterator[Case]:
    """Lanes in another order, and element types that neither side knows."""
    swapped = engine((gqa(0, "target", 0, 4, 128, 16), 2, None), ranks=1)
    share = swapped.ranks[0].owns[0]
    order = tuple(LaneSpan(part=p, lo=lo, hi=hi) for p in (0, 1) for lo, hi in ((2, 4), (0, 2)))
    swapped = attrs.evolve(swapped, ranks=(Rank(rank=0, owns=(attrs.evolve(share, lanes=order),)),))
    yield (
        "lanes-in-another-order", EXACT, (gqa_engine(4, 2), swapped), [],
        "where a rank stores its heads is not which heads they are",
    )  # fmt: skip
    later = attrs.evolve(gqa(0, "target", 0, 2, 128, 16), parts=_parts(dtype=77))
    note = "bytes of an element type that neither side knows are bytes"
    yield (
        "dtype-unknown", "KVP-PLAN-FIT", (engine((later, 2, None), ranks=2), engine((later, 2, None), ranks=1)), [],
        note,
    )  # fmt: skip


def _refusals() -> Iterator[Case]:
    """Groups that differ in one field."""
    for id_, clause, change, note in (
        ("kind", "KVP-PLAN-FIT", {"kind": ItemKind.SLOT}, "pages to a slot"),
        ("axis", "KVP-PLAN-FIT", {"axis": "image"}, "tokens to positions of images"),
        ("step", "KVP-PLAN-FIT", {"tokens_per_row": 4}, "rows that cover other numbers of tokens"),
        ("dtype", "KVP-PLAN-FIT", {"parts": _parts(dtype=DType.F16)}, "bf16 to f16: equal bytes, another meaning"),
        (
            "dtype-unknown",
            "KVP-PLAN-FIT",
            {"parts": _parts(dtype=77)},
            "an element type of a later version is not ours",
        ),
        ("lanes", "KVP-PLAN-FIT", {"parts": _parts(lanes=3)}, "another model's number of heads"),
        ("encoding", "KVP-PLAN-OPAQUE", {"parts": _parts(encoding="tiled.16x64")}, "a tiled layout to a plain one"),
        (
            "part",
            "KVP-PLAN-FIT",
            {"parts": (*_parts(), Part(name="scale", dtype=DType.F32, lanes=1, lane_bytes=4))},
            "scales that prefill does not keep",
        ),
    ):
        odd = attrs.evolve(gqa(0, "target", 0, 2, 128, 16, dtype=DType.BF16), **change)
        plain = gqa(0, "target", 0, 2, 128, 16, dtype=DType.BF16)
        yield f"refused-{id_}", clause, (engine((plain, 2, None), ranks=1), engine((odd, 2, None), ranks=1)), [], note


def _two_faults() -> Iterator[Case]:
    """Groups that differ in two fields: the first of the table of planning.md is the one that is named."""
    plain = gqa(0, "target", 0, 2, 128, 16, dtype=DType.BF16)
    slot = attrs.evolve(plain, kind=ItemKind.SLOT)
    thirds, halves = (_parts(lanes=lanes, lane_bytes=size) for lanes, size in ((3, 64), (2, 96)))
    for id_, first, source, sink in (
        ("kind-and-axis", "kind", slot, {"axis": "image"}),
        ("axis-and-dtype", "axis", plain, {"axis": "image", "parts": _parts(dtype=DType.F16)}),
        ("dtype-and-lanes", "dtype", plain, {"parts": _parts(dtype=DType.F16, lanes=3)}),
        ("lanes-and-step", "lanes", plain, {"parts": _parts(lanes=3), "tokens_per_row": 4}),
        ("step-and-live-rows", "step", slot, {"kind": ItemKind.SLOT, "tokens_per_row": 4, "live_rows": 2}),
        ("step-and-partial", "step", plain, {"tokens_per_row": 4, "partial": True}),
        ("live-rows-and-fold", "live rows", attrs.evolve(slot, parts=thirds),
         {"kind": ItemKind.SLOT, "live_rows": 2, "parts": halves}),
        ("partial-and-fold", "partial", attrs.evolve(plain, parts=thirds), {"partial": True, "parts": halves}),
    ):  # fmt: skip
        pair = engine((source, 2, None), ranks=1), engine((attrs.evolve(plain, **sink), 2, None), ranks=1)
        yield f"refused-{id_}", "KVP-PLAN-FIT", pair, [], f"{first} comes first"


def _opaque() -> Iterator[Case]:
    """Parts in layouts that only their engine knows."""
    tiled = [
        attrs.evolve(g, parts=tuple(attrs.evolve(p, encoding="tiled.4") for p in g.parts))
        for g in (gqa(0, "target", 0, 4, 128, 16), gqa(0, "target", 0, 2, 128, 16))
    ]
    alike = [engine((tiled[0], 2, heads(4, n)), ranks=n) for n in (2, 2, 1)]
    yield "opaque-alike", EXACT, (alike[0], alike[1]), [], "tiled pages move whole between ranks that divide alike"
    yield (
        "opaque-families", EXACT,
        (engine((tiled[1], 4, heads(2, 4)), ranks=4), engine((tiled[1], 4, heads(2, 2)), ranks=2)), [],
        "replicas of an opaque share are its family",
    )  # fmt: skip
    yield "refused-opaque-share", "KVP-PLAN-OPAQUE", (alike[0], alike[2]), [], "half a tile is no tile"


def _misfits() -> Iterator[Case]:
    """Lanes, layers, heads and facts of one side that the other cannot match."""
    thirds = attrs.evolve(
        gqa(0, "target", 0, 3, 64, 16), parts=tuple(Part(name=n, dtype=DType.F32, lanes=3, lane_bytes=64) for n in "kv")
    )
    halves = attrs.evolve(thirds, parts=tuple(Part(name=n, dtype=DType.F32, lanes=2, lane_bytes=96) for n in "kv"))
    yield (
        "refused-fold", "KVP-PLAN-FIT", (engine((thirds, 1, None), ranks=1), engine((halves, 1, None), ranks=1)), [],
        "lanes of 64 and 96 bytes",
    )  # fmt: skip
    yield "refused-layer", "KVP-PLAN-FIT", (gqa_engine(2, 1, 2), gqa_engine(2, 1, 3)), [], "a layer more at the sink"
    part_of = engine((gqa(0, "target", 0, 2, 128, 16), 2, lambda rank: [(0, 1)]), ranks=1)
    yield (
        "refused-layer-before-coverage", "KVP-PLAN-FIT",
        (engine((gqa(0, "target", 0, 2, 128, 16), 2, lambda rank: [(0, 1)]), ranks=1), gqa_engine(2, 1, 3)), [],
        "all layers are compared before any is cut",
    )  # fmt: skip
    yield "refused-coverage", "KVP-PLAN-COVER", (part_of, gqa_engine(2, 1)), [], "a head that no rank states"
    named = [
        attrs.evolve(gqa_engine(2, 1), facts=facts(f))
        for f in ({"rope": "1e6"}, {"rope": "1e4"}, {"rope": "1e6", "adapter": "a"})
    ]
    yield "refused-fact", "KVP-GEO-FACT", (named[0], named[1]), [], "another rope base: fluent, and wrong"
    yield "refused-fact-absent", "KVP-GEO-FACT", (named[0], named[2]), [], "a fact that one side lacks differs"


def _left() -> Iterator[Case]:
    """Layers of which the sink takes some parts and leaves others."""
    clause = "KVP-PLAN-LEFT"
    shape: dict[str, Any] = {"kv_heads": 4, "head_dim": 64, "page": 16, "dtype": DType.F8E4M3}

    def side(block: int | None, *more: Cache, layers: Any = (0, 1), model: int = 0, tp: int = 1) -> Geometry:
        return lay_out([Cache.gqa("cache", layers, scale_block=block, model=model, **shape), *more], Parallel(tp=tp))

    both, bare = side(64, tp=2), side(None)
    pages = Cache.page_scales("page scales", 2, kv_heads=4, page=16)
    apart = Cache.paged("scales", 2, parts={f"{n}_scale": (DType.F32, 4, 4) for n in "kv"}, page=16)
    some = Cache.paged("scales", [0], parts={f"{n}_scale": (DType.F32, 4, 4) for n in "kv"}, page=16)
    target = Cache.gqa("target", 2, **shape)
    drafts = [side(block, target, layers=1, model=1) for block in (64, None)]
    cold = ["COLD_DRAFT"]
    yield "scales-alike", clause, (both, side(64)), [], "a scale for each token and head, behind its values"
    yield "scales-apart", clause, (both, side(None, apart)), [], "the sink has its scales in a group of their own"
    yield "refused-scales-of-values", clause, (both, bare), [], "values without the scales that make them numbers"
    yield "refused-scales-of-pages", clause, (side(None, pages), bare), [], "scales of pages, which the sink leaves"
    yield "refused-scales-of-a-layer", clause, (both, side(None, some)), [], "the scales of one layer of two"
    yield "scales-of-a-layer", clause, (side(None, some), side(None, some)), [], "what the source lacks, nobody is owed"
    yield "refused-scales-of-a-draft", clause, (drafts[0], drafts[1]), cold, "a draft that has its cache is not cold"

    yield from _left_by_name()
    first, more = (
        Cache.handoff("first", {"token": (DType.I32, 4)}),
        Cache.handoff("first", {"token": (DType.I32, 4), "acme.seed": (DType.I64, 8)}),
    )
    kv = Cache.gqa("cache", 1, **shape)
    draft = attrs.evolve(kv, group=attrs.evolve(kv.group, name="draft", model=1))
    for id_, left, right, note in (
        ("left-hand-off", [kv, more], [kv, first], "hand-off data that the sink does not ask for"),
        ("left-for-hand-off", [kv, first], [first], "hand-off data alone, beside no cache"),
        ("left-of-a-draft", [kv, draft], [kv], "a draft is another model"),
    ):
        yield id_, clause, (lay_out(left), lay_out(right)), [], note


def _left_by_name() -> Iterator[Case]:
    """Parts that the sink leaves, each in a group of its own."""
    clause = "KVP-PLAN-LEFT"

    def one(parts: str, layers: Any = (0, 1), without: str = "") -> Geometry:
        """A group of each part, "x" being a vendor's."""
        names = [{"x": "acme.x"}.get(name, name) for name in parts.split()]
        caches = [Cache.paged(n, layers, parts={n: (DType.U8, 1, 8)}, page=4) for n in names]
        return attrs.evolve(lay_out(caches), without=tuple(without.split()) or None)

    for id_, source, sink, note in (
        ("refused-left-v", "k v", one("k"), "K without V"),
        ("refused-left-k", "k v", one("v"), "V without K"),
        ("refused-left-index", "latent index", one("latent"), "sparse attention without what it chooses by"),
        ("refused-left-latent", "latent window_latent", one("window_latent"), "one of two latents of a layer"),
        ("refused-left-vendor", "k v x", one("k v"), "a part of which nobody knows whether it is needed"),
        ("refused-left-alias", "k v key_scale", one("k v"), "scales by another name"),
        ("left-layers", "k v", one("k v", layers=[1]), "a layer of which the sink takes nothing"),
        ("left-without", "k v", one("k", without="v"), "K that is also V, as the sink says"),
        ("left-without-two", "k v x", one("k", without="acme.x v"), "names in any order"),
        ("left-without-nothing", "k", one("k", without="v"), "a name of what the source does not have"),
        ("left-without-taken", "k v", one("k v", without="v"), "a name of what the sink takes"),
        ("refused-left-other", "k v x", one("k", without="v"), "one that is named and one that is not"),
        ("refused-left-by-alias", "k v", one("k", without="value"), "an alias is not the name"),
        ("left-optional", "k v hidden_rows embedding", one("k v"), "rows for a draft that the sink does not have"),
        ("left-optional-alias", "k v aux_hidden_states", one("k v"), "the same by an alias"),
        ("left-beside-optional", "k v hidden_rows", one("hidden_rows"), "rows for a draft, and no cache"),
    ):
        yield id_, clause, (one(source), sink), [], note
    asks, takes = one("k v", without="v"), one("k v")
    yield "without-of-a-source", clause, (asks, takes), [], "a sink's wish means nothing of a source"


def _parts(**changes: Any) -> tuple[Part, ...]:
    return tuple(attrs.evolve(p, **changes) for p in gqa(0, "target", 0, 2, 128, 16, dtype=DType.BF16).parts)


FILES: dict[str, Callable[[], Iterator[Case]]] = {
    "plan.json": cases,
    "deals.json": deals_vectors.cases,
    "conversion.json": conversion_vectors.cases,
}


def row(id: str, clause: str, pair: Pair, features: list[str], note: str) -> dict[str, Any]:
    """A case, with what the suite's own planner makes of it."""
    source, sink = map(to_json, pair)
    try:
        expected: dict[str, Any] = {"expected": plan(source, sink, features)}
    except Refusal as refusal:
        expected = {"error": refusal.code, "path": refusal.path}
    given = {"source": source, "sink": sink, "features": features}
    return {"id": id, "clause": clause, **given, **beyond(source, sink), **expected, "note": note}


def made(file: str) -> str:
    """The text of a file."""
    return text("plan", (row(*case) for case in FILES[file]()))


if __name__ == "__main__":
    for file in FILES:
        (FOLDER / file).write_text(made(file))
