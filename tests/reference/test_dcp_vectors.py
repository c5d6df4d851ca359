"""The conformance cases of tokens over ranks, asked of the reference engine: its slots and pages, and its merge."""

from typing import Any

import numpy as np
import pytest
import torch

from kvproto import Group
from kvproto.wire import from_json
from kvproto_conformance.cases import Case, load
from kvproto_conformance.run import run
from kvproto_conformance.testee import Testee as Asked
from kvproto_reference.attention.lse import Base2, Partial, merge
from kvproto_reference.cache import Shard

CASES = [case for case in load() if case.suite in ("deal", "merge")]
BY_OP = {
    op: [c for c in CASES if c.asks[0].question["op"] == op and "step" not in c.id]
    for op in ("slots", "pages", "merge")
}
"""The engine's rows are of one token each."""


class Engine(Asked):
    """Answers by the engine's own functions, within this process."""

    def __init__(self) -> None:
        super().__init__(["no process"])

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["op"] == "merge":
            return merged(question["parts"])
        shard = Shard(from_json(Group, question["group"]), int(question.get("cp_rank", 0)))
        tokens = np.array(question["tokens"], np.int64)
        if question["op"] == "pages":
            return {"pages": [str(shard.pages(token)) for token in tokens.tolist()]}
        slots = shard.slots(np.array(question["items"], np.int64), tokens)
        return {"slots": [None if slot < 0 else str(slot) for slot in slots.tolist()]}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    found = merge([partial(part) for part in parts])
    lse, out = found.lse[:, 0].tolist(), found.out[:, 0].tolist()
    return {"lse": [*map(str, lse)], "out": [[*map(str, row)] for row in out]}


def partial(part: dict[str, Any]) -> Partial:
    """One head; a row of the case is a token of the step."""
    read = torch.tensor(list(map(int, part["tokens"])))
    lse = torch.tensor(list(map(float, part["lse"])))[:, None]
    out = torch.tensor([list(map(float, row)) for row in part["out"]])[:, None]
    return Base2(out, lse, read).natural() if part["base"] == "2" else Partial.of(out, lse, read > 0)


@pytest.mark.parametrize("op", BY_OP)
def test_the_engine_answers_as_the_cases_say(op: str) -> None:
    """KVP-DCP-SLOT, KVP-DCP-PAGES, KVP-DCP-MERGE, KVP-DCP-NEUTRAL, KVP-DCP-EMPTY, KVP-DCP-BASE and KVP-DCP-FLOAT."""
    assert len(BY_OP[op]) > 10
    assert [result.wrong for result in run(BY_OP[op], Engine()) if result.wrong] == []


@pytest.mark.parametrize("case", [c for c in BY_OP["merge"] if c.clause == "KVP-DCP-BASE"], ids=lambda c: c.id)
def test_a_base_that_is_mistaken_fails(case: Case) -> None:
    class Mistaken(Engine):
        def ask(self, question: dict[str, Any]) -> dict[str, Any]:
            return merged([part | {"base": "e"} for part in question["parts"]])

    assert run([case], Mistaken())[0].wrong
