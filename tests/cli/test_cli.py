"""The command line for people."""

import io
import json
import sys
from pathlib import Path

import pytest

from kvproto.cli.main import main
from kvproto.wire import encode
from kvproto.wire.messages import DoneAck

FRAME = encode(DoneAck(session=5, request=6, sequence=1, attempt=1))


def test_decode_hex(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", FRAME.hex()]) == 0
    assert "sequence = 1" in capsys.readouterr().out


def test_decode_file_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "frame"
    path.write_bytes(FRAME)
    assert main(["decode", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fields"]["session"] == "5"


def test_decode_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FRAME)))
    assert main(["decode", "-"]) == 0


@pytest.mark.parametrize(("source", "says"), [("00", "BAD_MAGIC"), ("no-such-file", "No such file")])
def test_bad_input_is_one_sentence(source: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", source]) == 1
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["errors"]) == 0
    assert "CONTENT_MISMATCH" in capsys.readouterr().out
