"""The worked example of the spec is what the planner makes of its two Descriptions."""

import json
from pathlib import Path
from typing import Any

from kvproto.copying.columns import check_columns
from kvproto.planning.geometry import decode_geometry, digest
from kvproto.planning.plan import plan
from kvproto.wire import decode
from kvproto.wire.messages import Register

CASES = json.loads((Path(__file__).parents[2] / "spec/v1/vectors/codec/example.json").read_text())["cases"]


def data(id_: str) -> bytes:
    case: dict[str, Any] = next(c for c in CASES if c["id"] == id_)
    return bytes.fromhex(case["bytes"])


def test_register_of_the_example() -> None:
    source, sink = decode_geometry(data("source")), decode_geometry(data("sink"))
    register = decode(data("register"))
    assert isinstance(register, Register)
    made = plan(source, sink)
    assert (register.source, register.sink, register.plan) == (
        digest(data("source")),
        digest(data("sink")),
        made.digest,
    )
    assert register.routes == tuple(r.ref for r in made.between(1, 3))
    assert made.required(3) == (1,)
    assert made.send_flags(0, 3) == ()
    assert made.send_flags(1, 3) == (0, 1)
    check_columns(sink, 3, {r.id: r for r in register.regions}, register.columns)
