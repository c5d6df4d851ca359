"""Whatever a testee does, the run ends, says why, and takes nothing but an answer for an answer."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproto_conformance.__main__ import main
from kvproto_conformance.testee import Broken, CannotStart
from kvproto_conformance.testee import Testee as Driver

ROOT = Path(__file__).parents[2]
TESTEES = ROOT / "conformance/testees"
RIGHT = """
import json, sys, os, time
def said(q, **answer): print(json.dumps({"seq": q["seq"], **answer}), flush=True)
ROWS = {row["bytes"]: row for row in json.load(open(sys.argv[1]))["cases"]}
def right(q):
    row = ROWS.get(q.get("frame"))
    if row is None: return {"unsupported": True}
    return {k: row[k] for k in ("message", "fields", "error", "path") if k in row}
for number, line in enumerate(sys.stdin):
    q = json.loads(line)
    if q["op"] == "stop": break
    if q["op"] == "hello": HELLO
    else: ELSE
"""
HELLO = 'said(q, driver=1, role="reader", level="L1")'
Json = dict[str, Any]


def program(otherwise: str, hello: str = HELLO, end: str = "") -> list[str]:
    """A program that is right about the few cases, but for what it says in place of an answer, a hello or an end."""
    source = RIGHT.replace("HELLO", hello).replace("ELSE", otherwise) + end
    return [sys.executable, "-S", "-c", source]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four cases of DoneAck, of which two are accepted."""
    rows = json.loads((ROOT / "spec/v1/vectors/codec/0206-DoneAck.json").read_text())["cases"][:4]
    assert [row["id"] for row in rows] == ["least", "full", "trailing", "unknown-must"]
    folder = tmp_path_factory.mktemp("few")
    (folder / "codec").mkdir()
    (folder / "codec/few.json").write_text(json.dumps({"suite": "few", "cases": rows}))
    return folder


def reported(few: Path, tmp_path: Path, command: list[str], *options: str) -> tuple[int, Json]:
    report = tmp_path / "report.json"
    words = ["run", "--vectors", str(few), "--patience", "30", "--report", str(report), *options, "--"]
    status = main([*words, *command, str(few / "codec/few.json")])
    return status, json.loads(report.read_text() or "{}") if report.exists() else {}


def test_it_is_right(few: Path, tmp_path: Path) -> None:
    status, report = reported(few, tmp_path, program("said(q, **right(q))"))
    assert (status, report["verdict"], report["passed"], report["cases"]) == (0, "conformant", 4, 4)


PATIENCE = 0.05
"""Seconds for an answer, where a testee answers nothing but hello."""
SHORT = ("--patience", str(PATIENCE))


@pytest.fixture
def time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """For hello it has as long as with the patience of the other tests."""
    monkeypatch.setattr("kvproto_conformance.testee._START", 30 / PATIENCE)


EARNS_NOTHING: dict[str, tuple[str, str]] = {
    # what it says in place of an answer, and what the report says of it
    "refuses everything": ('said(q, error="BAD_MAGIC", path="@magic")', '"error": "BAD_MAGIC"'),
    "accepts everything": ('said(q, message="DoneAck", fields={})', '"message": "DoneAck"'),
    "knows nothing": ("said(q, unsupported=True)", '"unsupported": true'),
    "echoes": ("print(line, end='', flush=True)", '"op": "decode"'),
    "is silent": ("pass", f"no answer within {PATIENCE:g} s"),
    "speaks no JSON": ("print('what?', flush=True)", "its answer is not JSON: 'what?'"),
    "speaks deep JSON": ("print('[' * 99999, flush=True)", "its answer is not JSON"),
    "speaks no text": ("os.write(1, b'\\xff\\xfe\\n')", "its answer is not JSON"),
    "speaks of NaN": ("print('{\"seq\": %d, \"message\": NaN}' % q['seq'], flush=True)", "its answer is not JSON"),
    "answers with a list": ("print('[]', flush=True)", "its answer is not an object"),
    "forgets the number": ("print(json.dumps(right(q)), flush=True)", "its answer has seq None"),
    "takes another number": ('q["seq"] += 1; said(q, **right(q))', "its answer has seq 3, and the question had 2"),
    "makes noise first": (
        'print("loading...", flush=True); said(q, **right(q))',
        "its answer is not JSON: 'loading...'; stdout is for answers",
    ),
    "exits": ("sys.exit(0)", "it ended with status 0"),
    "crashes with words": ("raise ValueError('no idea')", "no idea"),
    "kills itself": ("os.kill(os.getpid(), 9)", "it was killed by SIGKILL"),
    "closes its output": ("os.close(1); time.sleep(99)", "it closed its output"),
    "floods": ("[os.write(1, b'x' * (1 << 20)) for _ in range(37)]", "a line of more than 36 MiB"),
    "never reads again": ("time.sleep(99)", f"no answer within {PATIENCE:g} s"),
    "stops half way": ("os.write(1, b'{'); time.sleep(99)", f"no answer within {PATIENCE:g} s"),
}


@pytest.mark.usefixtures("time_to_start")
@pytest.mark.parametrize("kind", EARNS_NOTHING)
def test_a_degenerate_testee_earns_nothing(
    kind: str, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    otherwise, why = EARNS_NOTHING[kind]
    if "closed" in why:
        monkeypatch.setattr("kvproto_conformance.testee._ENDING", PATIENCE)
    status, report = reported(few, tmp_path, program(otherwise), *(SHORT if "no answer" in why else ()))
    assert (status, report["verdict"], report["passed"], report["cases"]) == (1, "nonconformant", 0, 4)
    assert why in json.dumps(report)
    assert {"fail", "unearned", "error"} >= {row["status"] for row in report["results"] if row["suite"] == "codec"}


def test_an_answer_that_comes_twice_is_an_error(few: Path, tmp_path: Path) -> None:
    status, report = reported(few, tmp_path, program("said(q, **right(q)); said(q, **right(q))"))
    assert status == 1
    assert sum("and the question had" in json.dumps(row) for row in report["results"]) >= 3


def test_what_dies_at_one_case_is_asked_the_others(few: Path, tmp_path: Path) -> None:
    status, report = reported(few, tmp_path, program("sys.exit(7) if q['seq'] == 6 else said(q, **right(q))"))
    assert (status, report["passed"]) == (1, 3)
    (error,) = [row for row in report["results"] if row["status"] == "error"]
    assert error["wrong"][0]["got"] == {"broken": "it ended with status 7"}


def test_a_half_of_a_surrogate_pair_is_printed(few: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    testee = program(r"""said(q, error="\ud800", path="")""")
    command = [sys.executable, "-m", "kvproto_conformance", "run", "--vectors", str(few), "--html", str(page), "--"]
    run = subprocess.run([*command, *testee, str(few / "codec/few.json")], capture_output=True, text=True, timeout=60)
    assert (run.returncode, "Traceback" in run.stderr) == (1, False)
    assert "nonconformant" in run.stdout
    assert page.read_text()


@pytest.mark.usefixtures("time_to_start")
def test_what_is_silent_too_often_is_asked_no_more(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = reported(few, tmp_path, program("pass"), *SHORT)
    said = [row["wrong"][0]["got"]["broken"] for row in report["results"] if row["suite"] == "codec"]
    assert said[-1] == "not asked: it was silent too often before"
    assert "4 of them were not asked, from few/least on" in capsys.readouterr().out


def test_the_time_of_a_run_ends(few: Path, tmp_path: Path) -> None:
    status, report = reported(few, tmp_path, program("said(q, **right(q))"), "--budget", "0")
    assert (status, report["passed"]) == (1, 0)
    assert "not asked: the 0 s of this run are over" in json.dumps(report)


def test_stderr_is_never_in_the_way(few: Path, tmp_path: Path) -> None:
    status, report = reported(few, tmp_path, program("os.write(2, b'x' * 200000); said(q, **right(q))"))
    assert (status, report["passed"]) == (0, 4)


def impatient_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers may take as long as ever."""
    stop = Driver.stop

    def soon(self: Driver) -> Any:
        self._patience = PATIENCE
        return stop(self)

    monkeypatch.setattr(Driver, "stop", soon)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("sys.exit(3)", "after `stop`, it ended with status 3"),
        ("time.sleep(99)", f"after `stop`: no answer within {PATIENCE:g} s"),
        ("print('bye')", "it says more than it was asked: 'bye'"),
    ],
)
def test_a_testee_ends_as_it_is_told(
    end: str, why: str, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVP-TST-STOP"""
    if "sleep" in end:
        impatient_of_an_end(monkeypatch)
    status, report = reported(few, tmp_path, program("said(q, **right(q))", end=end))
    assert (status, report["passed"]) == (1, 4)
    assert why in json.dumps(report["results"][-1], ensure_ascii=False)


def test_a_guess_at_what_is_made_up_is_nonconformant(few: Path, tmp_path: Path) -> None:
    """KVP-TST-UNSUPPORTED"""
    guess = "{'error': 'UNKNOWN_MESSAGE', 'path': ''}"
    status, report = reported(few, tmp_path, program(f"said(q, **(right(q) if 'frame' in q else {guess}))"))
    assert (status, report["passed"]) == (1, 4)
    assert [row["status"] for row in report["results"][:3]] == ["fail"] * 3


def test_a_refusal_may_have_a_text(few: Path, tmp_path: Path) -> None:
    """KVP-TST-ONE, KVP-TST-REFUSE"""
    more = "a = right(q); a.update(text='why') if 'error' in a else None; said(q, **a)"
    assert reported(few, tmp_path, program(more))[0] == 0
    assert reported(few, tmp_path, program(more.replace("text", "reason")))[0] == 1


HELLOS = {
    "pass": f"no answer to hello: no answer within {4 * PATIENCE:g} s",
    "sys.exit(2)": "no answer to hello: it ended with status 2",
    "print('hi', flush=True)": "no answer to hello: its answer is not JSON: 'hi'; stdout is for answers alone, print notes to stderr",
    "said(q, unsupported=True)": 'hello must be answered with "driver": 1',
    "said(q, driver='1')": 'hello must be answered with "driver": 1',
    "said(q, driver=True)": 'hello must be answered with "driver": 1',
    "said(q, driver=1, messages='DoneAck')": "hello: messages must be a list of strings",
    "said(q, driver=1, name=[])": "hello: name must be a string",
    "said(q, driver=1, messages=[1])": "hello: messages must be a list of strings",
    "said(q, driver=1)": "role, in the testee's hello, is one of reader",
    "said(q, driver=1, role='poet', level='L1')": "not poet",
    "said(q, driver=1, role='reader', level='L2')": "a reader has no level above L1",
    "said(q, driver=1, role='reader', level='L1', extensions=['magic'])": "extension magic: there are",
    "said(q, driver=1, role='reader', level='L1', messages=['Chunk'])": "claims 'Chunk' in messages; there are cases of DoneAck",
    "said(q, driver=1, role='reader', level='L1', messages=['DoneAck', 'doneack'])": "claims 'doneack' in messages",
    "said(q, driver=1, role='reader', level='L1', messages=[])": "messages names one at least",
}


@pytest.mark.parametrize("hello", HELLOS)
def test_a_hello_that_says_nothing_makes_an_invalid_run(
    hello: str, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = SHORT if hello == "pass" else ()
    status, report = reported(few, tmp_path, program("said(q, **right(q))", hello), *short)
    assert (status, report) == (2, {})
    assert HELLOS[hello] in capsys.readouterr().err


def test_what_cannot_be_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "testee"
    script.write_text("#!/no/such/interpreter -u\n")
    closed = tmp_path / "closed"
    closed.write_text("")
    script.chmod(0o755)
    for command, why in (
        (tmp_path / "missing", "there is no such program"),
        (script, "it is there, but what its first line asks for is not: #!/no/such/interpreter -u"),
        (closed, "it may not be run"),
    ):
        assert main(["run", str(command)]) == 2
        assert f"error: {command}: {why}" in capsys.readouterr().err


def test_what_a_testee_has_started_ends_with_it(tmp_path: Path) -> None:
    """Its child holds the pipes, and would hold up whoever waits for their end."""
    child = tmp_path / "child"
    start = f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({str(child)!r}, 'w').write(str(p.pid)); "
    start += "print('started', flush=True); p.wait()"
    with Driver([sys.executable, "-S", "-c", start], patience=30) as testee:
        assert isinstance(testee.greet({"op": "hello"}), Broken)
    try:
        left = os.pidfd_open(int(child.read_text()))
    except ProcessLookupError:
        return
    with open(left, "rb"):
        assert select.select([left], [], [], 20)[0]


def test_a_program_that_is_gone_is_no_answer() -> None:
    with Driver(["/no/such/program"]) as testee:
        with pytest.raises(CannotStart):
            testee.greet({"op": "hello"})
        assert testee.ask({"op": "decode"}) == Broken("crash", "/no/such/program: there is no such program")


def test_the_smallest_testee_is_short_and_speaks_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    assert len((TESTEES / "minimal.py").read_text().splitlines()) <= 60
    assert main(["smoke", sys.executable, str(TESTEES / "minimal.py")]) == 1
    said = capsys.readouterr().out
    assert "the testee protocol works" in said
    assert "pass    DoneAck/least" in said
