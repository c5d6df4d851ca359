"""`kvproto probe`, and `kvproto plan --costs` with its file."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvproto.calibration import Host, Probe, load, save
from kvproto.cli.main import main
from kvproto.planning.layout import Parallel
from kvproto.transport.bench import Constants, Measured, Sample
from kvproto.wire import to_json
from kvproto_catalog.models import PRESETS, describe
from tests.commands import Ran


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    made = []
    for tp in (2, 1):
        path = tmp_path / f"tp{tp}.json"
        path.write_text(json.dumps(to_json(describe(PRESETS["llama-3-70b"][0], [], Parallel(tp=tp)))))
        made.append(str(path))
    return made


def costs(path: Path, descriptor: float, packed: float) -> str:
    """A file in which a descriptor takes so many seconds, and packing gives so many bytes a second."""
    ways = (("direct", Constants(10e9, descriptor, 1e-4)), ("packed", Constants(packed, 1e-9, 1e-4)))
    found = tuple(Measured("nixl", way, "host", "host", (Sample(256, 1, 1e-4),), c) for way, c in ways)
    save(Probe("2026-01-02T03:04:05+00:00", False, 1 << 29, Host(2, "x86_64, Linux"), found), path)
    return str(path)


def test_a_probe_is_a_table_data_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: Ran, pair: list[str]
) -> None:
    file = tmp_path / "costs.json"
    options = ["probe", "--quick", "--memory", "8", "--transport", "shm"]
    status = main([*options, "--out", str(file)])
    said = capsys.readouterr()
    assert [line[:8] for line in said.out.splitlines() if "|" in line] == ["fitted o", "shm copy"]
    assert f"[0/1] shm, copy\n[1/1] done\nwrote {file}\n" in said.err
    assert status == (4 if load(file).slow() else 0)
    status = main([*options, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert status == (4 if data["slow"] else 0)
    assert [m["way"] for m in data["measured"]] == ["copy"]
    assert "advice: copy: by numpy copy" in ran("plan", *pair, "--costs", file)


def test_a_transport_that_cannot_start_is_a_slow_path(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvproto.cli.main", "probe", "--quick", "--memory", "8", "--json"]
    command += ["--transport", "nixl", "--transport", "shm"]
    done = subprocess.run(command, env=os.environ | {"UCX_TLS": "nosuch"}, capture_output=True, timeout=60)
    assert done.returncode == 4
    data = json.loads(done.stdout)
    assert [m["transport"] for m in data["measured"]] == ["shm"]
    assert [(s["what"], s["rate"]) for s in data["slow"] if s["what"] == "nixl"] == [("nixl", None)]
    assert "cannot start UCX" in next(a["reason"] for a in data["absent"] if a["what"] == "nixl")


def test_plan_follows_the_costs_and_says_whose_they_are(pair: list[str], tmp_path: Path, ran: Ran) -> None:
    dear, cheap = costs(tmp_path / "dear.json", 1e-3, 5e9), costs(tmp_path / "cheap.json", 1e-9, 5e9)
    for file, kind in ((dear, "pack"), (cheap, "direct")):
        said = ran("plan", *pair, "--costs", file)
        assert f"constants by {file}:" in said
        assert f"  advice: {kind}: " in said
        assert "kernel" not in said
        data = json.loads(ran("plan", *pair, "--costs", file, "--json"))
        assert data["costs"] == file
        assert {p["advice"] for p in data["pairs"]} == {kind}
        assert {name for p in data["pairs"] for name in p["seconds"]} == {"descriptors", "pack + copy + unpack"}


def test_plan_without_costs_says_where_its_constants_are_from(pair: list[str], ran: Ran) -> None:
    assert "constants measured on a pair of H200:" in ran("plan", *pair)
    assert json.loads(ran("plan", *pair, "--json"))["costs"] == "measured on a pair of H200"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("{", "BAD_TYPE at {path}: wanted JSON"),
        ("{}", "MISSING_FIELD at {path}: kvproto_probe"),
        ('{"kvproto_probe": 9}', "UNSUPPORTED_VERSION at {path}: kvproto_probe"),
    ],
)
def test_a_bad_costs_file_is_one_sentence(
    text: str | None, says: str, pair: list[str], tmp_path: Path, ran: Ran
) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    said = ran("plan", *pair, "--costs", path, status=1)
    assert said.startswith("error: ")
    assert says.format(path=path) in said
    assert said.count("\n") == 1


def test_options_that_measure_nothing(tmp_path: Path, ran: Ran) -> None:
    assert "OUT_OF_RANGE at memory" in ran("probe", "--memory", "1", status=1)
    if not importlib.util.find_spec("cuda"):
        assert "NO_TRANSPORT" in ran("probe", "--transport", "cuda", status=1)
    assert "Is a directory" in ran(
        "probe", "--quick", "--memory", "4", "--transport", "shm", "--out", tmp_path, status=1
    )
