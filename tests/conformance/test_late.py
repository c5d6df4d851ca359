"""Windows that begin late: the committed vectors, what the suite says of them, and kvproto."""

import json
from typing import Any

import pytest

from kvproto.copying.grants import begins_of, check_grants, cut_to_begins, held_from
from kvproto.copying.program import RankLayout
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Geometry, Rank, owns
from kvproto.planning.plan import Box, Route
from kvproto.rank.pool import columns_without_gaps
from kvproto.session.tickets import check_held
from kvproto.wire import from_json, to_json
from kvproto.wire.messages import Grants, Group
from kvproto_conformance import late_vectors

CASES: list[dict[str, Any]] = json.loads(late_vectors.FILE.read_text())["cases"]


def test_the_file_is_what_its_maker_makes() -> None:
    assert late_vectors.FILE.read_text() == late_vectors.made()
    assert len({case["id"] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_kvproto_says_the_same(case: dict[str, Any]) -> None:
    group, grant = from_json(Group, case["group"]), from_json(Grants, case["grant"])
    at = {"model": 0, "part": 0, "lo": 0, "hi": 1, "source_class": 0, "sink_class": 0}
    boxes = tuple(Box(layer_lo=n, layer_hi=n + 1, source_group=n, **at) for n in range(len(case["since"])))
    route = Route(source=0, sink=0, group=0, boxes=boxes, digest=bytes(32))
    held = held_from([route], {0: group}, {n: int(first) for n, first in enumerate(case["since"])})
    ranks = (Rank(rank=0, owns=(owns(group, [0], None, int(case["cp_rank"])),)),)
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=ranks)
    columns, _ = columns_without_gaps(geometry, 0, {0: 99})

    def checked() -> None:
        check_grants(geometry, 0, columns, (0,), (grant,))
        check_held(held, (grant,))

    if "error" in case:
        with pytest.raises(RemoteError) as refused:
            checked()
        assert (refused.value.code.name, refused.value.path) == (case["error"], case["path"])
        return
    checked()
    said = begins_of(held, [grant])
    assert [str(each.first) for each in said] == ([case["begins"]] if "begins" in case else [])
    side = RankLayout(geometry, 0, columns)
    (window,) = cut_to_begins(side, (grant,), {each.group: each.first for each in said})
    assert to_json(window) == case["window"]
