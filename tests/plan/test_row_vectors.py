"""The vectors of rows, rings and sections: what the suite's own planner and lowering expect, kvproto's find."""

import json
from typing import Any

import numpy as np
import pytest

from kvproto.copying.columns import check_columns
from kvproto.copying.execute import checksums
from kvproto.copying.grants import check_grants
from kvproto.copying.program import RankLayout, windows
from kvproto.errors import PlanError
from kvproto.planning.geometry import validate
from kvproto.planning.plan import plan
from kvproto.wire import from_json
from kvproto.wire.messages import Columns, Geometry, Grants
from kvproto_conformance import lowering_vectors, pool_vectors, row_vectors, size_vectors
from tests.plan.worlds import regions
from tests.pools import lower

PLANS, LOWERED = (
    [case for maker in makers for case in json.loads(maker.FILE.read_text())["cases"]]
    for makers in ((row_vectors, size_vectors), (lowering_vectors, pool_vectors))
)


def test_vectors_are_what_their_maker_makes() -> None:
    for maker in (row_vectors, size_vectors, lowering_vectors, pool_vectors):
        assert maker.FILE.read_text() == maker.made()


@pytest.mark.parametrize("case", PLANS, ids=lambda c: c["id"])
def test_plan(case: dict[str, Any]) -> None:
    source, sink = (from_json(Geometry, case[side]) for side in ("source", "sink"))
    if "error" in case:
        with pytest.raises(PlanError) as caught:
            validate(source), validate(sink), plan(source, sink)
        assert (caught.value.code.name, caught.value.path) == (case["error"], case["path"])
        return
    made, wanted = plan(source, sink), case["expected"]
    assert [
        {"source": str(r.source), "sink": str(r.sink), "group": str(r.group), "digest": r.digest.hex()}
        for r in made.routes
    ] == wanted["routes"]
    assert made.digest.hex() == wanted["plan"]


@pytest.mark.parametrize("case", LOWERED, ids=lambda c: c["id"])
def test_lowering(case: dict[str, Any]) -> None:
    here, there = (_side(case[side]) for side in ("source", "sink"))
    made = plan(here[0].geometry, there[0].geometry)
    program = lower(made.between(here[0].rank, there[0].rank), here[0], there[0], here[1], there[1])
    moved = {}
    for op in program.ops:
        rows = program.maps[op["map"]]
        for i in range(rows.rows.size):
            for row in range(int(rows.rows[i])):
                for lane in range(op["lanes"]):
                    from_, to = (
                        int(op[f"{side}_offset"] + item * op[f"{side}_item_stride"] + (first + row) * op[f"{side}_row_stride"])
                        + lane * int(op[f"{side}_lane_stride"])
                        for side, item, first in (
                            ("source", rows.source_item[i], rows.source_row[i]), ("sink", rows.sink_item[i], rows.sink_row[i])
                        )
                    )  # fmt: skip
                    for byte in range(op["lane_bytes"]):
                        moved[int(op["sink_region"]), to + byte] = int(op["source_region"]), from_ + byte
    assert len(moved) == program.bytes
    memory = {c: np.arange(1 << 16) * 7 + c for c in {int(op["source_region"]) for op in program.ops}}
    regions_ = {c: memoryview((data % 256).astype(np.uint8)) for c, data in memory.items()}
    assert {str(g): str(n) for g, n in checksums(program, regions_, sink=False).items()} == case["sums"]
    assert _runs(moved) == case["expected"]


def _side(given: dict[str, Any]) -> tuple[RankLayout, dict[int, Any]]:
    """A rank's layout and windows, which hold what a Register and a Transfer are checked for."""
    geometry, rank = from_json(Geometry, given["geometry"]), int(given["rank"])
    columns = tuple(from_json(Columns, c) for c in given["columns"])
    grants = tuple(from_json(Grants, w) for w in given["windows"])
    validate(geometry)
    check_columns(geometry, rank, regions(dict.fromkeys({int(r) for c in columns for r in c.region}, 1 << 16)), columns)
    by_group = {c.group: c for c in columns}
    if all(g.kind.name == "PAGE" for g in geometry.groups):  # a source's ring has a longer window than its rows
        check_grants(geometry, rank, by_group, tuple(by_group), grants)
    return RankLayout(geometry, rank, by_group), windows(grants)


def _runs(moved: dict[tuple[int, int], tuple[int, int]]) -> list[list[str]]:
    """Runs of bytes that are contiguous on both sides, by ascending place at the sink."""
    if not moved:
        return []
    table = np.array([(*from_, *to) for to, from_ in sorted(moved.items())])
    step = np.any(np.diff(table, axis=0) != [0, 1, 0, 1], axis=1)
    starts = np.r_[0, np.flatnonzero(step) + 1]
    lengths = np.diff(np.r_[starts, len(table)])
    return [
        [str(n) for n in (*table[at].tolist(), length)] for at, length in zip(starts, lengths.tolist(), strict=True)
    ]
