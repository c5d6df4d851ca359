"""The command line for people."""

import io
import json
import sys
from pathlib import Path

import pytest

from kvproto.cli.main import main
from kvproto.wire import encode
from kvproto.wire.messages import DoneAck
from tests.wire.frames import grant, register, transfer

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


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert "kvproto" in capsys.readouterr().out


def test_long_hex_is_not_taken_for_a_file_name(capsys: pytest.CaptureFixture[str]) -> None:
    frame = encode(transfer(*[grant([1, 70000])] * 40))
    assert main(["decode", frame.hex(" ")]) == 0
    said = capsys.readouterr().out
    assert "2 first = 0  (u64, token)" in said
    assert "5 items = [    1, 70000] [2]  (array<u32>, item)" in said


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_secrets_are_redacted(json_flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for message in (transfer(), register()):
        assert main(["decode", encode(message).hex(), *json_flag]) == 0
        said = capsys.readouterr().out
        assert "(secret)" in said
        assert not {s for s in ("abababab", "cdefcdef", str(1 << 46)) if s in said}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("00", "error: the frame does not start with the magic (BAD_MAGIC at @magic: expected 4b565057, found 00)"),
        (FRAME[:-1].hex(), "TRUNCATED at @length"),
        ("no-such-file", "no such file"),
        ("abc", "no such file, and not whole bytes of hex"),
        ("/", "Is a directory"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_bad_input_is_one_sentence(source: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", source]) == 1
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["errors"]) == 0
    assert "CONTENT_MISMATCH" in capsys.readouterr().out
