"""`kvproto tiers DIR`: folders with whole, damaged and orphaned files, as the command line shows and prunes them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvproto.cli.main import main
from kvproto.tiers.file_store import FileStore
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_store import PageStore
from tests.commands import Ran
from tests.tiers.schedules import LAYOUT, page, prompt

PROMPT = prompt(1, 2, 3, 4, 5, 6, 7)
"""Of three pages."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    page_store = PageStore(FileStore(tmp_path), LAYOUT)
    for i in range(3):
        assert page_store.write(PROMPT, i, page(PROMPT, i))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], status: int, *args: object) -> Any:
    assert main(["tiers", *map(str, args), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def files(folder: Path, kind: str, name: str = "*") -> list[Path]:
    return sorted(path for path in (folder / kind).rglob(name) if path.is_file())


def test_pages_are_told_by_namespace(folder: Path, capsys: pytest.CaptureFixture[str], ran: Ran) -> None:
    other = Chain(b"\1" * 32, 2)
    other.extend([1, 2, 3])
    data = page(other, 0)
    del data[2]
    assert PageStore(FileStore(folder), LAYOUT).write(other, 0, data)
    kinds = said(capsys, 0, folder, "--verify")["kinds"]
    assert [(kind["namespace"], kind["pages"], kind["bytes"]) for kind in kinds] == [
        ("00" * 32, 3, 111),
        ("01" * 32, 1, 32),
    ]
    assert kinds[0]["groups"]["1"] == {"counts": "AHEAD PREFIX", "pages": 3, "bytes": 24}
    assert "3 pages of 2 tokens, 111 bytes" in ran("tiers", folder)


def test_a_flipped_bit_is_found_by_reading_all_and_pruned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KVP-TIER-CHECK, KVP-TIER-GONE."""
    object_ = files(folder, "o", f"{PROMPT.ahead[1].hex()}*")[0]
    object_.write_bytes(bytes((object_.read_bytes()[0] ^ 1,)) + object_.read_bytes()[1:])
    assert not said(capsys, 0, folder)["damaged"]
    (damaged,) = said(capsys, 1, folder, "--verify")["damaged"]
    assert damaged["why"] == "group 0 has other bytes"
    assert PROMPT.ahead[1].hex() in damaged["key"]
    after = said(capsys, 0, folder, "--verify", "--prune")
    assert after["deleted"] == {"damaged": 1, "files": 0}
    assert (after["kinds"][0]["pages"], after["orphans"]) == (2, {})
    assert len(files(folder, "o")) == 6


@pytest.mark.parametrize("harm", ["gone", "short", "a folder", "no manifest", "another name", "a pipe"])
def test_what_no_reader_would_use_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str], harm: str) -> None:
    path = files(folder, "o" if harm in ("gone", "short", "a folder") else "m")[0]
    if harm == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif harm == "no manifest":
        path.write_bytes(b"\x81")
    elif harm == "another name":
        files(folder, "m")[1].rename(path)
    else:
        path.unlink()
    if harm == "a folder":
        path.mkdir()
    elif harm == "a pipe":
        os.mkfifo(path)
    found = said(capsys, 1, folder, "--verify")
    assert len(found["damaged"]) == 1
    assert found["kinds"][0]["pages"] == (1 if harm == "another name" else 2)


def test_files_of_nobody_go_once_they_are_old(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(folder, "m")[0].unlink()
    (folder / "t" / "half").write_bytes(b"12345")
    found = said(capsys, 0, folder, "--prune")
    assert found["deleted"] == {"damaged": 0, "files": 0}
    assert (len(found["orphans"]), sum(found["orphans"].values())) == (3, 37)
    assert found["unfinished"] == {"t/half": 5}
    found = said(capsys, 0, folder, "--prune", "--grace", "-1")
    assert (found["deleted"]["files"], found["orphans"], found["unfinished"]) == (4, {}, {})
    assert found["kinds"][0]["pages"] == 2


def test_a_namespace_is_dropped_by_name(folder: Path, capsys: pytest.CaptureFixture[str], ran: Ran) -> None:
    for name in ("11111111", "0000", ""):
        assert "name one" in ran("tiers", folder, "--drop", name, status=1)
    found = said(capsys, 0, folder, "--drop", "00000000")
    assert (found["deleted"], found["kinds"]) == ({"dropped": 3}, [])
    assert not files(folder, "m") + files(folder, "o")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, ran: Ran) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert "no cached pages" in ran("tiers", path, "--prune", status=1)
    assert not [*tmp_path.iterdir()]
