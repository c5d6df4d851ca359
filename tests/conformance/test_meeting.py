"""Versions meet: the one that is kept, today's, and versions that do not exist yet, made from the registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvproto_conformance import meeting
from kvproto_conformance.cases import Case, load
from kvproto_conformance.live import Result, list_scenarios
from kvproto_conformance.live import run as run_live
from kvproto_conformance.meeting import Kept, Sample, Version, heard, meet, negotiate
from kvproto_conformance.run import run
from kvproto_conformance.testee import Testee
from tools import made_up
from tools.specgen.registry import ROOT
from tools.specgen.registry import load as registry

Json = dict[str, Any]
TESTEES = ROOT / "conformance/testees"
KEPT = {kept.name: kept for kept in meeting.kept()}
TODAY = Version(registry())


@pytest.fixture(scope="module", params=KEPT)
def kept(request: pytest.FixtureRequest) -> Kept:
    return KEPT[request.param]


@pytest.fixture(scope="module")
def old(kept: Kept) -> Iterator[Testee]:
    with started(kept.command) as testee:
        yield testee


@pytest.fixture(scope="module")
def today() -> Iterator[Testee]:
    with started([sys.executable, str(TESTEES / "python_kvproto.py")]) as testee:
        yield testee


def started(command: list[str]) -> Testee:
    testee = Testee(command, patience=20)
    assert isinstance(testee.greet({"op": "hello", "driver": 1}), dict)
    return testee


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Version, Path]]:
    """Builds the next minor or major version, which does not exist, in a folder that holds all of it."""

    @cache
    def built(name: str) -> tuple[Version, Path]:
        folder = tmp_path_factory.mktemp(name)
        facts = getattr(made_up, name)(registry())
        made_up.build(facts, folder)
        return Version(facts), folder

    return built


@pytest.fixture(scope="module", params=["minor", "major"])
def later(request: pytest.FixtureRequest, versions: Callable[[str], tuple[Version, Path]]) -> tuple[Version, Path]:
    return versions(request.param)


@pytest.fixture(scope="module", params=["python", "node", "c", "rust"])
def new(request: pytest.FixtureRequest, later: tuple[Version, Path]) -> Iterator[Testee]:
    """An implementation of it, generated in one of four languages."""
    folder = later[1]
    testees = folder / "conformance/testees"
    if request.param == "python":
        environment = ["env", f"PYTHONPATH={folder}"]
        command = [*environment, sys.executable, str(testees / "python_kvproto.py")]
    elif request.param == "node":
        command = ["node", str(testees / "node/codec.mjs")]
    else:
        command = [str(folder / f"codec-{request.param}")]
        compiler, source = {
            "c": (["gcc", "-std=c11", "-O0"], "c/codec.c"),
            "rust": (["rustc"], "rust/codec.rs"),
        }[request.param]
        if shutil.which(compiler[0]):
            subprocess.run([*compiler, "-o", *command, str(testees / source)], check=True, timeout=100)
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {request.param}")
    with started(command) as testee:
        yield testee


def test_what_is_kept_needs_nothing_of_today(kept: Kept, tmp_path: Path) -> None:
    shutil.copytree(kept.folder, tmp_path / kept.name, ignore=shutil.ignore_patterns("__pycache__"))
    asked = [{"op": "hello"}, {"op": "decode", "frame": "4b56"}, {"op": "stop"}]
    lines = "".join(json.dumps({"seq": i} | ask) + "\n" for i, ask in enumerate(asked))
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = [sys.executable, "-E", "-s", "-c", ALONE, str(tmp_path / kept.name)]
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


def test_the_vectors_that_are_kept_hold(kept: Kept, today: Testee) -> None:
    """Whoever has built by them is right today, but for what `changed.toml` names."""
    cases = kept.cases()
    failed = {result.case.id for result in run(cases, today) if result.wrong}
    assert len(cases) > 4_500
    assert failed == kept.changed.keys()


def test_old_writes_and_today_reads(kept: Kept, old: Testee, today: Testee) -> None:
    said = meeting.samples(kept.cases())
    assert len(said) > 300
    assert wrong(meet(said, old, today, (kept.version, TODAY))) == []


def test_today_writes_and_old_reads(kept: Kept, old: Testee, today: Testee) -> None:
    said = meeting.samples(load())
    assert wrong(meet(said, today, old, (TODAY, kept.version))) == []


def test_old_and_today_negotiate(kept: Kept, old: Testee, today: Testee) -> None:
    for testee in (old, today):
        assert wrong(negotiate(testee, kept.version.terms, TODAY.terms)) == []


def test_old_and_later_read_each_other(kept: Kept, old: Testee, later: tuple[Version, Path], new: Testee) -> None:
    """KVP-VER-SINCE: what a later version adds is skipped, kept, or never said; of a later major what is frozen is read."""
    version, folder = later
    additions = meeting.samples(load(folder / "spec/v1/vectors"))
    met = list(meet(additions, new, old, (version, kept.version)))
    assert len(met) > 300
    assert wrong(iter(met)) == []
    assert wrong(meet(meeting.samples(kept.cases()), old, new, (kept.version, version))) == []


def test_later_and_later_read_all_that_they_write(later: tuple[Version, Path], new: Testee) -> None:
    cases: list[Case] = [case for case in load(later[1] / "spec/v1/vectors") if case.suite == "codec"]
    assert [result.wrong[0] for result in run(cases, new) if result.wrong] == []


def test_old_and_later_negotiate(kept: Kept, old: Testee, later: tuple[Version, Path], today: Testee) -> None:
    """KVP-NEG-VERSION, KVP-NEG-IGNORE: the lower minor and no feature that one does not know, or no common version."""
    terms = later[0].terms
    both = {**terms, "versions": [*terms["versions"], *kept.version.terms["versions"]]}
    for testee in (old, today):
        for theirs in (terms, both):
            assert wrong(negotiate(testee, kept.version.terms, theirs)) == []
    chosen = old.ask({"op": "negotiate", "sink": kept.version.terms, "source": terms})
    minor = later[0].facts["protocol"]["minor"] > 0
    features = sorted(kept.version.terms["offered"], key=int)
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


def test_an_addition_that_is_not_skipped_is_found(today: Testee, next_minor: Version) -> None:
    """Were an older reader to keep what it should skip, the meeting would say so."""
    ping = Sample("ping", "message", "Ping", {"session": "1", "request": "2"})
    closed = Version(json.loads(json.dumps(TODAY.facts)))
    closed.facts["message"]["Ping"]["field"][1]["id"] = 0x10
    assert len(wrong(meet([ping], today, today, (TODAY, closed)))) == 1


def wrong(met: Iterator[Any]) -> list[str]:
    return [str(each) for each in met if each is not None]


@pytest.mark.parametrize(
    ("role", "ids"), [("source", ["LIVE-101", "LIVE-104", "LIVE-105"]), ("sink", ["LIVE-301", "LIVE-304", "LIVE-305"])]
)
def test_a_later_engine_serves_one_of_today(
    role: str, ids: list[str], versions: Callable[[str], tuple[Version, Path]]
) -> None:
    """KVP-VER-SINCE, KVP-FRAME-W-MAJOR: it says all that may be ignored, and nothing else that today's would not know."""
    engine = ["env", f"PYTHONPATH={versions('minor')[1]}", sys.executable, LATER, role]
    chosen = [each for each in list_scenarios(role) if each.id in ids]
    results = list(run_live(engine, chosen))
    assert [(each.id, each.status, each.text) for each in results] == [(id_, "pass", "") for id_ in ids]
    assert any("cd8002" in frame for each in results for frame in sent(each))


LATER = str(Path(__file__).with_name("later_engine.py"))


def sent(result: Result) -> list[str]:
    """Descriptions that the engine has sent, in hex."""
    return [
        str(fields["geometry"])
        for log in result.log
        for _, who, _, fields in log
        if who == "engine" and "geometry" in fields
    ]
