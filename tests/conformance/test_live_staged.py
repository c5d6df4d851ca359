"""Extension staged of live engines: with NIXL beside the suite it is played, and without it the run says what it lacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproto_conformance.__main__ import main
from kvproto_conformance.live import list_scenarios, run
from kvproto_conformance.live.memory import BadHandle
from kvproto_conformance.live.nixl import Staging, read_handle, write_handle
from tests.conformance.faulty_engine import FAULTS, found

TESTEES = Path(__file__).parents[2] / "conformance/testees"
SAID = Staging("kvproto-" + "a" * 32, 1 << 40, 2560, 0, 1, 640, b"m" * 300)


def adapter(name: str) -> list[str]:
    return [sys.executable, str(TESTEES / name)]


@pytest.mark.parametrize(
    ("role", "ids"),
    [("source", ["LIVE-1202", "LIVE-1204", "LIVE-1211"]), ("sink", ["LIVE-1252", "LIVE-1254", "LIVE-1261"])],
)
def test_the_reference_passes(role: str, ids: list[str]) -> None:
    pytest.importorskip("nixl")
    chosen = [s for s in list_scenarios(role) if s.id in ids]
    results = list(run(adapter(f"live_{role}.py"), chosen))
    assert [(r.id, r.status, r.text) for r in results] == [(id, "pass", "") for id in ids]


def test_a_fault_is_found_by_the_scenario_that_names_it() -> None:
    pytest.importorskip("nixl")
    name = "slots are written that nobody granted"
    result = found(name)
    assert (result.status, result.clause) == ("fail", "KVP-STG-BEYOND")
    assert result.text.startswith(FAULTS[name][3])


def test_a_suite_without_nixl_says_what_it_could_not_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    report = tmp_path / "report.json"
    claim = ["--role", "source", "--level", "L3", "--extension", "staged", "--only", "LIVE-120"]
    live = ["--live-source", " ".join(adapter("live_source.py"))]
    ended = main(["run", *claim, *live, "--report", str(report), "--", *adapter("python_kvproto.py")])
    made: dict[str, Any] = json.loads(report.read_text())
    assert ended == 3
    assert made["verdict"] == "incomplete"
    assert made["wanting"] == {"NIXL beside the suite (pip install nixl)": 4}
    assert "4 of them need NIXL beside the suite" in capsys.readouterr().out


def test_a_live_role_without_an_adapter_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claim = ["--role", "sink", "--level", "L3", "--only", "LIVE-301"]
    assert main(["run", *claim, "--", *adapter("python_kvproto.py")]) == 2
    assert "--live-sink, the command of an adapter" in capsys.readouterr().out


def test_a_handle_is_read_as_it_is_written() -> None:
    assert read_handle(bytes.fromhex(write_handle(SAID))) == SAID


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: b"KVNX\x02" + d[5:], lambda d: d + b"\0", lambda d: d[:40]]
)
def test_a_handle_that_is_none_is_refused(change: Any) -> None:
    with pytest.raises(BadHandle):
        read_handle(change(bytes.fromhex(write_handle(SAID))))
