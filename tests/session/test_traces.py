"""Traces of the models of spec/v1/lifecycle: the session is after each step where the model is, and every row is walked."""

import json

import pytest

from tests.session.replay import replay
from tools.model.traces import TRACES
from tools.specgen.promela import rows
from tools.specgen.registry import load

MADE = json.loads(TRACES.read_text())


@pytest.mark.parametrize("trace", MADE, ids=[trace["row"].removeprefix("row ") for trace in MADE])
def test_the_session_goes_where_the_model_goes(trace: dict[str, object]) -> None:
    """KVP-SES-STATE."""
    replay(trace)


def test_every_row_of_the_table_is_walked_by_a_trace() -> None:
    walked = {step for trace in MADE for step in trace["steps"] if step.startswith("row ")}
    for machine, before, message, after, _ in rows(load()):
        row = f"row {machine}_{before} {message} {machine}_{after}"
        assert row in walked, row
