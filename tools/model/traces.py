"""Traces of the models: the shortest way to each row of the table of states, for other code to replay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.model.pan import MODELS, Program
from tools.specgen.promela import rows
from tools.specgen.registry import load

TRACES = MODELS / "traces.json"


def made(table: Sequence[Mapping[str, Any]]) -> str:
    """The text of traces.json: for each model, the shortest ways to rows that no earlier trace has covered."""
    walked: set[str] = set()
    found = [trace for source in table for trace in _of(source["model"], source["define"], walked)]
    return json.dumps(found, indent=0, separators=(",", ":")) + "\n"


def _of(model: str, define: Mapping[str, int], walked: set[str]) -> Iterator[dict[str, Any]]:
    machine = "session" if model in ("opening", "epochs", "catalogue") else "transfer"
    program = Program(model, {**define, "TOLD": 1}, shortest=True, rows=True)
    for number, (of, before, message, after, features) in enumerate(rows(load())):
        row = f"row {of}_{before} {message} {of}_{after}"
        if of != machine or row in walked or (features and not set(features) & set(_features(model, define))):
            continue
        steps = program.search(number).steps
        if steps:
            walked.update(step for step in steps if step.startswith("row "))
            yield {"model": model, "define": dict(define), "row": row, "steps": [*steps]}


def _features(model: str, define: Mapping[str, int]) -> list[str]:
    """The features that the sessions of a model have."""
    always = {"pull": ["PULL"], "epochs": ["EPOCHS"], "intent": ["INTENT"], "catalogue": ["CATALOGUE"]}.get(model, [])
    return always + [name for name in ("PULL", "STAGED", "INLINE") if name in define]
