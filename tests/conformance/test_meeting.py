"""Versions meet: today's, later ones that do not exist yet, made from the registry, and one that is frozen."""

import json
import lzma
import os
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
from kvproto_conformance.cases import load
from kvproto_conformance.data import VECTORS
from kvproto_conformance.live import Result, list_scenarios
from kvproto_conformance.live import run as run_live
from kvproto_conformance.meeting import Sample, Version, heard, meet, negotiate
from kvproto_conformance.run import Wrong, run
from kvproto_conformance.testee import Testee
from tools import freeze, made_up
from tools.specgen.registry import ROOT
from tools.specgen.registry import load as registry

Json = dict[str, Any]
Built = tuple[Version, Path]
TESTEES = ROOT / "conformance/testees"
PRODUCT = [sys.executable, str(TESTEES / "python_kvproto.py")]
TODAY = Version(registry())


def started(command: list[str]) -> Testee:
    testee = Testee(command, patience=20)
    assert isinstance(testee.greet({"op": "hello", "driver": 1}), dict)
    return testee


@pytest.fixture(scope="module")
def today() -> Iterator[Testee]:
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
    testee: Testee


@pytest.fixture(scope="module", params=LATER, ids="-".join)
def later(request: pytest.FixtureRequest, versions: Callable[[str], Built]) -> Iterator[Later]:
    name, language = request.param
    version, folder = versions(name)
    testees, program = folder / "conformance/testees", folder / f"codec-{language}"
    command = {
        "python": ["env", f"PYTHONPATH={folder}", sys.executable, str(testees / "python_kvproto.py")],
        "node": ["node", str(testees / "node/codec.mjs")],
        "c": ["gcc", "-std=c11", "-O0", "-o", str(program), str(testees / "c/codec.c")],
        "rust": ["rustc", "-o", str(program), str(testees / "rust/codec.rs")],
    }[language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    if str(program) in command:
        subprocess.run(command, check=True, timeout=100)
        command = [str(program)]
    with started(command) as testee:
        yield Later(version, folder / "spec/v1/vectors", testee)


def sentences(vectors: Path = VECTORS) -> list[Sample]:
    """What the vectors have written: one sample for each set of fields, and those with a made-up value."""
    return list({(sample.name, shape(sample.fields)): sample for sample in meeting.samples(load(vectors))}.values())


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
def test_today_reads_what_a_later_version_writes(today: Testee, later: Later) -> None:
    """KVP-VER-SINCE: additions are skipped, kept or never said; of a later major what is frozen is read."""
    met = list(meet(sentences(later.vectors), later.testee, today, (later.version, TODAY)))
    assert len(met) > 120
    assert wrong(met) == []


def test_a_later_version_reads_what_today_writes(today: Testee, later: Later) -> None:
    assert wrong(meet(TODAYS, today, later.testee, (TODAY, later.version))) == []


@pytest.mark.parametrize("later", LATER[:-1], indirect=True, ids="-".join, scope="module")
def test_a_later_version_reads_all_that_it_writes(later: Later) -> None:
    cases = [case for case in load(later.vectors) if case.suite == "codec"]
    assert [result.wrong[0] for result in run(cases, later.testee) if result.wrong] == []


@IN_PYTHON
def test_today_and_later_negotiate(today: Testee, later: Later) -> None:
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


def test_an_addition_that_is_not_skipped_is_found(today: Testee) -> None:
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
    assert any("cd8002" in frame for result in results for frame in sent(result))


LATER_ENGINE = str(Path(__file__).with_name("later_engine.py"))


def sent(result: Result) -> list[str]:
    """Descriptions that the engine has sent, in hex."""
    return [
        str(fields["geometry"])
        for log in result.log
        for _, who, _, fields in log
        if who == "engine" and "geometry" in fields
    ]


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Today's version, frozen, with a few of its vectors."""
    folder = tmp_path_factory.mktemp("versions") / "frozen"
    freeze.freeze(folder)
    packed = folder / "vectors.json.xz"
    files = json.loads(lzma.decompress(packed.read_bytes()))
    assert len(files) > 50
    few = {name: file for name, file in files.items() if "Done" in name or name.startswith("negotiation")}
    packed.write_bytes(lzma.compress(json.dumps(few).encode(), preset=0))
    return folder


def test_a_frozen_version_needs_nothing_of_today(frozen: Path) -> None:
    asked = [{"op": "hello"}, {"op": "decode", "frame": "4b56"}, {"op": "stop"}]
    lines = "".join(json.dumps({"seq": i} | ask) + "\n" for i, ask in enumerate(asked))
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = [sys.executable, "-E", "-s", "-c", ALONE, str(frozen)]
    said = subprocess.run(program, input=lines, env=bare, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(said.stdout.splitlines()[-1]) == {"seq": 1, "error": "TRUNCATED", "path": "@length"}


ALONE = """
import runpy, sys
class Nothing:
    def find_spec(self, name, path, target=None):
        if name.startswith("kvproto"):
            raise ImportError(name)
sys.meta_path.insert(0, Nothing())
sys.path.insert(0, sys.argv[1])
runpy.run_path(sys.argv[1] + "/testee.py", run_name="__main__")
"""


def test_today_meets_a_frozen_version(
    frozen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "KEPT", frozen.parent)
    assert main(["meet", "--patience", "20", "--", *PRODUCT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["frozen", "its vectors hold"],
        ["frozen", "it writes, the testee reads"],
        ["frozen", "the testee writes, it reads"],
        ["frozen", "they negotiate alike"],
    ]
    assert all(right == asked for right, asked in (line.rpartition(": ")[2].split(" of ") for line in lines))
