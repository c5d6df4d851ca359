"""A source and a sink in C on libkvproto, beside each other and the reference engine and under the live driver, with sanitizers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproto_conformance.codec import read_struct
from kvproto_conformance.live import list_scenarios, moving, run
from kvproto_conformance.live.engine import Engine
from kvproto_conformance.live.scenario import Prompt, handoff, rows_of, shares
from tests.cases import sampled
from tools import c_programs
from tools.prove import source_c

TESTEES = Path(__file__).parents[2] / "conformance/testees"
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-g", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=all"]  # fmt: skip
CLAIMED = {"source": {"DEALS", "INLINE", "RESUME", "SECTIONS", "VERIFY"}, "sink": {"DEALS", "INLINE", "SECTIONS"}}
"""Extensions by which they are played with."""
APART = """import json, subprocess, sys

with subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if asked.get("transport") == "SHM":
            answer = json.dumps({"seq": asked["seq"], "unsupported": "SHM"}).encode() + b"\\n"
        else:
            engine.stdin.write(line)
            engine.stdin.flush()
            answer = engine.stdout.readline()
            if not answer:
                break
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
"""
"""An adapter that has no shared memory, asks the one that it is given all else, and ends with it."""
INCLUDES = ("/usr/include", "/usr/local/include")


def compiled(role: str, folder: Path) -> str:
    if shutil.which("gcc") is None or not any(Path(each, "zmq.h").exists() for each in INCLUDES):
        pytest.skip("no gcc, or no libzmq3-dev")
    subprocess.run(c_programs.command(role, folder / role, FLAGS), check=True, timeout=100)
    return str(folder / role)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The programs, by role."""
    folder = tmp_path_factory.mktemp("engines")
    return {role: compiled(role, folder) for role in ("source", "sink")}


@pytest.fixture
def address() -> Iterator[str]:
    """Of a socket in a directory that nobody else enters; its path is short."""
    with tempfile.TemporaryDirectory(prefix="kvproto-") as folder:
        yield f"ipc://{folder}/engine"


@pytest.mark.parametrize(
    ("in_c", "world", "transport"),
    sampled(["source", "sink", "source and sink"], ["gqa", "mla", "hybrid"], ["SHM", "INLINE"], every=3),
)
def test_they_hand_over(engines: dict[str, str], address: str, in_c: str, world: str, transport: str) -> None:
    """Every byte as the sink's attention reads it; three requests, one of which begins behind a prefix."""
    source, decode = (
        Engine([engines[role]] if role in in_c else [sys.executable, str(TESTEES / f"live_{role}.py")])
        for role in ("source", "sink")
    )
    try:
        opened = {"world": world, "transport": transport}
        geometry = read_struct("Geometry", bytes.fromhex(
            source.ask("open", role="source", name="prefill", listen=address, **opened)["geometry"]
        ))  # fmt: skip
        decode.ask("open", role="sink", name="decode", **opened)
        decode.ask("connect", engine="prefill", address=address)
        for number, (tokens, first) in enumerate([(45, 0), (17, 0), (61, 32 if world == "gqa" else 0)]):
            key = f"{number:032x}"
            prompt = Prompt(key[20:], key, [100 * number + i for i in range(tokens)], {})
            asked = {"id": prompt.id, "key": key, "engine": "prefill", "deadline": 60_000, "tokens": prompt.tokens}
            decode.ask("fetch", first=first, **asked)
            source.ask("request", **asked)
            held = {}
            for group, share in shares(geometry):
                rows = rows_of(group, tokens)
                for layer in map(int, share["layers"]):
                    for part in group["parts"]:
                        width = int(part["lanes"]) * int(part["lane_bytes"])
                        data = moving.label(key, int(group["model"]), layer, part["name"], rows, 0, width)
                        at = {"group": group["name"], "layer": layer, "part": part["name"]}
                        source.ask("fill", id=prompt.id, first=rows.start, data=data.tobytes().hex(), **at)
                        skipped = max(first, rows.start) if group["kind"] == "PAGE" else rows.start
                        held[str(at)] = at, skipped, data[skipped - rows.start :].tobytes().hex(), rows.stop - skipped
            stated = handoff(geometry, prompt)
            source.ask("finish", id=prompt.id, handoff=stated, finished=False)
            found = decode.ask("wait", id=prompt.id, seconds=20.0)
            assert (found["state"], found["handoff"]) == ("arrived", stated)
            for at, start, data, count in held.values():
                assert decode.ask("read", id=prompt.id, first=start, count=count, **at)["data"] == data, at
            assert source.ask("wait", id=prompt.id, seconds=20.0)["state"] == "freed"
            decode.ask("release", id=prompt.id)
    finally:
        decode.stop()
        source.stop()


@pytest.mark.parametrize("role", ["source", "sink"])
def test_they_end_without_a_leak(engines: dict[str, str], address: str, role: str) -> None:
    asked = {"op": "open", "world": "mla", "transport": "SHM", "name": "d", "listen": address}
    lines = json.dumps({"seq": 1} | asked) + '\n{"seq": 2, "op": "stop"}\n'
    ended = subprocess.run([engines[role]], input=lines.encode(), capture_output=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("level", ["L3", "L4"])
@pytest.mark.parametrize("role", ["source", "sink"])
def test_they_pass_the_live_driver(engines: dict[str, str], role: str, level: str) -> None:
    """All scenarios of a role but the slow ones, which `make conformance` runs too, and what the engine lacks."""
    chosen = [
        each
        for each in list_scenarios(role)
        if each.level == level and not each.slow and {*each.extensions} <= CLAIMED[role]
    ]
    assert len(chosen) > 20
    found = {each.id: (each.status, each.text) for each in run([engines[role]], chosen)}
    assert found == {each.id: ("pass", "") for each in chosen}


def test_a_bug_of_the_source_is_noticed() -> None:
    """Each of the table is at its place, and one that is planted makes a scenario of its clause fail."""
    if shutil.which("gcc") is None or not any(Path(each, "zmq.h").exists() for each in INCLUDES):
        pytest.skip("no gcc, or no libzmq3-dev")
    (bug,) = (each for each in source_c.load() if each.name == "a byte too many in Done")
    found, text = source_c.noticed(bug, "LIVE-101")
    assert found == "LIVE-101"
    assert text.startswith("bytes: ")


def test_a_source_without_shared_memory_passes_what_is_over_inline(engines: dict[str, str], tmp_path: Path) -> None:
    """Scenarios of memory that others write are not asked."""
    program = tmp_path / "source.py"
    program.write_text(APART)
    ids = ("LIVE-101", "LIVE-121", "LIVE-519", "LIVE-520", "LIVE-525", "LIVE-529")
    chosen = [each for each in list_scenarios("source") if each.id in ids]
    found = list(run([sys.executable, str(program), engines["source"]], chosen))
    unasked = {each.id for each in found if each.status == "unasked"}
    assert unasked == {"LIVE-519", "LIVE-520", "LIVE-525", "LIVE-529"}
    assert {each.id for each in found if each.status == "pass"} == {*ids} - unasked
