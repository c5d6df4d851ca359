"""Implementations in other languages, which share no code with kvproto, keep the contract as far as they claim."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from kvproto_conformance.__main__ import main

TESTEES = Path(__file__).parents[2] / "conformance/testees"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_javascript(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "node", str(TESTEES / "node/codec.mjs")]) == 0
    assert "conformant: kvproto 1.0-draft · codec · L1 · json · streams" in capsys.readouterr().out


def test_a_live_engine_is_asked_by_the_same_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an adapter its scenarios are left out, which is never conformance."""
    asked = ["run", "--role", "source", "--level", "L3", "--suite", "session", "--only", "LIVE-101"]
    testee = ["--", sys.executable, str(TESTEES / "minimal.py")]
    report = tmp_path / "report.json"
    live = ["--live-source", f"{sys.executable} {TESTEES / 'live_source.py'}", "--report", str(report)]
    assert main([*asked, *live, *testee]) == 3
    assert "incomplete: kvproto 1.0-draft · source · L3 · 1/1" in capsys.readouterr().out
    (row,) = [row for row in json.loads(report.read_text())["results"] if row["suite"] == "session"]
    assert (row["id"], row["status"]) == ("LIVE-101", "pass")
    assert main([*asked, *testee]) == 2
    gone = ["--live-source", "/no/such/adapter", "--report", str(report)]
    assert main([*asked, *gone, *testee]) == 1
    (row,) = [row for row in json.loads(report.read_text())["results"] if row["suite"] == "session"]
    assert row["status"] == "error"
