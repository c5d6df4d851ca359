"""Generated files are up to date, and the registry's own rules bite."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.specgen import __main__ as make
from tools.specgen import clauses, lock, markdown, registry, shown
from tools.specgen import named as held
from tools.specgen.lint import RegistryError, lint
from tools.specgen.registry import HEAD, ROOT, SPEC


def load() -> Any:
    """A registry that the caller may change."""
    return pickle.loads(READ)


READ = pickle.dumps(registry.load())  # it takes tomllib a while


def test_generated_files_are_up_to_date() -> None:
    assert make.main(["--check"]) == 0


def test_check_names_the_files_that_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stale = ROOT / "kvproto/wire/tables.py"
    monkeypatch.setattr(make, "outputs", lambda: {stale: "", ROOT / "LICENSE-not": ""})
    before = stale.read_text()
    assert make.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "kvproto/wire/tables.py" in said
    assert "LICENSE-not" in said
    assert stale.read_text() == before


def test_prose_around_the_tables_stays() -> None:
    path = ROOT / "page.md"
    begin = f"<!-- begin one. {HEAD} -->"
    page = f"before\n{begin}\nold\n<!-- end one -->\nafter\n"
    renewed = markdown.renewed(page, "one", "new", path)
    assert renewed == f"before\n{begin}\n\nnew\n\n<!-- end one -->\nafter\n"
    assert markdown.renewed(renewed, "one", "new", path) == renewed
    with pytest.raises(RegistryError):
        markdown.renewed("no marks", "one", "new", path)


def field(facts: dict[str, Any], message: str, name: str) -> dict[str, Any]:
    row: dict[str, Any]
    (row,) = (f for f in facts["message"][message]["field"] if f["name"] == name)
    return row


def rule(facts: dict[str, Any], name: str) -> dict[str, Any]:
    row: dict[str, Any] = facts["message"][name]["rule"][0]
    return row


MUTANTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "id twice": lambda f: field(f, "Transfer", "request").update(id=1),
    "no unit": lambda f: field(f, "Transfer", "request").pop("unit"),
    "unknown type": lambda f: field(f, "Transfer", "request").update(type="u24"),
    "ticket in the open": lambda f: field(f, "Transfer", "ticket").pop("secret"),
    "code in another block": lambda f: f["error"]["BUSY"].update(code=0x0101),
    "message id twice": lambda f: f["message"]["Done"].update(id=f["message"]["Hello"]["id"]),
    "address in the open": lambda f: f["struct"]["Region"]["field"][1].pop("secret"),
    "handle in the open": lambda f: f["struct"]["Handle"]["field"][1].pop("secret"),
    "range of a digest": lambda f: field(f, "Transfer", "epoch").update(type="bool", min=1),
    "empty range": lambda f: field(f, "Transfer", "sequence").update(max=0),
    "range beyond the type": lambda f: field(f, "Done", "writer").update(max=1 << 32),
    "messages out of order": lambda f: f["message"]["Hello"].update(id=0x0F00),
    "unknown reply": lambda f: f["message"]["Done"].update(reply=["Dont"]),
    "list without an end": lambda f: field(f, "Transfer", "grants").update(type="list<struct:Grants"),
    "required but ignorable": lambda f: field(f, "Transfer", "writers").update(id=0x8001),
    "enum value without a doc": lambda f: f["enum"]["Role"]["docs"].pop("SINK"),
    "zero in an enum": lambda f: f["enum"]["Role"]["values"].update(SOURCE=0),
    "id of grease": lambda f: field(f, "Error", "about").update(id=0x801B),
    "feature of grease": lambda f: f["feature"]["INLINE"].update(value=0xF01B),
    "id of the private range": lambda f: field(f, "Error", "about").update(id=0x7001),
    "older than its message": lambda f: field(f, "Done", "checksums").update(since="0.9"),
    "fact nobody knows": lambda f: field(f, "Done", "checksums").update(note="x"),
    "unknown unit": lambda f: field(f, "Done", "bytes").update(unit="kB"),
    "rule without an error": lambda f: rule(f, "Done").update(error="NONE"),
    "rule with an error of another class": lambda f: rule(f, "Done").update(error="BUSY"),
    "rule of an unknown predicate": lambda f: rule(f, "Done").update(rule="descend"),
    "rule over an unknown field": lambda f: rule(f, "Done").update(args=["grups"]),
    "rule over the wrong type": lambda f: rule(f, "Done").update(args=["bytes"]),
    "rule without a clause": lambda f: rule(f, "Done").update(clause="none"),
    "constant that is no member": lambda f: rule(f, "Credit").update(args=["slots", "kind", "GPU"]),
    "request without a reply": lambda f: f["message"]["Done"].update(reply=[]),
    "reply from the same side": lambda f: f["message"]["Describe"].update(reply=["Grant"]),
    "request id elsewhere": lambda f: field(f, "Done", "request").update(id=3),
    "struct inside itself": lambda f: f["struct"]["Part"]["field"][1].update(type="struct:Group"),
    "state that nothing reaches": lambda f: f["machine"]["session"]["state"].append({"name": "lost", "doc": "x"}),
    "move from nowhere": lambda f: f["machine"]["session"]["move"][0].update({"from": "lost"}),
    "two moves for one message": lambda f: f["machine"]["session"]["move"].append(
        {"from": "idle", "message": "Hello", "to": "open"}
    ),
    "draft message behind no feature": lambda f: f["message"]["Grant"].pop("feature"),
    "feature before a settled message": lambda f: f["message"]["Ping"].update(feature=["PULL"]),
    "row behind an unknown feature": lambda f: f["machine"]["session"]["move"][-1].update(feature=["WINGS"]),
    "state behind an unknown feature": lambda f: f["machine"]["transfer"]["state"][3].update(feature=["WINGS"]),
    "limit of nobody": lambda f: f["limit"]["resend"].update(scope="moon"),
    "fact without a rule": lambda f: f["fact"]["tokenizer"].pop("rule"),
    "fact of an unknown rule": lambda f: f["fact"]["tokenizer"].update(rule="PRAY"),
    "message that no state hears": lambda f: f["machine"]["session"]["move"].pop(0),
    "recovery nobody knows": lambda f: f["error"]["BUSY"].update(recovery="pray"),
    "limit without a unit": lambda f: f["limit"]["max_list"].pop("unit"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_lint_kills(mutant: str) -> None:
    facts = load()
    lint(facts)
    MUTANTS[mutant](facts)
    with pytest.raises(RegistryError):
        lint(facts)


def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the spec and its changelog that may be changed."""
    spec = tmp_path / "v1"
    shutil.copytree(SPEC, spec)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(lock.CHANGELOG.read_text())
    monkeypatch.setattr(lock, "SPEC", spec)
    monkeypatch.setattr(clauses, "SPEC", spec)
    monkeypatch.setattr(lock, "CHANGELOG", changelog)
    assert lock.differences(load()) == []
    return spec


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_lock_names_a_changed_clause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = copied(monkeypatch, tmp_path)
    change(spec / "framing.md", "MUST ignore the minor", "MUST ignore the  minor")
    assert lock.differences(load()) == []  # how words are spaced is not what they say
    change(spec / "framing.md", "MUST ignore the  minor", "SHOULD ignore the minor")
    (line,) = lock.differences(load())
    assert "KVP-FRAME-MINOR was reader MUST" in line
    assert "is reader SHOULD" in line


def test_lock_names_a_changed_field_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copied(monkeypatch, tmp_path)
    facts = load()
    field(facts, "Done", "begins").update(id=12)
    (line,) = lock.differences(facts)
    assert line.startswith("registry.lock: message.Done.begins was id=10")
    del facts["message"]["Done"]["field"][-1]
    assert "registry.lock: message.Done.begins is gone" in lock.differences(facts)


def test_lock_names_a_changed_vector_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = copied(monkeypatch, tmp_path)
    change(
        spec / "vectors/codec/framing.json",
        "4b56505701000602000000000700000083010502060301",
        "4b56505701000602000000000700000083010502070301",
    )
    (line,) = lock.differences(load())
    assert line.startswith("vectors.lock: framing/done-ack was ")


def test_lock_is_renewed_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = copied(monkeypatch, tmp_path)
    change(spec / "framing.md", "MUST ignore the minor", "SHOULD ignore the minor")
    with pytest.raises(RegistryError):
        lock.renew(load(), " ")
    assert len(lock.renew(load(), "Minor is a hint.")) == 1
    assert lock.differences(load()) == []
    assert "\n* Minor is a hint.\n" in lock.CHANGELOG.read_text()
    change(lock.CHANGELOG, "* Minor is a hint.\n", "")
    (line,) = lock.differences(load())
    assert "the changelog does not have the line 'Minor is a hint.'" in line


CLAUSES = {
    "two key words": ("MUST ignore the minor", "MUST ignore the minor, and MAY log it"),
    "no key word": ("MUST ignore the minor", "ignores the minor"),
    "where in place of if": ("MUST ignore the minor", "MUST ignore the minor where VERIFY is chosen"),
    "not understood alone": ("MUST ignore the minor", "MUST ignore the minor as the table above says"),
    "no role": ("A reader MUST ignore the minor", "One MUST ignore the minor"),
    "two errors": ("MUST ignore the minor", "MUST refuse the minor with `BAD_MAGIC` or `BAD_TYPE`"),
    "id twice": ("`KVP-FRAME-MINOR`", "`KVP-FRAME-MAGIC`"),
    "error that nothing says": ("with `BAD_MAGIC` at", "with an error at"),
}


@pytest.mark.parametrize("case", CLAUSES)
def test_clauses_are_linted(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = copied(monkeypatch, tmp_path)
    clauses.check(load())
    change(spec / "framing.md", *CLAUSES[case])
    if case == "error that nothing says":
        change(spec / "framing.md", "at `BAD_MAGIC`", "at that")
    with pytest.raises(RegistryError):
        clauses.check(load())


def test_every_clause_of_bytes_has_a_vector() -> None:
    """What a reader or writer of bytes must do is shown by a case; the others wait for plan and session cases."""
    cited = {
        case["clause"] for path in SPEC.glob("vectors/codec/*.json") for case in json.loads(path.read_text())["cases"]
    }
    ours = {c.id for c in clauses.clauses(load()).values() if c.page in ("framing.md",) and "-W-" not in c.id}
    streams = {c for c in ours if c.startswith("KVP-STREAM-")}  # tests/wire/test_vectors.py cuts all vectors anywhere
    assert ours - cited - streams == set()
    assert cited <= clauses.clauses(load()).keys()


def test_every_clause_is_named_or_exempt() -> None:
    assert held.unnamed(load()) == []


def test_a_clause_that_nothing_names_and_a_name_of_none_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = held.named()
    gone = dict(seen)
    del gone["KVP-FRAME-MINOR"]
    gone["KVP-FRAME-MINUS"] = {"tests/x.py"}
    gone["KVP-TKT-RETRY"] = {"tests/y.py"}
    monkeypatch.setattr(held, "named", lambda: gone)
    assert held.unnamed(load()) == [
        "framing.md: KVP-FRAME-MINOR is named by no test, vector or case",
        "tests/x.py: there is no clause KVP-FRAME-MINUS",
        "exemptions.toml: KVP-TKT-RETRY is named by tests/y.py",
    ]


EXEMPTIONS = {
    "a clause that is none": '["KVP-FRAME-MINUS"]\nreason = "people"\nnote = "n"',
    "no note": '["KVP-FRAME-MINOR"]\nreason = "people"',
    "a reason of its own": '["KVP-FRAME-MINOR"]\nreason = "later"\nnote = "n"',
    "MUST taken for optional": '["KVP-FRAME-MINOR"]\nreason = "optional"\nnote = "n"',
    "hardware without a test": '["KVP-FRAME-MINOR"]\nreason = "hardware"\nnote = "n"\nshown = "tests/gpu/test_memory.py::test_nothing"',
    "a draft of a stable feature": '["KVP-FRAME-MINOR"]\nreason = "draft"\nnote = "n"\nshown = "VERIFY"',
}


@pytest.mark.parametrize("case", EXEMPTIONS)
def test_exemptions_have_a_reason_that_holds(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "exemptions.toml"
    path.write_text(EXEMPTIONS[case])
    monkeypatch.setattr(held, "EXEMPTIONS", path)
    with pytest.raises(RegistryError):
        held.exemptions(load())


def test_a_clause_that_no_case_shows_needs_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a reason for one that a case shows, or that is none of the list, is refused."""
    kept = shown.EXCEPTIONS.read_text()
    changed = tmp_path / "unshown.toml"
    changed.write_text(
        kept.replace('["KVP-NEG-ROLE"]\nreason = "live"', '["KVP-NEG-CHOOSE"]\nreason = "tired"')
        + '["KVP-SES-PING"]\nreason = "live"\nnote = "n"\n'
    )
    monkeypatch.setattr(shown, "EXCEPTIONS", changed)
    assert sorted(shown.unshown(load())) == [
        "negotiation.md: KVP-NEG-ROLE is shown by no case of the suite",
        "unshown.toml, KVP-NEG-CHOOSE: a note, and a reason of ['inside', 'large', 'live', 'meaning']",
        "unshown.toml: KVP-NEG-CHOOSE is shown by a case",
        "unshown.toml: there is no clause KVP-SES-PING on the pages that count",
    ]
