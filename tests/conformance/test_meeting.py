"""Versions meet: today's, later ones that do not exist yet, made from the registry, and one that is frozen."""

import json
import lzma
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvproto_conformance import meeting
from kvproto_conformance.__main__ import main
from kvproto_conformance.cases import load, of_minor
from kvproto_conformance.claims import Claim
from kvproto_conformance.data import KEPT, VECTORS, spec
from kvproto_conformance.live import Result, list_scenarios
from kvproto_conformance.live import run as run_live
from kvproto_conformance.meeting import Sample, Version, heard, meet, negotiate
from kvproto_conformance.run import Wrong, run
from kvproto_conformance.testee import Testee as Driver
from tools import c_programs, made_up
from tools.conformance import rust_testee
from tools.specgen.registry import ROOT
from tools.specgen.registry import load as registry

Json = dict[str, Any]
Built = tuple[Version, Path]
TESTEES = ROOT / "conformance/testees"
PRODUCT = [sys.executable, str(TESTEES / "python_kvproto.py")]
TODAY = Version(registry())


def started(command: list[str]) -> Driver:
    testee = Driver(command, patience=20)
    assert isinstance(testee.greet({"op": "hello", "driver": 1}), dict)
    return testee


@pytest.fixture(scope="module")
def today() -> Iterator[Driver]:
    with started(PRODUCT) as testee:
        yield testee


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Builds the next minor or major version, which does not exist, in a folder that holds all of it."""

    @cache
    def built(name: str) -> Built:
        folder = tmp_path_factory.mktemp(name)
        facts = getattr(made_up, name)(registry())
        made_up.build(facts, folder)
        return Version(facts), folder

    return built


LATER = (("minor", "python"), ("minor", "node"), ("minor", "c"), ("minor", "rust"), ("major", "python"))
IN_PYTHON = pytest.mark.parametrize("later", [LATER[0], LATER[-1]], indirect=True, ids="-".join, scope="module")


@attrs.frozen
class Later:
    """A later version, its vectors, and an implementation of it, generated in one of four languages."""

    version: Version
    vectors: Path
    testee: Driver


@pytest.fixture(scope="module", params=LATER, ids="-".join)
def later(request: pytest.FixtureRequest, versions: Callable[[str], Built]) -> Iterator[Later]:
    name, language = request.param
    version, folder = versions(name)
    testees, program = folder / "conformance/testees", folder / f"codec-{language}"
    command = {
        "python": ["env", f"PYTHONPATH={folder}", sys.executable, str(testees / "python_kvproto.py")],
        "node": ["node", str(testees / "node/codec.mjs")],
        "c": c_programs.command("testee", program, ["-std=c11", "-O0"], folder),
        "rust": ["rustc", str(program)],
    }[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    if language == "rust":
        rust_testee(testees / "rust", program)
    elif str(program) in command:
        subprocess.run(command, check=True, timeout=100)
    if str(program) in command:
        command = [str(program)]
    with started(command) as testee:
        yield Later(version, folder / "spec/v1/vectors", testee)


def sentences(vectors: Path = VECTORS) -> list[Sample]:
    """What the vectors have written: one sample for each set of fields, and those with a made-up value."""
    cases = load(vectors)
    said = meeting.samples(of_minor(cases, max(case.minors.start for case in cases)))
    return list({(sample.name, shape(sample.fields)): sample for sample in said}.values())


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return frozenset((key, shape(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(dict.fromkeys(map(shape, value)))
    return "MADE" in str(value)


TODAYS = [sample for sample in sentences() if sample.id != "Register/regions.device-cuda-next-with"]
"""What today writes, but for a device beside the kind of memory that the next minor adds, which today's rule is not about."""


def wrong(met: Iterable[Wrong | None]) -> list[str]:
    return [str(one) for one in met if one is not None]


@IN_PYTHON
def test_today_reads_what_a_later_version_writes(today: Driver, later: Later) -> None:
    """KVP-VER-SINCE: additions are skipped, kept or never said; of a later major what is frozen is read."""
    met = list(meet(sentences(later.vectors), later.testee, today, (later.version, TODAY)))
    assert len(met) > 120
    assert wrong(met) == []


def test_a_later_version_reads_what_today_writes(today: Driver, later: Later) -> None:
    assert wrong(meet(TODAYS, today, later.testee, (TODAY, later.version))) == []


@pytest.mark.parametrize("later", LATER[:-1], indirect=True, ids="-".join, scope="module")
def test_a_later_version_reads_all_that_it_writes(later: Later) -> None:
    cases = of_minor((case for case in load(later.vectors) if case.suite == "codec" and not case.needs), 1)
    assert [result.wrong[0] for result in run(cases, later.testee) if result.wrong] == []


@IN_PYTHON
def test_today_and_later_negotiate(today: Driver, later: Later) -> None:
    """KVP-NEG-VERSION, KVP-NEG-IGNORE: the lower minor and no feature that one does not know, or no common version."""
    terms = later.version.terms
    both = {**terms, "versions": [*terms["versions"], *TODAY.terms["versions"]]}
    for testee in (today, later.testee):
        for theirs in (terms, both):
            assert wrong(negotiate(testee, TODAY.terms, theirs)) == []
    chosen = today.ask({"op": "negotiate", "sink": TODAY.terms, "source": terms})
    minor = later.version.facts["protocol"]["minor"] > 0
    features = sorted(TODAY.terms["offered"], key=int)
    assert chosen == (
        {"version": "1.0", "features": features} if minor else {"error": "NO_VERSION", "path": "versions"}
    )


@pytest.fixture
def next_minor() -> Version:
    return Version(made_up.minor(registry()))


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("Ping", {"session": "1", "x_made_up": []}, {"message": "Ping", "fields": {"session": "1"}}),
        ("MadeUp", {"session": "1"}, {"error": "UNKNOWN_MESSAGE", "path": "@type"}),
        ("Accepted", {"made_up": "1"}, {"error": "UNKNOWN_FIELD", "path": "#0010"}),
        ("Hello", {"role": "MADE_UP"}, {"message": "Hello", "fields": {"role": {"unknown": "3"}}}),
    ],
)
def test_what_an_older_reader_makes_of_an_addition(
    next_minor: Version, name: str, fields: Json, expected: Json
) -> None:
    assert heard(Sample("", "message", name, fields), next_minor, TODAY) == expected


def test_an_addition_that_is_not_skipped_is_found(today: Driver) -> None:
    """Were an older reader to keep what it should skip, the meeting would say so."""
    ping = Sample("ping", "message", "Ping", {"session": "1", "request": "2"})
    closed = Version(json.loads(json.dumps(TODAY.facts)))
    closed.facts["message"]["Ping"]["field"][1]["id"] = 0x10
    assert len(wrong(meet([ping], today, today, (TODAY, closed)))) == 1


@pytest.mark.parametrize(("role", "ids"), [("source", ["LIVE-104", "LIVE-105"]), ("sink", ["LIVE-304", "LIVE-305"])])
def test_a_later_engine_serves_one_of_today(role: str, ids: list[str], versions: Callable[[str], Built]) -> None:
    """KVP-VER-SINCE, KVP-FRAME-W-MAJOR: it says all that may be ignored, and nothing else that today's would not know."""
    engine = ["env", f"PYTHONPATH={versions('minor')[1]}", sys.executable, LATER_ENGINE, role]
    chosen = [scenario for scenario in list_scenarios(role) if scenario.id in ids]
    results = list(run_live(engine, chosen))
    assert [(result.id, result.status, result.text) for result in results] == [(id_, "pass", "") for id_ in ids]
    added = f"cd{made_up.ignored(registry()['struct']['Geometry']):04x}"
    assert any(added in frame for result in results for frame in sent(result))


@pytest.mark.parametrize("engine", ["today", "minor"])
@pytest.mark.parametrize(("role", "ids"), [("source", ["LIVE-104", "LIVE-105"]), ("sink", ["LIVE-304", "LIVE-305"])])
def test_a_later_peer_meets_an_engine(role: str, ids: list[str], engine: str, versions: Callable[[str], Built]) -> None:
    """KVP-NEG-CHOOSE: a session of 1.0 with today's engine, and of the later minor with one that speaks it too."""
    folder = versions("minor")[1]
    engines = {
        "today": [sys.executable, str(TESTEES / f"live_{role}.py")],
        "minor": ["env", f"PYTHONPATH={folder}", sys.executable, LATER_ENGINE, role],
    }
    speaking = ["env", f"KVPROTO_REGISTRY={folder / 'spec/v1/registry.json'}", sys.executable, LATER_PEER]
    chosen = [word for id_ in ids for word in ("--id", id_)]
    command = [*speaking, "--role", role, *chosen, "--", *engines[engine]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ids)} of {len(ids)}" in done.stdout


LATER_ENGINE = str(Path(__file__).with_name("later_engine.py"))
LATER_PEER = str(Path(__file__).with_name("later_peer.py"))


def sent(result: Result) -> list[str]:
    """Descriptions that the engine has sent, in hex."""
    return [
        str(fields["geometry"])
        for log in result.log
        for _, who, _, fields in log
        if who == "engine" and "geometry" in fields
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> meeting.Kept:
    """The last candidate, with a few of its vectors."""
    folder = tmp_path_factory.mktemp("versions") / meeting.kept()[-1].name
    shutil.copytree(KEPT / folder.name, folder)
    packed = folder / "vectors.json.xz"
    files = json.loads(lzma.decompress(packed.read_bytes()))
    assert len(files) > 50
    few = {name: file for name, file in files.items() if "Done" in name or name.startswith("negotiation")}
    packed.write_bytes(lzma.compress(json.dumps(few).encode(), preset=0))
    return meeting.Kept(folder)


def test_every_candidate_is_kept() -> None:
    names = [row["version"] for row in TODAY.facts["candidate"]]
    assert [version.name for version in meeting.kept()] == names
    assert names[-1] == spec()


def test_of_each_minor_version_the_last_candidate_counts() -> None:
    names = ["1.0-rc1", "1.0-rc2", "1.0", "1.1-rc1"]
    assert meeting.last([meeting.Kept(Path(name)) for name in names]) == {"1.0", "1.1-rc1"}


def test_today_meets_what_is_kept(
    kept: meeting.Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "KEPT", kept.folder.parent)
    monkeypatch.setattr(meeting, "SESSIONS", {"source": ["LIVE-101"], "sink": ["LIVE-301"]})
    live = {role: f"{sys.executable} {TESTEES / f'live_{role}.py'}" for role in ("source", "sink")}
    given = [word for role, command in live.items() for word in (f"--live-{role}", command)]
    assert main(["meet", "--patience", "20", *given, "--", *PRODUCT]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"{kept.name}:"
    assert [line.strip().split(": ")[0] for line in lines] == [
        "its vectors hold",
        "it writes, the testee reads",
        "the testee writes, it reads",
        "they negotiate alike",
        "a peer of old meets the source",
        "a peer of old meets the sink",
    ]
    counts = [line.rpartition(": ")[2].partition(" scenarios")[0].split(" of ") for line in lines]
    assert all(right == asked for right, asked in counts)


LACKS_WORLDS = """
import sys
sys.path.insert(0, sys.argv[1])
from live_source import Prefill
from toy_engine import serve
class OfOneWorld(Prefill):
    def on_open(self, ask):
        if ask["world"] != "gqa":
            raise NotImplementedError
        return super().on_open(ask)
serve(OfOneWorld())
"""


def test_what_a_peer_of_old_could_not_play_is_named(
    kept: meeting.Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An engine may lack a world; who reads that 1 of 2 scenarios passed wants to know of the other."""
    monkeypatch.setattr(meeting, "KEPT", kept.folder.parent)
    monkeypatch.setattr(meeting, "SESSIONS", {"source": ["LIVE-101", "LIVE-105"]})
    (tmp_path / "engine.py").write_text(LACKS_WORLDS)
    live = f"{sys.executable} {tmp_path / 'engine.py'} {TESTEES}"
    assert main(["meet", "--patience", "20", "--live-source", live, "--", *PRODUCT]) == 0
    said = capsys.readouterr().out.partition("a peer of old meets the source: ")[2]
    assert said.startswith("1 of 2 scenarios")
    assert "unsupported  LIVE-105" in said
    assert "the adapter answers open by unsupported" in said


@pytest.mark.parametrize("later", LATER[:-1], indirect=True, ids="-".join, scope="module")
def test_a_later_version_meets_what_is_kept(kept: meeting.Kept, later: Later) -> None:
    """What it still has to say to an engine of the candidate, and its answers to the candidate's vectors."""
    claim = Claim("codec", "L1", minor=1)
    with started(kept.command) as old:
        met = list(meeting.all_of(kept, old, later.testee, claim, later.version, later.vectors))
    assert [what for what, _, asked in met if asked] == [
        "its vectors hold", "it writes, the testee reads", "the testee writes, it reads",
    ]  # fmt: skip
    assert [str(wrong) for _, some, _ in met for wrong in some] == []


@pytest.mark.parametrize(("role", "id"), [("source", "LIVE-104"), ("sink", "LIVE-304")])
def test_a_later_engine_serves_a_peer_that_is_kept(
    role: str, id: str, kept: meeting.Kept, versions: Callable[[str], Built]
) -> None:
    engine = ["env", f"PYTHONPATH={versions('minor')[1]}", sys.executable, LATER_ENGINE, role]
    good, said = kept.live(role, [id], engine)
    assert good, said


def test_an_engine_that_lost_a_field_is_found_by_a_peer_that_is_kept(kept: meeting.Kept, tmp_path: Path) -> None:
    """The peer speaks by the tables that are kept, whatever today's say."""
    facts = json.loads((kept.folder / "registry.json").read_text())
    facts["message"]["Accepted"]["field"].append(
        {"id": 60, "name": "lost", "type": "u8", "unit": "none", "presence": "required", "since": "1.0", "doc": "Lost."}
    )
    (tmp_path / "registry.json").write_text(json.dumps(facts))
    engine = [sys.executable, str(TESTEES / "live_source.py")]
    good, said = meeting.Kept(tmp_path).live("source", ["LIVE-101"], engine)
    assert not good
    assert "a frame that a strict reader refuses: MISSING_FIELD at lost" in said
