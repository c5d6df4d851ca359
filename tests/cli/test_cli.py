"""The command line for people."""

import io
import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from kvproto.cli.main import main
from kvproto.wire import encode
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import DoneAck
from tests.commands import Ran
from tests.wire.frames import grant, register, transfer

FRAME = encode(DoneAck(session=5, request=6, sequence=1))


def test_decode_hex(ran: Ran) -> None:
    assert "sequence = 1" in ran("decode", FRAME.hex())


def test_decode_file_as_json(tmp_path: Path, ran: Ran) -> None:
    path = tmp_path / "frame"
    path.write_bytes(FRAME)
    assert json.loads(ran("decode", path, "--json"))["fields"]["session"] == "5"


def test_decode_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FRAME)))
    assert main(["decode", "-"]) == 0


def test_decode_byte_by_byte(capsys: pytest.CaptureFixture[str], ran: Ran) -> None:
    assert "21  03 01                                  3 sequence = 1\nDoneAck: good" in ran(
        "decode", "--bytes", FRAME.hex()
    )
    assert main(["decode", "--bytes", FRAME[:-1].hex() + "00"]) == 1
    assert "refused: OUT_OF_RANGE at sequence" in capsys.readouterr().out


def test_secrets_are_in_no_dump(capsys: pytest.CaptureFixture[str]) -> None:
    for message in (transfer(grant([1])), register()):
        for frame in (encode(message), encode(message)[:-1]):
            main(["decode", "--bytes", frame.hex()])
            said = capsys.readouterr().out.replace(" ", "")
            assert not {s for s in ("abababab", "cdefcdef", (1 << 46).to_bytes(8, "big").hex()) if s in said}


def test_decode_struct(ran: Ran) -> None:
    assert main(["decode", "--struct", "Version", "8201010200"]) == 0
    assert '{"struct": "Version", "fields": {"major": "1", "minor": "0"}}' in ran(
        "decode", "--struct", "Version", "--json", "8201010200"
    )
    assert main(["decode", "--struct", "Version", "--bytes", "82010102"]) == 1
    with pytest.raises(SystemExit):
        main(["decode", "--struct", "Nothing", "80"])


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert "kvproto" in capsys.readouterr().out


def test_long_hex_is_not_taken_for_a_file_name(ran: Ran) -> None:
    frame = encode(transfer(*(attrs.evolve(grant([1, 70000]), group=g) for g in range(40))))
    said = ran("decode", frame.hex(" "))
    assert "2 first = 0  (u64, token)" in said
    assert "5 items = [    1, 70000] [2]  (array<u32>, item)" in said


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_secrets_are_redacted(json_flag: list[str], ran: Ran) -> None:
    for message in (transfer(grant([1])), register()):
        said = ran("decode", encode(message).hex(), *json_flag)
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
def test_bad_input_is_one_sentence(source: str, says: str, ran: Ran) -> None:
    said = ran("decode", source, status=1)
    assert says in said
    assert said.count("\n") == 1


def test_errors_by_name_or_number(capsys: pytest.CaptureFixture[str], ran: Ran) -> None:
    first, link, second, other = ran("errors", "peer_lost", "0x0208").splitlines()
    assert link.endswith("docs/troubleshooting.md#PEER_LOST")
    assert other.endswith("docs/troubleshooting.md#BAD_GRANT")
    assert first.startswith("0x040a PEER_LOST")
    assert second.startswith(f"0x0208 {ErrorCode(0x0208).name}")
    for wrong, said in (("PEER_LOSS", "is it PEER_LOST"), ("0xffff", "see `kvproto errors`")):
        with pytest.raises(SystemExit):
            main(["errors", wrong])
        assert said in capsys.readouterr().err


def test_errors(ran: Ran) -> None:
    assert "CONTENT_MISMATCH" in ran("errors")


def test_reader_that_has_seen_enough(tmp_path: Path) -> None:
    frame = encode(transfer(*(attrs.evolve(grant(list(range(4000))), group=g) for g in range(40))))
    path = tmp_path / "frame"
    path.write_bytes(frame)
    command = f"{sys.executable} -m kvproto.cli.main decode --json {path} | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize("command", [["decode"], ["plan", "/dev/zero"], ["check", "/dev/zero"]])
def test_a_file_without_end_is_not_read(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main([*command, "/dev/zero"]) == 1
    assert "at most 67108864 bytes" in capsys.readouterr().err
