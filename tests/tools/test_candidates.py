"""Candidates of the specification: what is frozen does not change, drafts do, and a minor version only adds."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from tools import made_up
from tools.specgen import frozen
from tools.specgen.candidates import stated
from tools.specgen.frozen import Snapshot, compared
from tools.specgen.lint import RegistryError
from tools.specgen.registry import ROOT, Facts, load, version

Edit = Callable[[Snapshot], object]
Row = dict[str, Any]
FIELD: Row = {
    "id": 0x8002, "name": "x_load", "type": "u32", "unit": "none", "presence": "optional", "since": "1.1", "doc": "Load of the side.",
}  # fmt: skip


@pytest.fixture(scope="module")
def taken() -> Snapshot:
    """Of its vectors those that the edits are about; `tools.specgen --check` compares all."""
    now = frozen.now(load())
    return attrs.evolve(now, cases=[case for case in now.cases if case.about in ("DoneAck", "Renew")])


def edited(taken: Snapshot, edit: Edit) -> list[str]:
    """What is wrong with an edit of the version that was taken."""
    today = Snapshot(*pickle.loads(pickle.dumps((taken.facts, dict(taken.clauses)))), list(taken.cases))
    edit(today)
    return compared(taken, today)


def member(facts: Facts, message: str, field: str) -> Row:
    return next(row for row in facts["message"][message]["field"] if row["name"] == field)  # type: ignore[no-any-return]


def changed(taken: Snapshot, id: str) -> None:
    """Another answer to the case."""
    at = next(i for i, case in enumerate(taken.cases) if case.id == id)
    case = taken.cases[at]
    taken.cases[at] = attrs.evolve(case, asks=tuple(attrs.evolve(ask, expected={"error": "X"}) for ask in case.asks))


REFUSED: dict[str, tuple[Edit, str]] = {
    "a field of another type": (
        lambda s: member(s.facts, "DoneAck", "request").update(type="u32"), "message.DoneAck.request was id=2 type=u64",
    ),
    "a field that is gone": (lambda s: s.facts["message"]["Done"]["field"].pop(), "message.Done."),
    "a limit": (lambda s: s.facts["limit"]["resend"].update(value=1), "limit.resend was 2000 ms session, is 1 ms session"),
    "a number of an enum": (lambda s: s.facts["enum"]["DType"]["values"].update(U8=99), "enum.DType.U8 was 1, is 99"),
    "the code of an error": (lambda s: s.facts["error"]["BUSY"].update(code=0x0510), "error.BUSY was"),
    "a move between states": (lambda s: s.facts["machine"]["session"]["move"].pop(0), "machine.session."),
    "a feature's status": (lambda s: s.facts["feature"]["VERIFY"].update(status="draft"), "feature.VERIFY was 1 stable"),
    "a sentence": (lambda s: s.clauses["KVP-FRAME-MAGIC"].update(text="No."), "clause: KVP-FRAME-MAGIC was"),
    "a clause that is gone": (lambda s: s.clauses.pop("KVP-FRAME-MINOR"), "clause: KVP-FRAME-MINOR is gone"),
    "a clause that is new": (
        lambda s: s.clauses.update({"KVP-new": s.clauses["KVP-FRAME-MAGIC"]}),
        "clause: KVP-new is new: it needs a minor version above 1.0",
    ),
    "a vector": (lambda s: changed(s, "DoneAck/full"), "vector: DoneAck/full was"),
    "a vector that is gone": (lambda s: s.cases.pop(0), "vector: "),
    "a field that is no later one": (
        lambda s: s.facts["message"]["Ping"]["field"].append(FIELD | {"since": "1.0"}),
        "message.Ping.x_load is new: its `since` is not above 1.0",
    ),
    "a later field that must be there": (
        lambda s: s.facts["message"]["Ping"]["field"].append(FIELD | {"presence": "required"}),
        "message.Ping.x_load is new: a later field is optional",
    ),
    "a later rule": (
        lambda s: s.facts["message"]["DoneAck"].update(rule=[{"rule": "le", "args": [], "error": "X", "clause": "Y"}]),
        "message.DoneAck, rule 1 is new: a later rule refuses what was accepted",
    ),
    "an error in the same minor version": (
        lambda s: s.facts["error"].update(MADE_UP=s.facts["error"]["BUSY"]), "error.MADE_UP is new: it needs a minor version",
    ),
    "a message without a feature": (
        lambda s: s.facts["message"].update(Bye=s.facts["message"]["Goodbye"]), "Bye is new: a later message belongs to a feature",
    ),
    "a move without a feature": (
        lambda s: s.facts["machine"]["session"]["move"].append({"from": "idle", "message": "Ping", "to": "idle"}),
        "is new: a change of behaviour belongs to a feature",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_stable_does_not_change(what: str, taken: Snapshot) -> None:
    edit, said = REFUSED[what]
    assert [line for line in edited(taken, edit) if said in line]


ALLOWED: dict[str, Edit] = {
    "nothing": lambda s: None,
    "a field of a draft": lambda s: member(s.facts, "Renew", "lease").update(type="u16"),
    "a field that a draft adds": lambda s: s.facts["message"]["Renew"]["field"].append(FIELD | {"since": "1.0"}),
    "a draft's limit": lambda s: s.facts["limit"]["max_told"].update(value=7),
    "a draft's sentence": lambda s: s.clauses["KVP-PUL-OFFER"].update(text="No."),
    "a draft's clause that is gone": lambda s: s.clauses.pop("KVP-PUL-OFFER"),
    "a draft's vector": lambda s: changed(s, "Renew/full"),
    "a draft that becomes stable": lambda s: s.facts["feature"]["PULL"].update(status="stable"),
    "a vector that is new": lambda s: s.cases.append(attrs.evolve(s.cases[0], id="codec/new")),
    "the name of a part": lambda s: s.facts["part"].update(made_up=s.facts["part"]["k"]),
    "all that a minor version may add": lambda s: s.facts.update(made_up.minor(s.facts)),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_drafts_change_and_a_minor_version_adds(what: str, taken: Snapshot) -> None:
    assert edited(taken, ALLOWED[what]) == []


@pytest.mark.parametrize("name", ["rc0", "1.0-rc2", "draft", ""])
def test_a_candidate_has_one_kind_of_name(name: str) -> None:
    with pytest.raises(RegistryError, match="a candidate is rc1"):
        stated(load(), name, "why")


def test_a_candidate_has_a_reason() -> None:
    with pytest.raises(RegistryError, match="has a reason"):
        stated(load(), "rc99", " ")


@pytest.mark.parametrize(("last", "name"), [("1.0-rc99", "rc1"), ("1.0", "rc99")])
def test_what_comes_before_the_last_candidate_is_not_opened(last: str, name: str) -> None:
    """An earlier candidate, and any of a version that is final."""
    facts = load()
    facts["candidate"].append({"version": last, "day": "2026-11-26", "why": "why"})
    with pytest.raises(RegistryError, match="is published, or a later one is open"):
        stated(facts, name, "why")


def test_a_version_that_has_no_candidate_yet_is_a_draft() -> None:
    facts = load()
    assert version(facts) == facts["candidate"][-1]["version"]
    facts["protocol"]["minor"] += 1
    assert version(facts) == "1.1-draft"


@attrs.frozen
class Copy:
    """A copy of the repository, of which tests change files."""

    folder: Path

    def run(self, *words: str) -> tuple[int, str]:
        """A Python module of the copy: its status and what it printed."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(self.folder), str(self.folder / "conformance")))}
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace the only place of a text in a file."""
        text = (self.folder / path).read_text()
        assert text.count(old) == 1, (path, text.count(old))
        (self.folder / path).write_text(text.replace(old, new))

    def cases(self) -> dict[str, Row]:
        """The rows of all vectors by file and id."""
        found = {}
        for path in sorted((self.folder / "spec/v1/vectors").rglob("*.json")):
            for row in json.loads(path.read_text())["cases"]:
                found[f"{path.stem}/{row['id']}"] = row
        return found


@pytest.fixture
def repository(tmp_path: Path) -> Copy:
    ignored = shutil.ignore_patterns("__pycache__", "target")
    for name in ("spec", "docs", "tools", "kvproto", "libkvproto", "conformance", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("CHANGELOG.md", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return Copy(tmp_path)


def change_what_is_frozen(repository: Copy) -> None:
    """A limit, a sentence, and an answer of a vector."""
    repository.edit("spec/v1/registry/limits.toml", "[limit.resend]\nvalue = 2000", "[limit.resend]\nvalue = 3000")
    repository.edit("spec/v1/framing.md", "A reader MUST ignore the minor.", "A reader MUST ignore the minor version.")
    path = "spec/v1/vectors/codec/order.json"
    first = json.loads((repository.folder / path).read_text())["cases"][0]
    text = (repository.folder / path).read_text()
    wrong = text.replace(f'"error": "{first["error"]}"', '"error": "TOO_DEEP"', 1)
    assert wrong != text
    (repository.folder / path).write_text(wrong)


def test_the_check_refuses_a_change_until_a_candidate_is_opened(repository: Copy) -> None:
    change_what_is_frozen(repository)
    status, said = repository.run("tools.specgen", "--check")
    assert status == 1
    frozen_lines = [line.partition(": ")[2].split()[1] for line in said.splitlines() if line.startswith("frozen: ")]
    assert frozen_lines[:2] == ["limit.resend", "KVP-FRAME-MINOR"]
    assert frozen_lines[2].startswith("order/")
    lock = (repository.folder / "spec/v1/registry.lock").read_text()
    status, said = repository.run("tools.specgen", "--lock", "a change in passing")
    assert (status, "error: what is frozen" in said) == (1, True)
    assert (repository.folder / "spec/v1/registry.lock").read_text() == lock
    before = {path.name: path.read_bytes() for path in (repository.folder / "conformance/versions/1.0-rc1").iterdir()}

    status, said = repository.run("tools.specgen", "--open", "rc99", "Resend was too eager.")
    assert (status, said.splitlines()[-1]) == (0, "kept: conformance/versions/1.0-rc99")
    assert repository.run("tools.specgen", "--check") == (0, "")
    for path in ("spec/versions.md", "CHANGELOG.md"):
        assert re.search(r"1\.0-rc99 .*Resend was too eager\.", (repository.folder / path).read_text())
    for path in ("spec/README.md", "kvproto/wire/tables.py", "conformance/README.md", "spec/v1/vectors/tiers.json"):
        assert "1.0-rc99" in (repository.folder / path).read_text()
    held = repository.folder / "conformance/versions"
    assert {path.name: path.read_bytes() for path in (held / "1.0-rc1").iterdir()} == before
    assert json.loads((held / "1.0-rc99/registry.json").read_text())["limit"]["resend"]["value"] == 3000

    after_a_merge(repository)
    status, said = repository.run("tools.specgen", "--open", "rc99")
    assert (status, said.splitlines()[-1]) == (0, "kept: conformance/versions/1.0-rc99")
    assert repository.run("tools.specgen", "--check") == (0, "")
    assert (repository.folder / "CHANGELOG.md").read_text().count("Resend was too eager.") == 1
    assert json.loads((held / "1.0-rc99/registry.json").read_text())["limit"]["resend"]["value"] == 4000


def after_a_merge(repository: Copy) -> None:
    """Another limit, and conflicts in what is generated."""
    repository.edit("spec/v1/registry/limits.toml", "[limit.resend]\nvalue = 3000", "[limit.resend]\nvalue = 4000")
    paths = "registry.json", "clauses.json", "registry.lock", "vectors.lock", "vectors/codec/0006-Ping.json"
    for path in (repository.folder / "spec/v1" / name for name in paths):
        path.write_text(f"<<<<<<< ours\n{path.read_text()}=======\n>>>>>>> theirs\n")


def test_a_draft_changes_with_a_line_in_the_changelog(repository: Copy) -> None:
    repository.edit("spec/v1/registry/limits.toml", "[limit.max_told]\nvalue = 1024", "[limit.max_told]\nvalue = 2048")
    assert repository.run("tools.specgen")[0] == 0
    status, said = repository.run("tools.specgen", "--check")
    assert (status, "frozen" in said) == (1, False)
    assert repository.run("tools.specgen", "--lock", "Lists are longer")[0] == 0
    assert repository.run("tools.specgen", "--check") == (0, "")
    assert "* Lists are longer\n" in (repository.folder / "CHANGELOG.md").read_text()


def test_a_minor_version_adds_a_field(repository: Copy, tmp_path: Path) -> None:
    """The rehearsal of spec/versions.md: two files by hand, and implementations of 1.0 stay conformant."""
    before = repository.cases()
    old = tmp_path / "codec-1.0.mjs"
    shutil.copy(repository.folder / "conformance/testees/node/codec.mjs", old)
    by_hand = added(repository)
    assert repository.run("tools.specgen", "--lock", "1.1: Ping says the load of its side")[0] == 0
    assert repository.run("tools.specgen", "--check") == (0, "")
    assert len(by_hand) < 10

    after = repository.cases()
    shared = {key: row for key, row in after.items() if key in before}
    people = {"until"}
    assert shared.keys() == before.keys()
    assert {key: {k: v for k, v in row.items() if k not in people} for key, row in shared.items()} == before
    new = {key for key in after if key not in before}
    assert {"0006-Ping/x_load-absent", "0006-Ping/full@1.1", "json/Ping-x_load-above"} <= new
    assert all("Ping" in key and after[key]["as_of"] == "1.1" for key in new)

    for testee, spec in ((old, "1.0"), (repository.folder / "conformance/testees/node/codec.mjs", "1.1-draft")):
        status, said = repository.run("kvproto_conformance", "run", "--patience", "20", "--", "node", str(testee))
        assert (status, f"conformant: kvproto {spec} · codec · L1" in said) == (0, True), said
    status, said = repository.run("kvproto_conformance", "meet", "--patience", "20", "--", "node", str(old))
    assert status == 0, said
    status, said = repository.run("pytest", "-q", "-p", "no:cacheprovider", "tests/wire/test_versions.py")
    assert status == 0, said


def added(repository: Copy) -> set[str]:
    """Write the field and the version; the files that were changed."""
    registry = "spec/v1/registry"
    messages = repository.folder / registry / "messages.toml"
    ping, rest = messages.read_text().split("[message.Pong]")
    field = ", ".join(f"{key} = {json.dumps(value)}" for key, value in FIELD.items())
    head, end, tail = ping.rpartition("\n]\n")
    messages.write_text(f"{head}\n  {{ {field} }},{end}{tail}[message.Pong]{rest}")
    repository.edit(f"{registry}/protocol.toml", "minor = 0\n", "minor = 1\n")
    assert tomllib.loads(messages.read_text())["message"]["Ping"]["field"][-1] == FIELD
    return {f"{registry}/messages.toml", f"{registry}/protocol.toml"}
