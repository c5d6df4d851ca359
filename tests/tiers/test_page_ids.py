"""Ids, geometry digests, manifests and lengths: the committed vectors, what the suite says of them, and kvproto."""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto import Cache, Parallel, lay_out
from kvproto.errors import LocalError, PlanError
from kvproto.tiers.index import Index
from kvproto.tiers.manifest import make_manifest, parse_manifest
from kvproto.tiers.page_ids import Chain, namespace
from kvproto.tiers.page_layout import PageComponent, PageLayout, page_layout
from kvproto.wire import encode_struct, from_json
from kvproto.wire.enums import KeyForm, LengthRule
from kvproto.wire.messages import Geometry, Group
from kvproto_conformance import tiers, tiers_vectors

CASES: list[dict[str, Any]] = json.loads(tiers_vectors.FILE.read_text())["cases"]


def cases(kind: str) -> Any:
    found = [case for case in CASES if case["id"].startswith(kind)]
    assert found
    return pytest.mark.parametrize("case", found, ids=lambda case: case["id"])


def part(form: dict[str, str]) -> PageComponent:
    reach = int(form["reach"]) if "reach" in form else None
    return PageComponent(
        int(form["group"]), KeyForm[form["form"]], LengthRule[form["rule"]], int(form.get("length", 1)), reach
    )


def test_the_file_is_what_its_maker_makes() -> None:
    assert tiers_vectors.FILE.read_text() == tiers_vectors.made()
    assert len({case["id"] for case in CASES}) == len(CASES)


@cases("namespace")
def test_a_namespace(case: dict[str, Any]) -> None:
    assert namespace(dict(reversed(case["entries"].items()))).hex() == case["namespace"]


@cases("ids")
def test_ids_of_pages(case: dict[str, Any]) -> None:
    chain = Chain(bytes.fromhex(case["namespace"]), int(case["page"]))
    chain.extend([int(t) for t in case["tokens"]])
    assert [id.hex() for id in chain.own] == case["own"]
    assert [id.hex() for id in chain.ahead] == case["ahead"]


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=9), max_size=5), st.integers(1, 5))
def test_ids_do_not_depend_on_how_tokens_come(pieces: list[list[int]], page: int) -> None:
    chain = Chain(bytes(32), page)
    for piece in pieces:
        chain.extend(piece)
    ids = tiers.page_ids(bytes(32), page, [t for piece in pieces for t in piece])
    assert (chain.own, chain.ahead) == (ids["OWN"], ids["AHEAD"])


@cases("geometry")
def test_a_geometry_and_the_bytes_of_its_components(case: dict[str, Any]) -> None:
    layout = page_layout(from_json(Geometry, case["geometry"]), int(case["rank"]), int(case["page"]))
    assert layout.geometry.hex() == case["digest"]
    assert {str(p.group): str(p.length) for p in layout.components} == case["lengths"]


def test_identity_does_not_contain_the_parallel_size() -> None:
    """KVP-TIER-SIZE, KVP-TIER-AHEAD: ranks of another engine find the page, and see that it is laid out in another way."""
    caches = [Cache.mla("t", 2, latent=4, rope=4, page=4), Cache.gqa("d", 1, kv_heads=4, head_dim=2, page=4, model=1)]
    one, two = (page_layout(lay_out(caches, Parallel(tp=tp)), 0, 8, ahead={1}) for tp in (1, 2))
    assert one.geometry != two.geometry
    assert one.form is two.form is KeyForm.AHEAD
    replicated = [page_layout(lay_out(caches[:1], Parallel(tp=2)), rank, 8).geometry for rank in range(2)]
    assert replicated[0] == replicated[1]


def encoded(geometry: Geometry) -> Geometry:
    group = geometry.groups[0]
    parts = tuple(attrs.evolve(part, encoding="tiled") for part in group.parts)
    return attrs.evolve(geometry, groups=(attrs.evolve(group, parts=parts),))


def changed(**facts: Any) -> Geometry:
    made = lay_out([Cache.gqa("t", 1, kv_heads=4, head_dim=2, page=4)], Parallel(tp=8, dcp=2, interleave=2))
    group: Group = attrs.evolve(made.groups[0], **facts)
    return attrs.evolve(made, groups=(group,))


@pytest.mark.parametrize(
    ("geometry", "page"),
    [(changed(), 6), (changed(tokens_per_row=4, interleave=4), 12), (changed(origin=4), 8), (changed(axis="image"), 8), (encoded(changed()), 8)],
    ids=["half a turn", "half a row", "an origin", "an axis", "an encoding"],
)  # fmt: skip
def test_pages_that_cannot_be_kept_are_refused(geometry: Geometry, page: int) -> None:
    """KVP-TIER-WHOLE."""
    with pytest.raises(PlanError, match=r"groups\[t\]"):
        page_layout(geometry, 0, page)


@cases("manifest")
def test_a_manifest(case: dict[str, Any]) -> None:
    want = case["asked"]
    layout = PageLayout(
        int(want["page"]), bytes.fromhex(want["geometry"]), tuple(part(each) for each in want["components"])
    )
    chain = Chain(bytes.fromhex(want["namespace"]), layout.page)
    chain.extend(range(1, 10))
    taken = parse_manifest(bytes.fromhex(case["bytes"]), layout, chain, 1)
    assert (taken is None) is case["absent"]
    if taken is not None:
        data = {c.group: bytes(range(c.length)) for c in taken.components}
        assert encode_struct(make_manifest(layout, chain, 1, data)).hex() == case["bytes"]


def test_a_page_without_its_draft_has_no_manifest() -> None:
    """KVP-TIER-ALL."""
    layout = PageLayout(
        1,
        bytes(32),
        (
            part({"group": "0", "form": "OWN", "rule": "PREFIX"}),
            part({"group": "1", "form": "AHEAD", "rule": "PREFIX"}),
        ),
    )
    chain = Chain(bytes(32), 1)
    chain.extend([1, 2])
    assert len(make_manifest(layout, chain, 0, {0: b"a", 1: b"b"}).components) == 2
    for data in ({0: b"a"}, {0: b"a", 1: b"bb"}, {0: b"a", 1: b"b", 2: b"c"}):
        with pytest.raises(LocalError, match=r"data|group"):
            make_manifest(layout, chain, 0, data)


def common_length(layout: PageLayout, ranks: Sequence[Mapping[int, Sequence[int]]]) -> int:
    """The greatest length at which all ranks can continue, with these pages in their indexes, by group."""
    lengths = []
    for has in ranks:
        pages = min(map(len, has.values()))
        count = next((i for i in range(pages) if not all(has[g][i] for g in layout.required)), pages)
        index, chain = Index(layout, max(count, 1)), Chain(bytes(32), layout.page)
        chain.extend(range(pages * layout.page + 1))
        reservation = index.reserve_pages(chain, 0, count)
        assert reservation is not None
        reservation.fill_all()
        reservation.seal_all([[g for g, there in has.items() if there[i]] for i in range(count)])
        assert reservation.publish() == count
        with index.find(chain) as hit:
            lengths.append(hit.lengths)
    return reduce(and_, lengths).bit_length() - 1


@cases("length")
def test_a_length_over_ranks(case: dict[str, Any]) -> None:
    parts = tuple(part(each) for each in case["parts"])
    layout = PageLayout(int(case["page"]), bytes(32), parts)
    assert (
        str(common_length(layout, [{int(g): has for g, has in rank.items()} for rank in case["ranks"]]))
        == case["usable"]
    )


@given(st.data(), st.integers(1, 3), st.integers(0, 6), st.integers(1, 4), st.integers(1, 14))
def test_lengths_against_trying_each(data: st.DataObject, ranks: int, pages: int, page: int, reach: int) -> None:
    forms = [
        {"group": "0", "form": "OWN", "rule": "PREFIX"},
        {"group": "1", "form": "OWN", "rule": "WINDOW", "reach": str(reach)},
        {"group": "2", "form": "OWN", "rule": "STATE"},
    ]
    bits = st.lists(st.integers(0, 1), min_size=pages, max_size=pages)
    has = [{form["group"]: data.draw(bits) for form in forms} for _ in range(ranks)]
    layout = PageLayout(page, bytes(32), tuple(map(part, forms)))
    ranks = [{int(g): one for g, one in rank.items()} for rank in has]
    assert common_length(layout, ranks) == tiers.lengths(page, forms, has)
