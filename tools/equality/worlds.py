"""Pairs of Descriptions in JSON form that no constructor of ours would make, and what may be wrong with one.

A world is some caches that both sides hold, and of each side a way to group, cut, deal and own them. Sizes are small and
odd, so that every rule of planning has a say; what is put out of order is chosen after that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import attrs

Json = dict[str, Any]
_NAMES = (
    "k", "v", "k_scale", "v_scale", "latent", "k_pe", "index", "conv", "ssm", "ngram", "embedding", "hidden_rows", "x",
    "\N{GREEK SMALL LETTER KAPPA}", "y.z",
)  # fmt: skip
_DTYPES = "U8", "BF16", "F8E4M3", "I32", "F4E2M1"
_FEATURES = "SPREAD_ONE", "FEW_SOURCES", "COLD_DRAFT"
_EDGES = (
    0, 1, 2, 3, 7, 255, 256, 512, 4096, 8192, 65535, 65536, 131072, 1048576, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1,
)  # fmt: skip


@attrs.frozen
class Cache:
    """Parts of some layers that both sides hold, with what they have to agree on."""

    model: int
    kind: str
    parts: tuple[tuple[str, str, int, str | None], ...]
    """Name, dtype, bytes of all lanes, encoding."""
    layers: tuple[int, ...]
    tokens: int
    """Of a row."""
    partial: bool
    live: int
    axis: str | None
    rows: int
    """Of an item, if a part has an encoding."""
    shape: int
    """The seed of what both sides mostly divide alike, if a part has an encoding."""
    lanes: tuple[int, ...]
    """Numbers of lanes, each of which divides the next."""


def world(rng: random.Random, right: bool = False) -> Json:
    """A question of op `plan`: two sides of the same caches, of which some have something wrong, or none if `right`."""
    held = list(_caches(rng))
    without = rng.random() < 0.05
    source = _side(rng, [c for c in held if not (c.model and rng.random() < 0.2)] if rng.random() < 0.3 else held)
    sink = _side(rng, rng.sample(held, rng.randint(1, len(held))) if rng.random() < 0.12 else held)
    if without:
        sink["without"] = rng.sample(_NAMES, rng.randint(1, 3))
    if rng.random() < 0.15 and not right:
        _state_facts(rng, source, sink)
    if rng.random() < 0.4 and not right:
        for _ in range(rng.choice([1, 1, 2, 3])):
            spoil(rng, rng.choice([source, sink]))
    features = [name for name in _FEATURES if rng.random() < 0.3]
    return {"op": "plan", "source": source, "sink": sink, "features": features}


def _caches(rng: random.Random) -> Iterator[Cache]:
    names = chain(rng.sample(_NAMES, len(_NAMES)), map(str, count()))
    for model in range(rng.choice([1, 1, 1, 2, 3])):
        for _ in range(rng.choice([1, 1, 2, 3])):
            kind = rng.choice(["PAGE", "PAGE", "PAGE", "RING", "SLOT"])
            encoding = rng.choice(["tiled", "swizzled"]) if rng.random() < 0.15 else None
            size = rng.choice([2, 4, 6, 12, 24, 36])
            lanes = [rng.choice(_divisors(size))]
            while rng.random() < 0.6:
                lanes.append(rng.choice([n for n in _divisors(size) if n % lanes[-1] == 0]))
            parts = tuple(
                (name, rng.choice(_DTYPES), size, encoding if rng.random() < 0.7 else None)
                for name in (next(names) for _ in range(rng.choice([1, 1, 2, 2, 3])))
            )
            layers = tuple(sorted(rng.sample(range(12), rng.choice([1, 2, 3, 5]))))
            tokens = rng.choice([1, 1, 1, 2, 3, 4]) if kind != "SLOT" else 1
            axis = rng.choice(["image", "audio"]) if kind == "PAGE" and rng.random() < 0.1 else None
            yield Cache(
                model, kind, parts, layers, tokens, kind != "SLOT" and rng.random() < 0.2, rng.randint(1, 3), axis, rng.randint(1, 9),
                rng.randrange(1 << 30), tuple(lanes),
            )  # fmt: skip


def _side(rng: random.Random, held: list[Cache]) -> Json:
    ranks = rng.choice([1, 1, 2, 2, 3, 4, 5, 6, 8, 12])
    numbers = sorted(rng.sample(range(rng.choice([ranks, ranks + 3, 400])), ranks))
    ids = iter(sorted(rng.sample(range(64), 48)))
    groups: list[Json] = []
    owns: list[list[Json]] = [[] for _ in numbers]
    for cache in held:
        for parts, layers in _groupings(rng, cache):
            group = _group(rng, cache, parts, next(ids), f"g{len(groups)}")
            groups.append(group)
            for place, share in _shares(rng, cache, group, layers, ranks):
                owns[place].append(share)
    if rng.random() < 0.3:
        group = _handoff(rng, next(ids))
        groups.append(group)
        lanes: list[Json] = [{"part": str(p), "lo": "0", "hi": "1"} for p in range(len(group["parts"]))]
        for place in rng.sample(range(ranks), rng.randint(1, ranks)):
            owns[place].append({"group": group["id"], "layers": ["0"], "cp_rank": "0", "lanes": lanes})
    rows: list[Json] = [
        {"rank": str(n), "owns": sorted(own, key=lambda one: int(one["group"]))}
        for n, own in zip(numbers, owns, strict=True)
    ]
    return {"replica": str(rng.choice([0, 0, 1, 2, 5, 2**32 - 1])), "facts": [], "groups": groups, "ranks": rows}


def _groupings(rng: random.Random, cache: Cache) -> Iterator[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """The parts and layers of each group of a cache: all, or some."""
    parts = [cache.parts]
    if len(cache.parts) > 1 and rng.random() < 0.3:
        at = rng.randint(1, len(cache.parts) - 1)
        parts = [cache.parts[:at], cache.parts[at:]]
    for some in parts:
        cut = rng.random() < 0.25 and len(cache.layers) > 1
        chosen = [layer for layer in cache.layers if rng.random() < 0.5] if cut else []
        rest = tuple(layer for layer in cache.layers if layer not in chosen)
        for layers in (tuple(chosen), rest):
            if layers:
                yield some, layers


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _group(rng: random.Random, cache: Cache, parts: tuple[Any, ...], id_: int, name: str) -> Json:
    kind = cache.kind
    opaque = any(part[3] for part in parts)
    if opaque and rng.random() < 0.9:
        rng = random.Random(cache.shape)
    if kind != "SLOT" and not opaque and cache.axis is None and rng.random() < 0.15:
        kind = "RING" if kind == "PAGE" else "PAGE"
    made = [one for part in parts for one in _sections(rng, cache, *part)]
    rows = (
        cache.rows
        if opaque
        else cache.live + rng.randint(0, 3)
        if kind == "SLOT"
        else rng.choice([1, 2, 3, 5, 7, 16, 33])
    )
    group: Json = {"id": str(id_), "name": name, "model": str(cache.model), "kind": kind, "rows": str(rows)}
    group |= {"tokens_per_row": str(cache.tokens), "cp_size": "1", "interleave": "1", "origin": "0", "parts": made}
    if kind == "SLOT" and cache.live <= rows:
        group["live_rows"] = str(cache.live)
    if cache.partial:
        group["partial"] = True
    if cache.axis:
        group["axis"] = cache.axis
    if kind == "PAGE" and rng.random() < 0.35:
        cp = rng.choice([2, 2, 3, 4, 5, 8])
        group |= {
            "cp_size": str(cp),
            "interleave": str(cache.tokens * rng.choice([1, 2, 3, 16])),
            "origin": str(cache.tokens * rng.choice([0, 0, 1, 5])),
        }
        if rng.random() < 0.4:
            order = [*range(cp), *(rng.randrange(cp) for _ in range(rng.randint(0, 4)))]
            rng.shuffle(order)
            group["order"] = [str(n) for n in order]
    return group


def _sections(rng: random.Random, cache: Cache, name: str, dtype: str, size: int, encoding: str | None) -> list[Json]:
    """A part by some number of lanes, now and then cut into sections."""
    lanes = rng.choice(cache.lanes if rng.random() < 0.95 else _divisors(size))
    lane = size // lanes
    part = {"name": name, "dtype": dtype, "lanes": str(lanes), "lane_bytes": str(lane)}
    if encoding:
        return [part | {"encoding": encoding}]
    if lane < 2 or rng.random() < 0.8:
        return [part]
    cuts = [0, *sorted(rng.sample(range(1, lane), rng.randint(1, min(3, lane - 1)))), lane]
    return [
        part | {"lane_bytes": str(b - a), "at": str(a), "whole": str(lane)}
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]


def _shares(
    rng: random.Random, cache: Cache, group: Json, layers: tuple[int, ...], ranks: int
) -> Iterator[tuple[int, Json]]:
    """By place of a rank what it owns of a group: stages of layers, times lanes, times tokens, over ranks in any order."""
    cp = int(group["cp_size"])
    stages, wide = 1, 1
    plain = not any("encoding" in part for part in group["parts"])
    if cp > ranks:
        group["cp_size"], cp = "1", 1
        group.pop("order", None)
    while stages * wide * cp <= ranks and rng.random() < 0.6:
        if rng.random() < 0.4 and stages * 2 * wide * cp <= ranks:
            stages = min(len(layers), stages + 1)
        elif stages * (wide + 1) * cp <= ranks and (plain or rng.random() < 0.2):
            wide += 1
    cut = [layers[len(layers) * i // stages : len(layers) * (i + 1) // stages] for i in range(stages)]
    cells = [(some, t, c) for some in cut for t in range(wide) for c in range(cp)]
    places = rng.sample(range(ranks), ranks)
    for i, place in enumerate(places):
        if i >= len(cells) and rng.random() < 0.3:
            continue
        some, t, c = cells[i] if i < len(cells) else rng.choice(cells)
        by = rng if plain else random.Random(cache.shape + t)
        lanes = [span for p, part in enumerate(group["parts"]) for span in _lanes(by, p, int(part["lanes"]), t, wide)]
        if some:
            yield place, {"group": group["id"], "layers": [str(n) for n in some], "cp_rank": str(c), "lanes": lanes}


def _lanes(rng: random.Random, part: int, lanes: int, place: int, wide: int) -> Iterator[Json]:
    lo, hi = lanes * place // wide, max(lanes * (place + 1) // wide, lanes * place // wide + 1)
    if rng.random() < 0.1:
        lo, hi = 0, lanes
    if hi - lo > 1 and rng.random() < 0.1:
        middle = rng.randint(lo + 1, hi - 1)
        spans = [(middle, hi), (lo, middle)]
    else:
        spans = [(lo, hi)]
    for a, b in spans:
        yield {"part": str(part), "lo": str(a), "hi": str(b)}


def _handoff(rng: random.Random, id_: int) -> Json:
    parts: list[Json] = [
        {"name": name, "dtype": "I32", "lanes": "1", "lane_bytes": str(size)}
        for name, size in (("token", 4), ("hidden", 24))
    ]
    return {
        "id": str(id_), "name": "first", "model": "0", "kind": "HANDOFF", "rows": "1", "tokens_per_row": "1", "cp_size": "1",
        "interleave": "1", "origin": "0", "parts": parts[: rng.randint(1, 2)],
    }  # fmt: skip


def _state_facts(rng: random.Random, source: Json, sink: Json) -> None:
    for side in (source, sink):
        names = sorted(
            rng.sample(["model", "rope", "tokenizer", "\N{LATIN SMALL LETTER E WITH ACUTE}"], rng.randint(0, 3))
        )
        side["facts"] = [
            {"name": n, "value": rng.choice("ab"), "rule": rng.choice(["EQUAL", "WARN", "IGNORE"])} for n in names
        ]


def spoil(rng: random.Random, side: Json) -> None:
    """Change one thing somewhere: a number, a list, a name, or whether something is there."""
    place, key = _place(rng, side)
    value = place[key]
    if isinstance(value, list):
        _spoil_list(rng, value)
    elif isinstance(value, dict):
        place[key] = rng.choice([{}, [], "0", value | {"rank": "0"}])
    elif isinstance(value, bool):
        place[key] = not value
    elif isinstance(value, str) and value.isdigit():
        near = int(value) + rng.choice([-1, 1, 1, 2])
        place[key] = str(max(near, 0)) if rng.random() < 0.6 else str(rng.choice(_EDGES))
    elif isinstance(place, dict) and rng.random() < 0.3:
        del place[key]
    else:
        place[key] = rng.choice(
            ["", "k", "v", "key", "RING", "SLOT", "PAGE", "HANDOFF", "BF16", "I64", "tokens", "n" * 64, "n" * 129]
        )
    if isinstance(place, dict) and rng.random() < 0.05:
        place[rng.choice(["x_new", "new", "axis", "order", "live_rows", "whole", "at"])] = rng.choice(
            ["1", "2", "tokens"]
        )


def _place(rng: random.Random, tree: Any) -> tuple[Any, Any]:
    """A container somewhere in a tree, and one of its keys; those of great lists are no more likely than those of small ones."""
    while True:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        inner = tree[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.15:
            return tree, key
        tree = inner


def _spoil_list(rng: random.Random, some: list[Any]) -> None:
    choice = rng.randrange(4)
    if not some:
        some.append("0")
    elif choice == 0:
        del some[rng.randrange(len(some))]
    elif choice == 1:
        some.insert(rng.randrange(len(some) + 1), some[rng.randrange(len(some))])
    elif choice == 2:
        rng.shuffle(some)
    else:
        some[:] = some[: rng.randint(0, len(some))]
