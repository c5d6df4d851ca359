"""The plan vectors: what the suite's own planner expects, kvproto's finds. Each names a fault of the field that it would show."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvproto.errors import PlanError
from kvproto.planning.geometry import validate
from kvproto.planning.plan import plan
from kvproto.wire import from_json
from kvproto.wire.enums import Feature
from kvproto.wire.messages import Geometry
from kvproto_conformance import broken_vectors, fleet_vectors, plan_vectors, row_vectors, size_vectors
from kvproto_conformance.cases import load

CASES: list[dict[str, Any]] = [
    case for file in plan_vectors.FILES for case in json.loads((plan_vectors.FOLDER / file).read_text())["cases"]
]
FLEETS: dict[str, Any] = json.loads(fleet_vectors.FILE.read_text())
NAMED = {name: from_json(Geometry, geometry) for name, geometry in FLEETS["geometries"].items()}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_plan(case: dict[str, Any]) -> None:
    source, sink = (from_json(Geometry, case[side]) for side in ("source", "sink"))
    features = [Feature[f] for f in case["features"]]
    if case.get("error") != "BAD_GEOMETRY":
        validate(source)
        validate(sink)
    if "error" in case:
        with pytest.raises(PlanError) as caught:  # noqa: PT012
            validate(source)
            plan(source, sink, features)
        assert (caught.value.code.name, caught.value.path) == (case["error"], case["path"])
        return
    made, wanted = plan(source, sink, features), case["expected"]
    assert [
        {"source": str(r.source), "sink": str(r.sink), "group": str(r.group), "digest": r.digest.hex()}
        for r in made.routes
    ] == wanted["routes"]
    assert {str(r.rank): [str(a) for a in made.required(r.rank)] for r in sink.ranks} == wanted["required"]
    assert (made.digest.hex(), [str(m) for m in made.cold]) == (wanted["plan"], wanted["cold"])


def test_each_row_of_the_table_of_pairs_refuses_a_case() -> None:
    """KVP-PLAN-FIT: planning.md has no code or place that no case has, and no case one that it has not."""
    prose = (Path(__file__).parents[2] / "spec/v1/planning.md").read_text()
    table = re.search(r"\| what must hold, or be equal .*\n[|-]+\n((?:\|.*\n)+)", prose)
    assert table is not None
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[1:]] for line in table[1].splitlines()]
    stated = {(code, path) for codes, paths in rows for code in codes for path in paths}
    names, met = re.compile(r"(groups|parts)\[[^\]]*\]"), set()
    for case in load():
        if case.suite == "plan" and "error" in (said := case.asks[0].expected):
            place = said["error"], names.sub(lambda m: f"{m[1]}[{m[1][0]}]", said["path"])
            assert case.clause != "KVP-PLAN-FIT" or place in stated, case.id
            met.add(place)
    assert stated <= met


@pytest.mark.parametrize("file", plan_vectors.FILES)
def test_vectors_are_what_their_maker_makes(file: str) -> None:
    assert (plan_vectors.FOLDER / file).read_text() == plan_vectors.made(file)


def test_every_file_of_vectors_has_a_maker_and_every_case_a_name() -> None:
    assert {file.name for file in plan_vectors.FOLDER.iterdir()} == {
        *plan_vectors.FILES,
        row_vectors.FILE.name,
        size_vectors.FILE.name,
        fleet_vectors.FILE.name,
        broken_vectors.FILE.name,
    }
    assert len({case["id"] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", FLEETS["cases"], ids=lambda c: c["id"])
def test_fleet(case: dict[str, Any]) -> None:
    source, sink = NAMED[case["source"]], NAMED[case["sink"]]
    made, wanted = plan(source, sink, [Feature[f] for f in case["features"]]), case["expected"]
    assert {str(r.rank): [str(a) for a in made.required(r.rank)] for r in sink.ranks} == wanted["required"]
    assert (made.digest.hex(), [str(m) for m in made.cold]) == (wanted["plan"], wanted["cold"])


def test_descriptions_of_fleets_are_right_and_all_used() -> None:
    for geometry in NAMED.values():
        validate(geometry)
    assert {case[side] for case in FLEETS["cases"] for side in ("source", "sink")} == NAMED.keys()


def test_vectors_of_fleets_are_what_their_maker_makes() -> None:
    assert fleet_vectors.FILE.read_text() == fleet_vectors.made()


def test_worked_example_of_the_spec() -> None:
    """planning-examples.md: MLA target of 61 layers and GQA draft of 8 heads, 8 to 4 ranks, both spreads."""
    source, sink = plan_vectors.mixed(8, 61), plan_vectors.mixed(4, 61)
    made = plan(source, sink)
    assert [made.required(d) for d in range(4)] == [(0, 1, 4), (1, 2, 3, 5), (2, 4, 5, 6), (3, 6, 7)]
    assert [made.send_flags(a, 1) for a in range(8)] == [(), (0,), (1,), (1,), (), (0,), (), ()]
    boxes = {r.source: [(b.layer_lo, b.layer_hi) for b in r.boxes] for r in made.routes if (r.sink, r.group) == (1, 0)}
    assert boxes[1] == [(i, i + 1) for i in range(0, 61, 2)]
    assert boxes[5] == [(i, i + 1) for i in range(1, 61, 2)]
    lowest = plan(source, sink, (Feature.SPREAD_ONE,))
    assert [lowest.required(d) for d in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    prose = (Path(__file__).parents[2] / "spec/v1/planning-examples.md").read_text()
    assert "D1           T   D   D       T" in prose


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("sinks", [1, 2, 3, 4])
def test_no_replica_is_loaded_more_than_the_bound(ranks: int, sinks: int) -> None:
    """The busiest source carries at most ceil(layers / candidates) layers more than the mean; over sink replicas too."""
    if sinks >= ranks:
        return
    total: dict[int, int] = {}
    for replica in range(8):
        made = plan(plan_vectors.mixed(ranks, 61), plan_vectors.mixed(sinks, 61, replica))
        target = load_of_target(made)
        assert max(target.values()) - 61 * sinks / ranks <= -(-61 // ranks)
        for rank, layers in target.items():
            total[rank] = total.get(rank, 0) + layers
    assert max(total.values()) - 8 * 61 * sinks / ranks <= -(-61 // ranks)


def load_of_target(made: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for route in made.routes:
        if route.group == 0:
            found[route.source] = found.get(route.source, 0) + sum(b.layer_hi - b.layer_lo for b in route.boxes)
    return found
