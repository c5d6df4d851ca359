"""Makes vectors/tiers.json by the suite's own `tiers`: `python -m kvproto_conformance.tiers_vectors`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvproto.planning.cache import Cache
from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Parallel, lay_out
from kvproto.wire import to_json
from kvproto_conformance import tiers
from kvproto_conformance.suites import MADE, text

FILE = MADE / "tiers.json"

Json = dict[str, Any]
LLAMA = {"weights.target": "8c22764a7e3675c5", "rope.target": "500000 llama3 8", "dtype.target": "BF16"}
DRAFT = LLAMA | {"weights.draft": "f23ba1c0", "rope.draft": "500000", "dtype.draft": "BF16"}
SPACES = {
    "target": (LLAMA, "a target alone"),
    "draft": (DRAFT, "the same with a draft"),
    "adapter": (LLAMA | {"adapter": "9f86d081884c7d65"}, "an adapter"),
    "salt": (LLAMA | {"salt": "Mieter Ä"}, "a tenant, in UTF-8"),
    "salt-empty": (LLAMA | {"salt": ""}, "an empty value is not an absent one"),
    "order": ({"b": "1", "a": "22", "ab": "3"}, "ascending bytes of names, not of entries"),
    "split": ({"a": "b", "c": ""}, "lengths keep names and values apart"),
}
CHAINS: dict[str, tuple[str, int, list[int], str]] = {
    "none": ("target", 4, [1, 2, 3], "no page is whole"),
    "one": ("target", 4, [1, 2, 3, 4], "a page whose next token is not known has no AHEAD id"),
    "two": ("draft", 4, [1, 2, 3, 4, 5, 6, 7, 8, 9], "two pages, and the token after them"),
    "fork": ("draft", 4, [1, 2, 3, 4, 6], "another token after page 0: the same OWN id, another AHEAD id"),
    "page-of-1": ("target", 1, [7, 7, 7], "equal tokens at other places have other ids"),
    "page-of-8": ("target", 8, [1, 2, 3, 4, 5, 6, 7, 8], "the page length is in the id"),
    "tenant": ("salt", 4, [1, 2, 3, 4, 5], "another namespace"),
    "wide": ("target", 2, [2**32, 2**64 - 1, 0], "ids of images and the like, beyond 32 bits"),
}


def _geometries() -> Iterator[tuple[str, Geometry, int, str]]:
    """id, Description, tokens of a page, note."""
    both = [
        Cache.mla("target", 3, latent=512, rope=64, page=16),
        Cache.gqa("draft", 1, kv_heads=8, head_dim=64, page=16, model=1),
    ]
    yield "tp-1", lay_out(both), 32, "a latent of three layers, and a draft of eight heads"
    yield "tp-2", lay_out(both, Parallel(tp=2)), 32, "two ranks own half of the draft's heads each"
    yield "pages-of-64", lay_out([Cache.mla("target", 3, latent=512, rope=64, page=64)]), 64, "one component"
    state = Cache.mamba2("state", 2, heads=4, head_dim=8, groups=1, state=16, kernel=4)
    yield (
        "hybrid", lay_out([Cache.gqa("target", [2], kv_heads=2, head_dim=8, page=16), *state]), 16,
        "states of two layers",
    )  # fmt: skip
    dealt = [Cache.mla("target", 2, latent=512, rope=64, page=16)]
    yield "dcp-2", lay_out(dealt, Parallel(tp=2, dcp=2, interleave=4)), 32, "half of the tokens each"


def _namespaces() -> Iterator[Json]:
    for id, (entries, note) in SPACES.items():
        yield {
            "id": f"namespace-{id}", "clause": "KVP-TIER-NAMESPACE", "entries": entries,
            "namespace": tiers.namespace(entries).hex(), "note": note,
        }  # fmt: skip


def _chains() -> Iterator[Json]:
    for id, (name, page, tokens, note) in CHAINS.items():
        space = tiers.namespace(SPACES[name][0])
        ids = tiers.page_ids(space, page, tokens)
        yield {
            "id": f"ids-{id}", "clause": "KVP-TIER-ID", "namespace": space.hex(), "page": str(page),
            "tokens": [str(t) for t in tokens],
            "own": [x.hex() for x in ids["OWN"]], "ahead": [x.hex() for x in ids["AHEAD"]], "note": note,
        }  # fmt: skip


def _described() -> Iterator[Json]:
    for id, made, page, note in _geometries():
        form = to_json(made)
        for rank in range(len(made.ranks)):
            yield {
                "id": f"geometry-{id}-rank-{rank}", "clause": "KVP-TIER-GEOMETRY", "geometry": form, "rank": str(rank),
                "page": str(page), "digest": tiers.geometry_digest(form, rank).hex(),
                "lengths": {g: str(n) for g, n in tiers.length_of(form, rank, page).items()}, "note": note,
            }  # fmt: skip


def asked() -> Json:
    """The request of a reader of page 1 of a prompt: a target, a draft, a window and a state."""
    space = tiers.namespace(DRAFT)
    ids = tiers.page_ids(space, 4, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    parts: list[Json] = [
        {"group": "0", "form": "OWN", "rule": "PREFIX", "length": "8"},
        {"group": "1", "form": "AHEAD", "rule": "PREFIX", "length": "4"},
        {"group": "2", "form": "OWN", "rule": "WINDOW", "reach": "6", "length": "2"},
        {"group": "5", "form": "OWN", "rule": "STATE", "length": "3"},
    ]
    return {
        "id": ids["AHEAD"][1].hex(), "form": "AHEAD", "own": ids["OWN"][1].hex(), "previous": ids["OWN"][0].hex(),
        "namespace": space.hex(), "page": "4", "geometry": "11" * 32, "components": parts,
    }  # fmt: skip


def _manifests() -> Iterator[Json]:
    want = asked()
    objects = {part["group"]: bytes(range(int(part["length"]))) for part in want["components"]}
    whole = tiers.manifest(want, objects)
    other = "22" * 32
    changed: dict[str, tuple[str, bytes, str]] = {
        "whole": ("KVP-TIER-MISS", whole, "all four components"),
        "prefixes": ("KVP-TIER-ALL", tiers.manifest(want, {g: objects[g] for g in "01"}), "neither window nor state"),
        "no-draft": ("KVP-TIER-PARTS", tiers.manifest(want, {g: objects[g] for g in "025"}), "the draft is missing"),
        "no-target": ("KVP-TIER-PARTS", tiers.manifest(want, {g: objects[g] for g in "125"}), "the target is missing"),
        "empty": ("KVP-TIER-MISS", b"", "no bytes"),
        "torn": ("KVP-TIER-MISS", whole[:-1], "the last byte is missing"),
        "long": ("KVP-TIER-MISS", whole + b"\0", "a byte too many"),
    }
    for name, value in (
        ("id", other),
        ("form", "OWN"),
        ("own", other),
        ("previous", other),
        ("namespace", other),
        ("page", "8"),
        ("geometry", other),
    ):
        changed[name] = ("KVP-TIER-MISS", tiers.manifest({**want, name: value}, objects), f"another {name}")
    for name, at, value in (
        ("form", 1, "OWN"),
        ("rule", 3, "PREFIX"),
        ("reach", 2, "7"),
        ("length", 0, "9"),
        ("group", 3, "6"),
    ):
        parts = [dict(part) for part in want["components"]]
        parts[at][name] = value
        named = {part["group"]: objects[was["group"]] for part, was in zip(parts, want["components"], strict=True)}
        changed[f"component-{name}"] = (
            "KVP-TIER-PARTS",
            tiers.manifest({**want, "components": parts}, named),
            f"a component of another {name}",
        )
    for id, (clause, data, note) in changed.items():
        yield {
            "id": f"manifest-{id}", "clause": clause, "asked": want, "bytes": data.hex(), "absent": tiers.absent(want, data), "note": note,
        }  # fmt: skip


def _lengths() -> Iterator[Json]:
    prefix, window, state = asked()["components"][0], asked()["components"][2], asked()["components"][3]
    all_ = [1] * 6
    cases: dict[str, tuple[list[Json], list[dict[str, list[int]]], str]] = {
        "one-rank": ([prefix], [{"0": [1, 1, 1, 0, 1, 1]}], "a page is missing: those after it do not count"),
        "min": ([prefix], [{"0": all_}, {"0": [1, 1, 0, 0, 0, 0]}], "the shorter of two ranks"),
        "window": ([prefix, window], [{"0": all_, "2": [0, 0, 1, 1, 0, 0]}], "6 tokens are two pages of 4"),
        "window-early": ([prefix, window], [{"0": all_, "2": [1, 0, 0, 0, 0, 1]}], "at the beginning a window is shorter"),
        "state": ([prefix, state], [{"0": all_, "5": [0, 1, 0, 0, 1, 0]}], "the state after page 4"),
        "state-cut": ([prefix, state], [{"0": [1, 1, 1, 0, 0, 0], "5": [0, 1, 0, 0, 1, 0]}], "a state beyond the prefix"),
        "states-apart": ([prefix, state], [{"0": all_, "5": [0, 0, 0, 1, 0, 0]}, {"0": all_, "5": [0, 0, 0, 0, 1, 0]}], "ranks can use 4 and 5: none of them together"),
        "states-meet": ([prefix, state], [{"0": all_, "5": [1, 0, 0, 1, 0, 0]}, {"0": all_, "5": [1, 0, 0, 0, 1, 0]}], "the greatest of each is not the greatest of both"),
        "both": ([prefix, window, state], [{"0": all_, "2": [0, 1, 1, 1, 0, 0], "5": [0, 0, 1, 0, 0, 1]}], "a window and a state"),
        "none": ([prefix, state], [{"0": all_, "5": [0] * 6}], "no state at all"),
    }  # fmt: skip
    for id, (parts, ranks, note) in cases.items():
        yield {
            "id": f"length-{id}", "clause": "KVP-TIER-LENGTH", "page": "4", "parts": parts, "ranks": ranks,
            "usable": str(tiers.lengths(4, parts, ranks)), "note": note,
        }  # fmt: skip


def made() -> str:
    """The text of the file."""
    return text("tiers", [*_namespaces(), *_chains(), *_described(), *_manifests(), *_lengths()])


if __name__ == "__main__":
    FILE.write_text(made())
