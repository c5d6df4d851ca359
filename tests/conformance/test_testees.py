"""Implementations in other languages, which share no code with kvproto, keep the contract as far as they claim."""

import shutil
from pathlib import Path

import pytest

from kvproto_conformance.__main__ import main

TESTEES = Path(__file__).parents[2] / "conformance/testees"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_javascript(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "node", str(TESTEES / "node/codec.mjs")]) == 0
    assert "conformant: kvproto 1.0-draft · codec · L1 · json · streams" in capsys.readouterr().out
