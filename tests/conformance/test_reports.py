"""What is made of a run: reports in every form, baselines, and the commands around them."""

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import jsonschema
import pytest

from kvproto_conformance import baseline, html, report
from kvproto_conformance.__main__ import main
from kvproto_conformance.cases import Case, load
from kvproto_conformance.codec import read_frame
from kvproto_conformance.data import spec
from kvproto_conformance.run import Result, Status, Wrong

ROOT = Path(__file__).parents[2]
MINIMAL = [sys.executable, "-S", str(ROOT / "conformance/testees/minimal.py")]
SCHEMA = json.loads((ROOT / "conformance/kvproto_conformance/report.schema.json").read_text())
Json = dict[str, Any]
Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a run of the smallest testee, which is wrong often, writes down."""
    folder = tmp_path_factory.mktemp("made")
    forms = [
        word for form in ("report", "junit", "html", "badge", "summary") for word in (f"--{form}", str(folder / form))
    ]
    assert main(["run", "--seed", "5", *forms, "--", *MINIMAL]) == 1
    return folder


@pytest.fixture(scope="module")
def found(made: Path) -> Json:
    return report.read(made / "report")


def test_a_report_is_as_its_schema_says(found: Json) -> None:
    jsonschema.validate(found, SCHEMA, jsonschema.Draft202012Validator)
    assert (found["verdict"], found["seed"], found["claim"]["messages"]) == ("nonconformant", 5, ["DoneAck"])
    of_vectors = [row for row in found["results"] if row["suite"] != "testee"]
    assert 0 < found["passed"] < found["cases"] == len(of_vectors)


def test_only_what_is_claimed_is_asked(found: Json) -> None:
    asked = {case.id: case for case in load()}
    rows = [row for row in found["results"] if row["suite"] == "codec"]
    assert {asked[row["id"]].about for row in rows} == {"DoneAck", ""}
    ops = {wrong["question"]["op"] for row in rows for wrong in row.get("wrong", ())}
    assert ops == {"decode"}


def test_junit_counts_the_same(made: Path, found: Json) -> None:
    suites = xml.parse(made / "junit").getroot().findall("testsuite")
    (codec,) = [suite for suite in suites if suite.get("name") == "codec"]
    bad = [row for row in found["results"] if row["suite"] == "codec" and row["status"] != "pass"]
    assert int(codec.get("failures", 0)) + int(codec.get("errors", 0)) == len(bad) == len(codec.findall("testcase/*"))
    case = codec.find("testcase[@name='DoneAck/trailing']")
    assert case is not None
    assert case.get("classname") == "KVP-BODY-TRAILING"
    assert "bytes after the map" in str(case[0].get("message"))


def test_junit_takes_any_answer() -> None:
    """What XML cannot have, a testee may say."""
    row = {"id": "x", "suite": "codec", "clause": "KVP-BODY-TEXT", "status": "fail", "seconds": 0, "note": "n",
           "wrong": [{"question": {}, "expected": {}, "got": {"broken": "\x00\x1b[31m\ud800\ufffe"}}]}  # fmt: skip
    claim = {"role": "codec", "level": "L1", "extensions": [], "messages": []}
    text = report.junit({"results": [row], "claim": claim, "spec": "1", "passed": 0, "cases": 1, "seconds": 0})
    assert "?" in (xml.fromstring(text.encode()).findtext("testsuite/testcase/failure") or "")


def test_the_page_is_one_file_and_escapes_what_it_is_told(made: Path) -> None:
    page = (made / "html").read_text()
    assert re.findall(r"<script|src=|https?://|@import", page) == []
    assert "prefers-color-scheme" in page or "light dark" in page
    assert "DoneAck/trailing" in page
    assert "KVP-BODY-TRAILING" in page
    shown = report.read(made / "report")
    shown["testee"]["name"] = shown["complaints"] = "<img src=x onerror=alert(1)>"
    shown["complaints"] = [shown["testee"]["name"]]

    assert "<img" not in html.page(shown) + html.matrix([shown])


def test_badge_and_summary(made: Path, found: Json) -> None:
    badge = json.loads((made / "badge").read_text())
    assert badge["schemaVersion"] == 1
    assert badge["message"] == f"reader · L1 · of DoneAck · {found['passed']:,}/{found['cases']:,}"
    assert badge["color"] == "red"
    assert f"| codec | {found['passed']} | {found['cases']} |" in (made / "summary").read_text()


def test_failures_come_first_each_with_its_clause_and_its_bytes(capsys: Said) -> None:
    assert main(["run", "--only", "DoneAck/trailing", "--", *MINIMAL]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fail  DoneAck/trailing: a second value in the body"
    assert lines[1].startswith("    KVP-BODY-TRAILING (framing.md): A reader MUST refuse")
    assert '    expected {"error": "TRAILING_BYTES", "path": ""}' in lines
    assert "            TRAILING_BYTES at the whole message" in lines
    assert lines[-1].startswith(f"nonconformant: kvproto {spec()} · reader · L1")


def test_replay_asks_one_case_again(made: Path, capsys: Said) -> None:
    for id_, status in (("DoneAck/trailing", 1), ("DoneAck/least", 0), ("testee/unknown-op", 0)):
        assert main(["replay", str(made / "report"), id_]) == status
    assert "fail DoneAck/trailing (fail in the report)" in capsys.readouterr().out
    assert main(["replay", str(made / "report"), "no/such"]) == 2
    assert main(["replay", str(made / "report"), "testee/stop"]) == 2
    assert main(["replay", str(made / "junit"), "DoneAck/least"]) == 2


def test_a_baseline_of_all_failures_makes_a_run_incomplete_and_never_conformant(
    made: Path, tmp_path: Path, capsys: Said
) -> None:
    assert main(["baseline", str(made / "report"), "--issue", "here/1", "--until", "2999-01-01"]) == 0
    known = tmp_path / "known.toml"
    known.write_text(capsys.readouterr().out)
    assert main(["run", "--baseline", str(known), "--", *MINIMAL]) == 3
    assert main(["run", "--baseline", str(known), "--allow-incomplete", "--", *MINIMAL]) == 0
    known.write_text(known.read_text() + '[[known]]\nid = "DoneAck/least"\nissue = "x"\nuntil = "2999-01-01"\n')
    capsys.readouterr()
    assert main(["run", "--baseline", str(known), "--allow-incomplete", "--", *MINIMAL]) == 1
    assert "baseline: DoneAck/least: it passes; take it out" in capsys.readouterr().out


TODAY = date(2026, 11, 22)
FAILED = Result(
    Case("a/b", "KVP-BODY-TEXT", "codec", (), "n"),
    (Wrong({"op": "decode"}, {"error": "X"}, {"error": "Y"}),),
    Status.FAIL,
)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"expect": '{"error": "Y"'}, None),
        ({}, None),
        ({"id": "a/c"}, "a/c: there is no such case"),
        ({"until": TODAY.replace(day=21)}, "a/b: it was to be mended by 2026-11-21 (i)"),
        ({"expect": '{"error": "Z"'}, 'a/b: it fails in another way: {"error": "Y"}, not {"error": "Z"'),
    ],
)
def test_an_entry_that_is_not_true_is_red(entry: Json, complaint: str | None) -> None:
    known = baseline.Known(**{"id": "a/b", "issue": "i", "until": TODAY, **entry})
    results, complaints = baseline.apply([known], [FAILED], {"a/b"}, TODAY)
    assert complaints == ([complaint] if complaint else [])
    assert results[0].status is (Status.FAIL if complaint else Status.KNOWN)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("known = 3", ""),
        ("[[known]]\nid = 1", "all of it is strings"),
        ('[[known]]\nid = "x"', "it needs an id and an issue"),
        ('[[known]]\nid = "x"\nissue = "y"\nuntil = "soon"', "until is a day"),
        ('[[known]]\nid = "x"\nissue = "y"\nwhen = "soon"', "and nothing else"),
        ('[[knwon]]\nid = "x"', "it has knwon"),
        ("[[known", ""),
    ],
)
def test_a_baseline_that_cannot_be_read_makes_an_invalid_run(text: str, why: str, tmp_path: Path, capsys: Said) -> None:
    known = tmp_path / "known.toml"
    known.write_text(text)
    assert main(["run", "--baseline", str(known), "--", *MINIMAL]) == 2
    assert why in capsys.readouterr().err
    assert main(["run", "--baseline", str(tmp_path / "none"), "--", *MINIMAL]) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["run", "--only", "no such case", "--", *MINIMAL],
            "no case of this claim has an id with 'no such case' in it",
        ),
        (
            ["run", "--suite", "plan", "--", *MINIMAL],
            "no case of this claim: suite plan is asked of planner, source, sink, both, from L2 on\n",
        ),
        (
            ["list", "--role", "router", "--level", "L1", "--suite", "json"],
            "no case of this claim: suite json is asked of codec, planner, source, sink, both, from L1 on, "
            "with --extension json\n",
        ),
        (
            ["list", "--suite", "streams", "--only", "x y"],
            "no case of this claim of suite streams has an id with 'x y'",
        ),
        (
            ["run", "--report", "/proc/no/report", "--only", "DoneAck/least", "--", *MINIMAL],
            "--report /proc/no/report: there is no folder /proc/no",
        ),
        (["run", "--html", "/tmp", "--", *MINIMAL], "--html /tmp: this is a folder; name a file in it"),
        (["show", "DoneAck/nothing"], "there is no case DoneAck/nothing"),
        (["show", "x/least"], "there is no case x/least; there are Hello/least"),
        (["explain", "xyz"], "these are no hex digits"),
        (["explain", "--struct", "Versoin", "80"], "there is no struct Versoin; there are "),
        (["run", "--report", "/proc/none", "--", *MINIMAL], "--report /proc/none: it may not be written"),
        (["run", "--only", "DoneAck/least", "--report", "/dev/full", "--", *MINIMAL], "a report: No space left"),
        (["list", "--only", "no such case"], "no case of this claim"),
        (["matrix", "/no/such/report"], "/no/such/report: No such file"),
        (["copy", "/proc/no"], "/proc/no"),
        (["init-testee", "/no/such/folder"], "/no/such/folder/testee.py: No such file"),
    ],
)
def test_what_cannot_be_done_is_said(words: list[str], why: str, capsys: Said) -> None:
    assert main(words) == 2
    assert f"error: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["matrix"], ["baseline", "--issue", "x", "--until", "2999-01-01"], ["replay"]])
def test_a_damaged_report_is_named(words: list[str], tmp_path: Path, capsys: Said) -> None:
    report = tmp_path / "report"
    report.write_text('{"schema": 1, "results": [{}]}')
    assert main([*words, str(report), *(["x"] if words == ["replay"] else [])]) == 2
    assert "report: a damaged report: spec is missing" in capsys.readouterr().err


def test_a_report_of_an_earlier_run_does_not_pass_for_that_of_an_invalid_one(tmp_path: Path) -> None:
    badge = tmp_path / "badge"
    assert main(["run", "--only", "DoneAck/least", "--badge", str(badge), "--", *MINIMAL]) == 3
    assert badge.read_text()
    assert main(["run", "--only", "DoneAck/least", "--badge", str(badge), "--", "/no/such/testee"]) == 2
    assert not badge.read_text()


def test_an_issue_may_have_any_characters(made: Path, tmp_path: Path, capsys: Said) -> None:
    assert main(["baseline", str(made / "report"), "--issue", 'a"b\\', "--until", "2999-01-01"]) == 0
    known = tmp_path / "known.toml"
    known.write_text(capsys.readouterr().out)
    assert {entry.issue for entry in baseline.read(known)} == {'a"b\\'}


def test_a_name_of_a_testee_stays_in_its_cell(found: Json) -> None:
    named = found | {"testee": found["testee"] | {"name": "a|b\n<i>"}}
    assert "| a\\|b &lt;i&gt; 0 (python) |" in html.matrix_text([named])


def test_list_and_show(capsys: Said) -> None:
    assert main(["list", "--role", "reader", "--level", "L1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["suite"] for row in rows} == {"codec"}
    assert len(rows) == sum(case.suite == "codec" and not case.either | case.needs for case in load())
    assert main(["show", "DoneAck/least"]) == 0
    assert "0006  06 02                       @type = 0x0206" in capsys.readouterr().out
    assert main(["show", "LIVE-122"]) == 0
    assert 'drained = sink.ask("Abort", "Drained"' in capsys.readouterr().out
    assert main(["show", "LIVE-845"]) == 0
    said = capsys.readouterr().out
    assert "over SHM, or over INLINE where it has no SHM" in said
    assert "def _unlike(" in said
    assert "peer.welcome: Hear Hello and answer Welcome" in said
    assert main(["show", "LIVE-872"]) == 0
    assert "# code = 'WRONG_PEER'" in capsys.readouterr().out


def test_bytes_are_explained_up_to_what_is_wrong(capsys: Said) -> None:
    whole = next(ask.question["frame"] for case in load() if case.id == "Register/full" for ask in case.asks[:1])
    assert read_frame(bytes.fromhex(whole))[0] == "Register"
    assert main(["explain", whole]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line[6:].split("  ")[0] for line in lines if line[:4].strip()]
    assert sum(line.count("@") for line in lines) == 7
    assert len(shown) > 50
    assert main(["explain", whole[:-2]]) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip() == "TRUNCATED at @length"
    assert main(["explain", "--struct", "Version", "8201010203"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["0004", "03", "minor", "=", "3"]


def test_a_testee_to_begin_with_runs_where_it_is_put(tmp_path: Path, capsys: Said) -> None:
    assert main(["init-testee", str(tmp_path)]) == 0
    assert main(["init-testee", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (
        main(
            ["run", "--only", "DoneAck/least", "--allow-incomplete", "--", sys.executable, str(tmp_path / "testee.py")]
        )
        == 0
    )


def test_a_copy_has_what_a_suite_in_another_language_needs(tmp_path: Path) -> None:
    assert main(["copy", str(tmp_path / "new")]) == 0
    names = {path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*.json")}
    assert {"registry.json", "clauses.json", "vectors/codec/0103-Register.json", "vectors/plan/plan.json"} <= names
    assert {"ticket.schema.json", "description.schema.json"} <= names
    assert (tmp_path / "new/framing.md").exists()


def test_the_suite_runs_without_kvproto() -> None:
    """What judges an implementation imports none."""
    code = "import sys, kvproto_conformance.commands; sys.exit(any(n.split('.')[0] in ('kvproto', 'numpy') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_action_of_github_runs_the_suite_and_keeps_its_reports(tmp_path: Path) -> None:
    """What action.yml hands over by its environment; a testee that claims more than it is fails the step."""
    script = Path(__file__).parents[2] / "conformance/action.sh"
    given = {
        "TESTEE": shlex.join(MINIMAL),
        "REPORTS": str(tmp_path / "kept"),
        "ROLE": "reader",
        "LEVEL": "L1",
        "EXTENSIONS": "",
    }
    command = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [script], env={**os.environ, "PATH": command, **given}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert f"nonconformant: kvproto {spec()} · reader · L1" in done.stdout
    assert {each.name for each in (tmp_path / "kept").iterdir()} == {
        "report.json",
        "report.html",
        "junit.xml",
        "badge.json",
    }
    named = {
        line.split(":")[0].strip() for line in (script.parent / "action.yml").read_text().split("env:")[-1].splitlines()
    }
    assert {*given} <= named
