"""Questions that no vector has, which a testee that remembers cannot answer."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.errors import KvprotoError
from kvproto.wire.codec import decode, encode
from kvproto_conformance import report
from kvproto_conformance.__main__ import main
from kvproto_conformance.cases import claimed, load
from kvproto_conformance.claims import ROLES, Claim
from kvproto_conformance.fresh import FRESH, PREFIX, fresh, freshened

CASES = load()
MINIMAL = [sys.executable, str(Path(__file__).parents[2] / "conformance/testees/minimal.py")]
REMEMBERS = """
import json, sys
from kvproto_conformance.cases import load
known = {json.dumps(ask.question, sort_keys=True): ask.expected for case in load() for ask in case.asks}
for line in sys.stdin:
    question = json.loads(line)
    seq = question.pop("seq")
    if question["op"] == "stop":
        break
    answer = known.get(json.dumps(question, sort_keys=True), {"unsupported": True})
    if question["op"] == "hello":
        answer = {"driver": 1, "role": "ROLE", "level": "L1"}
    print(json.dumps({"seq": seq, **answer}), flush=True)
"""


@pytest.mark.parametrize("role", ["reader", "codec", "router"])
def test_a_testee_that_remembers_the_vectors_is_nonconformant(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    testee = [sys.executable, "-c", REMEMBERS.replace("ROLE", role)]
    assert main(["run", "--report", str(path), "--", *testee]) == 1
    rows = report.read(path)["results"]
    assert {row["status"] for row in rows if row["suite"] != "testee"} == {"pass"}
    wrong = [row["id"] for row in rows if row["status"] == "fail"]
    assert wrong
    assert all(id.startswith(PREFIX) for id in wrong)
    beside = "beside them, about the testee itself and with numbers that no vector has: "
    assert f", {len(wrong)} fail" in capsys.readouterr().out.partition(beside)[2].partition("\n")[0]


def test_one_of_them_is_replayed_as_it_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    main(["run", "--seed", "3", "--report", str(path), "--", sys.executable, "-c", REMEMBERS.replace("ROLE", "codec")])
    row = next(row for row in report.read(path)["results"] if row["id"].startswith(PREFIX))
    capsys.readouterr()
    assert main(["replay", str(path), row["id"]]) == 1
    assert json.dumps(row["wrong"][0]["question"], ensure_ascii=False)[:60] in capsys.readouterr().out


def test_what_is_known_to_fail_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, known = tmp_path / "report.json", tmp_path / "known.toml"
    known.write_text('[[known]]\nid = "DoneAck/trailing"\nissue = "x"\nuntil = "2999-01-01"\n')
    main(["run", "--baseline", str(known), "--report", str(path), "--", *MINIMAL])
    assert not [row for row in report.read(path)["results"] if row["id"].startswith(PREFIX)]
    main(["run", "--report", str(path), "--", *MINIMAL])
    assert [row for row in report.read(path)["results"] if row["id"].startswith(PREFIX)]
    main(["run", "--report", str(path), "--", sys.executable, "-c", REMEMBERS.replace("ROLE", "codec")])
    capsys.readouterr()
    assert main(["baseline", str(path), "--issue", "x", "--until", "2999-01-01"]) == 0
    assert capsys.readouterr().out == ""


def test_every_role_has_some() -> None:
    asked = {json.dumps(ask.question, sort_keys=True) for case in CASES for ask in case.asks}
    for role in ROLES:
        found = fresh(5, claimed(CASES, Claim(role, "L1")))
        assert 10 <= len(found) <= FRESH, role
        assert not [case.id for case in found for ask in case.asks if json.dumps(ask.question, sort_keys=True) in asked]


def test_they_follow_from_the_seed() -> None:
    mine = claimed(CASES, Claim("codec", "L1"))
    found = [case.asks for case in fresh(5, mine)]
    assert [case.asks for case in fresh(5, mine)] == found
    assert [case.asks for case in fresh(6, mine)] != found


FRAMES = [case for case in CASES if case.suite == "codec" and "frame" in case.asks[0].question and not case.refusing]


@given(st.sampled_from(FRAMES), st.integers(0, 2**32))
def test_kvproto_reads_and_writes_them_as_the_suite_does(which: object, seed: int) -> None:
    """Two codecs that share no code agree on frames that neither was tested with."""
    made = freshened(seed, which)  # type: ignore[arg-type]
    if made is None:
        return
    for ask in made.asks:
        if "frame" in ask.question:
            frame = bytes.fromhex(ask.question["frame"])
            try:
                assert encode(decode(frame)) == frame
            except KvprotoError as error:
                raise AssertionError(f"{made.id}: {error}") from error
