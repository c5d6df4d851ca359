"""Makes plan vectors of Descriptions that contradict themselves: `python -m kvproto_conformance.broken_vectors`.

Each is a valid Description with one thing changed; the path is the one that the table of model.md gives for it.
Next to each kind of fault is the nearest valid case, with the plan that the suite's own planner makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from kvproto_conformance.checking import beyond
from kvproto_conformance.codec.facts import PART_NAMES
from kvproto_conformance.planner import plan
from kvproto_conformance.suites import MADE, text

FILE = MADE / "plan/broken.json"
Json = dict[str, Any]
Edit = Callable[[Json], object]


def _group(id_: int, name: str, model: int, *parts: tuple[str, int, int], **more: Any) -> Json:
    numbers = {"rows": 64, "tokens_per_row": 1, "cp_size": 1, "interleave": 1, "origin": 0}
    made = {"id": str(id_), "name": name, "model": str(model), "kind": "PAGE"} | {k: str(n) for k, n in numbers.items()}
    stated = [{"name": n, "dtype": "BF16", "lanes": str(lanes), "lane_bytes": str(size)} for n, lanes, size in parts]
    return made | {"parts": stated} | more


def _share(group: int, layers: list[int], *spans: tuple[int, int, int]) -> Json:
    lanes = [{"part": str(part), "lo": str(lo), "hi": str(hi)} for part, lo, hi in spans]
    return {"group": str(group), "layers": [*map(str, layers)], "cp_rank": "0", "lanes": lanes}


def good() -> Json:
    """An MLA target of two layers, a GQA draft of one, hand-off data and slots, over two ranks."""
    groups = [
        _group(0, "target", 0, ("latent", 1, 1152)),
        _group(1, "draft", 1, ("k", 8, 256), ("v", 8, 256)),
        _group(2, "first token", 0, ("token", 1, 4), ("score", 1, 4)) | {"kind": "HANDOFF", "rows": "1"},
        _group(3, "state", 2, ("ssm", 1, 64)) | {"kind": "SLOT", "rows": "4", "live_rows": "3"},
    ]
    ranks = [
        {"rank": str(r), "owns": [
            _share(0, [0, 1], (0, 0, 1)), _share(1, [0], (0, 4 * r, 4 * r + 4), (1, 4 * r, 4 * r + 4)),
            _share(2, [0], (0, 0, 1), (1, 0, 1)), _share(3, [0], (0, 0, 1)),
        ]} for r in range(2)
    ]  # fmt: skip
    facts = [{"name": name, "value": "1", "rule": "EQUAL"} for name in ("rope", "weights.target")]
    return {"replica": "0", "facts": facts, "groups": groups, "ranks": ranks}


def _set(path: str, value: Any) -> Edit:
    """Change one thing: `groups.1.parts.0.name`."""

    def edit(side: Json) -> None:
        at: Any = side
        *way, last = path.split(".")
        for word in way:
            at = at[int(word)] if isinstance(at, list) else at[word]
        at[int(last) if isinstance(at, list) else last] = value

    return edit


def _all(*edits: Edit) -> Edit:
    return lambda side: [edit(side) for edit in edits]


def _dealt(cp: int, interleave: int, origin: int = 0, step: int = 1, **more: Any) -> Edit:
    def edit(side: Json) -> None:
        numbers = {"cp_size": cp, "interleave": interleave, "origin": origin, "tokens_per_row": step}
        side["groups"][0] |= {key: str(value) for key, value in numbers.items()} | more

    return edit


def _ranked(*cp: int) -> Edit:
    """The cp rank of each rank's share of the target."""
    return _all(*(_set(f"ranks.{r}.owns.0.cp_rank", str(n)) for r, n in enumerate(cp)))


def _sections(*some: tuple[int, int, int]) -> Edit:
    """The latent in sections: where each begins, its length, and that of the lane, in bytes."""

    def edit(side: Json) -> None:
        (part,) = side["groups"][0]["parts"]
        side["groups"][0]["parts"] = [
            {**part, "lane_bytes": str(size), "at": str(at), "whole": str(whole)} for at, size, whole in some
        ]
        for rank in side["ranks"]:
            rank["owns"][0] = _share(0, [0, 1], *((n, 0, 1) for n in range(len(some))))

    return edit


def _swapped(path: str) -> Edit:
    def edit(side: Json) -> None:
        at: Any = side
        for word in path.split("."):
            at = at[int(word)] if isinstance(at, list) else at[word]
        at[0], at[1] = at[1], at[0]

    return edit


_SPAN = "ranks.0.owns.1.lanes"
BROKEN: list[tuple[str, str, Edit, str, str]] = [
    # id, clause, what is changed, the path, the bug that it guards against
    ("facts-order", "KVP-RULE-BREAK", _swapped("facts"), "facts[1].name", "a digest that depends on a dictionary"),
    ("groups-order", "KVP-RULE-BREAK", _swapped("groups"), "groups[1].id", "a digest that depends on the order of registration"),
    ("groups-twice", "KVP-RULE-BREAK", _set("groups.1.id", "0"), "groups[1].id", "two groups of which one is lost"),
    ("ranks-order", "KVP-RULE-BREAK", _swapped("ranks"), "ranks[1].rank", "ranks by place and not by number"),
    ("ranks-twice", "KVP-RULE-BREAK", _set("ranks.1.rank", "0"), "ranks[1].rank", "two processes that are one rank"),
    ("shares-order", "KVP-RULE-BREAK", _swapped("ranks.1.owns"), "ranks[1].owns[1].group", "shares by place and not by group"),
    ("layers-order", "KVP-RULE-BREAK", _swapped("ranks.0.owns.0.layers"), "ranks[0].owns[0].layers[1]", "layers paired by place, of another pipeline split"),
    ("layers-twice", "KVP-RULE-BREAK", _set("ranks.0.owns.0.layers", ["1", "1"]), "ranks[0].owns[0].layers[1]", "a layer that is sent twice"),
    ("spans-order", "KVP-RULE-BREAK", _swapped(_SPAN), "ranks[0].owns[1].lanes[1].part", "k and v exchanged"),
    ("axis-of-slots", "KVP-RULE-BREAK", _set("groups.3.axis", "image"), "groups[3].axis", "state that is indexed by positions"),
    ("live-rows-of-pages", "KVP-RULE-BREAK", _set("groups.0.live_rows", "64"), "groups[0].live_rows", "a field that means nothing"),
    ("live-rows-above", "KVP-RULE-BREAK", _set("groups.3.live_rows", "5"), "groups[3].rows", "state beyond its slot"),
    ("span-empty", "KVP-RULE-BREAK", _set(f"{_SPAN}.0.lo", "4"), "ranks[0].owns[1].lanes[0].hi", "a rank with no head"),
    ("part-twice", "KVP-GEO-PARTS", _set("groups.1.parts.1.name", "k"), "groups[1].parts[1].at", "two caches of one name, of which one is lost"),
    ("part-two-names", "KVP-PART-TWICE", _all(_set("groups.1.parts.0.name", "k"), _set("groups.1.parts.1.name", "key")), "groups[1].parts", "an alias beside its name"),
    ("part-two-aliases", "KVP-PART-TWICE", _all(_set("groups.1.parts.0.name", "key_cache"), _set("groups.1.parts.1.name", "self_attn.k")), "groups[1].parts", "two aliases of one name"),
    *((f"part-alias-{alias}", "KVP-PART-TWICE", _all(_set("groups.1.parts.0.name", name), _set("groups.1.parts.1.name", alias)), "groups[1].parts", f"{alias} is {name}") for name, some in PART_NAMES.items() for alias in some),
    ("sections-late", "KVP-GEO-SECTIONS", _sections((128, 1024, 1152)), "groups[0].parts[0].at", "the rope that is missing"),
    ("sections-gap", "KVP-GEO-SECTIONS", _sections((0, 512, 1152), (1024, 128, 1152)), "groups[0].parts[1].at", "bytes that nobody moves"),
    ("sections-overlap", "KVP-GEO-SECTIONS", _sections((0, 1024, 1152), (512, 640, 1152)), "groups[0].parts[1].at", "bytes that move twice"),
    ("sections-beyond", "KVP-GEO-SECTIONS", _sections((0, 1024, 1152), (1024, 256, 1152)), "groups[0].parts[1].whole", "a lane that grows"),
    ("sections-short", "KVP-GEO-SECTIONS", _sections((0, 1024, 1152), (1024, 64, 1152)), "groups[0].parts[1].whole", "a lane that shrinks"),
    ("sections-wholes", "KVP-GEO-SECTIONS", _sections((0, 1024, 1152), (1024, 128, 2304)), "groups[0].parts[1].whole", "sections of two lanes"),
    ("sections-dtypes", "KVP-GEO-SECTIONS", _all(_sections((0, 1024, 1152), (1024, 128, 1152)), _set("groups.0.parts.1.dtype", "F16")), "groups[0].parts[1].dtype", "half of a lane of another type"),
    ("sections-lanes", "KVP-GEO-SECTIONS", _all(_sections((0, 1024, 1152), (1024, 128, 1152)), _set("groups.0.parts.1.lanes", "2")), "groups[0].parts[1].lanes", "sections of other heads"),
    ("sections-opaque", "KVP-GEO-SECTIONS", _all(_sections((0, 1024, 1152), (1024, 128, 1152)), _set("groups.0.parts.1.encoding", "tiled")), "groups[0].parts[1].encoding", "a lane that is half opaque"),
    ("partial-slots", "KVP-GEO-PARTIAL", _set("groups.3.partial", True), "groups[3].partial", "a slot moves whole"),
    ("partial-hand-off", "KVP-GEO-PARTIAL", _set("groups.2.partial", True), "groups[2].partial", "hand-off data move whole"),
    ("dealt-slots", "KVP-GEO-DEAL", _set("groups.3.cp_size", "2"), "groups[3].interleave", "state has no tokens to deal"),
    ("dealt-cut", "KVP-GEO-DEAL", _dealt(2, 6, 0, 4), "groups[0].interleave", "a row of which two ranks have a part"),
    ("dealt-bits", "KVP-GEO-DEAL", _dealt(2, 1, 2, 3), "groups[0].interleave", "a check by bits where a division is meant"),
    ("dealt-origin", "KVP-GEO-DEAL", _dealt(2, 4, 2, 4), "groups[0].interleave", "a deal that begins inside a row"),
    ("dealt-long", "KVP-GEO-DEAL", _dealt(2, 1 << 20), "groups[0].cp_size", "a table of one period that needs gigabytes"),
    ("dealt-long-order", "KVP-GEO-DEAL", _dealt(2, 1 << 19, order=["0", "1", "0"]), "groups[0].order", "the same, by its order"),
    ("order-without", "KVP-GEO-ORDERED", _dealt(3, 1, order=["0", "2", "0"]), "groups[0].order", "a rank that owns nothing"),
    ("order-unknown", "KVP-GEO-ORDERED", _dealt(2, 1, order=["0", "2", "1"]), "groups[0].order", "tokens of a rank that there is not"),
    ("share-unknown", "KVP-GEO-GROUP", _set("ranks.0.owns.3.group", "7"), "ranks[0].owns[3].group", "a share of nothing"),
    ("cp-rank", "KVP-GEO-CP", _set("ranks.0.owns.0.cp_rank", "1"), "ranks[0].owns[0].cp_rank", "a rank number in place of a cp rank"),
    ("cp-rank-dealt", "KVP-GEO-CP", _all(_dealt(2, 1), _ranked(0, 2)), "ranks[1].owns[0].cp_rank", "cp ranks that count from 1"),
    ("lanes-beyond", "KVP-GEO-LANES", _set(f"{_SPAN}.1.hi", "9"), "ranks[0].owns[1].lanes[1].hi", "heads that are replicated and counted twice"),
    ("lanes-unknown", "KVP-GEO-LANES", _set(f"{_SPAN}.1.part", "2"), "ranks[0].owns[1].lanes[1].part", "a part by its place in another group"),
    ("lanes-none", "KVP-GEO-LANES", _set(_SPAN, [{"part": "0", "lo": "0", "hi": "4"}]), "ranks[0].owns[1].lanes", "values without keys"),
    ("lanes-overlap", "KVP-GEO-LANES", _set(_SPAN, [{"part": "0", "lo": lo, "hi": hi} for lo, hi in (("2", "5"), ("0", "3"))] + [{"part": "1", "lo": "0", "hi": "4"}]), "ranks[0].owns[1].lanes", "a head that is sent twice"),
    ("hand-off-draft", "KVP-HND-SHAPE", _set("groups.2.model", "1"), "groups[2].kind", "first tokens of a draft"),
    ("hand-off-rows", "KVP-HND-SHAPE", _set("groups.2.rows", "2"), "groups[2].kind", "two rows where there is one"),
    ("hand-off-step", "KVP-HND-SHAPE", _set("groups.2.tokens_per_row", "2"), "groups[2].kind", "a row of two tokens"),
    ("hand-off-lanes", "KVP-HND-SHAPE", _set("groups.2.parts.0.lanes", "2"), "groups[2].kind", "hand-off data that are split by heads"),
    ("hand-off-layer", "KVP-HND-SHAPE", _set("ranks.1.owns.2.layers", ["1"]), "ranks[1].owns[2].layers", "hand-off data of a pipeline stage"),
    ("twins-in-a-rank", "KVP-GEO-DISJOINT", _all(_set("groups.1.model", "0"), _set("groups.1.parts.0.name", "latent")), "ranks[0].owns[1].layers", "one layer with two caches"),
    ("twins-of-two-ranks", "KVP-GEO-DISJOINT", _all(_set("groups.1.model", "0"), _set("groups.1.parts.0.name", "latent"), lambda side: side["ranks"][0]["owns"].pop(1), lambda side: side["ranks"][1]["owns"].pop(0)), "ranks[1].owns[0].layers", "the same, where no rank sees both"),
    ("lanes-of-sections", "KVP-GEO-SIZE", _all(_sections((0, 1024, 1152), (1024, 128, 1152)), *(_set(f"groups.0.parts.{n}.lanes", str(1 << 20)) for n in (0, 1)), _set("ranks.0.owns.0.lanes.0.hi", str(1 << 20))), "ranks", "a small Description that costs much"),
    ("order-beyond", "KVP-GEO-ORDERED", _dealt(2, 1, order=["0", "2"]), "groups[0].order", "as many ranks as there are, of which one is not"),
]  # fmt: skip
TAKEN: list[tuple[str, str, Edit, str]] = [
    # the nearest cases that are valid
    ("as-it-is", "KVP-PLAN-EXACT", lambda side: None, "the Description that the others are made of"),
    ("live-rows-all", "KVP-RULE-BREAK", _set("groups.3.live_rows", "4"), "as many live rows as there are"),
    ("spans-two", "KVP-GEO-LANES", _set(_SPAN, [{"part": "0", "lo": lo, "hi": hi} for lo, hi in (("2", "4"), ("0", "2"))] + [{"part": "1", "lo": "0", "hi": "4"}]), "intervals of one part in any order"),
    ("lanes-replicated", "KVP-GEO-LANES", _all(*(_set(f"ranks.{r}.owns.1.lanes.{p}.{end}", n) for r in (0, 1) for p in (0, 1) for end, n in (("lo", "0"), ("hi", "8")))), "all lanes on both ranks"),
    ("sections-whole", "KVP-GEO-SECTIONS", _sections((0, 1024, 1152), (1024, 128, 1152)), "sections that tile the lane"),
    ("part-vendor", "KVP-PART-TWICE", _set("groups.1.parts.1.name", "acme.key"), "a vendor's name is no alias"),
    ("aliases-apart", "KVP-PART-TWICE", _set("groups.1.parts.0.name", "key"), "an alias without the name that it stands for"),
    ("dealt", "KVP-GEO-DEAL", _all(_dealt(2, 8, 4, 4), _ranked(0, 1)), "interleave and origin in whole rows"),
    ("dealt-longest", "KVP-GEO-DEAL", _all(_dealt(2, 1 << 19), _ranked(0, 1)), "a period as long as may be"),
    ("ordered", "KVP-GEO-ORDERED", _all(_dealt(2, 1, order=["1", "0", "1"]), _ranked(0, 1)), "ranks that come more than once"),
    ("twins-of-two-models", "KVP-GEO-DISJOINT", _set("groups.1.parts.0.name", "latent"), "one part and layer of two models"),
    ("share-left-out", "KVP-GEO-GROUP", lambda side: side["ranks"][0]["owns"].pop(3), "a rank that owns nothing of a group"),
]  # fmt: skip


def made() -> str:
    """The text of the file."""
    named: Json = {"good": good()}
    rows = [row | beyond(named[row["source"]], named[row["sink"]]) for row in _rows(named)]
    return text("plan/broken", rows, geometries=named)


PAIRS = (
    # id, source, sink, clause, the error and its path, the bug that it guards against
    ("both", "cp-rank", "facts-order", "KVP-RULE-BREAK", "BAD_GEOMETRY", "ranks[0].owns[0].cp_rank", "the source's Description comes first"),
    ("alias-of-a-source", "other-name", "good", "KVP-PART-ALIAS", "PART_MISSING", "groups[draft].parts[k]", "a reader that guesses what a name means"),
    ("alias-of-a-sink", "good", "other-name", "KVP-PART-ALIAS", "PART_MISSING", "groups[draft].parts[key]", "the same, the other way round"),
    ("class-pairs-too-many", "class-pairs", "class-pairs-less", "KVP-PLAN-DEALS", "ROW_MISMATCH", "groups[target].cp_size", "two small Descriptions whose plan needs gigabytes"),
)  # fmt: skip


def _rows(named: Json) -> Iterator[Json]:
    for n, (id_, clause, edit, path, note) in enumerate(BROKEN):
        named[id_] = _edited(edit)
        pair = (id_, "good") if n % 2 else ("good", id_)
        yield _row(id_, clause, *pair, note, error="BAD_GEOMETRY", path=path)
    named["other-name"] = _edited(_set("groups.1.parts.0.name", "key"))
    named["class-pairs"] = _edited(_dealt(1024, 1))
    named["class-pairs-less"] = _edited(_dealt(65, 1))
    for id_, source, sink, clause, code, path, note in PAIRS:
        yield _row(id_, clause, source, sink, note, error=code, path=path)
    for id_, clause, edit, note in TAKEN:
        side = named.setdefault(id_, _edited(edit))
        expected = {key: value for key, value in plan(side, side).items() if key != "routes"}
        yield _row(id_, clause, id_, id_, note, expected=expected)


def _row(id_: str, clause: str, source: str, sink: str, note: str, **found: Any) -> Json:
    given = {"id": id_, "clause": clause, "source": source, "sink": sink, "features": []}
    return {**given, **found, "note": note}


def _edited(edit: Edit) -> Json:
    side = deepcopy(good())
    edit(side)
    return side


if __name__ == "__main__":
    FILE.write_text(made())
