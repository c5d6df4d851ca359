"""The driver for live engines: the reference passes, what is no engine is an error, and what NIXL is missing for is said."""

import contextlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import zmq

from kvproto_conformance import engines
from kvproto_conformance.__main__ import main
from kvproto_conformance.claims import EXTENSIONS
from kvproto_conformance.live import __main__ as alone
from kvproto_conformance.live import list_scenarios, run, scenario
from kvproto_conformance.live.engine import Engine, EngineFault
from kvproto_conformance.live.memory import BadHandle
from kvproto_conformance.live.nixl import Staging, read_handle, write_handle
from kvproto_conformance.live.peer import Missed
from kvproto_conformance.live.prefill import PrefillRun
from kvproto_conformance.live.running import UNSHARED, Result
from kvproto_conformance.live.scenario import SCENARIOS, Scenario
from kvproto_conformance.live.wire import Dealer
from tests.cases import sampled
from tests.conformance.faulty_engine import FAULTS, found

TESTEES = Path(__file__).parents[2] / "conformance/testees"
NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
SAID = Staging("kvproto-" + "a" * 32, 1 << 40, 2560, 0, 1, 640, b"m" * 300)


def adapter(name: str) -> list[str]:
    return [sys.executable, str(TESTEES / name)]


def apart(role: str) -> list[str]:
    """An engine without memory in common with anybody."""
    return [sys.executable, str(Path(__file__).with_name("inline_engine.py")), role]


@pytest.mark.parametrize(
    ("role", "numbers"),
    [
        ("source", "101 1021 1031 104 1063 111 150 1612 520"),
        ("sink", "1101 1131 1173 1415 1422 1621 301 319 803 890 902 903 905"),
        pytest.param("source", "1202 1204 1211", marks=NIXL),
        pytest.param("sink", "1252 1254 1261", marks=NIXL),
    ],
)
def test_the_reference_passes(role: str, numbers: str) -> None:
    ids = [f"LIVE-{number}" for number in numbers.split()]
    results = list(run(adapter(f"live_{role}.py"), [SCENARIOS[id] for id in ids]))
    assert [(r.id, r.status, r.text) for r in results] == [(id, "pass", "") for id in ids]
    least = 3 if numbers.startswith("12") else 6  # of what is staged only the staging is checked
    assert all(len(result.checks) >= least for result in results)


@pytest.mark.parametrize("role", ["source", "sink"])
def test_extensions_are_asked_of_those_who_name_them(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine of the core looks whole; a scenario that is named by its id runs whatever it needs."""
    played: list[set[str]] = []

    def play(command: list[str], chosen: list[Scenario]) -> Iterator[Result]:
        played.append({each.id for each in chosen})
        return (Result(each.id, "pass", (), "", "", 0.0) for each in chosen)

    monkeypatch.setattr(alone, "run", play)
    every = {each.id: {*map(str.lower, each.extensions)} for each in list_scenarios(role)}
    assert set().union(*every.values()) <= EXTENSIONS.keys()
    some = next(id for id, needed in every.items() if needed)
    for named in ([], ["verify"], ["staged"], [*EXTENSIONS]):
        words = [word for name in named for word in ("--extension", name)]
        assert alone.main(["--role", role, *words, "--", "adapter"]) == 0
        assert played.pop() == {id for id, needed in every.items() if needed <= {*named}}
        assert ("not run: " in capsys.readouterr().out) == (named != [*EXTENSIONS])
    assert alone.main(["--role", role, "--id", some, "--", "adapter"]) == 0
    assert played == [{some}]


@pytest.mark.parametrize(("id", "said", "status"), [("LIVE-896", "nonstrict", 0), ("LIVE-845", "fail", 1)])
def test_who_breaks_a_should_is_nonstrict(
    id: str, said: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a whole run of the suite; who breaks a MUST fails."""
    monkeypatch.setattr(alone, "run", lambda _, chosen: (Result(s.id, "fail", (), "", "", 0.0) for s in chosen))
    assert alone.main(["--role", "sink", "--id", id, "--", "adapter"]) == status
    assert capsys.readouterr().out.startswith(f"{said} ")


@pytest.mark.parametrize(("id", "times"), [("LIVE-123", 12), ("LIVE-340", 22)])
def test_a_scenario_may_run_as_often_as_one_likes(id: str, times: int) -> None:
    """It gives back what the engine's pool of 64 pages has lent it."""
    chosen = [SCENARIOS[id]] * times
    found = [(r.status, r.text) for r in run(adapter(f"live_{chosen[0].role}.py"), chosen)]
    assert found == [("pass", "")] * times


@pytest.mark.parametrize(("id", "starts"), [("LIVE-319", 3), ("LIVE-340", 1)])
def test_an_engine_begins_anew_where_nobody_can_give_its_pages_back(id: str, starts: int, tmp_path: Path) -> None:
    count = f"echo >> {tmp_path}/starts; exec {sys.executable} {TESTEES / 'live_sink.py'}"
    found = [(r.status, r.text) for r in run(["/bin/sh", "-c", count], [SCENARIOS[id]] * 3)]
    assert found == [("pass", "")] * 3
    assert (tmp_path / "starts").read_text() == "\n" * starts


@pytest.mark.parametrize(("framework", "id"), sampled(["torch", "jax"], ["LIVE-103", "LIVE-303"], every=2))
def test_the_reference_engines_pass_with_their_own_pools_and_attention(framework: str, id: str) -> None:
    """By `make conformance ARGS=--live` they run all of L3 in worlds of paged caches."""
    pytest.importorskip(framework)
    (found,) = run(adapter(f"live_{framework}.py"), [SCENARIOS[id]])
    assert (found.status, found.text) == ("pass", "")


@pytest.mark.parametrize(
    ("role", "ids"), [("source", {"LIVE-1662", "LIVE-1681", "LIVE-1683"}), ("sink", {"LIVE-1672"})]
)
def test_the_reference_engine_hands_over_to_and_from_fp8(role: str, ids: set[str]) -> None:
    """From bfloat16 of its own pools, which its own attention reads; the suite is in FP8."""
    chosen = [s for s in list_scenarios(role) if s.id in ids]
    assert [(r.status, r.text) for r in run(adapter("live_torch.py"), chosen)] == [("pass", "")] * len(ids)


@pytest.mark.parametrize(("role", "id"), [("source", "LIVE-101"), ("sink", "LIVE-301")])
def test_an_engine_with_a_part_in_sections_passes(role: str, id: str) -> None:
    """The suite's side has it in one piece."""
    chosen = [s for s in list_scenarios(role) if s.id == id]
    adapter = [sys.executable, str(Path(__file__).with_name("sectioned_engine.py"))]
    assert [(r.status, r.text) for r in run(adapter, chosen)] == [("pass", "")]


def test_a_world_that_an_engine_has_not_is_unsupported() -> None:
    chosen = [s for s in list_scenarios("source") if s.id == "LIVE-105"]
    assert [r.status for r in run(adapter("live_torch.py"), chosen)] == ["unsupported"]


@pytest.mark.parametrize(
    "name",
    [
        "page off by one", "a minor of its own", "begun before the last writer", "a pool is free when it has moved",
        "the pages of one rank for those of all", "Credit when the window is used up", "whatever cannot be read is answered",
        "Done is the end of any stream (LIVE-827)", "the last fault is named",
        "Data waits for Accepted", "a deadline that nobody keeps",
        "pages that only the sink writes wait for proof",
        pytest.param("slots are written that nobody granted", marks=NIXL),
    ],
)  # fmt: skip
def test_a_fault_is_found_by_the_scenario_that_names_it(name: str) -> None:
    """Some of the faults; `python tests/conformance/faulty_engine.py` plants them all."""
    result = found(name)
    assert result.status == "fail"
    if name.startswith("slots"):
        assert result.clause == "KVP-STG-BEYOND"
    assert result.text.startswith(FAULTS[name][3])


def test_a_program_that_is_none_is_an_error() -> None:
    chosen = list_scenarios("source")[:1]
    assert [r.status for r in run(["/no/such/program"], chosen)] == ["error"]
    assert [r.status for r in run([sys.executable, "-c", "print('hello')"], chosen)] == ["error"]


DEAF = [sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(600)"]


def test_an_engine_that_does_not_open_is_not_started_for_each_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "STARTING", 0.5)
    some = [s for s in list_scenarios("source") if (s.world, s.transport) == ("gqa", "SHM")][:3]
    first, *others = run([sys.executable, "-c", "import time; time.sleep(600)"], some)
    assert (first.status, first.text) == ("error", "timeout: no answer to open for 0.5 s")
    assert [(r.status, r.text) for r in others] == [("error", f"not started again: {first.text}")] * 2


def test_an_adapter_that_reads_nothing_is_given_up() -> None:
    engine = Engine(DEAF)
    try:
        with pytest.raises(EngineFault, match="fill was not read"):
            engine.ask("fill", 0.5, data="00" * (1 << 20))
    finally:
        engine.kill()


def test_an_engine_that_reads_nothing_holds_nobody_up() -> None:
    """What a socket does not take is not waited for again and again."""
    with tempfile.TemporaryDirectory(prefix="kvproto-") as folder:
        router = zmq.Context.instance().socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVHWM, 1)
        router.bind(f"ipc://{folder}/deaf")
        dealer, begun = Dealer(f"ipc://{folder}/deaf"), time.monotonic()
        for _ in range(4000):
            dealer.send(bytes(1 << 12))
        took = time.monotonic() - begun
        dealer.close()
        router.close(0)
    assert took < 30


def test_what_the_suite_does_after_a_check_that_failed_is_not_its_fault() -> None:
    """Without one it is."""

    def script(run: PrefillRun, good: bool) -> None:
        run.check("named", good, "it is not so")
        raise KeyError("lost")

    chosen = [attrs.evolve(SCENARIOS["LIVE-101"], script=partial(script, good=good)) for good in (False, True)]
    found = [(result.status, result.text) for result in run(adapter("live_source.py"), chosen)]
    assert found == [("fail", "named: it is not so"), ("suite-error", "KeyError: 'lost'")]


@pytest.mark.parametrize(
    ("role", "numbers"),
    [
        ("source", "101 112 118 143 409 1031 1032 1614"),
        ("sink", "335 353 354 811 889 900 913 915 916 920 926 940 1135 1603"),
    ],
)
def test_an_engine_without_shared_memory_is_met_inline(role: str, numbers: str) -> None:
    """The scenarios go by the transport that needs no memory in common, however often the sink says Credit."""
    ids = [f"LIVE-{number}" for number in numbers.split()]
    found = [(r.id, r.status, r.text) for r in run(apart(role), [SCENARIOS[id] for id in ids])]
    assert found == [(id, "pass", "") for id in ids]


def test_what_an_engine_without_shared_memory_is_not_asked_is_said_and_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, testee = tmp_path / "report", [sys.executable, str(TESTEES / "python_kvproto.py")]
    words = ["--role", "sink", "--level", "L4", "--suite", "session", "--live-sink", " ".join(apart("sink"))]
    for only, status in (("LIVE-31", 0), ("LIVE-319", 2)):
        forms = ["--report", str(path), "--junit", str(tmp_path / "junit")]
        assert main(["run", *words, "--only", only, *forms, "--allow-incomplete", "--", *testee]) == status
        made, said = json.loads(path.read_text()), capsys.readouterr().out
        (unasked,) = [row for row in made["results"] if row["status"] == "unasked"]
        assert (unasked["id"], made["unasked"]) == ("LIVE-319", {UNSHARED: 1})
        assert made["passed"] == made["cases"] == (8 if only == "LIVE-31" else 0)
        assert f"not asked, and not counted: 1 scenarios {UNSHARED}: LIVE-319" in said
        assert "INLINE, which is not claimed" in said
        assert UNSHARED in (tmp_path / "junit").read_text()


def test_a_result_names_the_clause_that_was_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is another one than that of the scenario."""

    def script(run: PrefillRun) -> None:
        raise Missed("no Credit", "KVP-INL-CREDIT")

    monkeypatch.setitem(SCENARIOS, "LIVE-101", attrs.evolve(SCENARIOS["LIVE-101"], script=script))
    case = next(case for case in engines.scenarios() if case.id == "LIVE-101")
    (found,) = engines.played([case], {"source": adapter("live_source.py")}, lambda _: None, 60.0)
    assert (found.case.clause, found.wrong[0].expected) == ("KVP-INL-CREDIT", {"clause": "KVP-INL-CREDIT"})


def test_scenarios_say_what_they_are_about() -> None:
    for each in list_scenarios():
        assert each.clauses, each.id
        assert each.guards.endswith("."), each.id


@pytest.mark.parametrize("id", ["LIVE-101", "LIVE-751"])
def test_an_adapter_may_be_a_script_that_starts_the_engine(id: str, tmp_path: Path) -> None:
    """Killing the script alone would leave the engine there, with the script's stdout."""
    script = tmp_path / "adapter"
    script.write_text(f"#!/bin/sh\n{sys.executable} {TESTEES / 'live_source.py'}\nexit $?\n")
    script.chmod(0o755)
    chosen = [s for s in list_scenarios("source") if s.id == id]
    assert [(r.status, r.text) for r in run([str(script)], chosen)] == [("pass", "")]


def test_the_memory_of_what_an_adapter_has_started_is_looked_at(tmp_path: Path) -> None:
    held = tmp_path / "kvproto-suite-1"
    held.touch()
    child = f'exec < {held}; echo \'{{"seq": 1, "ok": {{}}}}\'; exec sleep 600'  # it answers once it holds it
    engine = Engine(["/bin/sh", "-c", f"({child}) & wait"])
    try:
        engine.ask("open")
        links = []
        for link in [fd for pid in engine.pids for fd in Path(f"/proc/{pid}/fd").iterdir()]:
            with contextlib.suppress(FileNotFoundError):  # closed since
                links.append(link.readlink())
    finally:
        engine.kill()
    assert held in links


def test_a_process_that_outlives_its_adapter_holds_nobody_up() -> None:
    """It is in a session where the suite does not find it, and has the adapter's stdout."""
    engine = Engine(["/bin/sh", "-c", 'setsid sleep 30 & echo \'{"seq": 1, "ok": {}}\'; wait'])
    engine.ask("open")
    begun = time.monotonic()
    engine.kill()
    assert time.monotonic() - begun < 20


STALLS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from live_source import Prefill
engine = Prefill()
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "open":
        print(json.dumps({"seq": asked["seq"], "ok": engine.on_open(asked)}), flush=True)
"""


def test_an_engine_that_is_silent_too_often_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, but its adapter answers nothing after `open`."""
    monkeypatch.setattr(Engine.answer, "__defaults__", (0.2,))
    monkeypatch.setattr(Engine.ask, "__defaults__", (0.2,))
    some = [s for s in list_scenarios("source") if s.id == "LIVE-101"] * 5
    found = [r.text for r in run([sys.executable, "-c", STALLS, str(TESTEES)], some)]
    assert found == ["timeout: no answer to request for 0.2 s"] * 3 + ["not asked: it was silent too often before"] * 2


def test_an_engine_has_no_more_than_the_time_of_the_run() -> None:
    (found,) = run(adapter("live_source.py"), list_scenarios("source")[:1], 0.0)
    assert (found.status, found.text) == ("error", "not asked: the time of this run is over")


# extension staged


def test_a_suite_without_nixl_says_what_it_could_not_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    report = tmp_path / "report.json"
    claim = [
        "--role",
        "source",
        "--level",
        "L3",
        "--only",
        "LIVE-120",
        "--extension",
        "staged",
        "--extension",
        "resume",
    ]
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
