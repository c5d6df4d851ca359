"""Generated files are up to date, and the registry's own rules bite."""

import copy
from typing import Any

import pytest

from kvproto.wire import generate
from kvproto.wire.lint import RegistryError, lint


def test_generated_files_are_up_to_date() -> None:
    assert generate.main(["--check"]) == 0


def field(facts: dict[str, Any], name: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = facts["message"][name]["field"][number]
    return found


MUTANTS = {
    "id twice": lambda f: field(f, "Transfer", 1).update(id=1),
    "no unit": lambda f: field(f, "Transfer", 1).pop("unit"),
    "unknown type": lambda f: field(f, "Transfer", 1).update(type="u24"),
    "ticket in the open": lambda f: field(f, "Transfer", 4).pop("secret"),
    "code in another block": lambda f: f["error"]["BUSY"].update(code=0x0101),
    "message id twice": lambda f: f["message"]["Done"].update(id=f["message"]["Hello"]["id"]),
    "zero in an enum": lambda f: f["enum"]["Role"]["values"].update(SOURCE=0),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_lint_kills(mutant: str) -> None:
    facts = copy.deepcopy(generate.load())
    lint(facts)
    MUTANTS[mutant](facts)
    with pytest.raises(RegistryError):
        lint(facts)
