"""JSON Schemas of Descriptions and tickets, beside all vectors that have some."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvproto import Cache, Parallel, lay_out, new_ticket, write_ticket
from kvproto.wire import to_json
from tools.specgen import schema

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "spec/v1/vectors"
VALIDATORS = {
    struct: Draft202012Validator(json.loads(schema.path(name).read_text())) for name, struct in schema.SCHEMAS.items()
}
OF_FORM = {"UNKNOWN_FIELD", "BAD_TYPE", "OUT_OF_RANGE", "MISSING_FIELD", "UNKNOWN_ENUM_VALUE", "TOO_LARGE"}
"""Errors of one field alone, which a schema can see."""


def cases(*patterns: str) -> Iterator[dict[str, Any]]:
    for pattern in patterns:
        for path in sorted(VECTORS.glob(pattern)):
            yield from json.loads(path.read_text())["cases"]


def of_structs(error: bool) -> list[tuple[str, str, Any]]:
    """Id, struct and fields of all cases of a struct with a schema that are accepted, or that are refused."""
    return [
        (case["id"], case["struct"], case["fields"])
        for case in cases("codec/*.json", "json.json")
        if case.get("struct") in VALIDATORS and "fields" in case and ("error" in case) == error
    ]


def test_schemas_are_schemas() -> None:
    for validator in VALIDATORS.values():
        validator.check_schema(validator.schema)


def test_whatever_a_reader_accepts_validates() -> None:
    accepted = of_structs(error=False)
    assert {struct for _, struct, _ in accepted} == set(VALIDATORS)
    assert [id for id, struct, fields in accepted if not VALIDATORS[struct].is_valid(fields)] == []


def descriptions(value: Any) -> Iterator[Any]:
    """All Descriptions in JSON data, at any depth."""
    if isinstance(value, dict) and {"replica", "facts", "groups", "ranks"} <= set(value):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from descriptions(inner)


def test_every_description_that_is_planned_or_lowered_validates() -> None:
    tried = 0
    for path in [*VECTORS.glob("plan/*.json"), *VECTORS.glob("lowering*.json")]:
        data = json.loads(path.read_text())
        accepted = [case for case in data["cases"] if "error" not in case]
        named = {case[side] for case in accepted for side in ("source", "sink") if isinstance(case[side], str)}
        sides = [*descriptions(accepted), *(data["geometries"][name] for name in named)]
        assert [path.name for side in sides if not VALIDATORS["Geometry"].is_valid(side)] == []
        tried += len(sides)
    assert tried > 600


def test_every_value_of_a_wrong_form_is_refused() -> None:
    """Cases of JSON that are refused for one field."""
    wrong = [case for case in cases("json.json") if case.get("struct") in VALIDATORS and case.get("error") in OF_FORM]
    assert len(wrong) > 50
    assert [case["id"] for case in wrong if VALIDATORS[case["struct"]].is_valid(case["fields"])] == []


def test_what_kvproto_writes_validates() -> None:
    caches = [Cache.mla("target", layers=4, latent=512, rope=64, page=64)]
    assert VALIDATORS["Geometry"].is_valid(to_json(lay_out(caches, Parallel(tp=2))))
    assert VALIDATORS["Ticket"].is_valid(write_ticket(new_ticket("prefill")))


@pytest.mark.parametrize(("least", "most"), [(0, 10), (1, 255), (0, 1000), (1, 2109), (0, 65535)])
def test_decimals_are_those_of_the_range(least: int, most: int) -> None:
    form = re.compile(schema.decimals(least, most))
    numbers = {number for number in range(70000) if form.fullmatch(str(number))}
    assert numbers == set(range(least, most + 1))
    assert not form.fullmatch("01")
