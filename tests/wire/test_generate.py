"""Generated files are up to date, and the registry's own rules bite."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvproto.wire import generate
from kvproto.wire.lint import RegistryError, lint


def test_generated_files_are_up_to_date() -> None:
    assert generate.main(["--check"]) == 0


def test_check_names_the_files_that_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stale = generate.ROOT / "kvproto/wire/tables.py"
    monkeypatch.setattr(generate, "outputs", lambda: {stale: "", generate.ROOT / "LICENSE-not": ""})
    before = stale.read_text()
    assert generate.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "kvproto/wire/tables.py" in said
    assert "LICENSE-not" in said
    assert stale.read_text() == before


def test_prose_around_the_tables_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{generate.BEGIN}\nold\n{generate.END}\nafter\n")
    made = generate.between_markers(page, "new\n")
    assert made.startswith("before\n")
    assert made.endswith("\nafter\n")
    assert "new" in made
    assert "old" not in made
    page.write_text("no markers")
    with pytest.raises(RegistryError):
        generate.between_markers(page, "new")


def field(facts: dict[str, Any], name: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = facts["message"][name]["field"][number]
    return found


MUTANTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "id twice": lambda f: field(f, "Transfer", 1).update(id=1),
    "no unit": lambda f: field(f, "Transfer", 1).pop("unit"),
    "unknown type": lambda f: field(f, "Transfer", 1).update(type="u24"),
    "ticket in the open": lambda f: field(f, "Transfer", 4).pop("secret"),
    "code in another block": lambda f: f["error"]["BUSY"].update(code=0x0101),
    "message id twice": lambda f: f["message"]["Done"].update(id=f["message"]["Hello"]["id"]),
    "address in the open": lambda f: f["struct"]["Region"]["field"][1].pop("secret"),
    "handle in the open": lambda f: f["struct"]["Handle"]["field"][1].pop("secret"),
    "range of a list": lambda f: field(f, "Transfer", 9).update(min=1),
    "empty range": lambda f: field(f, "Transfer", 2).update(max=0),
    "range beyond the type": lambda f: field(f, "Transfer", 3).update(max=1 << 32),
    "messages out of order": lambda f: f["message"]["Hello"].update(id=0x0F00),
    "unknown reply": lambda f: f["message"]["Done"].update(reply=["Dont"]),
    "list without an end": lambda f: field(f, "Transfer", 9).update(type="list<struct:Grants"),
    "required but ignorable": lambda f: field(f, "Transfer", 10).update(id=0x8001),
    "enum value without a doc": lambda f: f["enum"]["Role"]["docs"].pop("SINK"),
    "zero in an enum": lambda f: f["enum"]["Role"]["values"].update(SOURCE=0),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_lint_kills(mutant: str) -> None:
    facts = copy.deepcopy(generate.load())
    lint(facts)
    MUTANTS[mutant](facts)
    with pytest.raises(RegistryError):
        lint(facts)
