"""Traces of the models of spec/v1/lifecycle: the session is after each step where the model is, and every row is walked."""

import json
from collections.abc import Iterator

import pytest

from kvproto.session.core import Part, Session
from tests.session.replay import replay
from tools.model.traces import TRACES
from tools.specgen.promela import rows
from tools.specgen.registry import load

MADE = json.loads(TRACES.read_text())
UNTRACED = {"EPOCHS"}
"""Draft features that kvproto.session does not have."""


@pytest.mark.parametrize("trace", MADE, ids=[trace["row"].removeprefix("row ") for trace in MADE])
def test_the_session_goes_where_the_model_goes(trace: dict[str, object]) -> None:
    """KVP-SES-STATE."""
    replay(trace)


def test_every_row_of_the_table_is_walked_by_a_trace() -> None:
    walked = {step for trace in MADE for step in trace["steps"] if step.startswith("row ")}
    for machine, before, message, after, features in rows(load()):
        row = f"row {machine}_{before} {message} {machine}_{after}"
        assert row in walked or (features and set(features) <= UNTRACED), row


def heard(by: type) -> Iterator[str]:
    """Messages that a class or one made from it has handlers for."""
    yield from (message.__name__ for message, _ in getattr(by, "hears", ()))
    for made in by.__subclasses__():
        yield from heard(made)


def test_what_needs_no_trace_is_not_there() -> None:
    behind = {name for name, message in load()["message"].items() if set(message.get("feature", ())) & UNTRACED}
    assert behind
    assert behind.isdisjoint({*heard(Part), *heard(Session)})
