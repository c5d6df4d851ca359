"""Implementations in other languages, which share no code with kvproto, keep the contract as far as they claim."""

import json
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvproto.wire import to_json
from kvproto.wire.enums import Feature
from kvproto.wire.messages import Geometry
from kvproto_conformance.__main__ import main
from kvproto_conformance.cases import load
from kvproto_conformance.checking import beyond
from kvproto_conformance.codec import Refusal, read_frame
from kvproto_conformance.data import spec
from kvproto_conformance.testee import Testee as Driver
from tests.conformance import test_planner
from tests.plan.test_spreading import odd_world
from tests.plan.wild_worlds import world
from tests.plan.worlds import caches, side
from tools import c_programs
from tools.conformance import rust_testee

TESTEES = Path(__file__).parents[2] / "conformance/testees"
STRICT = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
SANITIZED = ["-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
CORE = [sys.executable, str(TESTEES / "planner.py")]
PATIENCE = 60.0
"""Seconds for an answer to a large question, on a machine that does other things."""
Said = pytest.CaptureFixture[str]


def compiled(flags: list[str], folder: Path) -> list[str]:
    """libkvproto's testee."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    program = folder / "testee"
    subprocess.run(c_programs.command("testee", program, flags), check=True, timeout=100)
    return [str(program)]


def javascript() -> list[str]:
    if shutil.which("node") is None:
        pytest.skip("no node")
    return ["node", str(TESTEES / "node/codec.mjs")]


def perl() -> list[str]:
    if shutil.which("perl") is None:
        pytest.skip("no perl")
    return ["perl", str(TESTEES / "perl/codec.pl")]


def test_what_perl_plans_is_conformant(capsys: Said) -> None:
    folder = Path(perl()[1]).parent
    assert main(["run", "perl", str(folder / "planner.pl")]) == 0
    assert f"conformant: kvproto {spec()} · planner · L2 · " in capsys.readouterr().out


def rust(folder: Path, source: Path) -> list[str]:
    """Without a warning; where a number overflows or an index is out of bounds, it panics."""
    if shutil.which("rustc") is None:
        pytest.skip("no rustc")
    checked = ["-C", "overflow-checks", "-C", "debug-assertions"]
    rust_testee(source, folder / "testee", "-D", "warnings", *checked)
    return [str(folder / "testee")]


MESSAGES = "catalogue", "epochs", "inline", "intent", "pull", "staged", "storage"
"""Extensions that have messages or structs of their own: these testees read all."""
PLANS = "cold", "deals", "json", "sections", "spread", "streams", "verify"


@pytest.fixture(scope="module", params=["c", "javascript", "perl", "rust"])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "rust":
        planner: list[str] = request.getfixturevalue("planner")
        return planner
    commands: dict[str, Callable[[], list[str]]] = {
        "c": lambda: compiled(SANITIZED, folder),
        "javascript": javascript,
        "perl": perl,
    }
    return commands[request.param]()


CODEC = f"codec · L1 · {' · '.join(sorted([*MESSAGES, 'json', 'streams']))}"
WHOLE = f"both · L2 · {' · '.join(sorted([*MESSAGES, *PLANS]))}"


def test_they_are_conformant(command: list[str], capsys: Said) -> None:
    assert main(["run", *command]) == 0
    claim = WHOLE if command[0].endswith("/testee") else CODEC
    assert f"conformant: kvproto {spec()} · {claim}" in capsys.readouterr().out


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """As `init-testee` gives it."""
    folder = tmp_path_factory.mktemp("planner")
    assert main(["init-testee", "--lang", "rust", str(folder)]) == 0
    return rust(folder, folder)


def test_rust_plans_as_kvproto_does(planner: list[str]) -> None:
    """In wild worlds, in those of virtual stages and odd owners, and where one thing of a side is spoilt."""
    with Driver(planner, PATIENCE) as testee:
        testee.greet({"op": "hello"})
        for seed in range(50):
            same_in_worlds(testee, seed)


def same_in_worlds(testee: Driver, seed: int) -> None:
    rng = random.Random(seed)
    wild, held, features = world(seed), caches(rng), rng.choice(test_planner.FEATURES)
    source, sink = (side(rng, held, rng.randint(0, 3), complete=c) for c in (True, False))
    for pair in (
        (wild.source, wild.sink, wild.features),
        (source, sink, features),
        (test_planner.spoilt(rng, source), sink, features),
        (*odd_world(rng), features),
    ):
        assert asked(testee, *pair) == test_planner.ours(*pair), seed


def test_a_planner_of_the_core_is_conformant(capsys: Said) -> None:
    assert main(["run", *CORE]) == 0
    assert f"conformant: kvproto {spec()} · planner · L2 · " in capsys.readouterr().out


def test_a_planner_of_the_core_plans_as_kvproto_does_or_declines() -> None:
    """KVP-GEO-UNSUPPORTED: it declines the worlds that state what it lacks, and no other."""
    planned = 0
    with Driver(CORE) as testee:
        testee.greet({"op": "hello"})
        for seed in range(200):
            rng = random.Random(seed)
            held = caches(rng)
            source, sink = (side(rng, held, rng.randint(0, 3), complete=c) for c in (True, False))
            for pair in ((world(seed).source, world(seed).sink), (source, sink), odd_world(rng)):
                lacked = beyond(*map(to_json, pair)).get("beyond")
                wanted = ("LAYOUT_UNSUPPORTED", lacked[0]["path"]) if lacked else test_planner.ours(*pair, ())
                assert asked(testee, *pair, ()) == wanted, seed
                planned += not lacked and not isinstance(wanted, tuple)
    assert planned > 100


@pytest.mark.parametrize("made", test_planner.LARGE, ids=lambda made: made.__name__)
def test_rust_knows_when_it_is_too_much(planner: list[str], made: test_planner.Made) -> None:
    """KVP-PLAN-SIZE: the greatest world that fits, and the least that does not."""
    fits, beyond = test_planner.LARGE[made]
    with Driver(planner, PATIENCE) as testee:
        testee.greet({"op": "hello"})
        for many in (fits, beyond):
            pair = (*made(many), ())
            found = test_planner.ours(*pair)
            assert asked(testee, *pair) == found
            assert isinstance(found, tuple) == (many == beyond)


def asked(testee: Driver, source: Geometry, sink: Geometry, features: Sequence[Feature]) -> object:
    question = {"op": "plan", "source": to_json(source), "sink": to_json(sink), "features": [f.name for f in features]}
    said = testee.ask(question)
    return (said["error"], said["path"]) if "error" in said else {key: said[key] for key in said if key != "seq"}


def test_c_compiles_without_a_warning(tmp_path: Path) -> None:
    with Driver(compiled(STRICT, tmp_path)) as testee:
        assert isinstance(testee.greet({"op": "hello"}), dict)


def test_they_say_of_damaged_frames_what_the_suite_says(command: list[str]) -> None:
    """Cut short anywhere, and with bytes changed, taken away or put in."""
    rng = random.Random(11)
    frames = [
        bytes.fromhex(case.asks[0].question["frame"])
        for case in load()
        if case.suite == "codec" and case.id.endswith(("/full", "/least")) and "frame" in case.asks[0].question
    ]
    with Driver(command) as testee:
        testee.greet({"op": "hello"})
        for _ in range(600):
            frame = damaged(rng, bytearray(rng.choice(frames)))
            assert testee.ask({"op": "decode", "frame": frame.hex()}) == said(bytes(frame)), frame.hex()


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"session": "1", "reason": "\ud800"}, {"error": "BAD_TEXT", "path": "reason"}),
        ({"session": "1", "reason": "", "x_\udc00": "\udc00"}, {"frame": "4b56505700000500000000000500000082010103a0"}),
    ],
    ids=["where text is", "where it is ignored"],
)
def test_half_a_surrogate_pair_is_no_text(command: list[str], fields: dict[str, str], answer: dict[str, str]) -> None:
    with Driver(command) as testee:
        testee.greet({"op": "hello"})
        assert testee.ask({"op": "encode", "message": "Goodbye", "fields": fields}) == answer


def damaged(rng: random.Random, frame: bytearray) -> bytearray:
    for _ in range(rng.randint(1, 3)):
        if not frame:
            break
        at = rng.randrange(len(frame))
        match rng.randrange(4):
            case 0:
                frame[at] = rng.choice([0, 1, 0x7F, 0x80, 0xC0, 0xC7, 0xCF, 0xD4, 0xDF, 0xFF, rng.randrange(256)])
            case 1:
                del frame[at : at + rng.randint(1, 4)]
            case 2:
                frame[at:at] = rng.randbytes(rng.randint(1, 4))
            case 3:
                del frame[at + 1 :]
    if rng.random() < 0.8 and len(frame) >= 16:
        frame[12:16] = (len(frame) - 16).to_bytes(4, "little")
    return frame


def said(frame: bytes) -> dict[str, object]:
    try:
        message, fields = read_frame(frame)
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}
    return {"message": message, "fields": fields}


def test_init_testee_gives_a_whole_codec(tmp_path: Path, capsys: Said) -> None:
    assert main(["init-testee", "--lang", "node", str(tmp_path)]) == 0
    (made,) = tmp_path.iterdir()
    assert capsys.readouterr().out.startswith(str(made))
    (kept,) = TESTEES.glob("node/codec.*")
    assert made.read_text() == kept.read_text()


def test_init_testee_gives_libkvproto_whole(tmp_path: Path, capsys: Said) -> None:
    """In one folder, and compiled by the command that it prints."""
    assert main(["init-testee", "--lang", "c", str(tmp_path)]) == 0
    compiler, _, _ = capsys.readouterr().out.splitlines()[-1].partition(" && ")
    subprocess.run(shlex.split(compiler), cwd=tmp_path, check=True, timeout=100)
    with Driver([str(tmp_path / "testee")]) as testee:
        greeting = testee.greet({"op": "hello"})
    assert isinstance(greeting, dict)
    assert greeting["name"] == "libkvproto"


def test_init_testee_gives_all_files_or_none(tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "kvproto").mkdir()
    (tmp_path / "kvproto/plan.rs").write_text("mine")
    assert main(["init-testee", "--lang", "rust", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip().endswith("plan.rs is there already")
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["mine"]


def test_init_testee_says_how_to_compile_it(tmp_path: Path, capsys: Said) -> None:
    """The crate and the testee, by rustc alone."""
    if shutil.which("rustc") is None:
        pytest.skip("no rustc")
    assert main(["init-testee", "--lang", "rust", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    steps = said[said.index("cd ") :].rpartition(" && ")[0].replace(" -O", "")
    subprocess.run(["sh", "-e", "-c", steps], check=True, timeout=100)
    assert main(["smoke", "--", str(tmp_path / "testee")]) == 0


def test_a_live_engine_is_asked_by_the_same_command(tmp_path: Path, capsys: Said) -> None:
    """Without an adapter its scenarios are left out, which is never conformance."""
    asked = ["run", "--role", "source", "--level", "L3", "--suite", "session", "--only", "LIVE-101"]
    testee = ["--", sys.executable, str(TESTEES / "minimal.py")]
    report = tmp_path / "report.json"
    live = ["--live-source", f"{sys.executable} {TESTEES / 'live_source.py'}", "--report", str(report)]
    assert main([*asked, *live, *testee]) == 3
    assert f"incomplete: kvproto {spec()} · source · L3 · 1/1" in capsys.readouterr().out
    (row,) = [row for row in json.loads(report.read_text())["results"] if row["suite"] == "session"]
    assert (row["id"], row["status"]) == ("LIVE-101", "pass")
    capsys.readouterr()
    assert main(["replay", str(report), "LIVE-101"]) == 0
    said = capsys.readouterr().out
    assert "pass LIVE-101 (pass in the report)" in said
    assert "good  every byte" in said
    assert "engine  Registered" in said
    assert main([*asked, *testee]) == 2
    gone = ["--live-source", "/no/such/adapter", "--report", str(report)]
    assert main([*asked, *gone, *testee]) == 1
    (row,) = [row for row in json.loads(report.read_text())["results"] if row["suite"] == "session"]
    assert row["status"] == "error"
